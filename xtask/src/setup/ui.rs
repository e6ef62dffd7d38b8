//! Jaeger's web pages. Its Go module comes without them, and no package registry has them. They are built from a clone of jaeger-ui.

use std::{
    path::{Path, PathBuf},
    process::Command,
    time::Instant,
};

use anyhow::{Context, Result, bail};
use ringsight_testbed::{
    machine::{cache, make_whole, say},
    process,
};

/// Release of jaeger-ui that goes with the Jaeger that is built here.
const JAEGER_UI: &str = "2.14.0";

/// The Node that jaeger-ui's lock file is for.
const NODE: u32 = 24;

/// How to get the pages, for people.
pub fn jaeger_ui_remedy() -> String {
    format!(
        "git clone --depth 1 --branch v{JAEGER_UI} https://github.com/jaegertracing/jaeger-ui\n\
         cargo xtask backend jaeger --ui jaeger-ui"
    )
}

fn place() -> Result<PathBuf> {
    Ok(cache()?.join("jaeger-ui"))
}

/// The pages, if an earlier call of [`jaeger_ui`] kept them.
pub fn cached_jaeger_ui() -> Option<PathBuf> {
    place().ok().filter(|folder| is_built(folder))
}

fn is_built(folder: &Path) -> bool {
    folder.join("index.html").is_file()
}

/// Keeps the pages for this and later calls: `from` is a folder of built ones, or a clone of jaeger-ui, in which they are
/// then built with npm (minutes; it downloads jaeger-ui's dependencies, and Node where the installed one is too old).
pub fn jaeger_ui(from: &Path) -> Result<PathBuf> {
    let built = if is_built(from) {
        from.to_owned()
    } else if from.join("packages/jaeger-ui/package.json").is_file() {
        build(from)?
    } else {
        bail!(
            "{} holds neither built pages (index.html) nor jaeger-ui's source (packages/jaeger-ui). Get it with\n    {}",
            from.display(),
            jaeger_ui_remedy().replace('\n', "\n    ")
        );
    };
    let place = place()?;
    make_whole(&place, |part| {
        let content = built.join(".");
        process::run(Command::new("cp").args(["-R", "--"]).arg(content).arg(part))
    })?;
    Ok(place)
}

/// Builds in a clone of jaeger-ui, as its own documentation says: its library `plexus` first, then the pages.
fn build(source: &Path) -> Result<PathBuf> {
    let npm = process::find("npm").context(
        "jaeger-ui is built with npm, and there is none: install Node.js, or give a folder of built pages",
    )?;
    let start = Instant::now();
    say("jaeger-ui (built once, a few minutes, 650 MB of dependencies in its clone)");
    let installed = process::output(Command::new("node").arg("--version")).unwrap_or_default();
    for step in [
        // Scripts of dependencies are not needed, and not run.
        &["ci", "--ignore-scripts", "--no-audit", "--no-fund"][..],
        &["run", "build", "--workspace=packages/plexus"],
        &["run", "build", "--workspace=packages/jaeger-ui"],
    ] {
        let mut command = Command::new(&npm);
        if major(&installed) < NODE {
            command.args(["exec", "--yes", &format!("--package=node@{NODE}"), "--", "npm"]);
        }
        process::run(command.args(step).current_dir(source))?;
    }
    let built = source.join("packages/jaeger-ui/build");
    if !is_built(&built) {
        bail!("the build left no {}", built.join("index.html").display());
    }
    say(&format!(
        "jaeger-ui is ready after {:.0} s",
        start.elapsed().as_secs_f64()
    ));
    Ok(built)
}

/// The number before the first point of what `node --version` prints, 0 if it is none.
fn major(version: &str) -> u32 {
    version
        .trim_start_matches('v')
        .split('.')
        .next()
        .and_then(|number| number.parse().ok())
        .unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_of_node() {
        assert_eq!(
            (major("v24.9.0"), major("v9.1.0\n"), major(""), major("vx")),
            (24, 9, 0, 0)
        );
    }

    #[test]
    fn what_is_no_jaeger_ui_is_refused_with_where_to_get_it() {
        let error = jaeger_ui(&std::env::temp_dir().join("no-such-folder"))
            .unwrap_err()
            .to_string();
        assert!(
            error.contains("no-such-folder") && error.contains("git clone"),
            "{error}"
        );
    }
}
