//! One proxy operation, its network steps summed up.

use ringsight_records::{Carrier, Flags, Numbering, Record, State};

/// Steps of one proxy operation that may be under way at once: twice NCCL's `NCCL_STEPS`.
pub(super) const ACTIVE_STEPS: usize = 16;

/// What carried a step that is kept of one proxy operation: enough to see how it went, however many steps there are.
const CARRIED: usize = 16;
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
    /// There; 0 = not seen.
    pub stop_ns: u64,
    /// Bytes.
    pub bytes: u64,
    /// Over a path that is not the connection's first.
    pub backup: bool,
}

/// What network bytes went over: the number of the port, `None` for a socket, and whether it was a backup path's.
pub type Way = (Option<u8>, bool);

/// What a path of a connection is called.
pub(crate) const fn path_name(backup: bool) -> &'static str {
    if backup { "backup" } else { "primary" }
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
    /// The first steps on their way between nodes.
    pub carried: Vec<Carried>,
    /// How their work requests are numbered, if it was told.
    pub numbering: Option<Numbering>,
    /// Bytes that arrived, by what they went over.
    pub by_way: Vec<(Way, u64)>,
    active: [ActiveStep; ACTIVE_STEPS],
    active_len: usize,
}

impl ProxyOperation {
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

    /// A record of what carries a step.
    pub(super) fn carry(&mut self, record: &Record) {
        if record.state == State::NET_PLUGIN_UPDATE {
            self.numbering = Numbering::from_value(record.value);
            return;
        }
        let carrier = record.carrier();
        let backup = record.flags().contains(Flags::BACKUP);
        if record.state == State::START {
            if self.carried.len() < CARRIED {
                self.carried.push(Carried {
                    carrier,
                    start_ns: record.time_ns,
                    stop_ns: 0,
                    bytes: record.bytes,
                    backup,
                });
            }
            return;
        }
        // After a failover it is another queue pair that carries the step.
        let under_way = |known: &&mut Carried| known.stop_ns == 0 && known.carrier.step == carrier.step;
        if let Some(known) = self.carried.iter_mut().find(under_way) {
            known.stop_ns = record.time_ns;
            (known.carrier, known.backup) = (carrier, backup);
        }
        if record.state != State::STOP {
            return;
        }
        let (way, room) = ((carrier.port, backup), self.by_way.len() < WAYS);
        match self.by_way.iter_mut().find(|(known, _)| *known == way) {
            Some((_, bytes)) => *bytes = bytes.saturating_add(record.bytes),
            None if room => self.by_way.push((way, record.bytes)),
            None => {}
        }
    }

    pub(super) fn step(&mut self, record: &Record) {
        let found = self.active[..self.active_len]
            .iter()
            .position(|active| active.step == record.value);
        let now = record.time_ns;
        if record.state == State::START {
            match found {
                Some(_) => self.steps_missed += 1,
                None if self.active_len == ACTIVE_STEPS => self.steps_missed += 1,
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
            self.steps_missed += u32::from(ended);
            return;
        };
        let active = &mut self.active[at];
        if let Some(sum) = self.sums.get_mut(active.state) {
            let spent = now.saturating_sub(active.since_ns);
            sum.total_ns += spent;
            sum.max_ns = sum.max_ns.max(spent);
        }
        if ended {
            self.steps_done += 1;
            self.bytes += record.bytes;
            self.max_step_ns = self.max_step_ns.max(now.saturating_sub(active.started_ns));
            self.active_len -= 1;
            self.active[at] = self.active[self.active_len];
        } else {
            active.state = state_index(record.state);
            active.since_ns = now;
            if let Some(sum) = self.sums.get_mut(active.state) {
                sum.count += 1;
                if sum.first_ns == 0 {
                    sum.first_ns = now;
                }
            }
        }
    }
}
