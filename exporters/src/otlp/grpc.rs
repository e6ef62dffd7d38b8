//! OTLP over gRPC, by `tonic`: it frames requests, decodes responses and reads statuses.
//!
//! Requests arrive encoded, so [`PassThrough`] hands their bytes on. The connection is the exporter's own and not tonic's `Channel`:
//! one connector (time-outs, TLS that names the file which is wrong, texts of errors) serves HTTP/1.1 too.
//!
//! [`Http2`] stands between tonic and the connection, since a proxy may answer in a server's place:
//! - A response without a gRPC status in its headers and with another HTTP status than 200 does not reach tonic, which would take its
//!   body for a broken frame. It is [`NoResponse::Proxy`].
//! - Status details that are no base64 are removed: tonic 0.14 panics on them.
//! - It marks the message as compressed: tonic compresses at a level of its own, at twice the processor time, so it gets what
//!   [`Client::body`](super::client::Client::body) compressed.
//! - It notes whether the server sent a failure. A status that the server did not send is tonic's description of a response that
//!   cannot be read: the response is malformed.

use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use base64::Engine as _;
use base64::alphabet::STANDARD;
use base64::engine::{DecodePaddingMode, GeneralPurpose, GeneralPurposeConfig};
use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue, Request, Response, StatusCode, Uri};
use http_body_util::BodyExt as _;
use http_body_util::combinators::UnsyncBoxBody;
use hyper::client::conn::http2::SendRequest;
use prost::Message;
use tonic::body::Body;
use tonic::client::{Grpc, GrpcService};
use tonic::codec::{Codec, CompressionEncoding, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::metadata::MetadataMap;
use tonic::{Code, Status};

use super::response::{
    self, Failure, Kind, MAX_RESPONSE, MAX_WAIT, Outcome, Refusal, RpcStatus, says_too_large, text,
};

const DETAILS: &str = "grpc-status-details-bin";

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

/// A gRPC client on one connection.
pub(super) struct Connection {
    client: Grpc<Http2>,
    path: PathAndQuery,
    /// Whether the server sent a status other than OK in answer to the last request.
    failed: Arc<AtomicBool>,
}

impl Connection {
    /// `uri` is the method's, with scheme and authority. With `gzip`, messages to [`export`](Self::export) are compressed.
    pub(super) fn new(sender: SendRequest<Body>, uri: &Uri, gzip: bool) -> Self {
        let failed = Arc::new(AtomicBool::new(false));
        let service = Http2 {
            sender,
            gzip,
            failed: Arc::clone(&failed),
        };
        let mut origin = uri.clone().into_parts();
        let path = origin.path_and_query.replace(PathAndQuery::from_static("/"));
        let origin = Uri::from_parts(origin).expect("a URI whose path was replaced");
        let client = Grpc::with_origin(service, origin)
            .accept_compressed(CompressionEncoding::Gzip)
            .max_decoding_message_size(MAX_RESPONSE);
        Self {
            client,
            path: path.unwrap_or_else(|| PathAndQuery::from_static("/")),
            failed,
        }
    }

    /// Sends an encoded export request and interprets the answer. The server is told of `timeout`, which the caller enforces.
    pub(super) async fn export(
        &mut self,
        message: Bytes,
        headers: &HeaderMap,
        timeout: Duration,
    ) -> Result<Outcome, Failure> {
        self.client.ready().await.map_err(Failure::from)?;
        self.failed.store(false, Ordering::Relaxed);
        let mut request = tonic::Request::new(message);
        *request.metadata_mut() = MetadataMap::from_headers(headers.clone());
        request.set_timeout(timeout);
        let status = match self.client.unary(request, self.path.clone(), PassThrough).await {
            Ok(answer) => return Ok(response::accepted(answer.get_ref())),
            Err(status) => status,
        };
        let source = std::error::Error::source(&status);
        match source.and_then(|source| source.downcast_ref::<NoResponse>()) {
            Some(NoResponse::Proxy(outcome)) => Ok(outcome.clone()),
            Some(NoResponse::Failed(failure)) => Err(failure.clone()),
            None if self.failed.load(Ordering::Relaxed) => Ok(outcome(&status)),
            None => Ok(Outcome::malformed(format!(
                "not a gRPC response: {}",
                text(status.message())
            ))),
        }
    }
}

/// Why tonic gets no response.
#[derive(Clone, Debug, thiserror::Error)]
enum NoResponse {
    /// The connection broke.
    #[error("{0}")]
    Failed(#[from] Failure),
    /// Somebody who speaks no gRPC answered.
    #[error("the response is not gRPC's")]
    Proxy(Outcome),
}

impl From<NoResponse> for Failure {
    fn from(cause: NoResponse) -> Self {
        match cause {
            NoResponse::Failed(failure) => failure,
            NoResponse::Proxy(_) => Self::Broken(cause.to_string()),
        }
    }
}

impl From<hyper::Error> for NoResponse {
    fn from(error: hyper::Error) -> Self {
        Self::Failed(error.into())
    }
}

/// An HTTP/2 connection as tonic wants it.
struct Http2 {
    sender: SendRequest<Body>,
    gzip: bool,
    failed: Arc<AtomicBool>,
}

impl GrpcService<Body> for Http2 {
    type ResponseBody = UnsyncBoxBody<Bytes, NoResponse>;
    type Error = NoResponse;
    type Future = Pin<Box<dyn Future<Output = Result<Response<Self::ResponseBody>, NoResponse>> + Send>>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), NoResponse>> {
        self.sender.poll_ready(context).map_err(NoResponse::from)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        if self.gzip {
            request = compressed(request);
        }
        let sent = self.sender.send_request(request);
        let failed = Arc::clone(&self.failed);
        Box::pin(async move {
            let (mut head, body) = sent.await?.into_parts();
            if head.status != StatusCode::OK && !head.headers.contains_key("grpc-status") {
                return Err(NoResponse::Proxy(not_grpc(head.status, &head.headers)));
            }
            examine(&mut head.headers, &failed);
            let body = body
                .map_frame(move |mut frame| {
                    if let Some(trailers) = frame.trailers_mut() {
                        examine(trailers, &failed);
                    }
                    frame
                })
                .map_err(|error| Failure::Broken(format!("response cut short: {error}")).into())
                .boxed_unsync();
            Ok(Response::from_parts(head, body))
        })
    }
}

/// Says of a request's message that it is compressed: in a header, and in the flag that begins the message's frame.
fn compressed(request: Request<Body>) -> Request<Body> {
    let mut flagged = false;
    let mut request = request.map(|body| {
        Body::new(body.map_frame(move |frame| {
            frame.map_data(|data| {
                if flagged || data.is_empty() {
                    return data;
                }
                flagged = true;
                let mut data = BytesMut::from(data);
                data[0] = 1;
                data.freeze()
            })
        }))
    });
    request
        .headers_mut()
        .insert("grpc-encoding", HeaderValue::from_static("gzip"));
    request
}

/// Notes a failure that headers or trailers tell of, and removes details that tonic cannot read.
fn examine(headers: &mut HeaderMap, failed: &AtomicBool) {
    if headers.get("grpc-status").is_some_and(|status| status != "0") {
        failed.store(true, Ordering::Relaxed);
    }
    // Metadata is base64 without padding by the letter of gRPC, and with it by the habit of some.
    let config = GeneralPurposeConfig::new().with_decode_padding_mode(DecodePaddingMode::Indifferent);
    let base64 = GeneralPurpose::new(&STANDARD, config);
    let unreadable = |details: &HeaderValue| base64.decode(details.as_bytes()).is_err();
    if headers.get(DETAILS).is_some_and(unreadable) {
        headers.remove(DETAILS);
    }
}

/// The messages of `Export`, requests in encoded form.
struct PassThrough;

impl Codec for PassThrough {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for PassThrough {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, message: Bytes, out: &mut EncodeBuf<'_>) -> Result<(), Status> {
        out.reserve(message.len());
        out.put(message);
        Ok(())
    }
}

impl Decoder for PassThrough {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, message: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(message.copy_to_bytes(message.remaining())))
    }
}

/// What a failure that the server sent means to a request.
fn outcome(status: &Status) -> Outcome {
    let wait = asked_wait(status);
    let kind = match status.code() {
        Code::ResourceExhausted | Code::OutOfRange if says_too_large(status.message()) => Kind::TooLarge,
        Code::Cancelled
        | Code::DeadlineExceeded
        | Code::Aborted
        | Code::OutOfRange
        | Code::Unavailable
        | Code::DataLoss => Kind::BUSY,
        // It passes only if the server says when.
        Code::ResourceExhausted if wait.is_some() => Kind::BUSY,
        Code::Unimplemented => Kind::UNSUPPORTED,
        _ => Kind::REJECTED,
    };
    Outcome::Refused(Refusal {
        kind,
        wait,
        error: format!("gRPC {}: {}", name(status.code()), text(status.message())),
    })
}

/// A response of a proxy that answered in a gRPC server's place, by gRPC's mapping of HTTP statuses.
fn not_grpc(status: StatusCode, headers: &HeaderMap) -> Outcome {
    let kind = match status.as_u16() {
        429 | 502 | 503 | 504 => Kind::BUSY,
        404 => Kind::UNSUPPORTED,
        413 => Kind::TooLarge,
        _ => Kind::REJECTED,
    };
    Outcome::Refused(Refusal {
        kind,
        wait: response::retry_after(headers),
        error: format!("HTTP {status} without a gRPC status"),
    })
}

/// How long the server asks to wait: by `RetryInfo`, by gRPC's push-back in milliseconds, or by HTTP's header, which proxies add.
fn asked_wait(status: &Status) -> Option<Duration> {
    let headers = status.metadata().as_ref();
    let pushback = headers.get("grpc-retry-pushback-ms");
    let pushback = pushback.and_then(|value| value.to_str().ok()?.trim().parse().ok());
    let waits = [
        retry_info(status.details()),
        pushback.map(|wait| Duration::from_millis(wait).min(MAX_WAIT)),
        response::retry_after(headers),
    ];
    waits.into_iter().flatten().max()
}

/// The delay in the `RetryInfo` of an encoded `google.rpc.Status`.
fn retry_info(details: &[u8]) -> Option<Duration> {
    let status = RpcStatus::decode(details).ok()?;
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
    Some(seconds.saturating_add(nanos).min(MAX_WAIT))
}

/// The specification's name of a code, as `RESOURCE_EXHAUSTED`.
fn name(code: Code) -> String {
    let mut name = String::new();
    for letter in format!("{code:?}").chars() {
        if letter.is_ascii_uppercase() && !name.is_empty() {
            name.push('_');
        }
        name.push(letter.to_ascii_uppercase());
    }
    name
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn codes_have_the_specifications_names() {
        for (code, expected) in [
            (Code::Unimplemented, "UNIMPLEMENTED"),
            (Code::ResourceExhausted, "RESOURCE_EXHAUSTED"),
            (Code::Ok, "OK"),
        ] {
            assert_eq!(name(code), expected);
        }
    }

    #[test]
    fn a_proxys_answer_is_retried_when_it_passes() {
        let headers = HeaderMap::from_iter([(http::header::RETRY_AFTER, "7".parse().unwrap())]);
        for (status, expected) in [
            (StatusCode::SERVICE_UNAVAILABLE, Kind::BUSY),
            (StatusCode::NOT_FOUND, Kind::UNSUPPORTED),
            (StatusCode::PAYLOAD_TOO_LARGE, Kind::TooLarge),
            (StatusCode::FORBIDDEN, Kind::REJECTED),
        ] {
            let Outcome::Refused(refusal) = not_grpc(status, &headers) else {
                panic!("{status} is no success")
            };
            assert_eq!(
                (refusal.kind, refusal.wait),
                (expected, Some(Duration::from_secs(7))),
                "{status}"
            );
        }
    }

    #[test]
    fn every_way_to_ask_for_a_wait_is_heard() {
        for (name, value, seconds) in [
            ("retry-after", "7", Some(7)),
            ("grpc-retry-pushback-ms", "9000", Some(9)),
            ("grpc-retry-pushback-ms", "99999999999999", Some(3_600)),
            // "Do not retry": our own back-off does.
            ("grpc-retry-pushback-ms", "-1", None),
        ] {
            let headers = HeaderMap::from_iter([(
                http::HeaderName::from_static(name),
                HeaderValue::from_static(value),
            )]);
            let metadata = MetadataMap::from_headers(headers);
            let status = Status::with_metadata(Code::ResourceExhausted, "full", metadata);
            let Outcome::Refused(refusal) = outcome(&status) else {
                panic!("{status} is no success")
            };
            let kind = if seconds.is_some() {
                Kind::BUSY
            } else {
                Kind::REJECTED
            };
            assert_eq!(
                (refusal.kind, refusal.wait),
                (kind, seconds.map(Duration::from_secs)),
                "{value}"
            );
        }
    }

    proptest! {
        #[test]
        fn any_headers_are_survived(status in "[0-9a-z]{0,3}", value in "[ -~]{0,20}", details: Vec<u8>) {
            let mut headers = HeaderMap::new();
            for (name, value) in [("grpc-status", &status), ("grpc-message", &value), (DETAILS, &value)] {
                headers.insert(name, value.parse().unwrap());
            }
            let failed = AtomicBool::new(false);
            examine(&mut headers, &failed);
            prop_assert_eq!(failed.into_inner(), status != "0");
            outcome(&Status::from_header_map(&headers).unwrap());
            retry_info(&details);
        }
    }
}
