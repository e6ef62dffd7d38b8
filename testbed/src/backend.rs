//! Jaeger as a child process, and HTTP requests to it.

use std::{
    net::{SocketAddr, TcpListener, TcpStream},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use tempfile::TempDir;

use crate::{
    machine,
    process::{self, Guarded},
};

/// Version of the Go module that Jaeger is built from (Jaeger v2).
pub const VERSION: &str = "1.76.0";

/// Environment variable with the path of a Jaeger binary, for the tests that read traces back.
pub const VARIABLE: &str = "RINGSIGHT_JAEGER";

/// Where the cache has Jaeger's binary, or would have it.
///
/// # Errors
/// If there is no cache.
pub fn program() -> Result<PathBuf> {
    Ok(machine::cache()?.join(format!("bin/jaeger-{VERSION}")))
}

/// Jaeger's binary, if the cache has one.
#[must_use]
pub fn cached() -> Option<PathBuf> {
    program().ok().filter(|program| process::is_program(program))
}

/// A running Jaeger that keeps traces in memory.
#[derive(Debug)]
pub struct Jaeger {
    /// The process; ends with this object.
    pub process: Guarded,
    /// Where OTLP over gRPC is taken.
    pub otlp_grpc: SocketAddr,
    /// Where OTLP over HTTP is taken.
    pub otlp_http: SocketAddr,
    /// Query API, and web pages if there are any.
    pub query: SocketAddr,
    /// Holds its configuration.
    _folder: TempDir,
}

impl Jaeger {
    /// Starts `program` on these ports and waits until its query API answers. `ui` is a folder of built web pages.
    ///
    /// # Errors
    /// If it ends or does not answer within 30 s, with what it wrote.
    pub fn start(
        program: &Path,
        [grpc, http, query]: [u16; 3],
        ui: Option<&Path>,
        quiet: bool,
    ) -> Result<Self> {
        let at = |port| SocketAddr::from(([127, 0, 0, 1], port));
        let folder = tempfile::tempdir().context("making a folder for Jaeger")?;
        let configuration = folder.path().join("jaeger.yaml");
        fs_err::write(&configuration, configuration_text([grpc, http, query], ui)?)?;
        let mut command = Command::new(program);
        command.arg("--config").arg(&configuration).stdin(Stdio::null());
        // Its own requests are not what anybody looks for here.
        command.env("OTEL_TRACES_SAMPLER", "always_off");
        let log = folder.path().join("log");
        if quiet {
            process::log_to(&mut command, &log)?;
        }
        let process = Guarded::start("jaeger", &mut command, libc::SIGTERM)?;
        let mut jaeger = Self {
            process,
            otlp_grpc: at(grpc),
            otlp_http: at(http),
            query: at(query),
            _folder: folder,
        };
        let (otlp, query) = (jaeger.otlp_grpc, jaeger.query);
        let answers = || get(query, "/api/services").is_ok() && TcpStream::connect(otlp).is_ok();
        jaeger
            .process
            .wait_until(Duration::from_secs(30), answers)
            .with_context(|| {
                let wrote = fs_err::read_to_string(&log).unwrap_or_default();
                wrote.lines().rev().take(5).collect::<Vec<_>>().join("\n    ")
            })?;
        Ok(jaeger)
    }

    /// Whether it serves web pages to look at traces with, and not only its placeholder.
    #[must_use]
    pub fn has_pages(&self) -> bool {
        get(self.query, "/").is_ok_and(|page| is_interface(&page))
    }
}

/// Whether a page is that of Jaeger's interface: a program that draws itself, and not the notice that there is none.
fn is_interface(page: &str) -> bool {
    page.contains("<script") && !page.contains("not the Jaeger UI")
}

/// Ports that are free at this moment.
///
/// # Errors
/// If the system gives none.
pub fn free_ports<const N: usize>() -> Result<[u16; N]> {
    // All are held until all are known, so that they differ.
    let listeners: Vec<_> = (0..N)
        .map(|_| TcpListener::bind("127.0.0.1:0"))
        .collect::<Result<_, _>>()?;
    let mut ports = [0; N];
    for (port, listener) in ports.iter_mut().zip(&listeners) {
        *port = listener.local_addr()?.port();
    }
    Ok(ports)
}

/// The configuration of an all-in-one Jaeger v2. Every address is given: its health check and its own metrics would
/// otherwise take fixed ports, and a second instance would not start.
fn configuration_text([grpc, http, query]: [u16; 3], ui: Option<&Path>) -> Result<String> {
    let [query_grpc] = free_ports()?;
    // A JSON string is a YAML string.
    let ui = match ui {
        Some(folder) => format!(
            "\n    ui: {{assets_path: {}}}",
            serde_json::to_string(&folder.to_str().context("the pages' folder is not UTF-8")?)?
        ),
        None => String::new(),
    };
    Ok(format!(
        "service:
  extensions: [jaeger_storage, jaeger_query]
  pipelines:
    traces: {{receivers: [otlp], exporters: [jaeger_storage_exporter]}}
  telemetry:
    metrics: {{level: none}}
    logs: {{level: warn}}
extensions:
  jaeger_storage:
    backends:
      memory: {{memory: {{max_traces: 100000}}}}
  jaeger_query:
    storage: {{traces: memory}}{ui}
    # Times are already of one clock: nothing is to be moved.
    max_clock_skew_adjust: 0s
    http: {{endpoint: \"127.0.0.1:{query}\"}}
    grpc: {{endpoint: \"127.0.0.1:{query_grpc}\"}}
receivers:
  otlp:
    protocols:
      grpc: {{endpoint: \"127.0.0.1:{grpc}\", max_recv_msg_size_mib: 16}}
      http: {{endpoint: \"127.0.0.1:{http}\"}}
exporters:
  jaeger_storage_exporter: {{trace_storage: memory}}
"
    ))
}

/// Body of an HTTP answer with status 200.
///
/// # Errors
/// If there is no answer within 10 s, or with another status.
pub fn get(address: SocketAddr, path: &str) -> Result<String> {
    send(minreq::get(format!("http://{address}{path}")), path)
}

/// Sends JSON; the answer's status is 200.
///
/// # Errors
/// If there is no answer within 10 s, or with another status.
pub fn post(address: SocketAddr, path: &str, body: &str) -> Result<()> {
    let request =
        minreq::post(format!("http://{address}{path}")).with_header("Content-Type", "application/json");
    send(request.with_body(body), path).map(drop)
}

fn send(request: minreq::Request, path: &str) -> Result<String> {
    let response = request.with_timeout(10).send()?;
    let body = response.as_str().context("the answer is not UTF-8")?;
    if response.status_code != 200 {
        let (code, phrase) = (response.status_code, &response.reason_phrase);
        bail!(
            "{path}: {code} {phrase}: {}",
            body.lines().next().unwrap_or_default()
        );
    }
    Ok(body.to_owned())
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};

    use super::*;

    fn answering(text: &'static str) -> SocketAddr {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        std::thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            // All of it: who closes with something unread cuts the other one off.
            let mut request = Vec::new();
            while !request.ends_with(b"\r\n\r\n") {
                let mut byte = [0];
                stream.read_exact(&mut byte).unwrap();
                request.push(byte[0]);
            }
            stream.write_all(text.as_bytes()).unwrap();
        });
        address
    }

    #[test]
    fn get_returns_bodies_and_names_other_statuses() {
        assert_eq!(
            get(answering("HTTP/1.0 200 OK\r\nA: b\r\n\r\n{}"), "/x").unwrap(),
            "{}"
        );
        let error = get(answering("HTTP/1.0 404 Not Found\r\n\r\nno such trace\n"), "/x")
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("404") && error.contains("no such trace"),
            "{error}"
        );
        assert!(get(answering("rubbish"), "/x").is_err());
    }

    #[test]
    fn pages_are_asked_for_where_there_are_any() {
        let text = configuration_text([1, 2, 3], None).unwrap();
        assert!(!text.contains("assets_path"), "{text}");
        let text = configuration_text([1, 2, 3], Some(Path::new("/a b/\"ui\""))).unwrap();
        assert!(
            text.contains("\n    ui: {assets_path: \"/a b/\\\"ui\\\"\"}\n"),
            "{text}"
        );
    }

    #[test]
    fn the_placeholder_is_no_interface() {
        assert!(is_interface(
            "<html><body><script src=\"/static/index.js\"></script></body></html>"
        ));
        assert!(!is_interface(
            "<html><h1>🥋: This is not the Jaeger UI you are looking for!</h1><script></script></html>"
        ));
    }

    #[test]
    fn free_ports_differ() {
        let [a, b, c] = free_ports().unwrap();
        assert!(a != b && b != c && a != c && a != 0);
    }
}
