//! Files and texts of a target: what `/proc` shows of it.

use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, ensure};
use ringsight_probes::{Limit, NetworkScope, Options, Session, UseEbpf};
use serde_json::Value;

use crate::{
    Collected, Target,
    target::{SECRET, watch_both},
};

/// The case that shows that the others are about something: the collector takes a hostile target for one to look at.
#[test]
fn an_honest_target_is_listed() -> Result<()> {
    let Some(mut target) = Target::start("an_honest_target_is_listed", "honest")? else {
        return Ok(());
    };
    target.ask("another")?;
    let listed = Collected::of(target.folder(), &["list", "--json", &target.pid().to_string()])?;
    ensure!(listed.code == Some(0) && listed.errors.is_empty(), "{listed:?}");
    ensure!(listed.elapsed < Duration::from_secs(10), "{listed:?}");
    let listed: Value = serde_json::from_str(&listed.output)?;
    ensure!(listed["flavour"] == "instrumented", "{listed:#}");
    ensure!(listed["sites"].as_array().map(Vec::len) == Some(4), "{listed:#}");
    let communicators = listed["communicators"].as_array().context("communicators")?;
    let names: Vec<_> = communicators.iter().map(|one| one["name"].as_str()).collect();
    ensure!(names == [Some("honest"), Some("another")], "{listed:#}");
    Ok(())
}

/// A session that reads shared rings alone.
pub(crate) fn session() -> Result<Session> {
    let session = Session::new(Options {
        use_ebpf: UseEbpf::Never,
        network: NetworkScope::Never,
        ..Options::default()
    });
    session.context("without probes there is nothing to refuse")
}

/// H2
#[test]
fn a_file_that_only_root_may_read_is_no_host_name() -> Result<()> {
    let name = "a_file_that_only_root_may_read_is_no_host_name";
    let Some(target) = Target::start(name, "hostname-link")? else {
        return Ok(());
    };
    let attached = session()?.attach(target.pid())?;
    let named = &attached.process.host_name;
    ensure!(!named.is_empty() && !SECRET.contains(&**named), "{named}");
    Ok(())
}

/// H2
#[test]
fn a_pipe_for_a_host_name_holds_nobody_up() -> Result<()> {
    let name = "a_pipe_for_a_host_name_holds_nobody_up";
    let Some(target) = Target::start(name, "hostname-pipe")? else {
        return Ok(());
    };
    let pid = target.pid().to_string();
    let collected = Collected::of(
        target.folder(),
        &["attach", &pid, "--no-ebpf", "--duration", "0.2"],
    )?;
    ensure!(collected.code == Some(0), "{collected:?}");
    Ok(())
}

/// H7
#[test]
fn an_environment_of_a_gibibyte_is_cut() -> Result<()> {
    let name = "an_environment_of_a_gibibyte_is_cut";
    let Some(target) = Target::start(name, "environment")? else {
        return Ok(());
    };
    // With little memory.
    let pid = target.pid().to_string();
    let collected = Collected::of(
        target.folder(),
        &["attach", &pid, "--no-ebpf", "--duration", "0.2"],
    )?;
    ensure!(collected.code == Some(0), "{collected:?}");
    ensure!(
        collected
            .errors
            .contains("its environment is too long (2097152 bytes at most)"),
        "{collected:?}"
    );
    let mut session = session()?;
    let attached = session.attach(target.pid())?;
    let rank = ("RANK".to_owned(), "7".to_owned());
    ensure!(attached.process.environment == [rank], "{attached:?}");
    ensure!(session.left_out().reached(Limit::Environment) == 1);
    Ok(())
}

/// H8
#[test]
fn a_library_that_is_cut_while_it_is_read_ends_nobody() -> Result<()> {
    let name = "a_library_that_is_cut_while_it_is_read_ends_nobody";
    let Some(target) = Target::start(name, "library-cut")? else {
        return Ok(());
    };
    for _ in 0..30 {
        let listed = Collected::of(target.folder(), &["list", &target.pid().to_string()])?;
        ensure!(listed.code.is_some(), "a signal ended it: {listed:?}");
    }
    Ok(())
}

/// H11
#[test]
fn library_files_that_take_long_to_examine_delay_nobody() -> Result<()> {
    let name = "library_files_that_take_long_to_examine_delay_nobody";
    let Some(target) = Target::start(name, "library-bombs")? else {
        return Ok(());
    };
    let mut session = session()?;
    let begun = Instant::now();
    let attached = session.attach(target.pid());
    let elapsed = begun.elapsed();
    ensure!(attached.is_err(), "{attached:?}");
    // The search itself may take 80 ms; the rest is for a machine that does other things, too.
    ensure!(elapsed < Duration::from_secs(1), "{elapsed:?}");
    ensure!(
        session.left_out().limits().count() > 0,
        "{:?}",
        session.left_out()
    );
    watch_both(&target, |both| {
        let said = both.errors.contains("not everything was looked at");
        ensure!(said, "{both:?}");
        Ok(())
    })
}
