//! The file: on a full disk, on a device, with many events.

use super::*;

#[test]
fn a_full_disk_loses_events_but_not_the_file() {
    let resource = resource(0);
    let batch = |first: u64| Batch {
        spans: (first..first + 10)
            .map(|i| span(&resource, "launch", i + 1, T0 + i * 10, T0 + i * 10 + 5))
            .collect(),
        ..Batch::default()
    };
    let disk = Disk::of(20_000);
    let mut writer = Writer::new(disk.clone()).unwrap();
    for i in 0..20 {
        writer.batch(&batch(i * 10));
        disk.parse();
    }
    let full = writer.stats("trace.json");
    let kept = by_name(&disk.parse(), "X", "launch").len() as u64;
    assert!(kept > 0 && full[Signal::Traces].delivered == kept, "{full:?}");
    assert_eq!(full[Signal::Traces].dropped, [("io_error", 200 - kept)]);
    assert!(
        full.last_error
            .unwrap()
            .starts_with("cannot write trace file trace.json: ")
    );
    // Room again: it goes on, and the gap stays counted.
    *disk.capacity.borrow_mut() = usize::MAX;
    writer.batch(&batch(200));
    assert_eq!(writer.close(), 200 - kept);
    assert_eq!(by_name(&disk.parse(), "X", "launch").len() as u64, kept + 10);
    assert_eq!(writer.close(), 0, "asked again, nothing new is lost");
}

#[test]
fn names_lost_with_a_full_disk_are_written_again() {
    let disk = Disk::of(300);
    let mut writer = Writer::new(disk.clone()).unwrap();
    let batch = Batch {
        spans: vec![span(&resource(0), "launch", 1, T0, T0 + 1)],
        ..Batch::default()
    };
    writer.batch(&batch);
    assert_eq!(disk.parse().len(), 1, "only the head fits");
    *disk.capacity.borrow_mut() = usize::MAX;
    writer.batch(&batch);
    assert_eq!(by_name(&disk.parse(), "M", "process_name").len(), 1);
    assert_eq!(by_name(&disk.parse(), "M", "thread_name").len(), 1);
    assert_eq!(by_name(&disk.parse(), "M", "trace_origin").len(), 1);
}

#[test]
fn what_no_trace_can_be_written_to_is_named_at_once() {
    let error = ChromeExporter::create("/dev/full").err().unwrap();
    assert!(
        error.contains("/dev/full") && error.contains("not a regular file"),
        "{error}"
    );
    let error = ChromeExporter::create("/nonexistent/trace.json").err().unwrap();
    assert!(
        error.contains("/nonexistent/trace.json") && error.contains("No such file"),
        "{error}"
    );
}

#[test]
fn ten_thousand_operations_are_written_quickly() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("trace.json");
    let mut exporter = ChromeExporter::create(&path).unwrap();
    let resources: Vec<_> = (0..8).map(resource).collect();
    let started = std::time::Instant::now();
    for op in 0..10_000u64 {
        let spans = resources
            .iter()
            .enumerate()
            .map(|(r, resource)| {
                span(
                    resource,
                    "all_gather rank",
                    op * 8 + r as u64 + 1,
                    T0 + op * 1000,
                    T0 + op * 1000 + 900,
                )
            })
            .collect();
        exporter.export(&Batch {
            spans,
            ..Batch::default()
        });
    }
    exporter.shutdown(Duration::from_secs(1)).unwrap();
    let elapsed = started.elapsed();
    let bytes = std::fs::read(&path).unwrap();
    println!("80,000 spans: {:.1} MB in {elapsed:?}", bytes.len() as f64 / 1e6);
    assert_eq!(exporter.stats()[Signal::Traces].delivered, 80_000);
    let events = events_of(&bytes);
    assert_eq!(by_name(&events, "X", "all_gather rank").len(), 80_000);
    assert!(
        bytes.len() < 80_000 * 900,
        "{} bytes a span",
        bytes.len() / 80_000
    );
}
