//! Asking a library for its table, in a process that is shut in.
//!
//! ```text
//! ringsight explain ── questions ──> child: the same program, `explain-library` ── sandbox ── load, ask
//!                   <── answers ───
//! ```
//! The child's standard input is the library's file, its standard output a socket to its parent. It reads the questions up to their
//! end, gives up all it has ([`sandbox`]), loads the library and writes the answers as one line of JSON. The parent takes that line for
//! what it is, the word of code that nobody trusts: its time, its length, its form and its texts are limited.

use std::{
    fs::File,
    io::{self, BufWriter, Read as _, Write as _},
    net::Shutdown,
    os::{
        fd::OwnedFd,
        unix::{net::UnixStream, process::ExitStatusExt as _},
    },
    process::{Child, Command, ExitStatus, Stdio},
    thread,
    time::{Duration, Instant},
};

use rustix::thread::UnshareFlags;

use super::{
    sandbox,
    table::{Answer, MOST_ROWS, Question, Row, Table},
};

/// The hidden command of the child.
pub const COMMAND: &str = "explain-library";

/// How long loading a library and asking it may take.
const PATIENCE: Duration = Duration::from_secs(5);
/// Bytes of an answer, for each question: a whole table of rows with full texts has less.
const ANSWER_BYTES: usize = 1 << 16;
/// Bytes of all answers.
const ANSWERS_BYTES: usize = 64 << 20;
/// Characters of a text in an answer: more than the interface has bytes for.
const TEXT: usize = 256;

/// The answers of the library in `file` to `questions`, in their order. The library sees the variables of this process that are NCCL's or
/// ringsight's, for these are what its table depends on.
///
/// # Errors
/// What the library refuses; what keeps it from being loaded; that it does not answer in time or makes no sense.
pub fn ask(file: File, questions: &[Question]) -> Result<Vec<Vec<Row>>, String> {
    let ask = || {
        // The child is to be the first process of a namespace. It takes root, and does without.
        // SAFETY: no descriptor table is unshared, so no descriptor of another thread changes under it.
        let _ = unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWPID) };
        converse(file, questions)
    };
    // A thread of its own, whose further children would be in that namespace. The child dies with it.
    thread::scope(|scope| {
        let asking = thread::Builder::new()
            .spawn_scoped(scope, ask)
            .map_err(|error| error.to_string())?;
        asking.join().map_err(|_| "asking it failed".to_owned())?
    })
}

/// Ends the child, whatever it does.
struct Killed(Child);

impl Killed {
    fn end(&mut self) -> io::Result<ExitStatus> {
        self.0.kill()?;
        self.0.wait()
    }
}

impl Drop for Killed {
    fn drop(&mut self) {
        // It is gone already, then.
        let _ = self.end();
    }
}

fn converse(file: File, questions: &[Question]) -> Result<Vec<Vec<Row>>, String> {
    let failed = |error: io::Error| format!("it cannot be asked: {error}");
    let deadline = Instant::now() + PATIENCE;
    let (mut socket, childs_end) = UnixStream::pair().map_err(failed)?;
    let is_ours = |name: &str| name.starts_with("NCCL_") || name.starts_with("RINGSIGHT_");
    let variables = std::env::vars_os().filter(|(name, _)| name.to_str().is_some_and(is_ours));
    let child = Command::new("/proc/self/exe")
        .arg(COMMAND)
        .env_clear()
        .envs(variables)
        .current_dir("/")
        .stdin(Stdio::from(file))
        .stdout(Stdio::from(OwnedFd::from(childs_end)))
        .stderr(Stdio::null())
        .spawn()
        .map_err(failed)?;
    let mut child = Killed(child);
    socket.set_write_timeout(Some(PATIENCE)).map_err(failed)?;
    let sent = serde_json::to_writer(BufWriter::new(&socket), questions).map_err(io::Error::from);
    // A child that reads no questions has ended, which its answer shows.
    let _ = sent.and_then(|()| socket.shutdown(Shutdown::Write));
    let line = read_line(
        &mut socket,
        deadline,
        (ANSWER_BYTES * (questions.len() + 1)).min(ANSWERS_BYTES),
    );
    let status = child.end();
    if let Some(line) = line? {
        return read_answers(&line, questions.len());
    }
    Err(match status.map_err(failed)? {
        // By the kernel for its CPU time, or just now from here: it has closed what it should have answered by.
        status if status.signal() == Some(libc::SIGKILL) => "its code gave no answer".to_owned(),
        status => format!("its code ended the process that asked it ({status})"),
    })
}

/// A line of at most `limit` bytes, without its end; `None` if the other side ends before.
fn read_line(socket: &mut UnixStream, deadline: Instant, limit: usize) -> Result<Option<Vec<u8>>, String> {
    let late = || format!("it did not answer within {} s", PATIENCE.as_secs());
    let mut line = Vec::new();
    let mut block = [0; 1 << 14];
    loop {
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Err(late());
        }
        socket
            .set_read_timeout(Some(left))
            .map_err(|error| error.to_string())?;
        let read = match socket.read(&mut block) {
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Err(late()),
            // Questions that nobody read.
            Err(error) if error.kind() == io::ErrorKind::ConnectionReset => return Ok(None),
            Err(error) => return Err(error.to_string()),
        };
        if read == 0 {
            return Ok(None);
        }
        let end = block[..read].iter().position(|byte| *byte == b'\n');
        line.extend_from_slice(&block[..end.unwrap_or(read)]);
        if line.len() > limit {
            return Err(format!("its answer has more than {limit} bytes"));
        }
        if end.is_some() {
            return Ok(Some(line));
        }
    }
}

/// What the child says, if it makes sense.
fn read_answers(line: &[u8], questions: usize) -> Result<Vec<Vec<Row>>, String> {
    let answers: Result<Vec<Answer>, String> =
        serde_json::from_slice(line).map_err(|_| "its answer makes no sense".to_owned())?;
    let answers = answers.map_err(|error| cut(&error))?;
    let is_whole = |answer: &Answer| !matches!(answer, Ok(rows) if rows.len() > MOST_ROWS);
    if answers.len() != questions || !answers.iter().all(is_whole) {
        return Err("its answer makes no sense".to_owned());
    }
    let limited = |row: Row| Row {
        algorithm: cut(&row.algorithm),
        protocol: cut(&row.protocol),
        chosen: row.chosen,
        reason: cut(&row.reason),
    };
    answers
        .into_iter()
        .map(|answer| match answer {
            Ok(rows) => Ok(rows.into_iter().map(limited).collect()),
            Err(error) => Err(cut(&error)),
        })
        .collect()
}

fn cut(text: &str) -> String {
    text.chars().take(TEXT).collect()
}

/// What the child does: reads questions, and answers them from where it has nothing to lose.
pub fn answer() {
    let (library, mut socket) = match sandbox::take_descriptors() {
        Ok(descriptors) => descriptors,
        Err(error) => {
            let answers = Err::<Vec<Answer>, _>(format!("it is not loaded: {error}"));
            // A parent that is gone needs no answer.
            let _ = serde_json::to_writer(io::stdout(), &answers);
            println!();
            return;
        }
    };
    let answers = read_questions(&mut socket).and_then(|questions| {
        let path = sandbox::enter(library, &socket)?;
        // SAFETY: this process has nothing to lose any more.
        let table = unsafe { Table::load(&path) }
            .map_err(|error| error.replace(&path.display().to_string(), "the library"))?;
        Ok(questions
            .iter()
            .map(|question| table.ask(question))
            .collect::<Vec<_>>())
    });
    if let Ok(mut line) = serde_json::to_vec(&answers) {
        line.push(b'\n');
        // A parent that is gone needs no answer.
        let _ = socket.write_all(&line);
    }
}

fn read_questions(socket: &mut File) -> Result<Vec<Question>, String> {
    let mut text = Vec::new();
    socket.read_to_end(&mut text).map_err(|error| error.to_string())?;
    serde_json::from_slice(&text).map_err(|error| error.to_string())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn read(answers: &serde_json::Value) -> Result<Vec<Vec<Row>>, String> {
        read_answers(answers.to_string().as_bytes(), 1)
    }

    #[test]
    fn an_answer_is_read_as_the_word_of_a_stranger() {
        let row =
            |reason: &str| json!({"algorithm": "ring", "protocol": "ll", "chosen": null, "reason": reason});
        let rows = read(&json!({"Ok": [{"Ok": [row("too long"), row(&"x".repeat(100_000))]}]})).unwrap();
        assert_eq!(rows[0][0].reason, "too long");
        assert_eq!(rows[0][1].reason.len(), TEXT);
        let refused = read(&json!({"Ok": [{"Err": "no"}]})).unwrap_err();
        assert_eq!(refused, "no");
        assert_eq!(
            read(&json!({"Err": "it cannot be loaded"})).unwrap_err(),
            "it cannot be loaded"
        );
        for rubbish in [
            json!(null),
            json!({"Ok": []}),
            json!({"Ok": [{"Ok": []}, {"Ok": []}]}),
            json!({"Ok": [{"Ok": vec![row(""); MOST_ROWS + 1]}]}),
            json!({"Ok": [{"Ok": [{"algorithm": 7}]}]}),
        ] {
            assert_eq!(
                read(&rubbish).unwrap_err(),
                "its answer makes no sense",
                "{rubbish}"
            );
        }
    }

    #[test]
    fn a_line_is_limited_in_length_and_time() {
        let line = |sent: &[u8], limit, patience| {
            let (mut socket, mut other) = UnixStream::pair().unwrap();
            other.write_all(sent).unwrap();
            other.shutdown(Shutdown::Read).unwrap();
            read_line(&mut socket, Instant::now() + patience, limit)
        };
        let long = Duration::from_secs(60);
        assert_eq!(line(b"abc\nrest", 3, long).unwrap().as_deref(), Some(&b"abc"[..]));
        assert!(line(b"abcd", 3, long).unwrap_err().contains("more than 3 bytes"));
        let (mut socket, other) = UnixStream::pair().unwrap();
        let soon = Instant::now() + Duration::from_millis(20);
        let late = read_line(&mut socket, soon, 10).unwrap_err();
        assert!(late.contains("within 5 s"), "{late}");
        drop(other);
        let ended = read_line(&mut socket, Instant::now() + long, 10);
        assert_eq!(ended, Ok(None));
    }
}
