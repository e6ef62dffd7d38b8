//! Every developer and operator chore of ringsight as a command: `cargo xtask <command>`.
//!
//! This crate holds the commands and their order. Jobs, faults, guests and measurements are in `ringsight-testbed`.

#![allow(
    unreachable_pub,
    reason = "a program has no outside: `pub` says what a module offers the others"
)]

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use ringsight_testbed::{bench::probe as probed, demo, faults, vm::verbs_headers};

mod backend;
mod bench;
mod dist;
mod ebpf;
mod fuzz;
mod gpu;
mod probe;
mod setup;
mod test;
mod vm;

/// Developer and operator chores of ringsight.
#[derive(Parser)]
#[command(name = "cargo xtask", bin_name = "cargo xtask")]
struct Arguments {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Installs what builds and tests need, as far as it is missing. The other commands do this themselves.
    Setup {
        /// Also what only the tests use: Jaeger (where Go is) and Chromium.
        #[arg(long)]
        all: bool,
    },
    /// Runs every layer of tests that this machine can run, and says which it skipped and why.
    Test(test::Options),
    /// Runs a training job of several processes, attaches the collector to it and writes its traces.
    Demo(demo::Arguments),
    /// One rank of the demo's training job.
    #[command(hide = true)]
    DemoWorker(demo::worker::Arguments),
    /// The demo's part in a guest.
    #[command(hide = true)]
    DemoGuest(demo::guest::Arguments),
    /// A process that measures its probe function.
    #[command(hide = true)]
    BenchProbe(probed::Arguments),
    /// Builds and runs `ringsight`: `probe attach <pid>…`, `probe list <pid>`.
    #[command(disable_help_flag = true)]
    Probe {
        /// Arguments of `ringsight`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        arguments: Vec<String>,
    },
    /// Starts a trace backend in the foreground.
    Backend(backend::Options),
    /// Builds the eBPF objects in probes/ebpf/object anew, or compares them with their sources.
    Ebpf(ebpf::Options),
    /// Makes the release archive: target/dist/ringsight-VERSION-x86_64-linux.tar.gz.
    Dist(dist::Options),
    /// Runs benchmarks and compares them with their goals.
    Bench(bench::Options),
    /// Puts together what tests and measures the library on GPUs.
    #[command(subcommand)]
    Gpu(gpu::Command),
    /// Lets ranks have faults of many kinds, and compares what the watchdog says with what was true.
    Faults(faults::Arguments),
    /// Runs programs and tests in a guest with a Debian kernel and RDMA devices.
    #[command(subcommand)]
    Vm(vm::Command),
    /// Ranks of a round of `faults`.
    #[command(hide = true)]
    FaultWorker(faults::worker::Arguments),
    /// What holds a rank of such a round as debuggers do.
    #[command(hide = true)]
    FaultDebugger,
    /// Runs the fuzzers of what reads bytes from outside, and reports executions.
    Fuzz(fuzz::Options),
}

/// The exit code of a command that has come to its end, well or not.
fn code(is_well: bool) -> ExitCode {
    ExitCode::from(u8::from(!is_well))
}

fn run() -> Result<ExitCode> {
    match Arguments::parse().command {
        Command::Setup { all } => {
            setup::ebpf_toolchain()?;
            setup::optional("nvcc", setup::nvcc());
            if all {
                setup::optional("Jaeger", setup::jaeger());
                setup::optional("Chromium", setup::chromium());
                setup::optional("NVIDIA's NCCL headers", setup::nvidia_headers());
                setup::optional("libibverbs' headers", verbs_headers());
            }
            Ok(ExitCode::SUCCESS)
        }
        Command::Test(options) => test::run(&options).map(code),
        Command::Demo(arguments) => demo::run(&arguments, setup::build).map(code),
        Command::DemoWorker(arguments) => demo::worker::run(&arguments).map(|()| ExitCode::SUCCESS),
        Command::DemoGuest(arguments) => demo::guest::run(&arguments).map(code),
        Command::BenchProbe(arguments) => probed::run(&arguments).map(|()| ExitCode::SUCCESS),
        Command::Probe { arguments } => probe::run(&arguments),
        Command::Backend(options) => backend::run(&options).map(code),
        Command::Ebpf(options) => ebpf::run(&options).map(code),
        Command::Dist(options) => dist::run(&options).map(|()| ExitCode::SUCCESS),
        Command::Bench(options) => bench::run(&options).map(code),
        Command::Gpu(command) => gpu::run(&command).map(|()| ExitCode::SUCCESS),
        Command::Faults(arguments) => faults::run(&arguments).map(code),
        Command::FaultWorker(arguments) => faults::worker::run(&arguments).map(|()| ExitCode::SUCCESS),
        Command::FaultDebugger => faults::debugger::run().map(|()| ExitCode::SUCCESS),
        Command::Vm(command) => vm::run(&command),
        Command::Fuzz(options) => fuzz::run(&options).map(|()| ExitCode::SUCCESS),
    }
}

fn main() -> ExitCode {
    run().unwrap_or_else(|error| {
        eprintln!("error: {error:#}");
        ExitCode::FAILURE
    })
}
