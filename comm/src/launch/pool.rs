//! The pool of retired plans: memory for the next plan, and the plan cache.
//!
//! Taking a plan's memory from the pool takes a tenth of the time of allocating it, and leaves nothing to be freed by threads that have not
//! allocated it.
//!
//! A collective that one kernel does in peer memory is a plan by itself. Its work follows from the call and from what stays the same for the
//! communicator's life. So a pooled plan serves the next call with the same arguments as it is, but for the numbers: nothing is chosen, checked or
//! written again. Each call asks once whether the pooled plan serves it ([`PooledPlan::method_for`]). The plan then remembers the operation
//! ([`PooledPlan::reserve`]), so that the launch only compares numbers. The buffers' memory does not matter, only the addresses, which are the
//! caller's each time.

use std::{collections::VecDeque, mem, sync::Arc};

use ringsight_comm_base::error::Result;
use ringsight_kernels::{ChannelWork, Launch, Observer, Work};
use ringsight_records::prefetch::ask_for_bytes;

use super::ready::{ReadyPlan, SubmittedPlan};
use crate::{
    op::{Method, OpInfo, Request, Task},
    progress::{Contents, OpState, PlanObserver},
};

/// Most plans in a pool.
const MOST_PLANS: usize = 256;
/// Most work elements of a pooled plan.
const MOST_WORKS: usize = 16;

/// Retired plans of one communicator, oldest first.
#[derive(Default)]
pub(super) struct Pool(VecDeque<SubmittedPlan>);

impl Pool {
    /// Keeps a retired plan, if there is room.
    pub(super) fn put(&mut self, plan: SubmittedPlan) {
        // A pooled plan keeps its works and what they hold: no window is held longer than it is used.
        if self.0.len() < MOST_PLANS && plan.works() <= MOST_WORKS && !plan.has_window() {
            self.0.push_back(plan);
        }
    }

    /// Takes the oldest plan, unless somebody looks at it: the device and the watchdog let go of the latest a little after they have reported
    /// its end.
    pub(super) fn take(&mut self) -> Option<PooledPlan> {
        let oldest = self.0.front_mut()?;
        if Arc::strong_count(&oldest.launch.observer) > 1 {
            return None;
        }
        let works = mem::take(&mut Arc::get_mut(&mut oldest.launch)?.channels);
        let SubmittedPlan { launch, cached, .. } = self.0.pop_front()?;
        Some(PooledPlan {
            launch,
            works,
            cached,
            reserved_for: None,
        })
    }

    /// Prefetches the oldest plan: the core of the thread that has seen it end has it.
    pub(super) fn prefetch(&self) {
        if let Some(SubmittedPlan { launch, .. }) = self.0.front() {
            prefetch_shared(launch);
            prefetch_shared(&launch.observer);
        }
    }
}

/// Prefetches a shared value and the counts of its owners, which are before it.
fn prefetch_shared<T: ?Sized>(value: &Arc<T>) {
    const COUNTS: usize = 2 * size_of::<usize>();
    let first = Arc::as_ptr(value).cast::<u8>().wrapping_sub(COUNTS);
    ask_for_bytes(first, COUNTS + size_of_val(&**value));
}

/// A plan that was taken from the pool. Nobody else has it.
pub(crate) struct PooledPlan {
    launch: Arc<Launch>,
    /// Those of the plan, for their memory.
    pub(super) works: Vec<ChannelWork>,
    /// How its operation is done, if it can serve the same call again.
    cached: Option<Method>,
    /// The number of the operation that it serves as it is.
    reserved_for: Option<u32>,
}

impl PooledPlan {
    /// How it does the operation of a call, if it is the plan of an earlier call with the same arguments.
    pub(crate) fn method_for(&self, request: &Request) -> Option<Method> {
        let method = self.cached?;
        let [ChannelWork { work, .. }] = &*self.works else {
            return None;
        };
        let [work] = &**work else { return None };
        is_of(work, request).then_some(method)
    }

    /// Operation `op` is of a call that [`Self::method_for`] gave a method for, and is done by that method.
    pub(crate) fn reserve(&mut self, op: u32) {
        self.reserved_for = Some(op);
    }

    /// Whether it serves operation `op` as it is.
    pub(super) fn is_reserved_for(&self, op: u32) -> bool {
        self.reserved_for == Some(op)
    }

    /// It as the plan of this number and operation; `None` if somebody else has it, which nobody has.
    pub(super) fn renew(mut self, number: u32, info: OpInfo) -> Result<Option<ReadyPlan>> {
        let Some(launch) = Arc::get_mut(&mut self.launch) else {
            return Ok(None);
        };
        let Some(observer) = own(&mut launch.observer) else {
            return Ok(None);
        };
        observer.renew_for(number, OpState::new(info, None, 1, 0));
        launch.channels = self.works;
        for work in launch.channels.iter_mut().flat_map(|channel| &mut channel.work) {
            work.op = info.op;
        }
        ReadyPlan::new(self.launch, number, self.cached).map(Some)
    }

    /// Its launch as that of another plan, with the works and contents of that, which are taken; `None` if somebody else has it, which nobody has.
    pub(super) fn refill(
        mut self,
        works: &mut Vec<ChannelWork>,
        contents: &mut Contents,
    ) -> Option<Arc<Launch>> {
        let launch = Arc::get_mut(&mut self.launch)?;
        own(&mut launch.observer)?.renew(contents);
        launch.channels = mem::take(works);
        Some(self.launch)
    }
}

/// Whether the plan of an operation can serve the same call again. Not where kernels use the callers' buffers, which peers have to reach each
/// time; nor where the buffer is in a window, which may be gone.
pub(super) fn is_cacheable(task: &Task) -> bool {
    let path = task.method.path;
    path.is_peer_access() && !path.is_zero_copy() && !path.is_copy_engine() && !task.request.function.is_p2p()
}

/// Whether the work of such an operation is what a call asks for.
fn is_of(work: &Work, request: &Request) -> bool {
    work.function == request.function
        && work.send == request.send
        && work.recv == request.recv
        && work.count == request.count
        && work.data_type == request.data_type
        && work.reduce_op == request.reduce_op
        && work.scalar == request.scalar
        && work.root == request.peer.unwrap_or(0)
        && request.window.is_none()
}

/// The observer of a launch that nobody else has.
fn own(observer: &mut Arc<dyn Observer>) -> Option<&mut PlanObserver> {
    let observer: &mut dyn std::any::Any = Arc::get_mut(observer)?;
    observer.downcast_mut()
}

#[cfg(test)]
mod tests {
    use ringsight_kernels::{Connections, Scalar, ZeroCopy};
    use ringsight_records::{Algorithm, DataType, Function, ReduceOp};

    use super::*;
    use crate::op::{DataPath, Stream, WindowBuffer};

    fn work(request: &Request) -> Work {
        Work {
            op: 7,
            tag: request.call().tag(),
            function: request.function,
            algorithm: Algorithm::OneShot,
            data_type: request.data_type,
            reduce_op: request.reduce_op,
            scalar: request.scalar,
            send: request.send,
            recv: request.recv,
            count: request.count,
            part: 0..request.count,
            rank: 0,
            ranks: 2,
            root: request.peer.unwrap_or(0),
            connections: Connections::Local,
            zero_copy: ZeroCopy::Off,
            pushes: false,
        }
    }

    #[test]
    fn only_the_same_call_is_served_again() {
        let work = work(&Request::example());
        assert!(is_of(&work, &Request::example()));
        // What the plan does not depend on.
        let stream = Stream(2);
        assert!(is_of(
            &work,
            &Request {
                stream,
                ..Request::example()
            }
        ));
        type Change = (&'static str, fn(&mut Request));
        let changes: &[Change] = &[
            ("function", |other| other.function = Function::AllGather),
            ("send buffer", |other| other.send += 4),
            ("receive buffer", |other| other.recv += 4),
            ("count", |other| other.count += 1),
            ("type", |other| other.data_type = DataType::Int32),
            ("reduction", |other| other.reduce_op = ReduceOp::Avg),
            ("factor", |other| other.scalar = Scalar::Immediate(1)),
            ("root", |other| other.peer = Some(1)),
            ("window", |other| other.window = Some(WindowBuffer::default())),
        ];
        for (what, change) in changes {
            let mut other = Request::example();
            change(&mut other);
            assert!(!is_of(&work, &other), "another {what}");
        }
    }

    #[test]
    fn what_depends_on_more_than_the_call_is_planned_each_time() {
        let by = |function, path| {
            let mut task = Task::example();
            (task.request.function, task.method.path) = (function, path);
            is_cacheable(&task)
        };
        assert!(by(Function::AllReduce, DataPath::Ll128));
        for path in [DataPath::ZeroCopy, DataPath::Push, DataPath::CopyEngine] {
            assert!(!by(Function::AllReduce, path), "{path:?}");
        }
        assert!(!by(Function::Send, DataPath::Ll128));
    }
}
