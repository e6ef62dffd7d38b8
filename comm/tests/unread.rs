//! A log that nobody reads holds nothing up: verdicts, the news of a death, and an abort.

mod common;

use std::{
    env,
    ffi::{CString, c_int},
    fs::{self, File, OpenOptions},
    io::{ErrorKind, Read as _, Write as _},
    os::{fd::AsRawFd as _, unix::fs::OpenOptionsExt as _},
    panic::catch_unwind,
    path::{Path, PathBuf},
    process::Child,
    thread,
    time::{Duration, Instant},
};

use common::{Call, Rank, host, ok, place_of_process, start_each, state};
use ringsight_comm::{abi, communicator::Handle, error::ResultCode, observe};
use ringsight_records::{Function, Kind};

/// Where ranks tell each other how far they are.
const FOLDER: &str = "RINGSIGHT_TEST_FOLDER";
/// What the process logs to.
const LOG: &str = "RINGSIGHT_TEST_LOG";
const THRESHOLD: Duration = Duration::from_millis(300);
/// From the end of the threshold to the verdict, from a death to the failure, and for an abort.
const PROMISED: Duration = Duration::from_secs(1);
/// More than a busy machine takes.
const EVER: Duration = Duration::from_secs(30);
const RANKS: usize = 3;
const VICTIM: usize = 2;

/// Asserts that it comes, and within `limit` if there is one; a machine with much else to do may double that.
#[track_caller]
fn until(what: &str, limit: Option<Duration>, is: impl Fn() -> bool) {
    let begin = Instant::now();
    while !is() {
        assert!(begin.elapsed() < EVER, "{what} does not come");
        thread::sleep(Duration::from_millis(1));
    }
    let took = begin.elapsed();
    assert!(limit.is_none_or(|limit| took < 2 * limit), "{what}: {took:?}");
}

/// Fills what is logged to; nobody else of this process is hindered by that this end does not block.
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
    let folder = PathBuf::from(env::var(FOLDER).unwrap());
    let mark = |name: &str| File::create(folder.join(format!("{name} {rank}"))).unwrap();
    let await_all = |name: &str| {
        let there = |rank| folder.join(format!("{name} {rank}")).exists();
        until(name, None, || (0..VICTIM).all(there));
    };
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
    let verdict = |count: u64| {
        until("a verdict", Some(THRESHOLD + PROMISED), || {
            observe::emitted(Kind::Verdict) >= before + count
        });
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
    drop(mark("judged"));
    await_all("judged");
    for rank in [&rank, &other] {
        until("the failure", Some(2 * PROMISED), || {
            state(rank.comm) == ResultCode::RemoteError
        });
    }
    let begin = Instant::now();
    for rank in [&rank, &other] {
        // SAFETY: a live communicator.
        ok(unsafe { abi::ncclCommAbort(rank.comm) });
        rank.synchronize();
    }
    assert!(begin.elapsed() < 2 * PROMISED, "{:?}", begin.elapsed());
    drop(mark("aborted"));
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

/// Runs the ranks, whose log is `log` of their folder, else their standard output, and returns what two of them have logged
/// once somebody has read it.
fn run(name: &str, log: Option<&str>, variables: &[(&str, &str)]) -> Vec<String> {
    let folder = env::temp_dir().join(format!("ringsight-unread-{}-{name}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let path = |rank: usize| log.map(|log| folder.join(format!("{log}{rank}")));
    // Open to read, so that the ranks can open them to write.
    let open = |rank| path(rank).filter(|_| rank != VICTIM).map(|path| fifo(&path));
    let files: Vec<Option<File>> = (0..RANKS).map(open).collect();
    let mut ranks = start_each("unread_rank", RANKS, 1, |rank, command| {
        command
            .env("NCCL_KERNEL_TIMEOUT_MS", "300")
            .env(FOLDER, &folder)
            .env(LOG, "/proc/self/fd/1")
            .envs(variables.iter().copied());
        if let Some(path) = path(rank).filter(|path| path.exists()) {
            command.env("NCCL_DEBUG_FILE", &path).env(LOG, &path);
        }
    });
    let marks = || (0..VICTIM).filter(|rank| folder.join(format!("aborted {rank}")).exists());
    let end = Instant::now() + 3 * EVER;
    while marks().count() < VICTIM && Instant::now() < end && !ranks[..VICTIM].iter_mut().any(has_ended) {
        thread::sleep(Duration::from_millis(5));
    }
    let stuck = marks().count() < VICTIM;
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
    fs::remove_dir_all(&folder).unwrap();
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

/// What was said meanwhile is there when somebody reads.
fn assert_said(texts: &[String], parts: &[&str]) {
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
    assert_said(&run("reports", None, &[]), &REPORTS);
}

#[test]
fn lines_that_nobody_reads_hold_nothing_up() {
    let texts = run(
        "lines",
        None,
        &[("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_SUBSYS", "ALL")],
    );
    assert_said(&texts, &REPORTS);
    assert_said(&texts, &["the communicator has failed: rank 2 is gone"]);
}

#[test]
fn a_file_that_nobody_reads_holds_nothing_up() {
    assert_said(&run("file", Some("log"), &[("NCCL_DEBUG", "WARN")]), &REPORTS);
}
