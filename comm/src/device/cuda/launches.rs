//! What threads that launch hand the thread that follows a GPU, and it them.

use std::sync::{Condvar, Mutex};

use ringsight_comm_base::sync::lock;
use ringsight_kernels::cuda::CAPTURED;

use super::{drain::Entered, gpu::Slot};

/// What threads that launch and the thread that drains one GPU's events hand each other. Launches belong to the latter: no
/// observer is told of anything under this lock.
#[derive(Default)]
pub(super) struct Launches {
    pub(super) exchange: Mutex<Exchange>,
    /// There is something to drain.
    pub(super) wake: Condvar,
}

/// See [`Launches`].
#[derive(Default)]
pub(super) struct Exchange {
    /// Launches that may begin, in order.
    pub(super) entered: Vec<Entered>,
    /// Those that will not run, or not any more.
    pub(super) forgotten: Vec<u32>,
    pub(super) free: Free<Slot>,
    /// The thread that drains waits to be woken.
    pub(super) asleep: bool,
    /// Launches that may run or wait to: eager ones that are not over, and replays that have begun.
    pub(super) running: usize,
    /// Numbers given to eager and to captured launches.
    numbers: [u32; 2],
}

/// Free slots, by the chunk of memory that they are in. Where the slots of two launches are of one chunk, less of their arguments differs,
/// and the driver has less to write ([`super::kernel_graphs`]): they are taken from one chunk as long as that has some, then from the one that
/// has most.
pub(super) struct Free<T> {
    chunks: Vec<Vec<T>>,
    /// Where the last one was taken.
    current: usize,
}

impl<T> Default for Free<T> {
    fn default() -> Self {
        Self {
            chunks: Vec::new(),
            current: 0,
        }
    }
}

impl<T> Free<T> {
    /// One more chunk, of whose number its slots are made.
    pub(super) fn add(&mut self, slots: impl FnOnce(usize) -> Vec<T>) {
        self.chunks.push(slots(self.chunks.len()));
    }

    /// A slot of a chunk that has been added comes back.
    pub(super) fn give(&mut self, chunk: usize, slot: T) {
        self.chunks[chunk].push(slot);
    }

    pub(super) fn take(&mut self) -> Option<T> {
        if let Some(slot) = self.chunks.get_mut(self.current).and_then(Vec::pop) {
            return Some(slot);
        }
        self.current = (0..self.chunks.len()).max_by_key(|chunk| self.chunks[*chunk].len())?;
        self.chunks[self.current].pop()
    }
}

impl Exchange {
    /// For the next launch. Captured ones live as long as their graphs: no eager one has the number of one of these, however many of those there have been.
    pub(super) fn number(&mut self, captured: bool) -> u32 {
        let last = &mut self.numbers[usize::from(captured)];
        *last = (*last + 1) % CAPTURED;
        *last | if captured { CAPTURED } else { 0 }
    }
}

impl Launches {
    /// A launch will not run any more.
    pub(super) fn forget(&self, number: u32) {
        lock(&self.exchange).forgotten.push(number);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slots_are_of_one_chunk_as_long_as_that_has_some() {
        let mut free = Free::default();
        assert_eq!(free.take(), None);
        let mut chunks = Vec::new();
        let mut add = |free: &mut Free<u32>, slots: &[u32]| {
            free.add(|chunk| {
                chunks.push(chunk);
                slots.to_vec()
            });
        };
        add(&mut free, &[1, 2]);
        assert_eq!([free.take(), free.take(), free.take()], [Some(2), Some(1), None]);
        add(&mut free, &[11, 12]);
        add(&mut free, &[21, 22, 23]);
        assert_eq!(chunks, [0, 1, 2]);
        assert_eq!(free.take(), Some(23));
        // Whatever comes back, and where.
        free.give(chunks[0], 1);
        free.give(chunks[2], 23);
        assert_eq!([(); 3].map(|()| free.take()), [Some(23), Some(22), Some(21)]);
        free.give(chunks[0], 2);
        free.give(chunks[1], 13);
        assert_eq!(free.take(), Some(13), "that has most");
        let rest = [Some(12), Some(11), Some(2), Some(1), None];
        assert_eq!([(); 5].map(|()| free.take()), rest);
    }

    #[test]
    fn no_eager_launch_has_the_number_of_a_captured_one() {
        let mut exchange = Exchange::default();
        let captured = [exchange.number(true), exchange.number(true)];
        assert_ne!(captured[0], captured[1]);
        exchange.numbers[0] = CAPTURED - 3;
        let eager = [(); 5].map(|()| exchange.number(false));
        assert_eq!(eager, [CAPTURED - 2, CAPTURED - 1, 0, 1, 2]);
        assert!(eager.iter().all(|number| !captured.contains(number)));
    }
}
