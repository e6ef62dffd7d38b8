//! One proxy operation, its network steps summed up.

use ringsight_records::{Carrier, Flags, Numbering, Record, State};

/// Steps of one proxy operation that may be under way at once: twice NCCL's `NCCL_STEPS`.
pub(super) const ACTIVE_STEPS: usize = 16;

/// What carried a step that is kept of one proxy operation: enough to see how it went, however many steps there are.
const CARRIED: usize = 16;
/// The same of steps that were sent again, beyond these: all that can be under way when a path fails, over both.
const AGAIN: usize = 2 * ACTIVE_STEPS;
/// Ports and sockets that the bytes of one proxy operation are counted by.
const WAYS: usize = 16;

/// The states that a network step waits in, in the order of [`ProxyOperation::sums`].
pub const STEP_STATES: [State; 6] = [
    State::STEP_SEND_GPU_WAIT,
    State::STEP_SEND_PEER_WAIT,
    State::STEP_SEND_WAIT,
    State::STEP_RECV_WAIT,
    State::STEP_RECV_FLUSH_WAIT,
    State::STEP_RECV_GPU_WAIT,
];

/// Position in [`STEP_STATES`], or its length for a step that has begun and is in none of them.
fn state_index(state: State) -> usize {
    STEP_STATES
        .iter()
        .position(|known| *known == state)
        .unwrap_or(STEP_STATES.len())
}

/// Time that the steps of a proxy operation spent in one state.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct StateSum {
    /// When a step first entered it, monotonic nanoseconds; 0 = never.
    pub first_ns: u64,
    /// Sum over the steps, nanoseconds.
    pub total_ns: u64,
    /// Longest, nanoseconds.
    pub max_ns: u64,
    /// How often it was entered.
    pub count: u32,
}

/// A step that has begun and not ended.
#[derive(Clone, Copy, Debug, Default)]
struct ActiveStep {
    step: u64,
    started_ns: u64,
    since_ns: u64,
    state: usize,
}

/// A step on its way between nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Carried {
    /// Port and queue pair, or socket; the step.
    pub carrier: Carrier,
    /// Handed to the network, monotonic nanoseconds.
    pub start_ns: u64,
    /// There, or sent again over another path; 0 = neither was seen.
    pub stop_ns: u64,
    /// Bytes.
    pub bytes: u64,
    /// Over a path that is not the connection's first.
    pub backup: bool,
    /// How often the step had been sent before.
    pub resends: u8,
    /// Its path failed, and the step was sent again.
    pub failed: bool,
}

impl Carried {
    /// It is kept for more than being one of the first.
    const fn is_of_failover(&self) -> bool {
        self.resends > 0 || self.failed
    }
}

/// What network bytes went over: the number of the port, `None` for a socket, and whether it was a backup path's.
pub type Way = (Option<u8>, bool);

/// What a path of a connection is called.
pub(crate) const fn path_name(backup: bool) -> &'static str {
    if backup { "backup" } else { "primary" }
}

/// What a record of what carries a step did to the list of those.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Carrying {
    /// Nothing.
    AsBefore,
    /// There is one more.
    Kept,
    /// There is one fewer.
    Dropped,
    /// There is one that should be there.
    LeftOut,
}

/// One proxy operation (channel, peer, direction) with its steps summed up. No step is kept once it has ended.
#[derive(Clone, Debug)]
pub struct ProxyOperation {
    /// Channel.
    pub channel: u8,
    /// Peer rank.
    pub peer: u32,
    /// Whether this rank sends.
    pub send: bool,
    /// Counts operations that are equal in channel, peer and direction.
    pub index: u32,
    /// Posted; 0 = not seen.
    pub start_ns: u64,
    /// First progress; 0 = not seen.
    pub progress_ns: u64,
    /// Done; 0 = not seen.
    pub stop_ns: u64,
    /// Steps announced.
    pub steps: u32,
    /// Steps seen to end.
    pub steps_done: u32,
    /// Bytes of the steps that ended.
    pub bytes: u64,
    /// Longest step, nanoseconds.
    pub max_step_ns: u64,
    /// Steps whose start or end was not seen, or which did not fit among the active ones.
    pub steps_missed: u32,
    /// Time by state, as in [`STEP_STATES`].
    pub sums: [StateSum; STEP_STATES.len()],
    /// Steps on their way between nodes: the first ones, those that were sent again, with what failed, and those under way.
    pub carried: Vec<Carried>,
    /// How their work requests are numbered, if it was told.
    pub numbering: Option<Numbering>,
    /// Bytes that arrived, by what they went over.
    pub by_way: Vec<(Way, u64)>,
    active: [ActiveStep; ACTIVE_STEPS],
    active_len: usize,
}

/// The states in which a step waits for the peer: for its data, or for room at its end.
const PEER_WAITS: [State; 2] = [State::STEP_RECV_WAIT, State::STEP_SEND_PEER_WAIT];

impl ProxyOperation {
    /// The longest that one of its steps waited for the peer, nanoseconds.
    #[must_use]
    pub fn peer_wait_ns(&self) -> u64 {
        let waits = PEER_WAITS
            .iter()
            .map(|state| self.sums[state_index(*state)].max_ns);
        waits.max().unwrap_or(0)
    }

    pub(super) fn new(record: &Record, index: u32) -> Self {
        Self {
            channel: record.channel,
            peer: record.peer.cast_unsigned(),
            send: record.flags().contains(Flags::SEND),
            index,
            start_ns: 0,
            progress_ns: 0,
            stop_ns: 0,
            steps: 0,
            steps_done: 0,
            bytes: 0,
            max_step_ns: 0,
            steps_missed: 0,
            sums: Default::default(),
            carried: Vec::new(),
            numbering: None,
            by_way: Vec::new(),
            active: Default::default(),
            active_len: 0,
        }
    }

    /// Channel, peer and direction.
    pub(super) fn connection(&self) -> (u8, u32, bool) {
        (self.channel, self.peer, self.send)
    }

    pub(super) fn is_for(&self, record: &Record) -> bool {
        self.channel == record.channel
            && self.peer == record.peer.cast_unsigned()
            && self.send == record.flags().contains(Flags::SEND)
    }

    /// Whether its start, its end and every announced step were seen.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        self.start_ns != 0
            && self.stop_ns != 0
            && self.steps_missed == 0
            && self.active_len == 0
            // Without step records (a kind that nobody armed) there are sums of none, not of some.
            && (self.steps_done == self.steps || self.steps_done == 0)
    }

    /// A record of what carries a step. `has_room` is whether one more may be kept.
    pub(super) fn carry(&mut self, record: &Record, has_room: bool) -> Carrying {
        if record.state == State::NET_PLUGIN_UPDATE {
            self.numbering = Numbering::from_value(record.value);
            return Carrying::AsBefore;
        }
        let mut carrying = Carrying::AsBefore;
        let carrier = record.carrier();
        let backup = record.flags().contains(Flags::BACKUP);
        let known = self
            .carried
            .iter()
            .position(|known| known.stop_ns == 0 && known.carrier.step == carrier.step);
        if record.state == State::START {
            let mut resends = 0;
            if let Some(before) = known.and_then(|at| self.carried.get_mut(at)) {
                (before.stop_ns, before.failed) = (record.time_ns, true);
                resends = before.resends.saturating_add(1);
            }
            if self.carried.len() < CARRIED + AGAIN + ACTIVE_STEPS {
                if !has_room {
                    return Carrying::LeftOut;
                }
                self.carried.push(Carried {
                    carrier,
                    start_ns: record.time_ns,
                    stop_ns: 0,
                    bytes: record.bytes,
                    backup,
                    resends,
                    failed: false,
                });
                carrying = Carrying::Kept;
            }
            return carrying;
        }
        if let Some(at) = known {
            let ended = &mut self.carried[at];
            ended.stop_ns = record.time_ns;
            // A library that does not tell when it sends a step again says here what carried it last.
            (ended.carrier, ended.backup) = (carrier, backup);
            let is_ended = |known: &&Carried| known.stop_ns != 0 && !known.is_of_failover();
            if !ended.is_of_failover() && self.carried.iter().filter(is_ended).count() > CARRIED {
                self.carried.swap_remove(at);
                carrying = Carrying::Dropped;
            }
        }
        if record.state != State::STOP {
            return carrying;
        }
        let (way, room) = ((carrier.port, backup), self.by_way.len() < WAYS);
        match self.by_way.iter_mut().find(|(known, _)| *known == way) {
            Some((_, bytes)) => *bytes = bytes.saturating_add(record.bytes),
            None if room => self.by_way.push((way, record.bytes)),
            None => {}
        }
        carrying
    }

    pub(super) fn step(&mut self, record: &Record) {
        let found = self.active[..self.active_len]
            .iter()
            .position(|active| active.step == record.value);
        let now = record.time_ns;
        if record.state == State::START {
            match found {
                Some(_) => self.steps_missed = self.steps_missed.saturating_add(1),
                None if self.active_len == ACTIVE_STEPS => {
                    self.steps_missed = self.steps_missed.saturating_add(1);
                }
                None => {
                    self.active[self.active_len] = ActiveStep {
                        step: record.value,
                        started_ns: now,
                        since_ns: now,
                        state: STEP_STATES.len(),
                    };
                    self.active_len += 1;
                }
            }
            return;
        }
        let ended = matches!(record.state, State::STOP | State::ABORTED);
        let Some(at) = found else {
            // Its start was before the ring was armed, was lost, or did not fit. Counted once, at its end.
            self.steps_missed = self.steps_missed.saturating_add(u32::from(ended));
            return;
        };
        let active = &mut self.active[at];
        if let Some(sum) = self.sums.get_mut(active.state) {
            let spent = now.saturating_sub(active.since_ns);
            sum.total_ns = sum.total_ns.saturating_add(spent);
            sum.max_ns = sum.max_ns.max(spent);
        }
        if ended {
            self.steps_done = self.steps_done.saturating_add(1);
            self.bytes = self.bytes.saturating_add(record.bytes);
            self.max_step_ns = self.max_step_ns.max(now.saturating_sub(active.started_ns));
            self.active_len -= 1;
            self.active[at] = self.active[self.active_len];
        } else {
            active.state = state_index(record.state);
            active.since_ns = now;
            if let Some(sum) = self.sums.get_mut(active.state) {
                sum.count = sum.count.saturating_add(1);
                if sum.first_ns == 0 {
                    sum.first_ns = now;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use ringsight_records::Kind;

    use super::*;

    const PRIMARY: u32 = 0x11;
    const BACKUP: u32 = 0x22;

    fn operation() -> ProxyOperation {
        ProxyOperation::new(&record(State::START, 0, PRIMARY, 0), 0)
    }

    fn record(state: State, step: u32, number: u32, time_ns: u64) -> Record {
        let carrier = Carrier {
            port: Some(u8::from(number == BACKUP)),
            number,
            step,
        };
        Record {
            value: carrier.to_value(),
            bytes: 100,
            ..Record::new(Kind::NetPlugin, state, time_ns)
        }
        .with_flags(Flags::SEND.with(Flags::BACKUP.when(number == BACKUP)))
    }

    fn sent(operation: &mut ProxyOperation, steps: std::ops::Range<u32>) {
        for step in steps {
            operation.carry(&record(State::START, step, PRIMARY, 10), true);
            operation.carry(&record(State::STOP, step, PRIMARY, 20), true);
        }
    }

    #[test]
    fn a_step_that_is_sent_again_is_kept_with_what_failed_however_many_came_before() {
        let mut operation = operation();
        sent(&mut operation, 0..100);
        for step in 100..100 + ACTIVE_STEPS as u32 {
            operation.carry(&record(State::START, step, PRIMARY, 30), true);
        }
        for step in 100..100 + ACTIVE_STEPS as u32 {
            operation.carry(&record(State::START, step, BACKUP, 50), true);
        }
        for step in 100..100 + ACTIVE_STEPS as u32 {
            operation.carry(&record(State::STOP, step, BACKUP, 60), true);
        }
        sent(&mut operation, 200..300);
        assert_eq!(operation.carried.len(), CARRIED + AGAIN);
        for step in 100..100 + ACTIVE_STEPS as u32 {
            let of: Vec<&Carried> = operation
                .carried
                .iter()
                .filter(|carried| carried.carrier.step == step)
                .collect();
            let times: Vec<_> = of.iter().map(|one| (one.start_ns, one.stop_ns)).collect();
            assert_eq!(times, [(30, 50), (50, 60)]);
            assert!(of[0].failed && !of[0].backup && of[0].resends == 0);
            assert!(!of[1].failed && of[1].backup && of[1].resends == 1);
            assert_eq!([of[0].carrier.number, of[1].carrier.number], [PRIMARY, BACKUP]);
        }
        // What failed has carried nothing.
        let mut by_way = operation.by_way.clone();
        by_way.sort_unstable();
        assert_eq!(
            by_way,
            [
                ((Some(0), false), 20_000),
                ((Some(1), true), 100 * ACTIVE_STEPS as u64)
            ]
        );
    }

    #[test]
    fn without_a_failure_the_first_steps_are_kept() {
        let mut operation = operation();
        sent(&mut operation, 0..100);
        let steps: Vec<u32> = operation.carried.iter().map(|one| one.carrier.step).collect();
        assert_eq!(steps, (0..CARRIED as u32).collect::<Vec<_>>());
    }

    #[test]
    fn what_is_kept_is_bounded_whatever_is_lost() {
        let mut operation = operation();
        for step in 0..1000 {
            operation.carry(&record(State::START, step, PRIMARY, 10), true);
            operation.carry(&record(State::START, step, BACKUP, 11), true);
        }
        assert_eq!(operation.carried.len(), CARRIED + AGAIN + ACTIVE_STEPS);
    }

    #[test]
    fn a_library_that_tells_of_the_end_alone_is_believed() {
        let mut operation = operation();
        operation.carry(&record(State::START, 0, PRIMARY, 10), true);
        operation.carry(&record(State::STOP, 0, BACKUP, 20), true);
        let [carried] = operation.carried[..] else {
            panic!("{:?}", operation.carried)
        };
        assert!(carried.backup && !carried.failed && carried.stop_ns == 20);
    }
}
