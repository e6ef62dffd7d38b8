//! A log that nobody reads holds nothing up: verdicts, the news of a death, and an abort.

mod common;

use std::{
    env,
    ffi::{CString, c_int},
    fs::{File, OpenOptions},
    io::{ErrorKind, Read as _, Write as _},
    os::{fd::AsRawFd as _, unix::fs::OpenOptionsExt as _},
    panic::catch_unwind,
    path::Path,
    process::Child,
    thread,
};

use common::{
    Call, Rank, host, ok, place_of_process, start_each, state,
    waiting::{Marks, eventually},
};
use ringsight_comm::{abi, communicator::Handle, error::ResultCode, observe};
use ringsight_records::{Function, Kind};

/// The variable with the file that the process logs to.
const LOG: &str = "RINGSIGHT_TEST_LOG";
const RANKS: usize = 3;
const VICTIM: usize = 2;

/// Fills the pipe that is logged to. Only this end does not block.
fn fill(path: &str) {
    let mut file = OpenOptions::new()
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)
        .unwrap();
    for size in [4096, 1] {
        loop {
            match file.write(&vec![b'.'; size]) {
                Ok(_) => {}
                Err(error) if error.kind() == ErrorKind::WouldBlock => break,
                Err(error) => panic!("{error}"),
            }
        }
    }
}

fn unread() {
    let (id, rank, ranks) = place_of_process().unwrap();
    let marks = Marks::of_process();
    let mark = |name: &str| marks.set(&format!("{name} {rank}"));
    let await_all = |name: &str| (0..VICTIM).for_each(|rank| marks.wait(&format!("{name} {rank}")));
    let rank = Rank::join(id, rank, ranks);
    let mut second = Handle(0);
    // SAFETY: a live communicator and a valid place.
    ok(unsafe {
        abi::ncclCommSplit(
            rank.comm,
            0,
            rank.rank as c_int,
            &raw mut second,
            std::ptr::null_mut(),
        )
    });
    if rank.rank == VICTIM {
        await_all("judged");
        // SAFETY: ends this process.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    }
    fill(&env::var(LOG).unwrap());

    let mut data = vec![1f32; 4096];
    let at: *mut u8 = data.as_mut_ptr().cast();
    let (call, before) = (
        Call::new(Function::AllReduce, data.len()),
        observe::emitted(Kind::Verdict),
    );
    // Nobody reads until both ranks have aborted: whatever waited for the log would wait for ever.
    let verdict = |count: u64| {
        eventually("a verdict", || observe::emitted(Kind::Verdict) >= before + count);
    };
    ok(rank.call(&call, at, at));
    verdict(1);
    let other = Rank {
        comm: second,
        stream: host().stream_create().unwrap(),
        ..rank
    };
    ok(other.call(&call, at, at));
    verdict(2);
    mark("judged");
    await_all("judged");
    for rank in [&rank, &other] {
        eventually("the failure", || state(rank.comm) == ResultCode::RemoteError);
    }
    for rank in [&rank, &other] {
        // SAFETY: a live communicator.
        ok(unsafe { abi::ncclCommAbort(rank.comm) });
        rank.synchronize();
    }
    mark("aborted");
}

#[test]
#[ignore = "helper: the body of one rank; started by the tests below"]
fn unread_rank() {
    if place_of_process().is_none() {
        return;
    }
    // The harness would write to the pipe, too.
    let code = c_int::from(catch_unwind(unread).is_err());
    // SAFETY: ends the process as a program's return from main does.
    unsafe { libc::exit(code) };
}

/// Runs the ranks, which log to file `log` of their folder, or to their standard output. Reads when both living ranks have
/// aborted, and returns what they logged.
fn run(log: Option<&str>, variables: &[(&str, &str)]) -> Vec<String> {
    let folder = tempfile::tempdir().unwrap();
    let path = |rank: usize| log.map(|log| folder.path().join(format!("{log}{rank}")));
    // Open to read, so that the ranks can open them to write.
    let open = |rank| path(rank).filter(|_| rank != VICTIM).map(|path| fifo(&path));
    let files: Vec<Option<File>> = (0..RANKS).map(open).collect();
    let mut ranks = start_each("unread_rank", RANKS, 1, |rank, command| {
        command
            .env("NCCL_KERNEL_TIMEOUT_MS", "300")
            .env(Marks::FOLDER, folder.path())
            .env(LOG, "/proc/self/fd/1")
            .envs(variables.iter().copied());
        if let Some(path) = path(rank).filter(|path| path.exists()) {
            command.env("NCCL_DEBUG_FILE", &path).env(LOG, &path);
        }
    });
    let marks = Marks::in_folder(folder.path());
    let is_over = || (0..VICTIM).all(|rank| marks.is_set(&format!("aborted {rank}")));
    // A rank that waits for the log in vain says so, and ends.
    eventually("both ranks have aborted, or one has failed", || {
        is_over() || ranks[..VICTIM].iter_mut().any(has_ended)
    });
    let stuck = !is_over();
    // All at once: a process that ends waits only so long for who reads.
    let read = |(mut child, file): (Child, Option<File>)| {
        thread::spawn(move || {
            if stuck {
                let _ = child.kill();
            }
            let reader = thread::spawn(move || file.map(read_all));
            let output = child.wait_with_output().unwrap();
            let [out, error] =
                [output.stdout, output.stderr].map(|bytes| String::from_utf8_lossy(&bytes).into_owned());
            (reader.join().unwrap().unwrap_or(out), error)
        })
    };
    let readers: Vec<_> = ranks.into_iter().zip(files).map(read).collect();
    let texts: Vec<_> = readers.into_iter().map(|reader| reader.join().unwrap()).collect();
    assert!(!stuck, "{texts:?}");
    texts.into_iter().take(VICTIM).map(|(text, _)| text).collect()
}

fn has_ended(child: &mut Child) -> bool {
    child.try_wait().unwrap().is_some()
}

fn fifo(path: &Path) -> File {
    let name = CString::new(path.to_str().unwrap()).unwrap();
    // SAFETY: a name that ends with 0.
    assert_eq!(unsafe { libc::mkfifo(name.as_ptr(), 0o600) }, 0);
    let file = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(path)
        .unwrap();
    // SAFETY: a descriptor of ours, which from now on blocks as usual.
    assert_eq!(unsafe { libc::fcntl(file.as_raw_fd(), libc::F_SETFL, 0) }, 0);
    file
}

fn read_all(mut file: File) -> String {
    let mut bytes = Vec::new();
    file.read_to_end(&mut bytes).unwrap();
    String::from_utf8_lossy(&bytes).into_owned()
}

/// What was logged meanwhile is there for the reader.
fn assert_logged(texts: &[String], parts: &[&str]) {
    for text in texts {
        for part in parts {
            assert!(
                text.contains(part),
                "no {part:?} in {}",
                text.trim_start_matches('.')
            );
        }
    }
}

const REPORTS: [&str; 2] = [
    "Verdict: NOT_LAUNCHED (late): rank 2",
    "Verdict: RANK_DEAD (hang): the process of rank 2 is gone",
];

#[test]
fn reports_that_nobody_reads_hold_nothing_up() {
    assert_logged(&run(None, &[]), &REPORTS);
}

#[test]
fn lines_that_nobody_reads_hold_nothing_up() {
    let texts = run(None, &[("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_SUBSYS", "ALL")]);
    assert_logged(&texts, &REPORTS);
    assert_logged(&texts, &["the communicator has failed: rank 2 is gone"]);
}

#[test]
fn a_file_that_nobody_reads_holds_nothing_up() {
    assert_logged(&run(Some("log"), &[("NCCL_DEBUG", "WARN")]), &REPORTS);
}
