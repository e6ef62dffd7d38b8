//! Without eBPF, where nothing carries what the shared ring has no room for, the same operations are shown.

use std::collections::BTreeMap;

use anyhow::{Result, ensure};
use ringsight_testbed::demo::{collector::Collector, summary::Summary};
use ringsight_tests::{LIMIT, alone, artifacts, folder, job, may_attach, skip, start};

fn watch(options: &[String]) -> Result<Summary> {
    let folder = folder()?;
    let mut job = start(&job(4, 30, 0), folder.path())?;
    let mut collector = Collector::attach(artifacts(), &job.pids(), options, folder.path())?;
    job.go()?;
    job.wait_done(LIMIT, |_, _| ())?;
    job.exit()?;
    collector.finish(LIMIT)
}

#[test]
fn the_ring_alone_shows_the_same_operations() -> Result<()> {
    let _alone = alone();
    let ring = watch(&["--no-ebpf".to_owned()])?;
    ensure!(
        ring.probe_hits == 0,
        "{} probes were hit without eBPF",
        ring.probe_hits
    );
    ensure!(ring.lost == 0, "{} events were lost", ring.lost);
    ensure!(
        ring.operations.iter().all(|op| op.complete),
        "operations are incomplete"
    );
    if !may_attach() {
        skip(
            "the_ring_alone_shows_the_same_operations",
            "needs root, to compare with what probes show",
        );
        return Ok(());
    }
    let probes = watch(&[])?;
    let kinds = |summary: &Summary| {
        let mut counts: BTreeMap<(String, u64, usize), usize> = BTreeMap::new();
        for operation in &summary.operations {
            *counts
                .entry((operation.name.clone(), operation.bytes, operation.by_rank.len()))
                .or_default() += 1;
        }
        counts
    };
    ensure!(
        kinds(&ring) == kinds(&probes),
        "{:#?}\n{:#?}",
        kinds(&ring),
        kinds(&probes)
    );
    for kind in ["root", "rank", "enqueue", "launch", "kernel_channel", "proxy"] {
        ensure!(
            ring.spans.get(kind) == probes.spans.get(kind),
            "{kind}: {:?} {:?}",
            ring.spans,
            probes.spans
        );
    }
    Ok(())
}
