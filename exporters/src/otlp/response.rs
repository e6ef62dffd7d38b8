//! What a server's answer means.

use std::borrow::Cow;
use std::io::Read as _;
use std::time::{Duration, SystemTime};

use base64::Engine as _;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use flate2::read::GzDecoder;
use http::{HeaderMap, StatusCode};
use prost::Message;

/// Response bytes that are read; an export response is a few dozen.
pub(super) const MAX_RESPONSE: usize = 1 << 20;
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
        return match grpc_message(headers, body) {
            Some(message) => accepted(&message),
            None => Outcome::malformed("gRPC status OK without one whole message, plain or gzip".to_owned()),
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

/// The one message of a gRPC response. Servers like to answer a compressed request compressed.
fn grpc_message<'b>(headers: &HeaderMap, body: &'b [u8]) -> Option<Cow<'b, [u8]>> {
    let ([flag, a, b, c, d], message) = body.split_first_chunk()?;
    if u32::from_be_bytes([*a, *b, *c, *d]) as usize != message.len() {
        return None;
    }
    match flag {
        0 => Some(Cow::Borrowed(message)),
        1 if headers.get("grpc-encoding")? == "gzip" => {
            let mut plain = Vec::new();
            // A small response can unfold to gigabytes; what is cut off then no longer decodes.
            GzDecoder::new(message)
                .take(MAX_RESPONSE as u64)
                .read_to_end(&mut plain)
                .ok()?;
            Some(Cow::Owned(plain))
        }
        _ => None,
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

#[cfg(test)]
mod tests {
    use std::io::Write as _;

    use flate2::Compression;
    use flate2::write::GzEncoder;
    use proptest::prelude::*;

    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        pairs
            .iter()
            .map(|(name, value)| (name.parse().unwrap(), value.parse().unwrap()))
            .collect()
    }

    fn frame(flag: u8, message: &[u8]) -> Vec<u8> {
        let len = u32::try_from(message.len()).unwrap().to_be_bytes();
        [&[flag], &len[..], message].concat()
    }

    fn gzip(plain: &[u8]) -> Vec<u8> {
        let mut encoder = GzEncoder::new(vec![], Compression::fast());
        encoder.write_all(plain).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn a_compressed_grpc_response_is_read() {
        let partial = PartialSuccess {
            rejected: 3,
            error_message: "old".to_owned(),
        };
        let message = ExportResponse {
            partial_success: Some(partial),
        }
        .encode_to_vec();
        let headers = headers(&[("grpc-status", "0"), ("grpc-encoding", "gzip")]);
        let expected = Outcome::Accepted {
            rejected: 3,
            message: "old".to_owned(),
        };
        for body in [frame(0, &message), frame(1, &gzip(&message))] {
            assert_eq!(grpc(StatusCode::OK, &headers, None, &body), expected);
        }
        // A bomb, a piece, a lie about the length, an encoding nobody asked for.
        let bomb = frame(1, &gzip(&vec![0xff; 8 << 20]));
        for body in [
            bomb,
            frame(1, &gzip(&message)[..12]),
            frame(0, &message)[..7].to_vec(),
            frame(2, &message),
        ] {
            let outcome = grpc(StatusCode::OK, &headers, None, &body);
            assert!(
                matches!(
                    outcome,
                    Outcome::Refused {
                        reason: "malformed_response",
                        ..
                    }
                ),
                "{outcome:?}"
            );
        }
    }

    #[test]
    fn pauses_are_read_and_bounded() {
        let pause = |text| retry_after(&headers(&[("retry-after", text)]));
        assert_eq!(pause("7"), Some(Duration::from_secs(7)));
        assert_eq!(pause("18446744073709551615"), Some(MAX_PAUSE));
        assert_eq!(pause("99999999999999999999"), None);
        assert_eq!(pause("soon"), None);
        assert_eq!(pause("Thu, 01 Jan 1970 00:00:00 GMT"), Some(Duration::ZERO));
        let later = httpdate::fmt_http_date(SystemTime::now() + Duration::from_secs(100));
        assert!((98..=100).contains(&pause(&later).unwrap().as_secs()));
    }

    #[test]
    fn a_proxys_answer_is_told_from_a_grpc_servers() {
        let html = headers(&[("content-type", "text/html")]);
        let busy = grpc(StatusCode::SERVICE_UNAVAILABLE, &html, None, b"busy");
        assert!(matches!(busy, Outcome::Retry { answered: true, .. }));
        let page = grpc(StatusCode::OK, &html, None, b"<html>");
        assert!(matches!(
            page,
            Outcome::Refused {
                reason: "malformed_response",
                ..
            }
        ));
        let absent = grpc(StatusCode::NOT_FOUND, &html, None, b"");
        assert!(matches!(
            absent,
            Outcome::Refused {
                reason: "rejected",
                ..
            }
        ));
    }

    #[test]
    fn a_servers_words_are_one_line_of_bounded_length() {
        let Outcome::Refused { error, .. } = http(
            StatusCode::BAD_REQUEST,
            &HeaderMap::new(),
            &b"\x1b[2J\nx".repeat(500),
        ) else {
            panic!("400 is final")
        };
        assert!(error.len() < 300 && !error.contains(char::is_control), "{error}");
    }

    proptest! {
        #[test]
        fn rubbish_is_no_panic(
            body in proptest::collection::vec(any::<u8>(), 0..64),
            status in "[0-9a-z]{0,3}",
            text in "[ -~]{0,20}",
            framed: bool,
        ) {
            let headers = headers(&[
                ("grpc-status", &status),
                ("grpc-message", &text),
                ("grpc-status-details-bin", &text),
                ("retry-after", &text),
                ("content-type", &text),
            ]);
            let body = if framed { frame(0, &body) } else { body };
            for code in [StatusCode::OK, StatusCode::TOO_MANY_REQUESTS] {
                grpc(code, &headers, None, &body);
                http(code, &headers, &body);
            }
            retry_info(base64::engine::general_purpose::STANDARD.encode(&body).as_bytes());
        }
    }
}
