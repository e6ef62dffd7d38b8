//! The library of a target: `explain` asks it, and its code is whatever the target wants.

use std::{
    fs,
    io::ErrorKind,
    net::TcpListener,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use ringsight_testbed::process::{Dialogue, Guarded};
use ringsight_tests::{compile, folder, may_attach, skip};
use tempfile::TempDir;

use crate::Collected;

/// What the library's constructor is aimed at: things of root's, on the host.
struct Aims {
    folder: TempDir,
    victim: Guarded,
    listener: TcpListener,
}

impl Aims {
    fn new() -> Result<Self> {
        let folder = folder()?;
        fs::write(folder.path().join("secret"), "root's secret")?;
        fs::set_permissions(folder.path().join("secret"), fs::Permissions::from_mode(0o600))?;
        let listener = TcpListener::bind("127.0.0.1:0")?;
        listener.set_nonblocking(true)?;
        Ok(Self {
            folder,
            victim: Guarded::start("sleep", Command::new("sleep").arg("600"), libc::SIGKILL)?,
            listener,
        })
    }

    /// The library that attacks so.
    fn library(&self, attack: &str) -> Result<PathBuf> {
        let library = self.folder.path().join(format!("{attack}.so"));
        let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/hostile/explain.c");
        let mark = self
            .folder
            .path()
            .join(if attack == "READ" { "secret" } else { "mark" });
        compile::compile(
            Command::new("gcc")
                .args(["-shared", "-fPIC", "-Wl,-soname,libnccl.so.2,--build-id"])
                .args(compile::STRICT)
                .arg(format!("-DATTACK={attack}"))
                .arg(format!("-DMARK=\"{}\"", mark.display()))
                .arg(format!("-DVICTIM={}", self.victim.pid()))
                .arg(format!("-DPORT={}", self.listener.local_addr()?.port()))
                .arg(source),
            &library,
        );
        Ok(library)
    }

    fn ensure_unharmed(&mut self) -> Result<()> {
        ensure!(!self.folder.path().join("mark").exists(), "it wrote a file");
        ensure!(self.victim.child().try_wait()?.is_none(), "it ended a process");
        let connected = self.listener.accept().map_err(|error| error.kind());
        ensure!(
            matches!(connected, Err(ErrorKind::WouldBlock)),
            "it connected: {connected:?}"
        );
        Ok(())
    }
}

/// A target in user, mount and process namespaces of its own, as in a container: user 0, without any right on the host. Its library is on a
/// file system of its own, and belongs to user 0: owner and mode are those of a library that only root could have written.
struct Contained {
    dialogue: Dialogue,
    pid: u32,
}

impl Contained {
    fn start(folder: &Path, library: &Path) -> Result<Self> {
        fs::set_permissions(folder, fs::Permissions::from_mode(0o755))?;
        let program = folder.join("hostile_target");
        fs::copy(env!("CARGO_BIN_EXE_hostile_target"), &program)?;
        let script = "mount -t tmpfs none /mnt && cp \"$1\" /mnt/libnccl.so.2 && chmod 755 /mnt/libnccl.so.2 \
            && exec \"$0\" described /mnt/libnccl.so.2";
        let mut command = Command::new("unshare");
        command
            .args([
                "--user",
                "--map-root-user",
                "--mount",
                "--pid",
                "--fork",
                "sh",
                "-c",
                script,
            ])
            .arg(&program)
            .arg(library)
            .current_dir("/");
        let mut dialogue = Dialogue::start("a contained target", &mut command)?;
        let said = dialogue.line()?;
        ensure!(said == "ready", "{said}");
        let outer = dialogue.pid();
        let children = fs::read_to_string(format!("/proc/{outer}/task/{outer}/children"))?;
        let pid = children.trim().parse().context("the process in the namespaces")?;
        Ok(Self { dialogue, pid })
    }
}

/// The `explain` of a target whose library attacks so; `None` without root.
fn attacked(test: &str, attack: &str) -> Result<Option<Collected>> {
    if !may_attach() {
        skip(test, "needs root, whose rights the library is after");
        return Ok(None);
    }
    let folder = folder()?;
    let mut aims = Aims::new()?;
    let library = aims.library(attack)?;
    // Where the target can copy it from.
    let copy = folder.path().join("library");
    fs::copy(library, &copy)?;
    let target = Contained::start(folder.path(), &copy)?;
    let explained = Collected::of(folder.path(), &["explain", &target.pid.to_string()])?;
    ensure!(
        explained.elapsed < Duration::from_secs(6),
        "{attack}: it took {:?}",
        explained.elapsed
    );
    // What was forked off, or is on its way, has a moment to do harm.
    let until = Instant::now() + Duration::from_millis(200);
    while Instant::now() < until {
        aims.ensure_unharmed().context(attack.to_owned())?;
    }
    for text in [&explained.output, &explained.errors] {
        ensure!(
            !text.chars().any(|c| c.is_control() && c != '\n'),
            "{attack}: {text:?}"
        );
    }
    drop(target.dialogue);
    Ok(Some(explained))
}

/// Its constructor fails, and then its table is as good as any.
fn ensure_harmless(test: &str, attack: &str) -> Result<()> {
    let Some(explained) = attacked(test, attack)? else {
        return Ok(());
    };
    ensure!(explained.code == Some(0), "{attack}: {explained:?}");
    ensure!(
        explained
            .output
            .contains("ring/simple          not taken: \\u{1b}[31mno\\n"),
        "{attack}: {explained:?}"
    );
    Ok(())
}

/// The command says what was wrong with the library.
fn ensure_told(test: &str, attack: &str, words: &str) -> Result<()> {
    let Some(explained) = attacked(test, attack)? else {
        return Ok(());
    };
    ensure!(explained.code == Some(1), "{attack}: {explained:?}");
    ensure!(explained.output.is_empty(), "{attack}: {explained:?}");
    ensure!(
        explained.errors.contains("libnccl.so.2: ") && explained.errors.contains(words),
        "{attack}: {explained:?}"
    );
    Ok(())
}

#[test]
fn a_library_that_does_nothing_is_asked() -> Result<()> {
    ensure_harmless("a_library_that_does_nothing_is_asked", "NOTHING")
}

#[test]
fn a_library_writes_no_file() -> Result<()> {
    ensure_harmless("a_library_writes_no_file", "WRITE")
}

#[test]
fn a_library_reads_no_file_of_roots() -> Result<()> {
    ensure_harmless("a_library_reads_no_file_of_roots", "READ")
}

#[test]
fn a_library_signals_no_process() -> Result<()> {
    ensure_harmless("a_library_signals_no_process", "SIGNAL")
}

#[test]
fn a_library_connects_to_nobody() -> Result<()> {
    ensure_harmless("a_library_connects_to_nobody", "CONNECT")
}

#[test]
fn a_library_starts_no_process() -> Result<()> {
    ensure_harmless("a_library_starts_no_process", "FORK")
}

#[test]
fn a_library_that_never_ends_is_ended() -> Result<()> {
    ensure_told(
        "a_library_that_never_ends_is_ended",
        "LOOP",
        "did not answer within 5 s",
    )
}

#[test]
fn a_library_that_says_too_much_is_not_listened_to() -> Result<()> {
    ensure_told(
        "a_library_that_says_too_much_is_not_listened_to",
        "PRINT",
        "its answer has more than",
    )
}

#[test]
fn a_library_that_takes_all_memory_gets_none() -> Result<()> {
    ensure_told(
        "a_library_that_takes_all_memory_gets_none",
        "ALLOCATE",
        "exit status: 7",
    )
}

/// A file without end and with little in it would earn it as much address space.
#[test]
fn a_library_shares_no_memory_past_its_limit() -> Result<()> {
    ensure_told(
        "a_library_shares_no_memory_past_its_limit",
        "SHARE",
        "exit status: 7",
    )
}

#[test]
fn a_library_that_crashes_ends_only_its_own_process() -> Result<()> {
    ensure_told(
        "a_library_that_crashes_ends_only_its_own_process",
        "CRASH",
        "signal: 4",
    )
}

#[test]
fn a_library_that_lies_is_not_believed() -> Result<()> {
    ensure_told(
        "a_library_that_lies_is_not_believed",
        "LIE",
        "its answer makes no sense",
    )
}
