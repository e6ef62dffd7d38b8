//! What a run began with and came to, as a file and for people.

use std::time::Duration;

use ringsight_collector::{
    Collector, resource,
    summary::{self, ExporterRow, Summary},
};
use ringsight_output::Printable;
use ringsight_probes::{Attached, Carrier, Session, network::SiteState, site::SiteKind};
use ringsight_records::Kind;

use super::attach::Watched;

/// CPU time that this process has taken, all threads, in seconds.
pub(super) fn cpu_seconds() -> f64 {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is a valid timespec to write to; the clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut time) };
    time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
}

/// What the run came to, before the probes are removed and outputs have taken what is queued.
pub(super) fn summarise(
    session: &Session,
    collector: &mut Collector,
    watched: &Watched,
    duration: Duration,
) -> Summary {
    let pids: Vec<u32> = watched
        .attached
        .iter()
        .map(|attached| attached.process.pid)
        .collect();
    let mut emitted = [0; Kind::LIMIT];
    for counters in pids.iter().filter_map(|pid| session.counters(*pid)) {
        for (sum, count) in emitted.iter_mut().zip(counters.emitted) {
            // A target's own counts, which may be anything.
            *sum = u64::saturating_add(*sum, count);
        }
    }
    let readings = collector.readings();
    // Not copied: there may be very many.
    let (rows, left_out) = collector.take_rows();
    Summary {
        version: 1,
        pids,
        records: summary::records(&readings.counts, &emitted),
        spans: summary::spans(&readings.spans),
        verdicts: collector.findings().into_iter().map(Into::into).collect(),
        stragglers: collector.stragglers().into_iter().map(Into::into).collect(),
        operations_left_out: if rows.is_empty() { 0 } else { left_out },
        operations: rows,
        lost: readings.counts.lost_total(),
        missed: readings.counts.missed_total(),
        device_events_overwritten: readings.counts.overwritten,
        unfinished: collector.unfinished(),
        given_up: summary::given_up(&readings),
        limits: readings.left_out_by_name(),
        duration_s: duration.as_secs_f64(),
        attach_ms: watched.attach_ms,
        detach_ms: 0.0,
        probe_hits: session.probe_stats().hits.iter().sum(),
        cpu_s: cpu_seconds(),
        exporters: Vec::new(),
    }
}

/// What the run came to, for people.
pub(super) fn report(summary: &Summary, collector: &Collector) -> String {
    use std::fmt::Write;
    let mut text = collector.log().table();
    let mut stragglers = collector.stragglers();
    stragglers.retain(|straggler| straggler.chronic);
    if !stragglers.is_empty() {
        text += "late in every step:\n";
    }
    for straggler in stragglers {
        let _ = writeln!(text, "  {}", Printable::from(&*straggler.sentence()));
    }
    let (operations, incomplete, late) = collector.log().counts();
    let received: u64 = summary.records.values().map(|count| count.received).sum();
    let spans: u64 = summary.spans.values().sum();
    // Writing to a string does not fail.
    let _ = writeln!(
        text,
        "{operations} operations in {:.1} s: {late} with a late rank, {incomplete} incomplete, {} unfinished; \
         {received} records, {} lost; {spans} spans",
        summary.duration_s, summary.unfinished, summary.lost
    );
    for (kind, count) in summary.records.iter().filter(|(_, count)| count.lost > 0) {
        let _ = writeln!(text, "  {kind}: {} lost of {}", count.lost, count.emitted);
    }
    if summary.missed > 0 {
        let by_kind = summary.records.iter().filter(|(_, count)| count.missed > 0);
        let by_kind: Vec<String> = by_kind
            .map(|(kind, count)| format!("{kind} {}", count.missed))
            .collect();
        let _ = writeln!(
            text,
            "missed while no collector was attached: {} events ({})",
            summary.missed,
            by_kind.join(", ")
        );
    }
    for (reason, count) in &summary.given_up {
        let _ = writeln!(text, "  {reason}: {count}");
    }
    let readings = collector.readings();
    for (limit, count) in readings.left_out.iter() {
        let (name, items) = (limit.name(), limit.items());
        let _ = writeln!(text, "  left out at a limit: {count} {items} ({name})");
    }
    for (name, count) in readings.unseen.by_name() {
        let _ = writeln!(text, "  not looked at past a limit: {count} times ({name})");
    }
    text
}

/// What became of the outputs, for people.
pub(super) fn report_exporters(rows: &[ExporterRow]) -> String {
    use std::fmt::Write;
    let mut text = String::new();
    for row in rows {
        // Writing to a string does not fail.
        let _ = write!(text, "{}", Printable::from(&*row.target));
        // A page shows operations, not spans, and counts none.
        if row.spans.delivered > 0 {
            let _ = write!(text, ": {} spans delivered", row.spans.delivered);
            if row.logs.delivered > 0 {
                let _ = write!(text, ", {} log records", row.logs.delivered);
            }
        }
        text.push('\n');
    }
    text
}

/// What is being watched of a process, and how.
pub(super) fn describe(attached: &Attached) -> String {
    let process = &attached.process;
    let mut kinds: Vec<&str> = Vec::new();
    for kind in [SiteKind::Nop5, SiteKind::Emulated, SiteKind::SingleStepped] {
        if attached.sites.iter().any(|site| site.kind == kind) {
            kinds.push(kind.name());
        }
    }
    let probes = match attached.sites.len() {
        1 => "1 probe".to_owned(),
        count => format!("{count} probes"),
    };
    let how = match (attached.carrier, process.instrumented) {
        (Carrier::Probe, true) => format!("{probes} ({}) and shared ring", kinds.join(", ")),
        (Carrier::Probe, false) => {
            format!(
                "{probes} ({}), host-timed: a library without our symbols",
                kinds.join(", ")
            )
        }
        (Carrier::Ring, _) => "shared ring".to_owned(),
    };
    let version = match resource::version(process.library_version) {
        unknown if unknown.is_empty() => "version unknown".to_owned(),
        version => version,
    };
    format!(
        "attached to {} ({}): {} ({version}), {how}, {:.1} ms",
        process.pid,
        Printable::from(&*process.name),
        Printable::path(&process.library),
        attached.elapsed.as_secs_f64() * 1e3
    )
}

/// What became of the sites in the kernel's RDMA stack: how many are probed, and which are not for which reason. Nothing is said where
/// there is no such stack.
pub(super) fn describe_network(sites: &[SiteState]) -> Vec<String> {
    if sites.is_empty() {
        return Vec::new();
    }
    let attached = sites.iter().filter(|site| site.absent.is_none()).count();
    let mut lines = vec![format!(
        "kernel's RDMA stack: {attached} of {} sites probed",
        sites.len()
    )];
    let mut reasons: Vec<(&str, Vec<&str>)> = Vec::new();
    for site in sites {
        let Some(reason) = &site.absent else { continue };
        match reasons.iter_mut().find(|(known, _)| known == reason) {
            Some((_, names)) => names.push(&site.name),
            None => reasons.push((reason, vec![&site.name])),
        }
    }
    lines.extend(
        reasons
            .iter()
            .map(|(reason, names)| format!("  absent ({reason}): {}", names.join(", "))),
    );
    lines
}
