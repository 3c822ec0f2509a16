//! Log lines for programs: one flat JSON object each.

use std::error::Error;
use std::fmt;
use std::io::Write as _;

use serde::Serializer as _;
use serde_json::Value;
use tracing::field::{Field, Visit};
use tracing::span::{Attributes, Id, Record};
use tracing::{Event, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::fmt::MakeWriter;
use tracing_subscriber::fmt::format::Writer;
use tracing_subscriber::fmt::time::{FormatTime as _, SystemTime};
use tracing_subscriber::layer::Context;
use tracing_subscriber::registry::{LookupSpan, Scope};

/// What every line has, in this order: when (RFC 3339, UTC), how grave, what, in which module, and the spans around it
/// from the outside in, joined by colons. A line outside of every span has no `span`.
const OWN: [&str; 5] = ["timestamp", "level", "message", "target", "span"];

/// Writes each event as one JSON object on one line.
///
/// Fields are on the top level, those of the event and those of every span around it, so that `claim.uid` is found at the
/// same place on every line about a claim. Of one name the innermost counts. A field that has the name of one of the
/// line's own (`timestamp`, `level`, `message`, `target`, `span`) is called `field.level` and so on. Errors are told with
/// their causes in one line.
#[derive(Debug)]
pub struct JsonLines<W> {
    writer: W,
}

impl<W> JsonLines<W> {
    /// Writes to what `writer` makes.
    pub fn new(writer: W) -> JsonLines<W> {
        JsonLines { writer }
    }
}

/// The fields of a span or of an event, and kept in the span's extensions.
#[derive(Default)]
struct Fields {
    message: String,
    others: Vec<(String, Value)>,
}

impl Fields {
    fn set(&mut self, name: &str, value: Value) {
        let name = if OWN.contains(&name) { format!("field.{name}") } else { name.to_owned() };
        match self.others.iter_mut().find(|(known, _)| *known == name) {
            Some((_, known)) => *known = value,
            None => self.others.push((name, value)),
        }
    }

    fn set_text(&mut self, field: &Field, text: String) {
        if field.name() == "message" { self.message = text } else { self.set(field.name(), text.into()) }
    }
}

impl Visit for Fields {
    fn record_f64(&mut self, field: &Field, value: f64) {
        self.set(field.name(), value.into());
    }

    fn record_i64(&mut self, field: &Field, value: i64) {
        self.set(field.name(), value.into());
    }

    fn record_u64(&mut self, field: &Field, value: u64) {
        self.set(field.name(), value.into());
    }

    fn record_bool(&mut self, field: &Field, value: bool) {
        self.set(field.name(), value.into());
    }

    fn record_str(&mut self, field: &Field, value: &str) {
        self.set_text(field, value.to_owned());
    }

    fn record_error(&mut self, field: &Field, value: &(dyn Error + 'static)) {
        self.set_text(field, crate::OneLine(value).to_string());
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.set_text(field, format!("{value:?}"));
    }
}

impl<S, W> Layer<S> for JsonLines<W>
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    W: for<'a> MakeWriter<'a> + 'static,
{
    fn on_new_span(&self, attributes: &Attributes<'_>, id: &Id, context: Context<'_, S>) {
        let mut fields = Fields::default();
        attributes.record(&mut fields);
        if let Some(span) = context.span(id) {
            span.extensions_mut().insert(fields);
        }
    }

    fn on_record(&self, id: &Id, values: &Record<'_>, context: Context<'_, S>) {
        if let Some(span) = context.span(id)
            && let Some(fields) = span.extensions_mut().get_mut::<Fields>()
        {
            values.record(fields);
        }
    }

    fn on_event(&self, event: &Event<'_>, context: Context<'_, S>) {
        let mut fields = Fields::default();
        let mut spans: Vec<&str> = Vec::new();
        for span in context.event_scope(event).into_iter().flat_map(Scope::from_root) {
            spans.push(span.name());
            if let Some(of_span) = span.extensions().get::<Fields>() {
                of_span.others.iter().for_each(|(name, value)| fields.set(name, value.clone()));
            }
        }
        event.record(&mut fields);

        let mut timestamp = String::new();
        // A string takes everything.
        let _ = SystemTime.format_time(&mut Writer::new(&mut timestamp));
        let metadata = event.metadata();
        let (level, span) = (metadata.level().as_str(), spans.join(":"));
        let own = [timestamp.as_str(), level, &fields.message, metadata.target(), &span].map(Value::from);
        let own = OWN.into_iter().zip(&own).filter(|(name, value)| *name != "span" || *value != "");
        let others = fields.others.iter().map(|(name, value)| (name.as_str(), value));
        let mut line = Vec::new();
        // Neither do values of this kind fail to be written into memory, nor is there anywhere to say that they did.
        if serde_json::Serializer::new(&mut line).collect_map(own.chain(others)).is_ok() {
            line.push(b'\n');
            let _ = self.writer.make_writer_for(metadata).write_all(&line);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::sync::{Arc, Mutex};

    use serde_json::json;
    use tracing::{debug, info, info_span, warn};
    use tracing_subscriber::layer::SubscriberExt as _;

    use super::*;

    #[derive(Clone, Default)]
    struct Buffer(Arc<Mutex<Vec<u8>>>);

    impl io::Write for Buffer {
        fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
            self.0.lock().unwrap().write(bytes)
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    fn logged(log: impl FnOnce()) -> Vec<String> {
        let buffer = Buffer::default();
        let make = buffer.clone();
        let lines = JsonLines::new(move || make.clone());
        tracing::subscriber::with_default(tracing_subscriber::registry().with(lines), log);
        let text = String::from_utf8(buffer.0.lock().unwrap().clone()).unwrap();
        text.lines().map(str::to_owned).collect()
    }

    fn parsed(line: &str) -> Value {
        let mut line: Value = serde_json::from_str(line).unwrap();
        let timestamp = line.as_object_mut().unwrap().remove("timestamp").unwrap();
        assert!(timestamp.as_str().unwrap().ends_with('Z'), "{timestamp}");
        line
    }

    #[test]
    fn fields_of_all_spans_are_on_the_top_level() {
        let lines = logged(|| {
            let claim = info_span!("claim", claim.uid = "1-2", claim.name = "mine", step = tracing::field::Empty);
            let _claim = claim.enter();
            claim.record("step", "carve");
            let _device = info_span!("device", gpu = %"gpu-3b-00-0", claim.name = "inner").entered();
            info!(ms = 12_u64, ratio = 0.5, whole = false, below = -1, "prepared {}", "it");
        });
        let [line] = &lines[..] else { panic!("{lines:?}") };
        assert!(line.starts_with(r#"{"timestamp":""#), "people read them too: {line}");
        let wanted = json!({
            "level": "INFO",
            "message": "prepared it",
            "target": module_path!(),
            "span": "claim:device",
            "claim.uid": "1-2",
            "claim.name": "inner",
            "step": "carve",
            "gpu": "gpu-3b-00-0",
            "ms": 12,
            "ratio": 0.5,
            "whole": false,
            "below": -1,
        });
        assert_eq!(parsed(line), wanted);
    }

    #[test]
    fn no_field_hides_what_every_line_has() {
        let lines = logged(|| {
            let _span = info_span!("outer", message = "of the span", level = 7).entered();
            warn!(target: "elsewhere", span = "mine", level = 8, "of the event\nin two lines");
            debug!("last");
        });
        let [line, last] = &lines[..] else { panic!("{lines:?}") };
        let wanted = json!({
            "level": "WARN", "message": "of the event\nin two lines", "target": "elsewhere", "span": "outer",
            "field.span": "mine", "field.level": 8,
        });
        assert_eq!(parsed(line), wanted);
        assert_eq!(parsed(last)["message"], "last");
    }

    #[test]
    fn errors_tell_their_causes() {
        #[derive(Debug, thiserror::Error)]
        #[error("cannot write")]
        struct Failed(#[source] io::Error);

        let lines = logged(|| {
            let failed = Failed(io::Error::other("disk full"));
            warn!(error = &failed as &dyn Error, "no luck");
        });
        assert_eq!(parsed(&lines[0])["error"], "cannot write: disk full");
    }
}
