//! OTLP JSON lines: one `ExportTraceServiceRequest`, `ExportMetricsServiceRequest` or `ExportLogsServiceRequest` a line, as the
//! OpenTelemetry Collector's file exporter writes them and its `otlpjsonfile` receiver reads them.
//!
//! Each batch is written at once and whole: a process that is killed leaves at most one unfinished line, a full disk none.

use std::fs::{File, TryLockError};
use std::io::{self, Read as _, Seek as _, SeekFrom, Write};
use std::path::Path;
use std::time::Duration;

use ringsight_output::{Destination, Error};

use crate::model::{Batch, Consequence, ExportStats, Exporter, Failure, Signal, Tally};
use crate::otlp::json;

/// Bytes of lines that are kept for a file that cannot take them, before lines are dropped.
const KEPT: usize = 4 << 20;
/// Bytes in which the end of a line is looked for in a file that is to be continued: more than any line of ours has.
const LONGEST_LINE: u64 = 256 << 20;

/// Writes batches to a file of OTLP JSON lines. Operations in a batch are not OTLP's and are left to other exporters.
pub struct JsonlExporter {
    path: String,
    writer: Writer<File>,
}

impl JsonlExporter {
    /// Begins the file anew.
    ///
    /// # Errors
    /// The file cannot be created, in words.
    pub fn create(path: impl AsRef<Path>) -> Result<Self, String> {
        Self::at(
            "create",
            path.as_ref(),
            Destination::resolve(&path).and_then(|destination| begin(&destination)),
        )
    }

    /// As [`JsonlExporter::create`], at a destination that was found before.
    ///
    /// # Errors
    /// As [`JsonlExporter::create`].
    pub fn create_at(destination: &Destination) -> Result<Self, String> {
        Self::at("create", destination.path(), begin(destination))
    }

    /// Continues the file if it is there, after its last whole line: what follows that is the rest of a writer that was
    /// killed, and is cut off.
    ///
    /// # Errors
    /// The file cannot be opened, read or cut, in words.
    pub fn append(path: impl AsRef<Path>) -> Result<Self, String> {
        Self::at(
            "continue",
            path.as_ref(),
            Destination::resolve(&path).and_then(|destination| resume(&destination)),
        )
    }

    /// As [`JsonlExporter::append`], at a destination that was found before.
    ///
    /// # Errors
    /// As [`JsonlExporter::append`].
    pub fn append_at(destination: &Destination) -> Result<Self, String> {
        Self::at("continue", destination.path(), resume(destination))
    }

    fn at(what: &str, path: &Path, writer: Result<Writer<File>, Error>) -> Result<Self, String> {
        let path = path.display().to_string();
        match writer {
            Ok(writer) => Ok(Self { path, writer }),
            Err(error) => Err(format!("cannot {what} trace file {path}: {error}")),
        }
    }
}

fn begin(destination: &Destination) -> Result<Writer<File>, Error> {
    let file = destination.open()?;
    lock(&file)?;
    // Pipes and devices have no length.
    if !destination.is_stream() {
        file.set_len(0)?;
    }
    Ok(Writer::new(file, 0)?)
}

fn resume(destination: &Destination) -> Result<Writer<File>, Error> {
    let mut file = destination.open()?;
    lock(&file)?;
    if destination.is_stream() {
        return Ok(Writer::new(file, 0)?);
    }
    let end = end_of_last_line(&mut file)?;
    file.set_len(end)?;
    Ok(Writer::new(file, end)?)
}

/// Two writers in one file would destroy each other's lines. Pipes and devices, which cannot be locked, are let through.
fn lock(file: &File) -> io::Result<()> {
    match file.try_lock() {
        Err(TryLockError::WouldBlock) => Err(io::Error::other("another process is writing it")),
        Err(TryLockError::Error(_)) | Ok(()) => Ok(()),
    }
}

/// Where the last whole line ends.
fn end_of_last_line(file: &mut File) -> io::Result<u64> {
    let mut end = file.seek(SeekFrom::End(0))?;
    let least = end.saturating_sub(LONGEST_LINE);
    let mut block = [0; 8192];
    while end > 0 {
        if end < least {
            return Err(io::Error::other(
                "it holds no lines: begin it anew with another name",
            ));
        }
        let start = end.saturating_sub(block.len() as u64);
        let part = &mut block[..usize::try_from(end - start).unwrap_or(0)];
        file.seek(SeekFrom::Start(start))?;
        file.read_exact(part)?;
        if let Some(newline) = part.iter().rposition(|&byte| byte == b'\n') {
            return Ok(start + newline as u64 + 1);
        }
        end = start;
    }
    Ok(0)
}

impl Exporter for JsonlExporter {
    fn target(&self) -> String {
        format!("OTLP JSON lines {}", self.path)
    }

    fn export(&mut self, batch: &Batch) {
        self.writer.export(batch);
    }

    fn stats(&self) -> ExportStats {
        let mut stats = self.writer.stats.clone();
        let failures = stats
            .tallies
            .iter_mut()
            .filter_map(|tally| tally.last_failure.as_mut());
        for error in failures
            .map(|failure| &mut failure.error)
            .chain(&mut stats.last_error)
        {
            *error = format!("cannot write trace file {}: {error}", self.path);
        }
        stats
    }

    fn shutdown(&mut self, _timeout: Duration) -> Result<(), String> {
        self.writer
            .close(File::sync_all)
            .map_err(|error| format!("trace file {}: {error}", self.path))
    }
}

/// Where lines go: a file, or a test's idea of one.
trait Medium: Write {
    /// Makes the file end at `end` and the next write go there.
    fn cut(&mut self, end: u64) -> io::Result<()>;
}

impl Medium for File {
    fn cut(&mut self, end: u64) -> io::Result<()> {
        if !self.metadata()?.is_file() {
            // A pipe or a device keeps what it got.
            return Ok(());
        }
        self.set_len(end)?;
        self.seek(SeekFrom::Start(end)).map(drop)
    }
}

/// A line that is waiting to be written.
struct Line {
    bytes: usize,
    signal: Signal,
    items: u64,
}

struct Writer<M> {
    medium: M,
    /// Bytes in the file, all whole lines.
    end: u64,
    /// Something after `end` could not be cut off yet.
    ragged: bool,
    buffer: Vec<u8>,
    lines: Vec<Line>,
    stats: ExportStats,
    closed: bool,
}

impl<M: Medium> Writer<M> {
    fn new(mut medium: M, end: u64) -> io::Result<Self> {
        medium.cut(end)?;
        let (buffer, lines, stats) = Default::default();
        Ok(Self {
            medium,
            end,
            ragged: false,
            buffer,
            lines,
            stats,
            closed: false,
        })
    }

    fn export(&mut self, batch: &Batch) {
        if self.closed {
            return;
        }
        let Batch {
            spans,
            metrics,
            logs,
            operations: _,
            findings: _,
            stragglers: _,
        } = batch;
        self.line(Signal::Traces, spans, json::traces);
        self.line(Signal::Metrics, metrics, json::metrics);
        self.line(Signal::Logs, logs, json::logs);
        if let Err(error) = self.flush() {
            self.limit();
            self.keep(&error);
        }
    }

    fn line<T>(&mut self, signal: Signal, items: &[T], write: impl FnOnce(&mut Vec<u8>, &[T])) {
        if items.is_empty() {
            return;
        }
        let start = self.buffer.len();
        write(&mut self.buffer, items);
        self.buffer.push(b'\n');
        self.lines.push(Line {
            bytes: self.buffer.len() - start,
            signal,
            items: items.len() as u64,
        });
    }

    /// Writes all lines; after an error the file ends with the last whole one and the rest stays in the buffer.
    fn flush(&mut self) -> io::Result<()> {
        let (written, result) = self.write();
        let (mut bytes, mut whole) = (0, 0);
        for line in &self.lines {
            if bytes + line.bytes > written {
                break;
            }
            bytes += line.bytes;
            whole += 1;
            self.stats[line.signal].delivered += line.items;
        }
        self.lines.drain(..whole);
        self.buffer.drain(..bytes);
        self.end += bytes as u64;
        if let Err(error) = &result {
            self.stats.last_error = Some(error.to_string());
            self.ragged = self.medium.cut(self.end).is_err();
        }
        result
    }

    /// Writes as much of the buffer as possible; returns how much that was.
    fn write(&mut self) -> (usize, io::Result<()>) {
        if self.ragged {
            if let Err(error) = self.medium.cut(self.end) {
                return (0, Err(error));
            }
            self.ragged = false;
        }
        let mut written = 0;
        while written < self.buffer.len() {
            match self.medium.write(&self.buffer[written..]) {
                Ok(0) => return (written, Err(io::ErrorKind::WriteZero.into())),
                Ok(more) => written += more,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return (written, Err(error)),
            }
        }
        (written, Ok(()))
    }

    /// Notes what waits for the next batch, because of `error`.
    fn keep(&mut self, error: &io::Error) {
        for signal in Signal::ALL {
            let kept = self.lines.iter().filter(|line| line.signal == signal);
            let items: u64 = kept.map(|line| line.items).sum();
            if items > 0 {
                let tally = &mut self.stats[signal];
                tally.failures += 1;
                tally.last_failure = Some(Failure {
                    error: error.to_string(),
                    items,
                    consequence: Consequence::KeptForNext,
                });
            }
        }
    }

    /// Drops the newest lines that exceed what is kept for later.
    fn limit(&mut self) {
        let mut excess = 0;
        while self.buffer.len() - excess > KEPT
            && let Some(line) = self.lines.pop()
        {
            excess += line.bytes;
            self.stats[line.signal].drop_items("io_error", line.items);
        }
        self.buffer.truncate(self.buffer.len() - excess);
    }

    /// Writes what is left and has `sync` bring it to the disk.
    fn close(&mut self, sync: impl FnOnce(&M) -> io::Result<()>) -> Result<(), String> {
        if std::mem::replace(&mut self.closed, true) {
            return Ok(());
        }
        let result = self.flush();
        for line in std::mem::take(&mut self.lines) {
            self.stats[line.signal].drop_items("io_error", line.items);
        }
        self.buffer = Vec::new();
        let lost = self.stats.list(Tally::dropped_total);
        let unsupported = |error: &io::Error| error.kind() == io::ErrorKind::InvalidInput;
        match result.and_then(|()| sync(&self.medium)) {
            // Pipes and devices cannot be synchronised.
            Err(error) if !unsupported(&error) => Err(match lost {
                Some(lost) => format!("{error}; {lost} are missing from it"),
                None => error.to_string(),
            }),
            _ => lost.map_or(Ok(()), |lost| Err(format!("{lost} are missing from it"))),
        }
    }
}

#[cfg(test)]
mod tests;
