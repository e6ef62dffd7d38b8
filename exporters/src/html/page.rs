//! The page's text: the template with style, script and data put in.
//!
//! The data is one JSON object of columns, about 20 bytes for each rank's part of an operation. Times are nanoseconds
//! after `t0`; operations stand in order of their start, each start after the previous one's.

use std::{
    collections::HashMap,
    io::{self, Write},
    time::SystemTime,
};

use ringsight_output::JsonWriter;

use super::store::Store;
use crate::{
    model::{Finding, Operation, OperationRank, Straggler},
    ranks::Ranks,
};

const TEMPLATE: &str = include_str!("../../assets/page.html");
const STYLE: &str = include_str!("../../assets/page.css");
/// In the order in which they are put into one script.
pub(super) const SCRIPTS: [&str; 8] = [
    include_str!("../../assets/page/data.js"),
    include_str!("../../assets/page/state.js"),
    include_str!("../../assets/page/timeline.js"),
    include_str!("../../assets/page/pointer.js"),
    include_str!("../../assets/page/table.js"),
    include_str!("../../assets/page/details.js"),
    include_str!("../../assets/page/summary.js"),
    include_str!("../../assets/page/main.js"),
];

/// What the script does when it fails: says so, to people and to tests.
const GUARD: &str = "addEventListener('error',e=>{document.documentElement.dataset.error=e.message;\
    const f=document.getElementById('failure');f.hidden=false;f.textContent='This page failed: '+e.message;});";

/// Writes the page of what `store` holds, with what is `wrong` with operations and ranks. `lost` is how many events were lost, `last` whether the recording is over.
pub(super) fn write(
    out: &mut impl Write,
    title: &str,
    store: &Store,
    wrong: (&[Finding], &[Straggler]),
    lost: u64,
    last: bool,
) -> io::Result<()> {
    let mut rest = TEMPLATE;
    while let Some((before, after)) = rest.split_once("{{") {
        let (name, after) = after.split_once("}}").unwrap_or((after, ""));
        out.write_all(before.as_bytes())?;
        match name {
            "TITLE" => escape(out, title)?,
            "STYLE" => out.write_all(STYLE.as_bytes())?,
            "DATA" => data(&mut InScript(&mut *out), store, wrong, lost, last)?,
            "SCRIPT" => {
                write!(out, "\"use strict\";\n{GUARD}\n(() => {{\n")?;
                SCRIPTS
                    .iter()
                    .try_for_each(|script| out.write_all(script.as_bytes()))?;
                out.write_all(b"})();\n")?;
            }
            other => unreachable!("the template names {other}"),
        }
        rest = after;
    }
    out.write_all(rest.as_bytes())
}

/// Text as HTML text.
fn escape(out: &mut impl Write, text: &str) -> io::Result<()> {
    for c in text.chars() {
        match c {
            '&' => out.write_all(b"&amp;")?,
            '<' => out.write_all(b"&lt;")?,
            '>' => out.write_all(b"&gt;")?,
            other => write!(out, "{other}")?,
        }
    }
    Ok(())
}

/// Writes JSON into a script element: `<` occurs in its strings alone, where `\u003c` means the same, and without it
/// nothing can end the element (`</script`) or change how it is read (`<!--`). What a terminal would obey is escaped, too.
struct InScript<'a, W>(&'a mut W);

impl<W: Write> Write for InScript<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        for (index, piece) in bytes.split(|byte| *byte == b'<').enumerate() {
            if index > 0 {
                self.0.write_all(b"\\u003c")?;
            }
            JsonWriter(&mut *self.0).write_all(piece)?;
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

/// A rank's times with gaps filled: an unseen arrival is the call, an unseen end the arrival.
struct Times {
    call: Option<u64>,
    start: u64,
    end: u64,
}

impl Times {
    fn of(part: &OperationRank) -> Self {
        let call = Some(part.api_start_ns).filter(|ns| *ns != 0);
        let start = if part.device_start_ns != 0 {
            part.device_start_ns
        } else {
            part.api_start_ns
        };
        Self {
            call,
            start,
            end: part.device_end_ns.max(start),
        }
    }

    fn earliest(&self) -> u64 {
        self.call.map_or(self.start, |call| call.min(self.start))
    }
}

fn start_of(operation: &Operation) -> u64 {
    let starts = operation.by_rank.iter().map(|part| Times::of(part).earliest());
    starts.filter(|ns| *ns != 0).min().unwrap_or(0)
}

/// Values of one kind, numbered by first use.
struct Numbered<T> {
    numbers: HashMap<T, usize>,
    values: Vec<T>,
}

impl<T: Clone + Eq + std::hash::Hash> Numbered<T> {
    fn of(all: impl Iterator<Item = T>) -> Self {
        let mut numbered = Self {
            numbers: HashMap::new(),
            values: Vec::new(),
        };
        for value in all {
            if !numbered.numbers.contains_key(&value) {
                numbered.numbers.insert(value.clone(), numbered.values.len());
                numbered.values.push(value);
            }
        }
        numbered
    }
}

/// Rows of the page: who is one rank.
struct Rows<'a> {
    /// Rank as labelled, host, process.
    rows: Vec<(u32, &'a str, u32)>,
    numbers: HashMap<(&'a str, u32, Option<u32>), usize>,
    shared: HashMap<(&'a str, u32), bool>,
}

impl<'a> Rows<'a> {
    /// A process is a row, labelled with its rank in the largest communicator. Only where ranks are threads of one
    /// process (two parts of one operation name it) does a row stand for a process and a rank.
    fn of(operations: &[&'a Operation]) -> Self {
        let mut shared = HashMap::new();
        let mut label: HashMap<(&str, u32, Option<u32>), (u32, u32)> = HashMap::new();
        for operation in operations {
            let mut here = HashMap::new();
            for part in &operation.by_rank {
                *here.entry((&*part.host, part.pid)).or_insert(0) += 1;
            }
            for (process, ranks) in here {
                *shared.entry(process).or_insert(false) |= ranks > 1;
            }
        }
        for operation in operations {
            for part in &operation.by_rank {
                let best = label
                    .entry(Self::key(&shared, part))
                    .or_insert((operation.ranks, part.rank));
                if operation.ranks > best.0 {
                    *best = (operation.ranks, part.rank);
                }
            }
        }
        let mut rows: Vec<_> = label.into_iter().map(|(key, (_, rank))| (rank, key)).collect();
        rows.sort_unstable();
        let numbers = rows
            .iter()
            .enumerate()
            .map(|(number, (_, key))| (*key, number))
            .collect();
        Self {
            rows: rows
                .into_iter()
                .map(|(rank, (host, pid, _))| (rank, host, pid))
                .collect(),
            numbers,
            shared,
        }
    }

    fn key<'b>(shared: &HashMap<(&str, u32), bool>, part: &'b OperationRank) -> (&'b str, u32, Option<u32>) {
        let threads = shared.get(&(&*part.host, part.pid)).copied().unwrap_or(false);
        (&part.host, part.pid, threads.then_some(part.rank))
    }

    fn number(&self, part: &OperationRank) -> usize {
        self.numbers[&Self::key(&self.shared, part)]
    }
}

/// Writes `"name":[…]` of one number for each item.
fn column<T, D: std::fmt::Display>(
    out: &mut impl Write,
    name: &str,
    items: impl Iterator<Item = T>,
    value: impl Fn(T) -> D,
) -> io::Result<()> {
    write!(out, "\"{name}\":[")?;
    for (index, item) in items.enumerate() {
        if index > 0 {
            out.write_all(b",")?;
        }
        write!(out, "{}", value(item))?;
    }
    out.write_all(b"],")
}

fn list(out: &mut impl Write, name: &str, items: &[&str]) -> io::Result<()> {
    write!(out, "\"{name}\":")?;
    serde_json::to_writer(&mut *out, items)?;
    out.write_all(b",")
}

fn data(
    out: &mut impl Write,
    store: &Store,
    (findings, stragglers): (&[Finding], &[Straggler]),
    lost: u64,
    last: bool,
) -> io::Result<()> {
    let mut operations: Vec<_> = store.operations().collect();
    operations.sort_by_cached_key(|operation| start_of(operation));
    let ops = || operations.iter().copied();
    // A job that hangs from the beginning has no operation that finished.
    let first_finding = findings
        .iter()
        .map(|finding| finding.first_unix_ns.saturating_sub(finding.waited_ns));
    let t0 = ops()
        .map(start_of)
        .find(|ns| *ns != 0)
        .or_else(|| first_finding.min())
        .unwrap_or(0);
    let starts: Vec<u64> = ops().map(|operation| start_of(operation).max(t0)).collect();

    let names = Numbered::of(ops().map(|operation| operation.name));
    let types = Numbered::of(ops().map(|operation| operation.data_type));
    let algorithms = Numbered::of(ops().map(|operation| operation.algorithm));
    let key = |operation: &Operation| (operation.communicator, operation.ranks);
    let communicators = Numbered::of(ops().map(key));
    let mut communicator_names = HashMap::new();
    for operation in ops() {
        communicator_names
            .entry(key(operation))
            .or_insert(&*operation.communicator_name);
    }
    let rows = Rows::of(&operations);

    out.write_all(b"{\"rows\":[")?;
    for (index, (rank, host, pid)) in rows.rows.iter().enumerate() {
        let comma = if index > 0 { "," } else { "" };
        write!(out, "{comma}{{\"rank\":{rank},\"pid\":{pid},\"host\":")?;
        serde_json::to_writer(&mut *out, host)?;
        out.write_all(b"}")?;
    }
    out.write_all(b"],\"communicators\":[")?;
    for (index, value) in communicators.values.iter().enumerate() {
        let comma = if index > 0 { "," } else { "" };
        write!(
            out,
            "{comma}{{\"id\":\"{:016x}\",\"ranks\":{},\"name\":",
            value.0, value.1
        )?;
        serde_json::to_writer(&mut *out, communicator_names[value])?;
        out.write_all(b"}")?;
    }
    out.write_all(b"],")?;
    list(out, "names", &names.values)?;
    list(out, "data_types", &types.values)?;
    list(out, "algorithms", &algorithms.values)?;

    out.write_all(b"\"operations\":{")?;
    column(out, "start", 0..starts.len(), |i| {
        starts[i] - if i > 0 { starts[i - 1] } else { t0 }
    })?;
    column(out, "parts", ops(), |operation| operation.by_rank.len())?;
    column(out, "name", ops(), |operation| names.numbers[operation.name])?;
    column(out, "communicator", ops(), |operation| {
        communicators.numbers[&key(operation)]
    })?;
    column(out, "sequence", ops(), |operation| operation.sequence)?;
    column(out, "replay", ops(), |operation| operation.replay)?;
    column(out, "bytes", ops(), |operation| operation.bytes)?;
    column(out, "data_type", ops(), |operation| {
        types.numbers[operation.data_type]
    })?;
    column(out, "algorithm", ops(), |operation| {
        algorithms.numbers[operation.algorithm]
    })?;
    column(out, "culprit", ops(), |operation| {
        let late = operation.culprit.as_ref();
        let part = late.and_then(|late| operation.by_rank.iter().find(|part| part.rank == late.rank));
        part.map_or(-1, |part| rows.number(part) as i64)
    })?;
    column(out, "culprit_rank", ops(), |operation| {
        operation.culprit.as_ref().map_or(-1, |late| i64::from(late.rank))
    })?;
    column(out, "lag", ops(), |operation| {
        operation.culprit.as_ref().map_or(0, |late| late.lag_ns.max(1))
    })?;
    column(
        out,
        "incomplete",
        ops().enumerate().filter(|(_, operation)| !operation.complete),
        |(index, _)| index,
    )?;
    // Index and time after the operation's start, for those in which ranks waited for one that watchdogs named.
    let waited = ops().zip(&starts).enumerate();
    let waited = waited.filter(|(_, (operation, _))| operation.waited_until_ns != 0);
    column(out, "waited_until", waited, |(index, (operation, start))| {
        format!("[{index},{}]", operation.waited_until_ns.saturating_sub(*start))
    })?;
    // Index; rank that waited, rank that it waited for, and how long, or -1 where that is not known.
    let unnamed = ops()
        .enumerate()
        .filter_map(|(index, operation)| Some((index, operation.unnamed?)));
    column(out, "unnamed", unnamed, |(index, unnamed)| match unnamed.wait {
        Some(wait) => format!("[{index},{},{},{}]", wait.rank, wait.peer, wait.wait_ns),
        None => format!("[{index},-1,-1,0]"),
    })?;
    out.write_all(b"\"trace\":\"")?;
    for operation in ops() {
        write!(out, "{:032x}", u128::from_be_bytes(operation.trace_id))?;
    }
    out.write_all(b"\"},\"parts\":{")?;

    let parts = || {
        ops().zip(starts.iter().copied()).flat_map(|(operation, start)| {
            operation
                .by_rank
                .iter()
                .map(move |part| (part, Times::of(part), start))
        })
    };
    let numbers: Vec<usize> = parts().map(|(part, ..)| rows.number(part)).collect();
    if parts()
        .zip(&numbers)
        .any(|((part, ..), number)| part.rank != rows.rows[*number].0)
    {
        column(out, "rank", parts(), |(part, ..)| part.rank)?;
    }
    column(out, "row", numbers.iter(), |number| number)?;
    let call = |times: &Times, start: u64| times.call.map_or(-1, |call| (call.max(start) - start) as i64);
    column(out, "call", parts(), |(_, times, start)| call(&times, start))?;
    column(out, "start", parts(), |(_, times, start)| {
        times.start.max(start) - start
    })?;
    write!(out, "\"length\":[")?;
    for (index, (_, times, _)) in parts().enumerate() {
        let comma = if index > 0 { "," } else { "" };
        write!(out, "{comma}{}", times.end - times.start)?;
    }

    out.write_all(b"]},\"findings\":[")?;
    for (index, finding) in findings.iter().enumerate() {
        if index > 0 {
            out.write_all(b",")?;
        }
        let place = finding.culprit_place.as_ref();
        let value = serde_json::json!({
            "trace": format!("{:032x}", u128::from_be_bytes(finding.trace_id)),
            "state": finding.state(),
            "operation": finding.operation_words(),
            "communicator": match &*finding.communicator_name {
                "" => format!("{:016x}", finding.communicator),
                name => name.to_owned(),
            },
            "cause": finding.cause,
            "culprit": finding.culprit,
            "pid": place.map(|place| place.pid),
            "host": place.map(|place| &*place.host),
            "waiting": finding.waiting.iter().copied().collect::<Ranks>().to_string(),
            "waited": finding.waited_ns,
            "text": finding.text,
            "next": finding.next_step,
        });
        serde_json::to_writer(&mut *out, &value)?;
    }

    out.write_all(b"],\"stragglers\":[")?;
    for (index, straggler) in stragglers.iter().enumerate() {
        if index > 0 {
            out.write_all(b",")?;
        }
        let place = straggler.place.as_ref();
        let value = serde_json::json!({
            "rank": straggler.rank,
            "communicator": straggler.communicator_words(),
            "pid": place.map(|place| place.pid),
            "host": place.map(|place| &*place.host),
            "chronic": straggler.chronic,
            "operations": straggler.operations,
            "last": straggler.last,
            "median": straggler.median_ns,
            "p99": straggler.p99_ns,
            "lost": straggler.lost_ns,
            "share": straggler.share,
        });
        serde_json::to_writer(&mut *out, &value)?;
    }

    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .map_or(0, |since| since.as_secs());
    write!(
        out,
        "],\"t0\":\"{t0}\",\"seen\":{},\"dropped\":{},\"lost\":{lost},\"final\":{last},\"written\":{now},\"version\":\"{}\"}}",
        store.seen(),
        store.seen() - operations.len() as u64,
        env!("CARGO_PKG_VERSION")
    )
}
