//! Child processes that end with their parent, and threads that end with their caller.
//!
//! A [`Guarded`] child gets a signal from the kernel when the thread that started it ends (`PR_SET_PDEATHSIG`), and from its guard when
//! the guard is dropped. A [`Dialogue`] is such a child that answers each line by a line.

use std::{
    io::{BufRead, BufReader, Lines, Write as _},
    os::unix::process::{CommandExt, ExitStatusExt},
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use fs_err as fs;

/// This program. The workspace's tests may build it anew while it runs, which takes the running one its name (Linux then says
/// "(deleted)" behind it); what has the name now is the same program.
///
/// # Errors
/// The system does not say.
pub fn own_executable() -> Result<PathBuf> {
    let path = std::env::current_exe().context("this program's own path")?;
    let renewed = path
        .to_str()
        .and_then(|path| path.strip_suffix(" (deleted)"))
        .map(PathBuf::from);
    Ok(renewed.unwrap_or(path))
}

/// Runs `command` with this process's terminal.
///
/// # Errors
/// The command as one would type it, if it cannot be started or fails.
pub fn run(command: &mut Command) -> Result<()> {
    let status = command
        .status()
        .with_context(|| format!("cannot start {}", line(command)))?;
    if !status.success() {
        bail!("{} failed: {}", line(command), reason(status));
    }
    Ok(())
}

/// Standard output of `command`, without the line end.
///
/// # Errors
/// As [`run`], with the last line of standard error.
pub fn output(command: &mut Command) -> Result<String> {
    let output = command
        .output()
        .with_context(|| format!("cannot start {}", line(command)))?;
    if !output.status.success() {
        let errors = String::from_utf8_lossy(&output.stderr);
        let last = errors
            .lines()
            .rev()
            .find(|line| !line.trim().is_empty())
            .unwrap_or_default();
        bail!("{} failed: {}: {last}", line(command), reason(output.status));
    }
    let text = String::from_utf8(output.stdout).with_context(|| format!("output of {}", line(command)))?;
    Ok(text.trim_end().to_owned())
}

/// Sends both outputs of `command` to a new file.
pub(crate) fn log_to(command: &mut Command, file: &Path) -> Result<()> {
    let file = fs::File::create(file)?.into_file();
    command.stdout(file.try_clone()?).stderr(file);
    Ok(())
}

/// The command as one would type it.
#[must_use]
pub fn line(command: &Command) -> String {
    std::iter::once(command.get_program())
        .chain(command.get_args())
        .map(|word| word.to_string_lossy().into_owned())
        .collect::<Vec<_>>()
        .join(" ")
}

/// How a process ended, in words.
#[must_use]
pub fn reason(status: ExitStatus) -> String {
    match (status.code(), status.signal()) {
        (Some(code), _) => format!("exit status {code}"),
        (None, Some(signal)) => format!("killed by signal {signal}"),
        (None, None) => status.to_string(),
    }
}

/// Path of a program in `PATH`.
#[must_use]
pub fn find(program: &str) -> Option<PathBuf> {
    std::env::split_paths(&std::env::var_os("PATH")?)
        .map(|folder| folder.join(program))
        .find(|path| is_program(path))
}

/// Whether `path` is a file that may be executed.
#[must_use]
pub fn is_program(path: &Path) -> bool {
    use std::os::unix::fs::PermissionsExt;
    path.metadata()
        .is_ok_and(|data| data.is_file() && data.permissions().mode() & 0o111 != 0)
}

/// A child that is ended when its guard is dropped and, by the kernel, when the thread that started it ends.
#[derive(Debug)]
pub struct Guarded {
    name: String,
    child: Child,
    end_signal: i32,
}

impl Guarded {
    /// Starts `command`. `end_signal` is what asks it to end: `SIGTERM` for what has to clean up, else `SIGKILL`.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(name: &str, command: &mut Command, end_signal: i32) -> Result<Self> {
        let parent = std::process::id();
        // SAFETY: between fork and exec only prctl and getppid are called, both async-signal-safe; no memory is touched.
        unsafe {
            command.pre_exec(move || {
                if libc::prctl(libc::PR_SET_PDEATHSIG, end_signal) != 0 {
                    return Err(std::io::Error::last_os_error());
                }
                // The parent may have died before the line above; then nobody will send the signal.
                if libc::getppid() as u32 != parent {
                    return Err(std::io::Error::from_raw_os_error(libc::ESRCH));
                }
                Ok(())
            });
        }
        let child = command
            .spawn()
            .with_context(|| format!("cannot start {name}: {}", line(command)))?;
        Ok(Self {
            name: name.to_owned(),
            child,
            end_signal,
        })
    }

    /// Process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    /// What it is called in messages.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The child itself, for its pipes.
    pub fn child(&mut self) -> &mut Child {
        &mut self.child
    }

    /// Sends a signal; nothing happens if the process has been waited for.
    pub fn signal(&mut self, signal: i32) {
        if matches!(self.child.try_wait(), Ok(None)) {
            // SAFETY: the process is our child and not reaped (checked above, and only this object reaps it), so the
            // pid cannot have been given to another process.
            unsafe { libc::kill(self.child.id() as i32, signal) };
        }
    }

    /// Waits for its end, at most `limit`.
    ///
    /// # Errors
    /// If it is still running then.
    pub fn wait(&mut self, limit: Duration) -> Result<ExitStatus> {
        let end = Instant::now() + limit;
        loop {
            if let Some(status) = self.child.try_wait()? {
                return Ok(status);
            }
            if Instant::now() >= end {
                bail!(
                    "{} (process {}) is still running after {limit:?}",
                    self.name,
                    self.child.id()
                );
            }
            thread::sleep(Duration::from_millis(2));
        }
    }

    /// Waits until `is_so`, at most `limit`.
    pub fn wait_until(&mut self, limit: Duration, mut is_so: impl FnMut() -> bool) -> Result<()> {
        let end = Instant::now() + limit;
        while !is_so() {
            if let Some(status) = self.child.try_wait()? {
                bail!("{} has ended ({})", self.name, reason(status));
            }
            if Instant::now() >= end {
                bail!("{} is not ready after {limit:?}", self.name);
            }
            thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Asks it to end and waits; kills it after `limit`.
    ///
    /// # Errors
    /// If it had to be killed though it was only to be asked.
    pub fn end(&mut self, limit: Duration) -> Result<ExitStatus> {
        self.signal(self.end_signal);
        self.wait(limit).inspect_err(|_| {
            let _ = self.child.kill();
            let _ = self.child.wait();
        })
    }
}

impl Drop for Guarded {
    fn drop(&mut self) {
        if matches!(self.child.try_wait(), Ok(None)) {
            let _ = self.end(Duration::from_secs(3));
        }
    }
}

/// A child that answers each line on its standard input by a line on its standard output.
pub struct Dialogue {
    process: Guarded,
    input: ChildStdin,
    output: Lines<BufReader<ChildStdout>>,
}

impl Dialogue {
    /// Starts `command`.
    ///
    /// # Errors
    /// If it cannot be started.
    pub fn start(name: &str, command: &mut Command) -> Result<Self> {
        command.stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut process = Guarded::start(name, command, libc::SIGKILL)?;
        let child = process.child();
        let input = child.stdin.take().context("standard input is not piped")?;
        let output = child.stdout.take().context("standard output is not piped")?;
        Ok(Self {
            process,
            input,
            output: BufReader::new(output).lines(),
        })
    }

    /// Process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// The next line of the child.
    ///
    /// # Errors
    /// If the child has ended.
    pub fn line(&mut self) -> Result<String> {
        let line = self.output.next();
        let line = line.with_context(|| format!("{} has ended", self.process.name))?;
        line.with_context(|| format!("reading from {}", self.process.name))
    }

    /// Sends a line; returns the answer.
    ///
    /// # Errors
    /// If the child has ended.
    pub fn ask(&mut self, line: &str) -> Result<String> {
        writeln!(self.input, "{line}").with_context(|| format!("writing to {}", self.process.name))?;
        self.line()
    }

    /// Closes the child's standard input and waits for its end, at most `limit`.
    ///
    /// # Errors
    /// If the child still runs then, or fails.
    pub fn end(mut self, limit: Duration) -> Result<()> {
        drop(self.input);
        let status = self.process.wait(limit)?;
        if !status.success() {
            bail!("{}: {}", self.process.name, reason(status));
        }
        Ok(())
    }
}

/// Does `work` for each item at the same time, on a thread each; the results in the order of the items.
///
/// # Errors
/// The first item's that failed, or that a thread panicked.
pub fn on_threads<T: Send, R: Send>(
    items: impl IntoIterator<Item = T>,
    work: impl Fn(T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let work = &work;
    thread::scope(|scope| {
        let threads: Vec<_> = items
            .into_iter()
            .map(|item| scope.spawn(move || work(item)))
            .collect();
        let results = threads.into_iter().map(thread::ScopedJoinHandle::join);
        results
            .map(|result| result.unwrap_or_else(|_| bail!("a thread panicked")))
            .collect()
    })
}

/// Runs `command`, passes each line of its standard output on to `each`, and prints it; standard error goes to the
/// terminal.
///
/// # Errors
/// If it cannot be started or read.
pub fn stream(command: &mut Command, mut each: impl FnMut(&str)) -> Result<ExitStatus> {
    let mut child = command
        .stdout(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {}", line(command)))?;
    let output = child.stdout.take().context("standard output is not piped")?;
    for text in BufReader::new(output).split(b'\n') {
        let text = text?;
        let text = String::from_utf8_lossy(&text);
        println!("{text}");
        each(&text);
    }
    Ok(child.wait()?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_guard_ends_its_child() {
        let guard = Guarded::start("sleeper", Command::new("sleep").arg("600"), libc::SIGTERM).unwrap();
        let stat = format!("/proc/{}/stat", guard.pid());
        assert!(Path::new(&stat).exists());
        drop(guard);
        assert!(
            !Path::new(&stat).exists(),
            "the child was neither ended nor reaped"
        );
    }

    #[test]
    fn a_child_that_ignores_the_signal_is_killed_and_reported() {
        let mut command = Command::new("sh");
        command
            .args(["-c", "trap '' TERM; echo ready; while :; do sleep 1; done"])
            .stdout(Stdio::piped());
        let mut guard = Guarded::start("stubborn", &mut command, libc::SIGTERM).unwrap();
        let mut ready = String::new();
        BufReader::new(guard.child().stdout.take().unwrap())
            .read_line(&mut ready)
            .unwrap();
        let error = guard.end(Duration::from_millis(50)).unwrap_err().to_string();
        assert!(error.contains("stubborn"), "{error}");
        assert!(!Path::new(&format!("/proc/{}/stat", guard.pid())).exists());
    }

    #[test]
    fn a_failing_command_is_named() {
        let error = run(Command::new("sh").args(["-c", "exit 3"]))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("sh -c exit 3") && error.contains("exit status 3"),
            "{error}"
        );
        let error = output(Command::new("sh").args(["-c", "echo because >&2; exit 1"]))
            .unwrap_err()
            .to_string();
        assert!(error.contains("because"), "{error}");
    }

    #[test]
    fn lines_are_streamed_in_order() {
        let mut lines = Vec::new();
        let status = stream(Command::new("sh").args(["-c", "echo a; echo b; printf c"]), |l| {
            lines.push(l.to_owned());
        });
        assert!(status.unwrap().success());
        assert_eq!(lines, ["a", "b", "c"]);
    }
}
