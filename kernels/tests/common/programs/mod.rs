//! Channel programs: threads as ranks over FIFOs on the heap, every function against a plain reference.

mod collectives;
mod endings;
mod messages;
mod refusals;

use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    sync::{
        Arc, Mutex,
        atomic::{AtomicUsize, Ordering},
    },
};

use ringsight_kernels::{
    Connections, Fifo, Observer, Scalar, When, Work, ZeroCopy,
    fifo::{PRODUCER_BYTES, SLOTS},
};
use ringsight_records::{Algorithm, DataType, Function, ReduceOp};

use super::{run, runs};

/// Heap memory for a FIFO.
struct Heap(*mut u8, Layout);
// SAFETY: only an address that is freed once.
unsafe impl Send for Heap {}
// SAFETY: as above.
unsafe impl Sync for Heap {}
impl Drop for Heap {
    fn drop(&mut self) {
        // SAFETY: allocated in `new` with this layout.
        unsafe { dealloc(self.0, self.1) };
    }
}

impl Heap {
    /// Zeroed.
    fn new(bytes: usize) -> Self {
        let layout = Layout::from_size_align(bytes, 4096).unwrap();
        // SAFETY: the layout is not empty.
        Self(unsafe { alloc_zeroed(layout) }, layout)
    }
}

/// One in a piece, in two, or with its slots elsewhere, in turn: which of them it is makes no difference to anybody.
pub(crate) fn fifo(slot_bytes: usize) -> Arc<Fifo> {
    static MADE: AtomicUsize = AtomicUsize::new(0);
    let whole = Heap::new(Fifo::memory_bytes(slot_bytes));
    let kind = MADE.fetch_add(1, Ordering::Relaxed) % 3;
    if kind != 1 {
        let base = whole.0;
        // SAFETY: aligned, zeroed, and freed by the last owner of `Heap`.
        let fifo = unsafe { Fifo::new(base, slot_bytes, Arc::new(whole)) };
        if kind == 0 {
            return Arc::new(fifo);
        }
        let slots = Heap::new(SLOTS * slot_bytes);
        fifo.set_slots_address(slots.0.expose_provenance() as u64);
        return Arc::new(fifo.with_indirect_slots(Arc::new(slots)));
    }
    let producer = Heap::new(PRODUCER_BYTES);
    let halves = (whole.0, producer.0);
    // SAFETY: as above.
    Arc::new(unsafe { Fifo::apart(halves.0, halves.1, slot_bytes, Arc::new((whole, producer))) })
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Seen {
    Started(u32, u32, u8),
    Stopped(u32, u32, u8, bool),
    Mismatch(u32, u32, u8, u32),
    Finished(u32, bool),
}

#[derive(Default)]
pub(crate) struct Log(Mutex<Vec<Seen>>);
impl Observer for Log {
    fn channel_started(&self, op: u32, replay: u32, channel: u8, _: When) {
        self.0.lock().unwrap().push(Seen::Started(op, replay, channel));
    }
    fn channel_stopped(&self, op: u32, replay: u32, channel: u8, aborted: bool, _: When) {
        self.0
            .lock()
            .unwrap()
            .push(Seen::Stopped(op, replay, channel, aborted));
    }
    fn mismatch(&self, op: u32, replay: u32, channel: u8, theirs: u32) {
        self.0
            .lock()
            .unwrap()
            .push(Seen::Mismatch(op, replay, channel, theirs));
    }
    fn launch_finished(&self, replay: u32, aborted: bool) {
        self.0.lock().unwrap().push(Seen::Finished(replay, aborted));
    }
}

/// A ring through `members` on one channel: `(order, prev, next)` of each, in the order of `members`.
fn ring(members: &[u32], slot_bytes: usize) -> Vec<Connections> {
    let n = members.len();
    let fifos: Vec<_> = (0..n).map(|_| fifo(slot_bytes)).collect();
    (0..n)
        .map(|at| Connections::Ring {
            order: (0..n).map(|hop| members[(at + hop) % n]).collect(),
            prev: fifos[(at + n - 1) % n].clone(),
            next: fifos[at].clone(),
        })
        .collect()
}

pub(crate) fn p2p(
    op: u32,
    function: Function,
    address: usize,
    count: usize,
    connections: Connections,
) -> Work {
    let (send, recv) = if function == Function::Send {
        (address, 0)
    } else {
        (0, address)
    };
    Work {
        op,
        tag: 3,
        function,
        algorithm: Algorithm::Direct,
        data_type: DataType::Uint8,
        reduce_op: ReduceOp::None,
        scalar: Scalar::None,
        send,
        recv,
        count,
        part: 0..count,
        rank: 0,
        ranks: 4,
        root: 0,
        connections,
        zero_copy: ZeroCopy::Off,
        pushes: false,
    }
}
