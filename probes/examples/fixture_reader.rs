//! `fixture_reader [--perf-event|--no-ebpf] PID…`: watches processes until the end of its input, then says what it saw of
//! each. For tests that kill or stop a reader, or run one without rights or in another namespace. Problems go to its standard
//! output as they come.

use std::{
    collections::BTreeMap,
    io::{Read as _, Write as _},
    sync::mpsc,
    time::Duration,
};

use ringsight_probes::{Options, Sample, Session, Source as _, UseEbpf};

/// What was seen of one process.
#[derive(Default)]
struct Seen {
    records: usize,
    missed: u64,
    lost: u64,
}

fn count(samples: &mut Vec<Sample>, seen: &mut BTreeMap<u32, Seen>) {
    for sample in samples.drain(..) {
        match sample {
            Sample::Record { pid, .. } => seen.entry(pid).or_default().records += 1,
            Sample::Missed { pid, count, .. } => seen.entry(pid).or_default().missed += count,
            Sample::Lost {
                pid: Some(pid),
                count,
                ..
            } => seen.entry(pid).or_default().lost += count,
            _ => {}
        }
    }
}

/// Polls, and tells what went wrong.
fn poll(session: &mut Session, samples: &mut Vec<Sample>) {
    loop {
        if let Err(problem) = session.poll(samples) {
            println!("problem {problem}");
            std::io::stdout().flush().expect("a reader");
        }
        if !session.is_behind() {
            return;
        }
    }
}

fn main() {
    let (flags, pids): (Vec<String>, Vec<String>) = std::env::args()
        .skip(1)
        .partition(|argument| argument.starts_with("--"));
    let has = |flag: &str| flags.iter().any(|given| given == flag);
    let mut session = Session::new(Options {
        network: ringsight_probes::NetworkScope::Never,
        force_perf_event: has("--perf-event"),
        use_ebpf: if has("--no-ebpf") {
            UseEbpf::Never
        } else {
            UseEbpf::Auto
        },
        ..Options::default()
    })
    .expect("without rights there is the ring");
    let mut carriers = Vec::new();
    for pid in pids {
        match session.attach(pid.parse().expect("a process")) {
            Ok(attached) => carriers.push(attached.carrier),
            Err(error) => {
                println!("refused {error}");
                return;
            }
        }
    }
    let unavailable = session.unavailable().map(ToString::to_string).unwrap_or_default();
    println!("attached {:?} {unavailable}", carriers[0]);
    std::io::stdout().flush().expect("a reader");

    let (sender, ended) = mpsc::channel();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        let _ = sender.send(());
    });
    let (mut samples, mut seen) = (Vec::new(), BTreeMap::new());
    // The tick that the collector polls with.
    while ended.recv_timeout(Duration::from_millis(1)).is_err() {
        poll(&mut session, &mut samples);
        count(&mut samples, &mut seen);
    }
    poll(&mut session, &mut samples);
    session.detach_all();
    poll(&mut session, &mut samples);
    count(&mut samples, &mut seen);
    let total: usize = seen.values().map(|seen| seen.records).sum();
    print!("records {total}");
    for (pid, seen) in seen {
        print!(" {pid}:{}:{}:{}", seen.records, seen.missed, seen.lost);
    }
    println!();
}
