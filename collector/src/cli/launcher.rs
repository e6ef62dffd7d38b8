//! A process that is no rank: a launcher, whose children are.

use ringsight_exporters::ranks::Ranks;
use ringsight_probes::ranks_below;

/// What to say of a process that has no communicator, if processes below it have one.
pub(super) fn hint(pid: u32, command: &str) -> Option<String> {
    let below = ranks_below(pid);
    if below.is_empty() {
        return None;
    }
    let pids: Vec<String> = below.iter().map(u32::to_string).collect();
    let ranks: Ranks = below.iter().copied().collect();
    let what = if below.len() == 1 {
        "its child"
    } else {
        "its children"
    };
    Some(format!(
        "process {pid} has no communicator, {what} {ranks} have: ringsight {command} {}",
        pids.join(" ")
    ))
}
