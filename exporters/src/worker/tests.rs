use std::{
    io::Read as _,
    os::unix::fs::OpenOptionsExt as _,
    process::Command,
    sync::mpsc::{Receiver, channel},
    time::Instant,
};

use super::*;
use crate::{
    jsonl::JsonlExporter,
    model::{LogRecord, Operation, Resource, Severity, Tally, Value},
};

/// Long enough for anything that does not block.
const PATIENCE: Duration = Duration::from_secs(60);

/// Takes log records and operations. Each `export` waits for a word; without one the exporter is stuck.
struct Slow {
    may_go_on: Receiver<()>,
    stats: ExportStats,
    lost: u64,
}

impl Exporter for Slow {
    fn target(&self) -> String {
        "a slow disk".to_owned()
    }

    fn takes(&self) -> Takes {
        Takes {
            traces: false,
            metrics: false,
            logs: true,
            operations: true,
        }
    }

    fn export(&mut self, batch: &Batch) {
        self.may_go_on.recv().unwrap();
        self.stats[Signal::Logs].delivered += batch.logs.len() as u64;
    }

    fn stats(&self) -> ExportStats {
        self.stats.clone()
    }

    fn shutdown(&mut self, _: Duration) -> Result<(), String> {
        match self.lost {
            0 => Ok(()),
            lost => Err(format!("{lost} lines are missing")),
        }
    }
}

fn slow(limit: usize, lost: u64) -> (Worker, Sender<()>) {
    let (go_on, may_go_on) = channel();
    let worker = Worker::start("a slow disk", limit, PATIENCE, move || {
        Ok(Box::new(Slow {
            may_go_on,
            stats: ExportStats::default(),
            lost,
        }))
    });
    (worker.unwrap(), go_on)
}

fn batch(logs: usize, operations: usize) -> Arc<Batch> {
    let resource = Arc::new(Resource {
        attributes: vec![("host.name", Value::Static("here"))],
    });
    let log = LogRecord {
        resource,
        unix_ns: 1,
        observed_unix_ns: 1,
        severity: Severity::Warn,
        event_name: "verdict",
        body: "rank 1 is late".into(),
        attributes: vec![("rank", Value::Int(1))],
        span: None,
    };
    let operation = Operation {
        trace_id: [1; 16],
        name: "all_reduce",
        communicator: 1,
        communicator_name: "".into(),
        ranks: 1,
        sequence: 1,
        replay: 0,
        bytes: 8,
        data_type: "float32",
        algorithm: "ring",
        by_rank: Vec::new(),
        culprit: None,
        unnamed: None,
        waited_until_ns: 0,
        complete: true,
    };
    Arc::new(Batch {
        logs: vec![log; logs],
        operations: vec![operation; operations],
        ..Batch::default()
    })
}

fn logs(worker: &Worker) -> Tally {
    worker.stats()[Signal::Logs].clone()
}

#[test]
fn what_is_given_arrives_and_the_result_is_the_exporters() {
    for lost in [0, 3] {
        let (mut worker, go_on) = slow(usize::MAX, lost);
        assert_eq!(worker.target(), "a slow disk");
        for _ in 0..10 {
            worker.export_shared(&batch(2, 1));
            go_on.send(()).unwrap();
        }
        let result = worker.shutdown(PATIENCE);
        assert_eq!(result.is_err(), lost > 0, "{result:?}");
        assert_eq!((logs(&worker).delivered, logs(&worker).dropped_total()), (20, 0));
        assert_eq!(worker.shutdown(PATIENCE), Ok(()), "only once");
        worker.export_shared(&batch(2, 1));
        assert_eq!(logs(&worker).delivered, 20);
    }
}

#[test]
fn an_exporter_that_is_stuck_holds_up_nobody_and_everything_is_counted() {
    let limit = 10 * batch(1, 1).memory();
    let (mut worker, go_on) = slow(limit, 0);
    let begun = Instant::now();
    for _ in 0..100 {
        worker.export_shared(&batch(1, 1));
    }
    assert_eq!(logs(&worker).dropped, [("queue_full", 90)]);
    let last_error = worker.stats().last_error.unwrap();
    assert!(last_error.contains("a slow disk"), "{last_error}");
    let error = worker.shutdown(Duration::from_millis(100)).unwrap_err();
    assert!(begun.elapsed() < Duration::from_secs(20), "{:?}", begun.elapsed());
    assert!(
        error.contains("a slow disk") && error.contains("10 log records and 10 operations"),
        "{error}"
    );
    assert_eq!(logs(&worker).dropped, [("queue_full", 90), ("shutdown", 10)]);
    // What it writes now was counted as lost.
    for _ in 0..10 {
        go_on.send(()).unwrap();
    }
    while worker.account().waiting_bytes > 0 {
        thread::yield_now();
    }
    assert_eq!((logs(&worker).delivered, logs(&worker).dropped_total()), (0, 100));
}

#[test]
fn a_stuck_exporter_is_left_behind_when_the_shutdown_is_cut() {
    let (mut worker, _stuck) = slow(QUEUE_BYTES, 0);
    worker.export_shared(&batch(2, 0));
    let begun = Instant::now();
    let cut = || begun.elapsed() > Duration::from_millis(100);
    let error = worker.shutdown_until(Duration::from_secs(600), &cut).unwrap_err();
    assert!(begun.elapsed() < Duration::from_secs(60));
    assert!(error.contains("2 log records are missing"), "{error}");
    assert_eq!(logs(&worker).dropped_as("shutdown"), 2);
}

#[test]
fn operations_that_did_not_fit_are_told_at_the_end() {
    let (mut worker, go_on) = slow(1, 0);
    for _ in 0..3 {
        worker.export_shared(&batch(0, 2));
    }
    go_on.send(()).unwrap();
    let error = worker.shutdown(PATIENCE).unwrap_err();
    assert!(error.contains("4 operations are missing"), "{error}");
}

#[test]
fn what_cannot_be_opened_is_told() {
    let start = |patience, open: fn() -> Result<Box<dyn Exporter>, String>| {
        Worker::start("page p.html", QUEUE_BYTES, patience, open)
            .err()
            .unwrap()
    };
    let refused = start(PATIENCE, || Err("cannot write page p.html: no".to_owned()));
    assert_eq!(refused, "cannot write page p.html: no");
    let stuck = start(Duration::from_millis(50), || {
        thread::park();
        Err("woken".to_owned())
    });
    assert!(stuck.contains("p.html within 50ms"), "{stuck}");
    assert!(start(PATIENCE, || panic!("a defect")).contains("its thread ended"));
}

#[test]
fn an_exporter_that_panics_is_counted_out() {
    let (mut worker, go_on) = slow(usize::MAX, 0);
    drop(go_on);
    worker.export_shared(&batch(5, 0));
    let error = worker.shutdown(PATIENCE).unwrap_err();
    assert!(
        error.contains("its thread ended") && error.contains("5 log records"),
        "{error}"
    );
    assert_eq!(logs(&worker).dropped, [("shutdown", 5)]);
}

#[test]
fn a_pipe_that_is_read_gets_all_and_one_that_is_not_holds_up_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let pipe = folder.path().join("pipe.jsonl");
    assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
    let mut reader = std::fs::OpenOptions::new()
        .read(true)
        .custom_flags(rustix::fs::OFlags::NONBLOCK.bits().cast_signed())
        .open(&pipe)
        .unwrap();
    let open = || {
        let pipe = pipe.clone();
        Worker::start("the pipe", QUEUE_BYTES, PATIENCE, move || {
            Ok(Box::new(JsonlExporter::append(pipe)?))
        })
        .unwrap()
    };
    let mut worker = open();
    worker.export_shared(&batch(3, 0));
    worker.shutdown(PATIENCE).unwrap();
    drop(worker);
    let mut text = String::new();
    reader.read_to_string(&mut text).unwrap();
    assert_eq!(text.lines().count(), 1, "{text}");

    let mut worker = open();
    // More than a pipe holds.
    for _ in 0..20 {
        worker.export_shared(&batch(1000, 0));
    }
    let begun = Instant::now();
    let error = worker.shutdown(Duration::from_millis(200)).unwrap_err();
    assert!(begun.elapsed() < Duration::from_secs(10));
    assert!(error.contains("log records are missing"), "{error}");
    let logs = logs(&worker);
    assert_eq!(logs.delivered + logs.dropped_as("shutdown"), 20_000);
}
