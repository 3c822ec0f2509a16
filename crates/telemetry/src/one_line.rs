//! Errors as one line of text.

use std::error::Error;
use std::fmt;

/// An error and those behind it in one line, for readers that show one line of it.
#[derive(Clone, Copy, Debug)]
pub struct OneLine<'a>(pub &'a dyn Error);

impl fmt::Display for OneLine<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut written = self.0.to_string();
        let mut cause = self.0.source();
        while let Some(error) = cause {
            let text = error.to_string();
            // Some libraries say the cause within their own message.
            if !written.contains(&text) {
                written.push_str(": ");
                written.push_str(&text);
            }
            cause = error.source();
        }
        f.write_str(&written.replace('\n', " "))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(Debug, thiserror::Error)]
    enum Nested {
        #[error("the house is on fire:\npour water on it")]
        Cause,
        #[error("cannot enter")]
        Silent(#[source] Box<Nested>),
        #[error("cannot sleep: {0}")]
        Telling(#[source] Box<Nested>),
    }

    #[test]
    fn every_cause_is_told_once() {
        let fire = "the house is on fire: pour water on it";
        assert_eq!(OneLine(&Nested::Cause).to_string(), fire);
        let silent = || Box::new(Nested::Silent(Box::new(Nested::Cause)));
        assert_eq!(OneLine(&*silent()).to_string(), format!("cannot enter: {fire}"));
        assert_eq!(OneLine(&Nested::Telling(silent())).to_string(), format!("cannot sleep: cannot enter: {fire}"));
    }
}
