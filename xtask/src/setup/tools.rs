//! Jaeger and Chromium, which some tests look at traces with.

use std::{
    io::{BufRead, BufReader},
    path::PathBuf,
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use fs_err as fs;
use ringsight_testbed::{
    backend,
    machine::{apt, say},
    process,
};

/// Jaeger's binary, built at the first call (4 minutes on two cores) where Go is.
///
/// # Errors
/// Says what is missing; callers skip what needs it.
pub fn jaeger() -> Result<PathBuf> {
    let version = backend::VERSION;
    let program = backend::program()?;
    if process::is_program(&program) {
        return Ok(program);
    }
    let go = process::find("go")
        .or_else(|| Some(PathBuf::from("/usr/local/go/bin/go")).filter(|path| process::is_program(path)))
        .context(
            "Jaeger is built from its Go module, and Go (1.25 or newer) is not installed: https://go.dev/dl",
        )?;
    say(&format!(
        "Jaeger {version} (compiled once from its Go module, about 4 minutes)"
    ));
    let start = Instant::now();
    // `go install` refuses a module with replace directives; built inside the module, its own go.mod rules.
    let module = format!("github.com/jaegertracing/jaeger@v{version}");
    let download = process::output(Command::new(&go).args(["mod", "download", "-json", &module]))?;
    let download: serde_json::Value = serde_json::from_str(&download).context("output of go mod download")?;
    let source = download["Dir"].as_str().context("go mod download names no Dir")?;
    let folder = program.parent().context("the cache has no bin folder")?;
    fs::create_dir_all(folder)?;
    // Under another name until it is whole: an interrupted build leaves nothing that looks finished.
    let partial = program.with_extension("partial");
    go_build(
        Command::new(&go)
            // -v names each package on standard error when it is compiled.
            .args(["build", "-v", "-trimpath", "-ldflags", "-s -w", "-o"])
            .arg(&partial)
            .arg("./cmd/jaeger")
            .current_dir(source),
        start,
    )?;
    fs::rename(&partial, &program)?;
    say(&format!(
        "Jaeger is ready after {:.0} s",
        start.elapsed().as_secs_f64()
    ));
    Ok(program)
}

/// Runs a `go build -v` and says every ten seconds how far it is; what Go says besides packages is passed on.
fn go_build(command: &mut Command, start: Instant) -> Result<()> {
    let mut child = command
        .stderr(Stdio::piped())
        .spawn()
        .with_context(|| format!("cannot start {}", process::line(command)))?;
    let errors = child.stderr.take().context("standard error is not piped")?;
    let (mut packages, mut said) = (0, start);
    for line in BufReader::new(errors).lines() {
        let line = line?;
        if !is_package(&line) {
            eprintln!("{line}");
            continue;
        }
        packages += 1;
        if said.elapsed() >= Duration::from_secs(10) {
            said = Instant::now();
            say(&format!(
                "Jaeger: {packages} packages compiled after {:.0} s",
                start.elapsed().as_secs_f64()
            ));
        }
    }
    let status = child.wait()?;
    if !status.success() {
        bail!("{} {}", process::line(command), process::reason(status));
    }
    Ok(())
}

/// Whether a line of `go build -v` is the path of a package: no blanks, no colon, no `# package` before messages.
fn is_package(line: &str) -> bool {
    !line.is_empty() && !line.contains([' ', ':', '#', '\t'])
}

/// A Chromium or Chrome; installed where apt has a real package of it (Ubuntu's only refers to a snap).
///
/// # Errors
/// Says what is missing; callers skip what needs it.
pub fn chromium() -> Result<PathBuf> {
    const NAMES: [&str; 4] = [
        "chromium",
        "chromium-browser",
        "google-chrome",
        "google-chrome-stable",
    ];
    let found = || NAMES.iter().find_map(|name| process::find(name));
    if let Some(program) = found() {
        return Ok(program);
    }
    let debian =
        fs::read_to_string("/etc/os-release").is_ok_and(|text| text.lines().any(|line| line == "ID=debian"));
    if !debian {
        bail!("no Chromium or Chrome in PATH");
    }
    apt::install(&["chromium"])?;
    found().context("the package chromium brought no program of that name")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packages_are_told_from_messages() {
        assert!(is_package("go.opentelemetry.io/collector/pdata/internal/json") && is_package("net/http"));
        for message in [
            "",
            "# net/http",
            "./main.go:3:1: syntax error",
            "go: downloading x v1",
        ] {
            assert!(!is_package(message), "{message}");
        }
    }

    #[test]
    fn a_build_that_fails_is_an_error() {
        let build = |script: &str| go_build(Command::new("sh").args(["-c", script]), Instant::now());
        build("echo net/http >&2").unwrap();
        assert!(
            build("echo '# net/http' >&2; exit 3")
                .unwrap_err()
                .to_string()
                .contains("3")
        );
    }
}
