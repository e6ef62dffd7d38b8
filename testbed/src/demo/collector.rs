//! `ringsight attach` as a child process.

use std::{
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::Duration,
};

use anyhow::{Context, Result, bail};
use fs_err as fs;

use super::summary::Summary;
use crate::{
    machine,
    process::{self, Guarded},
    workspace::Artifacts,
};

/// How long attaching may take, with everything that the machine does besides.
const ATTACH_LIMIT: Duration = Duration::from_secs(30);

/// Exit code of a collector that has seen a hang.
pub const HANG_SEEN: i32 = 5;

/// A collector that is attached.
pub struct Collector {
    process: Guarded,
    summary: PathBuf,
    log: PathBuf,
}

impl Collector {
    /// Attaches to `pids` and waits until it stands. Its files go to `folder`.
    ///
    /// # Errors
    /// What the collector wrote, if it ends instead.
    pub fn attach(artifacts: &Artifacts, pids: &[u32], options: &[String], folder: &Path) -> Result<Self> {
        Self::start(&artifacts.ringsight, pids, options, folder)
    }

    /// As [`Self::attach`], with this `ringsight`.
    ///
    /// # Errors
    /// As there.
    pub fn start(ringsight: &Path, pids: &[u32], options: &[String], folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder)?;
        // Several collectors may work in one folder.
        let name = pids.first().map_or(0, |pid| *pid);
        let unique = (0..)
            .map(|n| format!("{name}-{n}"))
            .find(|n| !folder.join(format!("collector-{n}.log")).exists());
        let name = unique.context("no name is free")?;
        let file = |what: &str| folder.join(format!("collector-{name}.{what}"));
        let (summary, ready, log) = (file("summary.json"), file("ready"), file("log"));
        for left_over in [&summary, &ready] {
            let _ = fs::remove_file(left_over);
        }
        let mut command: Command = machine::privileged(ringsight);
        command
            .arg("attach")
            .args(pids.iter().map(u32::to_string))
            .args(options)
            .arg("--summary")
            .arg(&summary)
            .arg("--ready-file")
            .arg(&ready)
            .stdin(Stdio::null());
        process::log_to(&mut command, &log)?;
        let process = Guarded::start("ringsight attach", &mut command, libc::SIGTERM)?;
        let mut collector = Self {
            process,
            summary,
            log,
        };
        let attached = collector.process.wait_until(ATTACH_LIMIT, || ready.exists());
        match attached {
            Ok(()) => Ok(collector),
            Err(error) => bail!("{error}:\n{}", collector.log()),
        }
    }

    /// What it has written to standard output and error.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(&self.log)
            .unwrap_or_default()
            .trim_end()
            .to_owned()
    }

    /// Process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.process.pid()
    }

    /// Sends it a signal.
    pub fn signal(&mut self, signal: i32) {
        self.process.signal(signal);
    }

    /// Waits for its end and reads its summary.
    ///
    /// # Errors
    /// What it wrote, if it fails or does not end within `limit`.
    pub fn finish(&mut self, limit: Duration) -> Result<Summary> {
        let status = match self.process.wait(limit) {
            Ok(status) => status,
            Err(error) => {
                let _ = self.process.end(Duration::from_secs(5));
                bail!("{error}:\n{}", self.log());
            }
        };
        let saw_hang = status.code() == Some(HANG_SEEN);
        if !status.success() && !saw_hang {
            bail!(
                "ringsight attach failed ({}):\n{}",
                process::reason(status),
                self.log()
            );
        }
        let text = fs::read_to_string(&self.summary)?;
        let summary: Summary = serde_json::from_str(&text)
            .with_context(|| format!("{} is no summary", self.summary.display()))?;
        let is_hang = |verdict: &serde_json::Value| verdict["hang"] == true || verdict["ended"] == false;
        if saw_hang != summary.verdicts.iter().any(is_hang) {
            bail!(
                "ringsight attach ended with {status}, its summary says {:?}",
                summary.verdicts
            );
        }
        Ok(summary)
    }

    /// Asks it to let go of its targets, then as [`Collector::finish`].
    ///
    /// # Errors
    /// As there.
    pub fn stop(&mut self, limit: Duration) -> Result<Summary> {
        self.process.signal(libc::SIGINT);
        self.finish(limit)
    }

    /// Asks it to let go of its targets, then as [`Collector::outcome`].
    ///
    /// # Errors
    /// As there.
    pub fn interrupt(&mut self, limit: Duration) -> Result<(Option<i32>, String)> {
        self.process.signal(libc::SIGINT);
        self.outcome(limit)
    }

    /// The summary's file.
    #[must_use]
    pub fn summary_file(&self) -> &Path {
        &self.summary
    }

    /// Waits for its end, whatever it is; returns the exit code and what it wrote.
    ///
    /// # Errors
    /// If it does not end within `limit`.
    pub fn outcome(&mut self, limit: Duration) -> Result<(Option<i32>, String)> {
        let status = self.process.wait(limit)?;
        Ok((status.code(), self.log()))
    }
}
