//! `ringsight snapshot`: what processes are in now, and whom they wait for.

use std::{collections::BTreeMap, fmt::Write as _, path::Path, time::SystemTime};

use ringsight_collector::snapshot::{
    Group, Operation, Part, Place, Process, RANKS, VerdictView, is_usable, refused, take, verdicts as said,
};
use ringsight_dump::{Format, Moment};
use ringsight_output::{Destination, Error, Printable};
use ringsight_probes::{look, process, target};
use ringsight_records::Function;
use serde_json::{Value, json};
use tracing::{error, warn};

use super::{Exit, connections, print, print_json, verdicts};

/// Ranks that dumps list at most, all communicators and the job once for each of them.
const DUMPED_RANKS: usize = 1 << 22;

/// Runs the command.
pub(crate) fn run(pids: &[u32], json: bool, dump: Option<&Path>, dump_json: Option<&Path>) -> Exit {
    let mut processes = Vec::new();
    let mut exit = Exit::Success;
    for pid in pids {
        match read(*pid) {
            Ok(process) => processes.push(process),
            Err(error) => {
                error!(pid, "{error}");
                exit = Exit::Error;
            }
        }
    }
    if processes.is_empty() {
        return exit;
    }
    let now = process::now_ns();
    if let (Some(dump), Some(dump_json)) = (dump, dump_json)
        && let Err(error) = differ(dump, dump_json)
    {
        error!("{error}");
        return Exit::Error;
    }
    for (prefix, format) in [(dump, Format::Pickle), (dump_json, Format::Json)] {
        if let Some(prefix) = prefix
            && let Err(error) = write_dumps(&processes, prefix, format, now)
        {
            error!("{}: {error}", prefix.display());
            exit = Exit::Error;
        }
    }
    if let Some(error) = refusal(&processes) {
        error!("{error}");
        exit = Exit::Error;
    }
    let (groups, said) = (take(&processes, now), said(&processes, now));
    let printed = if json {
        print_json(&to_json(&processes, &groups, &said))
    } else {
        print(&to_text(&processes, &groups, &said))
    };
    match printed {
        Exit::Success => exit,
        failed => failed,
    }
}

fn read(pid: u32) -> Result<Process, String> {
    let gone = || format!("process {pid} does not exist");
    let library = target::find(pid).map_err(|error| error.to_string())?;
    if library.flavour == target::Flavour::Stock {
        return Err(format!(
            "process {pid} runs {}, which has no pages to look at: `ringsight attach` shows its calls",
            library.path.display()
        ));
    }
    let look = look(pid).map_err(|error| error.to_string())?;
    Ok(Process {
        pid,
        user: process::owner_of(pid).user,
        stopped: process::is_stopped(pid).ok_or_else(gone)?,
        communicators: look.communicators,
        operations: look.operations,
        connections: look.connections,
        proxies: look.proxies,
        verdicts: look.verdicts,
    })
}

/// Refuses prefixes by which the second dump of a rank would replace the first.
fn differ(dump: &Path, dump_json: &Path) -> Result<(), String> {
    let first = |prefix| Destination::resolve(ringsight_dump::path(prefix, 0));
    // A folder that is missing is made later, and then both spell it alike.
    let is_same = match (first(dump), first(dump_json)) {
        (Ok(one), Ok(two)) => one.is_same(&two),
        _ => dump == dump_json,
    };
    if is_same {
        return Err(format!(
            "--dump {} and --dump-json {} are one file: name two",
            dump.display(),
            dump_json.display()
        ));
    }
    Ok(())
}

/// What there is to say of communicators that cannot be, if there are any.
fn refusal(processes: &[Process]) -> Option<String> {
    let mut refused = refused(processes);
    let first = refused.next()?;
    let others = match refused.count() {
        0 => String::new(),
        others => format!("; {others} more communicators are left out like it"),
    };
    Some(format!(
        "process {}: communicator {:016x} is left out, it says that it has {} ranks: 1 to {RANKS} are possible, and its own rank must be \
         one of them{others}",
        first.pid, first.id, first.ranks
    ))
}

/// Who a rank is.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Who {
    /// Its process and device.
    Seen(u32, i32),
    /// It was not looked at: only its communicator and its number there are known.
    Unseen(u64, u32),
}

/// A dump for each rank of the communicator with the most ranks, which is taken for the job.
fn write_dumps(processes: &[Process], prefix: &Path, format: Format, now: u64) -> Result<(), Error> {
    let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let moment = Moment {
        monotonic_ns: now,
        realtime_ns: since_epoch.map_or(0, |time| time.as_nanos() as u64),
    };
    let all = || {
        processes.iter().flat_map(|process| {
            let usable = process.communicators.iter().filter(|comm| is_usable(comm));
            usable.map(move |comm| (process, comm))
        })
    };
    // Of each communicator the ranks that were looked at, and how many it has: these alone take memory.
    let mut seen: BTreeMap<(u64, u32), (u32, BTreeMap<u32, Who>)> = BTreeMap::new();
    for (process, comm) in all() {
        let (_, seen) = seen
            .entry((comm.id, process.user))
            .or_insert_with(|| (comm.ranks, BTreeMap::new()));
        seen.entry(comm.rank)
            .or_insert(Who::Seen(process.pid, comm.device));
    }
    let places = |of: (u64, u32)| -> Option<Vec<Who>> {
        let (ranks, seen) = seen.get(&of)?;
        let who = |rank| seen.get(&rank).copied().unwrap_or(Who::Unseen(of.0, rank));
        Some((0..*ranks).map(who).collect())
    };
    let Some(job) = all()
        .max_by_key(|(_, comm)| (comm.ranks, std::cmp::Reverse(comm.init_end_ns)))
        .and_then(|(process, comm)| places((comm.id, process.user)))
    else {
        return Ok(());
    };
    let (mut room, mut left_out) = (DUMPED_RANKS, 0);
    for (rank, member) in (0..).zip(&job) {
        let Who::Seen(pid, device) = member else { continue };
        let Some(process) = processes.iter().find(|process| process.pid == *pid) else {
            continue;
        };
        let mut groups: Vec<ringsight_dump::Group> = process
            .communicators
            .iter()
            .filter(|comm| comm.device == *device)
            .filter(|comm| is_usable(comm))
            .filter_map(|comm| {
                let Some(left) = room.checked_sub(job.len() + comm.ranks as usize) else {
                    left_out += 1;
                    return None;
                };
                room = left;
                Some(ringsight_dump::Group {
                    id: comm.id,
                    name: comm.name().to_owned(),
                    rank: comm.rank,
                    members: ringsight_dump::members(&job, &places((comm.id, process.user))?)?,
                })
            })
            .collect();
        groups.sort_by_key(|group| std::cmp::Reverse(group.members.len()));
        let dump = ringsight_dump::dump(&groups, &process.operations, &moment);
        ringsight_dump::write(prefix, rank, format, &dump)?;
    }
    if left_out > 0 {
        warn!(
            "{left_out} communicators are not in the dumps: they have more than {DUMPED_RANKS} ranks together"
        );
    }
    Ok(())
}

pub(super) fn seconds(ns: u64) -> String {
    format!("{:.3} s", ns as f64 / 1e9)
}

/// An operation, by its function and sequence.
pub(super) fn name(function: Option<Function>, seq: u64, pair: Option<(u32, u32)>) -> String {
    let function = function.map_or("operation", Function::name);
    let number = match (seq >> 32, seq & u64::from(u32::MAX)) {
        (0, seq) => format!("{seq}"),
        (graph, node) => format!("{node} of graph {graph}"),
    };
    match pair {
        None => format!("{function} {number}"),
        Some((from, to)) => format!("message {number} from rank {from} to rank {to}"),
    }
}

fn line(part: &Part) -> String {
    let place = match part.place {
        Place::NotLaunched { idle_ns: Some(idle) } => {
            format!(
                "has not launched it; its last operation ended {} ago",
                seconds(idle)
            )
        }
        Place::NotLaunched { idle_ns: None } => "has not launched it".to_owned(),
        Place::Queued { since_ns } => format!(
            "launched it {} ago; its stream has not come to it",
            seconds(since_ns)
        ),
        Place::Running { since_ns, waits } => {
            let waits = waits.map_or_else(String::new, |waits| format!(", {waits}"));
            format!("in it for {}{waits}", seconds(since_ns))
        }
        Place::Done => "done".to_owned(),
    };
    let stopped = if part.stopped { ", process stopped" } else { "" };
    format!("rank {} (process {}{stopped}): {place}", part.rank, part.pid)
}

fn to_text(processes: &[Process], groups: &[Group], said: &[VerdictView]) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    for group in groups {
        let title = if group.name.is_empty() {
            format!("{:016x}", group.id)
        } else {
            format!("{:016x} ({})", group.id, Printable::from(&*group.name))
        };
        let _ = writeln!(
            text,
            "communicator {title}: {} ranks, {} looked at",
            group.ranks,
            group.seen.len()
        );
        for operation in &group.operations {
            let _ = writeln!(
                text,
                "  {}, {} bytes, for {}",
                name(operation.function, operation.seq, operation.pair),
                operation.bytes,
                seconds(operation.oldest_ns)
            );
            for part in &operation.parts {
                let _ = writeln!(text, "    {}", line(part));
            }
            if !operation.unseen.is_empty() {
                let _ = writeln!(text, "    not looked at: {}", operation.unseen);
            }
            let awaited: Vec<u32> = operation.awaited().iter().map(|part| part.rank).collect();
            if !awaited.is_empty() {
                let _ = writeln!(text, "    waits for rank {}", list(&awaited));
            }
        }
        if group.operations_left_out > 0 {
            let _ = writeln!(text, "  and {} later operations", group.operations_left_out);
        }
        if group.operations.is_empty() {
            let _ = writeln!(text, "  nothing on its way");
        }
        verdicts::write_proxies(&mut text, &group.proxies);
        connections::write(&mut text, &group.connections);
    }
    verdicts::write(&mut text, said);
    for process in processes
        .iter()
        .filter(|process| process.communicators.is_empty())
    {
        let _ = writeln!(text, "process {}: no communicator", process.pid);
    }
    text
}

fn list(ranks: &[u32]) -> String {
    let ranks: Vec<String> = ranks.iter().map(u32::to_string).collect();
    ranks.join(", ")
}

fn to_json(processes: &[Process], groups: &[Group], said: &[VerdictView]) -> Value {
    let part = |part: &Part| {
        let (place, ns) = match part.place {
            Place::NotLaunched { idle_ns } => ("not_launched", idle_ns),
            Place::Queued { since_ns } => ("queued", Some(since_ns)),
            Place::Running { since_ns, .. } => ("running", Some(since_ns)),
            Place::Done => ("done", None),
        };
        let waits = match part.place {
            Place::Running { waits, .. } => waits,
            _ => None,
        };
        json!({
            "rank": part.rank, "pid": part.pid, "stopped": part.stopped, "place": place, "ns": ns,
            "waits": waits.map(|waits| json!({
                "for": waits.phase.name(), "peer": waits.peer, "channel": waits.channel, "step": waits.step,
            })),
        })
    };
    let operation = |operation: &Operation| {
        json!({
            "function": operation.function.map(Function::name),
            "sequence": operation.seq,
            "pair": operation.pair,
            "bytes": operation.bytes,
            "data_type": operation.data_type.map(ringsight_records::DataType::name),
            "oldest_ns": operation.oldest_ns,
            "parts": operation.parts.iter().map(part).collect::<Vec<_>>(),
            "unseen": operation.unseen.to_string(),
            "awaited": operation.awaited().iter().map(|part| part.rank).collect::<Vec<_>>(),
        })
    };
    let group = |group: &Group| {
        json!({
            "id": format!("{:016x}", group.id),
            "name": group.name,
            "ranks": group.ranks,
            "seen": group.seen.to_string(),
            "user": group.user,
            "operations_left_out": group.operations_left_out,
            "operations": group.operations.iter().map(operation).collect::<Vec<_>>(),
            "proxies": group.proxies.iter().map(verdicts::proxy_json).collect::<Vec<_>>(),
            "connections": group.connections.iter().map(connections::to_json).collect::<Vec<_>>(),
        })
    };
    json!({
        "version": 1,
        "pids": processes.iter().map(|process| process.pid).collect::<Vec<_>>(),
        "communicators": groups.iter().map(group).collect::<Vec<_>>(),
        "verdicts": said.iter().map(verdicts::to_json).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn two_dumps_go_to_two_files() {
        let folder = tempfile::tempdir().unwrap();
        let prefix = |name: &str| folder.path().join(name);
        for other in [
            prefix("rank_"),
            prefix("../")
                .join(folder.path().file_name().unwrap())
                .join("rank_"),
        ] {
            let error = differ(&prefix("rank_"), &other).unwrap_err();
            assert!(error.contains("are one file"), "{error}");
        }
        differ(&prefix("rank_"), &prefix("json_")).unwrap();
        let missing = |name: &str| prefix("missing").join(name);
        differ(&missing("rank_"), &missing("rank_")).unwrap_err();
        differ(&missing("rank_"), &missing("json_")).unwrap();
    }
}
