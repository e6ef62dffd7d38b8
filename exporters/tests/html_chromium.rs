//! The page in a real browser: what it shows of jobs whose truth is known.
//!
//! Set `RINGSIGHT_PAGE_DIR` to keep the pages and look at them.

#![allow(clippy::disallowed_methods, reason = "tests play whoever else writes there")]

mod html_job;
#[path = "../../tests/src/skip.rs"]
mod skip;

use std::{path::PathBuf, process::Command, time::Duration};

use html_job::{Job, waited_for};
use ringsight_exporters::{
    html::HtmlExporter,
    model::{Batch, Exporter, Operation, PeerWait, Unnamed},
};

/// `RINGSIGHT_CHROMIUM`, which `cargo xtask test` sets, else Debian's.
fn browser() -> PathBuf {
    std::env::var_os("RINGSIGHT_CHROMIUM").map_or_else(|| "/usr/bin/chromium".into(), PathBuf::from)
}

/// A page on disk and the browser's directory.
struct Page {
    directory: tempfile::TempDir,
    path: PathBuf,
}

/// `None`, said aloud, where there is no browser.
fn page(name: &str, title: &str, operations: &[Operation]) -> Option<Page> {
    let browser = browser();
    if !browser.exists() {
        skip::skip(name, &format!("no browser at {}", browser.display()));
        return None;
    }
    let directory = tempfile::tempdir().expect("a temporary directory");
    let kept = std::env::var_os("RINGSIGHT_PAGE_DIR").map(PathBuf::from);
    let path = kept
        .unwrap_or_else(|| directory.path().to_owned())
        .join(format!("{name}.html"));
    let mut exporter = HtmlExporter::create(&path, title).expect("the page can be created");
    for chunk in operations.chunks(97) {
        exporter.export(&Batch {
            operations: chunk.to_vec(),
            ..Batch::default()
        });
    }
    exporter
        .shutdown(Duration::from_secs(10))
        .expect("the page can be written");
    Some(Page { directory, path })
}

impl Page {
    /// The document as the browser has it after its script ran, opened at `#fragment`. Time is virtual and stands still while
    /// the script runs: what the script measures is nothing.
    fn document(&self, fragment: &str) -> Document {
        self.dumped(fragment, &["--virtual-time-budget=4000"])
    }

    /// The same by the real clock, as of when the page has loaded.
    fn document_in_real_time(&self) -> Document {
        self.dumped("", &[])
    }

    fn dumped(&self, fragment: &str, options: &[&str]) -> Document {
        let output = Command::new(browser())
            .args([
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--disable-quic",
                "--no-first-run",
            ])
            .args([
                "--disable-background-networking",
                "--disable-component-update",
                "--disable-sync",
            ])
            .args(["--window-size=1600,1200", "--dump-dom"])
            .args(options)
            .arg(format!(
                "--user-data-dir={}",
                self.directory.path().join("profile").display()
            ))
            .arg(format!("file://{}#{fragment}", self.path.display()))
            .output()
            .expect("chromium starts");
        let text = String::from_utf8(output.stdout).expect("the document is UTF-8");
        let document = Document(text);
        assert!(
            document.data("ready") == Some("1") && document.data("error").is_none(),
            "the script failed: {:?}\n{}",
            document.data("error"),
            String::from_utf8_lossy(&output.stderr)
        );
        document
    }
}

/// A dumped document.
struct Document(String);

impl Document {
    /// `data-name` of the root element.
    fn data(&self, name: &str) -> Option<&str> {
        let root = self.0.split_once("<html")?.1.split_once('>')?.0;
        let value = root.split_once(&format!("data-{name}=\""))?.1;
        Some(value.split_once('"')?.0)
    }

    fn number(&self, name: &str) -> f64 {
        self.data(name)
            .and_then(|text| text.parse().ok())
            .unwrap_or_else(|| panic!("no number data-{name}"))
    }

    /// The inside of the first element that has `mark` in its start tag, to its end tag `</tag>`.
    fn inside(&self, mark: &str, tag: &str) -> &str {
        let at = self
            .0
            .find(mark)
            .unwrap_or_else(|| panic!("no element with {mark}"));
        let body = self.0[at..].split_once('>').expect("the tag ends").1;
        body.split_once(&format!("</{tag}>")).expect("the element ends").0
    }

    /// Rows of the operation table that are in the document.
    fn table_rows(&self) -> Vec<&str> {
        let body = self.inside("id=\"operations\"", "table");
        body.split("<tr")
            .skip(1)
            .filter(|row| row.contains("data-op="))
            .collect()
    }
}

/// The text between tags.
fn text(html: &str) -> String {
    let mut inside = true;
    let kept: String = html
        .chars()
        .filter(|c| {
            let keep = inside && *c != '<';
            inside = if *c == '<' { false } else { inside || *c == '>' };
            keep
        })
        .collect();
    kept.replace("&gt;", ">")
        .replace("&lt;", "<")
        .replace("&amp;", "&")
}

fn hex(operation: &Operation) -> String {
    format!("{:032x}", u128::from_be_bytes(operation.trace_id))
}

fn large() -> Job {
    Job {
        ranks: 8,
        ranks_per_host: 4,
        operations: 10_000,
        late: vec![(5, 4_203, 31, 42_000_000), (2, 777, 1511, 21_000_000)],
    }
}

#[test]
fn ten_thousand_operations_with_their_culprits() {
    let operations = large().run();
    let Some(page) = page("large", "gpt-13b pretraining · run 418", &operations) else {
        return;
    };
    let document = page.document("");

    assert_eq!(document.number("operations"), 10_000.0);
    assert_eq!(document.number("parts"), 80_000.0);
    assert_eq!(document.number("shown"), 10_000.0);
    assert_eq!(document.number("culprits"), 2.0);
    for (fact, value) in [
        ("operations", "10,000"),
        ("ranks", "8"),
        ("hosts", "2"),
        ("communicators", "2"),
        ("lost", "0"),
    ] {
        let shown = text(document.inside(&format!("data-fact=\"{fact}\""), "div"));
        assert!(shown.ends_with(value), "{fact}: {shown}");
    }

    let late = |rank| {
        operations
            .iter()
            .filter(move |o| o.culprit.as_ref().is_some_and(|c| c.rank == rank))
    };
    let verdict = text(document.inside("id=\"verdict-line\"", "h2"));
    assert!(
        verdict.starts_with(&format!(
            "Rank 5 on node-01 was late in {} operations;",
            late(5).count()
        )),
        "{verdict}"
    );
    let culprits = document.inside("id=\"culprits\"", "table");
    let rows: Vec<_> = culprits
        .split("<tr")
        .filter(|row| row.contains("data-rank="))
        .collect();
    assert_eq!(rows.len(), 2);
    for (row, rank) in rows.iter().zip([5, 2]) {
        let worst = late(rank)
            .filter_map(|o| o.culprit.as_ref())
            .map(|c| c.lag_ns)
            .max()
            .unwrap();
        for (name, value) in [
            ("rank", u64::from(rank)),
            ("operations", late(rank).count() as u64),
            ("waited", waited_for(&operations, rank)),
            ("worst", worst),
        ] {
            assert!(
                row.contains(&format!("data-{name}=\"{value}\"")),
                "rank {rank}: {name} is not {value}: {row}"
            );
        }
    }
    // Sorted by what the wait cost: the first row is a late operation; and only rows in sight are in the document.
    let table = document.table_rows();
    assert!(
        (10..80).contains(&table.len()),
        "{} rows in the document",
        table.len()
    );
    assert!(text(table[0]).contains("rank 5"), "{}", text(table[0]));
    assert!(document.0.contains("aria-rowcount=\"10001\""));
}

/// The longest that the page may take until it is drawn, that a search may, and a frame with up to 10,000 operations in sight;
/// milliseconds. Several times what they take: the tests' machine does other things, too.
const FIRST_MS: f64 = 4_000.0;
const SEARCH_MS: f64 = 1_000.0;
const FRAME_MS: f64 = 150.0;

/// Searches and zooms in the page, as by hand, and leaves what either took in the median, from the event until all was drawn.
const TIMES: &str = include_str!("html_times.js");

#[test]
fn ten_thousand_operations_answer_at_once() {
    let operations = large().run();
    let Some(page) = page("times", "times", &operations) else {
        return;
    };
    let text = std::fs::read_to_string(&page.path).expect("the page");
    let timed = text
        .replacen(
            "<head>",
            "<head><script>const frames = []; requestAnimationFrame = (f) => frames.push(f);</script>",
            1,
        )
        .replace("</body>", &format!("<script>{TIMES}</script></body>"));
    std::fs::write(&page.path, timed).expect("the page can be rewritten");
    let document = page.document_in_real_time();
    let (first, frame) = (document.number("render-ms"), document.number("frame-ms"));
    let (search, zoom) = (document.number("search-ms"), document.number("zoom-ms"));
    println!(
        "10,000 operations of 8 ranks: first drawing {first} ms, a frame {frame} ms, a search {search} ms, a zoom {zoom} ms"
    );
    assert!(first > 0.0 && search > 0.0 && zoom > 0.0, "the clock stood still");
    assert!(first < FIRST_MS, "the first drawing took {first} ms");
    // What was timed was done: the last search shows what it asks for, the zoom what is in sight.
    let asked = operations
        .iter()
        .filter(|o| o.culprit.as_ref().is_some_and(|c| c.rank == 5))
        .count();
    assert_eq!(document.number("found"), asked as f64);
    assert!(document.number("zoomed") > 1.0);
    assert!(search < SEARCH_MS, "a search takes {search} ms");
    assert!(zoom < FRAME_MS, "a zoom takes {zoom} ms");
}

#[test]
fn search_selection_and_zoom_come_from_the_address() {
    let operations = large().run();
    let Some(page) = page("address", "address", &operations) else {
        return;
    };
    let chosen = operations
        .iter()
        .find(|o| o.culprit.as_ref().is_some_and(|c| c.rank == 2))
        .unwrap();
    let count = |test: &dyn Fn(&Operation) -> bool| operations.iter().filter(|o| test(o)).count() as f64;

    let document = page.document(&format!("q=late%20culprit:2&sel={}", hex(chosen)));
    assert_eq!(
        document.number("shown"),
        count(&|o| o.culprit.as_ref().is_some_and(|c| c.rank == 2))
    );
    assert_eq!(document.data("selected"), Some(&*hex(chosen)));
    assert_eq!(document.inside("id=\"trace-id\"", "code"), hex(chosen));
    let details = text(document.inside("id=\"details\"", "aside"));
    let lag = chosen.culprit.as_ref().unwrap().lag_ns as f64 / 1e6;
    assert!(
        details.contains(&format!("rank 2 arrived {lag:.1} ms late")),
        "{details}"
    );
    assert!(details.contains("the time was lost before the call"), "{details}");
    let first = chosen.by_rank.iter().map(|p| p.device_start_ns).min().unwrap();
    assert!(
        document
            .table_rows()
            .iter()
            .any(|row| row.contains("aria-selected=\"true\"") && row.contains(&hex(chosen)))
    );
    let start = operations
        .iter()
        .flat_map(|o| &o.by_rank)
        .map(|p| p.api_start_ns)
        .min()
        .unwrap();
    let shown = document.number("from")..document.number("to");
    assert!(
        shown.contains(&((first - start) as f64)) && shown.end - shown.start < 200e6,
        "zoomed to it: {shown:?}"
    );

    for (query, expected) in [
        ("q=all_gather", count(&|o| o.name == "all_gather")),
        ("q=tensor%20-all_gather", count(&|o| o.name == "reduce_scatter")),
        ("q=seq:17", count(&|o| o.sequence == 17)),
        ("q=comm:data%20size%3E20MiB", count(&|o| o.bytes == 25 << 20)),
        (
            "q=lag%3E30ms",
            count(&|o| o.culprit.as_ref().is_some_and(|c| c.lag_ns > 30_000_000)),
        ),
        ("q=rank:9", 0.0),
        ("q=incomplete", count(&|o| !o.complete)),
        (
            "late=1&hide=all_reduce,broadcast",
            count(&|o| o.culprit.is_some() && o.name != "all_reduce" && o.name != "broadcast"),
        ),
    ] {
        assert_eq!(page.document(query).number("shown"), expected, "{query}");
    }
    let document = page.document("sort=-seq");
    assert!(
        text(document.table_rows()[0])
            .contains(&operations.iter().map(|o| o.sequence).max().unwrap().to_string())
    );
    let document = page.document("q=lag%3Efast&t=1000000-3000000&sort=nonsense");
    assert_eq!((document.number("from"), document.number("to")), (1e6, 3e6));
    assert!(text(document.inside("id=\"query-help\"", "p")).starts_with("“lag>fast” is not understood."));
}

/// What a person does, as events in the page; the first thing that does not follow is named.
const DRIVER: &str = include_str!("html_driver.js");

#[test]
fn mouse_and_keys_do_what_they_say() {
    let Some(page) = page("driven", "driven", &large().run()) else {
        return;
    };
    let text = std::fs::read_to_string(&page.path).expect("the page");
    let driven = text.replace("</body>", &format!("<script>{DRIVER}</script></body>"));
    std::fs::write(&page.path, driven).expect("the page can be rewritten");
    assert_eq!(page.document("").data("driven"), Some("ok"));
}

#[test]
fn hostile_names_stay_text() {
    let hostile = "</script><img src=x onerror=\"document.documentElement.dataset.error='run'\">&amp;<!--<script>\u{2028}";
    let mut operations = Job {
        ranks: 2,
        ranks_per_host: 1,
        operations: 9,
        late: vec![(1, 2, 3, 9_000_000)],
    }
    .run();
    for operation in &mut operations {
        operation.communicator_name = hostile.into();
        operation
            .by_rank
            .iter_mut()
            .for_each(|part| part.host = hostile.into());
    }
    let Some(page) = page("hostile", hostile, &operations) else {
        return;
    };
    let document = page.document(&format!("sel={}", hex(&operations[2])));
    assert_eq!(document.number("operations"), 9.0);
    assert!(!document.0.contains("<img"), "a name became an element");
    assert!(
        document
            .inside("id=\"title\"", "h1")
            .contains("&lt;/script&gt;&lt;img"),
        "the title is shown as it is"
    );
    assert!(text(document.inside("id=\"details\"", "aside")).contains("</script><img"));
}

#[test]
fn nothing_recorded_and_nobody_late_are_said_plainly() {
    let Some(empty) = page("empty", "empty", &[]) else {
        return;
    };
    let document = empty.document("sel=00&q=late&t=5-1");
    assert_eq!(document.number("operations"), 0.0);
    assert_eq!(
        text(document.inside("id=\"verdict-line\"", "h2")),
        "No operation has finished yet"
    );

    let operations = Job {
        ranks: 4,
        ranks_per_host: 2,
        operations: 200,
        late: Vec::new(),
    }
    .run();
    let Some(calm) = page("calm", "calm", &operations) else {
        return;
    };
    let document = calm.document("");
    assert_eq!(
        text(document.inside("id=\"verdict-line\"", "h2")),
        "No rank was late"
    );
    assert!(
        document
            .inside("id=\"culprits\"", "table")
            .split("<tr")
            .all(|row| !row.contains("data-rank="))
    );

    let mut blind = operations;
    let wait = PeerWait {
        rank: 1,
        peer: 9,
        wait_ns: 30_000_000,
    };
    blind[7].unnamed = Some(Unnamed { wait: Some(wait) });
    let Some(blind) = page("blind", "blind", &blind) else {
        return;
    };
    let document = blind.document("");
    assert_eq!(
        text(document.inside("id=\"verdict-line\"", "h2")),
        "A rank may have been late, and nobody can say which"
    );
    let more = text(document.inside("id=\"verdict-more\"", "p"));
    assert!(
        more.ends_with(
            "Rank 1 waited 30.0 ms for rank 9, which is not watched here and may have waited itself."
        ),
        "{more}"
    );
}

#[test]
fn a_small_job_with_one_slow_rank() {
    let late = vec![(3, 60, 17, 51_000_000)];
    let operations = Job {
        ranks: 4,
        ranks_per_host: 2,
        operations: 200,
        late,
    }
    .run();
    let Some(page) = page("small", "demo · 4 ranks · 200 operations", &operations) else {
        return;
    };
    let document = page.document("q=culprit:3");
    assert_eq!(
        document.number("shown"),
        operations.iter().filter(|o| o.culprit.is_some()).count() as f64
    );
    assert!(
        text(document.inside("id=\"verdict-line\"", "h2"))
            .starts_with("Rank 3 on node-01 was late in 9 operations")
    );
}
