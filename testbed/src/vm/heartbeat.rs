//! Heartbeats of a guest's processors.
//!
//! `vm/init` has each processor write its number to a serial line every few seconds (`guest.beats`). A processor that takes no interrupts
//! falls silent. Nothing else would say so: the kernel's watchdogs run on the processor that they watch, or by a clock that this processor
//! may have to advance. The other processors would wait for it until the guest's limit.

use std::{
    io::{Read as _, Write as _},
    os::unix::net::UnixStream,
    path::{Path, PathBuf},
    time::{Duration, Instant},
};

use super::console;

/// How long a processor may say nothing: two dozen times what is between two of its words, and twice what the kernel's watchdogs wait, which say
/// more.
const PATIENCE: Duration = Duration::from_secs(120);

/// What processors have said.
pub(super) struct Heartbeats {
    file: PathBuf,
    /// Of each, how often, and when last.
    heard: Vec<(usize, Instant)>,
}

impl Heartbeats {
    pub(super) fn new(file: &Path, processors: u32, now: Instant) -> Self {
        Self {
            file: file.to_owned(),
            heard: vec![(0, now); processors as usize],
        }
    }

    /// A processor that has said nothing for too long.
    pub(super) fn silent(&mut self, now: Instant) -> Option<usize> {
        let text = console::read(&self.file);
        for (processor, (count, last)) in self.heard.iter_mut().enumerate() {
            let word = processor.to_string();
            let said = text.lines().filter(|line| *line == word).count();
            if said > *count {
                (*count, *last) = (said, now);
            }
        }
        self.heard
            .iter()
            .position(|(_, last)| now.saturating_duration_since(*last) > PATIENCE)
    }
}

/// A guest one of whose processors did not get on. Programs, which are what is tested, cannot bring that about; the stand-in's module and the kernel
/// can, and what happens once in three runs is told, but fails nothing.
#[derive(Debug, thiserror::Error)]
#[error(
    "processor {processor} of the guest ran nothing for {} s; its processors are at\n{places}\nits console ends with\n{console}",
    PATIENCE.as_secs()
)]
pub(crate) struct Frozen {
    pub(super) processor: usize,
    /// Where processors are, as QEMU says.
    pub(super) places: String,
    /// How its console ends.
    pub(super) console: String,
}

/// Where the processors of a guest are, and the code there, by QEMU's monitor; or why that is not known.
pub(super) fn places(monitor: &Path, processors: u32) -> String {
    let ask = || -> std::io::Result<String> {
        let mut stream = UnixStream::connect(monitor)?;
        stream.set_read_timeout(Some(Duration::from_secs(2)))?;
        for processor in 0..processors {
            write!(stream, "cpu {processor}\ninfo registers\nx/16xb $pc\n")?;
        }
        let mut said = Vec::new();
        let mut piece = [0; 1 << 12];
        // It ends when nothing more comes.
        while let Ok(length @ 1..) = stream.read(&mut piece) {
            said.extend_from_slice(&piece[..length]);
        }
        Ok(String::from_utf8_lossy(&said).replace('\r', ""))
    };
    match ask() {
        Ok(said) if told(&said).is_empty() => "(QEMU's monitor does not say)".to_owned(),
        Ok(said) => told(&said),
        Err(error) => format!("(QEMU's monitor says nothing: {error})"),
    }
}

/// Of what the monitor says the lines with an instruction's place and code.
fn told(said: &str) -> String {
    let is_wanted = |line: &&str| {
        line.starts_with("RIP=")
            || line.starts_with("CPU#")
            || line.contains(": 0x")
            || line.starts_with("CS =")
    };
    said.lines().filter(is_wanted).collect::<Vec<_>>().join("\n")
}

#[cfg(test)]
mod tests {
    use fs_err as fs;

    use super::*;
    use crate::vm::supervisor::{BEATS, Scratch};

    #[test]
    fn who_says_nothing_for_too_long_is_found() {
        let scratch = Scratch::new().unwrap();
        let file = scratch.file(BEATS);
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let mut beats = Heartbeats::new(&file, 2, start);
        // Nobody has said anything yet.
        assert_eq!(beats.silent(after(100)), None);
        fs::write(&file, "0\n1\n0\n").unwrap();
        assert_eq!(beats.silent(after(110)), None);
        fs::write(&file, "0\n1\n0\n0\n10\n").unwrap();
        assert_eq!(beats.silent(after(200)), None);
        assert_eq!(beats.silent(after(231)), Some(1));
        // Who has never spoken, too.
        assert_eq!(Heartbeats::new(&file, 3, start).silent(after(121)), Some(2));
    }

    #[test]
    fn what_the_monitor_says_is_cut_to_places() {
        let said = "(qemu) cpu 0\n(qemu) info registers\nCPU#0\nRAX=1 RBX=2\nRIP=ffffffff81000000 RFL=2\nffffffff81000000: 0xeb 0xfe\n";
        assert_eq!(
            told(said),
            "CPU#0\nRIP=ffffffff81000000 RFL=2\nffffffff81000000: 0xeb 0xfe"
        );
    }
}
