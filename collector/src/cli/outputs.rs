//! Where telemetry goes, by what the command line says.

use std::{
    io,
    path::{Path, PathBuf},
    sync::mpsc,
    thread,
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
    worker::{QUEUE_BYTES, Worker},
};
use ringsight_output::Destination;

/// How long opening an output may take, or writing a small one: longer than a disk takes to wake.
pub(crate) const PATIENCE: Duration = Duration::from_secs(5);

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

/// The files of `attach`. Each is found when the command starts and opened when there is something to write; a pipe is opened at once.
#[derive(Debug)]
pub(crate) struct Files {
    /// Where telemetry goes.
    outs: Vec<(Format, Destination)>,
    /// Where the summary goes.
    pub(crate) summary: Option<Destination>,
    /// Where it says that everything is attached to.
    pub(crate) ready: Option<Destination>,
}

impl Files {
    /// Finds what would keep the files from being written, and changes nothing. Without `force` no file is lost: only lines can be
    /// continued, the other formats would replace what is there.
    pub(crate) fn find(
        outs: &[PathBuf],
        summary: Option<&Path>,
        ready: Option<&Path>,
        force: bool,
    ) -> Result<Self, String> {
        let outs = outs
            .iter()
            .map(|path| {
                let (format, destination) = (format_of(path)?, find(path)?);
                if destination.holds_file() && !force && format != Format::Jsonl {
                    return Err(format!(
                        "{} exists: name another file, or replace it with --force (a .jsonl file is continued)",
                        path.display()
                    ));
                }
                let checked = match format {
                    Format::Html => destination.check_replace(),
                    Format::Jsonl | Format::Chrome => destination.check_open(),
                };
                checked.map_err(|error| cannot_write(path, &error))?;
                Ok((format, destination))
            })
            .collect::<Result<Vec<_>, String>>()?;
        let replaced = |path: Option<&Path>| {
            let Some(path) = path else { return Ok(None) };
            let destination = find(path)?;
            destination
                .check_replace()
                .map_err(|error| cannot_write(path, &error))?;
            Ok::<_, String>(Some(destination))
        };
        let files = Self {
            outs,
            summary: replaced(summary)?,
            ready: replaced(ready)?,
        };
        files.differ().map(|()| files)
    }

    /// Refuses options that name one file, by whatever paths: each would destroy what the other writes.
    fn differ(&self) -> Result<(), String> {
        let outs = self.outs.iter().map(|(_, destination)| ("--out", destination));
        let others = [("--summary", &self.summary), ("--ready-file", &self.ready)];
        let others = others
            .into_iter()
            .filter_map(|(option, destination)| Some((option, destination.as_ref()?)));
        let all: Vec<(&str, &Destination)> = outs.chain(others).collect();
        for (at, (option, one)) in all.iter().enumerate() {
            for (other_option, other) in &all[at + 1..] {
                if one.is_same(other) {
                    return Err(format!(
                        "{option} {} and {other_option} {} are one file: name two",
                        one.path().display(),
                        other.path().display()
                    ));
                }
            }
        }
        Ok(())
    }

    /// Opens where telemetry goes, each on a thread of its own: lines are continued unless `force`, the other formats begun.
    pub(crate) fn open(&mut self, force: bool) -> Result<Vec<Box<dyn Exporter>>, String> {
        let open = |(format, destination): (Format, Destination)| {
            let target = destination.path().display().to_string();
            let start = |open: Opener| Worker::start(&target, QUEUE_BYTES, PATIENCE, open);
            Ok::<_, String>(Box::new(match format {
                Format::Jsonl if force => start(Box::new(move || {
                    JsonlExporter::create_at(&destination).map(boxed)
                })),
                Format::Jsonl => start(Box::new(move || {
                    JsonlExporter::append_at(&destination).map(boxed)
                })),
                Format::Chrome => start(Box::new(move || {
                    ChromeExporter::create_at(&destination).map(boxed)
                })),
                Format::Html => start(Box::new(move || {
                    HtmlExporter::create_at(destination, "ringsight").map(boxed)
                })),
            }?) as Box<dyn Exporter>)
        };
        self.outs.drain(..).map(open).collect()
    }
}

fn cannot_write(path: &Path, error: &ringsight_output::Error) -> String {
    format!("cannot write {}: {error}", path.display())
}

fn find(path: &Path) -> Result<Destination, String> {
    Destination::resolve(path).map_err(|error| cannot_write(path, &error))
}

/// Has `write` write a whole file, on a thread that is left behind if it takes longer than `limit`.
pub(crate) fn write_whole(
    destination: Destination,
    limit: Duration,
    write: impl FnOnce(&mut dyn io::Write) -> io::Result<()> + Send + 'static,
) -> Result<(), String> {
    let path = destination.path().to_owned();
    let write = move || {
        destination
            .replace(|file| write(file))
            .map_err(|error| cannot_write(destination.path(), &error))
    };
    within(limit, write).unwrap_or_else(|| {
        Err(format!(
            "cannot write {}: it takes nothing for {:.1} s",
            path.display(),
            limit.as_secs_f64()
        ))
    })
}

/// Has a thread do what may block, and waits for it at most `limit`. `None` if it takes longer, and the thread is left behind; or if there is
/// no thread to be had.
pub(crate) fn within<T: Send + 'static>(
    limit: Duration,
    work: impl FnOnce() -> T + Send + 'static,
) -> Option<T> {
    let (done, result) = mpsc::channel();
    let run = move || {
        // Nobody waits for it any more if it took too long.
        let _ = done.send(work());
    };
    thread::Builder::new().spawn(run).ok()?;
    result.recv_timeout(limit).ok()
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
                Consequence::KeptForNext => Some((
                    Trouble::Kept,
                    "kept and tried again with the next ones".to_owned(),
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

/// Makes an exporter.
type Opener = Box<dyn FnOnce() -> Result<Box<dyn Exporter>, String> + Send>;

fn boxed(exporter: impl Exporter + 'static) -> Box<dyn Exporter> {
    Box::new(exporter)
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

    fn outs(paths: &[PathBuf], force: bool) -> Result<Files, String> {
        Files::find(paths, None, None, force)
    }

    #[test]
    fn files_that_cannot_be_continued_are_not_overwritten() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name);
        for name in ["t.json", "t.html", "t.jsonl"] {
            std::fs::write(file(name), "precious").unwrap();
        }
        outs(&[file("t.jsonl"), file("new.html")], false).unwrap();
        for name in ["t.json", "t.html"] {
            let error = outs(&[file("new.html"), file(name)], false).unwrap_err();
            assert!(error.contains(name) && error.contains("--force"), "{error}");
            outs(&[file(name)], true).unwrap();
        }
        Files::find(
            &[],
            Some(&file("t.json")),
            Some(Path::new("beside-the-program")),
            false,
        )
        .unwrap();
        assert_eq!(std::fs::read_to_string(file("t.json")).unwrap(), "precious");
        for place in [folder.path(), Path::new("/no/such/folder/file")] {
            let error = Files::find(&[], Some(place), None, false).unwrap_err();
            assert!(error.contains(&*place.to_string_lossy()), "{error}");
        }
        std::fs::write(file("t.jsonl"), "{}\nhalf a li").unwrap();
        drop(outs(&[file("t.jsonl")], false).unwrap().open(false).unwrap());
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
    fn one_file_is_named_by_one_option_only() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str| folder.path().join(name);
        std::os::unix::fs::symlink("x.json", file("link.json")).unwrap();
        std::fs::create_dir(file("below")).unwrap();
        let (x, also_x) = (file("x.json"), file("below/../x.json"));
        for (paths, summary, ready) in [
            (vec![x.clone(), also_x.clone()], None, None),
            (vec![x.clone()], Some(&also_x), None),
            (vec![file("link.json")], Some(&x), None),
            (vec![file("link.json")], None, Some(&x)),
            (vec![file("y.html")], Some(&x), Some(&also_x)),
        ] {
            let error = Files::find(
                &paths,
                summary.map(PathBuf::as_path),
                ready.map(PathBuf::as_path),
                true,
            )
            .unwrap_err();
            assert!(error.contains("are one file"), "{error}");
        }
        assert!(!file("x.json").exists());
        std::fs::write(file("a.jsonl"), "{}\n").unwrap();
        std::fs::hard_link(file("a.jsonl"), file("b.jsonl")).unwrap();
        let error = outs(&[file("a.jsonl"), file("b.jsonl")], false).unwrap_err();
        assert!(error.contains("a.jsonl") && error.contains("b.jsonl"), "{error}");
        assert_eq!(std::fs::read_to_string(file("a.jsonl")).unwrap(), "{}\n");
        Files::find(
            &[x],
            Some(Path::new("/dev/null")),
            Some(Path::new("/dev/null")),
            false,
        )
        .unwrap();
    }

    #[test]
    fn what_takes_nothing_is_left_behind() {
        assert_eq!(within(Duration::from_secs(60), || 7), Some(7));
        assert_eq!(within(Duration::from_millis(10), thread::park), None);
        let folder = tempfile::tempdir().unwrap();
        let pipe = folder.path().join("pipe");
        assert!(
            std::process::Command::new("mkfifo")
                .arg(&pipe)
                .status()
                .unwrap()
                .success()
        );
        let error = find(&pipe).unwrap_err();
        assert!(error.contains("no process reads"), "{error}");
        let _reader = std::fs::OpenOptions::new()
            .read(true)
            .write(true)
            .open(&pipe)
            .unwrap();
        let destination = find(&pipe).unwrap();
        let error = write_whole(destination, Duration::from_millis(50), |file| {
            file.write_all(&[b'x'; 1 << 20])
        })
        .unwrap_err();
        assert!(error.contains("pipe: it takes nothing for 0.1 s"), "{error}");
        let file = find(&folder.path().join("ready.json")).unwrap();
        write_whole(file, PATIENCE, |_| Ok(())).unwrap();
        assert!(folder.path().join("ready.json").is_file());
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
        stats[Signal::Logs].failures += 1;
        stats[Signal::Logs].last_failure = Some(Failure {
            error: "no space left".into(),
            items: 1,
            consequence: Consequence::KeptForNext,
        });
        assert_eq!(
            told(&stats),
            [
                "logs are not delivered (no space left): 1 log records are kept and tried again with the next ones"
            ]
        );
        // Not every exporter counts failures.
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
