//! A step of a part: commands with a time limit, a log file, and a judgement of what they printed.

use std::{
    fmt::Write as _,
    os::unix::process::CommandExt as _,
    path::{Path, PathBuf},
    process::{Child, Command, ExitStatus, Stdio},
    sync::atomic::{AtomicBool, Ordering},
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result};
use fs_err::{self as fs, File};

pub(super) use super::report::StepResult;
use super::{gpu_host::GpuHost, report::Report};
use crate::process;

/// The most that one rank may outlive another that has failed.
const GRACE: Duration = Duration::from_secs(5);

/// The steps of one part.
pub(super) struct Steps<'a> {
    pub(super) part: &'static str,
    pub(super) host: &'a GpuHost,
    pub(super) out: &'a Path,
    pub(super) deadline: Instant,
    /// A signal has come: nothing more is to be run.
    pub(super) interrupted: &'a AtomicBool,
    pub(super) report: &'a mut Report,
}

impl Steps<'_> {
    /// File of this part below the folder of what the steps say.
    pub(super) fn file(&self, name: &str) -> PathBuf {
        self.out.join(format!("{}-{name}", self.part))
    }

    /// What is left of this part's time.
    pub(super) fn left(&self) -> Duration {
        self.deadline.saturating_duration_since(Instant::now())
    }

    /// Runs a command for at most so many seconds and enters how it went; what it said, if it has passed.
    pub(super) fn run(
        &mut self,
        name: &str,
        seconds: u64,
        command: Command,
        judge: impl FnOnce(&str) -> StepResult,
    ) -> Option<String> {
        self.run_all(name, seconds, vec![command], judge)
    }

    /// The same for several commands that run at the same time, such as the ranks of a job. They end together: where one
    /// fails, the others soon follow.
    pub(super) fn run_all(
        &mut self,
        name: &str,
        seconds: u64,
        commands: Vec<Command>,
        judge: impl FnOnce(&str) -> StepResult,
    ) -> Option<String> {
        let begun = Instant::now();
        let left = self.left();
        let not_run = match self.interrupted.load(Ordering::Relaxed) {
            true => Some("not run: interrupted"),
            false if left.is_zero() => Some("not run: the time of this part was over"),
            false => None,
        };
        if let Some(reason) = not_run {
            self.enter(name, Err(reason.to_owned()));
            return None;
        }
        let log = self.file(&format!("{name}.log"));
        let verdict = self.finish(&log, left.min(Duration::from_secs(seconds)), commands, judge);
        let (said, verdict) = match verdict {
            Ok((said, detail)) => (Some(said), Ok(detail)),
            Err(reason) => (None, Err(reason)),
        };
        self.enter_after(name, begun.elapsed(), verdict);
        said
    }

    fn finish(
        &self,
        log: &Path,
        limit: Duration,
        commands: Vec<Command>,
        judge: impl FnOnce(&str) -> StepResult,
    ) -> std::result::Result<(String, String), String> {
        let ended = together(log, limit, self.interrupted, commands).map_err(|error| format!("{error:#}"))?;
        let said = fs::read(log).map_err(|error| format!("reading {}: {error}", log.display()))?;
        let said = String::from_utf8_lossy(&said).into_owned();
        let verdict = match ended {
            End::Late => Err(format!("not over after {:.0} s", limit.as_secs_f64())),
            End::Interrupted => Err("interrupted".to_owned()),
            End::Failed(status) => Err(process::reason(status)),
            End::Well => judge(&said),
        };
        match verdict {
            Ok(detail) => Ok((said, detail)),
            Err(reason) => Err(with_last_words(&reason, &said)),
        }
    }

    /// Enters a step that needed no command.
    pub(super) fn enter(&mut self, name: &str, verdict: StepResult) {
        self.enter_after(name, Duration::ZERO, verdict);
    }

    /// Enters a step whose commands were run elsewhere.
    pub(super) fn enter_after(&mut self, name: &str, took: Duration, verdict: StepResult) {
        self.report.enter(self.part, name, took, verdict);
    }

    /// Enters a step that cannot run here.
    pub(super) fn skip(&mut self, name: &str, reason: &str) {
        self.report.skip(self.part, name, reason);
    }

    /// Whether there are fewer GPUs than `count`, which is entered as a skipped step.
    pub(super) fn skips_without(&mut self, name: &str, count: usize) -> bool {
        let lacks = self.host.lacks_gpus(count);
        if let Some(reason) = &lacks {
            self.skip(name, reason);
        }
        lacks.is_some()
    }

    /// Adds lines below the table.
    pub(super) fn note(&mut self, text: &str) {
        self.report.note(text);
    }

    /// Adds figures to the report, under the name of this part.
    pub(super) fn figures(&mut self, figures: serde_json::Value) {
        self.report.figures(self.part, figures);
    }
}

/// A detail if all is well, else a reason.
pub(super) fn verdict_of(is_well: bool, text: String) -> StepResult {
    if is_well { Ok(text) } else { Err(text) }
}

/// The judgement of programs that say themselves how it went, in lines that begin with "ok" or hold "FAILED"; the last that
/// says ok is the detail. Others, of libraries, may come after it.
pub(super) fn says_ok(said: &str) -> StepResult {
    if said.lines().any(|line| line.contains("FAILED")) {
        return Err("it says FAILED".to_owned());
    }
    let last = said.lines().rev().find_map(|line| line.strip_prefix("ok "));
    last.map(|line| line.trim().to_owned())
        .ok_or_else(|| "it has not said ok".to_owned())
}

/// The reason, and below it the lines of what was said that tell most.
pub(super) fn with_last_words(reason: &str, said: &str) -> String {
    const LINES: usize = 8;
    const WIDTH: usize = 300;
    let telling = |line: &&str| {
        ["FAILED", "Error", "error", "WARN"]
            .iter()
            .any(|word| line.contains(word))
    };
    let mut lines: Vec<&str> = said.lines().filter(telling).take(LINES / 2).collect();
    let last: Vec<&str> = said.lines().filter(|line| !line.trim().is_empty()).collect();
    lines.extend(&last[last.len().saturating_sub(LINES / 2)..]);
    lines.dedup();
    let mut text = reason.to_owned();
    for line in lines {
        let _ = write!(text, "\n{}", line.chars().take(WIDTH).collect::<String>());
    }
    text
}

/// How several processes ended.
enum End {
    Well,
    Failed(ExitStatus),
    Late,
    Interrupted,
}

/// Processes with all that they started; killed with it when dropped.
struct Groups(Vec<Child>);

impl Drop for Groups {
    fn drop(&mut self) {
        for child in &mut self.0 {
            let group = child.id() as i32;
            // SAFETY: a signal to the group that the child was made the leader of. While its members live, and the child until
            // it is waited for below, no other group has this number.
            unsafe { libc::kill(-group, libc::SIGKILL) };
            let _ = child.wait();
        }
    }
}

/// Runs commands at the same time, each in a process group of its own; what they say goes to one file.
fn together(log: &Path, limit: Duration, interrupted: &AtomicBool, commands: Vec<Command>) -> Result<End> {
    let file = File::create(log)?.into_file();
    let end = Instant::now() + limit;
    let mut groups = Groups(Vec::new());
    for mut command in commands {
        command
            .stdin(Stdio::null())
            .stdout(file.try_clone()?)
            .stderr(file.try_clone()?)
            .process_group(0);
        let child = command
            .spawn()
            .with_context(|| format!("cannot start {}", process::line(&command)))?;
        groups.0.push(child);
    }
    // As seen by `try_wait`, by child.
    let mut ends: Vec<Option<ExitStatus>> = vec![None; groups.0.len()];
    let mut first_failure: Option<(ExitStatus, Instant)> = None;
    loop {
        for (child, ended) in groups.0.iter_mut().zip(&mut ends) {
            if ended.is_none() {
                *ended = child.try_wait()?;
                if let Some(status) = ended.filter(|status| !status.success()) {
                    first_failure.get_or_insert((status, Instant::now()));
                }
            }
        }
        let all = ends.iter().all(Option::is_some);
        match first_failure {
            Some((status, since)) if all || since.elapsed() > GRACE => return Ok(End::Failed(status)),
            None if all => return Ok(End::Well),
            _ => {}
        }
        // Relaxed: it says all itself.
        if interrupted.load(Ordering::Relaxed) {
            return Ok(End::Interrupted);
        }
        if Instant::now() >= end {
            return Ok(first_failure.map_or(End::Late, |(status, _)| End::Failed(status)));
        }
        thread::sleep(Duration::from_millis(2));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    static NEVER: AtomicBool = AtomicBool::new(false);

    fn shell(script: &str) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", script]);
        command
    }

    #[test]
    fn what_is_too_slow_is_killed_with_all_that_it_started() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let script = "sleep 600 & echo $!; wait";
        let ended = together(&log, Duration::from_secs(2), &NEVER, vec![shell(script)]).unwrap();
        assert!(matches!(ended, End::Late));
        let grandchild: u32 = fs::read_to_string(&log).unwrap().trim().parse().unwrap();
        // It is dead, or about to be: the signal has been sent. It is reaped by whoever its parent is now.
        let state = || {
            let stat = fs::read_to_string(format!("/proc/{grandchild}/stat")).unwrap_or_default();
            stat.rsplit(')').next().unwrap_or("").trim().chars().next()
        };
        let end = Instant::now() + Duration::from_secs(20);
        while !matches!(state(), None | Some('Z' | 'X')) {
            assert!(Instant::now() < end, "process {grandchild} lives");
            thread::yield_now();
        }
    }

    #[test]
    fn an_interrupt_ends_what_runs() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let interrupted = AtomicBool::new(true);
        let ended = together(
            &log,
            Duration::from_secs(600),
            &interrupted,
            vec![shell("sleep 600")],
        )
        .unwrap();
        assert!(matches!(ended, End::Interrupted));
    }

    #[test]
    fn where_one_fails_the_others_soon_follow() {
        let folder = tempfile::tempdir().unwrap();
        let log = folder.path().join("log");
        let begun = Instant::now();
        let commands = vec![shell("sleep 600"), shell("echo no memory; exit 3")];
        let ended = together(&log, Duration::from_secs(60), &NEVER, commands).unwrap();
        assert!(matches!(ended, End::Failed(status) if status.code() == Some(3)));
        assert!(begun.elapsed() < Duration::from_secs(50));
        let commands = vec![shell("true"), shell("true")];
        assert!(matches!(
            together(&log, Duration::from_secs(60), &NEVER, commands).unwrap(),
            End::Well
        ));
    }

    #[test]
    fn a_program_that_says_so_has_failed() {
        assert_eq!(says_ok("a\nok 407 cases\nwarning\n\n").unwrap(), "407 cases");
        assert!(says_ok("a\n").is_err());
        assert!(says_ok("row 1\nFAILED element 7\nok\n").is_err());
        let told = with_last_words("exit status 1", "x\nFAILED here\ny\nz\n");
        assert!(told.starts_with("exit status 1\nFAILED here\n"), "{told}");
        assert!(told.ends_with("y\nz"), "{told}");
    }
}
