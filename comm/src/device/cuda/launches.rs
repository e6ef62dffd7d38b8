//! What threads that launch hand the thread that follows a GPU, and it them.

use std::sync::{Condvar, Mutex};

use ringsight_kernels::cuda::CAPTURED;

use super::{drain::Entered, gpu::Slot};
use crate::communicator::lock;

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
    pub(super) free: Vec<Slot>,
    /// The thread that drains waits to be woken.
    pub(super) asleep: bool,
    /// Launches that may run or wait to: eager ones that are not over, and replays that have begun.
    pub(super) running: usize,
    /// Numbers given to eager and to captured launches.
    numbers: [u32; 2],
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
