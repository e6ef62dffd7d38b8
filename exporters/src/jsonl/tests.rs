use std::sync::Arc;

use super::*;
use crate::model::{Resource, Span};

/// A disk of `space` bytes.
#[derive(Default)]
struct Disk {
    content: Vec<u8>,
    space: usize,
    cannot_cut: bool,
}

impl Write for Disk {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let room = self.space.saturating_sub(self.content.len()).min(bytes.len());
        if room == 0 && !bytes.is_empty() {
            return Err(io::ErrorKind::StorageFull.into());
        }
        self.content.extend_from_slice(&bytes[..room]);
        Ok(room)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Medium for Disk {
    fn cut(&mut self, end: u64) -> io::Result<()> {
        if self.cannot_cut {
            return Err(io::ErrorKind::PermissionDenied.into());
        }
        self.content.truncate(usize::try_from(end).unwrap());
        Ok(())
    }
}

fn batch(spans: u8) -> Batch {
    let resource = Arc::new(Resource { attributes: vec![] });
    let span = |n| Span {
        resource: Arc::clone(&resource),
        trace_id: [n; 16],
        span_id: [n; 8],
        parent_span_id: None,
        name: "all_reduce",
        start_unix_ns: 1,
        end_unix_ns: 2,
        attributes: vec![],
        events: vec![],
        links: vec![],
        error: None,
    };
    Batch {
        spans: (1..=spans).map(span).collect(),
        ..Batch::default()
    }
}

fn writer(space: usize) -> Writer<Disk> {
    Writer::new(
        Disk {
            space,
            ..Disk::default()
        },
        0,
    )
    .unwrap()
}

/// Spans in the file; panics if it is not whole lines of JSON.
fn spans_in(writer: &Writer<Disk>) -> u64 {
    let text = std::str::from_utf8(&writer.medium.content).unwrap();
    assert!(text.is_empty() || text.ends_with('\n'));
    let count = |line| {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        line["resourceSpans"][0]["scopeSpans"][0]["spans"]
            .as_array()
            .unwrap()
            .len() as u64
    };
    text.lines().map(count).sum()
}

#[test]
fn at_any_size_of_the_disk_the_file_is_whole_lines_and_the_rest_comes_later() {
    let mut all = writer(usize::MAX);
    (0..3).for_each(|_| all.export(&batch(2)));
    for space in 0..all.medium.content.len() {
        let mut writer = writer(space);
        (0..3).for_each(|_| writer.export(&batch(2)));
        assert_eq!(
            spans_in(&writer),
            writer.stats[Signal::Traces].delivered,
            "with {space} bytes"
        );
        assert!(writer.stats[Signal::Traces].delivered < 6);
        assert!(writer.stats.last_error.is_some());
        let failure = writer.stats[Signal::Traces].last_failure.as_ref().unwrap();
        assert_eq!(failure.consequence, Consequence::KeptForNext);
        assert_eq!(failure.items, 6 - writer.stats[Signal::Traces].delivered);
        writer.medium.space = usize::MAX;
        assert_eq!(writer.close(|_| Ok(())), Ok(()));
        assert_eq!(writer.medium.content, all.medium.content, "with {space} bytes");
        assert_eq!(
            (
                writer.stats[Signal::Traces].delivered,
                writer.stats[Signal::Traces].dropped_total()
            ),
            (6, 0)
        );
    }
}

#[test]
fn what_is_kept_for_later_is_bounded() {
    let mut writer = writer(10);
    for _ in 0..1_000 {
        writer.export(&batch(100));
    }
    assert!(writer.buffer.len() <= KEPT);
    let kept: u64 = writer.lines.iter().map(|line| line.items).sum();
    assert_eq!(
        writer.stats[Signal::Traces].dropped,
        [("io_error", 100_000 - kept)]
    );
    let error = writer.close(|_| Ok(())).unwrap_err();
    assert!(error.contains("100000 spans"), "{error}");
    assert_eq!(writer.stats[Signal::Traces].dropped, [("io_error", 100_000)]);
    assert_eq!(writer.medium.content, b"");
}

#[test]
fn a_line_that_cannot_be_cut_off_now_is_cut_off_before_the_next() {
    let mut writer = writer(10);
    writer.medium.cannot_cut = true;
    writer.export(&batch(1));
    assert_eq!(writer.medium.content.len(), 10);
    writer.medium = Disk {
        content: writer.medium.content,
        space: usize::MAX,
        cannot_cut: false,
    };
    writer.export(&batch(1));
    assert_eq!(spans_in(&writer), 2);
}

#[test]
fn errors_of_synchronising_are_told() {
    let mut writer = writer(usize::MAX);
    writer.export(&batch(1));
    let error = writer
        .close(|_| Err(io::ErrorKind::QuotaExceeded.into()))
        .unwrap_err();
    assert!(error.starts_with("quota exceeded"), "{error}");
    assert_eq!(
        writer.close(|_| Err(io::ErrorKind::QuotaExceeded.into())),
        Ok(()),
        "closed already"
    );
}
