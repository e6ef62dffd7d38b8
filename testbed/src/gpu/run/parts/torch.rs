//! PyTorch's nccl backend, on this library (`LD_PRELOAD`) and on NCCL.

use std::{net::TcpListener, path::Path, process::Command};

use anyhow::{Context, Result, anyhow};

use super::super::step::{Steps, says_ok};

/// Which library the ranks run on.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Library {
    Ours,
    Nccl,
}

/// A port to meet at: free now, and for a moment more.
fn port() -> Result<u16> {
    let address = TcpListener::bind(("127.0.0.1", 0)).and_then(|listener| listener.local_addr());
    Ok(address.context("no port for the ranks to meet at")?.port())
}

/// Python with PyTorch on a library.
fn python(steps: &Steps<'_>, library: Library) -> Result<Command> {
    let python = steps.host.python_with_torch().map_err(|reason| anyhow!(reason))?;
    let mut command = Command::new(python);
    command
        .env("NCCL_SOCKET_IFNAME", "lo")
        .env("NCCL_NVLS_ENABLE", "0")
        .env("NCCL_DEBUG", "WARN")
        .env("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        .env("PYTHONUNBUFFERED", "1")
        .env("OMP_NUM_THREADS", "2");
    match library {
        Library::Ours => command.env("LD_PRELOAD", steps.host.library()),
        Library::Nccl => command.env_remove("LD_PRELOAD"),
    };
    Ok(command)
}

/// The ranks of a job: processes that run a script of the bundle with these arguments.
pub(super) fn ranks(
    steps: &Steps<'_>,
    count: usize,
    library: Library,
    script: &str,
    arguments: &[&str],
) -> Result<Vec<Command>> {
    let port = port()?;
    let script = steps.host.bundle.join("scripts").join(script);
    let of_rank = |rank: usize| {
        let mut command = python(steps, library)?;
        command
            .arg(&script)
            .args(arguments)
            .env("RANK", rank.to_string())
            .env("WORLD_SIZE", count.to_string())
            .env("MASTER_ADDR", "127.0.0.1")
            .env("MASTER_PORT", port.to_string());
        Ok(command)
    };
    (0..count).map(of_rank).collect()
}

/// The same by torchrun, which starts them.
pub(super) fn torchrun(
    steps: &Steps<'_>,
    count: usize,
    library: Library,
    script: &str,
    arguments: &[&str],
) -> Result<Command> {
    let mut command = python(steps, library)?;
    command
        .args(["-m", "torch.distributed.run", "--nnodes", "1"])
        .args(["--nproc-per-node", &count.to_string()])
        .args([
            "--master-addr",
            "127.0.0.1",
            "--master-port",
            &port()?.to_string(),
        ])
        .arg(steps.host.bundle.join("scripts").join(script))
        .args(arguments);
    Ok(command)
}

/// A file as an argument.
pub(super) fn text(path: &Path) -> Result<&str> {
    path.to_str()
        .with_context(|| format!("{} is no text", path.display()))
}

pub(super) fn train(steps: &mut Steps<'_>) -> Result<()> {
    for count in [2_usize, 4] {
        // NCCL refuses two ranks on one GPU; ours are compared with one process then.
        let losses = steps.file(&format!("losses-{count}.json"));
        let mut against = Vec::new();
        if !steps.skips_without(&format!("nccl-{count}"), count) {
            let arguments = ["--write", text(&losses)?];
            let commands = ranks(steps, count, Library::Nccl, "train.py", &arguments)?;
            let done = steps.run_all(&format!("nccl-{count}"), 100, commands, says_ok);
            if done.is_some() {
                against = vec!["--against", text(&losses)?];
            }
        }
        let commands = ranks(steps, count, Library::Ours, "train.py", &against)?;
        steps.run_all(&format!("ours-{count}"), 100, commands, says_ok);
    }
    Ok(())
}

pub(super) fn pause(steps: &mut Steps<'_>) -> Result<()> {
    {
        let seconds = "30";
        let commands = ranks(steps, 2, Library::Ours, "train.py", &["--pause", seconds])?;
        steps.run_all(&format!("{seconds}s"), 120, commands, |said| {
            let hang = said
                .lines()
                .find(|line| line.contains("KERNEL TIMEOUT DETECTED") || line.contains("(hang)"));
            match hang {
                Some(line) => Err(format!("the watchdog takes the pause for a hang: {line}")),
                None => says_ok(said),
            }
        });
    }
    Ok(())
}

/// Sums of float32 in graphs of 20, microseconds an operation: ours and NCCL's, and PyTorch's own kernels beside both.
pub(super) fn symmetric(steps: &mut Steps<'_>) -> Result<()> {
    for count in [2_usize, 4] {
        if steps.skips_without(&format!("{count}"), count) {
            continue;
        }
        let (nccl, both) = (
            steps.file(&format!("nccl-{count}.json")),
            steps.file(&format!("all-{count}.json")),
        );
        let commands = ranks(
            steps,
            count,
            Library::Nccl,
            "symm.py",
            &["--name", "nccl", "--write", text(&nccl)?],
        )?;
        let done = steps.run_all(&format!("nccl-{count}"), 100, commands, says_ok);
        let mut arguments = vec!["--name", "ours", "--write", text(&both)?];
        if done.is_some() {
            arguments.extend(["--beside", text(&nccl)?]);
        }
        let commands = ranks(steps, count, Library::Ours, "symm.py", &arguments)?;
        let said = steps.run_all(&format!("ours-{count}"), 100, commands, says_ok);
        if let Some(said) = said {
            let table: String = said
                .lines()
                .filter_map(|line| line.strip_prefix("| "))
                .map(|line| format!("{line}\n"))
                .collect();
            steps.note(&table);
            let figures = fs_err::read_to_string(&both)
                .ok()
                .and_then(|text| serde_json::from_str(&text).ok());
            if let Some(figures) = figures {
                steps.figures(figures);
            }
        }
    }
    Ok(())
}
