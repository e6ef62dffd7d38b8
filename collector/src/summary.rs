//! What a run came to: the JSON of `--summary` and the table at the end.

use std::collections::BTreeMap;

use ringsight_exporters::model::{
    ExportStats, Finding, Operation, PeerWait, Signal, Straggler, Tally, TraceId,
};
use ringsight_records::Kind;
use rustc_hash::FxHashMap;
use serde::{Serialize, Serializer};

use crate::{
    correlate::{Counts, communicators::Owner},
    identity::Role,
    limits::{LeftOut, Limit},
    metrics::Readings,
    spans::{SpanCounts, timing_source_of},
};

/// Ranks that a row of the list has; an operation of more ranks counts as several.
const RANKS_OF_A_ROW: usize = 16;
/// Rows of the table of slowest and of late operations.
const TOP: usize = 10;

/// The summary file. Times are Unix nanoseconds.
#[derive(Clone, Debug, Serialize)]
pub struct Summary {
    /// Version of this layout: 1.
    pub version: u32,
    /// Watched processes.
    pub pids: Vec<u32>,
    /// Records by kind.
    pub records: BTreeMap<&'static str, RecordCount>,
    /// Spans by what they are.
    pub spans: BTreeMap<&'static str, u64>,
    /// What watchdogs found wrong, the oldest first.
    pub verdicts: Vec<VerdictRow>,
    /// Each rank's lags over the window.
    pub stragglers: Vec<StragglerRow>,
    /// Operations, as far as they were kept.
    pub operations: Vec<OperationRow>,
    /// Operations beyond those that were kept.
    pub operations_left_out: u64,
    /// Records lost, all kinds.
    pub lost: u64,
    /// Events that happened while no collector was attached, after an earlier one, all kinds.
    pub missed: u64,
    /// Starts and ends of operations that devices overwrote before they were read: those operations have no device times.
    pub device_events_overwritten: u64,
    /// Operations still running at the end.
    pub unfinished: u64,
    /// Operations and instances that could not be completed or named, by reason.
    pub given_up: BTreeMap<&'static str, u64>,
    /// What was left out because a process had, or wrote, more than a limit allows, by limit.
    pub limits: BTreeMap<&'static str, u64>,
    /// How long was watched, seconds.
    pub duration_s: f64,
    /// How long attaching took, milliseconds.
    pub attach_ms: f64,
    /// How long detaching took, milliseconds.
    pub detach_ms: f64,
    /// Probe function calls recorded.
    pub probe_hits: u64,
    /// CPU time of the collector, seconds.
    pub cpu_s: f64,
    /// Exporters.
    pub exporters: Vec<ExporterRow>,
}

/// Records of one kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize)]
pub struct RecordCount {
    /// Came in.
    pub received: u64,
    /// Emitted by the libraries since the attach, by their own count.
    pub emitted: u64,
    /// Lost since the attach: by a carrier that says so, or emitted and never seen.
    pub lost: u64,
    /// Emitted while no collector was attached, after an earlier one, and not to be had any more.
    pub missed: u64,
}

/// One operation.
#[derive(Clone, Debug, Serialize)]
pub struct OperationRow {
    /// Name.
    pub name: &'static str,
    /// Communicator id, in the file 16 hexadecimal digits.
    #[serde(serialize_with = "as_16_digits")]
    pub communicator: u64,
    /// Sequence.
    pub sequence: u64,
    /// Replay, 0 if eager.
    pub replay: u32,
    /// Message bytes.
    pub bytes: u64,
    /// Nothing of it was lost.
    pub complete: bool,
    /// Trace id, in the file 32 hexadecimal digits.
    #[serde(serialize_with = "as_32_digits")]
    pub trace_id: TraceId,
    /// Ranks of the communicator.
    pub ranks: u32,
    /// Late rank.
    pub culprit: Option<CulpritRow>,
    /// A rank may have been late: too few ranks are watched to name it, and the library does not say who arrived last.
    pub unnamed: bool,
    /// The longest wait of a watched rank for one that is not watched here, where nobody is named.
    pub waited_for: Option<WaitRow>,
    /// Ranks that were seen.
    pub by_rank: Vec<RankRow>,
}

/// A wait for a rank that is not watched.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct WaitRow {
    /// The rank that waited.
    pub rank: u32,
    /// The rank that it waited for.
    pub peer: u32,
    /// How long, nanoseconds.
    pub wait_ns: u64,
}

impl From<PeerWait> for WaitRow {
    fn from(wait: PeerWait) -> Self {
        let PeerWait { rank, peer, wait_ns } = wait;
        Self { rank, peer, wait_ns }
    }
}

/// What is wrong with an operation that somebody waits in.
#[derive(Clone, Debug, Serialize)]
pub struct VerdictRow {
    /// Trace id of the operation, 32 hexadecimal digits.
    pub trace_id: String,
    /// Name of the operation.
    pub operation: &'static str,
    /// Communicator id, 16 hexadecimal digits.
    pub communicator: String,
    /// Communicator name, empty if it has none.
    pub communicator_name: String,
    /// Sequence.
    pub sequence: u64,
    /// Replay, 0 if eager.
    pub replay: u32,
    /// Sender and receiver of a message.
    pub pair: Option<(u32, u32)>,
    /// Why.
    pub cause: &'static str,
    /// It will not end by itself; otherwise the culprit is late.
    pub hang: bool,
    /// The rank that the others wait for.
    pub culprit: u32,
    /// Its process, if it is watched here.
    pub pid: Option<u32>,
    /// Its host, if it is watched here.
    pub host: Option<String>,
    /// Ranks whose watchdogs said so.
    pub waiting: Vec<u32>,
    /// How long the longest of them has waited.
    pub waited_ns: u64,
    /// When the first of them said so.
    pub first_unix_ns: u64,
    /// When this was so.
    pub unix_ns: u64,
    /// The operation has ended since.
    pub ended: bool,
    /// All of this in one sentence.
    pub text: String,
    /// What to do next.
    pub next_step: String,
}

impl From<Finding> for VerdictRow {
    fn from(finding: Finding) -> Self {
        let (pid, host) = finding
            .culprit_place
            .map(|place| (place.pid, place.host.to_string()))
            .unzip();
        Self {
            trace_id: format!("{:032x}", u128::from_be_bytes(finding.trace_id)),
            operation: finding.operation,
            communicator: format!("{:016x}", finding.communicator),
            communicator_name: finding.communicator_name.to_string(),
            sequence: finding.sequence,
            replay: finding.replay,
            pair: finding.pair,
            cause: finding.cause,
            hang: finding.hang,
            culprit: finding.culprit,
            pid,
            host,
            waiting: finding.waiting,
            waited_ns: finding.waited_ns,
            first_unix_ns: finding.first_unix_ns,
            unix_ns: finding.unix_ns,
            ended: finding.ended,
            text: finding.text,
            next_step: finding.next_step,
        }
    }
}

/// One rank's lags in one communicator, over the [window](crate::chronic).
#[derive(Clone, Debug, Serialize)]
pub struct StragglerRow {
    /// Communicator id, 16 hexadecimal digits.
    pub communicator: String,
    /// Communicator name, empty if it has none or is gone.
    pub communicator_name: String,
    /// Rank.
    pub rank: u32,
    /// Its process, if it is watched still.
    pub pid: Option<u32>,
    /// Its host, if it is watched still.
    pub host: Option<String>,
    /// Ranks that were compared.
    pub ranks: u32,
    /// It is late in so many operations, and loses so much time, that it is called a straggler.
    pub chronic: bool,
    /// Operations of the window.
    pub operations: u64,
    /// Operations in which it was last.
    pub last: u64,
    /// Median lag; 0 if it is negative.
    pub median_ns: u64,
    /// 99th percentile of its lags.
    pub p99_ns: u64,
    /// What the others lost by it, summed over them.
    pub lost_ns: u64,
    /// Share of the window's time by which its operations began later.
    pub share: f64,
    /// Length of the window.
    pub window_ns: u64,
    /// Probability of this if all ranks were alike.
    pub chance: f64,
}

impl From<Straggler> for StragglerRow {
    fn from(row: Straggler) -> Self {
        let (pid, host) = row.place.map(|place| (place.pid, place.host.to_string())).unzip();
        Self {
            communicator: format!("{:016x}", row.communicator),
            communicator_name: row.communicator_name.to_string(),
            rank: row.rank,
            pid,
            host,
            ranks: row.ranks,
            chronic: row.chronic,
            operations: row.operations,
            last: row.last,
            median_ns: row.median_ns,
            p99_ns: row.p99_ns,
            lost_ns: row.lost_ns,
            share: row.share,
            window_ns: row.window_ns,
            chance: row.chance,
        }
    }
}

/// A late rank.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct CulpritRow {
    /// Rank.
    pub rank: u32,
    /// Lag, nanoseconds.
    pub lag_ns: u64,
}

/// One rank's part.
#[derive(Clone, Copy, Debug, Serialize)]
pub struct RankRow {
    /// Rank.
    pub rank: u32,
    /// Process.
    pub pid: u32,
    /// API call entered; 0 for a replay.
    pub api_start_ns: u64,
    /// Began on the device.
    pub device_start_ns: u64,
    /// Finished on the device.
    pub device_end_ns: u64,
    /// Whose times these are, as `ccl.timing.source` of its span.
    pub timing_source: &'static str,
}

/// What became of the items of one signal.
#[derive(Clone, Debug, Serialize)]
pub struct TallyRow {
    /// Items delivered.
    pub delivered: u64,
    /// Items dropped, by reason.
    pub dropped: BTreeMap<&'static str, u64>,
}

impl From<&Tally> for TallyRow {
    fn from(tally: &Tally) -> Self {
        Self {
            delivered: tally.delivered,
            dropped: tally.dropped.iter().copied().collect(),
        }
    }
}

/// One exporter.
#[derive(Clone, Debug, Serialize)]
pub struct ExporterRow {
    /// Where to.
    pub target: String,
    /// Spans delivered and dropped.
    #[serde(flatten)]
    pub spans: TallyRow,
    /// Metric points delivered and dropped.
    pub metrics: TallyRow,
    /// Log records delivered and dropped.
    pub logs: TallyRow,
    /// Delivery attempts that were repeated.
    pub retries: u64,
    /// What was not delivered at the end, in words.
    pub error: Option<String>,
}

impl ExporterRow {
    /// A row from an exporter's own account.
    #[must_use]
    pub fn new(target: String, stats: &ExportStats, error: Option<String>) -> Self {
        Self {
            target,
            spans: (&stats[Signal::Traces]).into(),
            metrics: (&stats[Signal::Metrics]).into(),
            logs: (&stats[Signal::Logs]).into(),
            retries: stats.retries,
            error,
        }
    }

    /// What should have been delivered and was not: items, reason, how many. That a backend takes no metrics or no logs is
    /// as it is; without spans there is nothing.
    pub fn incomplete(&self) -> impl Iterator<Item = (&'static str, &'static str, u64)> {
        let rows = [&self.spans, &self.metrics, &self.logs];
        let dropped = Signal::ALL.into_iter().zip(rows).flat_map(|(signal, row)| {
            let each = row.dropped.iter();
            each.map(move |(reason, count)| (signal, *reason, *count))
        });
        dropped
            .filter(|(signal, reason, _)| *signal == Signal::Traces || *reason != Tally::UNSUPPORTED)
            .map(|(signal, reason, count)| (signal.items(), reason, count))
    }
}

// Rows hold numbers, not texts: there are very many.
fn as_16_digits<S: Serializer>(number: &u64, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(&format_args!("{number:016x}"))
}

fn as_32_digits<S: Serializer>(id: &TraceId, to: S) -> Result<S::Ok, S::Error> {
    to.collect_str(&format_args!("{:032x}", u128::from_be_bytes(*id)))
}

impl From<&Operation> for OperationRow {
    fn from(operation: &Operation) -> Self {
        let by_rank = operation.by_rank.iter().map(|rank| RankRow {
            rank: rank.rank,
            pid: rank.pid,
            api_start_ns: rank.api_start_ns,
            device_start_ns: rank.device_start_ns,
            device_end_ns: rank.device_end_ns,
            timing_source: timing_source_of(rank.by_device),
        });
        Self {
            name: operation.name,
            communicator: operation.communicator,
            sequence: operation.sequence,
            replay: operation.replay,
            bytes: operation.bytes,
            complete: operation.complete,
            trace_id: operation.trace_id,
            ranks: operation.ranks,
            culprit: operation.culprit.as_ref().map(|c| CulpritRow {
                rank: c.rank,
                lag_ns: c.lag_ns,
            }),
            unnamed: operation.unnamed.is_some(),
            waited_for: operation.unnamed.and_then(|unnamed| unnamed.wait).map(Into::into),
            by_rank: by_rank.collect(),
        }
    }
}

/// Records by kind, kinds of which there were none left out.
#[must_use]
pub fn records(counts: &Counts, emitted: &[u64; Kind::LIMIT]) -> BTreeMap<&'static str, RecordCount> {
    let of = |kind: &Kind| {
        let at = *kind as usize;
        (
            kind.name(),
            RecordCount {
                received: counts.received[at],
                emitted: emitted[at],
                lost: counts.lost[at],
                missed: counts.missed[at],
            },
        )
    };
    Kind::ALL
        .iter()
        .map(of)
        .filter(|(_, count)| *count != RecordCount::default())
        .collect()
}

/// What was given up, by reason; reasons of which there was none left out.
#[must_use]
pub fn given_up(readings: &Readings) -> BTreeMap<&'static str, u64> {
    readings
        .given_up_by_reason()
        .into_iter()
        .filter(|(_, count)| *count > 0)
        .collect()
}

/// Spans by what they are.
#[must_use]
pub fn spans(counts: &SpanCounts) -> BTreeMap<&'static str, u64> {
    let named = [
        ("root", Role::Root),
        ("rank", Role::Rank),
        ("enqueue", Role::Enqueue),
        ("launch", Role::Launch),
        ("kernel_channel", Role::KernelChannel),
        ("proxy", Role::Proxy),
        ("group", Role::Group),
        ("host_call", Role::HostCall),
        ("unfinished", Role::Unfinished),
        ("queue_pair", Role::QueuePair),
        ("network_error", Role::NetworkError),
        ("port_down", Role::PortDown),
        ("failover", Role::Failover),
        ("carrier", Role::Carrier),
        ("hang", Role::Hang),
        ("failback", Role::Failback),
        ("port_failover", Role::PortFailover),
    ];
    named
        .into_iter()
        .map(|(name, role)| (name, counts.of(role)))
        .collect()
}

/// Operations that were seen: the newest few of interest always, all of them up to a limit if asked.
#[derive(Debug, Default)]
pub struct OperationLog {
    limit: usize,
    rows: Vec<OperationRow>,
    /// Rows that an owner's operations have; one with many ranks counts for several.
    by_owner: FxHashMap<Owner, usize>,
    left_out: u64,
    seen: u64,
    incomplete: u64,
    late: u64,
    unnamed: Unnamed,
    top_late: Vec<(u64, Operation)>,
    top_slow: Vec<(u64, Operation)>,
}

/// Operations in which a rank may have been late, and nobody can say which.
#[derive(Clone, Copy, Debug, Default)]
struct Unnamed {
    operations: u64,
    /// Watched ranks, and all, of the one of which the smallest share is watched.
    watched: Option<(usize, u32)>,
    longest: Option<PeerWait>,
}

impl Unnamed {
    fn add(&mut self, operation: &Operation) {
        let Some(unnamed) = operation.unnamed else { return };
        self.operations += 1;
        let seen = (operation.by_rank.len(), operation.ranks);
        let share = |(watched, ranks): (usize, u32)| watched as f64 / f64::from(ranks);
        if self.watched.is_none_or(|known| share(seen) < share(known)) {
            self.watched = Some(seen);
        }
        let waits = self.longest.into_iter().chain(unnamed.wait);
        self.longest = waits.max_by_key(|wait| wait.wait_ns);
    }

    /// A sentence or two; empty if there is no such operation.
    fn text(&self) -> String {
        let Some((watched, ranks)) = self.watched else {
            return String::new();
        };
        let operations = match self.operations {
            1 => "1 operation".to_owned(),
            count => format!("{count} operations"),
        };
        let mut text = format!(
            "{operations} in which a rank may have been late: only {watched} of {ranks} ranks are watched here, and the library \
             does not say who arrived last\n"
        );
        if let Some(wait) = &self.longest {
            let words = wait_words(wait);
            text.push_str(&format!("  longest: {words} and may have waited itself\n"));
        }
        text
    }
}

/// `rank 0 waited 29.8 ms for rank 2, which is not watched here`.
fn wait_words(wait: &PeerWait) -> String {
    format!(
        "rank {} waited {:.1} ms for rank {}, which is not watched here",
        wait.rank,
        wait.wait_ns as f64 / 1e6,
        wait.peer
    )
}

/// Time from the first arrival to the last end.
fn duration_ns(operation: &Operation) -> u64 {
    let starts = operation
        .by_rank
        .iter()
        .map(|rank| rank.device_start_ns)
        .filter(|ns| *ns != 0);
    let end = operation
        .by_rank
        .iter()
        .map(|rank| rank.device_end_ns)
        .max()
        .unwrap_or(0);
    starts.min().map_or(0, |start| end.saturating_sub(start))
}

fn keep(top: &mut Vec<(u64, Operation)>, weight: u64, operation: &Operation) {
    if top.len() == TOP && top.last().is_some_and(|(least, _)| *least >= weight) {
        return;
    }
    let at = top.partition_point(|(known, _)| *known >= weight);
    top.insert(at, (weight, operation.clone()));
    top.truncate(TOP);
}

impl OperationLog {
    /// A log that keeps up to `limit` rows.
    #[must_use]
    pub fn new(limit: usize) -> Self {
        Self {
            limit,
            ..Self::default()
        }
    }

    /// Adds an operation of one of `owners`, each of whom has an equal part of the list.
    pub fn add(&mut self, operation: &Operation, owner: Owner, owners: usize) {
        self.seen += 1;
        self.incomplete += u64::from(!operation.complete);
        if self.limit > 0 {
            let takes = operation.by_rank.len().div_ceil(RANKS_OF_A_ROW).max(1);
            let rows = self.by_owner.entry(owner).or_default();
            if *rows + takes <= self.limit / owners.max(1) {
                *rows += takes;
                self.rows.push(operation.into());
            } else {
                self.left_out += 1;
            }
        }
        self.unnamed.add(operation);
        keep(&mut self.top_slow, duration_ns(operation), operation);
        if let Some(culprit) = &operation.culprit {
            self.late += 1;
            keep(&mut self.top_late, culprit.lag_ns, operation);
        }
    }

    /// Hands out the rows kept, and how many more there were.
    pub fn take_rows(&mut self) -> (Vec<OperationRow>, u64) {
        (std::mem::take(&mut self.rows), self.left_out)
    }

    /// The same as what was left out at [`Limit::ListedOperations`].
    #[must_use]
    pub fn left_out(&self) -> LeftOut {
        let mut left_out = LeftOut::default();
        left_out.add(Limit::ListedOperations, self.left_out);
        left_out
    }

    /// Operations seen, seen incompletely, and with a late rank.
    #[must_use]
    pub fn counts(&self) -> (u64, u64, u64) {
        (self.seen, self.incomplete, self.late)
    }

    /// The operations that took longest and those with the latest ranks, as text; empty if there were none.
    #[must_use]
    pub fn table(&self) -> String {
        let mut text = String::new();
        let mut part = |title: &str, rows: &[(u64, Operation)]| {
            if rows.is_empty() {
                return;
            }
            text.push_str(&format!(
                "{title}\n  {:<16} {:>16} {:>10} {:>10} {:>12}  {}\n",
                "operation", "communicator", "sequence", "bytes", "duration", "late rank"
            ));
            for (_, operation) in rows {
                let sequence = match operation.replay {
                    0 => operation.sequence.to_string(),
                    n => format!(
                        "{}.{}#{n}",
                        operation.sequence >> 32,
                        operation.sequence & 0xffff_ffff
                    ),
                };
                let not_named = || match operation.unnamed {
                    Some(unnamed) => unnamed.wait.as_ref().map_or_else(
                        || {
                            format!(
                                "not known: {} of {} ranks watched",
                                operation.by_rank.len(),
                                operation.ranks
                            )
                        },
                        wait_words,
                    ),
                    None => String::new(),
                };
                let late = operation.culprit.as_ref().map_or_else(not_named, |culprit| {
                    let is_seen = operation.by_rank.iter().any(|part| part.rank == culprit.rank);
                    let unseen = if is_seen { "" } else { ", not watched here," };
                    format!(
                        "rank {}{unseen} by {:.1} ms",
                        culprit.rank,
                        culprit.lag_ns as f64 / 1e6
                    )
                });
                let line = format!(
                    "  {:<16} {:016x} {:>10} {:>10} {:>9.3} ms  {late}",
                    operation.name,
                    operation.communicator,
                    sequence,
                    operation.bytes,
                    duration_ns(operation) as f64 / 1e6,
                );
                text.push_str(line.trim_end());
                text.push('\n');
            }
        };
        part("Operations with a late rank:", &self.top_late);
        part("Slowest operations:", &self.top_slow);
        text.push_str(&self.unnamed.text());
        text
    }
}

#[cfg(test)]
mod tests {
    use ringsight_exporters::model::{OperationRank, Unnamed};

    use super::*;

    const MS: u64 = 1_000_000;

    /// An all_reduce of four ranks, of which rank 0 is seen.
    fn operation(unnamed: Option<Unnamed>) -> Operation {
        let part = OperationRank {
            rank: 0,
            host: "a".into(),
            pid: 100,
            api_start_ns: 1,
            device_start_ns: MS,
            device_end_ns: 32 * MS,
            by_device: true,
        };
        Operation {
            trace_id: [1; 16],
            name: "all_reduce",
            communicator: 7,
            communicator_name: "".into(),
            ranks: 4,
            sequence: 5,
            replay: 0,
            bytes: 8,
            data_type: "float32",
            algorithm: "ring",
            by_rank: vec![part],
            culprit: None,
            unnamed,
            waited_until_ns: 0,
            complete: true,
        }
    }

    fn table(operations: &[Operation]) -> String {
        let mut log = OperationLog::new(0);
        for operation in operations {
            log.add(operation, Owner::LAST, 1);
        }
        log.table()
    }

    #[test]
    fn where_nobody_can_be_named_the_report_says_why_and_who_waited_for_whom() {
        let wait = PeerWait {
            rank: 0,
            peer: 2,
            wait_ns: 30 * MS,
        };
        let text = table(&[
            operation(Some(Unnamed { wait: None })),
            operation(Some(Unnamed { wait: Some(wait) })),
        ]);
        for words in [
            "  not known: 1 of 4 ranks watched\n",
            "ms  rank 0 waited 30.0 ms for rank 2, which is not watched here\n",
            "2 operations in which a rank may have been late: only 1 of 4 ranks are watched here",
            "  longest: rank 0 waited 30.0 ms for rank 2, which is not watched here and may have waited itself\n",
        ] {
            assert!(text.contains(words), "{words:?} is not in\n{text}");
        }
        assert!(!table(&[operation(None)]).contains("watched"));
    }
}
