//! Where telemetry goes, by what the command line says.

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use ringsight_exporters::{
    ExportStats, Exporter,
    chrome::ChromeExporter,
    html::HtmlExporter,
    jsonl::JsonlExporter,
    model::{Signal, Tally},
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

/// Whether an exporter delivers, as far as its statistics tell.
#[derive(Debug, Default)]
pub(crate) struct Health {
    delivered: u64,
    failures: u64,
    failing: bool,
    /// Signals that the backend does not take, by number.
    unsupported: [bool; Signal::COUNT],
}

impl Health {
    /// That the backend does not take a signal: worth telling once.
    pub(crate) fn refusals(&mut self, stats: &ExportStats) -> Vec<String> {
        let mut news = Vec::new();
        for (signal, tally) in stats.by_signal() {
            if let Some(said) = &tally.unsupported
                && !std::mem::replace(&mut self.unsupported[signal as usize], true)
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

    /// What is worth telling since the last look: that deliveries fail, or that they work again.
    pub(crate) fn trouble(&mut self, stats: &ExportStats) -> Option<String> {
        let (mut delivered, mut failures) = (0, stats.retries);
        for (_, tally) in stats.by_signal() {
            delivered += tally.delivered;
            failures += tally.dropped_total() - tally.dropped_as(Tally::UNSUPPORTED);
        }
        let news = if self.failing && delivered > self.delivered {
            self.failing = false;
            Some("delivering again".to_owned())
        } else if !self.failing && failures > self.failures {
            self.failing = true;
            let why = stats.last_error.as_deref().unwrap_or("no reason given");
            Some(format!(
                "not delivering ({why}); what comes is kept as long as there is room, and tried again"
            ))
        } else {
            None
        };
        (self.delivered, self.failures) = (delivered, failures);
        news
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
    let named = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
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

    #[test]
    fn trouble_and_its_end_are_told_once_each() {
        let mut health = Health::default();
        let mut stats = ExportStats::default();
        let mut told = |stats: &ExportStats| health.trouble(stats).unwrap_or_default();
        assert_eq!(told(&stats), "");
        stats.retries = 1;
        stats.last_error = Some("connection refused".into());
        assert!(told(&stats).contains("connection refused"));
        stats.retries = 2;
        assert_eq!(told(&stats), "");
        stats[Signal::Traces].delivered = 10;
        assert_eq!(told(&stats), "delivering again");
        stats[Signal::Traces].delivered = 20;
        assert_eq!(told(&stats), "");
        stats[Signal::Traces].drop_items("queue_full", 3);
        assert!(told(&stats).starts_with("not delivering"));
    }

    #[test]
    fn a_signal_that_the_backend_does_not_take_is_told_once_and_is_no_trouble() {
        let mut health = Health::default();
        let mut stats = ExportStats::default();
        for _ in 0..2 {
            stats[Signal::Traces].delivered += 1;
            stats[Signal::Logs].drop_items(Tally::UNSUPPORTED, 1);
            stats[Signal::Logs].unsupported = Some("HTTP 404 Not Found".into());
            assert_eq!(health.trouble(&stats), None);
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
