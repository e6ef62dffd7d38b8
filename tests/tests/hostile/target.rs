//! A hostile process, and the collector's commands on it.

use std::{
    fs,
    os::unix::{fs::PermissionsExt as _, process::CommandExt as _},
    path::{Path, PathBuf},
    process::{Command, Stdio},
    sync::OnceLock,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use ringsight_testbed::{
    process::{self, Dialogue, Guarded},
    workspace,
};
use ringsight_tests::{compile, folder, skip};
use serde_json::Value;
use tempfile::TempDir;

/// The user and group of a hostile target: "nobody", who owns nothing.
pub(crate) const NOBODY: u32 = 65534;

/// Content of a file that root alone may read: `secret`, in a target's folder.
pub(crate) const SECRET: &str = "the content of a file that root alone may read\n";

/// Memory that a command of the collector may take as its own. It takes some megabytes; past this limit, it aborts.
const MEMORY: u64 = 512 << 20;

/// Longest that a command of the collector may take before its test calls it hung.
const LIMIT: Duration = Duration::from_secs(60);

/// The collector.
///
/// # Panics
/// If it cannot be built.
pub(crate) fn ringsight() -> &'static Path {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    BUILT.get_or_init(|| {
        let build = || {
            let mut cargo = workspace::cargo();
            cargo.args([
                "build",
                "--locked",
                "-p",
                "ringsight-collector",
                "--bin",
                "ringsight",
            ]);
            process::run(&mut cargo)?;
            anyhow::Ok(workspace::target()?.join("debug/ringsight"))
        };
        build().unwrap_or_else(|error| panic!("building the collector: {error:#}"))
    })
}

/// A process of user [`NOBODY`] that plays one case. It maps a library with our probe functions, and a line asks it for each
/// next act. Killed when dropped.
pub(crate) struct Target {
    dialogue: Dialogue,
    folder: TempDir,
}

impl Target {
    /// Starts `case` and waits until its first act is done. `None`, with the test's name said as skipped, without root: then nobody
    /// can become somebody else, and the collector has no rights that could be abused. The same if this machine does not let an
    /// unprivileged process play the case.
    pub(crate) fn start(test: &str, case: &str) -> Result<Option<Self>> {
        Self::start_with(test, case, Path::new("libnccl.so.2"))
    }

    /// As [`Target::start`], with its library at a path of its choice in its folder.
    pub(crate) fn start_with(test: &str, case: &str, library_path: &Path) -> Result<Option<Self>> {
        if !ringsight_tests::may_attach() {
            skip(test, "needs root, to start a target of another user");
            return Ok(None);
        }
        let folder = folder()?;
        let path = folder.path();
        fs::set_permissions(path, fs::Permissions::from_mode(0o755))?;
        let library_path = path.join(library_path);
        fs::create_dir_all(library_path.parent().context("a folder")?)?;
        fs::copy(library(), &library_path)?;
        // Where anybody may run it from.
        let program = path.join("hostile_target");
        fs::copy(env!("CARGO_BIN_EXE_hostile_target"), &program)?;
        let secret = path.join("secret");
        fs::write(&secret, SECRET)?;
        fs::set_permissions(&secret, fs::Permissions::from_mode(0o600))?;
        let own = path.join("own");
        fs::create_dir(&own)?;
        std::os::unix::fs::chown(&own, Some(NOBODY), Some(NOBODY))?;
        let mut command = Command::new(&program);
        command
            .arg(case)
            .arg(library_path)
            .current_dir(&own)
            .uid(NOBODY)
            .gid(NOBODY);
        let mut dialogue = Dialogue::start(case, &mut command)?;
        let said = dialogue.line().with_context(|| format!("case {case}"))?;
        if let Some(reason) = said.strip_prefix("skip ") {
            skip(test, reason);
            return Ok(None);
        }
        if said != "ready" {
            bail!("case {case}: {said}");
        }
        Ok(Some(Self { dialogue, folder }))
    }

    pub(crate) fn pid(&self) -> u32 {
        self.dialogue.pid()
    }

    /// A folder of root's, for outputs; the folder `own` in it is the target's, and its working directory.
    pub(crate) fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Has the target act on `line`; its answer.
    pub(crate) fn ask(&mut self, line: &str) -> Result<String> {
        self.dialogue.ask(line)
    }
}

/// A library with our probe functions, compiled once.
fn library() -> &'static Path {
    static COMPILED: OnceLock<PathBuf> = OnceLock::new();
    COMPILED.get_or_init(|| {
        let library = Path::new(env!("CARGO_TARGET_TMPDIR")).join("hostile/libnccl.so.2");
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hostile/library.c");
        let options = ["-shared", "-fPIC", "-Wl,-soname,libnccl.so.2,--build-id"];
        compile::compile(
            Command::new("gcc")
                .args(options)
                .args(compile::STRICT)
                .arg(source),
            &library,
        );
        library
    })
}

/// How a command of the collector ended.
#[derive(Debug)]
pub(crate) struct Collected {
    /// Exit code; `None` if a signal ended it.
    pub(crate) code: Option<i32>,
    /// Standard output.
    pub(crate) output: String,
    /// Standard error.
    pub(crate) errors: String,
    /// How long it took.
    pub(crate) elapsed: Duration,
}

impl Collected {
    /// Runs `ringsight` with `arguments` to its end, with little memory. Its outputs go to `folder`.
    ///
    /// # Errors
    /// If it cannot be started, or hangs: then it is killed.
    pub(crate) fn of(folder: &Path, arguments: &[&str]) -> Result<Self> {
        let (output, errors) = (folder.join("output"), folder.join("errors"));
        let mut command = Command::new(ringsight());
        command
            .args(arguments)
            .stdin(Stdio::null())
            .stdout(fs::File::create(&output)?)
            .stderr(fs::File::create(&errors)?);
        let limit = libc::rlimit {
            rlim_cur: MEMORY,
            rlim_max: MEMORY,
        };
        // SAFETY: between fork and exec, one system call on a value that is this closure's own.
        unsafe {
            command.pre_exec(
                move || match libc::setrlimit(libc::RLIMIT_DATA, &raw const limit) {
                    0 => Ok(()),
                    _ => Err(std::io::Error::last_os_error()),
                },
            );
        }
        let begun = Instant::now();
        let mut process = Guarded::start("ringsight", &mut command, libc::SIGKILL)?;
        let status = process.wait(LIMIT)?;
        let read = |file: &Path| anyhow::Ok(String::from_utf8_lossy(&fs::read(file)?).into_owned());
        Ok(Self {
            code: status.code(),
            elapsed: begun.elapsed(),
            output: read(&output)?,
            errors: read(&errors)?,
        })
    }
}

/// As [`watch_beside`]; `check` is handed how the command ended.
pub(crate) fn watch_both(hostile: &Target, check: impl FnOnce(&Collected) -> Result<()>) -> Result<()> {
    match watch_beside(hostile)? {
        Some(beside) => check(&beside.collected),
        None => Ok(()),
    }
}

/// What came of a second's watch of two targets.
pub(crate) struct Beside {
    pub(crate) collected: Collected,
    pub(crate) summary: Value,
    /// By line of the OTLP file.
    lines: Vec<Value>,
}

impl Beside {
    /// All metrics, the oldest first.
    pub(crate) fn metrics(&self) -> impl Iterator<Item = &Value> {
        fn each<'a>(value: &'a Value, key: &str) -> impl Iterator<Item = &'a Value> + use<'a> {
            value[key].as_array().into_iter().flatten()
        }
        self.lines
            .iter()
            .flat_map(|line| each(line, "resourceMetrics"))
            .flat_map(|group| each(group, "scopeMetrics"))
            .flat_map(|group| each(group, "metrics"))
    }
}

/// Attaches for a second to a hostile target and to an honest one that is busy. The honest one is watched to the end, and nothing of it is lost.
/// `None` where [`Target::start`] gives none.
pub(crate) fn watch_beside(hostile: &Target) -> Result<Option<Beside>> {
    let Some(honest) = Target::start("watch_beside", "busy")? else {
        return Ok(None);
    };
    let file = |name: &str| {
        let path = honest.folder().join(name);
        path.into_os_string()
            .into_string()
            .ok()
            .context("a folder with a name in UTF-8")
    };
    let (summary, lines) = (file("summary.json")?, file("telemetry.jsonl")?);
    let pids = [hostile.pid().to_string(), honest.pid().to_string()];
    let collected = Collected::of(
        honest.folder(),
        &[
            "attach",
            &pids[0],
            &pids[1],
            "--no-ebpf",
            "--duration",
            "1",
            "--summary",
            &summary,
            "--out",
            &lines,
        ],
    )?;
    let summary = fs::read_to_string(&summary).with_context(|| format!("{collected:?}"))?;
    let summary: Value = serde_json::from_str(&summary)?;
    let pid = u64::from(honest.pid());
    let is_honest = |operation: &&Value| operation["by_rank"][0]["pid"].as_u64() == Some(pid);
    let operations = summary["operations"].as_array().into_iter().flatten();
    let mut numbers: Vec<u64> = operations
        .filter(is_honest)
        .filter_map(|operation| operation["sequence"].as_u64())
        .collect();
    numbers.sort_unstable();
    // One a millisecond, on a machine that does other things, too.
    let have_no_gap = numbers.windows(2).all(|pair| pair[0] + 1 == pair[1]);
    ensure!(
        numbers.len() >= 100 && have_no_gap,
        "operations {numbers:?}: {collected:?}"
    );
    let completed = &summary["records"]["op_completed"];
    ensure!(completed["lost"] == 0, "{summary:#}");
    let lines = fs::read_to_string(&lines)?;
    let lines = lines
        .lines()
        .map(serde_json::from_str)
        .collect::<Result<_, _>>()?;
    Ok(Some(Beside {
        collected,
        summary,
        lines,
    }))
}
