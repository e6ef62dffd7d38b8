//! `cargo xtask test`: the fast tier of tests, everything with `--full`, or one part of what only `--full` runs.
//!
//! A run consists of layers ([`layers::LAYERS`]), which fail independently. The fast tier is meant to end in 15 minutes on two
//! cores; each layer says what it leaves to `--full`, and why. CI runs the fast tier and one of the parts in [`rotation`].

use std::{fs, process::Command, time::Instant};

use anyhow::Result;
use clap::Args;
use ringsight_testbed::{process, workspace};

pub(crate) mod guests;
mod layers;
pub(crate) mod libtest;
mod programs;
mod rotation;
pub(crate) mod suite;

use layers::{LAYERS, Layer, Needs, Run};
use libtest::Counts;
use suite::{Outcome, SkipLog, Suite};

/// What to test.
#[derive(Args, Debug)]
pub struct Options {
    /// Everything, with nothing sampled; or, with a layer's name behind it, all of that layer.
    #[arg(long)]
    full: bool,
    /// Only this part of what CI runs in turn: a part's number, or `list`, which prints them.
    #[arg(long, value_name = "N", conflicts_with_all = ["full", "filter"])]
    rotating: Option<String>,
    /// A layer's name: that layer alone. Anything else: layers, test programs and tests whose name contains it.
    filter: Option<String>,
}

/// Environment variable that names the file to which tests append what they skipped, one `name: reason` a line.
pub const SKIP_LOG: &str = "RINGSIGHT_SKIP_LOG";
/// Environment variable that makes tests which sample check everything.
pub const FULL: &str = "RINGSIGHT_TEST_FULL";
/// Environment variable with the path of a Chromium binary, for the tests that look at the page.
pub const CHROMIUM: &str = "RINGSIGHT_CHROMIUM";

fn check(command: &mut Command) -> Result<Outcome> {
    process::run(command)?;
    Ok(Outcome::Ran(Counts::PASSED))
}

/// Runs what the options select, and says whether nothing failed.
///
/// # Errors
/// If nothing can be begun, or no part is called so.
pub fn run(options: &Options) -> Result<bool> {
    if options.rotating.as_deref() == Some("list") {
        for (number, part) in rotation::PARTS.iter().enumerate() {
            println!("{number:>3}  {}", part.name());
        }
        return Ok(true);
    }
    let start = Instant::now();
    let target = workspace::target()?;
    fs::create_dir_all(&target)?;
    let skips = target.join(format!("skipped-{}.log", std::process::id()));
    let mut suite = Suite::new(SkipLog::new(skips));
    let mut run = Run {
        full: options.full,
        filter: None,
        target,
    };
    match &options.rotating {
        Some(number) => {
            let part = rotation::numbered(number)?;
            if set_up(&mut suite) {
                suite.layer(&part.name(), |report| part.run(&run, report));
            }
        }
        None => {
            let filter = options.filter.as_deref();
            run_layers(&mut suite, &mut run, filter);
            if filter.is_none() && !options.full && std::env::var_os("CI").is_some_and(|ci| ci == "true") {
                run_in_turn(&mut suite, &run);
            }
        }
    }
    if suite.is_empty() {
        let filter = options.filter.as_deref().unwrap_or_default();
        println!("no layer and no test is called {filter}");
    }
    Ok(suite.close(start.elapsed()))
}

/// Runs the layers that a filter selects, each after what it needs. A release build that fails ends the run.
fn run_layers(suite: &mut Suite, run: &mut Run, filter: Option<&str>) {
    let (mut is_set_up, mut is_built) = (false, false);
    for layer in &LAYERS {
        let Some(inner) = selected(layer, filter) else {
            continue;
        };
        if !(run.full || filter.is_some()) {
            for (what, why) in layer.left_out() {
                suite.leave_out(what, why);
            }
            if layer.is_full_only() {
                continue;
            }
        }
        if layer.needs >= Needs::Toolchain && !is_set_up {
            is_set_up = set_up(suite);
            if !is_set_up {
                return;
            }
        }
        if layer.needs >= Needs::Release && !is_built {
            suite.layer("release build", |_| {
                crate::setup::build()?;
                Ok(Outcome::Ran(Counts::PASSED))
            });
            is_built = !suite.has_just_failed();
            if !is_built {
                return;
            }
        }
        run.filter = inner.map(str::to_owned);
        suite.layer(layer.name, |report| (layer.run)(run, report));
    }
    run.filter = None;
}

/// Installs what builds need; `false`, with a failed layer, if that cannot be done.
fn set_up(suite: &mut Suite) -> bool {
    match layers::set_up() {
        Ok(()) => true,
        Err(error) => {
            suite.layer("set-up", |_| Err(error));
            false
        }
    }
}

/// Whether a filter selects a layer, and what selects tests within it. A layer's full name selects that layer alone.
fn selected<'a>(layer: &Layer, filter: Option<&'a str>) -> Option<Option<&'a str>> {
    let Some(filter) = filter else {
        return Some(None);
    };
    if LAYERS.iter().any(|layer| layer.name == filter) {
        return (layer.name == filter).then_some(None);
    }
    match layer.name.contains(filter) {
        true => Some(None),
        false => layer.holds_tests.then_some(Some(filter)),
    }
}

/// Runs the part of `--full` whose turn the checked-out commit is.
fn run_in_turn(suite: &mut Suite, run: &Run) {
    match rotation::of_head() {
        Ok((part, why)) => {
            println!("\nin turn: {}: {why}", part.name());
            suite.layer(&part.name(), |report| part.run(run, report));
        }
        Err(error) => suite.layer("in turn", |_| Ok(Outcome::Skipped(format!("{error:#}")))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn layers(filter: Option<&str>) -> Vec<(&'static str, Option<String>)> {
        LAYERS
            .iter()
            .filter_map(|layer| Some((layer.name, selected(layer, filter)?.map(str::to_owned))))
            .collect()
    }

    #[test]
    fn no_filter_selects_all_layers_whole() {
        let all = layers(None);
        assert_eq!(all.len(), LAYERS.len());
        assert!(all.iter().all(|(_, inner)| inner.is_none()));
    }

    #[test]
    fn a_layers_name_selects_it_alone() {
        for layer in &LAYERS {
            assert_eq!(layers(Some(layer.name)), [(layer.name, None)]);
        }
    }

    #[test]
    fn another_word_selects_layers_and_the_tests_within_layers() {
        assert_eq!(
            layers(Some("jaeger")),
            [
                ("unit and integration", Some("jaeger".to_owned())),
                ("end to end", Some("jaeger".to_owned())),
            ]
        );
        let named = layers(Some("integr"));
        assert_eq!(named[0], ("unit and integration", None));
    }

    #[test]
    fn what_the_fast_tier_leaves_out_has_a_reason() {
        let left_out: Vec<(String, String)> = LAYERS.iter().flat_map(Layer::left_out).collect();
        assert!(
            left_out
                .iter()
                .all(|(what, why)| !what.is_empty() && why.len() > 10)
        );
        for layer in LAYERS.iter().filter(|layer| layer.is_full_only()) {
            assert!(
                left_out.iter().any(|(what, _)| what == layer.name),
                "{}",
                layer.name
            );
        }
    }
}
