//! Diagnostics: `tracing` events, as lines on standard error. Results go to standard output and are none of them.
//!
//! Events name what watched processes chose: processes, libraries, communicators. So each event is one line, and what a terminal would
//! obey in it is escaped.
//!
//! Standard error may take nothing: a terminal that was stopped, a full pipe. So a thread of its own writes, and nobody waits for it but
//! [`flush`]. Lines that do not fit into its queue are counted.
//!
//! `RINGSIGHT_LOG` is a level (`error`, `warn`, `info`, `debug`, `trace`, `off`) or a list such as `info,ringsight_probes=debug`;
//! unset, `info`, and `warn` with `--quiet`. `RINGSIGHT_LOG_FORMAT=json` makes each event a line of JSON.

use std::{
    fmt,
    io::{self, Write as _},
    sync::{
        OnceLock,
        atomic::{AtomicU64, Ordering},
        mpsc::{self, RecvTimeoutError, SyncSender, TrySendError},
    },
    thread,
    time::{Duration, Instant},
};

use ringsight_output::{Printable, json, lines};
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
    let layer = tracing_subscriber::fmt::layer()
        // Standard error may be closed: that is no reason to end an observation.
        .log_internal_errors(false);
    let lines = match variable("RINGSIGHT_LOG_FORMAT").as_deref() {
        None | Some("text") => layer
            .with_writer(|| EventWriter(people))
            .event_format(ForPeople)
            .boxed(),
        Some("json") => layer
            .with_writer(|| EventWriter(machines))
            .json()
            .flatten_event(true)
            .boxed(),
        Some(other) => return Err(format!("RINGSIGHT_LOG_FORMAT ({other}) is neither text nor json")),
    };
    tracing_subscriber::registry()
        .with(lines.with_filter(events))
        .try_init()
        .map_err(|error| error.to_string())
}

/// An event as one line for people.
fn people(event: &str) -> String {
    format!("{}\n", Printable::from(event.trim_end_matches('\n')))
}

/// An event as one line of JSON.
fn machines(event: &str) -> String {
    json(event).into_owned()
}

/// Takes a whole event at each write.
struct EventWriter(fn(&str) -> String);

impl io::Write for EventWriter {
    fn write(&mut self, event: &[u8]) -> io::Result<usize> {
        say_raw(self.0(&String::from_utf8_lossy(event)));
        Ok(event.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Writes text of several lines to standard error, after the events before it.
pub(super) fn say(text: &str) {
    say_raw(lines(text).into_owned());
}

/// Draws the status line, unless standard error takes nothing.
pub(super) fn draw_status(text: &str) {
    if stderr().waiting.load(Ordering::Acquire) == 0 {
        say_raw(format!("\r\x1b[K{}", Printable::from(text)));
    }
}

/// Removes the status line.
pub(super) fn clear_status() {
    say_raw("\r\x1b[K".to_owned());
}

/// Waits until everything is written; once `is_asked_to_end` says so, [`AFTER_SIGNAL`] at most.
pub(super) fn flush(is_asked_to_end: impl Fn() -> bool) {
    let stderr = stderr();
    let begun = Instant::now();
    let mut asked = None;
    let (reached, end) = mpsc::channel();
    let mut end_mark = Some(Piece::End(reached));
    loop {
        // The queue may be full.
        if let Some(mark) = end_mark.take() {
            match stderr.queue.try_send(mark) {
                Err(TrySendError::Full(mark)) => end_mark = Some(mark),
                Ok(()) | Err(TrySendError::Disconnected(_)) => {}
            }
        }
        match end.recv_timeout(Duration::from_millis(10)) {
            Err(RecvTimeoutError::Timeout) => {}
            Ok(()) | Err(RecvTimeoutError::Disconnected) => return,
        }
        if asked.is_none() && is_asked_to_end() {
            asked = Some(begun.elapsed());
        }
        if asked.is_some_and(|asked| begun.elapsed() >= asked + AFTER_SIGNAL) {
            return;
        }
    }
}

/// How long standard error is waited for after a signal.
const AFTER_SIGNAL: Duration = Duration::from_millis(150);
/// Lines, or texts of several, that wait for standard error.
const QUEUE: usize = 1024;

/// The thread that writes to standard error, and its queue.
struct Stderr {
    queue: SyncSender<Piece>,
    /// Pieces of text that are not written yet.
    waiting: AtomicU64,
    /// Pieces that did not fit.
    dropped: AtomicU64,
}

enum Piece {
    Text(String),
    /// Tells that everything before it is written.
    End(mpsc::Sender<()>),
}

fn stderr() -> &'static Stderr {
    static STDERR: OnceLock<Stderr> = OnceLock::new();
    STDERR.get_or_init(|| {
        let (queue, pieces) = mpsc::sync_channel(QUEUE);
        // Without a thread the queue is disconnected, and who writes to it writes to standard error itself.
        let _ = thread::Builder::new()
            .name("ringsight-log".to_owned())
            .spawn(move || {
                for piece in pieces {
                    write(piece);
                }
            });
        Stderr {
            queue,
            waiting: AtomicU64::new(0),
            dropped: AtomicU64::new(0),
        }
    })
}

fn write(piece: Piece) {
    let stderr = stderr();
    match piece {
        Piece::Text(text) => {
            // It may be closed: there is nobody to tell.
            let _ = io::stderr().write_all(text.as_bytes());
            let dropped = stderr.dropped.swap(0, Ordering::Relaxed);
            if dropped > 0 {
                let _ = writeln!(
                    io::stderr(),
                    "ringsight: {dropped} lines are missing here: standard error took nothing"
                );
            }
            stderr.waiting.fetch_sub(1, Ordering::Release);
        }
        Piece::End(reached) => {
            // Who asked may have given up.
            let _ = reached.send(());
        }
    }
}

fn say_raw(text: String) {
    let stderr = stderr();
    stderr.waiting.fetch_add(1, Ordering::Relaxed);
    match stderr.queue.try_send(Piece::Text(text)) {
        Ok(()) => {}
        Err(TrySendError::Full(_)) => {
            stderr.waiting.fetch_sub(1, Ordering::Relaxed);
            stderr.dropped.fetch_add(1, Ordering::Relaxed);
        }
        Err(TrySendError::Disconnected(piece)) => write(piece),
    }
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
