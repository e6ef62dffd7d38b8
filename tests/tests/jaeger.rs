//! What went wrong, as Jaeger shows it: a hang, and a connection that left its path.

use std::{
    collections::BTreeSet,
    fs, thread,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use ringsight_collector::{
    Collector as Line, Options,
    clock::Clock,
    synthetic::{EPOCH_NS, FIRST_PID, Job, Operation},
};
use ringsight_exporters::{Exporter, jsonl::JsonlExporter};
use ringsight_probes::sample::{Carrier, Sample};
use ringsight_records::{Flags, Kind, PathCause, PathChange, Record, State};
use ringsight_testbed::{
    backend::{self, Jaeger},
    demo::collector::Collector,
};
use ringsight_tests::{LIMIT, alone, artifacts, folder, jaeger_binary, job, skip, start};
use serde_json::Value;

const VERDICT: &str = "ccl.watchdog.verdict";
/// The rank that is stopped.
const STOPPED: i64 = 3;

fn array(value: &Value) -> impl Iterator<Item = &Value> {
    value.as_array().into_iter().flatten()
}

/// A tag of a span or process, or a field of a span's event, in Jaeger's JSON.
fn tag<'a>(tags: &'a Value, key: &str) -> Option<&'a Value> {
    Some(&array(tags).find(|tag| tag["key"] == key)?["value"])
}

/// A span as Jaeger gives it, with the tags of its process.
#[derive(Debug)]
struct Shown {
    span: Value,
    process: Value,
}

impl Shown {
    fn tag(&self, key: &str) -> Option<&Value> {
        tag(&self.span["tags"], key)
    }

    /// The fields of its events of this name.
    fn events<'a>(&'a self, name: &'a str) -> impl Iterator<Item = &'a Value> {
        let fields = array(&self.span["logs"]).map(|log| &log["fields"]);
        fields.filter(move |fields| tag(fields, "event").is_some_and(|event| event == name))
    }

    fn is_error(&self) -> bool {
        self.tag("error") == Some(&Value::Bool(true))
    }

    /// Trace and span that its links lead to.
    fn links(&self) -> impl Iterator<Item = (&str, &str)> {
        self.references("FOLLOWS_FROM")
    }

    fn parent(&self) -> Option<(&str, &str)> {
        self.references("CHILD_OF").next()
    }

    fn references<'a>(&'a self, kind: &'a str) -> impl Iterator<Item = (&'a str, &'a str)> {
        array(&self.span["references"])
            .filter(move |reference| reference["refType"] == kind)
            .filter_map(|reference| Some((reference["traceID"].as_str()?, reference["spanID"].as_str()?)))
    }
}

/// The spans of a trace, as far as Jaeger has them.
fn spans(jaeger: &Jaeger, trace: &str) -> Option<Vec<Shown>> {
    let body = backend::get(jaeger.query, &format!("/api/traces/{trace}")).ok()?;
    let body: Value = serde_json::from_str(&body).ok()?;
    let trace = &body["data"][0];
    let shown = |span: &Value| {
        Some(Shown {
            span: span.clone(),
            process: trace["processes"][span["processID"].as_str()?]["tags"].clone(),
        })
    };
    Some(array(&trace["spans"]).filter_map(shown).collect())
}

/// A span by its ids; `None` if Jaeger does not have it.
fn find(jaeger: &Jaeger, trace: &str, span: &str) -> Option<Shown> {
    let mut spans = spans(jaeger, trace)?.into_iter();
    spans.find(|shown| shown.span["spanID"] == span)
}

/// A span like this of a trace, waiting for Jaeger to have taken in what it was sent.
fn wait_for_any(jaeger: &Jaeger, trace: &str, is: impl Fn(&Shown) -> bool) -> Result<Shown> {
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        if let Some(found) = spans(jaeger, trace).into_iter().flatten().find(&is) {
            return Ok(found);
        }
        ensure!(Instant::now() < end, "Jaeger has no such span in trace {trace}");
        thread::sleep(Duration::from_millis(50));
    }
}

/// The same of a span by its ids.
fn wait_for(jaeger: &Jaeger, trace: &str, span: &str) -> Result<Shown> {
    wait_for_any(jaeger, trace, |shown| shown.span["spanID"] == span).with_context(|| format!("span {span}"))
}

/// A verdict, as its log record has it.
struct Told {
    rank: i64,
    /// It is that a rank is stopped.
    stopped: bool,
    trace: String,
    span: String,
}

/// The verdicts in a file of OTLP JSON lines.
fn verdicts(lines: &str) -> Vec<Told> {
    let mut verdicts = Vec::new();
    for line in lines.lines() {
        // The last one may be on its way.
        let Ok(line) = serde_json::from_str::<Value>(line) else {
            continue;
        };
        let records = array(&line["resourceLogs"])
            .flat_map(|resource| array(&resource["scopeLogs"]))
            .flat_map(|scope| array(&scope["logRecords"]));
        for record in records.filter(|record| record["eventName"] == VERDICT) {
            let attribute = |key: &str| {
                let found = array(&record["attributes"]).find(|attribute| attribute["key"] == key);
                found.map(|attribute| &attribute["value"])
            };
            let number = |key: &str| attribute(key)?["intValue"].as_str()?.parse::<i64>().ok();
            let stopped =
                attribute("ccl.watchdog.cause").is_some_and(|cause| cause["stringValue"] == "RANK_STOPPED");
            let text = |key: &str| record[key].as_str().map(str::to_owned);
            if let (Some(rank), Some(trace), Some(span)) =
                (number("ccl.rank"), text("traceId"), text("spanId"))
            {
                verdicts.push(Told {
                    rank,
                    stopped,
                    trace,
                    span,
                });
            }
        }
    }
    verdicts
}

#[test]
fn jaeger_shows_a_hang_as_error_spans_that_lead_to_what_the_stopped_rank_is_in() -> Result<()> {
    let Some(binary) = jaeger_binary() else {
        skip(
            "jaeger_shows_a_hang_as_error_spans_that_lead_to_what_the_stopped_rank_is_in",
            "no Jaeger: `cargo xtask setup --all` builds it where Go is",
        );
        return Ok(());
    };
    let _alone = alone();
    let folder = folder()?;
    let jaeger = Jaeger::start(&binary, backend::free_ports()?, None, true)?;
    let lines = folder.path().join("told.jsonl");
    let mut job = start(&job(4, 60, 10), folder.path())?;
    let options = [
        format!("--otlp=http://{}", jaeger.otlp_grpc),
        "--otlp-protocol=grpc".to_owned(),
        format!("--out={}", lines.display()),
    ];
    let mut collector = Collector::attach(artifacts(), &job.pids(), &options, folder.path())?;
    job.go()?;
    job.wait_step(10, LIMIT)?;
    job.signal(STOPPED as usize, libc::SIGSTOP);
    let end = Instant::now() + LIMIT;
    let told = loop {
        let told = verdicts(&fs::read_to_string(&lines).unwrap_or_default());
        let ranks: BTreeSet<i64> = told.iter().map(|verdict| verdict.rank).collect();
        // Who waits for one that itself waits says that of it.
        if ranks.len() == 3 && told.iter().any(|verdict| verdict.stopped) {
            break told;
        }
        ensure!(Instant::now() < end, "verdicts of {ranks:?} alone");
        thread::sleep(Duration::from_millis(20));
    };
    // While it hangs, the trace has a span that says so, of each rank that waits: the operation's own are yet to come.
    for Told {
        rank, trace, span, ..
    } in told.iter().filter(|verdict| verdict.stopped)
    {
        let shown = wait_for_any(&jaeger, trace, |shown| {
            shown.span["operationName"] == "hang" && shown.tag("ccl.rank") == Some(&Value::from(*rank))
        })?;
        ensure!(shown.is_error(), "rank {rank}: {:#}", shown.span);
        let named = |key: &str, value: Value| shown.tag(key) == Some(&value);
        ensure!(
            named("ccl.watchdog.cause", "RANK_STOPPED".into())
                && named("ccl.watchdog.culprit", STOPPED.into()),
            "{:#}",
            shown.span
        );
        ensure!(shown.links().next().is_some(), "no link: {:#}", shown.span);
        ensure!(find(&jaeger, trace, span).is_none(), "rank {rank} is over");
    }
    // Whoever watches leaves while it hangs.
    let summary = collector.stop(LIMIT)?;
    job.signal(STOPPED as usize, libc::SIGCONT);
    job.wait_done(LIMIT, |_, _| ())?;
    job.exit()?;

    ensure!(summary.unfinished >= 3, "{} operations hung", summary.unfinished);
    for Told {
        rank, trace, span, ..
    } in told.iter().filter(|verdict| verdict.stopped)
    {
        let hung = wait_for(&jaeger, trace, span)?;
        ensure!(hung.is_error(), "rank {rank}: {:#}", hung.span);
        let verdict = hung
            .events(VERDICT)
            .find(|fields| tag(fields, "ccl.watchdog.cause").is_some_and(|cause| cause == "RANK_STOPPED"));
        let verdict = verdict.with_context(|| format!("no verdict: {:#}", hung.span))?;
        ensure!(
            tag(verdict, "ccl.watchdog.hang") == Some(&Value::Bool(true)),
            "{verdict:#}"
        );
        let mut led = Vec::new();
        for (trace, span) in hung.links() {
            let target = wait_for(&jaeger, trace, span)
                .with_context(|| format!("a link of {:#} leads nowhere", hung.span))?;
            led.push(target);
        }
        let stopped = led
            .iter()
            .find(|target| tag(&target.process, "ccl.job.rank") == Some(&Value::from(STOPPED)));
        let stopped =
            stopped.with_context(|| format!("no link leads to the rank that is stopped: {:#}", hung.span))?;
        println!(
            "rank {rank}: {} waits for {}",
            hung.span["operationName"], stopped.span["operationName"]
        );
    }
    Ok(())
}

/// What both its ports are of.
const DEVICE: &str = "mlx5_3";

/// The OTLP JSON lines of a job whose rank 0 had to leave the path to rank 1 and came back to it.
fn lines_of_a_failover(file: &std::path::Path) -> Result<()> {
    let shape = Job::default();
    let mut samples = shape.samples(0..4, &[1, 2, 3].map(Operation::all_reduce));
    // After the process that says it.
    let said = samples
        .iter()
        .position(|sample| matches!(sample, Sample::Process(process) if process.pid == FIRST_PID))
        .context("no process")?
        + 1;
    for index in [1, 0] {
        let port = Sample::Port {
            pid: FIRST_PID,
            index,
            device: DEVICE.to_owned(),
            number: 1 + index,
            gid: None,
        };
        samples.insert(said, port);
    }
    let change = |cause, from, to| PathChange {
        cause,
        status: if cause == Some(PathCause::Completion) {
            12
        } else {
            0
        },
        from,
        to,
        port: Some(to),
        number: 0x11 * (1 + u32::from(to)),
    };
    let broke = Some(PathCause::Completion);
    let moments = [
        (2_050, 1, State::START, change(broke, 0, 0), 0),
        (2_060, 1, State::PATH_SWITCHED, change(broke, 0, 1), 65_536),
        (2_070, 1, State::PATH_RECOVERED, change(None, 1, 1), 0),
        (
            3_010,
            2,
            State::PATH_SWITCHED,
            change(Some(PathCause::Failback), 1, 0),
            0,
        ),
        (3_020, 2, State::STOP, change(None, 0, 0), 0),
    ];
    for (microseconds, seq, state, change, bytes) in moments {
        let record = Record {
            comm: shape.comm,
            op: 1,
            seq,
            rank: 0,
            peer: 1,
            channel: 1,
            bytes,
            value: change.to_value(),
            ..Record::new(Kind::Failover, state, EPOCH_NS + microseconds * 1000)
        };
        samples.push(Sample::Record {
            pid: FIRST_PID,
            tid: 1,
            carrier: Carrier::Probe,
            record: record.with_flags(Flags::SEND),
        });
    }
    // Backends take what is of today.
    let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH)?;
    let clock = Clock::fixed(i64::try_from(now.as_nanos())?);
    let mut line = Line::new(Options::default(), clock, 0);
    line.ingest(&mut samples);
    line.finish(EPOCH_NS + 9_000_000_000);
    let mut exporter = JsonlExporter::create(file).map_err(anyhow::Error::msg)?;
    exporter.export(&line.take_batch());
    exporter
        .shutdown(Duration::from_secs(1))
        .map_err(anyhow::Error::msg)
}

#[test]
fn jaeger_shows_a_failover_from_a_file_with_the_operations_that_waited() -> Result<()> {
    let Some(binary) = jaeger_binary() else {
        skip(
            "jaeger_shows_a_failover_from_a_file_with_the_operations_that_waited",
            "no Jaeger: `cargo xtask setup --all` builds it where Go is",
        );
        return Ok(());
    };
    let folder = folder()?;
    let file = folder.path().join("failover.jsonl");
    lines_of_a_failover(&file)?;
    let jaeger = Jaeger::start(&binary, backend::free_ports()?, None, true)?;
    let mut failovers = Vec::new();
    for line in fs::read_to_string(&file)?.lines() {
        let parsed: Value = serde_json::from_str(line)?;
        let spans = array(&parsed["resourceSpans"])
            .flat_map(|resource| array(&resource["scopeSpans"]))
            .flat_map(|scope| array(&scope["spans"]));
        let ids = |span: &Value| {
            Some((
                span["traceId"].as_str()?.to_owned(),
                span["spanId"].as_str()?.to_owned(),
            ))
        };
        failovers.extend(spans.filter(|span| span["name"] == "failover").filter_map(ids));
        // Jaeger takes traces alone.
        if !parsed["resourceSpans"].is_null() {
            backend::post(jaeger.otlp_http, "/v1/traces", line)?;
        }
    }
    let [(trace, span)] = &failovers[..] else {
        anyhow::bail!("{failovers:?}")
    };
    let shown = wait_for(&jaeger, trace, span)?;
    let (trace, span) = shown.parent().context("no parent")?;
    let root = wait_for(&jaeger, trace, span)?;
    ensure!(root.span["operationName"] == "port failover", "{:#}", root.span);
    for (key, value) in [
        ("rdma.device.name", Value::from(DEVICE)),
        ("rdma.port.number", Value::from(1)),
        ("ccl.failover.connections", Value::from(1)),
        ("ccl.failover.replayed.size", Value::from(65_536)),
    ] {
        ensure!(root.tag(key) == Some(&value), "{key}: {:#}", root.span);
    }
    for (key, value) in [
        ("ccl.failover.cause", Value::from("completion_error")),
        ("ccl.failover.switches", Value::from(2)),
        ("ccl.failover.replayed.size", Value::from(65_536)),
        ("ccl.failover.recovery.duration", Value::from(20e-6)),
        ("ccl.failover.failed_back", Value::from(true)),
        ("ccl.rank", Value::from(0)),
        ("ccl.peer.rank", Value::from(1)),
        ("ccl.channel.id", Value::from(1)),
    ] {
        ensure!(shown.tag(key) == Some(&value), "{key}: {:#}", shown.span);
    }
    let names: Vec<&Value> = array(&shown.span["logs"])
        .filter_map(|log| tag(&log["fields"], "event"))
        .collect();
    ensure!(
        names
            == [
                "path_broken",
                "path_switched",
                "path_recovered",
                "path_switched",
                "failed_back"
            ],
        "{names:?}"
    );
    let switched = shown.events("path_switched").next().context("no switch")?;
    ensure!(
        tag(switched, "rdma.wc.status") == Some(&Value::from(12))
            && tag(switched, "rdma.qp.number") == Some(&Value::from(0x22))
            && tag(switched, "rdma.device.name") == Some(&Value::from(DEVICE))
            && tag(switched, "rdma.port.number") == Some(&Value::from(2)),
        "{switched:#}"
    );
    let mut delayed = Vec::new();
    for (trace, span) in shown.links() {
        delayed.push(wait_for(&jaeger, trace, span)?);
    }
    let waited = |target: &Shown| {
        target.span["operationName"] == "all_reduce rank" && target.tag("ccl.rank") == Some(&Value::from(0))
    };
    ensure!(delayed.len() == 1 && delayed.iter().all(waited), "{delayed:#?}");
    Ok(())
}
