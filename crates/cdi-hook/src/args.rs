//! The arguments. Pure.

use std::path::PathBuf;

/// What to do.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Command {
    /// Folders of the container, as it sees them, whose libraries its dynamic linker shall find.
    UpdateLdcache(Vec<PathBuf>),
    /// Links of the container.
    CreateSymlinks(Vec<Link>),
}

/// A symbolic link.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Link {
    /// What it says.
    pub(crate) target: String,
    /// Where it is, as the container sees it.
    pub(crate) path: PathBuf,
}

/// Arguments that make no sense. They come from a CDI file, so a person has no hand in it.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum ArgsError {
    #[error("there is no command `{0}`; there are update-ldcache and create-symlinks")]
    Command(String),
    #[error("`{argument}` is not an argument of {command}; it takes {takes}")]
    Argument { command: &'static str, argument: String, takes: &'static str },
    #[error("`{0}` is not an absolute path of plain names")]
    Path(String),
    #[error("`{0}` is not of the form TARGET::PATH")]
    Link(String),
}

/// Reads the arguments after the program's name.
pub(crate) fn parse(mut args: impl Iterator<Item = String>) -> Result<Command, ArgsError> {
    match args.next().unwrap_or_default().as_str() {
        "update-ldcache" => {
            let folders = values(args, "update-ldcache", "--folder", "--folder DIR, any number of times")?;
            Ok(Command::UpdateLdcache(folders.into_iter().map(path).collect::<Result<_, _>>()?))
        }
        "create-symlinks" => {
            let links = values(args, "create-symlinks", "--link", "--link TARGET::PATH, any number of times")?;
            Ok(Command::CreateSymlinks(links.into_iter().map(link).collect::<Result<_, _>>()?))
        }
        other => Err(ArgsError::Command(other.to_owned())),
    }
}

/// The values of a flag that may come any number of times and is the only one.
fn values(
    mut args: impl Iterator<Item = String>,
    command: &'static str,
    flag: &str,
    takes: &'static str,
) -> Result<Vec<String>, ArgsError> {
    let wrong = |argument| ArgsError::Argument { command, argument, takes };
    let mut values = Vec::new();
    while let Some(argument) = args.next() {
        if argument != flag {
            return Err(wrong(argument));
        }
        values.push(args.next().ok_or_else(|| wrong(argument))?);
    }
    Ok(values)
}

fn link(text: String) -> Result<Link, ArgsError> {
    match text.split_once("::") {
        Some((target, at)) if !target.is_empty() => Ok(Link { target: target.to_owned(), path: path(at.to_owned())? }),
        _ => Err(ArgsError::Link(text)),
    }
}

fn path(text: String) -> Result<PathBuf, ArgsError> {
    let is_plain = |rest: &str| rest.split('/').all(|name| !["", ".", ".."].contains(&name));
    if text.strip_prefix('/').is_some_and(is_plain) { Ok(PathBuf::from(text)) } else { Err(ArgsError::Path(text)) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parsed(args: &[&str]) -> Result<Command, ArgsError> {
        parse(args.iter().map(ToString::to_string))
    }

    #[test]
    fn both_commands_take_any_number() {
        let folders = ["/usr/lib64", "/usr/lib64/vdpau"];
        assert_eq!(
            parsed(&["update-ldcache", "--folder", folders[0], "--folder", folders[1]]).unwrap(),
            Command::UpdateLdcache(folders.map(PathBuf::from).into())
        );
        let link = |target: &str, path: &str| Link { target: target.to_owned(), path: path.into() };
        assert_eq!(
            parsed(&["create-symlinks", "--link", "../card1::/dev/dri/by-path/pci-0000:3b:00.0-card"]).unwrap(),
            Command::CreateSymlinks(vec![link("../card1", "/dev/dri/by-path/pci-0000:3b:00.0-card")])
        );
        assert_eq!(parsed(&["create-symlinks"]).unwrap(), Command::CreateSymlinks(Vec::new()));
    }

    #[test]
    fn what_is_wrong_is_named() {
        for (args, part) in [
            (&[][..], "no command ``"),
            (&["chmod"], "no command `chmod`"),
            (&["update-ldcache", "--link", "a::/b"], "`--link` is not an argument of update-ldcache"),
            (&["update-ldcache", "--folder"], "`--folder` is not"),
            (&["update-ldcache", "--folder", "usr/lib"], "`usr/lib` is not an absolute path"),
            (
                &["update-ldcache", "--folder", "/usr/../../etc"],
                "`/usr/../../etc` is not an absolute path of plain names",
            ),
            (&["update-ldcache", "--folder", "/"], "`/` is not"),
            (&["create-symlinks", "--link", "/a"], "`/a` is not of the form"),
            (&["create-symlinks", "--link", "::/a"], "`::/a` is not of the form"),
            (&["create-symlinks", "--link", "a::b"], "`b` is not an absolute path"),
        ] {
            let error = parsed(args).unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
