//! What proxies move and watchdogs have said, as `ringsight snapshot` tells of it.

use std::fmt::Write as _;

use ringsight_collector::snapshot::{HeldUp, Proxy, VerdictView, name};
use ringsight_output::Printable;
use ringsight_records::{Function, verdicts::Nic};
use serde_json::{Value, json};

use super::snapshot::seconds;

/// An operation, with its replay if it has one.
fn run(function: Option<Function>, seq: u64, pair: Option<(u32, u32)>, replay: u32) -> String {
    let name = name(function, seq, pair);
    match replay {
        0 => name,
        replay => format!("{name}, replay {replay}"),
    }
}

/// Writes what the proxies of a communicator's ranks are moving.
pub(super) fn write_proxies(text: &mut String, proxies: &[Proxy]) {
    for proxy in proxies {
        let behind = match proxy.queued {
            0 => String::new(),
            queued => format!(", {queued} behind it"),
        };
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "  proxy of rank {} (process {}) {} rank {}, channel {}: {}, step {} of {}, for {}{behind}",
            proxy.rank,
            proxy.pid,
            if proxy.sends { "to" } else { "from" },
            proxy.peer,
            proxy.channel,
            run(proxy.function, proxy.seq, proxy.pair, proxy.replay),
            proxy.step,
            proxy.steps,
            seconds(proxy.since_ns),
        );
    }
}

pub(super) fn proxy_json(proxy: &Proxy) -> Value {
    json!({
        "pid": proxy.pid,
        "rank": proxy.rank,
        "peer": proxy.peer,
        "channel": proxy.channel,
        "sends": proxy.sends,
        "function": proxy.function.map(Function::name),
        "sequence": proxy.seq,
        "pair": proxy.pair,
        "replay": proxy.replay,
        "step": proxy.step,
        "steps": proxy.steps,
        "chunk_bytes": proxy.chunk_bytes,
        "since_ns": proxy.since_ns,
        "queued": proxy.queued,
    })
}

/// Writes the verdicts, in their order.
pub(super) fn write(text: &mut String, verdicts: &[VerdictView]) {
    for verdict in verdicts {
        let cause = verdict.cause.map_or("unknown cause", |cause| cause.name());
        let words = match verdict.cause {
            Some(cause) => cause.of_rank(verdict.culprit).to_string(),
            None => format!("rank {} is waited for", verdict.culprit),
        };
        let others = match verdict.others {
            0 => String::new(),
            others => format!(", and so it is with {others} more"),
        };
        let ended = match verdict.ended {
            Some(true) => ", and has ended since",
            _ => "",
        };
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "verdict {} ago, of rank {} (process {}) on {} of communicator {:016x}: {cause} ({}): {words}{others}; it was in \
             progress for {}{ended}",
            seconds(verdict.ago_ns),
            verdict.rank,
            verdict.pid,
            run(verdict.function, verdict.seq, verdict.pair, verdict.replay),
            verdict.communicator,
            if verdict.hang { "hang" } else { "late" },
            seconds(verdict.waited_ns),
        );
        if let Some(nic) = &verdict.nic {
            let _ = writeln!(
                text,
                "  rank {}'s end is on {}, port {}, queue pair {}",
                verdict.culprit,
                Printable::from(nic.device()),
                nic.port,
                nic.queue_pair
            );
        }
        if let Some(held) = &verdict.held_up {
            let _ = writeln!(
                text,
                "  rank {} was in {} of communicator {:016x} for {}",
                verdict.culprit,
                run(None, held.seq, held.pair, held.replay),
                held.communicator,
                seconds(held.for_ns),
            );
        }
    }
}

pub(super) fn to_json(verdict: &VerdictView) -> Value {
    let held_up = |held: &HeldUp| {
        json!({
            "communicator": format!("{:016x}", held.communicator),
            "sequence": held.seq,
            "pair": held.pair,
            "replay": held.replay,
            "for_ns": held.for_ns,
        })
    };
    let nic = |nic: &Nic| {
        json!({
            "device": nic.device(),
            "port": nic.port,
            "queue_pair": nic.queue_pair,
        })
    };
    json!({
        "pid": verdict.pid,
        "communicator": format!("{:016x}", verdict.communicator),
        "rank": verdict.rank,
        "ago_ns": verdict.ago_ns,
        "cause": verdict.cause.map(ringsight_records::Cause::name),
        "hang": verdict.hang,
        "culprit": verdict.culprit,
        "others": verdict.others,
        "function": verdict.function.map(Function::name),
        "sequence": verdict.seq,
        "pair": verdict.pair,
        "replay": verdict.replay,
        "waited_ns": verdict.waited_ns,
        "ended": verdict.ended,
        "held_up": verdict.held_up.as_ref().map(held_up),
        "nic": verdict.nic.as_ref().map(nic),
    })
}
