//! Files and texts of a target: what `/proc` shows of it.

use std::time::Duration;

use anyhow::{Context as _, Result, ensure};
use serde_json::Value;

use crate::{Collected, Target};

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
