//! Where to send, and how: OpenTelemetry's environment variables.
//!
//! Follows the specification's "OpenTelemetry Protocol Exporter": a variable of one signal
//! (`OTEL_EXPORTER_OTLP_TRACES_ENDPOINT`) goes before the general one (`OTEL_EXPORTER_OTLP_ENDPOINT`), an empty variable is
//! an unset one.

use std::collections::HashMap;
use std::ffi::OsString;
use std::fmt;
use std::net::Ipv6Addr;
use std::path::PathBuf;
use std::str::FromStr;
use std::time::Duration;

use http::uri::{Authority, Scheme};
use http::{HeaderMap, HeaderName, HeaderValue, Uri};

use crate::model::Signal;

/// How requests travel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Protocol {
    /// `grpc`: gRPC over HTTP/2, port 4317 unless told otherwise.
    Grpc,
    /// `http/protobuf`: protobuf over HTTP/1.1, port 4318 unless told otherwise.
    HttpProtobuf,
}

impl FromStr for Protocol {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        match text.to_ascii_lowercase().as_str() {
            "grpc" => Ok(Self::Grpc),
            "http/protobuf" => Ok(Self::HttpProtobuf),
            "http/json" => Err("`http/json` is not supported; use `http/protobuf` or `grpc`".to_owned()),
            _ => Err("not a protocol; use `grpc` or `http/protobuf`".to_owned()),
        }
    }
}

/// A setting that cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{variable}: {problem}")]
pub struct ConfigError {
    /// The environment variable, or `OTLP endpoint` for one given on the command line.
    pub variable: String,
    /// What is wrong with it and what to do; never a secret value.
    pub problem: String,
}

impl Signal {
    /// Its part of a variable's name.
    fn variable(self) -> &'static str {
        match self {
            Self::Traces => "TRACES_",
            Self::Metrics => "METRICS_",
            Self::Logs => "LOGS_",
        }
    }

    /// What HTTP appends to a general endpoint.
    fn http_path(self) -> &'static str {
        match self {
            Self::Traces => "/v1/traces",
            Self::Metrics => "/v1/metrics",
            Self::Logs => "/v1/logs",
        }
    }

    /// The gRPC method.
    fn grpc_path(self) -> &'static str {
        match self {
            Self::Traces => "/opentelemetry.proto.collector.trace.v1.TraceService/Export",
            Self::Metrics => "/opentelemetry.proto.collector.metrics.v1.MetricsService/Export",
            Self::Logs => "/opentelemetry.proto.collector.logs.v1.LogsService/Export",
        }
    }
}

/// Request headers. Their values are mostly credentials, so `Debug` shows the names only.
#[derive(Clone, Default, PartialEq)]
pub struct Headers(pub(crate) HeaderMap);

impl fmt::Debug for Headers {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.debug_set().entries(self.0.keys()).finish()
    }
}

/// A PEM file, and who named it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PemFile {
    /// The file.
    pub path: PathBuf,
    /// The environment variable that names it, for messages.
    pub variable: String,
}

/// Certificates, as PEM files.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Tls {
    /// Certificates to trust, instead of the system's.
    pub ca: Option<PemFile>,
    /// Our certificate and its private key, for mutual TLS.
    pub identity: Option<(PemFile, PemFile)>,
}

/// Where one signal goes.
#[derive(Clone, Debug, PartialEq)]
pub struct Endpoint {
    /// How.
    pub protocol: Protocol,
    /// Scheme, host and port, without what is secret or per signal; for messages.
    pub(crate) base: String,
    /// What is requested. It has no zone: that means something on this host alone.
    pub(crate) uri: Uri,
    /// Name or address to connect to, with the zone of a link-local address.
    pub(crate) host: String,
    /// Request headers.
    pub headers: Headers,
    /// Limit on one attempt, from connecting to the response. The exporter has no attempt without limit: 49 days stand for that.
    pub timeout: Duration,
    /// Compress requests with gzip.
    pub gzip: bool,
    /// Used if the endpoint is `https`.
    pub tls: Tls,
}

impl Endpoint {
    /// What is requested, in full.
    #[must_use]
    pub fn url(&self) -> String {
        self.uri.to_string()
    }

    pub(crate) fn is_tls(&self) -> bool {
        self.uri.scheme() == Some(&Scheme::HTTPS)
    }
}

/// Repetition of attempts that failed but may succeed later.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Retry {
    /// Pause after the first failure; it doubles with each one. Each pause is cut at random by up to a half.
    pub initial: Duration,
    /// Longest pause.
    pub max: Duration,
    /// How long a request that the server keeps answering with a passing error is tried. Without a server to answer, it is
    /// tried as long as it has room in the queue.
    pub give_up_after: Duration,
}

/// Configuration of an [`OtlpExporter`](super::OtlpExporter).
#[derive(Clone, Debug, PartialEq)]
pub struct Config {
    /// Where spans go.
    pub traces: Endpoint,
    /// Where metrics go.
    pub metrics: Endpoint,
    /// Where log records go.
    pub logs: Endpoint,
    /// Bound on encoded requests that are waiting or being sent, in bytes.
    pub queue_bytes: usize,
    /// Bound on one uncompressed request, in bytes. Servers often refuse more than 4 MiB.
    pub request_bytes: usize,
    /// Repetition.
    pub retry: Retry,
}

impl Config {
    /// The configuration that the process's environment describes.
    ///
    /// `endpoint` and `protocol` stand for command-line options and go before the environment; `endpoint` is a base URL as
    /// `OTEL_EXPORTER_OTLP_ENDPOINT` is, for all signals. If no protocol is named anywhere, an endpoint with port 4317 is
    /// gRPC and any other one HTTP/protobuf.
    ///
    /// # Errors
    /// The first setting that cannot be used.
    pub fn from_env(endpoint: Option<&str>, protocol: Option<Protocol>) -> Result<Self, ConfigError> {
        let variables = texts(std::env::vars_os())?;
        Self::from_variables(endpoint, protocol, &|name| variables.get(name).cloned())
    }

    /// As [`from_env`](Self::from_env), with the variables that `get` knows instead of the process's.
    ///
    /// # Errors
    /// The first setting that cannot be used.
    pub fn from_variables(
        endpoint: Option<&str>,
        protocol: Option<Protocol>,
        get: &dyn Fn(&str) -> Option<String>,
    ) -> Result<Self, ConfigError> {
        let read = |signal| Reader { signal, get }.endpoint(endpoint, protocol);
        Ok(Self {
            traces: read(Signal::Traces)?,
            metrics: read(Signal::Metrics)?,
            logs: read(Signal::Logs)?,
            queue_bytes: 256 << 20,
            request_bytes: 3 << 20,
            retry: Retry {
                initial: Duration::from_millis(500),
                max: Duration::from_secs(10),
                give_up_after: Duration::from_secs(300),
            },
        })
    }

    pub(crate) fn endpoint(&self, signal: Signal) -> &Endpoint {
        match signal {
            Signal::Traces => &self.traces,
            Signal::Metrics => &self.metrics,
            Signal::Logs => &self.logs,
        }
    }
}

/// What every variable of the exporter's begins with.
const PREFIX: &str = "OTEL_EXPORTER_OTLP_";

/// The exporter's variables in an environment. One that is no text is refused: it would silently count as unset.
fn texts(
    environment: impl Iterator<Item = (OsString, OsString)>,
) -> Result<HashMap<String, String>, ConfigError> {
    let ours = environment.filter_map(|(name, value)| Some((name.into_string().ok()?, value)));
    let ours = ours.filter(|(name, _)| name.starts_with(PREFIX));
    ours.map(|(name, value)| match value.into_string() {
        Ok(value) => Ok((name, value)),
        Err(_) => Err(ConfigError {
            variable: name,
            problem: "is not UTF-8".to_owned(),
        }),
    })
    .collect()
}

/// A variable that is set.
struct Variable {
    name: String,
    value: String,
    /// Of this signal only.
    specific: bool,
}

impl Variable {
    fn error(&self, problem: impl Into<String>) -> ConfigError {
        ConfigError {
            variable: self.name.clone(),
            problem: problem.into(),
        }
    }
}

impl From<Variable> for PemFile {
    fn from(variable: Variable) -> Self {
        Self {
            path: variable.value.into(),
            variable: variable.name,
        }
    }
}

/// Where an endpoint is.
struct Place {
    /// For messages.
    base: String,
    /// What to request there.
    uri: Uri,
    /// What to connect to.
    host: String,
}

/// Reads the variables of one signal.
struct Reader<'a> {
    signal: Signal,
    get: &'a dyn Fn(&str) -> Option<String>,
}

impl Reader<'_> {
    fn variable(&self, suffix: &str) -> Option<Variable> {
        [(self.signal.variable(), true), ("", false)]
            .into_iter()
            .find_map(|(infix, specific)| {
                let name = format!("{PREFIX}{infix}{suffix}");
                let value = (self.get)(&name)?.trim().to_owned();
                (!value.is_empty()).then_some(Variable {
                    name,
                    value,
                    specific,
                })
            })
    }

    fn endpoint(&self, url: Option<&str>, protocol: Option<Protocol>) -> Result<Endpoint, ConfigError> {
        let protocol = match (protocol, self.variable("PROTOCOL")) {
            (Some(protocol), _) => Some(protocol),
            (None, Some(variable)) => Some(
                variable
                    .value
                    .parse()
                    .map_err(|problem: String| variable.error(problem))?,
            ),
            (None, None) => None,
        };
        let given = url.map(|url| Variable {
            name: "OTLP endpoint".to_owned(),
            value: url.trim().to_owned(),
            specific: false,
        });
        let given = given.or_else(|| self.variable("ENDPOINT"));
        let protocol = protocol.unwrap_or_else(|| match &given {
            Some(variable) if names_grpc_port(&variable.value) => Protocol::Grpc,
            _ => Protocol::HttpProtobuf,
        });
        let Place { base, uri, host } = match given {
            Some(variable) => self.uri(&variable, protocol)?,
            None => {
                let port = if protocol == Protocol::Grpc { 4317 } else { 4318 };
                let name = "default endpoint".to_owned();
                let value = format!("http://localhost:{port}");
                self.uri(
                    &Variable {
                        name,
                        value,
                        specific: false,
                    },
                    protocol,
                )?
            }
        };
        Ok(Endpoint {
            protocol,
            base,
            uri,
            host,
            headers: self.headers()?,
            timeout: self.timeout()?,
            gzip: self.gzip()?,
            tls: self.tls()?,
        })
    }

    fn uri(&self, variable: &Variable, protocol: Protocol) -> Result<Place, ConfigError> {
        let mut url = variable.value.clone();
        if !url.contains("://") {
            if protocol == Protocol::HttpProtobuf {
                return Err(
                    variable.error("has no scheme; write it as http://HOST:PORT or https://HOST:PORT")
                );
            }
            let scheme = if self.insecure()? { "http" } else { "https" };
            url = format!("{scheme}://{url}");
        }
        let (url, zone) = without_zone(&url).map_err(|problem| variable.error(problem))?;
        let uri: Uri = url
            .parse()
            .map_err(|error| variable.error(format!("not a URL ({error})")))?;
        let Some(scheme @ ("http" | "https")) = uri.scheme_str() else {
            return Err(variable.error("its scheme must be http or https"));
        };
        let authority = uri.authority().filter(|authority| !authority.host().is_empty());
        let authority = authority.ok_or_else(|| variable.error("names no host"))?;
        if authority.as_str().contains('@') {
            let hint = "put the credentials into OTEL_EXPORTER_OTLP_HEADERS instead of the URL";
            return Err(variable.error(hint));
        }
        let authority = with_port(authority, scheme, protocol, variable)?;
        let path = match protocol {
            // gRPC has no path of its own.
            Protocol::Grpc => self.signal.grpc_path().to_owned(),
            Protocol::HttpProtobuf if variable.specific => {
                uri.path_and_query().map_or("/", |path| path.as_str()).to_owned()
            }
            Protocol::HttpProtobuf => {
                let query = uri.query().map(|query| format!("?{query}")).unwrap_or_default();
                format!(
                    "{}{}{query}",
                    uri.path().trim_end_matches('/'),
                    self.signal.http_path()
                )
            }
        };
        let mut base = format!("{scheme}://{authority}");
        let uri: Uri = format!("{base}{path}")
            .parse()
            .map_err(|error| variable.error(format!("not a URL ({error})")))?;
        let host = uri.host().unwrap_or_default();
        let mut host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        if let Some(zone) = zone {
            base = base.replace(']', &format!("%{zone}]"));
            host = format!("{host}%{zone}");
        }
        Ok(Place { base, uri, host })
    }

    fn insecure(&self) -> Result<bool, ConfigError> {
        let Some(variable) = self.variable("INSECURE") else {
            return Ok(false);
        };
        match variable.value.to_ascii_lowercase().as_str() {
            "true" => Ok(true),
            "false" => Ok(false),
            _ => Err(variable.error("must be `true` or `false`")),
        }
    }

    fn headers(&self) -> Result<Headers, ConfigError> {
        let mut headers = HeaderMap::new();
        let Some(variable) = self.variable("HEADERS") else {
            return Ok(Headers(headers));
        };
        for (index, pair) in variable.value.split(',').map(str::trim).enumerate() {
            if pair.is_empty() {
                continue;
            }
            // Neither name nor value of a malformed entry is shown: it may be a piece of a token.
            let position = index + 1;
            let wrong = |what: &str| variable.error(format!("entry {position} {what}"));
            let (name, value) = pair.split_once('=').ok_or_else(|| wrong("is not NAME=VALUE"))?;
            let name = HeaderName::from_bytes(name.trim().as_bytes());
            let name = name.map_err(|_| wrong("has a name that is not a header name"))?;
            if FRAMING.contains(&name.as_str()) {
                return Err(wrong(
                    "names a header that says where a request ends: leave it out",
                ));
            }
            let value =
                percent_decode(value.trim()).ok_or_else(|| wrong("has an incomplete percent escape"))?;
            let value = HeaderValue::from_bytes(&value);
            let mut value = value.map_err(|_| wrong("has a character that headers cannot hold"))?;
            value.set_sensitive(true);
            headers.append(name, value);
        }
        Ok(Headers(headers))
    }

    fn timeout(&self) -> Result<Duration, ConfigError> {
        let Some(variable) = self.variable("TIMEOUT") else {
            return Ok(Duration::from_secs(10));
        };
        match variable.value.parse::<u32>() {
            // The specification's "no limit".
            Ok(0) => Ok(Duration::from_millis(u32::MAX.into())),
            Ok(milliseconds) => Ok(Duration::from_millis(milliseconds.into())),
            Err(_) => Err(variable.error("must be a whole number of milliseconds; 0 means no limit")),
        }
    }

    fn gzip(&self) -> Result<bool, ConfigError> {
        let Some(variable) = self.variable("COMPRESSION") else {
            return Ok(false);
        };
        match variable.value.to_ascii_lowercase().as_str() {
            "gzip" => Ok(true),
            "none" => Ok(false),
            _ => Err(variable.error("must be `gzip` or `none`")),
        }
    }

    fn tls(&self) -> Result<Tls, ConfigError> {
        let ca = self.variable("CERTIFICATE").map(PemFile::from);
        let identity = match (self.variable("CLIENT_CERTIFICATE"), self.variable("CLIENT_KEY")) {
            (Some(certificate), Some(key)) => Some((certificate.into(), key.into())),
            (None, None) => None,
            (Some(alone), None) => {
                return Err(alone.error("is set without the CLIENT_KEY that belongs to it"));
            }
            (None, Some(alone)) => {
                return Err(alone.error("is set without the CLIENT_CERTIFICATE it belongs to"));
            }
        };
        Ok(Tls { ca, identity })
    }
}

/// `url` without the zone of its address, and the zone: `eth0` of `[fe80::1%25eth0]`, as RFC 6874 writes it, or of `[fe80::1%eth0]`.
fn without_zone(url: &str) -> Result<(String, Option<String>), &'static str> {
    let bracketed = url
        .split_once("://[")
        .and_then(|(scheme, rest)| Some((scheme, rest.split_once(']')?)));
    let Some((scheme, (inside, rest))) = bracketed else {
        return Ok((url.to_owned(), None));
    };
    let Some((address, zone)) = inside.split_once('%') else {
        return Ok((url.to_owned(), None));
    };
    let zone = match zone.strip_prefix("25") {
        Some(encoded) if !encoded.is_empty() => percent_decode(encoded),
        _ => Some(zone.as_bytes().to_vec()),
    };
    let zone = zone.and_then(|zone| String::from_utf8(zone).ok());
    let usable = |zone: &String| !zone.is_empty() && zone.chars().all(|c| c.is_ascii_graphic() && c != ']');
    let zone = zone
        .filter(usable)
        .ok_or("the zone after % must be the name or the number of a network interface")?;
    if address.parse::<Ipv6Addr>().is_err() {
        return Err("a zone after % belongs to an IPv6 address");
    }
    Ok((format!("{scheme}://[{address}]{rest}"), Some(zone)))
}

/// Whether the URL's port is the one that is registered for OTLP over gRPC.
fn names_grpc_port(url: &str) -> bool {
    let rest = url.split_once("://").map_or(url, |(_, rest)| rest);
    rest.split(['/', '?'])
        .next()
        .is_some_and(|authority| authority.ends_with(":4317"))
}

/// `authority` with the port that it implies.
fn with_port(
    authority: &Authority,
    scheme: &str,
    protocol: Protocol,
    variable: &Variable,
) -> Result<String, ConfigError> {
    let after_host = &authority.as_str()[authority.host().len()..];
    match (after_host, authority.port_u16()) {
        (_, Some(0)) => Err(variable.error("port 0 cannot be connected to")),
        (_, Some(_)) => Ok(authority.to_string()),
        ("", None) => {
            // A URL without port means the scheme's to HTTP, and OTLP's to gRPC, as in every gRPC client of OTLP.
            let port = match (protocol, scheme) {
                (Protocol::Grpc, _) => 4317,
                (Protocol::HttpProtobuf, "https") => 443,
                (Protocol::HttpProtobuf, _) => 80,
            };
            Ok(format!("{authority}:{port}"))
        }
        _ => Err(variable.error("its port must be a number from 1 to 65535")),
    }
}

/// Headers of the connection and of the body's form. Another value than the exporter's own would break requests.
const FRAMING: [&str; 10] = [
    "connection",
    "content-encoding",
    "content-length",
    "expect",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
];

/// Percent-decoding as in W3C baggage; `None` for an escape without two hexadecimal digits.
fn percent_decode(text: &str) -> Option<Vec<u8>> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        if byte != b'%' {
            out.push(byte);
            rest = tail;
            continue;
        }
        let digit = |at: usize| tail.get(at).and_then(|&digit| char::from(digit).to_digit(16));
        out.push(u8::try_from(digit(0)? << 4 | digit(1)?).ok()?);
        rest = &tail[2..];
    }
    Some(out)
}

#[cfg(test)]
mod tests {
    use std::os::unix::ffi::OsStringExt as _;

    use super::*;

    #[test]
    fn a_variable_that_is_no_text_is_refused_and_not_unset() {
        let variable = |name: &str, value: &[u8]| (OsString::from(name), OsString::from_vec(value.to_vec()));
        let ours = variable("OTEL_EXPORTER_OTLP_TIMEOUT", b"5");
        let foreign = variable("PATH", b"\xff");
        let read = texts([ours.clone(), foreign].into_iter()).unwrap();
        assert_eq!(read.len(), 1);
        let broken = variable("OTEL_EXPORTER_OTLP_CERTIFICATE", b"/\xff.pem");
        let error = texts([ours, broken].into_iter()).unwrap_err();
        assert_eq!(error.to_string(), "OTEL_EXPORTER_OTLP_CERTIFICATE: is not UTF-8");
    }

    #[test]
    fn a_zone_is_decoded_for_connecting_and_kept_from_the_server() {
        let read = |url: &str| {
            let config = Config::from_variables(Some(url), None, &|_| None)?;
            let Endpoint { base, uri, host, .. } = config.traces;
            Ok::<_, ConfigError>((base, uri.authority().unwrap().to_string(), host))
        };
        for url in ["http://[fe80::1%25eth0]:4318", "http://[fe80::1%eth0]:4318"] {
            let (base, authority, host) = read(url).unwrap();
            assert_eq!(base, "http://[fe80::1%eth0]:4318");
            assert_eq!(authority, "[fe80::1]:4318", "a zone means nothing to the server");
            assert_eq!(host, "fe80::1%eth0");
        }
        assert_eq!(read("http://[fe80::1%25br%2D0]").unwrap().2, "fe80::1%br-0");
        // An interface may be called by its number, also by 25.
        assert_eq!(read("http://[fe80::1%252]").unwrap().2, "fe80::1%2");
        assert_eq!(read("http://[fe80::1%25]").unwrap().2, "fe80::1%25");
        for wrong in [
            "http://[fe80::1%]",
            "http://[fe80::1%25%0a]",
            "http://[host%25eth0]",
            "http://[fe80::1%25%zz]",
        ] {
            let error = read(wrong).unwrap_err();
            assert!(error.problem.contains("after %"), "{wrong}: {error}");
        }
    }
}
