//! Targets for the tests: processes that load a library and do as they are told.
#![allow(dead_code, reason = "each test file uses its part")]
#![allow(clippy::disallowed_methods, reason = "tests make and read files of their own")]

use std::{
    collections::BTreeMap,
    fs,
    io::{BufRead as _, BufReader, Write as _},
    os::fd::AsRawFd as _,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    time::{Duration, Instant},
};

use ringsight_probes::{Carrier, Options, Sample, Session, Source as _, UseEbpf};

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
        assert_eq!(
            self.call(&format!("fixture_open {}", ringsight_records::VERSION)),
            0
        );
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

/// All that there is, after the target has come to rest.
pub(crate) fn poll(session: &mut Session) -> Vec<Sample> {
    let mut samples = Vec::new();
    loop {
        session.poll(&mut samples).expect("no problem");
        if !session.is_behind() {
            return samples;
        }
    }
}

/// Records of a process that came through probes. (`fixture_probe` hits one whatever the ring takes.)
pub(crate) fn by_probe(samples: &[Sample], of: u32) -> usize {
    let is = |sample: &&Sample| matches!(sample, Sample::Record { pid, carrier: Carrier::Probe, .. } if *pid == of);
    samples.iter().filter(is).count()
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
    pub(crate) fn start(command: Command, pid: u32) -> (Self, String) {
        Self::start_on(command, &[pid])
    }

    /// The same, on several processes.
    pub(crate) fn start_on(mut command: Command, pids: &[u32]) -> (Self, String) {
        let mut child = command
            .args(pids.iter().map(ToString::to_string))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("the fixture: build it with `cargo build -p ringsight-probes --examples`");
        let output = BufReader::new(child.stdout.take().expect("piped"));
        let mut reader = Self { child, output };
        let line = reader.line();
        (reader, line)
    }

    pub(crate) fn command() -> Command {
        Command::new(examples().join("fixture_reader"))
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    /// The next line that it writes.
    pub(crate) fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).expect("a line");
        line.trim().to_owned()
    }

    /// Stops it (`SIGSTOP`) or has it go on (`SIGCONT`).
    pub(crate) fn signal(&self, signal: i32) {
        // SAFETY: a system call on integers; the child has not been waited for.
        assert_eq!(unsafe { libc::kill(self.pid() as i32, signal) }, 0);
    }

    /// As the out-of-memory killer does it.
    pub(crate) fn kill(mut self) {
        self.child.kill().expect("a child");
        self.child.wait().expect("a child");
    }

    /// Ends it and returns how many records it saw.
    pub(crate) fn end(self) -> usize {
        self.end_by_process().0
    }

    /// Ends it and returns how many records it saw, and of each process: records, missed, lost.
    pub(crate) fn end_by_process(mut self) -> (usize, BTreeMap<u32, [u64; 3]>) {
        drop(self.child.stdin.take());
        let line = self.line();
        self.child.wait().expect("a child");
        let mut words = line.strip_prefix("records ").expect("a count").split(' ');
        let total = words.next().and_then(|count| count.parse().ok());
        let by_process = words
            .map(|word| {
                let numbers: Vec<u64> = word.split(':').map(|n| n.parse().expect("a number")).collect();
                let [pid, records, missed, lost] = numbers[..] else {
                    panic!("{word}")
                };
                (pid as u32, [records, missed, lost])
            })
            .collect();
        (total.expect("a count"), by_process)
    }
}

impl Drop for Reader {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// The process of this number in the namespace that its parent lives in, that is, the one child of `pid`.
pub(crate) fn child_of(pid: u32) -> u32 {
    let children = format!("/proc/{pid}/task/{pid}/children");
    let begun = Instant::now();
    loop {
        let text = fs::read_to_string(&children).expect("a process");
        if let Ok(child) = text.trim().parse() {
            return child;
        }
        assert!(begun.elapsed() < Duration::from_secs(10), "children {text:?}");
        std::thread::yield_now();
    }
}

/// The numbers of a process in the namespaces that it is in, the innermost last.
pub(crate) fn numbers_of(pid: u32) -> Vec<u32> {
    let status = fs::read_to_string(format!("/proc/{pid}/status")).expect("a process");
    let numbers = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
    numbers
        .expect("a field of every kernel since 4.1")
        .split_whitespace()
        .map(|number| number.parse().expect("a number"))
        .collect()
}
