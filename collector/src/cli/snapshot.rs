//! `ringsight snapshot`: what processes are in now, and whom they wait for.

use std::fmt::Write as _;

use ringsight_collector::snapshot::{Group, Operation, Part, Place, Process, take};
use ringsight_probes::{look, process, target};
use serde_json::{Value, json};

use super::{Exit, print};

/// Runs the command.
pub(crate) fn run(pids: &[u32], json: bool) -> Exit {
    let mut processes = Vec::new();
    let mut exit = Exit::Success;
    for pid in pids {
        match read(*pid) {
            Ok(process) => processes.push(process),
            Err(error) => {
                eprintln!("ringsight: {error}");
                exit = Exit::Error;
            }
        }
    }
    if processes.is_empty() {
        return exit;
    }
    let groups = take(&processes, process::now_ns());
    let text = if json {
        format!("{:#}\n", to_json(&processes, &groups))
    } else {
        to_text(&processes, &groups)
    };
    match print(&text) {
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
        stopped: process::is_stopped(pid).ok_or_else(gone)?,
        communicators: look.communicators,
        operations: look.operations,
    })
}

fn seconds(ns: u64) -> String {
    format!("{:.3} s", ns as f64 / 1e9)
}

fn name(operation: &Operation) -> String {
    let function = operation.function.map_or("operation", |function| function.name());
    let number = match (operation.seq >> 32, operation.seq & u64::from(u32::MAX)) {
        (0, seq) => format!("{seq}"),
        (graph, node) => format!("{node} of graph {graph}"),
    };
    match operation.pair {
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
        Place::Running { since_ns } => format!("in it for {}", seconds(since_ns)),
        Place::Done => "done".to_owned(),
    };
    let stopped = if part.stopped { ", process stopped" } else { "" };
    format!("rank {} (process {}{stopped}): {place}", part.rank, part.pid)
}

fn to_text(processes: &[Process], groups: &[Group]) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    for group in groups {
        let title = if group.name.is_empty() {
            format!("{:016x}", group.id)
        } else {
            format!("{:016x} ({})", group.id, group.name)
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
                name(operation),
                operation.bytes,
                seconds(operation.oldest_ns)
            );
            for part in &operation.parts {
                let _ = writeln!(text, "    {}", line(part));
            }
            if !operation.unseen.is_empty() {
                let _ = writeln!(text, "    not looked at: {}", list(&operation.unseen));
            }
            let awaited: Vec<u32> = operation.awaited().iter().map(|part| part.rank).collect();
            if !awaited.is_empty() {
                let _ = writeln!(text, "    waits for rank {}", list(&awaited));
            }
        }
        if group.operations.is_empty() {
            let _ = writeln!(text, "  nothing on its way");
        }
    }
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

fn to_json(processes: &[Process], groups: &[Group]) -> Value {
    let part = |part: &Part| {
        let (place, ns) = match part.place {
            Place::NotLaunched { idle_ns } => ("not_launched", idle_ns),
            Place::Queued { since_ns } => ("queued", Some(since_ns)),
            Place::Running { since_ns } => ("running", Some(since_ns)),
            Place::Done => ("done", None),
        };
        json!({"rank": part.rank, "pid": part.pid, "stopped": part.stopped, "place": place, "ns": ns})
    };
    let operation = |operation: &Operation| {
        json!({
            "function": operation.function.map(ringsight_records::Function::name),
            "sequence": operation.seq,
            "pair": operation.pair,
            "bytes": operation.bytes,
            "data_type": operation.data_type.map(ringsight_records::DataType::name),
            "oldest_ns": operation.oldest_ns,
            "parts": operation.parts.iter().map(part).collect::<Vec<_>>(),
            "unseen": operation.unseen,
            "awaited": operation.awaited().iter().map(|part| part.rank).collect::<Vec<_>>(),
        })
    };
    let group = |group: &Group| {
        json!({
            "id": format!("{:016x}", group.id),
            "name": group.name,
            "ranks": group.ranks,
            "seen": group.seen,
            "operations": group.operations.iter().map(operation).collect::<Vec<_>>(),
        })
    };
    json!({
        "version": 1,
        "pids": processes.iter().map(|process| process.pid).collect::<Vec<_>>(),
        "communicators": groups.iter().map(group).collect::<Vec<_>>(),
    })
}
