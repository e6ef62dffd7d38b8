//! Locks of a target that the kernel wants before it answers about the target.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use ringsight_probes::{Limit, Sample, Session, Source as _};

use crate::{
    Collected, Target,
    files::session,
    target::{ringsight, watch_both},
};

/// What one target may delay another by.
const DELAY: Duration = Duration::from_millis(100);

/// Attaches to `pids`; how long it took until `pid` of them was attached to.
fn time_to_attach(session: &mut Session, pids: &[u32], pid: u32) -> Result<Duration> {
    let begun = Instant::now();
    let mut attached = None;
    session.attach_all(
        pids,
        || false,
        |one, result| {
            if one == pid {
                attached = Some(result.map(|_| begun.elapsed()));
            }
        },
    );
    Ok(attached.context("nothing came of it")??)
}

#[test]
fn a_memory_lock_that_is_kept_delays_nobody() -> Result<()> {
    let name = "a_memory_lock_that_is_kept_delays_nobody";
    let (Some(mut hostile), Some(honest)) =
        (Target::start(name, "memory-lock")?, Target::start(name, "busy")?)
    else {
        return Ok(());
    };
    // Built before the lock is kept.
    ringsight();
    let alone = time_to_attach(&mut session()?, &[honest.pid()], honest.pid())?;
    hostile.ask("")?;
    let begun = Instant::now();
    let mut watching = session()?;
    let beside = time_to_attach(&mut watching, &[hostile.pid(), honest.pid()], honest.pid())?;
    let refused = watching.left_out().reached(Limit::AnswerTime);
    ensure!(refused == 1, "the lock was not kept: {:?}", begun.elapsed());
    ensure!(
        beside < alone + DELAY,
        "alone {alone:?}, beside the hostile target {beside:?}"
    );
    let Some(mut hostile) = Target::start(name, "memory-lock")? else {
        return Ok(());
    };
    hostile.ask("")?;
    watch_both(&hostile, |both| {
        let said = both
            .errors
            .contains("the kernel takes too long to answer about it (1000 ms at most)");
        ensure!(said, "{both:?}");
        ensure!(
            both.errors
                .contains("not looked at past a limit: 1 times (answer_time)"),
            "{both:?}"
        );
        Ok(())
    })
}

#[test]
fn a_program_that_is_never_replaced_holds_up_no_poll() -> Result<()> {
    let name = "a_program_that_is_never_replaced_holds_up_no_poll";
    let Some(mut hostile) = Target::start(name, "memory-exec")? else {
        return Ok(());
    };
    let mut session = session()?;
    session.attach(hostile.pid())?;
    hostile.ask("")?;
    let begun = Instant::now();
    let mut problems = String::new();
    let mut samples: Vec<Sample> = Vec::new();
    loop {
        let polled = Instant::now();
        let polled_by = session.poll(&mut samples);
        ensure!(polled.elapsed() < DELAY, "{:?}", polled.elapsed());
        match polled_by {
            Ok(true) => {}
            Ok(false) => break,
            Err(problem) => problems += &problem,
        }
        ensure!(begun.elapsed() < Duration::from_secs(2), "{problems}");
    }
    ensure!(problems.contains("has begun another program"), "{problems}");
    Ok(())
}

/// The one who keeps the lock is not watched: it maps the library of another process.
#[test]
fn a_lock_that_keeps_probes_from_being_placed_leaves_the_ring() -> Result<()> {
    let name = "a_lock_that_keeps_probes_from_being_placed_leaves_the_ring";
    let mut said = Vec::new();
    // The kernel forks nobody meanwhile: another test may have kept this one's collector from starting in time.
    for _ in 0..3 {
        let (Some(mut hostile), Some(honest)) =
            (Target::start(name, "memory-lock")?, Target::start(name, "busy")?)
        else {
            return Ok(());
        };
        ringsight();
        let library = honest.folder().join("libnccl.so.2");
        hostile.ask(library.to_str().context("a path in UTF-8")?)?;
        let pid = honest.pid().to_string();
        let arguments = ["attach", &pid, "--no-network", "--duration=0.5"];
        let Collected { errors, .. } = Collected::of(honest.folder(), &arguments)?;
        // "attached to 7 (busy): library, shared ring, 1002.7 ms"
        let line = errors.lines().find(|line| line.starts_with("attached to "));
        let time = line.and_then(|line| line.rsplit(", ").next()?.strip_suffix(" ms")?.parse().ok());
        let is_left_out = errors.contains("keeps probes from being placed there");
        let is_watched = errors.contains(" operations in ") && !errors.contains("\n0 operations in ");
        if is_left_out && is_watched && time.is_some_and(|ms: f64| ms < 1800.0) {
            return Ok(());
        }
        said.push(errors);
    }
    anyhow::bail!("{said:#?}")
}

/// Whoever keeps its answer back may be any process on the host.
#[test]
fn a_program_that_is_never_replaced_delays_no_search_for_ranks() -> Result<()> {
    let name = "a_program_that_is_never_replaced_delays_no_search_for_ranks";
    let Some(mut hostile) = Target::start(name, "memory-exec")? else {
        return Ok(());
    };
    hostile.ask("")?;
    let begun = Instant::now();
    let _ = ringsight_probes::ranks_below(std::process::id());
    ensure!(begun.elapsed() < Duration::from_secs(2), "{:?}", begun.elapsed());
    Ok(())
}
