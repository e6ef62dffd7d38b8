//! What a server's answer means.

use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use http::{HeaderMap, StatusCode};
use prost::Message;

/// Longest pause that a server may ask for; more would only overflow.
const MAX_PAUSE: Duration = Duration::from_secs(3600);
/// Characters of a server's own words that are kept.
const MAX_TEXT: usize = 256;

/// What became of a request.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    /// Taken, but for `rejected` items.
    Accepted { rejected: u64, message: String },
    /// Worth repeating, not before `after` if the server said so.
    Retry {
        after: Option<Duration>,
        answered: bool,
        error: String,
    },
    /// Not worth repeating.
    Refused { reason: &'static str, error: String },
}

impl Outcome {
    pub(super) fn malformed(error: String) -> Self {
        Self::Refused {
            reason: "malformed_response",
            error,
        }
    }

    fn refused(error: String) -> Self {
        Self::Refused {
            reason: "rejected",
            error,
        }
    }
}

/// `ExportTraceServiceResponse` and `ExportMetricsServiceResponse`, which are alike.
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
struct RpcStatus {
    #[prost(int32, tag = "1")]
    code: i32,
    #[prost(string, tag = "2")]
    message: String,
    #[prost(message, repeated, tag = "3")]
    details: Vec<Any>,
}

/// `google.protobuf.Any`.
#[derive(Clone, PartialEq, Message)]
struct Any {
    #[prost(string, tag = "1")]
    type_url: String,
    #[prost(bytes = "vec", tag = "2")]
    value: Vec<u8>,
}

/// `google.rpc.RetryInfo`.
#[derive(Clone, PartialEq, Message)]
struct RetryInfo {
    #[prost(message, optional, tag = "1")]
    retry_delay: Option<ProtoDuration>,
}

/// `google.protobuf.Duration`.
#[derive(Clone, PartialEq, Message)]
struct ProtoDuration {
    #[prost(int64, tag = "1")]
    seconds: i64,
    #[prost(int32, tag = "2")]
    nanos: i32,
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
    let error = if said.is_empty() {
        format!("HTTP {status}")
    } else {
        format!("HTTP {status}: {said}")
    };
    match status.as_u16() {
        429 | 502 | 503 | 504 => Outcome::Retry {
            after: retry_after(headers),
            answered: true,
            error,
        },
        _ => Outcome::refused(error),
    }
}

/// Interprets a gRPC response: `headers` as they came first, `trailers` if any came.
pub(super) fn grpc(
    status: StatusCode,
    headers: &HeaderMap,
    trailers: Option<&HeaderMap>,
    body: &[u8],
) -> Outcome {
    // A response without a message has its trailers in its headers.
    let trailers = trailers
        .filter(|trailers| trailers.contains_key("grpc-status"))
        .unwrap_or(headers);
    let Some(code) = trailers.get("grpc-status") else {
        return not_grpc(status, headers);
    };
    let Some(code) = code.to_str().ok().and_then(|code| code.parse::<u8>().ok()) else {
        return Outcome::malformed("grpc-status is not a number".to_owned());
    };
    if code == 0 {
        return match body.split_first_chunk::<5>() {
            Some(([0, a, b, c, d], message))
                if u32::from_be_bytes([*a, *b, *c, *d]) as usize == message.len() =>
            {
                accepted(message)
            }
            _ => Outcome::malformed("gRPC status OK without one whole uncompressed message".to_owned()),
        };
    }
    let message = trailers
        .get("grpc-message")
        .map(|text| percent_decode_lossy(text.as_bytes()))
        .unwrap_or_default();
    let error = format!("gRPC {}: {}", code_name(code), text(&message));
    let after = trailers
        .get("grpc-status-details-bin")
        .and_then(|details| retry_info(details.as_bytes()));
    match code {
        // CANCELLED, DEADLINE_EXCEEDED, ABORTED, OUT_OF_RANGE, UNAVAILABLE, DATA_LOSS.
        1 | 4 | 10 | 11 | 14 | 15 => Outcome::Retry {
            after,
            answered: true,
            error,
        },
        // RESOURCE_EXHAUSTED passes only if the server says when.
        8 if after.is_some() => Outcome::Retry {
            after,
            answered: true,
            error,
        },
        _ => Outcome::refused(error),
    }
}

/// A response that a proxy gave in place of a gRPC server.
fn not_grpc(status: StatusCode, headers: &HeaderMap) -> Outcome {
    let kind = text(content_type(headers));
    match status.as_u16() {
        // What gRPC's HTTP mapping calls UNAVAILABLE.
        429 | 502 | 503 | 504 => Outcome::Retry {
            after: retry_after(headers),
            answered: true,
            error: format!("HTTP {status} without a gRPC status"),
        },
        200 => Outcome::malformed(format!(
            "no gRPC status; content type `{kind}`: not a gRPC server?"
        )),
        _ => Outcome::refused(format!("HTTP {status} without a gRPC status")),
    }
}

fn accepted(body: &[u8]) -> Outcome {
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
    let rejected = ["rejectedSpans", "rejectedDataPoints"]
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
fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let value = headers.get(http::header::RETRY_AFTER)?.to_str().ok()?.trim();
    let pause = match value.parse() {
        Ok(seconds) => Duration::from_secs(seconds),
        Err(_) => httpdate::parse_http_date(value)
            .ok()?
            .duration_since(SystemTime::now())
            .unwrap_or_default(),
    };
    Some(pause.min(MAX_PAUSE))
}

/// The delay in the `RetryInfo` of an encoded `google.rpc.Status`.
fn retry_info(details: &[u8]) -> Option<Duration> {
    // Metadata is base64 without padding by the letter of gRPC, and with it by the habit of some.
    let config = GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    let status = GeneralPurpose::new(&STANDARD, config).decode(details).ok()?;
    let status = RpcStatus::decode(&status[..]).ok()?;
    let info = status
        .details
        .iter()
        .find(|detail| detail.type_url.ends_with("/google.rpc.RetryInfo"))?;
    let delay = RetryInfo::decode(&info.value[..])
        .ok()?
        .retry_delay
        .unwrap_or_default();
    let seconds = Duration::from_secs(u64::try_from(delay.seconds).unwrap_or(0));
    let nanos = Duration::from_nanos(u64::try_from(delay.nanos).unwrap_or(0));
    Some(seconds.saturating_add(nanos).min(MAX_PAUSE))
}

/// Percent-decoding of a gRPC message; whatever is not an escape stays.
fn percent_decode_lossy(text: &[u8]) -> String {
    let mut out = Vec::with_capacity(text.len());
    let mut at = 0;
    while at < text.len() {
        let digit = |at: usize| char::from(*text.get(at)?).to_digit(16).map(|digit| digit as u8);
        match (text[at], digit(at + 1), digit(at + 2)) {
            (b'%', Some(high), Some(low)) => {
                out.push(high << 4 | low);
                at += 3;
            }
            (byte, ..) => {
                out.push(byte);
                at += 1;
            }
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

/// A server's words, made fit for one line of a terminal.
fn text(raw: &str) -> String {
    let line: String = raw
        .trim()
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    match line.char_indices().nth(MAX_TEXT) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

fn code_name(code: u8) -> &'static str {
    const NAMES: [&str; 17] = [
        "OK",
        "CANCELLED",
        "UNKNOWN",
        "INVALID_ARGUMENT",
        "DEADLINE_EXCEEDED",
        "NOT_FOUND",
        "ALREADY_EXISTS",
        "PERMISSION_DENIED",
        "RESOURCE_EXHAUSTED",
        "FAILED_PRECONDITION",
        "ABORTED",
        "OUT_OF_RANGE",
        "UNIMPLEMENTED",
        "INTERNAL",
        "UNAVAILABLE",
        "DATA_LOSS",
        "UNAUTHENTICATED",
    ];
    NAMES
        .get(usize::from(code))
        .copied()
        .unwrap_or("status outside gRPC's")
}
