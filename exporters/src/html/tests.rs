use std::{fs, sync::Arc};

use proptest::prelude::*;
use serde_json::{Value as Json, json};

use super::*;
use crate::model::{Culprit, Metric, Operation, OperationRank, PeerWait, Resource, Unnamed, Value};

fn part(rank: u32, pid: u32, start: u64, end: u64) -> OperationRank {
    OperationRank {
        rank,
        host: format!("node-{}", pid % 2).into(),
        pid,
        api_start_ns: start.saturating_sub(5),
        device_start_ns: start,
        device_end_ns: end,
        by_device: true,
    }
}

fn operation(number: u64, by_rank: Vec<OperationRank>) -> Operation {
    Operation {
        trace_id: u128::from(number + 1).to_be_bytes(),
        name: "all_reduce",
        communicator: 0xab,
        communicator_name: "".into(),
        ranks: by_rank.len() as u32,
        sequence: number,
        replay: 0,
        bytes: 1 << 20,
        data_type: "float32",
        algorithm: "ring",
        by_rank,
        culprit: None,
        unnamed: None,
        waited_until_ns: 0,
        complete: true,
    }
}

const T0: u64 = 1_700_000_000_000_000_000;

fn regular(number: u64, ranks: u32) -> Operation {
    let start = T0 + number * 1000;
    operation(
        number,
        (0..ranks)
            .map(|rank| part(rank, 100 + rank, start, start + 500))
            .collect(),
    )
}

fn batch(operations: Vec<Operation>) -> Batch {
    Batch {
        operations,
        ..Batch::default()
    }
}

/// The page's text and its data.
fn written(title: &str, store: &Store, lost: u64) -> (String, Json) {
    let mut out = Vec::new();
    page::write(&mut out, title, store, (&[], &[]), lost, true).unwrap();
    let text = String::from_utf8(out).unwrap();
    let data = text
        .split_once("<script type=\"application/json\" id=\"data\">")
        .unwrap()
        .1;
    let data = serde_json::from_str(data.split_once("</script>").unwrap().0).unwrap();
    (text, data)
}

fn store_of(operations: &[Operation]) -> Store {
    let mut store = Store::new(usize::MAX, usize::MAX);
    operations.iter().for_each(|operation| store.push(operation));
    store
}

fn numbers(json: &Json) -> Vec<i64> {
    json.as_array()
        .unwrap()
        .iter()
        .map(|number| number.as_i64().unwrap())
        .collect()
}

#[test]
fn columns_give_back_the_operations() {
    let mut late = regular(1, 3);
    late.by_rank[2].device_start_ns += 700;
    late.by_rank[2].device_end_ns += 700;
    late.culprit = Some(Culprit { rank: 2, lag_ns: 700 });
    let mut damaged = regular(2, 2);
    damaged.complete = false;
    let wait = PeerWait {
        rank: 1,
        peer: 9,
        wait_ns: 7,
    };
    damaged.unnamed = Some(Unnamed { wait: Some(wait) });
    let mut first = regular(0, 3);
    first.unnamed = Some(Unnamed { wait: None });
    // In the order of their ends, not of their starts.
    let (_, data) = written("t", &store_of(&[late, first, damaged]), 4);
    let operations = &data["operations"];
    assert_eq!(data["t0"], (T0 - 5).to_string());
    assert_eq!(numbers(&operations["start"]), [0, 1000, 1000]);
    assert_eq!(numbers(&operations["sequence"]), [0, 1, 2]);
    assert_eq!(numbers(&operations["parts"]), [3, 3, 2]);
    assert_eq!(numbers(&operations["lag"]), [0, 700, 0]);
    assert_eq!(numbers(&operations["culprit"]), [-1, 2, -1]);
    assert_eq!(numbers(&operations["incomplete"]), [2]);
    assert_eq!(operations["unnamed"], json!([[0, -1, -1, 0], [2, 1, 9, 7]]));
    assert_eq!(operations["trace"].as_str().unwrap().len(), 3 * 32);
    assert_eq!(numbers(&data["parts"]["row"]), [0, 1, 2, 0, 1, 2, 0, 1]);
    assert_eq!(numbers(&data["parts"]["start"]), [5, 5, 5, 5, 5, 705, 5, 5]);
    assert_eq!(numbers(&data["parts"]["call"]), [0; 8]);
    assert_eq!(numbers(&data["parts"]["length"]), [500; 8]);
    assert!(data["parts"]["rank"].is_null(), "left out where it is the row's");
    assert_eq!(
        data["rows"][1],
        serde_json::json!({"rank": 1, "host": "node-1", "pid": 101})
    );
    assert_eq!(
        (&data["lost"], &data["seen"], &data["dropped"]),
        (&4.into(), &3.into(), &0.into())
    );
}

#[test]
fn a_row_is_a_process_unless_ranks_are_threads() {
    // Process 101 is rank 1 of the large communicator and rank 0 of a small one: one row, labelled 1.
    let mut small = operation(1, vec![part(0, 101, T0 + 50, T0 + 60)]);
    small.communicator = 0xcd;
    let (_, data) = written("t", &store_of(&[small, regular(0, 2)]), 0);
    assert_eq!(data["rows"].as_array().unwrap().len(), 2);
    assert_eq!(numbers(&data["parts"]["rank"]), [0, 1, 0]);
    assert_eq!(numbers(&data["parts"]["row"]), [0, 1, 1]);
    // Two ranks in process 7: a row for each.
    let threads = operation(0, vec![part(0, 7, T0, T0 + 9), part(1, 7, T0, T0 + 9)]);
    let (_, data) = written("t", &store_of(&[threads]), 0);
    assert_eq!(numbers(&data["parts"]["row"]), [0, 1]);
    assert_eq!(
        (&data["rows"][0]["pid"], &data["rows"][1]["pid"]),
        (&7.into(), &7.into())
    );
}

#[test]
fn times_that_are_missing_do_not_bend_the_others() {
    let mut one = regular(0, 2);
    (
        one.by_rank[0].api_start_ns,
        one.by_rank[1].device_start_ns,
        one.by_rank[1].device_end_ns,
    ) = (0, 0, 0);
    let nothing = operation(1, Vec::new());
    let never = operation(2, vec![part(0, 100, 0, 0)]);
    let (_, data) = written("t", &store_of(&[one, nothing, never]), 0);
    assert_eq!(data["t0"], (T0 - 5).to_string());
    let first = data["operations"]["parts"]
        .as_array()
        .unwrap()
        .iter()
        .position(|n| n == 2)
        .unwrap();
    let skip: usize = numbers(&data["operations"]["parts"])[..first]
        .iter()
        .map(|n| *n as usize)
        .sum();
    assert_eq!(numbers(&data["parts"]["call"])[skip..skip + 2], [-1, 0]);
    assert_eq!(numbers(&data["parts"]["start"])[skip..skip + 2], [5, 0]);
    assert_eq!(numbers(&data["parts"]["length"])[skip..skip + 2], [500, 0]);
}

#[test]
fn a_culprit_that_was_not_seen_keeps_its_number() {
    let mut one = regular(0, 2);
    one.culprit = Some(Culprit { rank: 9, lag_ns: 0 });
    let (_, data) = written("t", &store_of(&[one]), 0);
    assert_eq!(numbers(&data["operations"]["culprit"]), [-1]);
    assert_eq!(numbers(&data["operations"]["culprit_rank"]), [9]);
    assert_eq!(
        numbers(&data["operations"]["lag"]),
        [1],
        "late by nothing is late all the same"
    );
}

#[test]
fn the_oldest_are_forgotten_and_counted() {
    let mut store = Store::new(10, usize::MAX);
    (0..25).for_each(|number| store.push(&regular(number, 2)));
    let (_, data) = written("t", &store, 0);
    assert_eq!(
        numbers(&data["operations"]["sequence"]),
        (15..25).collect::<Vec<_>>()
    );
    assert_eq!((&data["seen"], &data["dropped"]), (&25.into(), &15.into()));
    let mut store = Store::new(usize::MAX, 7);
    (0..25).for_each(|number| store.push(&regular(number, 3)));
    assert_eq!(
        store.operations().len(),
        2,
        "two of three ranks fit into seven parts"
    );
    store.push(&regular(25, 100));
    assert_eq!(
        store.operations().len(),
        1,
        "the latest is kept whatever its size"
    );
}

#[test]
fn scripts_and_style_cannot_end_their_elements() {
    for script in page::SCRIPTS {
        assert!(!script.contains("</script") && !script.contains("<!--"));
        // Names come from users.
        for unsafe_way in [
            "innerHTML",
            "outerHTML",
            "insertAdjacentHTML",
            "document.write",
            "eval(",
            "new Function",
        ] {
            assert!(!script.contains(unsafe_way), "{unsafe_way}");
        }
        for network in ["fetch(", "XMLHttpRequest", "import(", "http://", "https://"] {
            assert!(!script.contains(network), "{network}");
        }
    }
    let (text, _) = written("t", &store_of(&[]), 0);
    assert!(!text.contains("{{"), "every place of the template is filled");
    for outside in ["src=", "href=", "@import", "url("] {
        assert!(
            !text.contains(outside),
            "the page refers to something outside: {outside}"
        );
    }
}

proptest! {
    /// Whatever the names, the page has the same elements and the data gives the names back.
    #[test]
    fn names_never_become_markup(title in ".*", host in ".*", name in "(<|/|!|-|script|\\PC|\"|\\\\){0,12}") {
        let mut one = regular(0, 1);
        one.by_rank[0].host = host.as_str().into();
        one.communicator_name = name.as_str().into();
        let (text, data) = written(&title, &store_of(&[one]), 0);
        let (plain, _) = written("", &store_of(&[regular(0, 1)]), 0);
        prop_assert_eq!(text.matches('<').count(), plain.matches('<').count());
        prop_assert_eq!(&data["rows"][0]["host"], &host);
        prop_assert_eq!(&data["communicators"][0]["name"], &name);
    }
}

#[test]
fn lost_events_are_summed_over_their_latest_counts() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("page.html");
    let mut exporter = HtmlExporter::create(&path, "t").unwrap();
    let metric = |host: &'static str, kind, count| Metric {
        resource: Arc::new(Resource {
            attributes: vec![("host.name", Value::Static(host))],
        }),
        name: "ccl.probe.lost",
        description: "",
        unit: "{event}",
        attributes: vec![("kind", Value::Static(kind))],
        start_unix_ns: T0,
        unix_ns: T0,
        data: MetricData::Counter(count),
    };
    for metrics in [
        vec![metric("a", "step", 3)],
        vec![metric("a", "step", 5), metric("a", "op", 1), metric("b", "op", 2)],
    ] {
        exporter.export(&Batch {
            metrics,
            ..Batch::default()
        });
    }
    exporter.shutdown(Duration::ZERO).unwrap();
    assert!(fs::read_to_string(&path).unwrap().contains("\"lost\":8,"));
}

#[test]
fn the_ranks_that_are_late_in_every_step_stand_first() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("page.html");
    let mut exporter = HtmlExporter::create(&path, "t").unwrap();
    let straggler = |rank, chronic, share| Straggler {
        communicator: 7,
        communicator_name: "dp".into(),
        rank,
        place: None,
        ranks: 3,
        chronic,
        operations: 100,
        last: 90,
        median_ns: 8_000_000,
        p99_ns: 9_000_000,
        lost_ns: 1,
        share,
        window_ns: 2,
        chance: 0.0,
    };
    for share in [0.1, 0.27] {
        exporter.export(&Batch {
            stragglers: vec![
                straggler(0, false, 0.5),
                straggler(1, false, 0.6),
                straggler(2, true, share),
            ],
            ..Batch::default()
        });
    }
    exporter.shutdown(Duration::ZERO).unwrap();
    let page = fs::read_to_string(&path).unwrap();
    let (_, rows) = page.split_once("\"stragglers\":").unwrap();
    let mut rows = serde_json::Deserializer::from_str(rows).into_iter::<serde_json::Value>();
    let rows = rows.next().unwrap().unwrap();
    let seen: Vec<_> = rows
        .as_array()
        .unwrap()
        .iter()
        .map(|row| row["rank"].clone())
        .collect();
    assert_eq!(seen, [2, 1, 0]);
    assert_eq!(
        (&rows[0]["share"], &rows[0]["communicator"]),
        (&0.27.into(), &"dp".into())
    );
}

#[test]
fn a_page_is_there_from_the_start_and_final_at_the_end() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("page.html");
    fs::write(&path, "an older file").unwrap();
    let mut exporter = HtmlExporter::create(&path, "t").unwrap();
    assert!(fs::read_to_string(&path).unwrap().contains("\"final\":false"));
    exporter.export(&batch(vec![regular(0, 2)]));
    exporter.shutdown(Duration::ZERO).unwrap();
    let page = fs::read_to_string(&path).unwrap();
    assert!(page.contains("\"final\":true") && page.contains("\"seen\":1,"));
    exporter.export(&batch(vec![regular(1, 2)]));
    exporter.shutdown(Duration::ZERO).unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), page, "closed is closed");
    assert_eq!(
        fs::read_dir(directory.path()).unwrap().count(),
        1,
        "no file is left beside it"
    );
}

#[test]
fn a_long_recording_is_rewritten_on_the_way() {
    let directory = tempfile::tempdir().unwrap();
    let path = directory.path().join("page.html");
    let mut exporter = HtmlExporter::create(&path, "t").unwrap();
    exporter.export(&batch(vec![regular(0, 2)]));
    assert!(
        fs::read_to_string(&path).unwrap().contains("\"seen\":0,"),
        "not for every batch"
    );
    exporter.written_at -= REWRITE;
    exporter.export(&Batch::default());
    let page = fs::read_to_string(&path).unwrap();
    assert!(page.contains("\"seen\":1,") && page.contains("\"final\":false"));
}

#[test]
fn places_that_cannot_hold_a_page_are_named() {
    let error = HtmlExporter::create("/dev/full", "t").err().unwrap();
    assert_eq!(error, "cannot write page /dev/full: it is not a regular file");
    let error = HtmlExporter::create("/nonexistent/page.html", "t").err().unwrap();
    assert!(
        error.contains("/nonexistent/page.html") && error.contains("No such file"),
        "{error}"
    );
}

#[test]
fn ten_thousand_operations_make_a_small_page() {
    let mut store = Store::new(DEFAULT_OPERATIONS, DEFAULT_PARTS);
    (0..10_000).for_each(|number| store.push(&regular(number, 8)));
    let mut out = Vec::new();
    let started = Instant::now();
    page::write(&mut out, "t", &store, (&[], &[]), 0, true).unwrap();
    println!(
        "10,000 operations of 8 ranks: {:.2} MB in {:?}",
        out.len() as f64 / 1e6,
        started.elapsed()
    );
    assert!(out.len() < 4_000_000, "{} bytes", out.len());
}
