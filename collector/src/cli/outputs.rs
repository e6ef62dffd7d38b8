//! Where telemetry goes, by what the command line says.

use std::path::{Path, PathBuf};

use clap::ValueEnum;
use ringsight_exporters::{Exporter, chrome::ChromeExporter, html::HtmlExporter, jsonl::JsonlExporter, otlp};

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

/// Opens an output file.
pub(crate) fn open(path: &Path) -> Result<Box<dyn Exporter>, String> {
    Ok(match format_of(path)? {
        Format::Jsonl => Box::new(JsonlExporter::create(path)?),
        Format::Chrome => Box::new(ChromeExporter::create(path)?),
        Format::Html => Box::new(HtmlExporter::create(path, "ringsight")?),
    })
}

/// Environment variables that name an endpoint.
const ENDPOINTS: [&str; 3] = [
    "OTEL_EXPORTER_OTLP_ENDPOINT",
    "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT",
    "OTEL_EXPORTER_OTLP_METRICS_ENDPOINT",
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
    use super::*;

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
