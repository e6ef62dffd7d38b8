//! One guest: its files, its boot, its output and its end.

use std::{
    fs::File,
    io::{self, BufWriter, Write as _},
    path::{Path, PathBuf},
    process::Command,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};

use super::{
    Ended, console,
    cpio::Archive,
    heartbeat::Frozen,
    image::Image,
    kernel::Series,
    packages,
    stale_code::StaleCode,
    supervisor::{BEATS, CONSOLE, End, INITIAL, MONITOR, Scratch, Supervisor},
};
use crate::{
    process,
    workspace::{self, TestProgram},
};

/// Exit code of a run that was ended at its limit, as `timeout`'s.
pub const OVER_LIMIT: u8 = 124;

/// Where the memory lies that the kernel leaves to the stand-in's devices, and how much each has: a base address register of
/// this size. Its end is below what the firmware keeps for itself at the end of [`LEAST_FOR_DEVICES`].
const DEVICE_MEMORY: u64 = 0x1c00_0000;
const MIB_PER_DEVICE: usize = 8;
const LEAST_FOR_DEVICES: u32 = 512;
/// As many devices as the stand-in plays.
pub(super) const MOST_DEVICES: usize = 4;
/// As many links as addresses are given to.
pub(super) const MOST_LINKS: usize = 9;

/// How often a guest is run whose kernel breaks or freezes: the emulator breaks one in some twenty of those that count events.
const TRIES: u32 = 3;

/// Folders in which programs find libraries by themselves.
const LIBRARY_FOLDERS: [&str; 4] = [
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib64",
    "/usr/lib64",
];

/// A guest to run.
#[derive(Clone, Debug)]
pub struct Guest {
    /// Kernel.
    pub series: Series,
    /// Memory, MiB.
    pub memory: u32,
    /// Processors.
    pub processors: u32,
    /// How long it may take, boot included.
    pub limit: Duration,
    /// How long its program may say nothing, if there is such a limit.
    pub quiet: Option<Duration>,
    /// Soft-RoCE links (`hca<i>` to `peer<i>`).
    pub rdma: usize,
    /// mlx5 devices, driven by the stand-in for their firmware.
    pub mlx5: usize,
    /// Ports of each of them.
    pub mlx5_ports: usize,
    /// Files of the host, and where they are put.
    pub files: Vec<(PathBuf, String)>,
    /// Environment variables of the program.
    pub environment: Vec<(String, String)>,
    /// Program in the guest with its arguments; a relative one is in `/test`, where it runs.
    pub program: Vec<String>,
    /// Whether the terminal is the program's input.
    pub interactive: bool,
    /// Whether the times of the parts are told, and the kernel's messages at the end.
    pub verbose: bool,
}

impl Guest {
    /// A guest that runs `program`, with nothing beside.
    #[must_use]
    pub fn new(series: Series, program: Vec<String>) -> Self {
        Self {
            series,
            memory: LEAST_FOR_DEVICES,
            processors: 2,
            limit: Duration::from_secs(120),
            quiet: None,
            rdma: 0,
            mlx5: 0,
            mlx5_ports: 1,
            files: Vec::new(),
            environment: Vec::new(),
            program,
            interactive: false,
            verbose: false,
        }
    }

    /// Adds a program of the host, which is put into `/test`, with its libraries; returns its name there.
    ///
    /// # Errors
    /// If it has no name.
    pub fn add(&mut self, file: &Path) -> Result<String> {
        let name = file
            .file_name()
            .and_then(|name| name.to_str())
            .with_context(|| format!("{} has no name", file.display()))?;
        self.files.push((file.to_owned(), format!("/test/{name}")));
        Ok(format!("./{name}"))
    }

    /// Adds a test program as [`Self::add`] does, and the programs that it starts, which keep their paths.
    ///
    /// # Errors
    /// If it has no name.
    pub fn add_test(&mut self, test: &TestProgram) -> Result<String> {
        let same_path = |file: &PathBuf| (file.clone(), file.display().to_string());
        self.files.extend(test.starts.iter().map(same_path));
        self.add(&test.file)
    }

    /// Runs the guest and collects the program's output. Where the emulator broke the guest's kernel (`StaleCode` in `stale_code.rs`), or a processor
    /// ran nothing any more (`Frozen` in `heartbeat.rs`), that is told, with what the program said until then, and the guest is run again, up to three
    /// times in all.
    ///
    /// # Errors
    /// As [`Self::run`].
    pub fn output(&self) -> (String, Result<Ended>) {
        let mut tries = 1;
        loop {
            let mut output = Vec::new();
            let ended = self.run(|piece| output.extend_from_slice(piece));
            let output = String::from_utf8_lossy(&output).into_owned();
            match &ended {
                Err(error) if is_emulators_fault(error) && tries < TRIES => {
                    tries += 1;
                    eprintln!(
                        "vm: {error:#}\nvm: the program had said\n{output}\nvm: it is run again ({tries} of {TRIES})"
                    );
                }
                _ => return (output, ended),
            }
        }
    }

    /// Boots the guest, passes each piece of the program's output to `each`, and waits for its end. A boot that fails is told and
    /// repeated, up to three times.
    ///
    /// # Errors
    /// If it cannot be made or started, dies before the program's end, or takes longer than its limit.
    pub fn run(&self, each: impl FnMut(&[u8]) + Send) -> Result<Ended> {
        self.check()?;
        let image = Image::get(self.series)?;
        let begin = Instant::now();
        let scratch = Scratch::new()?;
        self.write_files(&image, &scratch.file(INITIAL))?;
        let packed = begin.elapsed();
        let drive = Supervisor {
            scratch: &scratch,
            limit: self.limit,
            quiet: self.quiet,
            processors: self.processors,
            interactive: self.interactive,
        };
        let end = drive.boot(|| self.qemu(&image, &scratch), each)?;
        let text = console::read(&scratch.file(CONSOLE));
        if self.verbose {
            eprint!("{text}");
            eprintln!(
                "vm: Linux {}, packed in {:.0} ms, ran {:.1} s",
                image.version,
                packed.as_secs_f64() * 1e3,
                (begin.elapsed() - packed).as_secs_f64()
            );
        }
        let tail = || console::tail(&text);
        match end {
            End::Quiet => bail!(
                "the guest said nothing for too long; its console ends with\n{}",
                tail()
            ),
            End::TooLong => bail!(OverLimit(self.limit, tail())),
            End::Frozen(frozen) => bail!(frozen),
            End::Ended(_) if console::ended(&text).is_none() && StaleCode::broke(&text) => {
                bail!(StaleCode(tail()))
            }
            End::Ended(status) => console::ended(&text).with_context(|| {
                format!(
                    "the guest died before the program ended (QEMU: {}); its console ends with\n{}",
                    process::reason(status),
                    tail()
                )
            }),
        }
    }

    fn check(&self) -> Result<()> {
        if self.rdma > MOST_LINKS || self.mlx5 > MOST_DEVICES {
            bail!("a guest has at most {MOST_LINKS} soft-RoCE links and {MOST_DEVICES} mlx5 devices");
        }
        if self.mlx5 > 0 && self.memory < LEAST_FOR_DEVICES {
            bail!("mlx5 devices lie in the guest's memory: it needs {LEAST_FOR_DEVICES} MiB");
        }
        Ok(())
    }

    /// Writes the guest's first file system: the base, and what is its own.
    fn write_files(&self, image: &Image, path: &Path) -> Result<()> {
        let mut archive = Archive::default();
        let ours = workspace::root().join("vm");
        archive.copy("/init", &ours.join("init"));
        archive.copy("/bin/rdma-setup", &ours.join("rdma-setup"));
        let mut folders = Vec::new();
        for (file, place) in &self.files {
            let real = file
                .canonicalize()
                .with_context(|| format!("there is no {}", file.display()))?;
            if real.is_dir() {
                archive.tree(place, &real)?;
                continue;
            }
            archive.copy(place, &real);
            for library in packages::host_libraries(&real) {
                let place = library.display().to_string();
                let folder = library.parent().map(|folder| folder.display().to_string());
                folders.extend(folder.filter(|folder| !LIBRARY_FOLDERS.contains(&folder.as_str())));
                archive.copy(&place, &library.canonicalize()?);
            }
        }
        folders.sort();
        folders.dedup();
        if self.mlx5 > 0 {
            archive.copy("/test/fakehca.ko", &image.module("fakehca")?);
        }
        archive.bytes("/test/run", self.script(&folders));
        let out = File::create(path)?;
        let mut out = BufWriter::new(out);
        io::copy(&mut File::open(&image.base)?, &mut out)?;
        archive.write(&mut out)?;
        out.flush().context("writing the guest's file system")
    }

    /// What the guest's first process runs: the devices that are wanted, then the program. What sets them up speaks only if it fails.
    fn script(&self, library_folders: &[String]) -> String {
        let mut text = "#!/bin/sh\ncd /test\n".to_owned();
        let mut step = |command: &str| {
            text += &format!(
                "{command} || {{ echo 'guest: {} failed'; exit 125; }}\n",
                command.replace('\'', "")
            );
        };
        if self.rdma > 0 {
            step("modprobe -a rdma_rxe rdma_ucm ib_umad veth");
            step(&format!("rdma-setup {}", self.rdma));
        }
        if self.mlx5 > 0 {
            step("modprobe -a mlx5_core mlx5_ib ib_umad");
            step(&format!(
                "insmod fakehca.ko base={DEVICE_MEMORY:#x} n={} ports={}",
                self.mlx5, self.mlx5_ports
            ));
        }
        if !library_folders.is_empty() {
            text += &format!("export LD_LIBRARY_PATH={}\n", quoted(&library_folders.join(":")));
        }
        text += "export RINGSIGHT_GUEST=1\n";
        for (name, value) in &self.environment {
            text += &format!("export {name}={}\n", quoted(value));
        }
        text += "exec";
        for word in &self.program {
            text += &format!(" {}", quoted(word));
        }
        text += "\n";
        text
    }

    fn qemu(&self, image: &Image, scratch: &Scratch) -> Result<Command> {
        // A processor that runs nothing else for a minute (twice the threshold) never will: a kernel that is stuck ends the guest, and says
        // where, instead of using up the limit. One that takes no interrupts does not notice: see `heartbeat.rs`.
        let mut arguments =
            "console=ttyS0 quiet loglevel=4 panic=-1 oops=panic softlockup_panic=1 watchdog_thresh=30 \
                             tsc=reliable no_timer_check mitigations=off random.trust_cpu=on guest.out=ttyS1 guest.beats=ttyS2"
                .to_owned();
        if self.interactive {
            arguments += " guest.in=ttyS1";
        }
        if self.mlx5 > 0 {
            arguments += &format!(" memmap={}M${DEVICE_MEMORY:#x}", self.mlx5 * MIB_PER_DEVICE);
        }
        let mut command = image.tools.command("qemu-system-x86_64")?;
        // Names of sockets are short: the monitor's is relative.
        command.current_dir(scratch.path());
        // Parts of it, the emulation among them, are libraries that it looks for where it would have been installed.
        if let Some(folder) = image.tools.path("usr/lib/x86_64-linux-gnu/qemu") {
            command.env("QEMU_MODULE_DIR", folder);
        }
        for folder in ["usr/share/qemu", "usr/share/seabios"] {
            if let Some(folder) = image.tools.path(folder) {
                command.arg("-L").arg(folder);
            }
        }
        command
            // Emulated, also where /dev/kvm is: it may be one that runs no ordinary kernel, and what is tested needs no speed.
            .args(["-M", "q35", "-accel", "tcg,thread=multi", "-cpu", "max"])
            .args(["-m", &self.memory.to_string()])
            .args(["-smp", &self.processors.to_string()])
            .args(["-nodefaults", "-display", "none", "-no-reboot"])
            .arg("-monitor")
            .arg(format!("unix:{MONITOR},server=on,wait=off"))
            .arg("-chardev")
            .arg(format!("file,id=console,path={CONSOLE}"))
            .args(["-chardev", "stdio,id=output,signal=off"])
            .arg("-chardev")
            .arg(format!("file,id=beats,path={BEATS}"))
            .args(["-device", "isa-serial,chardev=console,index=0"])
            .args(["-device", "isa-serial,chardev=output,index=1"])
            // By default it has the console's interrupt.
            .args(["-device", "isa-serial,chardev=beats,index=2,irq=5"])
            // Ends QEMU at once when the first process has told the exit code.
            .args(["-device", "isa-debug-exit,iobase=0xf4,iosize=0x04"])
            .arg("-kernel")
            .arg(&image.kernel)
            .arg("-initrd")
            .arg(INITIAL)
            .args(["-append", &arguments]);
        Ok(command)
    }
}

/// A guest that was ended at its limit.
#[derive(Debug, thiserror::Error)]
#[error("the guest ran longer than its limit of {} s; its console ends with\n{}", .0.as_secs(), .1)]
pub struct OverLimit(Duration, String);

/// Whether a guest's run ended by a fault of the emulator, not by what ran in it: then the run says nothing, and may be repeated.
#[must_use]
pub fn is_emulators_fault(error: &anyhow::Error) -> bool {
    error.is::<StaleCode>() || error.is::<Frozen>()
}

/// `word` as one word of a shell.
fn quoted(word: &str) -> String {
    format!("'{}'", word.replace('\'', r"'\''"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_survive_the_shell() {
        let mut guest = Guest::new(Series::V6_1, vec!["echo".into(), "it's $HOME".into()]);
        guest.environment.push(("NAME".into(), "a b".into()));
        guest.rdma = 2;
        let script = guest.script(&["/opt/x".into()]);
        assert!(script.contains("rdma-setup 2 ||"), "{script}");
        assert!(script.contains("export NAME='a b'\n"), "{script}");
        let shown =
            process::output(Command::new("sh").args(["-c", &format!("printf %s {}", quoted("it's $HOME"))]));
        assert_eq!(shown.unwrap(), "it's $HOME");
    }

    #[test]
    fn what_does_not_fit_is_refused_before_anything_is_fetched() {
        let mut guest = Guest::new(Series::V6_1, Vec::new());
        guest.mlx5 = MOST_DEVICES + 1;
        assert!(guest.check().is_err());
        guest.mlx5 = 1;
        guest.memory = 256;
        assert!(guest.check().unwrap_err().to_string().contains("512 MiB"));
    }
}
