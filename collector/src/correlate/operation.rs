//! One operation on one rank, put together from its records.

use ringsight_exporters::model::{SpanId, TraceId};
use ringsight_records::{
    Arrival, ArrivalNotice, Cause, Description, Flags, Function, Kind, Record, State, pages::CAPTURED,
    verdicts::Nic,
};

use rustc_hash::FxHashMap;

use super::proxy::{Carrying, ProxyOperation};
use crate::{
    identity::{Direction, InstanceKey, TraceKind},
    limits::{Limit, Limits},
};

/// Failures of ports kept of one operation.
const DELAYS: usize = 8;
/// Proxy operations that an unused box keeps room for.
const KEPT_PROXIES: usize = 32;
/// So many are looked through; of more there is a table.
const FEW_PROXIES: usize = 16;

/// Channel, peer and direction of a proxy operation.
type Connection = (u8, u32, bool);

/// One channel of the operation's kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KernelChannel {
    /// Channel.
    pub channel: u8,
    /// Began; 0 = not seen.
    pub start_ns: u64,
    /// Ended; 0 = not seen.
    pub stop_ns: u64,
    /// The device's timer then, nanoseconds; 0 = not known.
    pub start_timer_ns: u64,
    /// And at the end.
    pub stop_timer_ns: u64,
}

impl KernelChannel {
    /// How long it took by the device's timer, nanoseconds; `None` where that is not known.
    #[must_use]
    pub fn device_ns(&self) -> Option<u64> {
        let known = self.start_timer_ns != 0 && self.stop_timer_ns != 0;
        known.then(|| self.stop_timer_ns.checked_sub(self.start_timer_ns))?
    }

    /// When it began and ended. The device's timer tells how long it took: what is known of the host's time by the end may not be
    /// what was known of it by the beginning.
    #[must_use]
    pub fn times(&self) -> (u64, u64) {
        match self.device_ns() {
            Some(took) if self.start_ns != 0 => (self.start_ns, self.start_ns.saturating_add(took)),
            _ => (self.start_ns, self.stop_ns),
        }
    }
}

/// What the library says of who arrived last at a rank's operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ArrivalReport {
    /// Nothing.
    #[default]
    None,
    /// It will say it, or that it does not know.
    Awaited,
    /// It may say it.
    Possible,
    /// It does not know.
    Unknown,
    /// This.
    Known(Arrival),
}

impl ArrivalReport {
    /// What is known, if anything is.
    #[must_use]
    pub fn known(&self) -> Option<&Arrival> {
        match self {
            Self::Known(arrival) => Some(arrival),
            _ => None,
        }
    }
}

/// Why the library's watchdog says that an operation does not end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Verdict {
    /// When it was said.
    pub time_ns: u64,
    /// When the operation began to be in progress, as the library says; 0 = not known.
    pub begun_ns: u64,
    /// Why.
    pub cause: Cause,
    /// The rank that the others wait for.
    pub culprit: u32,
    /// It will not end by itself; otherwise that rank is late.
    pub hang: bool,
    /// Where that rank's network carries nothing, if it is that.
    pub nic: Option<Nic>,
    /// What that rank was in then, if it was not this operation and its process is watched, too.
    pub instead: Option<Whereabouts>,
}

/// One rank's part of an operation, as ids name it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Whereabouts {
    /// The operation.
    pub key: InstanceKey,
    /// The rank.
    pub rank: u32,
    /// Which end of a message it is.
    pub direction: Direction,
    /// It was over then: the last one of that rank.
    pub over: bool,
}

/// One operation on one rank. Times are monotonic nanoseconds, 0 = not known.
///
/// Kept in boxes that are used again: its vectors keep their capacity, so that a steady stream of operations allocates
/// nothing.
#[derive(Clone, Debug, Default)]
pub struct RankOperation {
    /// Process.
    pub pid: u32,
    /// Operation number in its process.
    pub op: u32,
    /// Replay, 0 if eager.
    pub replay: u32,
    /// Communicator id; 0 = not known yet.
    pub comm: u64,
    /// Sequence.
    pub seq: u64,
    /// Message bytes as the records say it.
    pub bytes: u64,
    /// Rank.
    pub rank: u32,
    /// Size of the communicator; 0 = not known.
    pub ranks: u32,
    /// Peer or root as the records say it.
    pub peer: i32,
    /// Whether it is a send or recv.
    pub p2p: bool,
    /// Whether it sends; only for point-to-point.
    pub send: bool,
    /// Its description, once read.
    pub description: Option<Box<Description>>,
    /// API call entered and left, as records say it.
    pub api: (u64, u64),
    /// Launch call entered and left.
    pub launch: (u64, u64),
    /// Handed to the device.
    pub launched_ns: u64,
    /// First channel started, last channel finished.
    pub device: (u64, u64),
    /// All proxy operations done.
    pub proxy_completed_ns: u64,
    /// `OpCompleted` was seen.
    pub completed: bool,
    /// The operation was aborted.
    pub aborted: bool,
    /// Something that may have been its was lost.
    pub tainted: bool,
    /// Everything that it consists of was seen. Settled when it is final.
    pub complete: bool,
    /// Earliest time in any of its records.
    pub first_ns: u64,
    /// Latest time in any of its records.
    pub last_ns: u64,
    /// Channels of its kernel, in the order in which they were first seen.
    pub channels: Vec<KernelChannel>,
    /// Proxy operations.
    pub proxies: Vec<ProxyOperation>,
    /// What the watchdog said of it, in order.
    pub verdicts: Vec<Verdict>,
    /// What the library says of who arrived last.
    pub arrival: ArrivalReport,
    /// Failures of ports that it was delayed by: their spans.
    pub delayed_by: Vec<(TraceId, SpanId)>,
    /// What another rank waits in for this one, which was in this operation when the watchdog said so.
    pub awaited_in: Option<Whereabouts>,
    /// When it was let go of without having ended, as far as is known; 0: it ended.
    pub cut_ns: u64,
    /// How many losses its process had before it began: it may lack what was lost since.
    pub(super) losses_before: u64,
    /// What it holds: [`Limit::OperationParts`].
    pub(super) parts: usize,
    /// Until when it is held for the library's word on arrivals; 0 = it is not.
    pub(super) held_until_ns: u64,
    recent_proxy: usize,
    /// Place of the last proxy operation of a connection, where there are more than [`FEW_PROXIES`].
    by_connection: FxHashMap<Connection, usize>,
}

impl RankOperation {
    /// Whether all of its channels' times are the device's.
    #[must_use]
    pub fn is_by_device(&self) -> bool {
        self.channels.iter().all(|channel| channel.device_ns().is_some())
    }

    /// Makes this box hold a fresh operation, keeping the capacity of its vectors.
    pub fn reset(&mut self, pid: u32, op: u32, replay: u32) {
        self.channels.clear();
        self.proxies.clear();
        self.verdicts.clear();
        self.delayed_by.clear();
        if !self.by_connection.is_empty() {
            self.by_connection.clear();
        }
        *self = Self {
            pid,
            op,
            replay,
            peer: -1,
            by_connection: std::mem::take(&mut self.by_connection),
            channels: std::mem::take(&mut self.channels),
            proxies: std::mem::take(&mut self.proxies),
            verdicts: std::mem::take(&mut self.verdicts),
            delayed_by: std::mem::take(&mut self.delayed_by),
            ..Self::default()
        };
    }

    /// Gives back what an operation of unusual size took, before the box waits for its next one.
    pub(super) fn shed(&mut self) {
        if self.proxies.capacity() > KEPT_PROXIES {
            self.proxies = Vec::new();
            self.by_connection = FxHashMap::default();
        }
    }

    /// The operation as it is now with its last verdict, without its proxy operations: what is to be said of that verdict does not
    /// take more time the more an operation holds.
    pub(crate) fn judged(&self) -> Box<Self> {
        Box::new(Self {
            description: self.description.clone(),
            channels: self.channels.clone(),
            verdicts: self.verdicts.last().copied().into_iter().collect(),
            delayed_by: self.delayed_by.clone(),
            proxies: Vec::new(),
            by_connection: FxHashMap::default(),
            ..*self
        })
    }

    /// It was delayed by the failure of a port.
    pub(crate) fn delay(&mut self, failure: (TraceId, SpanId)) {
        if self.delayed_by.len() < DELAYS && !self.delayed_by.contains(&failure) {
            self.delayed_by.push(failure);
        }
    }

    /// Whether it belongs to a graph.
    #[must_use]
    pub fn captured(&self) -> bool {
        self.op & CAPTURED != 0
    }

    /// Whether its launch or its completion was seen, and not only dense records of it.
    #[must_use]
    pub fn announced(&self) -> bool {
        self.completed || self.launched_ns != 0 || self.description.is_some()
    }

    /// When it began to be in progress, as far as that is known before its end.
    #[must_use]
    pub fn begun_ns(&self) -> Option<u64> {
        let channels = self.channels.iter().map(|channel| channel.start_ns);
        let first = channels.filter(|ns| *ns != 0).min();
        first.or_else(|| [self.device.0, self.launched_ns].into_iter().find(|ns| *ns != 0))
    }

    /// Its function, if its description is known.
    #[must_use]
    pub fn function(&self) -> Option<Function> {
        self.description
            .as_ref()
            .and_then(|description| Function::from_code(description.function))
    }

    /// Direction in its trace: only a message's two ends have one.
    #[must_use]
    pub fn direction(&self) -> Direction {
        match (self.p2p, self.send) {
            (false, _) => Direction::None,
            (true, true) => Direction::Send,
            (true, false) => Direction::Recv,
        }
    }

    /// Which instance it is a part of; `None` if its communicator, that one's size or its peer is not known.
    #[must_use]
    pub fn instance(&self) -> Option<InstanceKey> {
        self.instance_of(self.ranks)
    }

    /// The same in a communicator of this size.
    pub(crate) fn instance_of(&self, ranks: u32) -> Option<InstanceKey> {
        if self.comm == 0 || ranks == 0 {
            return None;
        }
        let (kind, pair) = if self.p2p {
            let peer = u32::try_from(self.peer).ok()?;
            let pair = if self.send {
                (self.rank, peer)
            } else {
                (peer, self.rank)
            };
            (TraceKind::PointToPoint, Some(pair))
        } else {
            (TraceKind::Collective, None)
        };
        Some(InstanceKey {
            comm: self.comm,
            seq: self.seq,
            ranks,
            replay: self.replay,
            kind,
            pair,
        })
    }

    /// Takes in one of its records; `kind` is the record's. `has_room` is whether its process's operations may hold more. Returns
    /// the limit at which the record, or a part of it, was left out.
    pub fn record(&mut self, kind: Kind, record: &Record, has_room: bool, limits: &Limits) -> Option<Limit> {
        self.last_ns = self.last_ns.max(record.time_ns);
        if self.first_ns == 0 || record.time_ns < self.first_ns {
            self.first_ns = record.time_ns;
        }
        let stop = matches!(record.state, State::STOP | State::ABORTED);
        // What the records of the operation itself (not of its proxy operations, whose peer and direction are their own)
        // say about its identity.
        if !matches!(kind, Kind::ProxyOp | Kind::ProxyStep | Kind::NetPlugin) {
            self.identify(kind, record);
        }
        match kind {
            Kind::CollApi | Kind::P2pApi => {
                if record.state == State::START {
                    self.api.0 = record.time_ns;
                } else if stop {
                    self.api.1 = record.time_ns;
                }
            }
            Kind::OpLaunched => self.launched_ns = record.time_ns,
            Kind::OpCompleted => {
                self.completed = true;
                self.device = (record.value, record.time_ns);
                // What was asked by another rank may be known before.
                if self.arrival == ArrivalReport::None {
                    self.arrival = match ArrivalNotice::of(record) {
                        ArrivalNotice::Never => ArrivalReport::None,
                        ArrivalNotice::Follows => ArrivalReport::Awaited,
                        ArrivalNotice::MayFollow => ArrivalReport::Possible,
                    };
                }
                self.aborted |= record.state == State::ABORTED;
            }
            Kind::ProxyCompleted => self.proxy_completed_ns = record.time_ns,
            Kind::KernelCh => return self.kernel_channel(record, stop, has_room, limits).err(),
            Kind::Verdict => return self.verdict(record, stop, has_room, limits).err(),
            Kind::ProxyOp => match self.proxy(record, record.state == State::START, has_room, limits) {
                Ok(at) => self.proxy_operation(at, record, stop),
                Err(limit) => return Some(limit),
            },
            Kind::ProxyStep => match self.proxy(record, false, has_room, limits) {
                Ok(at) => self.proxies[at].step(record),
                Err(limit) => return Some(limit),
            },
            Kind::NetPlugin => match self.proxy(record, false, has_room, limits) {
                Ok(at) => match self.proxies[at].carry(record, has_room) {
                    Carrying::Kept => self.parts += 1,
                    Carrying::Dropped => self.parts -= 1,
                    Carrying::AsBefore => {}
                    Carrying::LeftOut => return Some(Limit::OperationParts),
                },
                Err(limit) => return Some(limit),
            },
            _ => {}
        }
        None
    }

    fn proxy_operation(&mut self, at: usize, record: &Record, stop: bool) {
        let proxy = &mut self.proxies[at];
        match record.state {
            State::START => {
                proxy.start_ns = record.time_ns;
                proxy.steps = record.proxy_op_shape().0;
            }
            State::OP_IN_PROGRESS if proxy.progress_ns == 0 => proxy.progress_ns = record.time_ns,
            _ if stop => {
                proxy.stop_ns = record.time_ns;
                self.aborted |= record.state == State::ABORTED;
            }
            _ => {}
        }
    }

    fn verdict(&mut self, record: &Record, hang: bool, has_room: bool, limits: &Limits) -> Result<(), Limit> {
        // A later library may have causes that this one does not know.
        let Some(cause) = u8::try_from(record.value >> 32).ok().and_then(Cause::from_code) else {
            return Ok(());
        };
        // One that was read from the pages may come through the ring, too.
        if self.verdicts.iter().any(|known| known.time_ns == record.time_ns) {
            return Ok(());
        }
        self.hold(
            self.verdicts.len(),
            limits.verdicts_per_operation,
            Limit::VerdictsPerOperation,
            has_room,
        )?;
        self.verdicts.push(Verdict {
            time_ns: record.time_ns,
            begun_ns: 0,
            cause,
            culprit: record.value as u32,
            hang,
            nic: None,
            instead: None,
        });
        Ok(())
    }

    /// Counts one more part of it, of which it has `known`, if there is room.
    fn hold(&mut self, known: usize, most: usize, limit: Limit, has_room: bool) -> Result<(), Limit> {
        if known >= most {
            return Err(limit);
        }
        if !has_room {
            return Err(Limit::OperationParts);
        }
        self.parts += 1;
        Ok(())
    }

    /// Takes in what the library found out of who arrived last: after its end, and no part of it.
    pub(crate) fn report_arrival(&mut self, record: &Record) {
        self.arrival = Arrival::of(record).map_or(ArrivalReport::Unknown, ArrivalReport::Known);
    }

    /// Which rank arrived last, if the library knows. It is a rank of the communicator, whatever the record says.
    #[must_use]
    pub fn arrived_last(&self) -> Option<&Arrival> {
        self.arrival.known().filter(|arrival| arrival.rank < self.ranks)
    }

    /// Until when it waits for the library to say who arrived last; 0 for not at all.
    pub(crate) fn arrival_due_ns(&self) -> u64 {
        let patience_ns = match self.arrival {
            ArrivalReport::Awaited => ArrivalNotice::PATIENCE_NS,
            ArrivalReport::Possible => ArrivalNotice::HOLD_NS,
            ArrivalReport::None | ArrivalReport::Unknown | ArrivalReport::Known(_) => return 0,
        };
        self.device.1.saturating_add(patience_ns)
    }

    fn identify(&mut self, kind: Kind, record: &Record) {
        if record.comm == 0 {
            return;
        }
        self.comm = record.comm;
        self.seq = record.seq;
        self.rank = record.rank;
        if record.peer >= 0 {
            self.peer = record.peer;
        }
        self.bytes = self.bytes.max(record.bytes);
        if record.flags().contains(Flags::P2P) || matches!(kind, Kind::P2p | Kind::P2pApi) {
            self.p2p = true;
            // A description tells the function; the flag stands in for it.
            if self.description.is_none() {
                self.send |= record.flags().contains(Flags::SEND);
            }
        }
    }

    /// Takes in its description, which is read more than once; later readings know more times.
    pub fn describe(&mut self, new: Box<Description>) {
        self.comm = new.comm;
        self.seq = new.seq;
        self.rank = new.rank;
        self.ranks = new.ranks;
        if let Some(function) = Function::from_code(new.function) {
            self.p2p = function.is_p2p();
            self.send = function == Function::Send;
        }
        if self.p2p {
            self.peer = new.peer;
        }
        match &mut self.description {
            None => self.description = Some(new),
            Some(old) => {
                let keep = |new: &mut u64, old: u64| *new = if *new == 0 { old } else { *new };
                let mut new = new;
                keep(&mut new.api_end_ns, old.api_end_ns);
                keep(&mut new.launch_start_ns, old.launch_start_ns);
                keep(&mut new.launch_end_ns, old.launch_end_ns);
                keep(&mut new.device_start_ns, old.device_start_ns);
                keep(&mut new.device_end_ns, old.device_end_ns);
                *old = new;
            }
        }
    }

    fn kernel_channel(
        &mut self,
        record: &Record,
        stop: bool,
        has_room: bool,
        limits: &Limits,
    ) -> Result<(), Limit> {
        let known = self
            .channels
            .iter()
            .position(|known| known.channel == record.channel);
        let at = match known {
            Some(at) => at,
            None => {
                let known = self.channels.len();
                self.hold(
                    known,
                    limits.channels_per_operation,
                    Limit::ChannelsPerOperation,
                    has_room,
                )?;
                self.channels.push(KernelChannel {
                    channel: record.channel,
                    start_ns: 0,
                    stop_ns: 0,
                    start_timer_ns: 0,
                    stop_timer_ns: 0,
                });
                known
            }
        };
        let channel = &mut self.channels[at];
        if record.state == State::START {
            channel.start_ns = record.time_ns;
            channel.start_timer_ns = record.value;
        } else if record.state == State::KERNEL_CH_STOP || (stop && channel.stop_ns == 0) {
            // The device's stop time is the better one where both come.
            channel.stop_ns = record.time_ns;
            channel.stop_timer_ns = record.value;
        }
        Ok(())
    }

    /// Place of the proxy operation that a record belongs to. `start` begins another one if there is an equal one that has
    /// started.
    fn proxy(
        &mut self,
        record: &Record,
        start: bool,
        has_room: bool,
        limits: &Limits,
    ) -> Result<usize, Limit> {
        if !start
            && self
                .proxies
                .get(self.recent_proxy)
                .is_some_and(|recent| recent.is_for(record))
        {
            return Ok(self.recent_proxy);
        }
        let connection = (
            record.channel,
            record.peer.cast_unsigned(),
            record.flags().contains(Flags::SEND),
        );
        let last = if self.proxies.len() <= FEW_PROXIES {
            self.proxies.iter().rposition(|known| known.is_for(record))
        } else {
            self.by_connection.get(&connection).copied()
        };
        self.recent_proxy = match last {
            Some(last) if !start || self.proxies[last].start_ns == 0 => last,
            _ => {
                let known = self.proxies.len();
                self.hold(
                    known,
                    limits.proxies_per_operation,
                    Limit::ProxiesPerOperation,
                    has_room,
                )?;
                let index = last.map_or(0, |last| self.proxies[last].index + 1);
                self.proxies.push(ProxyOperation::new(record, index));
                if known == FEW_PROXIES {
                    let all = self.proxies.iter().map(ProxyOperation::connection).zip(0..);
                    self.by_connection.extend(all);
                } else if known > FEW_PROXIES {
                    self.by_connection.insert(connection, known);
                }
                known
            }
        };
        Ok(self.recent_proxy)
    }

    /// API call entered and left: the description's times, or the records'. Nothing for a replay, whose call was made at
    /// capture.
    #[must_use]
    pub fn api_times(&self) -> (u64, u64) {
        if self.captured() {
            return (0, 0);
        }
        let (start, end) = self
            .description
            .as_ref()
            .map_or((0, 0), |d| (d.api_start_ns, d.api_end_ns));
        (
            if start == 0 { self.api.0 } else { start },
            if end == 0 { self.api.1 } else { end },
        )
    }

    /// Launch call entered and left: the description's times, or the plan's (`self.launch`).
    #[must_use]
    pub fn launch_times(&self) -> (u64, u64) {
        if self.captured() {
            // The entry's times are those of the latest replay, which may be another one by now.
            return self.launch;
        }
        let (start, end) = self
            .description
            .as_ref()
            .map_or((0, 0), |d| (d.launch_start_ns, d.launch_end_ns));
        (
            if start == 0 { self.launch.0 } else { start },
            if end == 0 { self.launch.1 } else { end },
        )
    }

    /// Whether everything that the operation is known to consist of has been seen.
    #[must_use]
    pub fn is_whole(&self) -> bool {
        let Some(description) = &self.description else {
            return false;
        };
        self.completed
            && self.host_side_is_whole()
            && self.kernel_is_whole(description)
            && self.proxies_are_whole(description)
    }

    fn host_side_is_whole(&self) -> bool {
        self.captured() || (self.api_times().1 != 0 && self.launch_times().1 != 0)
    }

    fn kernel_is_whole(&self, description: &Description) -> bool {
        self.channels.len() == usize::from(description.channels)
            && self
                .channels
                .iter()
                .all(|channel| channel.start_ns != 0 && channel.stop_ns != 0)
    }

    fn proxies_are_whole(&self, description: &Description) -> bool {
        self.proxies.len() == description.proxy_ops as usize
            && self.proxies.iter().all(ProxyOperation::is_whole)
            && (description.proxy_ops == 0 || self.proxy_completed_ns != 0)
    }

    /// The latest thing known of it.
    #[must_use]
    pub fn latest_ns(&self) -> u64 {
        self.last_ns.max(self.device.1)
    }
}

#[cfg(test)]
mod tests;
