//! Network work of plans: posted by the call that launches, or asked for by the device when it comes to the plan.
//!
//! What a graph has captured runs at each replay, of which no call tells us. So the device appends a number that stands for the
//! plan to a [`Journal`] before the plan's kernel, and the progress thread, which reads it, moves what the plan needs. A host function in
//! the graph would do as well, but holds the stream up until a thread of the driver has called it, and these threads are the
//! application's too.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex},
    time::Duration,
};

use ringsight_comm_base::{
    error::{Error, Result},
    sync::lock,
};
use ringsight_kernels::AbortWord;
use ringsight_records::{Kind, Record, State};

use crate::{
    device::{Device, Journal, Overrun, Stream},
    observe,
    op::{OpInfo, ProxyOp},
    progress::PlanObserver,
    proxy::{Proxy, requests::Requests},
};

/// The network work of a communicator's plans.
pub(crate) struct Posting {
    proxy: Arc<Proxy>,
    asked: Arc<Asked>,
}

/// What the device may ask for. What is known of it to the progress thread, which may outlive the communicator.
struct Asked {
    comm: u64,
    /// None on one node: there is no network.
    journal: Option<Journal>,
    outstanding: Arc<OutstandingProxyOps>,
    abort: Arc<AbortWord>,
    state: Mutex<Expectations>,
}

#[derive(Default)]
struct Expectations {
    /// Words of the journal that were read.
    read: u64,
    /// The last number given.
    last: u64,
    plans: HashMap<u64, Expected>,
    /// Plans that run once and were not taken up yet; and those of them that are being taken up.
    once: usize,
    taken: usize,
    /// Graphs that are gone: what they asked for before is in the journal.
    gone: Vec<u32>,
}

/// What a plan needs.
struct Expected {
    ops: Vec<ProxyOp>,
    observer: Arc<PlanObserver>,
    /// 0: it runs once.
    graph: u32,
    /// How often it has been asked for.
    replays: u32,
}

impl Posting {
    /// Of communicator `comm`, whose connections are `proxy`'s; with what its device asks by, if it is to ask for anything.
    pub(crate) fn new(
        comm: u64,
        (proxy, outstanding): (&Arc<Proxy>, &Arc<OutstandingProxyOps>),
        abort: &Arc<AbortWord>,
        journal: Option<Journal>,
    ) -> Self {
        let asked = Arc::new(Asked {
            comm,
            journal,
            outstanding: outstanding.clone(),
            abort: abort.clone(),
            state: Mutex::default(),
        });
        if asked.journal.is_some() {
            let weak = Arc::downgrade(&asked);
            proxy.watch(weak);
        }
        Self {
            proxy: proxy.clone(),
            asked,
        }
    }

    /// Posts what a plan that runs once needs.
    pub(crate) fn post(&self, ops: &[ProxyOp], observer: &PlanObserver) {
        // The kernels give up: there is nothing to move.
        if self.asked.abort.is_set() {
            return;
        }
        self.asked.expect(observer, 0);
        ops.iter().for_each(|op| self.proxy.save_op(*op));
        self.proxy.start();
    }

    /// Whether a plan that runs once has not been asked for yet, or not been taken up: what is posted now would overtake it.
    pub(crate) fn is_behind(&self) -> bool {
        lock(&self.asked.state).once > 0
    }

    /// Lets the device ask for what a plan of `graph`, or 0, needs when it comes to this place of `stream`.
    ///
    /// # Errors
    /// The device's.
    pub(crate) fn ask(
        &self,
        device: &dyn Device,
        stream: Stream,
        graph: u32,
        ops: &[ProxyOp],
        observer: &Arc<PlanObserver>,
    ) -> Result<()> {
        let Some(journal) = &self.asked.journal else {
            return Err(Error::internal("network work on one node"));
        };
        let expected = Expected {
            ops: ops.to_vec(),
            observer: observer.clone(),
            graph,
            replays: 0,
        };
        let mut state = lock(&self.asked.state);
        let first = state.plans.is_empty();
        state.once += usize::from(graph == 0);
        state.last += 1;
        let number = state.last;
        state.plans.insert(number, expected);
        drop(state);
        if first {
            self.proxy.expect();
        }
        device.append(stream, journal, number).inspect_err(|_| {
            let mut state = lock(&self.asked.state);
            state.plans.remove(&number);
            state.once -= usize::from(graph == 0);
        })?;
        Ok(())
    }

    /// What is to be called when a graph is gone.
    pub(crate) fn forget(&self) -> impl FnOnce(u32) + Send + use<> {
        // Graphs may live longer than the communicator, and their kernels write to the journal until they are gone.
        let asked = self.asked.clone();
        move |graph| lock(&asked.state).gone.push(graph)
    }

    /// Waits until all is moved: what was posted, and what the device has asked for; or until `give_up` says so (asked ten
    /// times a second and more).
    pub(crate) fn flush(&self, give_up: impl Fn() -> bool) {
        // What the device has asked for is seen by whoever sees that the plans are over.
        while self.asked.is_asked() && !give_up() {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.proxy.flush(self.asked.comm, give_up);
    }
}

impl Asked {
    /// Notes how many proxy operations a run of a plan's operations has.
    fn expect(&self, observer: &PlanObserver, replay: u32) {
        for (info, count) in observer.proxied() {
            self.outstanding.expect(info, replay, count);
        }
    }
}

impl Requests for Asked {
    fn take(&self, post: &mut dyn FnMut(ProxyOp)) -> std::result::Result<(), (u64, String)> {
        let Some(journal) = &self.journal else {
            return Ok(());
        };
        let mut state = lock(&self.state);
        let numbers = journal.read(state.read).map_err(|Overrun| {
            state.read = journal.count();
            let text = "the device asked for network work faster than it could be taken up";
            (self.comm, text.to_owned())
        })?;
        state.read += numbers.len() as u64;
        for number in numbers {
            let Some(expected) = state.plans.get_mut(&number) else {
                continue;
            };
            let once = expected.graph == 0;
            expected.replays += u32::from(!once);
            // Else the kernels give up: there is nothing to move.
            if !self.abort.is_set() {
                let replay = expected.replays;
                self.expect(&expected.observer, replay);
                for op in &expected.ops {
                    post(ProxyOp { replay, ..*op });
                }
            }
            if once {
                state.plans.remove(&number);
                state.taken += 1;
            }
        }
        for graph in std::mem::take(&mut state.gone) {
            state.plans.retain(|_, expected| expected.graph != graph);
        }
        Ok(())
    }

    fn settle(&self) {
        let mut state = lock(&self.state);
        state.once -= std::mem::take(&mut state.taken);
    }

    fn is_expected(&self) -> bool {
        !lock(&self.state).plans.is_empty()
    }

    fn is_asked(&self) -> bool {
        self.journal
            .as_ref()
            .is_some_and(|journal| journal.count() != lock(&self.state).read)
    }
}

/// Proxy operations that are still to finish, by (operation, replay).
#[derive(Debug, Default)]
pub(crate) struct OutstandingProxyOps(Mutex<HashMap<(u32, u32), OutstandingRun>>);

/// Proxy operations of one run of one operation.
#[derive(Debug)]
struct OutstandingRun {
    left: u32,
    total: u32,
    info: OpInfo,
}

impl OutstandingProxyOps {
    /// Expects `count` proxy operations of `info` to finish.
    fn expect(&self, info: OpInfo, replay: u32, count: u32) {
        lock(&self.0).insert(
            (info.op, replay),
            OutstandingRun {
                left: count,
                total: count,
                info,
            },
        );
    }

    /// One has finished.
    pub(crate) fn completed(&self, op: u32, replay: u32) {
        let mut waiting = lock(&self.0);
        let Some(outstanding) = waiting.get_mut(&(op, replay)) else {
            return;
        };
        outstanding.left -= 1;
        if outstanding.left == 0 {
            let OutstandingRun { total, info, .. } = *outstanding;
            waiting.remove(&(op, replay));
            drop(waiting);
            let record = info.record(Kind::ProxyCompleted, State::STOP, observe::now_ns(), replay);
            observe::emit(&Record {
                value: u64::from(total),
                ..record
            });
        }
    }

    /// Forgets those of a communicator, which were given up.
    pub(crate) fn forget(&self, comm: u64) {
        lock(&self.0).retain(|_, outstanding| outstanding.info.comm != comm);
    }
}
