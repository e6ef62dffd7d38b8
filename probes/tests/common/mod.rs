//! Targets for the tests: processes that load a library and do as they are told.
#![allow(dead_code, reason = "each test file uses its part")]

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use ringsight_probes::{Options, Sample, Session, Source as _, UseEbpf};

#[path = "../../../tests/src/skip.rs"]
mod skip;
pub(crate) use skip::skip;

/// A directory of built examples: beside the test's own binary.
pub(crate) fn examples() -> PathBuf {
    let test = std::env::current_exe().expect("own path");
    test.ancestors()
        .nth(2)
        .expect("target/<profile>/deps/<test>")
        .join("examples")
}

pub(crate) fn fixture_library() -> PathBuf {
    examples().join("libfixture_library.so")
}

/// A running target. Killed when dropped.
pub(crate) struct Target {
    child: Child,
    input: Option<ChildStdin>,
    output: BufReader<ChildStdout>,
}

impl Target {
    pub(crate) fn start(library: &Path) -> Self {
        Self::run(&mut Command::new(examples().join("fixture_target")), library)
    }

    pub(crate) fn run(command: &mut Command, library: &Path) -> Self {
        let mut child = command
            .arg(library)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the fixture: build it with `cargo build -p ringsight-probes --examples`");
        let input = child.stdin.take();
        let output = BufReader::new(child.stdout.take().expect("piped"));
        let mut target = Self { child, input, output };
        assert_eq!(target.line(), "ready");
        target
    }

    /// With shared pages and one communicator, id 7.
    pub(crate) fn instrumented() -> Self {
        let mut target = Self::start(&fixture_library());
        target.open();
        target
    }

    pub(crate) fn open(&mut self) {
        assert_eq!(self.call("fixture_open 1"), 0);
        self.call("fixture_communicator 7");
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// Has the target call a function and waits until it has returned.
    pub(crate) fn call(&mut self, line: &str) -> u64 {
        self.send(line);
        self.answer()
    }

    pub(crate) fn send(&mut self, line: &str) {
        let input = self.input.as_mut().expect("not ended");
        writeln!(input, "{line}").expect("the target reads");
    }

    /// Whether an answer has come; never waits.
    pub(crate) fn answered(&self) -> bool {
        let mut polled = libc::pollfd {
            fd: self.output.get_ref().as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one entry; with a timeout of zero the call returns at once.
        unsafe { libc::poll(&raw mut polled, 1, 0) };
        !self.output.buffer().is_empty() || polled.revents != 0
    }

    pub(crate) fn answer(&mut self) -> u64 {
        self.line().parse().expect("a number")
    }

    /// Has the target begin its program anew, and waits until it has.
    pub(crate) fn exec(&mut self) {
        self.send("fixture_exec");
        assert_eq!(self.line(), "ready");
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("the target writes");
        line.trim().to_owned()
    }

    /// Lets it end by itself and reaps it.
    pub(crate) fn end(mut self) {
        drop(self.input.take());
        self.child.wait().expect("a child");
    }

    pub(crate) fn memory(&self, address: u64, bytes: usize) -> Vec<u8> {
        use std::os::unix::fs::FileExt as _;
        let mut buffer = vec![0; bytes];
        fs::File::open(format!("/proc/{}/mem", self.pid()))
            .and_then(|file| file.read_exact_at(&mut buffer, address))
            .expect("the target's memory");
        buffer
    }
}

impl Drop for Target {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// A session with eBPF, or `None` after saying that the test is skipped and why.
pub(crate) fn session(test: &str) -> Option<Session> {
    session_with(
        test,
        Options {
            use_ebpf: UseEbpf::Require,
            ..Options::default()
        },
    )
}

pub(crate) fn session_with(test: &str, options: Options) -> Option<Session> {
    match Session::new(options) {
        Ok(session) => Some(session),
        Err(unavailable) => {
            skip(test, &unavailable.to_string());
            None
        }
    }
}

/// Polls until `enough` says so; fails after ten seconds.
pub(crate) fn poll_until(
    session: &mut Session,
    samples: &mut Vec<Sample>,
    enough: impl Fn(&[Sample]) -> bool,
) {
    let begun = Instant::now();
    while !enough(samples) {
        session.poll(samples).expect("no problem");
        assert!(
            begun.elapsed() < Duration::from_secs(10),
            "not enough after 10 s: {} samples",
            samples.len()
        );
        std::thread::yield_now();
    }
}

/// One poll after the target has come to rest: everything is there.
pub(crate) fn poll(session: &mut Session) -> Vec<Sample> {
    let mut samples = Vec::new();
    session.poll(&mut samples).expect("no problem");
    samples
}

pub(crate) fn records(samples: &[Sample], kind: ringsight_records::Kind) -> usize {
    samples
        .iter()
        .filter(|sample| matches!(sample, Sample::Record { record, .. } if record.kind() == Some(kind)))
        .count()
}

pub(crate) fn lost(samples: &[Sample]) -> u64 {
    samples
        .iter()
        .map(|sample| {
            if let Sample::Lost { count, .. } = sample {
                *count
            } else {
                0
            }
        })
        .sum()
}

/// Compiles a C file of this folder into a shared library in `directory`; `None` without a compiler.
pub(crate) fn compile(test: &str, source: &str, library: &Path, flags: &[&str]) -> Option<()> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("tests/common")
        .join(source);
    let status = Command::new("cc")
        .args(["-shared", "-fPIC", "-O1"])
        .args(flags)
        .arg(&source)
        .arg("-o")
        .arg(library)
        .status();
    match status {
        Ok(status) => {
            assert!(status.success(), "{} does not compile", source.display());
            Some(())
        }
        Err(error) => {
            skip(test, &format!("no C compiler (cc: {error})"));
            None
        }
    }
}

/// A reader in a process of its own.
pub(crate) struct Reader {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Reader {
    /// Runs `fixture_reader` by `command` and returns it with its first line.
    pub(crate) fn start(mut command: Command, pid: u32) -> (Self, String) {
        let mut child = command
            .arg(pid.to_string())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the fixture: build it with `cargo build -p ringsight-probes --examples`");
        let mut output = BufReader::new(child.stdout.take().expect("piped"));
        let mut line = String::new();
        output.read_line(&mut line).expect("a line");
        (Self { child, output }, line.trim().to_owned())
    }

    pub(crate) fn command() -> Command {
        Command::new(examples().join("fixture_reader"))
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// As the out-of-memory killer does it.
    pub(crate) fn kill(mut self) {
        self.child.kill().expect("a child");
        self.child.wait().expect("a child");
    }

    /// Ends it and returns how many records it saw.
    pub(crate) fn end(mut self) -> usize {
        drop(self.child.stdin.take());
        let mut line = String::new();
        self.output.read_line(&mut line).expect("a line");
        self.child.wait().expect("a child");
        line.trim()
            .strip_prefix("records ")
            .and_then(|count| count.parse().ok())
            .expect("a count")
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
