//! Network work of plans: posted by the call that launches, or requested by the device when it reaches the plan.
//!
//! A captured plan runs at each replay of its graph, and no call reports a replay. So the device appends the plan's number to a [`Journal`] before the
//! plan's kernel runs. The proxy's progress thread reads the journal and posts the plan's network work. A host function in the graph would do as
//! well, but it holds the stream up until a thread of the driver has called it, and these threads are the application's too.

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
    requests: Arc<JournalRequests>,
}

/// Plans whose network work the device may request. The progress thread shares it, and may outlive the communicator.
struct JournalRequests {
    comm: u64,
    /// `None` on one node: there is no network.
    journal: Option<Journal>,
    outstanding: Arc<OutstandingProxyOps>,
    abort: Arc<AbortWord>,
    state: Mutex<Requested>,
}

#[derive(Default)]
struct Requested {
    /// Words of the journal that were read.
    read: u64,
    /// The last number given.
    last: u64,
    plans: HashMap<u64, RequestedPlan>,
    /// Plans that run once and whose work was not posted yet; and those of them whose work is being posted.
    once: usize,
    taken: usize,
    /// Graphs that are gone: what they requested before is in the journal.
    gone: Vec<u32>,
}

/// A plan that the device may request.
struct RequestedPlan {
    ops: Vec<ProxyOp>,
    observer: Arc<PlanObserver>,
    /// 0: it runs once.
    graph: u32,
    /// How often it was requested.
    replays: u32,
}

impl Posting {
    /// Of communicator `comm`, whose connections are `proxy`'s. The device makes its requests in `journal`, if it makes any.
    pub(crate) fn new(
        comm: u64,
        (proxy, outstanding): (&Arc<Proxy>, &Arc<OutstandingProxyOps>),
        abort: &Arc<AbortWord>,
        journal: Option<Journal>,
    ) -> Self {
        let requests = Arc::new(JournalRequests {
            comm,
            journal,
            outstanding: outstanding.clone(),
            abort: abort.clone(),
            state: Mutex::default(),
        });
        if requests.journal.is_some() {
            let weak = Arc::downgrade(&requests);
            proxy.watch(weak);
        }
        Self {
            proxy: proxy.clone(),
            requests,
        }
    }

    /// Posts the network work of a plan that runs once.
    pub(super) fn post(&self, ops: &[ProxyOp], observer: &PlanObserver) {
        // The kernels give up: there is nothing to move.
        if self.requests.abort.is_set() {
            return;
        }
        self.requests.expect(observer, 0);
        ops.iter().for_each(|op| self.proxy.save_op(*op));
        self.proxy.start();
    }

    /// Whether the network work of a plan that runs once is still to be requested or posted: work that is posted now would overtake it.
    pub(super) fn has_pending_requests(&self) -> bool {
        lock(&self.requests.state).once > 0
    }

    /// Has the device request the network work of a plan of `graph`, or of no graph (0), when it reaches this place of `stream`.
    ///
    /// # Errors
    /// The device's.
    pub(super) fn expect_request(
        &self,
        device: &dyn Device,
        stream: Stream,
        graph: u32,
        ops: &[ProxyOp],
        observer: &Arc<PlanObserver>,
    ) -> Result<()> {
        let Some(journal) = &self.requests.journal else {
            return Err(Error::internal("network work on one node"));
        };
        let plan = RequestedPlan {
            ops: ops.to_vec(),
            observer: observer.clone(),
            graph,
            replays: 0,
        };
        let mut state = lock(&self.requests.state);
        let first = state.plans.is_empty();
        state.once += usize::from(graph == 0);
        state.last += 1;
        let number = state.last;
        state.plans.insert(number, plan);
        drop(state);
        if first {
            self.proxy.expect();
        }
        device.append(stream, journal, number).inspect_err(|_| {
            let mut state = lock(&self.requests.state);
            state.plans.remove(&number);
            state.once -= usize::from(graph == 0);
        })?;
        Ok(())
    }

    /// The function to call when a graph is gone.
    pub(super) fn on_graph_gone(&self) -> impl FnOnce(u32) + Send + use<> {
        // Graphs may live longer than the communicator, and their kernels write to the journal until they are gone.
        let requests = self.requests.clone();
        move |graph| lock(&requests.state).gone.push(graph)
    }

    /// Waits until all network work is done, posted or requested, or until `give_up` says so (asked ten times a second and more).
    pub(crate) fn flush(&self, give_up: impl Fn() -> bool) {
        // A thread that sees that the plans are over sees the device's requests.
        while self.requests.is_asked() && !give_up() {
            std::thread::sleep(Duration::from_millis(1));
        }
        self.proxy.flush(self.requests.comm, give_up);
    }
}

impl JournalRequests {
    /// Notes how many proxy operations a run of a plan's operations has.
    fn expect(&self, observer: &PlanObserver, replay: u32) {
        for (info, count) in observer.proxied() {
            self.outstanding.expect(info, replay, count);
        }
    }
}

impl Requests for JournalRequests {
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
