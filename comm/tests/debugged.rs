//! A rank that is alone on its node and in a debugger: what holds it is known, since it has said that it may be held.

mod common;

use std::{
    collections::BTreeSet,
    env,
    fs::{self, File},
    io,
    ptr::{null_mut, without_provenance_mut},
    thread,
    time::Duration,
};

use common::{
    processes::{outputs, start_processes, text},
    variables::FOLDER,
    waiting::{PATIENT_MS, eventually},
};

/// Long enough for a rank to look at itself and to tell the others; it does so every 100 ms.
const TELLS: Duration = Duration::from_secs(2);

fn ptrace(request: libc::c_uint, thread: i32) -> io::Result<()> {
    // SAFETY: none of the requests that are made here writes to memory of this process.
    match unsafe {
        libc::ptrace(
            request,
            thread,
            null_mut::<libc::c_void>(),
            without_provenance_mut::<libc::c_void>(0),
        )
    } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}

#[test]
fn a_rank_in_a_debugger_is_no_hang_though_nobody_is_beside_it() {
    let folder = env::temp_dir().join(format!("ringsight-debugged-{}", std::process::id()));
    fs::create_dir_all(&folder).unwrap();
    let variables = [
        (FOLDER, folder.to_str().unwrap()),
        ("NCCL_KERNEL_TIMEOUT_MS", PATIENT_MS),
        ("RINGSIGHT_WATCHDOG_INTERVAL_MS", "100"),
        ("RINGSIGHT_WATCHDOG_ACTION", "abort"),
    ];
    let ranks = start_processes("debugged::held", 2, 2, &variables);
    eventually("the rank", || folder.join("ready").exists());
    let process = ranks[1].id();
    let entries = fs::read_dir(format!("/proc/{process}/task")).unwrap();
    let number = |entry: io::Result<fs::DirEntry>| entry.ok()?.file_name().to_str()?.parse().ok();
    let mut threads: BTreeSet<i32> = entries.filter_map(number).collect();
    threads.retain(|thread| ptrace(libc::PTRACE_SEIZE, *thread).is_ok());
    assert!(threads.contains(&(process as i32)), "it cannot be debugged");
    thread::sleep(TELLS);
    threads.retain(|thread| {
        let mut status = 0;
        // SAFETY: a valid place to write to.
        ptrace(libc::PTRACE_INTERRUPT, *thread).is_ok()
            && unsafe { libc::waitpid(*thread, &raw mut status, libc::__WALL) } == *thread
            && libc::WIFSTOPPED(status)
    });
    File::create(folder.join("held")).unwrap();
    eventually("the verdict", || folder.join("judged").exists());
    for thread in &threads {
        ptrace(libc::PTRACE_DETACH, *thread).unwrap();
    }
    let texts: Vec<String> = outputs(ranks)
        .into_iter()
        .map(|output| {
            let text = text(&output);
            assert!(output.status.success(), "{text}");
            text
        })
        .collect();
    fs::remove_dir_all(&folder).unwrap();
    let said: Vec<&str> = texts[0]
        .lines()
        .filter_map(|line| line.split_once(" Verdict: ").map(|(_, verdict)| verdict))
        .collect();
    let expected = "RANK_STOPPED (late): the process of rank 1 is stopped by a debugger";
    assert!(
        matches!(said[..], [said] if said.starts_with(expected)),
        "{said:?}"
    );
}
