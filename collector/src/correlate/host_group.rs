//! Groups of a library without probe functions: what a thread calls between `ncclGroupStart` and `ncclGroupEnd`.

use ringsight_probes::sample::{Call, HostCall};
use rustc_hash::FxHashMap;

use super::group::GROUP_LINKS;
use crate::limits::{LeftOut, Limit};

/// A group of host-timed calls.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct HostGroup {
    /// Process.
    pub pid: u32,
    /// Thread.
    pub tid: u32,
    /// Outermost `ncclGroupStart` entered, its `ncclGroupEnd` left, monotonic nanoseconds.
    pub api: (u64, u64),
    /// Operations called in it.
    pub operations: u32,
    /// Starts of the first [`GROUP_LINKS`] of their calls.
    pub members: Vec<u64>,
    /// What `ncclGroupEnd` returned.
    pub result: Option<i32>,
    /// `ncclGroupStart`s without their `ncclGroupEnd`.
    depth: u32,
}

/// The open groups of all processes. Calls come in the order of their returns.
#[derive(Debug, Default)]
pub(super) struct HostGroups {
    /// By process and thread.
    open: FxHashMap<u32, FxHashMap<u32, HostGroup>>,
}

impl HostGroups {
    /// Takes in a call. Returns when the group that an operation belongs to began, and the group that ended with the call;
    /// one without operations (a library's own, inside an operation's call) is none. A process that has `most` groups open
    /// loses them with its next one.
    pub(super) fn call(
        &mut self,
        call: &HostCall,
        most: usize,
        left_out: &mut LeftOut,
    ) -> (Option<u64>, Option<Box<HostGroup>>) {
        match call.call {
            Call::GroupStart => {
                let open = self.open.entry(call.pid).or_default();
                if open.len() >= most && !open.contains_key(&call.tid) {
                    left_out.add(Limit::Groups, open.len() as u64);
                    open.clear();
                }
                let group = open.entry(call.tid).or_insert_with(|| HostGroup {
                    pid: call.pid,
                    tid: call.tid,
                    api: (call.start_ns, 0),
                    ..HostGroup::default()
                });
                group.depth = group.depth.saturating_add(1);
                (None, None)
            }
            Call::Operation { .. } => {
                let Some(group) = self.group(call) else {
                    return (None, None);
                };
                group.operations = group.operations.saturating_add(1);
                if group.members.len() < GROUP_LINKS {
                    group.members.push(call.start_ns);
                }
                (Some(group.api.0), None)
            }
            Call::GroupEnd => {
                // Without its beginning, which was before the attach: nothing is known of it.
                let Some(group) = self.group(call) else {
                    return (None, None);
                };
                group.depth -= 1;
                if group.depth > 0 {
                    return (None, None);
                }
                let open = self.open.get_mut(&call.pid);
                let ended = open.and_then(|open| open.remove(&call.tid)).map(|mut group| {
                    group.api.1 = call.end_ns.unwrap_or(call.start_ns);
                    group.result = call.result;
                    Box::new(group)
                });
                (None, ended.filter(|group| group.operations > 0))
            }
        }
    }

    /// The group that a call was made in.
    fn group(&mut self, call: &HostCall) -> Option<&mut HostGroup> {
        self.open.get_mut(&call.pid)?.get_mut(&call.tid)
    }

    /// Calls of a process were lost, or it is over: what it has open may never close.
    pub(super) fn give_up(&mut self, pid: u32) {
        self.open.remove(&pid);
    }
}
