//! The folder and the pipes that the collector writes to, which are the target's, and names in what it writes.

use std::{
    ffi::OsStr,
    fs::{self, File, OpenOptions},
    io::{BufRead as _, BufReader, Read as _, Write as _},
    os::{
        fd::AsRawFd as _,
        unix::{
            ffi::OsStrExt as _,
            fs::{OpenOptionsExt as _, chown, lchown, symlink},
        },
    },
    path::{Path, PathBuf},
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use ringsight_testbed::process::{self, Guarded};

use crate::{
    Collected, Target,
    target::{NOBODY, ringsight},
};

/// How long an end may take, beyond the time that outputs are given: 200 ms are promised, the rest is for a busy machine.
const SLACK: Duration = Duration::from_millis(1500);

/// A link of the target's in its own folder.
fn link(target: &Target, name: &str, to: &Path) -> Result<PathBuf> {
    let link = target.folder().join("own").join(name);
    symlink(to, &link)?;
    lchown(&link, Some(NOBODY), Some(NOBODY))?;
    Ok(link)
}

/// A pipe of the target's in its own folder.
fn pipe(target: &Target, name: &str) -> Result<PathBuf> {
    let pipe = target.folder().join("own").join(name);
    process::run(Command::new("mkfifo").arg(&pipe))?;
    chown(&pipe, Some(NOBODY), Some(NOBODY))?;
    Ok(pipe)
}

pub(crate) fn option(name: &str, path: &Path) -> String {
    format!("--{name}={}", path.display())
}

fn attach(target: &Target, options: &[String]) -> Result<Collected> {
    let pid = target.pid().to_string();
    let common = ["attach", &pid, "--no-ebpf", "--no-network"];
    let options = options.iter().map(String::as_str);
    Collected::of(
        target.folder(),
        &common.into_iter().chain(options).collect::<Vec<_>>(),
    )
}

/// H3: names of temporary files had the process id in them.
#[test]
fn links_at_names_that_could_be_guessed_lead_nowhere() -> Result<()> {
    let Some(target) = Target::start("links_at_names_that_could_be_guessed_lead_nowhere", "honest")? else {
        return Ok(());
    };
    let own = target.folder().join("own");
    let precious = target.folder().join("precious");
    fs::write(&precious, "precious")?;
    let program = "echo $$; read go; exec \"$0\" \"$@\"";
    let mut command = Command::new("sh");
    command
        .args(["-c", program])
        .arg(ringsight())
        .args([
            "attach",
            &target.pid().to_string(),
            "--no-ebpf",
            "--no-network",
            "--duration=0.5",
        ])
        .args([
            option("out", &own.join("p.html")),
            option("summary", &own.join("s.json")),
            option("ready-file", &own.join("r.json")),
        ])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped());
    let mut collector = Guarded::start("ringsight", &mut command, libc::SIGKILL)?;
    let child = collector.child();
    let mut pid = String::new();
    BufReader::new(child.stdout.take().context("output")?).read_line(&mut pid)?;
    let pid = pid.trim();
    for name in [
        format!(".p.html.{pid}.part"),
        format!("s.json.{pid}.tmp"),
        format!("r.json.{pid}.tmp"),
    ] {
        link(&target, &name, &precious)?;
    }
    child.stdin.take().context("input")?.write_all(b"go\n")?;
    let status = collector.wait(Duration::from_secs(60))?;
    ensure!(status.success(), "{status}");
    ensure!(
        fs::read_to_string(&precious)? == "precious",
        "root wrote the file"
    );
    for name in ["p.html", "s.json", "r.json"] {
        ensure!(fs::symlink_metadata(own.join(name))?.is_file(), "{name}");
    }
    Ok(())
}

/// H3: what is at the name of an output.
#[test]
fn an_output_that_is_a_link_of_the_targets_is_refused() -> Result<()> {
    let Some(target) = Target::start("an_output_that_is_a_link_of_the_targets_is_refused", "honest")? else {
        return Ok(());
    };
    let (precious, new) = (target.folder().join("precious"), target.folder().join("new"));
    fs::write(&precious, "precious")?;
    let mut options = Vec::new();
    for (name, to) in [("dangling", &new), ("leading", &precious)] {
        for (option_name, extension) in [
            ("out", "jsonl"),
            ("out", "json"),
            ("out", "html"),
            ("summary", "txt"),
            ("ready-file", "ready"),
        ] {
            options.push(option(
                option_name,
                &link(&target, &format!("{name}.{extension}"), to)?,
            ));
        }
    }
    // And a folder on the way.
    let folder = link(&target, "folder", target.folder())?;
    options.push(option("summary", &folder.join("new")));
    for option in options {
        let refused = attach(
            &target,
            &["--duration=0.2".to_owned(), "--force".to_owned(), option.clone()],
        )?;
        ensure!(refused.code == Some(1), "{option}: {refused:?}");
        ensure!(
            refused.errors.contains("is a symbolic link that user 65534 made")
                && refused.errors.contains("remove the link"),
            "{option}: {refused:?}"
        );
    }
    for prefix in ["dump", "dump-json"] {
        let at = target.folder().join("own").join(prefix);
        link(&target, &format!("{prefix}0"), &precious)?;
        let arguments = ["snapshot", &target.pid().to_string(), &option(prefix, &at)];
        let refused = Collected::of(target.folder(), &arguments)?;
        ensure!(refused.errors.contains("symbolic link"), "{prefix}: {refused:?}");
    }
    ensure!(
        fs::read_to_string(&precious)? == "precious" && !new.exists(),
        "root wrote the file"
    );
    Ok(())
}

/// H14.
#[test]
fn a_pipe_without_a_reader_is_refused_at_once() -> Result<()> {
    let Some(target) = Target::start("a_pipe_without_a_reader_is_refused_at_once", "honest")? else {
        return Ok(());
    };
    for (name, extension) in [
        ("out", "jsonl"),
        ("out", "json"),
        ("out", "html"),
        ("summary", "json"),
        ("ready-file", "json"),
    ] {
        let pipe = pipe(&target, &format!("{name}.{extension}"))?;
        let refused = attach(&target, &[option(name, &pipe), "--duration=0.2".to_owned()])?;
        ensure!(refused.code == Some(1), "{name}: {refused:?}");
        ensure!(refused.errors.contains("no process reads"), "{name}: {refused:?}");
        ensure!(refused.elapsed < Duration::from_secs(10), "{name}: {refused:?}");
    }
    Ok(())
}

/// X7: a pipe is opened once. Its reader, like `cat`, is gone when the last writer is.
#[test]
fn a_pipe_that_is_read_gets_everything() -> Result<()> {
    let Some(target) = Target::start("a_pipe_that_is_read_gets_everything", "honest")? else {
        return Ok(());
    };
    let pipe = pipe(&target, "g.jsonl")?;
    let reader = OpenOptions::new()
        .read(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(&pipe)?;
    let reading = std::thread::spawn(move || read_to_end(reader));
    let options = [option("out", &pipe), "--duration=1".to_owned()];
    let attached = attach(&target, &options)?;
    ensure!(attached.code == Some(0), "{attached:?}");
    ensure!(attached.elapsed < Duration::from_secs(20), "{attached:?}");
    let text = reading.join().expect("no panic")?;
    ensure!(text.lines().count() >= 1 && text.ends_with('\n'), "{text}");
    for line in text.lines() {
        serde_json::from_str::<serde_json::Value>(line)?;
    }
    Ok(())
}

/// Reads a pipe until its last writer closes it; a writer that has not come yet is waited for.
fn read_to_end(mut pipe: File) -> Result<String> {
    let mut bytes = Vec::new();
    loop {
        let mut ready = libc::pollfd {
            fd: pipe.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        // SAFETY: one entry, which lives across the call.
        let count = unsafe { libc::poll(&raw mut ready, 1, 60_000) };
        ensure!(count == 1, "nothing came");
        if ready.revents & libc::POLLIN == 0 {
            return Ok(String::from_utf8(bytes)?);
        }
        let mut block = [0; 4096];
        let length = pipe.read(&mut block)?;
        bytes.extend_from_slice(&block[..length]);
    }
}

/// A pipe that has a reader, who reads nothing, and no room.
pub(crate) fn stuck_pipe(target: &Target, name: &str) -> Result<(PathBuf, File)> {
    let pipe = pipe(target, name)?;
    let mut both = OpenOptions::new()
        .read(true)
        .write(true)
        .custom_flags(libc::O_NONBLOCK)
        .open(&pipe)?;
    while both.write(&[b'x'; 4096]).is_ok() {}
    Ok((pipe, both))
}

/// X7, and the signal: the reader loop goes on, and the end comes in time.
#[test]
fn outputs_that_take_nothing_hold_up_no_end() -> Result<()> {
    let Some(target) = Target::start("outputs_that_take_nothing_hold_up_no_end", "honest")? else {
        return Ok(());
    };
    let (stuck, _reader) = stuck_pipe(&target, "stuck.jsonl")?;
    let (stuck_too, _reader_too) = stuck_pipe(&target, "stuck-too.jsonl")?;
    let (stuck_summary, _summary_reader) = stuck_pipe(&target, "stuck-summary")?;
    let good = target.folder().join("good.jsonl");
    let options = [
        option("out", &stuck),
        option("out", &stuck_too),
        option("out", &good),
        option("summary", &stuck_summary),
        "--flush-timeout=1".to_owned(),
    ];
    let all = |rest: &[String]| [&options[..], rest].concat();
    let attached = attach(&target, &all(&["--duration=1".to_owned()]))?;
    ensure!(attached.code == Some(4), "{attached:?}");
    ensure!(attached.elapsed < Duration::from_secs(2) + SLACK, "{attached:?}");
    for words in [
        "stuck.jsonl",
        "stuck-too.jsonl",
        "metric points were dropped (shutdown)",
        "stuck-summary",
    ] {
        ensure!(attached.errors.contains(words), "{words}: {attached:?}");
    }
    // The others lost nothing.
    ensure!(
        fs::read_to_string(&good)?.lines().count() >= 1,
        "nothing in the good file"
    );
    let summary: serde_json::Value =
        serde_json::from_str(&attached.output).context("the summary on standard output")?;
    ensure!(summary["version"] == 1, "{summary}");

    let ready = target.folder().join("ready");
    let mut command = Command::new(ringsight());
    command
        .args(["attach", &target.pid().to_string(), "--no-ebpf", "--no-network"])
        .args(all(&[option("ready-file", &ready)]))
        .stdout(Stdio::null())
        .stderr(Stdio::null());
    let mut collector = Guarded::start("ringsight", &mut command, libc::SIGKILL)?;
    collector.wait_until(Duration::from_secs(20), || ready.exists())?;
    let asked = Instant::now();
    collector.signal(libc::SIGTERM);
    collector.wait(Duration::from_secs(20))?;
    ensure!(
        asked.elapsed() < Duration::from_secs(1) + SLACK,
        "{:?}",
        asked.elapsed()
    );
    Ok(())
}

/// Standard error is an output, too.
#[test]
fn a_full_standard_error_holds_up_nothing() -> Result<()> {
    let Some(target) = Target::start("a_full_standard_error_holds_up_nothing", "honest")? else {
        return Ok(());
    };
    let (stuck, mut reader) = stuck_pipe(&target, "errors")?;
    let (ready, summary) = (target.folder().join("ready"), target.folder().join("summary"));
    let start = || {
        let mut command = Command::new(ringsight());
        command
            .args(["attach", &target.pid().to_string(), "--no-ebpf", "--no-network"])
            .args([option("ready-file", &ready), option("summary", &summary)])
            .stdout(Stdio::null())
            .stderr(OpenOptions::new().write(true).open(&stuck)?);
        let mut collector = Guarded::start("ringsight", &mut command, libc::SIGKILL)?;
        collector.wait_until(Duration::from_secs(20), || ready.exists())?;
        anyhow::Ok(collector)
    };
    let mut collector = start()?;
    let asked = Instant::now();
    collector.signal(libc::SIGTERM);
    let status = collector.wait(Duration::from_secs(20))?;
    ensure!(status.success(), "{status}");
    ensure!(asked.elapsed() < SLACK, "{:?}", asked.elapsed());
    ensure!(summary.is_file(), "no summary");

    // A reader that comes back gets what was kept for it.
    fs::remove_file(&ready)?;
    let mut collector = start()?;
    collector.signal(libc::SIGTERM);
    let mut text = Vec::new();
    let mut block = [0; 1 << 14];
    collector.wait_until(Duration::from_secs(20), || {
        while let Ok(length @ 1..) = reader.read(&mut block) {
            text.extend_from_slice(&block[..length]);
        }
        String::from_utf8_lossy(&text).contains("0 operations in ")
    })?;
    collector.wait(Duration::from_secs(20))?;
    Ok(())
}

/// X8.
#[test]
fn two_outputs_are_two_files() -> Result<()> {
    let Some(target) = Target::start("two_outputs_are_two_files", "honest")? else {
        return Ok(());
    };
    let folder = target.folder();
    fs::create_dir(folder.join("below"))?;
    let (x, also_x) = (folder.join("x.json"), folder.join("below/../x.json"));
    for options in [
        [option("out", &x), option("summary", &x)],
        [option("out", &x), option("out", &also_x)],
        [option("summary", &x), option("ready-file", &also_x)],
    ] {
        let refused = attach(&target, &options)?;
        ensure!(refused.code == Some(1), "{options:?}: {refused:?}");
        ensure!(
            refused.errors.contains("are one file: name two"),
            "{options:?}: {refused:?}"
        );
        ensure!(!x.exists(), "{options:?}");
    }
    let dumps = [
        option("dump", &folder.join("rank_")),
        option("dump-json", &folder.join("below/../rank_")),
    ];
    let refused = Collected::of(
        folder,
        &["snapshot", &target.pid().to_string(), &dumps[0], &dumps[1]],
    )?;
    ensure!(refused.code == Some(1), "{refused:?}");
    ensure!(refused.errors.contains("are one file"), "{refused:?}");
    ensure!(!folder.join("rank_0").exists(), "a dump was written");
    Ok(())
}

/// H13, X9: every command on a target whose names a terminal would obey.
#[test]
fn names_control_no_terminal() -> Result<()> {
    let library = OsStr::from_bytes(b"lib\x1b[31m\n\xe2\x80\xae\xff/libnccl.so.2");
    let test = "names_control_no_terminal";
    let Some(target) = Target::start_with(test, "names", Path::new(library))? else {
        return Ok(());
    };
    let pid = &*target.pid().to_string();
    let missing = "4000000";
    let files: Vec<String> = [
        ("out", "t.jsonl"),
        ("out", "t.html"),
        ("out", "t.json"),
        ("summary", "s"),
    ]
    .map(|(name, file)| option(name, &target.folder().join(file)))
    .into();
    let files: Vec<&str> = files.iter().map(String::as_str).collect();
    let attach = |more: &[&'static str]| {
        let common = ["attach", pid, "--no-network", "--force", "--duration=0.5"];
        [&common[..], &files, more].concat()
    };
    let dump = option("dump-json", &target.folder().join("dump"));
    let obeyed = |c: char| {
        c != '\n'
            && (c.is_control()
                || matches!(c, '\u{200e}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2066}'..='\u{2069}'))
    };
    let commands = [
        vec!["list", pid],
        vec!["list", "--json", pid],
        vec!["snapshot", pid],
        vec!["snapshot", "--json", pid],
        vec!["snapshot", pid, missing],
        vec!["snapshot", pid, &dump],
        vec!["explain", pid],
        vec!["explain", "--json", pid],
        attach(&[]),
        attach(&["--no-ebpf"]),
    ];
    for arguments in commands {
        for (variable, value) in [
            ("RINGSIGHT_LOG_FORMAT", "text"),
            ("RINGSIGHT_LOG_FORMAT", "json"),
            ("RINGSIGHT_LOG", "trace"),
        ] {
            let output = Command::new(ringsight())
                .args(&arguments)
                .env(variable, value)
                .stdin(Stdio::null())
                .output()?;
            // The names are there, and shown.
            let all = String::from_utf8_lossy(&[&*output.stdout, &*output.stderr].concat()).into_owned();
            ensure!(
                all.contains("\\u{1b}") || all.contains("\\u001b"),
                "{arguments:?}, {value}: {all}"
            );
            for (stream, bytes) in [("output", &output.stdout), ("errors", &output.stderr)] {
                let text = String::from_utf8(bytes.clone())
                    .with_context(|| format!("{arguments:?}, {value}, {stream}"))?;
                ensure!(
                    !text.contains(obeyed),
                    "{arguments:?}, {value}, {stream}: {text:?}"
                );
                // A name adds no line.
                ensure!(
                    !text.lines().any(|line| line.trim_start().starts_with("root#")),
                    "{arguments:?}, {value}, {stream}: {text:?}"
                );
            }
        }
    }
    // Whoever reads a file may do so in a terminal.
    for name in ["t.jsonl", "t.html", "t.json", "s", "dump0"] {
        let text = fs::read_to_string(target.folder().join(name)).context(name)?;
        // Dumps name groups by their ids.
        ensure!(name == "dump0" || text.contains("\\u009b"), "{name}: {text}");
        let at = text.find(obeyed);
        let near: String = at.map_or_else(String::new, |at| text[at..].chars().take(80).collect());
        ensure!(at.is_none(), "{name}: {near:?}");
    }
    Ok(())
}
