//! Groups of one process: `ncclGroupStart` … `ncclGroupEnd` and the planning at its end.

use ringsight_records::{Description, Function, Kind, Record, State, pages::CAPTURED};
use rustc_hash::FxHashMap;

use crate::{
    identity::{Direction, InstanceKey, TraceKind},
    limits::{LeftOut, Limit, Limits},
};

/// Operations that a group's span links to; a group of more says how many there were.
pub const GROUP_LINKS: usize = 128;

/// A group of one process.
#[derive(Clone, Debug, Default)]
pub struct Group {
    /// Process.
    pub pid: u32,
    /// Group number in its process.
    pub number: u32,
    /// First group call entered and last one left, monotonic nanoseconds.
    pub api: (u64, u64),
    /// First `ncclGroupStart` returned; 0 = not seen.
    pub start_returned_ns: u64,
    /// Last `ncclGroupEnd` entered; 0 = not seen.
    pub end_entered_ns: u64,
    /// Planning began and all plans were launched.
    pub plan: (u64, u64),
    /// The caller opened it: not one around a lone operation.
    pub explicit: bool,
    /// Operations in it.
    pub operations: u32,
    /// Spans of the first [`GROUP_LINKS`] of them.
    pub members: Vec<(InstanceKey, u32, Direction)>,
    /// Its last call has ended.
    closed: bool,
}

impl Group {
    /// When it was over.
    #[must_use]
    pub fn end_ns(&self) -> u64 {
        self.api.1.max(self.plan.1)
    }
}

/// The open groups of one process.
#[derive(Debug, Default)]
pub(super) struct Groups {
    open: FxHashMap<u32, Group>,
    /// Closed at the API and waiting for the watermark.
    closed: Vec<u32>,
    /// Links that the open ones have to their operations.
    links: usize,
}

impl Groups {
    fn group(&mut self, pid: u32, number: u32, limits: &Limits, left_out: &mut LeftOut) -> &mut Group {
        if self.open.len() >= limits.groups && !self.open.contains_key(&number) {
            // Only groups whose end was lost stay for so long; which of them goes does not matter.
            left_out.add(Limit::Groups, self.open.len() as u64);
            self.open.clear();
            self.closed.clear();
            self.links = 0;
        }
        self.open.entry(number).or_insert_with(|| Group {
            pid,
            number,
            ..Group::default()
        })
    }

    pub(super) fn record(
        &mut self,
        pid: u32,
        kind: Kind,
        record: &Record,
        limits: &Limits,
        left_out: &mut LeftOut,
    ) {
        let group = self.group(pid, record.op, limits, left_out);
        let stop = matches!(record.state, State::STOP | State::ABORTED);
        if kind == Kind::Group {
            if stop {
                group.plan.1 = record.time_ns;
            } else if record.state == State::START {
                group.plan.0 = record.time_ns;
            }
            return;
        }
        group.explicit |= record.value > 1;
        match record.state {
            State::START if group.api.0 == 0 => group.api.0 = record.time_ns,
            State::GROUP_START_API_STOP if group.start_returned_ns == 0 => {
                group.start_returned_ns = record.time_ns;
            }
            State::GROUP_END_API_START => group.end_entered_ns = record.time_ns,
            _ if stop => {
                group.api.1 = record.time_ns;
                if !std::mem::replace(&mut group.closed, true) {
                    self.closed.push(record.op);
                }
            }
            _ => {}
        }
    }

    /// Enters an eager operation into its group when its description is first read.
    pub(super) fn describe(
        &mut self,
        pid: u32,
        description: &Description,
        limits: &Limits,
        left_out: &mut LeftOut,
    ) {
        // A group around a lone operation says nothing that the operation's own span does not.
        if description.group == 0 || description.group_depth < 2 || description.op & CAPTURED != 0 {
            return;
        }
        let function = Function::from_code(description.function);
        let (direction, pair) = match (function, u32::try_from(description.peer)) {
            (Some(Function::Send), Ok(peer)) => (Direction::Send, Some((description.rank, peer))),
            (Some(Function::Recv), Ok(peer)) => (Direction::Recv, Some((peer, description.rank))),
            _ => (Direction::None, None),
        };
        let key = InstanceKey {
            comm: description.comm,
            seq: description.seq,
            ranks: description.ranks,
            replay: 0,
            kind: if pair.is_some() {
                TraceKind::PointToPoint
            } else {
                TraceKind::Collective
            },
            pair,
        };
        let has_room = self.links < limits.operation_parts.process;
        let group = self.group(pid, description.group, limits, left_out);
        group.explicit = true;
        group.operations = group.operations.saturating_add(1);
        if group.members.len() >= GROUP_LINKS {
            return;
        }
        if has_room {
            group.members.push((key, description.rank, direction));
            self.links += 1;
        } else {
            left_out.count(Limit::OperationParts);
        }
    }

    /// Hands out the groups that ended `linger_ns` before `watermark_ns`: an operation is announced, and its description
    /// read, a moment after the end of its group. Groups around a lone operation are dropped at once.
    pub(super) fn settle(&mut self, watermark_ns: u64, linger_ns: u64, finished: &mut impl FnMut(Group)) {
        self.closed.retain(|number| {
            let Some(group) = self.open.get(number) else {
                return false;
            };
            if group.explicit && watermark_ns < group.end_ns().saturating_add(linger_ns) {
                return true;
            }
            if let Some(group) = self.open.remove(number) {
                self.links = self.links.saturating_sub(group.members.len());
                if group.explicit && group.api.0 != 0 {
                    finished(group);
                }
            }
            false
        });
    }
}
