//! `fixture_reader PID [--perf-event]`: watches a process until the end of its input, then says what it saw. For tests that
//! kill a reader, or run one without rights.

use std::{
    io::{Read as _, Write as _},
    sync::mpsc,
    time::Duration,
};

use ringsight_probes::{Options, Sample, Session, Source as _};

fn main() {
    let mut arguments = std::env::args().skip(1);
    let pid = arguments
        .next()
        .and_then(|pid| pid.parse().ok())
        .expect("usage: fixture_reader PID [--perf-event]");
    let force_perf_event = arguments.next().as_deref() == Some("--perf-event");
    let mut session = Session::new(Options {
        force_perf_event,
        ..Options::default()
    })
    .expect("without rights there is the ring");
    let attached = match session.attach(pid) {
        Ok(attached) => attached,
        Err(error) => {
            println!("refused {error}");
            return;
        }
    };
    let unavailable = session.unavailable().map(ToString::to_string).unwrap_or_default();
    println!("attached {:?} {unavailable}", attached.carrier);
    std::io::stdout().flush().expect("a reader");

    let (sender, ended) = mpsc::channel();
    std::thread::spawn(move || {
        let _ = std::io::stdin().read_to_end(&mut Vec::new());
        let _ = sender.send(());
    });
    let mut samples = Vec::new();
    let mut records = 0usize;
    // The tick that the collector polls with.
    while ended.recv_timeout(Duration::from_millis(1)).is_err() {
        session.poll(&mut samples).expect("no problem");
        records += samples
            .drain(..)
            .filter(|sample| matches!(sample, Sample::Record { .. }))
            .count();
    }
    session.poll(&mut samples).expect("no problem");
    records += samples
        .iter()
        .filter(|sample| matches!(sample, Sample::Record { .. }))
        .count();
    println!("records {records}");
}
