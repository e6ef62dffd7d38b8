//! What a server's answer means to the request, and how an answer over HTTP is read.

use std::time::{Duration, SystemTime};

use http::{HeaderMap, HeaderValue, StatusCode};
use prost::Message;
use ringsight_output::Printable;

use crate::model::Tally;

/// Response bytes that are read; an export response is a few dozen.
pub(super) const MAX_RESPONSE: usize = 1 << 20;
/// Longest wait that a server may ask for.
pub(super) const MAX_WAIT: Duration = Duration::from_secs(3600);
/// Characters of a server's own words that are kept.
const MAX_TEXT: usize = 256;

/// What a server made of a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Taken, but for `rejected` items.
    Accepted { rejected: u64, message: String },
    /// Not taken.
    Refused(Refusal),
}

/// Why a request was not taken.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Refusal {
    pub(super) kind: Kind,
    /// How long the server asks to wait, at most [`MAX_WAIT`].
    pub(super) wait: Option<Duration>,
    pub(super) error: String,
}

/// What a refusal says about the next attempt.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    /// It may succeed. `answered` tells a server that answers from one that cannot be reached.
    Transient { answered: bool },
    /// It may succeed with less in it.
    TooLarge,
    /// It will not succeed: the items are dropped for this reason.
    Permanent(&'static str),
}

impl Kind {
    /// A server that answers, and may take the request later.
    pub(super) const BUSY: Self = Self::Transient { answered: true };
    /// No server to be reached.
    pub(super) const UNREACHABLE: Self = Self::Transient { answered: false };
    /// The server does not take the request.
    pub(super) const REJECTED: Self = Self::Permanent("rejected");
    /// There is nobody who would take this signal.
    pub(super) const UNSUPPORTED: Self = Self::Permanent(Tally::UNSUPPORTED);
    /// The answer does not say whether the server took the request.
    pub(super) const MALFORMED: Self = Self::Permanent("malformed_response");
}

impl Outcome {
    pub(super) fn refused(kind: Kind, error: String) -> Self {
        Self::Refused(Refusal {
            kind,
            wait: None,
            error,
        })
    }

    pub(super) fn malformed(error: String) -> Self {
        Self::refused(Kind::MALFORMED, error)
    }
}

/// Whether `said` complains about the size of a request. Servers use no code of their own for that; these are the words of:
/// gRPC in Go, C, Python and Node.js; gRPC in Java; tonic; gRPC in .NET; `net/http` of Go, hence of the OpenTelemetry Collector.
pub(super) fn says_too_large(said: &str) -> bool {
    let said = said.to_ascii_lowercase();
    let words = [
        "message larger than max",
        "after decompression larger than max",
        "message exceeds maximum size",
        "message length too large",
        "exceeded while decompressing message",
        "exceeds the maximum configured message size",
        "request body too large",
    ];
    words.iter().any(|words| said.contains(words))
}

/// Why an attempt brought no answer.
#[derive(Clone, Debug, thiserror::Error)]
pub(super) enum Failure {
    /// No connection.
    #[error("{0}")]
    Connect(String),
    /// The connection was closed before the request left.
    #[error("{0}")]
    Unsent(String),
    /// The connection broke.
    #[error("{0}")]
    Broken(String),
    /// The answer is longer than any export response.
    #[error("a response of more than {MAX_RESPONSE} bytes")]
    TooLong,
}

impl From<hyper::Error> for Failure {
    fn from(error: hyper::Error) -> Self {
        let text = format!("connection broken: {}", chain(&error));
        if error.is_closed() || error.is_canceled() {
            Self::Unsent(text)
        } else {
            Self::Broken(text)
        }
    }
}

/// `ExportTraceServiceResponse` and those of the other signals, which are alike.
#[derive(Clone, PartialEq, Message)]
struct ExportResponse {
    #[prost(message, optional, tag = "1")]
    partial_success: Option<PartialSuccess>,
}

#[derive(Clone, PartialEq, Message)]
struct PartialSuccess {
    #[prost(int64, tag = "1")]
    rejected: i64,
    #[prost(string, tag = "2")]
    error_message: String,
}

/// `google.rpc.Status`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct RpcStatus {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    message: String,
    #[prost(message, repeated, tag = "3")]
    pub(super) details: Vec<Any>,
}

/// `google.protobuf.Any`.
#[derive(Clone, PartialEq, Message)]
pub(super) struct Any {
    #[prost(string, tag = "1")]
    pub(super) type_url: String,
    #[prost(bytes = "vec", tag = "2")]
    pub(super) value: Vec<u8>,
}

/// Interprets an HTTP response.
pub(super) fn http(status: StatusCode, headers: &HeaderMap, body: &[u8]) -> Outcome {
    let kind = content_type(headers);
    if status.is_success() {
        return match kind {
            _ if body.is_empty() => Outcome::Accepted {
                rejected: 0,
                message: String::new(),
            },
            "application/x-protobuf" | "" => accepted(body),
            "application/json" => accepted_json(body),
            _ => Outcome::malformed(format!(
                "HTTP {status}, but the body is {}: not an OTLP server?",
                text(kind)
            )),
        };
    }
    let said = if kind == "application/x-protobuf" {
        RpcStatus::decode(body).map_or_else(
            |_| "malformed error message".to_owned(),
            |status| text(&status.message),
        )
    } else {
        text(&String::from_utf8_lossy(&body[..body.len().min(4 * MAX_TEXT)]))
    };
    let mut error = format!("HTTP {status}");
    if status.is_redirection() {
        let target = headers.get(http::header::LOCATION).map(HeaderValue::as_bytes);
        let target = text(&String::from_utf8_lossy(target.unwrap_or_default()));
        error = format!("{error}: redirects are not followed; name the endpoint that answers ({target})");
    } else if !said.is_empty() {
        error = format!("{error}: {said}");
    }
    let kind = match status.as_u16() {
        429 | 502 | 503 | 504 => Kind::BUSY,
        404 | 501 => Kind::UNSUPPORTED,
        413 => Kind::TooLarge,
        400 if says_too_large(&said) => Kind::TooLarge,
        _ => Kind::REJECTED,
    };
    Outcome::Refused(Refusal {
        kind,
        wait: retry_after(headers),
        error,
    })
}

/// Interprets an encoded export response.
pub(super) fn accepted(body: &[u8]) -> Outcome {
    match ExportResponse::decode(body) {
        Ok(response) => {
            let partial = response.partial_success.unwrap_or_default();
            let rejected = u64::try_from(partial.rejected).unwrap_or(0);
            Outcome::Accepted {
                rejected,
                message: text(&partial.error_message),
            }
        }
        Err(error) => Outcome::malformed(format!("the response is not an OTLP export response: {error}")),
    }
}

/// As [`accepted`], of a server that answers protobuf with JSON; 64-bit numbers are strings there, or numbers.
fn accepted_json(body: &[u8]) -> Outcome {
    let response: serde_json::Value = match serde_json::from_slice(body) {
        Ok(response @ serde_json::Value::Object(_)) => response,
        Ok(_) => return Outcome::malformed("the response is JSON, but not an object".to_owned()),
        Err(error) => return Outcome::malformed(format!("the response is not JSON: {error}")),
    };
    let partial = &response["partialSuccess"];
    let number = |value: &serde_json::Value| value.as_u64().or_else(|| value.as_str()?.parse().ok());
    let rejected = ["rejectedSpans", "rejectedDataPoints", "rejectedLogRecords"]
        .iter()
        .find_map(|key| number(&partial[*key]));
    let message = text(partial["errorMessage"].as_str().unwrap_or_default());
    Outcome::Accepted {
        rejected: rejected.unwrap_or(0),
        message,
    }
}

/// The media type, without parameters.
fn content_type(headers: &HeaderMap) -> &str {
    let value = headers
        .get(http::header::CONTENT_TYPE)
        .and_then(|value| value.to_str().ok());
    value
        .and_then(|value| value.split(';').next())
        .unwrap_or_default()
        .trim()
}

/// `Retry-After`, in seconds or as a date.
pub(super) fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let value = headers.get(http::header::RETRY_AFTER)?.to_str().ok()?.trim();
    let wait = match value.parse() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => httpdate::parse_http_date(value)
            .ok()?
            .duration_since(SystemTime::now())
            .unwrap_or_default(),
    };
    Some(wait.min(MAX_WAIT))
}

/// An error with its causes, which hyper's own text leaves out.
pub(super) fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let cause_text = cause.to_string();
        if !text.contains(&cause_text) {
            text = format!("{text}: {cause_text}");
        }
        source = cause.source();
    }
    text
}

/// A server's words, made fit for one line of a terminal.
pub(super) fn text(raw: &str) -> String {
    let line = Printable::from(raw.trim()).to_string();
    match line.char_indices().nth(MAX_TEXT) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()))
            .collect()
    }

    #[test]
    fn pauses_are_read_and_bounded() {
        let pause = |text| retry_after(&headers(&[("retry-after", text)]));
        assert_eq!(pause("7"), Some(Duration::from_secs(7)));
        assert_eq!(pause("18446744073709551615"), Some(MAX_WAIT));
        assert_eq!(pause("99999999999999999999"), None);
        assert_eq!(pause("soon"), None);
        assert_eq!(pause("Thu, 01 Jan 1970 00:00:00 GMT"), Some(Duration::ZERO));
        let later = httpdate::fmt_http_date(SystemTime::now() + Duration::from_secs(100));
        assert!((98..=100).contains(&pause(&later).unwrap().as_secs()));
    }

    #[test]
    fn a_servers_words_are_one_line_of_bounded_length() {
        let answer = http(
            StatusCode::BAD_REQUEST,
            &HeaderMap::new(),
            &b"\x1b[2J\nx".repeat(500),
        );
        let Outcome::Refused(Refusal { error, .. }) = answer else {
            panic!("400 is no success")
        };
        assert!(error.len() < 300 && !error.contains(char::is_control), "{error}");
    }

    #[test]
    fn a_complaint_about_the_size_is_told_from_others() {
        for said in [
            "grpc: received message larger than max (5148431 vs. 4194304)",
            "grpc: received message after decompression larger than max 4194304",
            "SERVER: Received message larger than max (5148431 vs. 4194304)",
            "gRPC message exceeds maximum size 4194304: 5148431",
            "Error, decoded message length too large: found 5148431 bytes, the limit is: 4194304 bytes",
            "Error decompressing: size limit, of 4194304 bytes, exceeded while decompressing message",
            "Received message exceeds the maximum configured message size.",
            "http: request body too large",
        ] {
            assert!(says_too_large(said), "{said}");
        }
        // Smaller requests help against none of these.
        for said in [
            "TRACE_TOO_LARGE: max size of trace (52428800) exceeded",
            "quota exhausted",
            "",
            "out of range",
        ] {
            assert!(!says_too_large(said), "{said}");
        }
    }

    proptest! {
        #[test]
        fn rubbish_is_no_panic(
            body in proptest::collection::vec(any::<u8>(), 0..64),
            text in "[ -~]{0,20}",
        ) {
            let headers = headers(&[("retry-after", &text), ("content-type", &text)]);
            for code in [StatusCode::OK, StatusCode::TOO_MANY_REQUESTS] {
                http(code, &headers, &body);
            }
        }
    }
}
