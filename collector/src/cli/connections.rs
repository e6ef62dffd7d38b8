//! Connections between nodes, as `ringsight snapshot` tells of them.

use std::fmt::Write as _;

use ringsight_collector::snapshot::{End, Path};
use ringsight_output::Printable;
use ringsight_records::{
    PathCause,
    connection::{LinkStage, PathCondition},
};
use serde_json::{Value, json};

use super::snapshot::seconds;

/// Why, in words; a completion's status is what libibverbs calls it.
fn reason(cause: PathCause, status: u8) -> String {
    let words = match cause {
        PathCause::Port => "port down",
        PathCause::Completion => match status {
            2 => "local queue pair operation error",
            5 => "work request flushed",
            12 => "transport retries exceeded",
            13 => "receiver-not-ready retries exceeded",
            _ => return format!("work completion status {status}"),
        },
        PathCause::Timeout => "no completion in time",
        PathCause::Shared => "found by another connection",
        PathCause::Peer => "found by the peer",
        PathCause::Build => "queue pair not usable",
        PathCause::Failback => "back to a path that is preferred",
    };
    words.to_owned()
}

/// Writes what is to be said of the connections of a communicator.
pub(super) fn write(text: &mut String, ends: &[End]) {
    for end in ends {
        let name = |place: usize| {
            end.paths.get(place).map_or_else(
                || "?".to_owned(),
                |path| format!("{}:{}", Printable::from(&*path.device), path.port),
            )
        };
        let way = if end.sends { "to" } else { "from" };
        // Writing to a string does not fail.
        let _ = write!(
            text,
            "  rank {} (process {}) {way} rank {}, channel {}{}: ",
            end.rank,
            end.pid,
            end.peer,
            end.channel,
            if end.messages { ", messages" } else { "" }
        );
        let on = format!("{} ({})", name(end.active), end.role(end.active));
        let _ = match end.phase {
            "flows" => write!(text, "over {on}"),
            "recovers" => write!(text, "recovers, left {on}"),
            _ => write!(text, "failed, last over {on}"),
        };
        if end.is_well() {
            let _ = match (end.paths.len(), end.survives) {
                (_, false) => writeln!(text, ", without failover"),
                (1, _) if end.backup_alone => writeln!(text, " alone"),
                (1, _) => writeln!(text, ", no backup"),
                _ => writeln!(text, ", backup {} ready", name(1)),
            };
            continue;
        }
        if let Some(ns) = end.switched_ns {
            let _ = write!(text, " for {}, switch {}", seconds(ns), end.epoch);
        }
        if let Some(cause) = end.reason {
            let _ = write!(text, ": {}", reason(cause, end.status));
        }
        text.push('\n');
        for (place, path) in end.paths.iter().enumerate() {
            let _ = writeln!(
                text,
                "    {:<7} {}: {}",
                end.role(place),
                name(place),
                condition(path)
            );
        }
    }
}

fn condition(path: &Path) -> String {
    let mut text = path.condition.map_or("?", PathCondition::name).to_owned();
    if !path.port_up {
        text.push_str(", port down");
    }
    let _ = write!(
        text,
        ", queue pair {} {} (generation {})",
        path.queue_pair,
        path.stage.map_or("?", LinkStage::name),
        path.generation
    );
    if path.consecutive_failures > 0 {
        let _ = write!(text, ", {} failures in a row", path.consecutive_failures);
        if let Some(cause) = path.cause {
            let _ = write!(text, ", last {}", reason(cause, path.status));
        }
    }
    if let Some(ns) = path.left_ns {
        let _ = write!(text, ", last left {} ago", seconds(ns));
    }
    if let Some(ns) = path.recovered_in_ns {
        let _ = write!(text, ", forgotten in {}", seconds(ns));
    }
    match path.next_attempt_in_ns {
        Some(0) => text.push_str(", tried again as soon as it can"),
        Some(ns) => {
            let _ = write!(text, ", next tried in {}", seconds(ns));
        }
        None => {}
    }
    text
}

/// An end, for `--json`.
pub(super) fn to_json(end: &End) -> Value {
    let path = |(place, path): (usize, &Path)| {
        json!({
            "role": end.role(place),
            "device": path.device,
            "port": path.port,
            "port_up": path.port_up,
            "generation": path.generation,
            "queue_pair": path.queue_pair,
            "stage": path.stage.map(LinkStage::name),
            "condition": path.condition.map(PathCondition::name),
            "consecutive_failures": path.consecutive_failures,
            "failures": path.failures,
            "cause": path.cause.map(PathCause::name),
            "status": path.status,
            "left_ns": path.left_ns,
            "recovered_in_ns": path.recovered_in_ns,
            "next_attempt_in_ns": path.next_attempt_in_ns,
        })
    };
    json!({
        "rank": end.rank,
        "pid": end.pid,
        "peer": end.peer,
        "channel": end.channel,
        "messages": end.messages,
        "direction": if end.sends { "send" } else { "recv" },
        "failover": end.survives,
        "phase": end.phase,
        "active": end.active,
        "epoch": end.epoch,
        "switches": end.switches,
        "switched_ns": end.switched_ns,
        "reason": end.reason.map(PathCause::name),
        "status": end.status,
        "paths": end.paths.iter().enumerate().map(path).collect::<Vec<_>>(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn path(device: &str) -> Path {
        Path {
            device: device.to_owned(),
            port: 1,
            port_up: true,
            generation: 1,
            queue_pair: 17,
            stage: Some(LinkStage::Ready),
            condition: Some(PathCondition::Good),
            consecutive_failures: 0,
            failures: 0,
            cause: None,
            status: 0,
            left_ns: None,
            recovered_in_ns: None,
            next_attempt_in_ns: None,
        }
    }

    fn end(paths: Vec<Path>) -> End {
        End {
            pid: 4711,
            rank: 0,
            peer: 1,
            channel: 2,
            sends: true,
            messages: false,
            survives: true,
            phase: "flows",
            epoch: 0,
            switches: 0,
            switched_ns: None,
            reason: None,
            status: 0,
            active: 0,
            backup_alone: false,
            paths,
        }
    }

    fn text(end: End) -> String {
        let mut text = String::new();
        write(&mut text, &[end]);
        text
    }

    #[test]
    fn a_connection_that_is_well_takes_a_line() {
        assert_eq!(
            text(end(vec![path("mlx5_0"), path("mlx5_1")])),
            "  rank 0 (process 4711) to rank 1, channel 2: over mlx5_0:1 (primary), backup mlx5_1:1 ready\n"
        );
        assert!(text(end(vec![path("mlx5_0")])).ends_with("over mlx5_0:1 (primary), no backup\n"));
        let alone = End {
            backup_alone: true,
            ..end(vec![path("mlx5_1")])
        };
        assert!(text(alone).ends_with("over mlx5_1:1 (backup) alone\n"));
        let fixed = End {
            survives: false,
            sends: false,
            messages: true,
            ..end(vec![path("mlx5_0")])
        };
        let fixed = text(fixed);
        assert!(
            fixed.contains("from rank 1, channel 2, messages:") && fixed.ends_with("without failover\n"),
            "{fixed}"
        );
    }

    #[test]
    fn a_connection_that_is_not_well_tells_of_each_path() {
        let failed = Path {
            port_up: false,
            stage: Some(LinkStage::Fenced),
            condition: Some(PathCondition::Down),
            consecutive_failures: 3,
            cause: Some(PathCause::Completion),
            status: 12,
            left_ns: Some(2_500_000_000),
            next_attempt_in_ns: Some(120_000_000),
            ..path("mlx5_0")
        };
        let end = End {
            active: 1,
            epoch: 1,
            switches: 1,
            switched_ns: Some(2_400_000_000),
            reason: Some(PathCause::Port),
            ..end(vec![failed, path("mlx5_1")])
        };
        assert_eq!(
            text(end.clone()),
            "  rank 0 (process 4711) to rank 1, channel 2: over mlx5_1:1 (backup) for 2.400 s, switch 1: port down\n    \
             primary mlx5_0:1: down, port down, queue pair 17 fenced (generation 1), 3 failures in a row, last transport retries \
             exceeded, last left 2.500 s ago, next tried in 0.120 s\n    \
             backup  mlx5_1:1: good, queue pair 17 ready (generation 1)\n"
        );
        let told = to_json(&end);
        assert_eq!(told["paths"][0]["condition"], "down");
        assert_eq!(told["paths"][1]["role"], "backup");
        assert_eq!(
            (&told["reason"], &told["direction"]),
            (&json!("port_down"), &json!("send"))
        );
    }
}
