//! Where telemetry goes, by what the command line says.

use std::{
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use clap::ValueEnum;
use ringsight_exporters::{
    ExportStats, Exporter,
    chrome::ChromeExporter,
    html::HtmlExporter,
    jsonl::JsonlExporter,
    model::{Consequence, Signal, Tally},
    otlp,
};

/// OTLP's transports.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(crate) enum Protocol {
    /// gRPC over HTTP/2
    Grpc,
    /// Protobuf over HTTP/1.1
    #[value(name = "http/protobuf")]
    HttpProtobuf,
}

/// What a file's name says about its format.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Format {
    /// OTLP, one JSON object a line.
    Jsonl,
    /// Chrome's trace events, which Perfetto reads.
    Chrome,
    /// One page.
    Html,
}

/// The format that a file's extension names.
pub(crate) fn format_of(path: &Path) -> Result<Format, String> {
    match path.extension().and_then(|extension| extension.to_str()) {
        Some("jsonl") => Ok(Format::Jsonl),
        Some("json") => Ok(Format::Chrome),
        Some("html") => Ok(Format::Html),
        _ => Err(format!(
            "{}: the file's extension names its format: .jsonl (OTLP JSON lines), .json (Chrome trace, for Perfetto) \
             or .html (one page)",
            path.display()
        )),
    }
}

/// An output file as clap parses it.
pub(crate) fn parse_output(text: &str) -> Result<PathBuf, String> {
    let path = PathBuf::from(text);
    format_of(&path).map(|_| path)
}

/// Finds what would keep the files from being opened, and refuses to overwrite: only lines can be continued, the other
/// formats would replace what is there.
pub(crate) fn check(paths: &[PathBuf], force: bool) -> Result<(), String> {
    for path in paths {
        // Devices and pipes hold nothing that could be lost.
        if path.is_file() && !force && format_of(path)? != Format::Jsonl {
            return Err(format!(
                "{} exists: name another file, or replace it with --force (a .jsonl file is continued)",
                path.display()
            ));
        }
        check_place(path)?;
    }
    Ok(())
}

/// Finds what would keep a file from being written, and changes nothing.
pub(crate) fn check_place(path: &Path) -> Result<(), String> {
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    let problem = if path.exists() {
        std::fs::OpenOptions::new().append(true).open(path).err()
    } else {
        std::fs::read_dir(folder).err()
    };
    problem.map_or(Ok(()), |problem| {
        Err(format!("cannot write {}: {problem}", path.display()))
    })
}

/// Opens an output file: lines are continued unless `force`, the other formats begun.
pub(crate) fn open(path: &Path, force: bool) -> Result<Box<dyn Exporter>, String> {
    Ok(match format_of(path)? {
        Format::Jsonl if force => Box::new(JsonlExporter::create(path)?),
        Format::Jsonl => Box::new(JsonlExporter::append(path)?),
        Format::Chrome => Box::new(ChromeExporter::create(path)?),
        Format::Html => Box::new(HtmlExporter::create(path, "ringsight")?),
    })
}

/// After this time the same trouble is worth telling again. A backend that fails and recovers by turns fills no log.
const TROUBLE_AGAIN: Duration = Duration::from_secs(60);

/// What is new about an exporter, as far as its statistics tell.
#[derive(Debug, Default)]
pub(crate) struct Health {
    signals: [SignalHealth; Signal::COUNT],
}

/// One signal, as it was at the last look.
#[derive(Debug, Default)]
struct SignalHealth {
    tally: Tally,
    /// The backend does not take it, which was told.
    unsupported: bool,
    /// A trouble was told, and no end of it.
    failing: bool,
    /// When each kind of trouble was told last.
    told: Vec<(Trouble, Instant)>,
}

/// What happens to items that are not delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trouble {
    Kept,
    Halved,
    Dropped(&'static str),
}

impl Health {
    /// That the backend does not take a signal: worth telling once.
    pub(crate) fn refusals(&mut self, stats: &ExportStats) -> Vec<String> {
        let mut news = Vec::new();
        for (signal, tally) in stats.by_signal() {
            if let Some(said) = &tally.unsupported
                && !std::mem::replace(&mut self.signals[signal as usize].unsupported, true)
            {
                news.push(format!(
                    "takes no {} ({said}): {} are dropped, everything else goes on",
                    signal.name(),
                    signal.items()
                ));
            }
        }
        news
    }

    /// What is worth telling since the last look: which deliveries fail and what becomes of the items, or that they work again.
    pub(crate) fn trouble(&mut self, stats: &ExportStats, now: Instant) -> Vec<String> {
        let mut news = Vec::new();
        for (signal, tally) in stats.by_signal() {
            let health = &mut self.signals[signal as usize];
            let found = health.look(signal, tally, stats.last_error.as_deref());
            let healthy = found.is_empty() && tally.delivered > health.tally.delivered;
            for (trouble, text) in found {
                if health.is_news(trouble, now) {
                    health.failing = true;
                    news.push(text);
                }
            }
            if healthy && std::mem::take(&mut health.failing) {
                news.push(format!("{} are delivered again", signal.name()));
            }
            health.tally = tally.clone();
        }
        news
    }
}

impl SignalHealth {
    /// What went wrong since the last look.
    fn look(&self, signal: Signal, tally: &Tally, last_error: Option<&str>) -> Vec<(Trouble, String)> {
        let (name, items) = (signal.name(), signal.items());
        let failure = tally
            .last_failure
            .as_ref()
            .filter(|_| tally.failures > self.tally.failures);
        let mut found = Vec::new();
        if let Some(failure) = failure {
            let count = failure.items;
            let kept = match failure.consequence {
                Consequence::Kept(wait) => Some((
                    Trouble::Kept,
                    format!("kept and tried again in {}", seconds(wait)),
                )),
                Consequence::Halved => Some((Trouble::Halved, "sent again in two requests".to_owned())),
                Consequence::Dropped(_) => None,
            };
            found.extend(kept.map(|(trouble, what)| {
                let error = &failure.error;
                (
                    trouble,
                    format!("{name} are not delivered ({error}): {count} {items} are {what}"),
                )
            }));
        }
        for (reason, count) in &tally.dropped {
            let dropped = count - self.tally.dropped_as(reason);
            if dropped == 0 || *reason == Tally::UNSUPPORTED {
                continue;
            }
            let said = failure.filter(|failure| failure.consequence == Consequence::Dropped(reason));
            let why = match said {
                Some(failure) => failure.error.as_str(),
                None if *reason == Tally::QUEUE_FULL => "there is no room for more",
                None => last_error.unwrap_or("no reason given"),
            };
            let text = format!("{name} are not delivered ({why}): {dropped} {items} were dropped ({reason})");
            found.push((Trouble::Dropped(reason), text));
        }
        found
    }

    /// Whether `trouble` was not told lately; notes that it is told now.
    fn is_news(&mut self, trouble: Trouble, now: Instant) -> bool {
        match self.told.iter_mut().find(|(known, _)| *known == trouble) {
            Some((_, when)) if now.duration_since(*when) < TROUBLE_AGAIN => return false,
            Some((_, when)) => *when = now,
            None => self.told.push((trouble, now)),
        }
        true
    }
}

/// A duration for people.
fn seconds(duration: Duration) -> String {
    match duration.as_secs_f64() {
        few if few < 10.0 => format!("{few:.1} s"),
        many => format!("{many:.0} s"),
    }
}

/// Environment variables that name an endpoint.
const ENDPOINTS: [&str; 4] = [
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
    "OTEL_EXPORTER_OTLP_LOGS_ENDPOINT",
];

/// The OTLP exporter, if the command line or the environment names an endpoint.
pub(crate) fn otlp(
    endpoint: Option<&str>,
    protocol: Option<Protocol>,
) -> Result<Option<Box<dyn Exporter>>, String> {
    let named =
        |name: &str| std::env::var_os(name).is_some_and(|value| !value.to_string_lossy().trim().is_empty());
    if endpoint.is_none() && !ENDPOINTS.into_iter().any(named) {
        if protocol.is_some() {
            return Err(
                "--otlp-protocol without an endpoint: give --otlp, or set OTEL_EXPORTER_OTLP_ENDPOINT".into(),
            );
        }
        return Ok(None);
    }
    let protocol = protocol.map(|protocol| match protocol {
        Protocol::Grpc => otlp::Protocol::Grpc,
        Protocol::HttpProtobuf => otlp::Protocol::HttpProtobuf,
    });
    let config = otlp::Config::from_env(endpoint, protocol).map_err(|error| error.to_string())?;
    let exporter = otlp::OtlpExporter::new(&config).map_err(|error| error.to_string())?;
    Ok(Some(Box::new(exporter)))
}

#[cfg(test)]
mod tests {
    use ringsight_collector::summary::ExporterRow;
    use ringsight_exporters::model::Failure;

    use super::*;

    #[test]
    fn files_that_cannot_be_continued_are_not_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name);
        for name in ["t.json", "t.html", "t.jsonl"] {
            std::fs::write(file(name), "precious").unwrap();
        }
        assert_eq!(check(&[file("t.jsonl"), file("new.html")], false), Ok(()));
        for name in ["t.json", "t.html"] {
            let error = check(&[file("new.html"), file(name)], false).unwrap_err();
            assert!(error.contains(name) && error.contains("--force"), "{error}");
            assert_eq!(check(&[file(name)], true), Ok(()));
        }
        assert_eq!(check_place(&file("t.json")), Ok(()));
        assert_eq!(std::fs::read_to_string(file("t.json")).unwrap(), "precious");
        assert_eq!(check_place(Path::new("beside-the-program")), Ok(()));
        for place in [folder.path(), Path::new("/no/such/folder/file")] {
            assert!(check_place(place).is_err(), "{}", place.display());
        }
        std::fs::write(file("t.jsonl"), "{}\nhalf a li").unwrap();
        drop(open(&file("t.jsonl"), false).unwrap());
        assert_eq!(std::fs::read_to_string(file("t.jsonl")).unwrap(), "{}\n");
    }

    /// A delivery of traces failed.
    fn fail(stats: &mut ExportStats, error: &str, items: u64, consequence: Consequence) {
        let tally = &mut stats[Signal::Traces];
        if let Consequence::Dropped(reason) = consequence {
            tally.drop_items(reason, items);
        }
        tally.failures += 1;
        tally.last_failure = Some(Failure {
            error: error.to_owned(),
            items,
            consequence,
        });
    }

    #[test]
    fn trouble_says_what_is_done_and_is_told_once_until_it_ends() {
        let (mut health, mut stats, now) = (Health::default(), ExportStats::default(), Instant::now());
        let mut told = |stats: &ExportStats| health.trouble(stats, now);
        assert!(told(&stats).is_empty());
        let wait = Duration::from_secs(600);
        for _ in 0..2 {
            fail(&mut stats, "HTTP 429", 5, Consequence::Kept(wait));
            let news = told(&stats);
            match stats[Signal::Traces].failures {
                1 => assert_eq!(
                    news,
                    ["traces are not delivered (HTTP 429): 5 spans are kept and tried again in 600 s"]
                ),
                _ => assert!(news.is_empty(), "{news:?}"),
            }
        }
        // Another consequence is news, also within one trouble.
        fail(&mut stats, "HTTP 401", 7, Consequence::Dropped("rejected"));
        assert_eq!(
            told(&stats),
            ["traces are not delivered (HTTP 401): 7 spans were dropped (rejected)"]
        );
        fail(&mut stats, "HTTP 413", 8, Consequence::Halved);
        stats[Signal::Traces].drop_items("queue_full", 3);
        assert_eq!(
            told(&stats),
            [
                "traces are not delivered (HTTP 413): 8 spans are sent again in two requests",
                "traces are not delivered (there is no room for more): 3 spans were dropped (queue_full)",
            ]
        );
        stats[Signal::Traces].delivered = 10;
        assert_eq!(told(&stats), ["traces are delivered again"]);
        stats[Signal::Traces].delivered = 20;
        assert!(told(&stats).is_empty());
        // A file counts no failures.
        stats[Signal::Logs].drop_items("io_error", 2);
        stats.last_error = Some("no space left".into());
        assert_eq!(
            told(&stats),
            ["logs are not delivered (no space left): 2 log records were dropped (io_error)"]
        );
    }

    #[test]
    fn a_backend_that_fails_and_recovers_by_turns_fills_no_log() {
        let (mut health, mut stats, start) = (Health::default(), ExportStats::default(), Instant::now());
        let mut lines = 0;
        for look in 0..3_000 {
            if look % 2 == 0 {
                fail(
                    &mut stats,
                    "HTTP 503",
                    1,
                    Consequence::Kept(Duration::from_millis(300)),
                );
            } else {
                stats[Signal::Traces].delivered += 1;
            }
            lines += health
                .trouble(&stats, start + look * Duration::from_millis(200))
                .len();
        }
        assert_eq!(lines, 20, "in ten minutes");
    }

    #[test]
    fn a_signal_that_the_backend_does_not_take_is_told_once_and_is_no_trouble() {
        let mut health = Health::default();
        let mut stats = ExportStats::default();
        for _ in 0..2 {
            stats[Signal::Traces].delivered += 1;
            stats[Signal::Logs].drop_items(Tally::UNSUPPORTED, 1);
            stats[Signal::Logs].unsupported = Some("HTTP 404 Not Found".into());
            assert!(health.trouble(&stats, Instant::now()).is_empty());
            let news = health.refusals(&stats);
            match stats[Signal::Traces].delivered {
                1 => assert_eq!(
                    news,
                    ["takes no logs (HTTP 404 Not Found): log records are dropped, everything else goes on"]
                ),
                _ => assert_eq!(news, Vec::<String>::new()),
            }
        }
        let incomplete = |stats: &ExportStats| {
            let row = ExporterRow::new("somewhere".into(), stats, None);
            row.incomplete().collect::<Vec<_>>()
        };
        assert_eq!(incomplete(&stats), []);
        stats[Signal::Logs].drop_items("queue_full", 2);
        stats[Signal::Traces].drop_items(Tally::UNSUPPORTED, 3);
        assert_eq!(
            incomplete(&stats),
            [("spans", "unsupported", 3), ("log records", "queue_full", 2)]
        );
    }

    #[test]
    fn the_extension_names_the_format() {
        assert_eq!(format_of(Path::new("a/b.jsonl")), Ok(Format::Jsonl));
        assert_eq!(format_of(Path::new("trace.json")), Ok(Format::Chrome));
        assert_eq!(format_of(Path::new("page.html")), Ok(Format::Html));
        for bad in ["trace", "trace.txt", ".json", "trace.JSON"] {
            let error = format_of(Path::new(bad)).unwrap_err();
            assert!(error.contains(".jsonl") && error.contains(".html"), "{error}");
        }
    }
}
