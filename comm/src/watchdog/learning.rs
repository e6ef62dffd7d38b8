//! How long operations usually take, from how long those took that are done.

use std::{
    collections::HashMap,
    sync::{Arc, MutexGuard},
    time::{Duration, Instant},
};

use ringsight_records::Description;

use super::{
    Watch,
    flights::InProgress,
    history::{History, OperationKind},
};
use crate::{communicator::lock, observe};

/// How often what has been done is looked at: all that the process remembers, thousands of operations.
const LEARNS: Duration = Duration::from_millis(250);

/// An operation like others: when it started and ended.
type Lesson = (OperationKind, u64, u64);

/// The lessons of all communicators of the process, read at once.
#[derive(Default)]
pub(super) struct Learning {
    last: Option<Instant>,
}

impl Learning {
    /// Lets those learn whose thresholds adapt and which have launched something since they did, or had something on its way then. Not more
    /// often than is worth it.
    pub(super) fn go_on(&mut self, watches: &[Arc<Watch>]) {
        if self.last.is_some_and(|last| last.elapsed() < LEARNS) {
            return;
        }
        let mut learners: HashMap<(u64, u32), (&Watch, Vec<Lesson>)> = watches
            .iter()
            .filter(|watch| watch.settings.adaptive.is_some() && lock(&watch.flights).take_news())
            .map(|watch| ((watch.comm, watch.rank), (&**watch, Vec::new())))
            .collect();
        let Some(pages) = observe::pages().filter(|_| !learners.is_empty()) else {
            return;
        };
        self.last = Some(Instant::now());
        // Of graphs their plans know all replays, a description the latest one.
        for description in pages.descriptions().filter(|description| description.graph == 0) {
            if let Some((_, lessons)) = learners.get_mut(&(description.comm, description.rank)) {
                let Description {
                    device_start_ns,
                    device_end_ns,
                    ..
                } = description;
                lessons.push((kind(&description), device_start_ns, device_end_ns));
            }
        }
        for (watch, lessons) in learners.into_values() {
            lock(&watch.history).learn(lessons.into_iter());
        }
    }
}

impl Watch {
    /// How long an operation may be in progress.
    pub(super) fn threshold(&self, op: &InProgress) -> Duration {
        let fixed = self.settings.threshold;
        let Some(adaptive) = &self.settings.adaptive else {
            return fixed;
        };
        let description = observe::pages().and_then(|pages| pages.description(op.info.op));
        description.map_or(fixed, |description| {
            lock(&self.history).threshold(kind(&description), adaptive, fixed)
        })
    }

    /// Learns how long the latest replays of graphs took.
    pub(super) fn learn_replays(&self) {
        let Some(pages) = self.settings.adaptive.and_then(|_| observe::pages()) else {
            return;
        };
        let replayed = lock(&self.flights).replayed();
        let mut history: Option<MutexGuard<'_, History>> = None;
        for (op, times) in replayed.into_iter().filter(|(_, times)| !times.is_empty()) {
            if let Some(description) = pages.description(op) {
                let history = history.get_or_insert_with(|| lock(&self.history));
                times.iter().for_each(|ns| history.add(kind(&description), *ns));
            }
        }
    }
}

/// Operations like this one take as long.
fn kind(description: &Description) -> OperationKind {
    (description.function, description.bytes)
}
