//! What `NCCL_DEBUG`, `NCCL_DEBUG_SUBSYS`, `NCCL_DEBUG_FILE` and `NCCL_DEBUG_TIMESTAMP_*` ask for.

use std::{
    fs::{File, OpenOptions},
    io::{self, Write as _},
    mem::ManuallyDrop,
    os::{fd::FromRawFd as _, unix::fs::OpenOptionsExt as _},
    sync::Arc,
};

use rustix::fs::OFlags;
use tracing::level_filters::LevelFilter;

use super::targets::{BOOTSTRAP, ENV, INIT, bit};
use crate::{process, sys};

/// NCCL's levels, least talkative first.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Level {
    None,
    Version,
    Warn,
    Info,
    Abort,
    Trace,
}

impl Level {
    const NAMES: [(&str, Self); 5] = [
        ("VERSION", Self::Version),
        ("WARN", Self::Warn),
        ("INFO", Self::Info),
        ("ABORT", Self::Abort),
        ("TRACE", Self::Trace),
    ];

    /// As NCCL reads it: what is no level is none.
    fn parse(text: &str) -> Self {
        Self::NAMES
            .iter()
            .find(|(name, _)| name.eq_ignore_ascii_case(text.trim()))
            .map_or(Self::None, |(_, level)| *level)
    }

    pub(super) fn name(self) -> &'static str {
        Self::NAMES
            .iter()
            .find(|(_, level)| *level == self)
            .map_or("", |(name, _)| name)
    }

    pub(super) fn of(level: tracing::Level) -> Self {
        match level {
            tracing::Level::ERROR | tracing::Level::WARN => Self::Warn,
            tracing::Level::INFO => Self::Info,
            tracing::Level::DEBUG => Self::Abort,
            tracing::Level::TRACE => Self::Trace,
        }
    }

    pub(super) fn filter(self) -> LevelFilter {
        match self {
            Self::None | Self::Version => LevelFilter::OFF,
            Self::Warn => LevelFilter::WARN,
            Self::Info => LevelFilter::INFO,
            Self::Abort => LevelFilter::DEBUG,
            Self::Trace => LevelFilter::TRACE,
        }
    }
}

/// Where lines go.
#[derive(Debug)]
pub(super) enum Sink {
    Stdout,
    File(String, File),
}

impl Sink {
    /// Writes whole lines; blocks as long as whoever is to read them does not. A full disk, a closed descriptor and a pipe that nobody
    /// reads any more cost the lines, not the call that they tell of.
    pub(super) fn write(&self, lines: &str) {
        let _ = sys::without_sigpipe(|| match self {
            Self::Stdout => {
                // Not by `io::stdout`: a child that is forked meanwhile would find its lock held for good.
                // SAFETY: never closed here; a descriptor that is closed gives an error.
                let out = ManuallyDrop::new(unsafe { File::from_raw_fd(libc::STDOUT_FILENO) });
                (&*out).write_all(lines.as_bytes())
            }
            // One write of a file opened for appending: lines of several threads and processes stay whole.
            Self::File(_, file) => { file }.write_all(lines.as_bytes()),
        });
    }
}

/// `NCCL_DEBUG_TIMESTAMP_FORMAT` by default.
pub(super) const DEFAULT_STAMP: &str = "[%F %T] ";

/// The environment as it was read.
#[derive(Debug)]
pub(super) struct Settings {
    pub(super) level: Level,
    /// Bits of the subsystems.
    pub(super) mask: u32,
    pub(super) sink: Arc<Sink>,
    /// Levels whose lines begin with the time, as bits by [`Level`].
    pub(super) stamped: u32,
    /// For `strftime`, and `%1f` to `%9f` for parts of the second.
    pub(super) stamp: String,
    /// The host's name up to its first dot.
    pub(super) host: String,
    /// What could not be understood or done.
    pub(super) complaints: Vec<String>,
}

impl Settings {
    /// Reads it through `get`; a file that `before` has open stays open.
    pub(super) fn read(get: &dyn Fn(&str) -> Option<String>, before: Option<&Self>) -> Self {
        let mut complaints = Vec::new();
        let host = process::host_name();
        let host = host.split('.').next().unwrap_or_default().to_owned();
        let level = get("NCCL_DEBUG").map_or(Level::None, |text| Level::parse(&text));
        let mask = get("NCCL_DEBUG_SUBSYS").map_or_else(default_mask, |text| mask(&text, &mut complaints));
        let stamped = get("NCCL_DEBUG_TIMESTAMP_LEVELS")
            .map_or(1 << Level::Warn as u32, |text| stamped(&text, &mut complaints));
        // An underscore stands for a space, which is hard to write on a command line.
        let stamp = get("NCCL_DEBUG_TIMESTAMP_FORMAT")
            .map_or_else(|| DEFAULT_STAMP.to_owned(), |format| format.replace('_', " "));
        let file = get("NCCL_DEBUG_FILE").filter(|file| !file.is_empty() && level > Level::Version);
        let sink = file.map_or_else(
            || Arc::new(Sink::Stdout),
            |file| open(&expand(&file, &host), before, &mut complaints),
        );
        Self {
            level,
            mask,
            sink,
            stamped,
            stamp,
            host,
            complaints,
        }
    }
}

fn default_mask() -> u32 {
    [INIT, BOOTSTRAP, ENV]
        .iter()
        .filter_map(|target| bit(target.trim_start_matches("nccl::")))
        .fold(0, |mask, bit| mask | bit)
}

/// The words of a list, and whether it says what is not wanted.
fn words(text: &str) -> (bool, impl Iterator<Item = &str>) {
    let (inverted, list) = text
        .trim()
        .strip_prefix('^')
        .map_or((false, text), |list| (true, list));
    (
        inverted,
        list.split(',').map(str::trim).filter(|word| !word.is_empty()),
    )
}

fn mask(text: &str, complaints: &mut Vec<String>) -> u32 {
    let (inverted, words) = words(text);
    let mut mask = 0;
    for word in words {
        match bit(word) {
            Some(bit) => mask |= bit,
            None if word.eq_ignore_ascii_case("ALL") => mask = u32::MAX,
            None => complaints.push(format!("NCCL_DEBUG_SUBSYS names no subsystem by {word}")),
        }
    }
    if inverted { !mask } else { mask }
}

fn stamped(text: &str, complaints: &mut Vec<String>) -> u32 {
    let (inverted, words) = words(text);
    let mut mask = 0;
    for word in words {
        match Level::parse(word) {
            Level::None if word.eq_ignore_ascii_case("ALL") => mask = u32::MAX,
            Level::None => complaints.push(format!("NCCL_DEBUG_TIMESTAMP_LEVELS names no level by {word}")),
            level => mask |= 1 << level as u32,
        }
    }
    if inverted { !mask } else { mask }
}

/// `%h` is the host, `%p` the process, `%%` a percent sign; anything else stays as it is.
fn expand(text: &str, host: &str) -> String {
    let mut path = String::new();
    let mut characters = text.chars();
    while let Some(character) = characters.next() {
        if character != '%' {
            path.push(character);
            continue;
        }
        match characters.next() {
            Some('h') => path.push_str(host),
            Some('p') => path.push_str(&std::process::id().to_string()),
            Some('%') => path.push('%'),
            other => path.extend(['%'].into_iter().chain(other)),
        }
    }
    path
}

/// Opens the file, emptied as NCCL does; standard output if that fails.
fn open(path: &str, before: Option<&Settings>, complaints: &mut Vec<String>) -> Arc<Sink> {
    if let Some(before) = before
        && matches!(&*before.sink, Sink::File(open, _) if open == path)
    {
        return before.sink.clone();
    }
    match open_emptied(path) {
        Ok(file) => Arc::new(Sink::File(path.to_owned(), file)),
        Err(error) => {
            complaints.push(format!(
                "NCCL_DEBUG_FILE: {path} cannot be opened ({error}), lines go to standard output"
            ));
            Arc::new(Sink::Stdout)
        }
    }
}

/// Opens a file once, emptied, for appending. A FIFO that nobody reads is an error at once: another user may have made one of that name.
fn open_emptied(path: &str) -> io::Result<File> {
    let file: File = sys::above_standard(|| {
        OpenOptions::new()
            .append(true)
            .create(true)
            .custom_flags(libc::O_TRUNC | libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(path)
    })?;
    // From here on a write waits for who reads, as a write to standard output does.
    let flags = rustix::fs::fcntl_getfl(&file)?;
    rustix::fs::fcntl_setfl(&file, flags - OFlags::NONBLOCK)?;
    Ok(file)
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn read(variables: &[(&str, &str)]) -> Settings {
        let get = |name: &str| {
            variables
                .iter()
                .find(|(known, _)| *known == name)
                .map(|(_, value)| (*value).to_owned())
        };
        Settings::read(&get, None)
    }

    #[test]
    fn levels_are_read_as_nccl_reads_them() {
        assert_eq!(read(&[]).level, Level::None);
        for (text, level) in [
            ("version", Level::Version),
            ("WARN", Level::Warn),
            ("Info", Level::Info),
            ("ABORT", Level::Abort),
            ("trace", Level::Trace),
            ("NONE", Level::None),
            ("loud", Level::None),
            ("", Level::None),
        ] {
            assert_eq!(read(&[("NCCL_DEBUG", text)]).level, level, "{text}");
        }
    }

    #[test]
    fn subsystems_are_listed_or_excluded() {
        let mask = |text: &str| read(&[("NCCL_DEBUG_SUBSYS", text)]).mask;
        let bits = |names: &[&str]| names.iter().fold(0, |mask, name| mask | bit(name).unwrap());
        assert_eq!(read(&[]).mask, bits(&["INIT", "BOOTSTRAP", "ENV"]));
        assert_eq!(mask("coll,net"), bits(&["COLL", "NET"]));
        assert_eq!(mask("ALL"), u32::MAX);
        assert_eq!(mask("^COLL, P2P"), !bits(&["COLL", "P2P"]));
        assert_eq!(mask("^ALL"), 0);
        let wrong = read(&[("NCCL_DEBUG_SUBSYS", "INIT,NOISE")]);
        assert_eq!(wrong.mask, bits(&["INIT"]));
        assert_eq!(
            wrong.complaints,
            ["NCCL_DEBUG_SUBSYS names no subsystem by NOISE"]
        );
    }

    #[test]
    fn the_files_name_is_expanded() {
        let pid = std::process::id();
        assert_eq!(
            expand("/tmp/%h/x.%p.log", "node1"),
            format!("/tmp/node1/x.{pid}.log")
        );
        assert_eq!(expand("100%%-%x-%", "h"), "100%-%x-%");
    }

    #[test]
    fn a_file_that_cannot_be_opened_is_standard_output_and_a_complaint() {
        let settings = read(&[("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_FILE", "/nonexistent/file")]);
        assert!(matches!(*settings.sink, Sink::Stdout));
        assert!(
            settings.complaints[0].contains("/nonexistent/file"),
            "{:?}",
            settings.complaints
        );
        // With the version alone, a file is not made: NCCL's rule.
        let settings = read(&[
            ("NCCL_DEBUG", "VERSION"),
            ("NCCL_DEBUG_FILE", "/nonexistent/file"),
        ]);
        assert!(settings.complaints.is_empty());
    }

    #[test]
    fn a_full_disk_is_borne() {
        let file = OpenOptions::new().write(true).open("/dev/full").unwrap();
        Sink::File("/dev/full".into(), file).write("a line\n");
    }

    #[test]
    fn underscores_of_the_time_are_spaces() {
        let format = |text: &str| read(&[("NCCL_DEBUG_TIMESTAMP_FORMAT", text)]).stamp;
        assert_eq!(format("[%F_%T]_"), DEFAULT_STAMP);
        assert_eq!(read(&[]).stamp, DEFAULT_STAMP);
    }

    #[test]
    fn a_fifo_that_nobody_reads_is_a_complaint_and_one_that_is_read_gets_the_lines() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("fifo");
        assert!(Command::new("mkfifo").arg(&path).status().unwrap().success());
        let name = path.display().to_string();
        let asked = [("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_FILE", &*name)];
        let settings = read(&asked);
        assert!(
            matches!(*settings.sink, Sink::Stdout) && settings.complaints[0].contains(&name),
            "{:?}",
            settings.complaints
        );
        // For reading and writing, which waits for nobody.
        let mut reader = OpenOptions::new().read(true).write(true).open(&path).unwrap();
        let settings = read(&asked);
        settings.sink.write("a line\n");
        let mut line = [0; 7];
        io::Read::read_exact(&mut reader, &mut line).unwrap();
        assert_eq!(&line, b"a line\n");
    }

    #[test]
    fn a_pipe_that_nobody_reads_any_more_costs_the_lines_alone() {
        let (reader, writer) = io::pipe().unwrap();
        drop(reader);
        let sink = Sink::File("pipe".into(), std::os::fd::OwnedFd::from(writer).into());
        // SAFETY: sets and asks for what the process does with a signal; a Rust program ignores it, others that load the library need not.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_DFL) };
        sink.write("a line\n");
        // SAFETY: as above.
        unsafe { libc::signal(libc::SIGPIPE, libc::SIG_IGN) };
    }
}
