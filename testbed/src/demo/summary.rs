//! What `ringsight attach --summary` writes (version 1).

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The collector's account of a run.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Summary {
    /// Version of this layout.
    pub version: u32,
    /// Processes watched.
    pub pids: Vec<u32>,
    /// Events by kind.
    pub records: BTreeMap<String, Events>,
    /// Spans by kind: `root`, `rank`, `enqueue`, `launch`, `kernel_channel`, `proxy`, `group`.
    pub spans: BTreeMap<String, u64>,
    /// Operations in the order in which they ended.
    pub operations: Vec<Operation>,
    /// What watchdogs found wrong.
    #[serde(default)]
    pub verdicts: Vec<serde_json::Value>,
    /// Events lost, all kinds and carriers.
    pub lost: u64,
    /// Events of the time between an earlier collector and this one that it never saw.
    #[serde(default)]
    pub missed: u64,
    /// Starts and ends of operations that devices overwrote before they were read.
    pub(crate) device_events_overwritten: u64,
    /// Operations that had not ended.
    pub unfinished: u64,
    /// What attaching took.
    pub(crate) attach_ms: f64,
    /// What letting go took.
    pub detach_ms: f64,
    /// Hits of probes.
    pub probe_hits: u64,
    /// How each exporter did.
    #[serde(default)]
    pub exporters: Vec<serde_json::Value>,
}

/// Events of a kind.
#[derive(Clone, Copy, Debug, Default, Deserialize, PartialEq, Eq)]
pub struct Events {
    /// That the collector got.
    pub received: u64,
    /// That the library counted meanwhile.
    pub(crate) emitted: u64,
    /// That are known to be lost.
    pub lost: u64,
    /// Of the time between an earlier collector and this one, that neither saw.
    #[serde(default)]
    pub missed: u64,
}

/// An operation.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct Operation {
    /// Name.
    pub name: String,
    /// Communicator id, a number or text.
    pub communicator: serde_json::Value,
    /// Sequence in its communicator or pair.
    pub sequence: u64,
    /// Replay, 0 if eager.
    pub(crate) replay: u32,
    /// Message bytes.
    pub bytes: u64,
    /// `false` if events of it were lost.
    pub complete: bool,
    /// Its trace.
    pub trace_id: String,
    /// Ranks of the communicator.
    pub ranks: u32,
    /// Who was late.
    pub culprit: Option<Culprit>,
    /// What each rank did, in rank order.
    pub by_rank: Vec<RankPart>,
}

/// Who was late.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize, PartialEq, Eq)]
pub struct Culprit {
    /// Rank.
    pub rank: u32,
    /// Arrival minus the others' median, nanoseconds.
    pub lag_ns: u64,
}

/// One rank's part. Times are Unix nanoseconds.
#[derive(Clone, Debug, Default, Deserialize)]
pub struct RankPart {
    /// Rank.
    pub rank: u32,
    /// Process.
    pub pid: u32,
    /// API call entered.
    pub(crate) api_start_ns: u64,
    /// Began on the device.
    pub device_start_ns: u64,
    /// Finished on the device.
    pub(crate) device_end_ns: u64,
    /// Whose times these are: `device` or `host`.
    pub(crate) timing_source: String,
}

/// All operations of one name.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Row {
    /// Name.
    pub(crate) name: String,
    /// How many.
    pub(crate) count: usize,
    /// Sum of their bytes.
    pub(crate) bytes: u64,
    /// Median from first arrival to last end.
    pub(crate) median_ms: f64,
    /// The longest.
    pub(crate) longest_ms: f64,
}

impl Operation {
    /// From the first rank's arrival to the last rank's end, nanoseconds.
    pub(crate) fn duration_ns(&self) -> u64 {
        let start = self.by_rank.iter().map(|part| part.device_start_ns).min();
        let end = self.by_rank.iter().map(|part| part.device_end_ns).max();
        end.unwrap_or(0).saturating_sub(start.unwrap_or(0))
    }
}

impl Summary {
    /// Spans of a kind.
    pub(crate) fn spans_of(&self, kind: &str) -> u64 {
        self.spans.get(kind).copied().unwrap_or(0)
    }

    /// Collectives in the order in which they were called.
    #[must_use]
    pub fn collectives(&self) -> Vec<&Operation> {
        let mut operations: Vec<_> = self
            .operations
            .iter()
            .filter(|op| op.name != "send_recv")
            .collect();
        operations.sort_by_key(|op| (op.sequence, op.replay));
        operations
    }

    /// A row for each name, in alphabetical order.
    pub(crate) fn by_name(&self) -> Vec<Row> {
        let mut names: BTreeMap<&str, (Vec<u64>, u64)> = BTreeMap::new();
        for operation in &self.operations {
            let row = names.entry(&operation.name).or_default();
            row.0.push(operation.duration_ns());
            row.1 += operation.bytes;
        }
        names
            .into_iter()
            .map(|(name, (mut durations, bytes))| {
                durations.sort_unstable();
                Row {
                    name: name.to_owned(),
                    count: durations.len(),
                    bytes,
                    median_ms: durations[durations.len() / 2] as f64 / 1e6,
                    longest_ms: durations[durations.len() - 1] as f64 / 1e6,
                }
            })
            .collect()
    }
}
