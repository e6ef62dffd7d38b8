//! What a gRPC server's answer means, or that of a proxy in its place.

use std::borrow::Cow;
use std::io::Read as _;
use std::time::Duration;

use base64::Engine as _;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use flate2::read::GzDecoder;
use http::{HeaderMap, StatusCode};
use prost::Message;

use super::{MAX_PAUSE, MAX_RESPONSE, Outcome, RpcStatus, accepted, content_type, retry_after, text};

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

/// Interprets a gRPC response: `headers` as they came first, `trailers` if any came.
pub(in crate::otlp) fn grpc(
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
        12 => Outcome::Unsupported { error },
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
        // And what it calls UNIMPLEMENTED.
        404 => Outcome::Unsupported {
            error: format!("HTTP {status} without a gRPC status"),
        },
        _ => Outcome::refused(format!("HTTP {status} without a gRPC status")),
    }
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

    use super::super::tests::headers;
    use super::super::{ExportResponse, PartialSuccess};
    use super::*;

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
        assert!(matches!(absent, Outcome::Unsupported { .. }));
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
            }
            retry_info(base64::engine::general_purpose::STANDARD.encode(&body).as_bytes());
        }
    }
}
