//! OpenTelemetry's environment variables.

mod otlp_common;
mod otlp_server;

use std::time::Duration;

use otlp_server::{Answer, HttpServer};
use proptest::prelude::*;
use ringsight_exporters::model::{Exporter, Signal};
use ringsight_exporters::otlp::{Config, ConfigError, Endpoint, OtlpExporter, PemFile, Protocol};

fn read(url: Option<&str>, variables: &[(&str, &str)]) -> Result<Config, ConfigError> {
    let get = |name: &str| {
        let suffix = name.strip_prefix("OTEL_EXPORTER_OTLP_")?;
        variables
            .iter()
            .find(|(key, _)| *key == suffix)
            .map(|(_, value)| (*value).to_owned())
    };
    Config::from_variables(url, None, &get)
}

fn config(variables: &[(&str, &str)]) -> Config {
    read(None, variables).unwrap()
}

fn urls(config: &Config) -> [String; 3] {
    [&config.traces, &config.metrics, &config.logs].map(Endpoint::url)
}

const GRPC_TRACES: &str = "/opentelemetry.proto.collector.trace.v1.TraceService/Export";
const GRPC_METRICS: &str = "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export";
const GRPC_LOGS: &str = "/opentelemetry.proto.collector.logs.v1.LogsService/Export";

#[test]
fn defaults_are_the_specifications() {
    let config = config(&[]);
    assert_eq!(config.traces.protocol, Protocol::HttpProtobuf);
    let expected = [
        "http://localhost:4318/v1/traces",
        "http://localhost:4318/v1/metrics",
        "http://localhost:4318/v1/logs",
    ];
    assert_eq!(urls(&config), expected);
    assert_eq!(config.traces.timeout, Duration::from_secs(10));
    assert!(!config.traces.gzip);
    let grpc = self::config(&[("PROTOCOL", "grpc")]);
    assert_eq!(grpc.traces.protocol, Protocol::Grpc);
    let expected =
        [GRPC_TRACES, GRPC_METRICS, GRPC_LOGS].map(|method| format!("http://localhost:4317{method}"));
    assert_eq!(urls(&grpc), expected);
}

#[test]
fn endpoints_follow_the_specifications_path_rules() {
    for (variables, expected) in [
        (
            vec![("ENDPOINT", "https://host/otlp/")],
            [
                "https://host:443/otlp/v1/traces",
                "https://host:443/otlp/v1/metrics",
                "https://host:443/otlp/v1/logs",
            ],
        ),
        (
            vec![("ENDPOINT", "http://host:1/a?key=1")],
            [
                "http://host:1/a/v1/traces?key=1",
                "http://host:1/a/v1/metrics?key=1",
                "http://host:1/a/v1/logs?key=1",
            ],
        ),
        (
            vec![
                ("ENDPOINT", "http://[::1]:9"),
                ("TRACES_ENDPOINT", "https://t.example:8443"),
            ],
            [
                "https://t.example:8443/",
                "http://[::1]:9/v1/metrics",
                "http://[::1]:9/v1/logs",
            ],
        ),
        (
            vec![
                ("METRICS_ENDPOINT", "http://m:1/custom/path"),
                ("LOGS_ENDPOINT", "http://l:2/_bulk"),
            ],
            [
                "http://localhost:4318/v1/traces",
                "http://m:1/custom/path",
                "http://l:2/_bulk",
            ],
        ),
        (
            vec![("ENDPOINT", "  "), ("TRACES_ENDPOINT", "")],
            [
                "http://localhost:4318/v1/traces",
                "http://localhost:4318/v1/metrics",
                "http://localhost:4318/v1/logs",
            ],
        ),
    ] {
        assert_eq!(urls(&config(&variables)), expected, "{variables:?}");
    }
}

#[test]
fn an_endpoint_on_the_command_line_goes_before_the_environment() {
    let variables = [
        ("TRACES_ENDPOINT", "http://env:1/x"),
        ("ENDPOINT", "http://env:2"),
    ];
    let config = read(Some("http://flag:3"), &variables).unwrap();
    assert_eq!(config.traces.url(), "http://flag:3/v1/traces");
    assert_eq!(config.metrics.url(), "http://flag:3/v1/metrics");
    assert_eq!(config.logs.url(), "http://flag:3/v1/logs");
    assert_eq!(
        read(Some("http://flag:4317"), &variables)
            .unwrap()
            .traces
            .protocol,
        Protocol::Grpc
    );
    let variables = [("PROTOCOL", "http/protobuf")];
    assert_eq!(
        read(Some("http://flag:4317"), &variables)
            .unwrap()
            .traces
            .protocol,
        Protocol::HttpProtobuf
    );
    let config =
        Config::from_variables(Some("http://flag:4317"), Some(Protocol::HttpProtobuf), &|_| None).unwrap();
    assert_eq!(config.traces.protocol, Protocol::HttpProtobuf);
}

#[test]
fn grpc_endpoints_may_lack_a_scheme_and_are_secure_then_unless_told() {
    let secure = config(&[("PROTOCOL", "grpc"), ("ENDPOINT", "host:4317")]);
    assert_eq!(secure.traces.url(), format!("https://host:4317{GRPC_TRACES}"));
    let plain = config(&[("PROTOCOL", "grpc"), ("ENDPOINT", "host"), ("INSECURE", "TRUE")]);
    assert_eq!(plain.traces.url(), format!("http://host:4317{GRPC_TRACES}"));
    let mixed = config(&[
        ("PROTOCOL", "grpc"),
        ("ENDPOINT", "host:1"),
        ("METRICS_INSECURE", "true"),
    ]);
    assert!(mixed.traces.url().starts_with("https://") && mixed.metrics.url().starts_with("http://"));
}

#[test]
fn a_signals_variable_goes_before_the_general_one() {
    let config = config(&[
        ("TIMEOUT", "2000"),
        ("TRACES_TIMEOUT", "250"),
        ("COMPRESSION", "gzip"),
        ("METRICS_COMPRESSION", "none"),
        ("LOGS_TIMEOUT", "50"),
        ("PROTOCOL", "grpc"),
        ("METRICS_PROTOCOL", "http/protobuf"),
        ("CERTIFICATE", "/general.pem"),
        ("TRACES_CERTIFICATE", "/traces.pem"),
    ]);
    assert_eq!(
        (
            config.traces.timeout.as_millis(),
            config.metrics.timeout.as_millis(),
            config.logs.timeout.as_millis()
        ),
        (250, 2000, 50)
    );
    assert_eq!(
        (config.traces.gzip, config.metrics.gzip, config.logs.gzip),
        (true, false, true)
    );
    assert_eq!(
        (config.traces.protocol, config.metrics.protocol),
        (Protocol::Grpc, Protocol::HttpProtobuf)
    );
    for (endpoint, path, variable) in [
        (&config.traces, "/traces.pem", "TRACES_CERTIFICATE"),
        (&config.metrics, "/general.pem", "CERTIFICATE"),
    ] {
        let expected = PemFile {
            path: path.into(),
            variable: format!("OTEL_EXPORTER_OTLP_{variable}"),
        };
        assert_eq!(endpoint.tls.ca.as_ref(), Some(&expected));
    }
}

#[test]
fn names_of_choices_have_any_case_and_spaces_around_them() {
    for (compression, gzip) in [("GZIP", true), (" Gzip ", true), ("NONE", false), ("None", false)] {
        assert_eq!(
            config(&[("COMPRESSION", compression)]).traces.gzip,
            gzip,
            "{compression}"
        );
    }
    for (protocol, expected) in [
        ("GRPC", Protocol::Grpc),
        (" gRPC\t", Protocol::Grpc),
        ("HTTP/Protobuf", Protocol::HttpProtobuf),
    ] {
        assert_eq!(
            config(&[("PROTOCOL", protocol)]).traces.protocol,
            expected,
            "{protocol}"
        );
    }
    let upper = config(&[("ENDPOINT", " HTTPS://Host.Example:9/a ")]);
    assert_eq!(upper.traces.url(), "https://Host.Example:9/a/v1/traces");
    // No limit, by the specification.
    assert!(config(&[("TIMEOUT", " 0 ")]).traces.timeout > Duration::from_secs(30 * 24 * 3600));
    // An unset variable, by the specification.
    for variable in [
        "COMPRESSION",
        "PROTOCOL",
        "ENDPOINT",
        "TIMEOUT",
        "HEADERS",
        "CERTIFICATE",
    ] {
        assert_eq!(config(&[(variable, "  ")]), config(&[]), "{variable}");
    }
}

#[test]
fn an_address_with_a_zone_is_connected_to() {
    if std::net::TcpListener::bind("[::1]:0").is_err() {
        println!("an_address_with_a_zone_is_connected_to: skipped: this host has no IPv6");
        return;
    }
    let server = HttpServer::start_at("[::1]:0".parse().unwrap(), vec![]);
    // Interface 1 is the loopback.
    let url = server.url.replace("[::1]", "[::1%251]");
    let config = Config::from_variables(Some(&url), Some(Protocol::HttpProtobuf), &|_| None).unwrap();
    let mut exporter = OtlpExporter::new(&config).unwrap();
    exporter.export(&otlp_common::metrics_batch());
    exporter.shutdown(Duration::from_secs(20)).unwrap();
    assert_eq!(exporter.stats()[Signal::Metrics].delivered, 1);
    assert_eq!(
        server.received().headers[0]["host"],
        server.url.trim_start_matches("http://")
    );
}

#[test]
fn errors_name_the_variable_and_keep_secrets() {
    for (variable, value, problem) in [
        ("ENDPOINT", "localhost:4318", "has no scheme"),
        ("ENDPOINT", "ftp://host", "http or https"),
        ("ENDPOINT", "http://", "not a URL"),
        ("ENDPOINT", "http://:80", "names no host"),
        ("ENDPOINT", "http://host:99999", "port"),
        ("ENDPOINT", "http://host:0", "port 0"),
        ("ENDPOINT", "http://host:", "port"),
        (
            "TRACES_ENDPOINT",
            "http://user:s3cret@host",
            "OTEL_EXPORTER_OTLP_HEADERS",
        ),
        ("PROTOCOL", "http/json", "not supported"),
        ("LOGS_TIMEOUT", "soon", "milliseconds"),
        ("METRICS_PROTOCOL", "thrift", "use `grpc` or `http/protobuf`"),
        ("TIMEOUT", "10s", "milliseconds"),
        ("TIMEOUT", "-1", "milliseconds"),
        ("COMPRESSION", "zstd", "`gzip` or `none`"),
        ("HEADERS", "a=1,s3cret", "entry 2 is not NAME=VALUE"),
        ("HEADERS", "s3cret key=1", "entry 1 has a name"),
        ("HEADERS", "a=s3cret%2", "entry 1 has an incomplete"),
        ("HEADERS", "a=s3cret%0a", "entry 1 has a character"),
        ("HEADERS", "a=1,Content-Length=s3cret", "entry 2 names a header"),
        ("HEADERS", "transfer-encoding=chunked", "entry 1 names a header"),
    ] {
        let error = read(None, &[(variable, value)]).unwrap_err();
        assert_eq!(
            error.variable,
            format!("OTEL_EXPORTER_OTLP_{variable}"),
            "{value}"
        );
        assert!(error.problem.contains(problem), "{value}: {error}");
        assert!(!error.to_string().contains("s3cret"), "{error}");
    }
    let error = read(
        None,
        &[("PROTOCOL", "grpc"), ("ENDPOINT", "host"), ("INSECURE", "yes")],
    )
    .unwrap_err();
    assert_eq!(error.variable, "OTEL_EXPORTER_OTLP_INSECURE");
    assert_eq!(read(Some("nonsense"), &[]).unwrap_err().variable, "OTLP endpoint");
}

proptest! {
    #[test]
    fn no_text_makes_it_panic(
        variable in prop::sample::select(&["ENDPOINT", "HEADERS", "TIMEOUT", "PROTOCOL", "COMPRESSION", "INSECURE"][..]),
        value in prop_oneof![".{0,40}", "(http|https)://[a-z:@/?#%\\[\\]0-9]{0,20}", "[a-z=%,;0-9]{0,30}"],
    ) {
        for protocol in [None, Some(Protocol::Grpc), Some(Protocol::HttpProtobuf)] {
            let name = format!("OTEL_EXPORTER_OTLP_{variable}");
            let get = |asked: &str| (asked == name).then(|| value.clone());
            if let Ok(config) = Config::from_variables(None, protocol, &get) {
                // What is accepted as an endpoint can be requested.
                if !config.traces.url().starts_with("https") {
                    prop_assert!(OtlpExporter::new(&config).is_ok());
                }
            }
        }
    }

    #[test]
    fn no_response_makes_it_panic(
        status in prop::sample::select(&[200u16, 202, 400, 429, 503][..]),
        kind in prop::sample::select(&["application/x-protobuf", "application/json", "text/html; charset=x", ""][..]),
        body in prop::collection::vec(any::<u8>(), 0..64),
        retry_after in prop::sample::select(&["0", "-1", "99999999999999999999", "x", "Thu, 01 Jan 1970 00:00:00 GMT"][..]),
    ) {
        let answer = Answer { body, ..Answer::status(status) }.header("content-type", kind).header("retry-after", retry_after);
        let server = HttpServer::start(vec![answer]);
        let mut config = Config::from_variables(Some(&server.url), Some(Protocol::HttpProtobuf), &|_| None).unwrap();
        config.retry.initial = Duration::from_millis(1);
        let mut exporter = OtlpExporter::new(&config).unwrap();
        exporter.export(&otlp_common::metrics_batch());
        exporter.shutdown(Duration::from_secs(20)).unwrap();
        let stats = exporter.stats();
        let account = &stats[Signal::Metrics];
        prop_assert_eq!(account.delivered + account.dropped_total(), 1);
    }
}
