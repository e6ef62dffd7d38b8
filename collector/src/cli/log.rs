//! Diagnostics: `tracing` events, as lines on standard error. Results go to standard output and are none of them.
//!
//! `RINGSIGHT_LOG` is a level (`error`, `warn`, `info`, `debug`, `trace`, `off`) or a list such as `info,ringsight_probes=debug`;
//! unset, `info`, and `warn` with `--quiet`. `RINGSIGHT_LOG_FORMAT=json` makes each event a line of JSON.

use std::fmt;

use tracing::{Event, Level, Subscriber, field::Field};
use tracing_subscriber::{
    Layer as _,
    field::Visit,
    filter::Targets,
    fmt::{FmtContext, FormatEvent, FormatFields, format::Writer},
    layer::SubscriberExt as _,
    registry::LookupSpan,
    util::SubscriberInitExt as _,
};

/// Sends the events of this process to standard error from now on.
///
/// # Errors
/// A variable that cannot be used.
pub(super) fn init(quiet: bool) -> Result<(), String> {
    let variable = |name| std::env::var(name).ok().filter(|value| !value.is_empty());
    let level = if quiet { Level::WARN } else { Level::INFO };
    let events = match variable("RINGSIGHT_LOG") {
        None => Targets::new().with_default(level),
        Some(text) => text
            .parse()
            .map_err(|error| format!("RINGSIGHT_LOG ({text}): {error}"))?,
    };
    let lines = tracing_subscriber::fmt::layer()
        .with_writer(std::io::stderr)
        // Standard error may be closed: that is no reason to end an observation.
        .log_internal_errors(false);
    let lines = match variable("RINGSIGHT_LOG_FORMAT").as_deref() {
        None | Some("text") => lines.event_format(ForPeople).boxed(),
        Some("json") => lines.json().flatten_event(true).boxed(),
        Some(other) => return Err(format!("RINGSIGHT_LOG_FORMAT ({other}) is neither text nor json")),
    };
    tracing_subscriber::registry()
        .with(lines.with_filter(events))
        .try_init()
        .map_err(|error| error.to_string())
}

/// `ringsight: message`. What is only for developers says in front where it comes from, and has its fields behind it.
struct ForPeople;

impl<S, N> FormatEvent<S, N> for ForPeople
where
    S: Subscriber + for<'a> LookupSpan<'a>,
    N: for<'a> FormatFields<'a> + 'static,
{
    fn format_event(
        &self,
        _: &FmtContext<'_, S, N>,
        mut writer: Writer<'_>,
        event: &Event<'_>,
    ) -> fmt::Result {
        let (level, target) = (*event.metadata().level(), event.metadata().target());
        let mut text = Text::default();
        event.record(&mut text);
        match level {
            Level::ERROR | Level::WARN => writeln!(writer, "ringsight: {}", text.message),
            Level::INFO => writeln!(writer, "{}", text.message),
            _ => writeln!(
                writer,
                "ringsight: {level} {target}: {}{}",
                text.message, text.fields
            ),
        }
    }
}

/// What an event says.
#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Visit for Text {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        if field.name() == "message" {
            self.message = format!("{value:?}");
        } else {
            self.fields += &format!(" {field}={value:?}");
        }
    }
}
