//! A disk that fills up while a recording goes on: a file system of one megabyte, mounted for the test.

#![allow(clippy::disallowed_methods, reason = "tests play whoever else writes there")]

#[expect(dead_code, reason = "each test uses its part of the made-up job")]
mod html_job;
#[path = "../../tests/src/skip.rs"]
mod skip;

use std::{path::PathBuf, process::Command, sync::Arc, time::Duration};

use html_job::Job;
use ringsight_exporters::{
    chrome::ChromeExporter,
    html::HtmlExporter,
    model::{Batch, Exporter, Resource, Signal, Span, Value},
};

/// A mounted file system, unmounted when dropped.
struct SmallDisk {
    directory: tempfile::TempDir,
}

impl SmallDisk {
    /// `None`, said aloud, where mounting is not allowed.
    fn mount(test: &str) -> Option<Self> {
        let directory = tempfile::tempdir().expect("a temporary directory");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", "size=1m", "ringsight-test"])
            .arg(directory.path())
            .output()
            .is_ok_and(|output| output.status.success());
        if !mounted {
            skip::skip(test, "mounting a file system needs CAP_SYS_ADMIN");
        }
        mounted.then_some(Self { directory })
    }

    fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }
}

impl Drop for SmallDisk {
    fn drop(&mut self) {
        let _ = Command::new("umount")
            .arg("-l")
            .arg(self.directory.path())
            .status();
    }
}

#[test]
fn the_page_before_stays_whole() {
    let Some(disk) = SmallDisk::mount("the_page_before_stays_whole") else {
        return;
    };
    let path = disk.path("page.html");
    let mut exporter = HtmlExporter::create(&path, "full disk").expect("an empty page fits");
    let before = std::fs::read(&path).expect("it is there at once");
    let job = Job {
        ranks: 8,
        ranks_per_host: 4,
        operations: 10_000,
        late: Vec::new(),
    };
    exporter.export(&Batch {
        operations: job.run(),
        ..Batch::default()
    });
    let error = exporter
        .shutdown(Duration::from_secs(1))
        .expect_err("two megabytes do not fit");
    assert!(
        error.contains("No space left on device") && error.contains("page.html"),
        "{error}"
    );
    assert!(error.contains("lacks the latest 10000 operations"), "{error}");
    assert!(
        exporter
            .stats()
            .last_error
            .is_some_and(|last| error.starts_with(&last))
    );
    assert_eq!(std::fs::read(&path).expect("still there"), before);
    assert_eq!(
        std::fs::read_dir(disk.directory.path())
            .expect("a directory")
            .count(),
        1,
        "no part file is left"
    );
}

#[test]
fn the_chrome_trace_stays_loadable() {
    let Some(disk) = SmallDisk::mount("the_chrome_trace_stays_loadable") else {
        return;
    };
    let path = disk.path("trace.json");
    let mut exporter = ChromeExporter::create(&path).expect("an empty trace fits");
    let resource = Arc::new(Resource {
        attributes: vec![("service.instance.id", Value::Static("0"))],
    });
    let spans = |from: u64| {
        (from..from + 500)
            .map(|number| Span {
                resource: Arc::clone(&resource),
                trace_id: [1; 16],
                span_id: (number + 1).to_be_bytes(),
                parent_span_id: None,
                name: "launch",
                start_unix_ns: html_job::BEGIN + number * 1000,
                end_unix_ns: html_job::BEGIN + number * 1000 + 400,
                attributes: Vec::new(),
                events: Vec::new(),
                links: Vec::new(),
                error: None,
            })
            .collect()
    };
    let read = || -> Vec<serde_json::Value> {
        let bytes = std::fs::read(&path).expect("the trace is there");
        let mut file: serde_json::Value = serde_json::from_slice(&bytes).expect("the trace is JSON");
        serde_json::from_value(file["traceEvents"].take()).expect("an array of events")
    };
    for round in 0..40 {
        exporter.export(&Batch {
            spans: spans(round * 500),
            ..Batch::default()
        });
        read();
    }
    let stats = exporter.stats();
    assert!(
        stats
            .last_error
            .as_ref()
            .is_some_and(|error| error.contains("No space left on device"))
    );
    let [("io_error", dropped)] = stats[Signal::Traces].dropped[..] else {
        panic!("{:?}", stats[Signal::Traces].dropped)
    };
    assert_eq!(dropped + stats[Signal::Traces].delivered, 20_000);
    let error = exporter
        .shutdown(Duration::from_secs(1))
        .expect_err("the loss is told");
    assert!(error.contains(&format!("lacks {dropped} events")), "{error}");
    assert_eq!(
        read().iter().filter(|event| event["ph"] == "X").count() as u64,
        stats[Signal::Traces].delivered
    );
}
