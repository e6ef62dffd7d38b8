//! Several collectors on one job, not talking to each other, make one set of traces.

use std::collections::BTreeSet;

use anyhow::{Result, ensure};
use ringsight_testbed::demo::collector::Collector;
use ringsight_tests::{
    LIMIT, alone, artifacts, folder, job, start,
    traces::{self, Makers},
};

#[test]
fn two_collectors_on_half_the_ranks_each_make_one_trace_a_collective() -> Result<()> {
    let _alone = alone();
    let folder = folder()?;
    let configuration = job(4, 40, 0);
    let mut job = start(&configuration, folder.path())?;
    let pids = job.pids();
    // Not by nodes: each collector has a rank of each.
    let halves = [[pids[0], pids[2]], [pids[1], pids[3]]];
    let files = ["even.jsonl", "odd.jsonl"].map(|name| folder.path().join(name));
    let mut collectors = Vec::new();
    for (half, file) in halves.iter().zip(&files) {
        let options = [format!("--out={}", file.display())];
        collectors.push(Collector::attach(artifacts(), half, &options, folder.path())?);
    }
    job.go()?;
    job.wait_done(LIMIT, |_, _| ())?;
    let truths = job.exit()?;
    let mut roots = 0;
    for collector in &mut collectors {
        let summary = collector.finish(LIMIT)?;
        ensure!(summary.lost == 0, "{} events were lost", summary.lost);
        roots += summary.spans.get("root").copied().unwrap_or(0);
    }

    let mut spans = Vec::new();
    for file in &files {
        spans.extend(traces::read_lines(file)?);
    }
    let merged = traces::by_trace(spans);
    let (mut faults, mut names) = (Vec::new(), Vec::new());
    for trace in merged.values() {
        let Some(root) = trace.iter().find(|span| span.parent.is_none()) else {
            faults.extend(traces::faults(trace, Makers::Several));
            continue;
        };
        names.push(root.name.clone());
        if root.name == "send_recv" {
            faults.extend(traces::faults(trace, Makers::Several));
        } else if truths[0]
            .collectives
            .iter()
            .any(|collective| collective.name == root.name)
        {
            faults.extend(traces::collective_faults(trace, 4, true, Makers::Several));
        } else {
            faults.extend(traces::faults(trace, Makers::Several));
        }
    }
    ensure!(
        faults.is_empty(),
        "{} faults, first: {:#?}",
        faults.len(),
        &faults[..faults.len().min(10)]
    );
    let count = |name: &str| names.iter().filter(|found| *found == name).count();
    for name in truths[0]
        .collectives
        .iter()
        .map(|c| c.name.as_str())
        .collect::<BTreeSet<_>>()
    {
        let called = truths[0].collectives.iter().filter(|c| c.name == name).count();
        ensure!(
            count(name) == called,
            "{} traces of {called} calls of {name}",
            count(name)
        );
    }
    let messages: usize = truths.iter().map(|truth| truth.sent.len()).sum();
    ensure!(
        count("send_recv") == messages,
        "{} traces of {messages} messages",
        count("send_recv")
    );
    ensure!(
        roots as usize == truths[0].collectives.len() + messages,
        "{roots} roots were counted for {} operations",
        truths[0].collectives.len() + messages
    );
    Ok(())
}
