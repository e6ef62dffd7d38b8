//! Feeds the durations of completed operations to the rules, for adaptive thresholds.

use std::{collections::HashMap, sync::Arc, time::Duration};

use ringsight_comm_base::sync::lock;
use ringsight_records::Description;

use super::{
    Watch,
    rules::durations::{CompletedOperation, OperationKind},
};
use crate::observe;

/// The shortest time from one sample to the next: a sample reads every description of the process, thousands of operations.
const INTERVAL: Duration = Duration::from_millis(250);

/// Samples the eager operations of all communicators of the process at once.
#[derive(Default)]
pub(super) struct DurationSampler {
    /// When it last read the descriptions, `CLOCK_MONOTONIC` nanoseconds; 0 if it never did.
    last_ns: u64,
}

impl DurationSampler {
    /// Samples for the communicators with adaptive thresholds that may have completed operations since the last sample.
    pub(super) fn sample(&mut self, watches: &[Arc<Watch>], now: u64) {
        if self.last_ns != 0 && now.saturating_sub(self.last_ns) < INTERVAL.as_nanos() as u64 {
            return;
        }
        let mut samples: HashMap<(u64, u32), (&Watch, Vec<CompletedOperation>)> = watches
            .iter()
            .filter(|watch| {
                watch.settings.adaptive.is_some() && lock(&watch.in_flight).take_may_have_completed()
            })
            .map(|watch| ((watch.comm, watch.rank), (&**watch, Vec::new())))
            .collect();
        let Some(pages) = observe::pages().filter(|_| !samples.is_empty()) else {
            return;
        };
        self.last_ns = now;
        // A description of a captured operation has the latest replay only; `sample_replays` has all.
        for description in pages.descriptions().filter(|description| description.graph == 0) {
            if let Some((_, completed)) = samples.get_mut(&(description.comm, description.rank)) {
                let Description {
                    device_start_ns,
                    device_end_ns,
                    ..
                } = description;
                completed.push((kind(&description), device_start_ns, device_end_ns));
            }
        }
        for (watch, completed) in samples.into_values() {
            lock(&watch.rules)
                .durations()
                .add_completed(completed.into_iter());
        }
    }
}

impl Watch {
    /// The kind of an operation, if thresholds adapt and its description is still there.
    pub(super) fn kind_of(&self, op: u32) -> Option<OperationKind> {
        self.settings.adaptive?;
        Some(kind(&observe::pages()?.description(op)?))
    }

    /// Samples the replays of captured operations that completed since the last call.
    pub(super) fn sample_replays(&self) {
        let Some(pages) = self.settings.adaptive.and_then(|_| observe::pages()) else {
            return;
        };
        let replays = lock(&self.in_flight).take_replay_durations();
        for (op, durations) in replays.into_iter().filter(|(_, durations)| !durations.is_empty()) {
            if let Some(description) = pages.description(op) {
                let mut rules = lock(&self.rules);
                let history = rules.durations();
                durations
                    .iter()
                    .for_each(|ns| history.add(kind(&description), *ns));
            }
        }
    }
}

fn kind(description: &Description) -> OperationKind {
    (description.function, description.bytes)
}
