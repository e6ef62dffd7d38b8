//! `cargo xtask backend`: a trace backend in the foreground.

use std::path::PathBuf;

use anyhow::{Context, Result};
use clap::{Args, ValueEnum};
use ringsight_testbed::{backend::Jaeger, process};

use crate::setup;

/// Which backend and where.
#[derive(Args, Debug)]
pub struct Options {
    /// Backend to start.
    backend: Name,
    /// First of the ports to use: OTLP gRPC, OTLP HTTP, then the query API. By default Jaeger's own: 4317, 4318, 16686.
    #[arg(long, value_name = "PORT")]
    port_base: Option<u16>,
    /// Jaeger's web pages, which its Go module lacks: a folder of built ones, or a clone of jaeger-ui to build them in. Kept
    /// for later calls.
    #[arg(long, value_name = "DIR")]
    ui: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Name {
    /// Jaeger v2 with traces in memory.
    Jaeger,
}

/// Starts the backend and waits for its end (or Ctrl-C).
pub fn run(options: &Options) -> Result<bool> {
    let Name::Jaeger = options.backend;
    let program = setup::jaeger()?;
    let ports = match options.port_base {
        None => [4317, 4318, 16686],
        Some(base) => [
            base,
            base.checked_add(1).context("--port-base is too large")?,
            base + 2,
        ],
    };
    let ui = match &options.ui {
        Some(from) => Some(setup::jaeger_ui(from)?),
        None => setup::cached_jaeger_ui(),
    };
    let mut jaeger = Jaeger::start(&program, ports, ui.as_deref(), false)?;
    println!("OTLP gRPC   http://{}", jaeger.otlp_grpc);
    println!("OTLP HTTP   http://{}", jaeger.otlp_http);
    println!("query       http://{}/api/traces/<trace id>", jaeger.query);
    if jaeger.has_pages() {
        println!("interface   http://{}", jaeger.query);
    } else {
        println!(
            "interface   none: Jaeger's Go module comes without its web pages. To build them, once, with npm:"
        );
        println!(
            "                {}",
            setup::jaeger_ui_remedy().replace('\n', "\n                ")
        );
        println!(
            "            Or start an official Jaeger (image jaegertracing/jaeger, ports 4317 and 16686) instead."
        );
    }
    println!("try         cargo xtask demo --otlp http://{}", jaeger.otlp_grpc);
    let status = jaeger.process.child().wait()?;
    println!("Jaeger ended: {}", process::reason(status));
    Ok(status.success())
}
