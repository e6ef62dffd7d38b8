//! The demo's last line: what was expected of a run, and what came of it.

use std::{collections::BTreeMap, path::PathBuf};

use serde::{Deserialize, Serialize};

use super::{summary::Culprit, truth::Configuration};

/// What the run was to be.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Expectation<'a> {
    /// The job.
    pub(crate) configuration: &'a Configuration,
    /// From which lag on a rank is to be named, nanoseconds.
    pub(crate) threshold_ns: u64,
    /// Files that the collector was to write.
    pub(crate) outputs: &'a [PathBuf],
    /// Whether it was to send to a backend as well.
    pub(crate) otlp: bool,
}

/// What came of the check; the demo's last line.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub struct Report {
    /// Whether there was no problem.
    pub ok: bool,
    /// Ranks.
    pub(crate) ranks: u32,
    /// Collectives that each rank took part in.
    pub(crate) collectives: usize,
    /// Messages between ranks.
    pub(crate) messages: usize,
    /// Spans by kind.
    pub(crate) spans: BTreeMap<String, u64>,
    /// Events received by kind.
    pub(crate) events: BTreeMap<String, u64>,
    /// Events lost.
    pub(crate) lost: u64,
    /// Intended delays.
    pub(crate) delays: usize,
    /// Intended delays that made nobody late beyond the threshold, by the ranks' own clocks: they drowned in what else
    /// the machine did, and no verdict is expected of them.
    pub(crate) drowned: Vec<Drowned>,
    /// Collectives at which the collector's verdict is right by the starts that it shows, but another than by the ranks' own clocks: the
    /// machine held ranks up between their notes and their parts.
    pub(crate) held_up: Vec<HeldUp>,
    /// Collectives at which, by the ranks' own clocks, a rank was late beyond the threshold though it did not sleep.
    pub(crate) really_late: usize,
    /// Operations at which a rank was late beyond the threshold, by the ranks' own clocks.
    pub(crate) culprits_expected: usize,
    /// Operations at which the collector named one.
    pub(crate) culprits_named: usize,
    /// The largest difference between a lag named and the same lag by the ranks' own clocks, where ranks were not held up.
    pub(crate) worst_lag_error_ms: f64,
    /// The furthest that an API call's time lies outside what the rank itself noted around the call.
    pub(crate) worst_clock_error_us: f64,
    /// What attaching took.
    pub(crate) attach_ms: f64,
    /// What letting go of the waiting ranks took, before the run; at its end they are gone, and nothing is let go of.
    pub(crate) detach_ms: Option<f64>,
    /// Probe hits for each operation of a rank: the ring takes what has room there.
    pub(crate) probe_hits_per_op: f64,
    /// First and last mean loss.
    pub(crate) loss: Vec<f32>,
    /// Last accuracy on the validation samples.
    pub(crate) accuracy: f32,
    /// From gate to last step, milliseconds, slowest rank.
    pub(crate) loop_ms: f64,
    /// Files written.
    pub(crate) outputs: Vec<String>,
    /// What is wrong; empty if `ok`.
    pub problems: Vec<String>,
}

/// An intended delay that made nobody late.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Drowned {
    /// Collective, counted from 0.
    pub(crate) collective: usize,
    /// Step.
    pub(crate) step: u32,
    /// Rank that slept.
    pub(crate) rank: u32,
    /// For how long, milliseconds.
    pub(crate) slept_ms: u32,
    /// By how much it arrived after the others' median nevertheless, milliseconds; negative if before.
    pub(crate) lag_ms: f64,
    /// What kept it from being late.
    pub(crate) why: String,
}

/// A verdict that would be another by the ranks' notes alone.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct HeldUp {
    /// Collective, counted from 0.
    pub(crate) collective: usize,
    /// Whom the collector named.
    pub(crate) named: Option<Culprit>,
    /// Who was last by the notes.
    pub(crate) noted: Culprit,
}

impl Report {
    /// A report of nothing, for a run that did not get that far.
    #[must_use]
    pub fn failed(problem: String) -> Self {
        Self {
            problems: vec![problem],
            ..Self::default()
        }
    }
}

/// A list that stays readable when everything is wrong.
#[derive(Default)]
pub(super) struct Problems {
    pub(super) lines: Vec<String>,
    pub(super) more: usize,
}

impl Problems {
    pub(super) fn add(&mut self, line: String) {
        if self.lines.len() < 20 {
            self.lines.push(line);
        } else {
            self.more += 1;
        }
    }

    pub(super) fn expect(&mut self, holds: bool, line: impl FnOnce() -> String) {
        if !holds {
            self.add(line());
        }
    }
}
