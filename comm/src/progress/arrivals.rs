//! When this rank arrived at the last operations of a communicator, and in which of them it waited.
//!
//! A rank arrives at an operation when the first channel starts on its device. The threads that hear of the device write here.
//! The watchdog reads: it answers other ranks from here, and asks them about operations in which this rank waited
//! (`watchdog::arrivals`). Communicators of one node have no log, because one collector sees all their arrivals.
//!
//! Memory is bounded, about 200 KB from the first operation on: an arrival is overwritten by that of a later operation,
//! usually the 4,096th after it.

use std::{mem, sync::Mutex};

use ringsight_comm_base::sync::lock;
use ringsight_records::{ArrivalNotice, Flags, Function, Kind};

use crate::{
    observe,
    op::{self, Identity, OpInfo},
};

/// Arrivals kept: of more than the 100 ms between two questions, if an operation takes 25 µs.
const KEPT: usize = 4096;

/// Operations that wait for the next question. Of more than these nothing is asked.
const MOST_WAITED: usize = 1024;

/// How long an operation must take for this rank to ask about it.
pub(crate) const LEAST_WAIT_NS: u64 = 1_000_000;

/// An operation whose arrivals other ranks are asked about.
#[derive(Clone, Copy, Debug)]
pub(crate) struct ArrivedOperation {
    pub(crate) info: OpInfo,
    /// 0 for an eager operation, n for the n-th replay of a captured one.
    pub(crate) replay: u32,
    /// When this rank arrived, `CLOCK_MONOTONIC` nanoseconds.
    pub(crate) arrived_ns: u64,
    /// When its last channel stopped here; `u64::MAX` while it has not.
    pub(crate) end_ns: u64,
    pub(crate) depends_on: Dependencies,
}

impl ArrivedOperation {
    /// How long it took here.
    pub(crate) fn took_ns(&self) -> u64 {
        self.end_ns.saturating_sub(self.arrived_ns)
    }
}

/// The ranks that the completion of an operation on a rank depends on.
///
/// Ranks between a root and this one are left out: which these are depends on the algorithm. So a wait for one of them is
/// recorded as a wait for the root, with a small lag.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Dependencies {
    /// All other ranks of the communicator.
    All,
    /// This one: the other end of a message, or the root.
    One(u32),
}

impl Dependencies {
    /// Those of an operation on this rank, if there are any.
    fn of(info: &OpInfo) -> Option<Self> {
        let is_message = info.flags.contains(Flags::P2P);
        match u32::try_from(info.peer) {
            _ if op::is_simulated(info.seq) => None,
            Ok(peer) if is_message => (peer != info.rank).then_some(Self::One(peer)),
            Ok(root) => Self::of_rooted(observe::pages()?.description(info.op)?.function, info.rank, root),
            Err(_) => (!is_message).then_some(Self::All),
        }
    }

    /// Those of a collective with a root.
    fn of_rooted(function: u8, rank: u32, root: u32) -> Option<Self> {
        match Function::from_code(function)? {
            Function::Broadcast | Function::Scatter => (rank != root).then_some(Self::One(root)),
            Function::Reduce | Function::Gather => (rank == root).then_some(Self::All),
            _ => None,
        }
    }

    /// Whether this rank hears of those that waited for it, because they ask it and it asks them.
    fn are_mutual(info: &OpInfo) -> bool {
        info.flags.contains(Flags::P2P) || info.peer < 0
    }
}

/// The arrival at one operation.
#[derive(Clone, Copy, Debug)]
struct Arrival {
    info: OpInfo,
    replay: u32,
    arrived_ns: u64,
    /// `u64::MAX` while it has not completed.
    end_ns: u64,
    /// Other ranks have been asked about it, or will be.
    is_asked: bool,
}

impl Arrival {
    fn is_at(&self, identity: Identity, replay: u32) -> bool {
        self.replay == replay && Identity::of(&self.info) == identity
    }

    /// Other ranks are asked about it from now on.
    fn ask(&mut self, depends_on: Dependencies) -> ArrivedOperation {
        self.is_asked = true;
        ArrivedOperation {
            info: self.info,
            replay: self.replay,
            arrived_ns: self.arrived_ns,
            end_ns: self.end_ns,
            depends_on,
        }
    }
}

/// Arrivals of this rank at the operations of one communicator.
#[derive(Default)]
pub(crate) struct ArrivalLog(Mutex<State>);

#[derive(Default)]
struct State {
    /// An arrival is at its [`place`]. Empty before the first one.
    arrivals: Box<[Option<Arrival>]>,
    /// Operations to ask about.
    waited: Vec<ArrivedOperation>,
}

impl State {
    fn find(&mut self, identity: Identity, replay: u32) -> Option<&mut Arrival> {
        let arrival = self.arrivals.get_mut(place(identity, replay))?.as_mut()?;
        arrival.is_at(identity, replay).then_some(arrival)
    }
}

/// Where an arrival is kept. Successive operations of a sequence have successive places.
fn place(identity: Identity, replay: u32) -> usize {
    // Sequences, graphs and replays begin far apart from each other.
    const APART: u64 = 0x9e37_79b9_7f4a_7c15;
    let pair = match identity {
        Identity::Collective { .. } => 0,
        Identity::Message { from, to, .. } => (u64::from(from) << 32 | u64::from(to)) + 1,
    };
    let first = [pair, identity.seq() >> 32, u64::from(replay)]
        .into_iter()
        .fold(0u64, |sum, part| sum.wrapping_add(part).wrapping_mul(APART));
    identity.seq().wrapping_add(first >> 32) as usize % KEPT
}

impl ArrivalLog {
    /// This rank arrived at an operation.
    pub(super) fn arrive(&self, info: &OpInfo, replay: u32, arrived_ns: u64) {
        let mut state = lock(&self.0);
        if state.arrivals.is_empty() {
            state.arrivals = vec![None; KEPT].into_boxed_slice();
        }
        state.arrivals[place(Identity::of(info), replay)] = Some(Arrival {
            info: *info,
            replay,
            arrived_ns,
            end_ns: u64::MAX,
            is_asked: false,
        });
    }

    /// An operation completed here, from its first channel's start to its last one's stop. Other ranks are asked about it if this
    /// rank may have waited in it, and a collector wants to know for whom.
    pub(super) fn complete(
        &self,
        info: &OpInfo,
        replay: u32,
        (start_ns, end_ns): (u64, u64),
    ) -> ArrivalNotice {
        let is_wanted = observe::wants(Kind::Arrival);
        let may_have_waited = is_wanted && end_ns.saturating_sub(start_ns) >= LEAST_WAIT_NS;
        let depends_on = may_have_waited.then(|| Dependencies::of(info)).flatten();
        let mut state = lock(&self.0);
        let has_room = state.waited.len() < MOST_WAITED;
        let Some(arrival) = state.find(Identity::of(info), replay) else {
            return ArrivalNotice::Never;
        };
        // The channel that was heard of first need not be the one that started first.
        (arrival.arrived_ns, arrival.end_ns) = (start_ns, end_ns);
        match depends_on {
            _ if arrival.is_asked => ArrivalNotice::Follows,
            Some(depends_on) if has_room => {
                let operation = arrival.ask(depends_on);
                state.waited.push(operation);
                ArrivalNotice::Follows
            }
            None if is_wanted && !may_have_waited && Dependencies::are_mutual(info) => {
                ArrivalNotice::MayFollow
            }
            _ => ArrivalNotice::Never,
        }
    }

    /// When this rank arrived at an operation, `CLOCK_MONOTONIC` nanoseconds; `None` if it has not, or if that was too many
    /// operations ago. Another rank waited in it: if a collector reads here, this rank asks the others about it, too, because
    /// a rank that came late did not wait.
    pub(crate) fn answer(&self, identity: Identity, replay: u32, is_read: bool) -> Option<u64> {
        let mut state = lock(&self.0);
        let has_room = state.waited.len() < MOST_WAITED;
        let arrival = state.find(identity, replay)?;
        let arrived_ns = arrival.arrived_ns;
        if is_read
            && has_room
            && !arrival.is_asked
            && let Some(depends_on) = Dependencies::of(&arrival.info)
        {
            let operation = arrival.ask(depends_on);
            state.waited.push(operation);
        }
        Some(arrived_ns)
    }

    /// The operations to ask about that have come since the last call.
    pub(crate) fn take_waited(&self) -> Vec<ArrivedOperation> {
        mem::take(&mut lock(&self.0).waited)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn info(seq: u64, flags: Flags, peer: i32) -> OpInfo {
        OpInfo {
            op: 1,
            comm: 7,
            seq,
            bytes: 8,
            rank: 2,
            peer,
            flags,
        }
    }

    fn collective(seq: u64) -> OpInfo {
        info(seq, Flags::NONE, -1)
    }

    #[test]
    fn the_last_arrivals_of_a_sequence_are_known() {
        let log = ArrivalLog::default();
        let known = |seq, replay| log.answer(Identity::Collective { seq }, replay, false);
        assert_eq!(known(0, 0), None, "nothing has come");
        let last = 3 * KEPT as u64;
        (0..last).for_each(|seq| log.arrive(&collective(seq), 0, 1000 + seq));
        for seq in last - KEPT as u64..last {
            assert_eq!(known(seq, 0), Some(1000 + seq));
        }
        assert_eq!(known(last - 1 - KEPT as u64, 0), None, "overwritten");
        assert_eq!(known(last, 0), None, "not come");
        assert_eq!(known(last - 1, 1), None, "another replay");
    }

    #[test]
    fn messages_graphs_and_replays_are_told_apart() {
        let log = ArrivalLog::default();
        let node = collective(3 << 32 | 5);
        let send = info(5, Flags::P2P.with(Flags::SEND), 4);
        let recv = info(5, Flags::P2P, 4);
        let runs = [(collective(5), 0), (node, 1), (node, 2), (send, 0), (recv, 0)];
        for (at, (info, replay)) in (1..).zip(runs) {
            log.arrive(&info, replay, at);
        }
        for (at, (info, replay)) in (1..).zip(runs) {
            assert_eq!(log.answer(Identity::of(&info), replay, false), Some(at));
        }
    }

    #[test]
    fn an_operation_that_another_rank_asks_about_is_asked_about_once() {
        let log = ArrivalLog::default();
        log.arrive(&collective(5), 0, 77);
        let ask = |is_read| log.answer(Identity::Collective { seq: 5 }, 0, is_read);
        assert_eq!(ask(false), Some(77));
        assert!(log.take_waited().is_empty(), "no collector reads here");
        assert_eq!((ask(true), ask(true)), (Some(77), Some(77)));
        let waited: Vec<u64> = log.take_waited().iter().map(|waited| waited.arrived_ns).collect();
        assert_eq!(waited, [77]);
    }

    #[test]
    fn a_rank_depends_on_the_other_end_the_root_or_all() {
        let of = Dependencies::of;
        assert_eq!(of(&collective(5)), Some(Dependencies::All));
        assert_eq!(of(&collective(op::SIMULATED | 5)), None);
        assert_eq!(of(&info(5, Flags::P2P, 4)), Some(Dependencies::One(4)));
        assert_eq!(of(&info(5, Flags::P2P, 2)), None, "to itself");
        let rooted = |function: Function, rank| Dependencies::of_rooted(function.code(), rank, 3);
        for function in [Function::Broadcast, Function::Scatter] {
            assert_eq!(rooted(function, 2), Some(Dependencies::One(3)));
            assert_eq!(rooted(function, 3), None);
        }
        for function in [Function::Reduce, Function::Gather] {
            assert_eq!(rooted(function, 2), None);
            assert_eq!(rooted(function, 3), Some(Dependencies::All));
        }
    }

    #[test]
    fn no_rank_asks_without_bound() {
        let log = ArrivalLog::default();
        for seq in 0..2 * MOST_WAITED as u64 {
            log.arrive(&collective(seq), 0, 1);
            log.answer(Identity::Collective { seq }, 0, true);
        }
        assert_eq!(log.take_waited().len(), MOST_WAITED);
    }
}
