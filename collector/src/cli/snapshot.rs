//! `ringsight snapshot`: what processes are in now, and whom they wait for.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt::Write as _,
    io::IsTerminal as _,
    path::{Path, PathBuf},
    time::{Duration, SystemTime},
};

use clap::Args;
use ringsight_collector::{
    clock::Clock,
    snapshot::{
        Group, Operation, Outcome, Part, Place, Process, RANKS, Ranks, STALL_NS, VerdictView, is_usable,
        outcome, refused, take, verdicts as said,
    },
    summary::VerdictRow,
};
use ringsight_dump::{Format, Moment};
use ringsight_exporters::model::Finding;
use ringsight_output::{Destination, Error, Printable};
use ringsight_probes::{look, process, target};
use ringsight_records::Function;
use serde_json::{Value, json};
use tracing::{error, warn};

use super::{Exit, attach::parse_duration, connections, launcher, print, print_json, verdicts, write_stdout};

/// Ranks that dumps list at most, all communicators and the job once for each of them.
const DUMPED_RANKS: usize = 1 << 22;

/// How often `--watch` takes another one without saying.
pub(super) const WATCH: &str = "2";

/// What to show of which processes.
#[derive(Debug, Args)]
pub(crate) struct SnapshotArguments {
    /// Processes of one job, on this host; with all ranks of a communicator it can tell who is missing
    #[arg(required = true, value_name = "PID")]
    pids: Vec<u32>,
    /// Write JSON
    #[arg(long)]
    json: bool,
    /// Take another one every so many seconds, 2 by default, until the processes are gone; with --json each is one line
    #[arg(long, value_name = "SECONDS", num_args = 0..=1, require_equals = true, default_missing_value = WATCH, value_parser = parse_duration)]
    watch: Option<Duration>,
    /// Also write what each rank is in to PREFIX and its rank, a file of PyTorch's Flight Recorder
    #[arg(long, value_name = "PREFIX", conflicts_with = "watch")]
    dump: Option<PathBuf>,
    /// The same as JSON
    #[arg(long, value_name = "PREFIX", conflicts_with = "watch")]
    dump_json: Option<PathBuf>,
}

/// What was read of the processes, and whether all of them could be.
struct Taken {
    processes: Vec<Process>,
    now: u64,
    exit: Exit,
}

/// Runs the command.
pub(crate) fn run(arguments: &SnapshotArguments) -> Exit {
    let taken = read_all(&arguments.pids, &mut BTreeSet::new());
    if taken.processes.is_empty() {
        return taken.exit;
    }
    match arguments.watch {
        Some(interval) => watch(arguments, interval, taken),
        None => once(arguments, taken),
    }
}

/// `known`: problems that were said before.
fn read_all(pids: &[u32], known: &mut BTreeSet<String>) -> Taken {
    let (mut processes, mut exit) = (Vec::new(), Exit::Success);
    for pid in pids {
        match read(*pid) {
            Ok(process) => processes.push(process),
            Err(problem) => {
                exit = Exit::Error;
                if known.insert(problem.clone()) {
                    error!(pid, "{problem}");
                    if let Some(hint) = launcher::hint(*pid, "snapshot") {
                        error!("{hint}");
                    }
                }
            }
        }
    }
    let now = process::now_ns();
    Taken { processes, now, exit }
}

fn once(arguments: &SnapshotArguments, taken: Taken) -> Exit {
    let Taken {
        processes,
        now,
        mut exit,
    } = taken;
    let (dump, dump_json) = (arguments.dump.as_deref(), arguments.dump_json.as_deref());
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
    let view = View::of(&processes, now);
    let printed = if arguments.json {
        print_json(&view.to_json())
    } else {
        print(&view.to_text())
    };
    match (printed, &view.outcome) {
        (Exit::Success, Outcome::RootCause(_)) => Exit::HangSeen,
        (Exit::Success, _) => exit,
        (failed, _) => failed,
    }
}

/// Prints one after the other. Ends when the last process is gone, with what the last snapshot came to.
fn watch(arguments: &SnapshotArguments, interval: Duration, first: Taken) -> Exit {
    /// Clears a terminal.
    const CLEAR: &str = "\x1b[H\x1b[2J";
    let is_terminal = std::io::stdout().is_terminal();
    let (mut taken, mut known, mut exit) = (first, BTreeSet::new(), Exit::Success);
    while !taken.processes.is_empty() {
        if let Some(problem) = refusal(&taken.processes)
            && known.insert(problem.clone())
        {
            error!("{problem}");
        }
        let view = View::of(&taken.processes, taken.now);
        let text = match (arguments.json, is_terminal) {
            (true, _) => ringsight_output::json(&format!("{}\n", view.to_json())).into_owned(),
            (false, true) => format!("{CLEAR}{}", ringsight_output::lines(&view.to_text())),
            (false, false) => format!("{}\n", ringsight_output::lines(&view.to_text())),
        };
        exit = match view.outcome {
            Outcome::RootCause(_) => Exit::HangSeen,
            _ => taken.exit,
        };
        match write_stdout(&text) {
            Ok(true) => {}
            Ok(false) => break,
            Err(_) => return Exit::Error,
        }
        std::thread::sleep(interval);
        taken = read_all(&arguments.pids, &mut known);
    }
    exit
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
        host: process::host_of(pid, &look.host),
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
    let held = if part.held {
        "; it is in another operation"
    } else {
        ""
    };
    let stopped = if part.stopped { ", process stopped" } else { "" };
    format!(
        "rank {} (process {}{stopped}): {place}{held}",
        part.rank, part.pid
    )
}

/// A snapshot as it is shown.
struct View<'a> {
    processes: &'a [Process],
    groups: Vec<Group>,
    said: Vec<VerdictView>,
    outcome: Outcome,
}

impl<'a> View<'a> {
    fn of(processes: &'a [Process], now: u64) -> Self {
        let said = said(processes, now);
        let mut groups = take(processes, &said, now);
        let outcome = outcome(&mut groups, processes, now, &Clock::system());
        Self {
            processes,
            groups,
            said,
            outcome,
        }
    }

    fn to_text(&self) -> String {
        let mut text = format!("{}\n", headline(&self.outcome));
        for group in &self.groups {
            write_group(&mut text, group);
        }
        verdicts::write(&mut text, &self.said);
        let alone = self
            .processes
            .iter()
            .filter(|process| process.communicators.is_empty());
        for process in alone {
            // Writing to a string does not fail, here and below.
            let line = launcher::hint(process.pid, "snapshot")
                .unwrap_or_else(|| format!("process {}: no communicator", process.pid));
            let _ = writeln!(text, "{line}");
        }
        text
    }

    fn to_json(&self) -> Value {
        let cause = match &self.outcome {
            Outcome::RootCause(finding) => Some(VerdictRow::from(Finding::clone(finding))),
            Outcome::Moving | Outcome::Unclear { .. } => None,
        };
        json!({
            "version": 1,
            "pids": self.processes.iter().map(|process| process.pid).collect::<Vec<_>>(),
            "root_cause": cause,
            "communicators": self.groups.iter().map(group_json).collect::<Vec<_>>(),
            "verdicts": self.said.iter().map(verdicts::to_json).collect::<Vec<_>>(),
        })
    }
}

/// The first line.
fn headline(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Moving => format!("no hang: no rank has waited for {:.0} s", STALL_NS as f64 / 1e9),
        Outcome::RootCause(finding) => format!(
            "{:<5} {}; next: {}",
            finding.state(),
            Printable::from(&*finding.text),
            Printable::from(&*finding.next_step)
        ),
        Outcome::Unclear {
            waiting,
            name,
            waited_ns,
            named,
            is_part,
        } => {
            let ranks: Ranks = waiting.iter().copied().collect();
            let mut line = format!(
                "no root cause yet: rank {ranks} in {name} for {}",
                seconds(*waited_ns)
            );
            if !named.is_empty() {
                let named: Ranks = named.iter().copied().collect();
                let _ = write!(line, ", waiting for rank {named}, which may wait itself");
            }
            line += if *is_part {
                "; next: give the other ranks' pids too, or look again in 2 s"
            } else {
                "; next: look again in 2 s"
            };
            line
        }
    }
}

fn write_group(text: &mut String, group: &Group) {
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
    let behind = group.operations.iter().filter(|operation| operation.behind);
    let folded = match behind.count() {
        0 => String::new(),
        1 => "1 operation queues behind it\n".to_owned(),
        more => format!("{more} operations queue behind it\n"),
    };
    let shown = group.operations.iter().filter(|operation| !operation.behind);
    for (at, operation) in shown.enumerate() {
        let _ = writeln!(
            text,
            "  {}, {} bytes, for {}",
            operation.name(),
            operation.bytes,
            seconds(operation.oldest_ns)
        );
        for part in &operation.parts {
            let _ = writeln!(text, "    {}", line(part));
        }
        if !operation.unseen.is_empty() {
            let _ = writeln!(text, "    not looked at: {}", operation.unseen);
        }
        let awaited = operation.awaited();
        if !awaited.is_empty() {
            let _ = writeln!(text, "    waits for rank {}", list(&awaited));
        }
        if at == 0 && !folded.is_empty() {
            let _ = write!(text, "    {folded}");
        }
    }
    if !folded.is_empty() && group.operations.iter().all(|operation| operation.behind) {
        let _ = write!(
            text,
            "  {}",
            folded.replace("behind it", "behind those of other communicators")
        );
    }
    if group.operations_left_out > 0 {
        let _ = writeln!(text, "  and {} later operations", group.operations_left_out);
    }
    if group.operations.is_empty() {
        let _ = writeln!(text, "  nothing on its way");
    }
    verdicts::write_proxies(text, &group.proxies);
    connections::write(text, &group.connections);
}

fn list(ranks: &[u32]) -> String {
    let ranks: Vec<String> = ranks.iter().map(u32::to_string).collect();
    ranks.join(", ")
}

fn part_json(part: &Part) -> Value {
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
        "rank": part.rank, "pid": part.pid, "stopped": part.stopped, "place": place, "ns": ns, "held": part.held,
        "waits": waits.map(|waits| json!({
            "for": waits.phase.name(), "peer": waits.peer, "channel": waits.channel, "step": waits.step,
        })),
    })
}

fn operation_json(operation: &Operation) -> Value {
    json!({
        "function": operation.function.map(Function::name),
        "sequence": operation.seq,
        "pair": operation.pair,
        "bytes": operation.bytes,
        "data_type": operation.data_type.map(ringsight_records::DataType::name),
        "oldest_ns": operation.oldest_ns,
        "behind": operation.behind,
        "parts": operation.parts.iter().map(part_json).collect::<Vec<_>>(),
        "unseen": operation.unseen.to_string(),
        "awaited": operation.awaited(),
    })
}

fn group_json(group: &Group) -> Value {
    json!({
        "id": format!("{:016x}", group.id),
        "name": group.name,
        "ranks": group.ranks,
        "seen": group.seen.to_string(),
        "user": group.user,
        "operations_left_out": group.operations_left_out,
        "operations": group.operations.iter().map(operation_json).collect::<Vec<_>>(),
        "proxies": group.proxies.iter().map(verdicts::proxy_json).collect::<Vec<_>>(),
        "connections": group.connections.iter().map(connections::to_json).collect::<Vec<_>>(),
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
