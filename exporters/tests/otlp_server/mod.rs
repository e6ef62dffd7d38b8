//! OTLP servers for tests: a real one over gRPC, and a scripted one over HTTP/1.1.
#![allow(dead_code, reason = "each test file uses a part")]

use std::collections::{BTreeMap, VecDeque};
use std::io::{BufRead as _, BufReader, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::{Arc, Mutex, MutexGuard, Weak};
use std::thread;
use std::time::{Duration, Instant};

use http::{HeaderMap, HeaderName, HeaderValue};
use opentelemetry_proto::tonic::collector::logs::v1 as logs;
use opentelemetry_proto::tonic::collector::metrics::v1 as metrics;
use opentelemetry_proto::tonic::collector::trace::v1 as trace;
use prost::Message;
use tonic::codec::CompressionEncoding;
use tonic::transport::{Identity, Server, ServerTlsConfig, server::TcpIncoming};
use tonic::{Request, Response, Status};

/// Waits until `condition` holds; fails the test if it takes half a minute.
pub(crate) fn eventually(what: &str, condition: impl Fn() -> bool) {
    let started = Instant::now();
    while !condition() {
        assert!(
            started.elapsed() < Duration::from_secs(30),
            "waited in vain for {what}"
        );
        thread::yield_now();
    }
}

/// What a server took.
#[derive(Clone, Default)]
pub(crate) struct Received {
    pub(crate) traces: trace::ExportTraceServiceRequest,
    pub(crate) metrics: metrics::ExportMetricsServiceRequest,
    pub(crate) logs: logs::ExportLogsServiceRequest,
    pub(crate) headers: Vec<HeaderMap>,
}

impl Received {
    pub(crate) fn trace_ids(&self) -> Vec<Vec<u8>> {
        let scopes = self
            .traces
            .resource_spans
            .iter()
            .flat_map(|group| &group.scope_spans);
        scopes
            .flat_map(|scope| &scope.spans)
            .map(|span| span.trace_id.clone())
            .collect()
    }
}

/// A scripted HTTP response.
#[derive(Clone)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    pub(crate) headers: Vec<(&'static str, String)>,
    pub(crate) body: Vec<u8>,
    /// Sent instead of an HTTP response.
    pub(crate) raw: Option<Vec<u8>>,
}

impl Answer {
    pub(crate) fn status(status: u16) -> Self {
        Self {
            status,
            headers: vec![],
            body: vec![],
            raw: None,
        }
    }

    pub(crate) fn header(mut self, name: &'static str, value: &str) -> Self {
        self.headers.push((name, value.to_owned()));
        self
    }
}

/// 200 with a protobuf body.
pub(crate) fn ok(body: &[u8]) -> Answer {
    Answer {
        body: body.to_vec(),
        ..Answer::status(200)
    }
    .header("content-type", "application/x-protobuf")
}

/// An encoded response that tells of a partial success.
pub(crate) fn partial(rejected_spans: i64, error_message: &str) -> Vec<u8> {
    let partial = trace::ExportTracePartialSuccess {
        rejected_spans,
        error_message: error_message.to_owned(),
    };
    trace::ExportTraceServiceResponse {
        partial_success: Some(partial),
    }
    .encode_to_vec()
}

#[derive(Default)]
struct HttpState {
    script: VecDeque<Answer>,
    received: Received,
    connections: Vec<Weak<TcpStream>>,
    stopped: bool,
    /// What is answered with 404 at any time.
    lacks: Option<&'static str>,
    /// What is answered when the script is over, instead of 200.
    always: Option<Answer>,
    limit: Option<Limit>,
    /// Requests by path.
    requests: BTreeMap<String, u64>,
}

/// A limit on the size of requests.
#[derive(Clone)]
pub(crate) struct Limit {
    /// Bytes of a body that are still taken.
    pub(crate) bytes: usize,
    pub(crate) answer: Answer,
    /// The server answers before it has read the body, and closes.
    pub(crate) early: bool,
}

/// An HTTP/1.1 server that gives the answers of a script, then 200 for ever. Requests with status 200 are recorded.
pub(crate) struct HttpServer {
    pub(crate) url: String,
    address: SocketAddr,
    state: Arc<Mutex<HttpState>>,
    thread: Option<thread::JoinHandle<()>>,
}

impl HttpServer {
    pub(crate) fn start(script: Vec<Answer>) -> Self {
        Self::start_at("127.0.0.1:0".parse().unwrap(), script)
    }

    pub(crate) fn start_at(address: SocketAddr, script: Vec<Answer>) -> Self {
        let script = script.into();
        Self::serve(
            address,
            HttpState {
                script,
                ..HttpState::default()
            },
        )
    }

    /// One that gives the same answer to every request.
    pub(crate) fn always(answer: Answer) -> Self {
        Self::serve(
            "127.0.0.1:0".parse().unwrap(),
            HttpState {
                always: Some(answer),
                ..HttpState::default()
            },
        )
    }

    /// One that takes no large requests.
    pub(crate) fn limited(limit: Limit) -> Self {
        Self::serve(
            "127.0.0.1:0".parse().unwrap(),
            HttpState {
                limit: Some(limit),
                ..HttpState::default()
            },
        )
    }

    fn serve(address: SocketAddr, state: HttpState) -> Self {
        let listener = TcpListener::bind(address).unwrap();
        let address = listener.local_addr().unwrap();
        let state = Arc::new(Mutex::new(state));
        let shared = Arc::clone(&state);
        let thread = thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let mut locked = shared.lock().unwrap();
                if locked.stopped {
                    return;
                }
                let stream = Arc::new(stream);
                locked.connections.push(Arc::downgrade(&stream));
                drop(locked);
                let shared = Arc::clone(&shared);
                thread::spawn(move || while serve_one(&stream, &shared).is_some() {});
            }
        });
        Self {
            url: format!("http://{address}"),
            address,
            state,
            thread: Some(thread),
        }
    }

    pub(crate) fn received(&self) -> Received {
        self.state.lock().unwrap().received.clone()
    }

    /// Requests that came to `path`, or to any path.
    pub(crate) fn requests(&self, path: Option<&str>) -> u64 {
        let requests = &self.state.lock().unwrap().requests;
        let wanted = requests
            .iter()
            .filter(|(key, _)| path.is_none_or(|path| *key == path));
        wanted.map(|(_, count)| count).sum()
    }

    /// From now on `path` is not found, whatever the script says.
    pub(crate) fn lack(&self, path: &'static str) {
        self.state.lock().unwrap().lacks = Some(path);
    }

    /// Closes everything; the address can be used again.
    pub(crate) fn stop(&mut self) -> SocketAddr {
        if let Some(thread) = self.thread.take() {
            let connections = {
                let mut state = self.state.lock().unwrap();
                state.stopped = true;
                std::mem::take(&mut state.connections)
            };
            // Wakes the accepting thread.
            drop(TcpStream::connect(self.address));
            thread.join().unwrap();
            for connection in connections.iter().filter_map(Weak::upgrade) {
                let _ = connection.shutdown(std::net::Shutdown::Both);
            }
        }
        self.address
    }
}

impl Drop for HttpServer {
    fn drop(&mut self) {
        self.stop();
    }
}

/// Serves one request; `None` when the connection ends.
fn serve_one(stream: &TcpStream, state: &Mutex<HttpState>) -> Option<()> {
    let mut reader = BufReader::new(stream);
    let mut first = String::new();
    reader.read_line(&mut first).ok().filter(|&read| read > 0)?;
    let mut headers = HeaderMap::new();
    let path = first.split(' ').nth(1).unwrap_or_default().to_owned();
    loop {
        let mut line = String::new();
        reader.read_line(&mut line).ok()?;
        let Some((name, value)) = line.trim_end().split_once(": ") else {
            break;
        };
        headers.append(
            HeaderName::from_bytes(name.as_bytes()).ok()?,
            HeaderValue::from_str(value).ok()?,
        );
    }
    let length = headers
        .get("content-length")
        .and_then(|value| value.to_str().ok()?.parse().ok())
        .unwrap_or(0);
    let limit = {
        let mut state = state.lock().unwrap();
        *state.requests.entry(path.clone()).or_default() += 1;
        state.limit.clone().filter(|limit| length > limit.bytes)
    };
    let early = limit.as_ref().is_some_and(|limit| limit.early);
    let mut body = vec![0; length];
    if !early {
        reader.read_exact(&mut body).ok()?;
    }

    let answer = {
        let mut state = state.lock().unwrap();
        if state.lacks == Some(path.as_str()) {
            Answer::status(404)
        } else if let Some(limit) = limit {
            limit.answer
        } else {
            let scripted = state.script.pop_front().or_else(|| state.always.clone());
            scripted.unwrap_or_else(|| ok(b""))
        }
    };
    let mut out = Vec::new();
    if let Some(raw) = &answer.raw {
        out.extend_from_slice(raw);
    } else {
        write!(
            out,
            "HTTP/1.1 {} x\r\ncontent-length: {}\r\n",
            answer.status,
            answer.body.len()
        )
        .unwrap();
        for (name, value) in &answer.headers {
            write!(out, "{name}: {value}\r\n").unwrap();
        }
        out.extend_from_slice(b"\r\n");
        out.extend_from_slice(&answer.body);
    }
    if answer.status == 200 && answer.raw.is_none() {
        if headers
            .get("content-encoding")
            .is_some_and(|encoding| encoding == "gzip")
        {
            let mut plain = Vec::new();
            flate2::read::GzDecoder::new(&body[..])
                .read_to_end(&mut plain)
                .unwrap();
            body = plain;
        }
        let received = &mut state.lock().unwrap().received;
        match path.as_str() {
            "/v1/traces" => received.traces.merge(&body[..]).unwrap(),
            "/v1/metrics" => received.metrics.merge(&body[..]).unwrap(),
            "/v1/logs" => received.logs.merge(&body[..]).unwrap(),
            _ => panic!("unexpected path {path}"),
        }
        received.headers.push(headers);
    }
    (&*stream).write_all(&out).ok()?;
    if early || answer.raw.is_some() || answer.headers.iter().any(|(name, _)| *name == "x-then") {
        let _ = stream.shutdown(std::net::Shutdown::Both);
        return None;
    }
    Some(())
}

#[derive(Default)]
struct GrpcState {
    script: VecDeque<Status>,
    /// What every request fails with when the script is over.
    always: Option<Status>,
    /// Bytes of a message that are still taken, and what larger ones fail with.
    limit: Option<(usize, Status)>,
    rejected: Option<(i64, String)>,
    received: Received,
    requests: u64,
}

/// A real OTLP server over gRPC. It fails with the statuses of a script, then takes everything.
pub(crate) struct GrpcServer {
    pub(crate) url: String,
    state: Arc<Mutex<GrpcState>>,
    /// Stops when dropped.
    _runtime: tokio::runtime::Runtime,
}

#[derive(Clone)]
struct Service(Arc<Mutex<GrpcState>>);

impl GrpcServer {
    pub(crate) fn start(script: Vec<Status>) -> Self {
        Self::start_with(script, None)
    }

    pub(crate) fn start_with(script: Vec<Status>, tls: Option<ServerTlsConfig>) -> Self {
        let script = script.into();
        let state = GrpcState {
            script,
            ..GrpcState::default()
        };
        Self::serve(state, tls, true, None)
    }

    /// One that has no service for logs.
    pub(crate) fn without_logs() -> Self {
        Self::serve(GrpcState::default(), None, false, None)
    }

    /// One whose every request fails with `status`.
    pub(crate) fn always(status: Status) -> Self {
        let always = Some(status);
        let state = GrpcState {
            always,
            ..GrpcState::default()
        };
        Self::serve(state, None, true, None)
    }

    /// One that takes no messages of more than `bytes`. They fail with `status`, or else with tonic's own.
    pub(crate) fn limited(bytes: usize, status: Option<Status>) -> Self {
        let tonics = status.is_none().then_some(bytes);
        let state = GrpcState {
            limit: status.map(|status| (bytes, status)),
            ..GrpcState::default()
        };
        Self::serve(state, None, true, tonics)
    }

    fn serve(state: GrpcState, tls: Option<ServerTlsConfig>, takes_logs: bool, limit: Option<usize>) -> Self {
        let runtime = tokio::runtime::Builder::new_multi_thread()
            .worker_threads(1)
            .enable_all()
            .build()
            .unwrap();
        let state = Arc::new(Mutex::new(state));
        let service = Service(Arc::clone(&state));
        let scheme = if tls.is_some() { "https" } else { "http" };
        let incoming = {
            let _inside = runtime.enter();
            TcpIncoming::bind("127.0.0.1:0".parse().unwrap()).unwrap()
        };
        let port = incoming.local_addr().unwrap().port();
        let limit = limit.unwrap_or(4 << 20);
        let traces = trace::trace_service_server::TraceServiceServer::new(service.clone())
            .max_decoding_message_size(limit);
        let points = metrics::metrics_service_server::MetricsServiceServer::new(service.clone())
            .max_decoding_message_size(limit);
        let records =
            logs::logs_service_server::LogsServiceServer::new(service).max_decoding_message_size(limit);
        let records = records
            .accept_compressed(CompressionEncoding::Gzip)
            .send_compressed(CompressionEncoding::Gzip);
        runtime.spawn(async move {
            let mut server = Server::builder();
            if let Some(tls) = tls {
                server = server.tls_config(tls).unwrap();
            }
            server
                .add_service(
                    traces
                        .accept_compressed(CompressionEncoding::Gzip)
                        .send_compressed(CompressionEncoding::Gzip),
                )
                .add_service(
                    points
                        .accept_compressed(CompressionEncoding::Gzip)
                        .send_compressed(CompressionEncoding::Gzip),
                )
                .add_optional_service(takes_logs.then_some(records))
                .serve_with_incoming(incoming)
                .await
                .unwrap();
        });
        Self {
            url: format!("{scheme}://localhost:{port}"),
            state,
            _runtime: runtime,
        }
    }

    pub(crate) fn received(&self) -> Received {
        self.state.lock().unwrap().received.clone()
    }

    /// Requests that reached a service.
    pub(crate) fn requests(&self) -> u64 {
        self.state.lock().unwrap().requests
    }

    /// From now on tells of `count` rejected items in every response.
    pub(crate) fn reject(&self, count: i64, message: &str) {
        self.state.lock().unwrap().rejected = Some((count, message.to_owned()));
    }
}

/// TLS of a server with `certificate` and `key` in PEM, that asks for client certificates of `client_ca` if there is one.
pub(crate) fn tls(certificate: &str, key: &str, client_ca: Option<&str>) -> ServerTlsConfig {
    let config = ServerTlsConfig::new().identity(Identity::from_pem(certificate, key));
    match client_ca {
        Some(ca) => config.client_ca_root(tonic::transport::Certificate::from_pem(ca)),
        None => config,
    }
}

impl Service {
    /// Notes a request that is taken, unless the script has a status for it.
    fn take<T: Message>(&self, request: &Request<T>) -> Result<MutexGuard<'_, GrpcState>, Status> {
        let mut state = self.0.lock().unwrap();
        state.requests += 1;
        let scripted = state.script.pop_front().or_else(|| state.always.clone());
        if let Some(status) = scripted {
            return Err(status);
        }
        if let Some((limit, status)) = &state.limit
            && request.get_ref().encoded_len() > *limit
        {
            return Err(status.clone());
        }
        let headers = request.metadata().clone().into_headers();
        state.received.headers.push(headers);
        Ok(state)
    }
}

#[tonic::async_trait]
impl trace::trace_service_server::TraceService for Service {
    async fn export(
        &self,
        request: Request<trace::ExportTraceServiceRequest>,
    ) -> Result<Response<trace::ExportTraceServiceResponse>, Status> {
        let mut state = self.take(&request)?;
        let spans = request.into_inner().resource_spans;
        state.received.traces.resource_spans.extend(spans);
        let rejected = state.rejected.clone();
        let partial_success =
            rejected.map(
                |(rejected_spans, error_message)| trace::ExportTracePartialSuccess {
                    rejected_spans,
                    error_message,
                },
            );
        Ok(Response::new(trace::ExportTraceServiceResponse {
            partial_success,
        }))
    }
}

#[tonic::async_trait]
impl metrics::metrics_service_server::MetricsService for Service {
    async fn export(
        &self,
        request: Request<metrics::ExportMetricsServiceRequest>,
    ) -> Result<Response<metrics::ExportMetricsServiceResponse>, Status> {
        let mut state = self.take(&request)?;
        let points = request.into_inner().resource_metrics;
        state.received.metrics.resource_metrics.extend(points);
        Ok(Response::new(metrics::ExportMetricsServiceResponse::default()))
    }
}

#[tonic::async_trait]
impl logs::logs_service_server::LogsService for Service {
    async fn export(
        &self,
        request: Request<logs::ExportLogsServiceRequest>,
    ) -> Result<Response<logs::ExportLogsServiceResponse>, Status> {
        let mut state = self.take(&request)?;
        let records = request.into_inner().resource_logs;
        state.received.logs.resource_logs.extend(records);
        let rejected = state.rejected.clone();
        let partial_success =
            rejected.map(
                |(rejected_log_records, error_message)| logs::ExportLogsPartialSuccess {
                    rejected_log_records,
                    error_message,
                },
            );
        Ok(Response::new(logs::ExportLogsServiceResponse { partial_success }))
    }
}
