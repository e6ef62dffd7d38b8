//! One connection to one endpoint: made when it is needed, kept, and made anew when it broke.

use std::io::Write as _;
use std::time::Duration;

use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use http::header::{CONTENT_ENCODING, CONTENT_TYPE, HOST, USER_AGENT};
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body_util::{BodyExt as _, Full, LengthLimitError, Limited};
use hyper::body::Incoming;
use hyper::client::conn::{http1, http2};
use hyper::rt::{Read, Write};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::rustls::pki_types::ServerName;

use super::config::{ConfigError, Endpoint, Protocol};
use super::grpc;
use super::response::{self, Failure, Kind, MAX_RESPONSE, Outcome, Refusal, chain};
use super::tls;

const AGENT: &str = concat!("ringsight/", env!("CARGO_PKG_VERSION"));

/// Sends requests to one endpoint, over a connection that is kept.
pub(super) struct Client {
    endpoint: Endpoint,
    tls: Option<TlsConnector>,
    headers: HeaderMap,
    connection: Option<Connection>,
    /// Whether the server took the last request whole.
    accepted_last: bool,
}

enum Connection {
    Http1(http1::SendRequest<Full<Bytes>>),
    Grpc(grpc::Connection),
}

impl Client {
    pub(super) fn new(endpoint: &Endpoint) -> Result<Self, ConfigError> {
        let mut headers = endpoint.headers.0.clone();
        headers
            .entry(USER_AGENT)
            .or_insert(HeaderValue::from_static(AGENT));
        // tonic adds gRPC's own.
        if endpoint.protocol == Protocol::HttpProtobuf {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/x-protobuf"));
            let host = endpoint
                .uri
                .authority()
                .map(http::uri::Authority::as_str)
                .unwrap_or_default();
            headers.insert(
                HOST,
                HeaderValue::try_from(host).expect("an authority is visible ASCII"),
            );
            if endpoint.gzip {
                headers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
            }
        }
        let tls = tls::connector(endpoint)?;
        Ok(Self {
            endpoint: endpoint.clone(),
            tls,
            headers,
            connection: None,
            accepted_last: false,
        })
    }

    pub(super) fn base(&self) -> &str {
        &self.endpoint.base
    }

    /// `message` as a request carries it: compressed if the endpoint wants that, at the fastest level.
    pub(super) fn body(&self, message: Bytes) -> Bytes {
        if !self.endpoint.gzip {
            return message;
        }
        let mut encoder = GzEncoder::new(Vec::new(), Compression::fast());
        let written = encoder.write_all(&message).and_then(|()| encoder.finish());
        written.expect("writing to memory does not fail").into()
    }

    /// Sends `body` and interprets the answer.
    pub(super) async fn send(&mut self, body: &Bytes) -> Outcome {
        let limit = self.endpoint.timeout;
        // Failing to connect within the time is failing to connect; anything later is a server that does not answer.
        let outcome = tokio::time::timeout(limit, self.attempt(body)).await;
        let mut outcome = outcome.unwrap_or_else(|_| {
            let answered = self.connection.take().is_some();
            let error = format!("no response within {}", seconds(limit));
            Outcome::refused(Kind::Transient { answered }, error)
        });
        self.accepted_last = matches!(outcome, Outcome::Accepted { rejected: 0, .. });
        match &mut outcome {
            Outcome::Accepted { message: text, .. } | Outcome::Refused(Refusal { error: text, .. }) => {
                self.scrub(text);
            }
        }
        outcome
    }

    async fn attempt(&mut self, body: &Bytes) -> Outcome {
        let reused = self.connection.is_some();
        let mut result = self.exchange(body).await;
        // A kept connection that the server closed meanwhile says nothing about a new one. If the request had left, a server which
        // closes after each refusal would be asked twice as often as the back-off says.
        let stale = match &result {
            Err(Failure::Unsent(_)) => reused,
            Err(Failure::Broken(_)) => reused && self.accepted_last,
            _ => false,
        };
        if stale {
            self.connection = None;
            result = self.exchange(body).await;
        }
        let failure = match result {
            Ok(outcome) => return outcome,
            Err(failure) => failure,
        };
        self.connection = None;
        match failure {
            Failure::Connect(error) => Outcome::refused(Kind::UNREACHABLE, error),
            Failure::Unsent(error) | Failure::Broken(error) => Outcome::refused(Kind::BUSY, error),
            Failure::TooLong => Outcome::malformed(failure.to_string()),
        }
    }

    async fn exchange(&mut self, body: &Bytes) -> Result<Outcome, Failure> {
        if self.connection.is_none() {
            self.connection = Some(self.connect().await?);
        }
        match &mut self.connection {
            Some(Connection::Http1(connection)) => {
                connection.ready().await?;
                let path = self
                    .endpoint
                    .uri
                    .path_and_query()
                    .map_or("/", |path| path.as_str());
                let request = request(path, &self.headers, body);
                let response = connection.send_request(request).await?;
                read(response).await
            }
            Some(Connection::Grpc(connection)) => {
                connection
                    .export(body.clone(), &self.headers, self.endpoint.timeout)
                    .await
            }
            None => unreachable!("connected above"),
        }
    }

    async fn connect(&self) -> Result<Connection, Failure> {
        let failed =
            |what: &str, error: &dyn std::error::Error| Failure::Connect(format!("{what}: {}", chain(error)));
        let host = self.endpoint.host.as_str();
        let port = self.endpoint.uri.port_u16().unwrap_or_default();
        let stream = TcpStream::connect((host, port))
            .await
            .map_err(|e| failed("cannot connect", &e))?;
        // Requests are written whole; waiting to fill a segment only delays their ends.
        stream
            .set_nodelay(true)
            .map_err(|e| failed("cannot connect", &e))?;
        match &self.tls {
            None => self.handshake(TokioIo::new(stream)).await,
            Some(tls) => {
                // A zone is no part of the name in a certificate.
                let name = host.split('%').next().unwrap_or_default().to_owned();
                let name = ServerName::try_from(name).map_err(|e| failed("not a host name", &e))?;
                let stream = tls.connect(name, stream).await.map_err(|error| {
                    let advice = tls::advice(&error);
                    Failure::Connect(format!("TLS handshake failed: {}{advice}", chain(&error)))
                })?;
                self.handshake(TokioIo::new(stream)).await
            }
        }
    }

    async fn handshake<T: Read + Write + Send + Unpin + 'static>(
        &self,
        io: T,
    ) -> Result<Connection, Failure> {
        let failed =
            |error: hyper::Error| Failure::Connect(format!("HTTP handshake failed: {}", chain(&error)));
        // The connection's own task ends with its error in the request that meets it.
        match self.endpoint.protocol {
            Protocol::HttpProtobuf => {
                let (sender, connection) = http1::handshake(io).await.map_err(failed)?;
                tokio::spawn(connection);
                Ok(Connection::Http1(sender))
            }
            Protocol::Grpc => {
                let (sender, connection) =
                    http2::handshake(TokioExecutor::new(), io).await.map_err(failed)?;
                tokio::spawn(connection);
                let connection = grpc::Connection::new(sender, &self.endpoint.uri, self.endpoint.gzip);
                Ok(Connection::Grpc(connection))
            }
        }
    }

    /// Takes header values out of `text`: a server may repeat a token in its complaint about it.
    fn scrub(&self, text: &mut String) {
        for value in self.endpoint.headers.0.values() {
            // The credentials without their scheme (`Bearer`) are as secret. Very short values hide nothing.
            let whole = value.to_str().unwrap_or_default();
            for secret in [whole, whole.rsplit(' ').next().unwrap_or_default()] {
                if secret.len() >= 4 && text.contains(secret) {
                    *text = text.replace(secret, "[redacted]");
                }
            }
        }
    }
}

async fn read(response: Response<Incoming>) -> Result<Outcome, Failure> {
    let (head, body) = response.into_parts();
    let body = Limited::new(body, MAX_RESPONSE)
        .collect()
        .await
        .map_err(|error| {
            if error.is::<LengthLimitError>() {
                Failure::TooLong
            } else {
                Failure::Broken(format!("response cut short: {error}"))
            }
        })?;
    Ok(response::http(head.status, &head.headers, &body.to_bytes()))
}

fn request(target: &str, headers: &HeaderMap, body: &Bytes) -> Request<Full<Bytes>> {
    let mut request = Request::post(target)
        .body(Full::new(body.clone()))
        .expect("the target came from a valid URI");
    *request.headers_mut() = headers.clone();
    request
}

/// A duration for messages.
pub(super) fn seconds(duration: Duration) -> String {
    format!("{} s", duration.as_secs_f64())
}
