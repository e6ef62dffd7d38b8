//! The watchdog's second source: CUDA events around each kernel, for devices whose kernels tell nothing.
//!
//! An eager plan has two events of a pool. A captured plan has two of its own, recorded as external ones, which can be
//! queried while the graph is replayed, and two counters which each replay counts up ([`track`] says why). The event that
//! joins captured streams is a regular one and no part of this ([`crate::launch::Order`]).
//!
//! Captured events are destroyed on three ways. When a graph is gone its destructor, which must not call the device, puts an
//! entry into a list, and wakes nobody. The thread that queries ([`patrol`]) looks into the list each time it goes round, and
//! destroys them. And when the communicator ends, all of its events are destroyed, also those of graphs that live on; these
//! keep their counters until they are gone, since replays write them.

mod patrol;
#[cfg(test)]
mod tests;
mod track;

use std::{
    collections::VecDeque,
    mem,
    sync::{Arc, Mutex, Weak},
    time::Duration,
};

pub(super) use self::patrol::{PATIENCE, RECENT};
use self::patrol::{PATROL, Patrol, Source};
pub(crate) use self::track::Track;

use super::Settings;
use ringsight_comm_base::fork::PerProcess;

use crate::{
    communicator::lock,
    device::{Capture, Device, Event, Progress, Stream},
    error::Result,
    observe,
    progress::Seen,
};

/// After so many launches the thread that queries is woken: what is done is kept until it has looked.
const BACKLOG: usize = 1024;

/// The events of a communicator on this rank.
pub(crate) struct Events {
    device: Arc<dyn Device>,
    /// The device's number.
    number: i32,
    interval: Duration,
    patrol: &'static Patrol,
    gone: &'static Gone,
    /// As the patrol knows it.
    own: Weak<Events>,
    /// See [`observe::fork_generation`].
    fork: u32,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Plans whose ends were not seen when they were looked at last, in the order of their launch.
    eager: VecDeque<Arc<Track>>,
    graphs: Vec<Arc<Captured>>,
    pool: Vec<[Event; 2]>,
    /// The thread is querying them: nobody else may destroy or reuse one that is not in the pool.
    querying: bool,
    closed: bool,
}

/// What a graph has of a communicator's plans. Kept by the graph, for the counters.
struct Captured {
    graph: u32,
    owner: Weak<Events>,
    plans: Mutex<Vec<Arc<Track>>>,
}

/// What graphs that are gone had, of all communicators.
type Gone = Mutex<Vec<Arc<Captured>>>;

static GONE: PerProcess<Gone> = PerProcess::new();

/// Events that nobody uses any more. To destroy one may take as long as the kernels that run.
struct Waste {
    device: Arc<dyn Device>,
    events: Vec<Event>,
}

impl Drop for Waste {
    fn drop(&mut self) {
        for event in self.events.drain(..) {
            // Nothing is left to be done about one that cannot be destroyed.
            let _ = self.device.event_destroy(event);
        }
    }
}

impl Events {
    /// Of a communicator with these settings, on device number `number`.
    pub(crate) fn new(device: Arc<dyn Device>, number: i32, settings: &Settings) -> Arc<Self> {
        Self::under(PATROL.get(), GONE.get(), device, number, settings)
    }

    fn under(
        patrol: &'static Patrol,
        gone: &'static Gone,
        device: Arc<dyn Device>,
        number: i32,
        settings: &Settings,
    ) -> Arc<Self> {
        let events = Arc::new_cyclic(|own: &Weak<Self>| Self {
            device,
            number,
            interval: settings.query_interval(),
            patrol,
            gone,
            own: own.clone(),
            fork: observe::fork_generation(),
            state: Mutex::default(),
        });
        patrol.enter(events.own.clone());
        events
    }

    /// Before a plan's kernel is put into the stream.
    ///
    /// # Errors
    /// The device's.
    pub(crate) fn begin(
        &self,
        device: &dyn Device,
        stream: Stream,
        capture: Option<Capture>,
    ) -> Result<Arc<Track>> {
        let track = match capture {
            None => {
                let pooled = lock(&self.state).pool.pop();
                Arc::new(match pooled {
                    Some(events) => Track::eager(events),
                    None => Track::eager(track::events(device)?),
                })
            }
            Some(capture) => {
                let captured = self.captured(device, capture)?;
                let track = Arc::new(Track::captured(device)?);
                // At once: whatever comes, they are destroyed with the graph.
                lock(&captured.plans).push(track.clone());
                track
            }
        };
        if let Err(error) = track.record_start(device, stream) {
            self.withdraw(&track);
            return Err(error);
        }
        Ok(track)
    }

    /// Behind it.
    ///
    /// # Errors
    /// The device's.
    pub(crate) fn end(&self, device: &dyn Device, stream: Stream, track: &Arc<Track>) -> Result<()> {
        let recorded = track.record_end(device, stream);
        if track.is_captured() {
            return recorded;
        }
        if let Err(error) = recorded {
            self.destroy(track.events.to_vec());
            return Err(error);
        }
        let mut state = lock(&self.state);
        state.eager.push_back(track.clone());
        let backlog = state.eager.len();
        drop(state);
        if backlog.is_multiple_of(BACKLOG) {
            self.patrol.nudge();
        }
        Ok(())
    }

    /// The kernel of a plan that has begun could not be launched.
    pub(crate) fn withdraw(&self, track: &Track) {
        if !track.is_captured() {
            lock(&self.state).pool.push(track.events);
        }
    }

    /// What a capture has, which at its first plan is tied to the graph's life.
    fn captured(&self, device: &dyn Device, capture: Capture) -> Result<Arc<Captured>> {
        let known = |state: &State| {
            let mut graphs = state.graphs.iter().rev();
            graphs.find(|captured| captured.graph == capture.id).cloned()
        };
        if let Some(captured) = known(&lock(&self.state)) {
            return Ok(captured);
        }
        let captured = Arc::new(Captured {
            graph: capture.id,
            owner: self.own.clone(),
            plans: Mutex::default(),
        });
        let (gone, had) = (self.gone, captured.clone());
        device.capture_retain(capture, Box::new(move || lock(gone).push(had)))?;
        lock(&self.state).graphs.push(captured.clone());
        Ok(captured)
    }

    /// Waits a moment until what is known is fresh: at most so old. Whether it is.
    pub(super) fn refresh(&self, old: Duration) -> bool {
        self.patrol.refresh(old)
    }

    /// For how long a query has not come back.
    pub(super) fn query_so_far(&self) -> Option<Duration> {
        self.patrol.round_so_far()
    }

    /// The communicator ends: all events are destroyed, by the thread that queries if it does so now.
    pub(crate) fn close(&self) {
        // A forked child has no device, and what it has of these is its parent's.
        if self.fork != observe::fork_generation() {
            return;
        }
        let mut state = lock(&self.state);
        if mem::replace(&mut state.closed, true) {
            return;
        }
        let events = if state.querying {
            Vec::new()
        } else {
            state.all_events()
        };
        drop(state);
        self.destroy(events);
        let own: Weak<dyn Source> = self.own.clone();
        self.patrol.leave(&own);
    }

    fn destroy(&self, events: Vec<Event>) {
        if !events.is_empty() {
            self.device.discard(Box::new(Waste {
                device: self.device.clone(),
                events,
            }));
        }
    }

    /// A graph is gone.
    fn forget(&self, gone: &Arc<Captured>) {
        let mut state = lock(&self.state);
        if state.closed {
            // Whoever ended it, or queries it still, destroys them.
            return;
        }
        let place = state.graphs.iter().position(|known| Arc::ptr_eq(known, gone));
        let events = place.map_or_else(Vec::new, |place| state.graphs.swap_remove(place).events());
        drop(state);
        self.destroy(events);
    }

    /// Queries eager plans, oldest first: they run one after another. How many are done.
    fn query_eager(&self, tracks: &[Arc<Track>]) -> usize {
        let is_done =
            |track: &Arc<Track>| matches!(self.device.event_query(track.events[1]), Ok(Progress::Done));
        let done = match tracks.last() {
            None => 0,
            Some(last) if is_done(last) => tracks.len(),
            Some(_) => tracks.partition_point(is_done),
        };
        for track in &tracks[..done] {
            track.tell(Progress::Done, Progress::Done);
        }
        if let Some(next) = tracks.get(done)
            && let Ok(start) = self.device.event_query(next.events[0])
        {
            next.tell(start, Progress::Pending);
        }
        done
    }

    /// Queries a graph's plans, which run one after another: of one that is idle the last plan only.
    fn query_graph(&self, plans: &[Arc<Track>]) {
        let is_idle = plans.last().is_some_and(|last| {
            let launched = last.query(&*self.device);
            !launched && !matches!(last.seen(), Seen::InProgress { .. })
        });
        // Each launch resets the events of all plans: an earlier one is not on its way without the last one.
        if is_idle {
            return;
        }
        let mut plans = plans.iter();
        if plans.by_ref().any(|plan| plan.query(&*self.device)) {
            plans.for_each(|plan| plan.is_behind());
        }
    }
}

impl Source for Events {
    fn query(&self) {
        // Before anything is queried: what is gone must not be.
        let gone = mem::take(&mut *lock(self.gone));
        for captured in gone {
            if let Some(owner) = captured.owner.upgrade() {
                owner.forget(&captured);
            }
        }
        let mut state = lock(&self.state);
        if state.closed {
            return;
        }
        let eager: Vec<Arc<Track>> = state.eager.iter().cloned().collect();
        let graphs = state.graphs.clone();
        if eager.is_empty() && graphs.is_empty() {
            return;
        }
        state.querying = true;
        drop(state);
        let mut done = 0;
        if self.device.set_current(self.number).is_ok() && self.device.leave_captures().is_ok() {
            done = self.query_eager(&eager);
            for captured in &graphs {
                let plans = lock(&captured.plans).clone();
                self.query_graph(&plans);
            }
        }
        let mut state = lock(&self.state);
        state.querying = false;
        let State { eager, pool, .. } = &mut *state;
        pool.extend(eager.drain(..done).map(|track| track.events));
        let events = if state.closed {
            state.all_events()
        } else {
            Vec::new()
        };
        drop(state);
        self.destroy(events);
    }

    fn interval(&self) -> Duration {
        self.interval
    }
}

impl State {
    /// Takes all.
    fn all_events(&mut self) -> Vec<Event> {
        let mut events: Vec<Event> = self.pool.drain(..).flatten().collect();
        events.extend(self.eager.drain(..).flat_map(|track| track.events));
        events.extend(self.graphs.drain(..).flat_map(|captured| captured.events()));
        events
    }
}

impl Captured {
    fn events(&self) -> Vec<Event> {
        let plans = lock(&self.plans);
        plans.iter().flat_map(|track| track.events).collect()
    }
}

impl Drop for Events {
    fn drop(&mut self) {
        self.close();
    }
}
