//! `cargo xtask vm`: runs programs in a guest with a Debian kernel, soft-RoCE links and mlx5 devices.

use std::{
    io::{self, Write as _},
    path::PathBuf,
    process::ExitCode,
    time::Duration,
};

use anyhow::{Context, Result, bail};
use clap::{Args, Subcommand};
use ringsight_testbed::{
    vm::{Guest, Series, failover, folder, guest},
    workspace::test_program,
};

use crate::{code, test::guests};

/// What to do with guests.
#[derive(Subcommand, Debug)]
pub enum Command {
    /// Runs a program of this machine in a guest, passes its output on and ends with its exit code.
    ///
    /// The program and its shared libraries are copied into the guest. The exit code is 124 past the time limit, 1 if the guest
    /// cannot be made or dies. A name without a slash that is no file here is a program of the guest (ibv_devinfo, bash, …).
    Run(RunOptions),
    /// Opens a shell in a guest.
    Shell(Options),
    /// Runs the tests that need a guest.
    Test(guests::Options),
    /// RDMA ports that go down during a transfer, and whether it goes on over the others.
    Failover(failover::Options),
    /// Removes what guests are made of from the cache; the next run fetches it anew, with newer kernels.
    Clean,
}

/// What a guest is like.
#[derive(Args, Clone, Debug)]
pub struct Options {
    /// Kernel.
    #[arg(long, value_enum, default_value = "6.1")]
    kernel: Series,
    /// Soft-RoCE links: number 0 is `hca0` on `nic0` (10.0.0.1) to `peer0` on `pnic0` (10.0.0.2).
    #[arg(long, value_name = "N", default_value_t = 0)]
    rdma: usize,
    /// mlx5 devices (InfiniBand link layer): the kernel's own drivers on a stand-in for the hardware.
    #[arg(long, value_name = "N", default_value_t = 0)]
    mlx5: usize,
    /// Ports of each of them: 1 or 2.
    #[arg(long, value_name = "N", default_value_t = 1)]
    mlx5_ports: usize,
    /// Memory, MiB.
    #[arg(long, value_name = "MIB", default_value_t = 512)]
    memory: u32,
    /// Processors.
    #[arg(long, value_name = "N", default_value_t = 2)]
    processors: u32,
    /// How long the run may take, seconds, the boot included.
    #[arg(long, value_name = "SECONDS", default_value_t = 120)]
    limit: u64,
    /// One more file or folder of this machine, with its shared libraries; goes to /test unless GUEST says where.
    #[arg(long = "file", value_name = "HOST[:GUEST]")]
    files: Vec<String>,
    /// An environment variable of the program.
    #[arg(long = "env", value_name = "NAME=VALUE")]
    environment: Vec<String>,
    /// Prints the kernel's console and the times of the run's parts, on standard error.
    #[arg(long)]
    verbose: bool,
}

/// What to run.
#[derive(Args, Clone, Debug)]
pub struct RunOptions {
    #[command(flatten)]
    options: Options,
    /// Builds this package's test and runs it.
    #[arg(long, short, value_name = "NAME", requires = "test")]
    package: Option<String>,
    /// Which test of --package: a file's name in its tests folder, or `lib`.
    #[arg(long, value_name = "NAME", requires = "package")]
    test: Option<String>,
    /// The program and its arguments; with --package the test's arguments.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
    program: Vec<String>,
}

impl Options {
    fn guest(&self) -> Result<Guest> {
        let mut guest = Guest::new(self.kernel, Vec::new());
        guest.rdma = self.rdma;
        guest.mlx5 = self.mlx5;
        guest.mlx5_ports = self.mlx5_ports;
        guest.memory = self.memory;
        guest.processors = self.processors;
        guest.limit = Duration::from_secs(self.limit);
        guest.verbose = self.verbose;
        for file in &self.files {
            match file.split_once(':') {
                Some((host, place)) if place.starts_with('/') => {
                    guest.files.push((PathBuf::from(host), place.to_owned()));
                }
                Some(_) => bail!("{file}: what stands behind the colon is an absolute path in the guest"),
                None => drop(guest.add(&PathBuf::from(file))?),
            }
        }
        for variable in &self.environment {
            let (name, value) = variable
                .split_once('=')
                .with_context(|| format!("{variable} is no NAME=VALUE"))?;
            let letters = |letter: char| letter.is_ascii_alphanumeric() || letter == '_';
            if name.is_empty()
                || !name.chars().all(letters)
                || name.starts_with(|first: char| first.is_ascii_digit())
            {
                bail!("{name} is no name of an environment variable");
            }
            guest.environment.push((name.to_owned(), value.to_owned()));
        }
        Ok(guest)
    }
}

/// Does what the command says.
pub fn run(command: &Command) -> Result<ExitCode> {
    match command {
        Command::Run(options) => run_program(options),
        Command::Shell(options) => {
            let mut guest = options.guest()?;
            guest.program = vec!["bash".to_owned(), "-i".to_owned()];
            guest.interactive = true;
            finish(&guest)
        }
        Command::Test(options) => guests::run(options).map(code),
        Command::Failover(options) => failover::run(options).map(code),
        Command::Clean => {
            let folder = folder()?;
            match fs_err::remove_dir_all(&folder) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    Err(error).with_context(|| format!("removing {}", folder.display()))
                }
                _ => Ok(ExitCode::SUCCESS),
            }
        }
    }
}

fn run_program(options: &RunOptions) -> Result<ExitCode> {
    let mut guest = options.options.guest()?;
    if let (Some(package), Some(test)) = (&options.package, &options.test) {
        guest.program = vec![guest.add_test(&test_program(package, test)?)?];
        guest.program.extend(options.program.iter().cloned());
        return finish(&guest);
    }
    let Some((program, arguments)) = options.program.split_first() else {
        bail!("nothing to run: cargo xtask vm run -- PROGRAM [ARGUMENTS]");
    };
    let file = PathBuf::from(program);
    let first = if file.is_file() {
        guest.add(&file)?
    } else if program.contains('/') {
        bail!("there is no {program}");
    } else {
        program.clone()
    };
    guest.program = std::iter::once(first).chain(arguments.iter().cloned()).collect();
    finish(&guest)
}

/// Runs a guest with this process's output.
fn finish(guest: &Guest) -> Result<ExitCode> {
    let result = guest.run(|piece| {
        let mut out = io::stdout().lock();
        // Where nobody reads any more, the exit code still says how it ended.
        let _ = out.write_all(piece).and_then(|()| out.flush());
    });
    let ended = match result {
        Err(error) if error.is::<guest::OverLimit>() => {
            eprintln!("error: {error:#}");
            return Ok(ExitCode::from(guest::OVER_LIMIT));
        }
        other => other?,
    };
    if let Some(text) = ended.warning_text() {
        eprintln!("vm: the guest's kernel warned {} times:\n{text}", ended.warnings);
    }
    Ok(ExitCode::from(ended.code))
}
