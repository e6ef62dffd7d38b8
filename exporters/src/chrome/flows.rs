//! The ends of messages that wait for their other end.

use std::collections::{HashMap, VecDeque};

use super::tracks::Place;

/// Ends that wait at the same time. The oldest gives way: its other end was lost, or is in another host's file.
const WAITING: usize = 65_536;

/// One end of a flow.
#[derive(Clone, Copy)]
pub(super) struct End {
    pub(super) place: Place,
    pub(super) unix_ns: u64,
}

/// Both ends of a flow.
#[derive(Clone, Copy)]
pub(super) struct Ends {
    pub(super) start: End,
    pub(super) finish: End,
}

/// Pairs the ends of flows, in whichever order they come.
#[derive(Default)]
pub(super) struct Flows {
    starts: Waiting,
    finishes: Waiting,
}

#[derive(Default)]
struct Waiting {
    ends: HashMap<[u8; 8], End>,
    /// The ids of `ends`, oldest first, and of ends that found their other end since.
    order: VecDeque<[u8; 8]>,
}

impl Waiting {
    fn put(&mut self, id: [u8; 8], end: End) {
        if self.ends.insert(id, end).is_none() {
            self.order.push_back(id);
        }
        // Also when many have found their other end: the order does not grow without bound.
        while self.order.len() > WAITING {
            let oldest = self.order.pop_front();
            oldest.and_then(|id| self.ends.remove(&id));
        }
    }
}

impl Flows {
    /// The start of flow `id`. Returns both ends if the other one is there.
    pub(super) fn start(&mut self, id: [u8; 8], start: End) -> Option<Ends> {
        let Some(finish) = self.finishes.ends.remove(&id) else {
            self.starts.put(id, start);
            return None;
        };
        Some(Ends { start, finish })
    }

    /// The finish of flow `id`. Returns both ends if the other one is there.
    pub(super) fn finish(&mut self, id: [u8; 8], finish: End) -> Option<Ends> {
        let Some(start) = self.starts.ends.remove(&id) else {
            self.finishes.put(id, finish);
            return None;
        };
        Some(Ends { start, finish })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::chrome::tracks::Tracks;

    fn end(unix_ns: u64) -> End {
        let place = Tracks::default().operations("host", 1, 0, &mut Vec::new());
        End { place, unix_ns }
    }

    #[test]
    fn ends_are_paired_in_either_order_and_once() {
        let mut flows = Flows::default();
        let times = |ends: Option<Ends>| ends.map(|ends| (ends.start.unix_ns, ends.finish.unix_ns));
        assert_eq!(times(flows.start([1; 8], end(5))), None);
        assert_eq!(times(flows.finish([2; 8], end(9))), None);
        assert_eq!(times(flows.finish([1; 8], end(6))), Some((5, 6)));
        assert_eq!(times(flows.start([2; 8], end(8))), Some((8, 9)));
        assert_eq!(times(flows.finish([1; 8], end(7))), None, "the start is used up");
    }

    #[test]
    fn ends_whose_other_end_never_comes_take_bounded_memory() {
        let mut flows = Flows::default();
        for id in 0..3 * WAITING as u64 {
            assert!(flows.start(id.to_be_bytes(), end(id)).is_none());
            if id % 2 == 0 {
                assert!(flows.finish(id.to_be_bytes(), end(id)).is_some());
            }
        }
        assert!(flows.starts.ends.len() <= WAITING && flows.starts.order.len() <= WAITING);
        assert!(flows.finish(1_u64.to_be_bytes(), end(0)).is_none(), "it gave way");
        let last = 3 * WAITING as u64 - 1;
        assert!(flows.finish(last.to_be_bytes(), end(0)).is_some());
    }
}
