//! `ringsight attach`: the reader loop.

use std::{
    collections::VecDeque,
    io::{self, IsTerminal},
    path::PathBuf,
    sync::Arc,
    thread::{self, ScopedJoinHandle},
    time::{Duration, Instant},
};

use clap::{Args, ValueEnum};
use ringsight_collector::{
    Collector, Options,
    clock::{self, Clock},
    identity::Scope,
    limits::Limits,
    summary::{ExporterRow, Summary},
};
use ringsight_exporters::Exporter;
use ringsight_output::{Destination, JsonWriter};
use ringsight_probes::{Attached, NetworkScope, Sample, Session, Source, UseEbpf};
use serde_json::json;
use tracing::{error, info, warn};

use super::{
    Exit, findings, launcher, log, outputs, print,
    report::{cpu_seconds, describe, describe_network, report, report_exporters, summarise},
    signals::Ending,
};

/// How often the carriers are read: what their buffers are sized for.
const POLL: Duration = Duration::from_millis(1);
/// How often exporters are given what there is.
const EXPORT: Duration = Duration::from_millis(200);
/// How many spans and log records are given to exporters before that.
const EXPORT_ITEMS: usize = 16_384;
/// Samples that are taken in before time and signals are looked at again.
const SLICE: usize = 1024;
/// How long the end of a watch may take, from taking what is left to the last span. What is left then is counted, not read.
const LET_GO: Duration = Duration::from_secs(2);
/// Problems that are told in one second: a target can make as many as it likes.
const PROBLEMS: u32 = 10;
/// How often metrics are read.
const METRICS: Duration = Duration::from_secs(10);
/// How often the status line is drawn.
const STATUS: Duration = Duration::from_millis(500);
/// Arguments of `ringsight attach`.
#[derive(Debug, Args)]
pub(crate) struct AttachArguments {
    /// Processes to watch
    #[arg(required = true, value_name = "PID")]
    pids: Vec<u32>,
    /// Send traces, metrics and logs to an OTLP endpoint, e.g. http://localhost:4317; without it the OTEL_EXPORTER_OTLP_* environment decides
    #[arg(long, value_name = "URL")]
    otlp: Option<String>,
    /// Protocol of the OTLP endpoint; by default OTEL_EXPORTER_OTLP_PROTOCOL, else gRPC
    #[arg(long, value_name = "PROTOCOL")]
    otlp_protocol: Option<outputs::Protocol>,
    /// Write a file, in the format that its extension names: .jsonl (OTLP JSON lines), .json (Chrome trace, for
    /// Perfetto), .html (one page); may be repeated
    #[arg(long = "out", value_name = "FILE", value_parser = outputs::parse_output)]
    outputs: Vec<PathBuf>,
    /// End after this many seconds; without it, when the processes end or a signal comes
    #[arg(long, value_name = "SECONDS", value_parser = parse_duration)]
    duration: Option<Duration>,
    /// Write what the run came to as JSON
    #[arg(long, value_name = "FILE")]
    summary: Option<PathBuf>,
    /// Create this file when every process has been attached to
    #[arg(long, value_name = "FILE")]
    ready_file: Option<PathBuf>,
    /// Replace .json and .html files that exist; a .jsonl file is begun anew instead of continued
    #[arg(long)]
    force: bool,
    /// At the end, go on trying to deliver what is queued for this long; what is left is counted as dropped
    #[arg(long, value_name = "SECONDS", default_value = "10", value_parser = parse_seconds)]
    flush_timeout: Duration,
    /// Name a rank as late from this lag on
    #[arg(long, value_name = "MILLISECONDS", default_value = "15", value_parser = parse_milliseconds)]
    lag_threshold: Duration,
    /// Read everything through the shared ring; needs no rights but those to look into the process
    #[arg(long)]
    no_ebpf: bool,
    /// Do not probe the kernel's RDMA stack
    #[arg(long)]
    no_network: bool,
    /// Service name of the spans; by default OTEL_SERVICE_NAME of the watched process, else of this one, else the job or executable
    #[arg(long, value_name = "NAME")]
    service: Option<String>,
    /// Text that goes into every trace id, the same for all collectors of a job
    #[arg(long, value_name = "TEXT", value_parser = parse_scope, conflicts_with = "scope_env")]
    scope: Option<String>,
    /// Take the scope from this environment variable of the first process, e.g. SLURM_JOB_ID
    #[arg(long, value_name = "NAME")]
    scope_env: Option<String>,
    /// Whose processes may be ranks of one communicator: one user's, or one user's in one control group
    #[arg(long, value_name = "WHAT", value_enum, default_value_t)]
    apart: Apart,
    /// Print errors only
    #[arg(long, short)]
    pub(super) quiet: bool,
}

/// What sets processes apart.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
enum Apart {
    /// Their users
    #[default]
    User,
    /// Their users and control groups
    Cgroup,
}

fn parse_number(text: &str, unit: f64) -> Result<Duration, String> {
    let number: f64 = text.parse().map_err(|_| "not a number".to_owned())?;
    Duration::try_from_secs_f64(number * unit).map_err(|error| error.to_string())
}

fn parse_seconds(text: &str) -> Result<Duration, String> {
    parse_number(text, 1.0)
}

/// How long to watch: no time at all would show nothing, and is more likely meant as "without end".
pub(super) fn parse_duration(text: &str) -> Result<Duration, String> {
    match parse_seconds(text)? {
        Duration::ZERO => Err("must be above 0; leave it out to watch until the processes end".to_owned()),
        duration => Ok(duration),
    }
}

fn parse_milliseconds(text: &str) -> Result<Duration, String> {
    parse_number(text, 1e-3)
}

fn parse_scope(text: &str) -> Result<String, String> {
    Scope::new(text).map(|_| text.to_owned())
}

/// Exporters and what the user is told of them.
struct Outputs {
    files: outputs::Files,
    exporters: Vec<Box<dyn Exporter>>,
    /// How each was doing when it was last looked at.
    health: Vec<outputs::Health>,
    /// A status line is drawn.
    status: bool,
}

impl Outputs {
    /// The endpoint, if one is named, and where the files are to be; no file is touched yet.
    fn connect(arguments: &AttachArguments) -> Result<Self, String> {
        let files = outputs::Files::find(
            &arguments.outputs,
            arguments.summary.as_deref(),
            arguments.ready_file.as_deref(),
            arguments.force,
        )?;
        let otlp = outputs::otlp(arguments.otlp.as_deref(), arguments.otlp_protocol)?;
        Ok(Self {
            files,
            health: otlp.iter().map(|_| outputs::Health::default()).collect(),
            exporters: otlp.into_iter().collect(),
            status: !arguments.quiet && io::stderr().is_terminal(),
        })
    }

    fn open_files(&mut self, arguments: &AttachArguments) -> Result<(), String> {
        self.exporters.extend(self.files.open(arguments.force)?);
        self.health
            .resize_with(self.exporters.len(), outputs::Health::default);
        Ok(())
    }

    /// Says when deliveries begin to fail and when they work again, and what a backend does not take: a long observation must
    /// not be silent about it.
    fn tell_health(&mut self) {
        let now = Instant::now();
        for (exporter, health) in self.exporters.iter().zip(&mut self.health) {
            let stats = exporter.stats();
            let refusals = health.refusals(&stats);
            for news in refusals.into_iter().chain(health.trouble(&stats, now)) {
                warn!("{}: {news}", exporter.target());
            }
        }
    }

    fn export(&mut self, collector: &mut Collector) {
        self.tell_health();
        let batch = collector.take_batch();
        if batch.is_empty() {
            return;
        }
        if !batch.findings.is_empty() {
            findings::print_news(&batch.findings, self.status);
        }
        let batch = Arc::new(batch);
        for exporter in &mut self.exporters {
            exporter.export_shared(&batch);
        }
    }

    fn stats(&self) -> Vec<(String, ringsight_exporters::ExportStats)> {
        self.exporters
            .iter()
            .map(|exporter| (exporter.target(), exporter.stats()))
            .collect()
    }

    /// Delivers what is queued, to all at once: one that takes nothing costs the others no time. Says what was not delivered. The first
    /// signal cuts it short; a signal after one that ended the watch ends the process.
    fn shutdown(&mut self, timeout: Duration, ending: &Ending, by_signal: bool) -> Vec<ExporterRow> {
        let is_cut = || !by_signal && ending.asked();
        let errors: Vec<Option<String>> = thread::scope(|scope| {
            let exporters = self.exporters.iter_mut();
            let closing: Vec<_> = exporters
                .map(|exporter| {
                    thread::Builder::new()
                        .spawn_scoped(scope, || exporter.shutdown_until(timeout, &is_cut).err())
                })
                .collect();
            let result = |closing: io::Result<ScopedJoinHandle<'_, Option<String>>>| match closing {
                Ok(closing) => closing
                    .join()
                    .unwrap_or_else(|_| Some("it failed while it was closed".to_owned())),
                Err(error) => Some(format!("no thread to close it: {error}")),
            };
            closing.into_iter().map(result).collect()
        });
        let mut rows = Vec::new();
        for ((exporter, health), error) in self.exporters.iter().zip(&mut self.health).zip(errors) {
            let (target, stats) = (exporter.target(), exporter.stats());
            for news in health.refusals(&stats) {
                warn!("{target}: {news}");
            }
            rows.push(ExporterRow::new(target, &stats, error));
        }
        rows
    }
}

/// What happened until the reader loop ended.
pub(super) struct Watched {
    /// Processes that are being watched.
    pub(super) attached: Vec<Attached>,
    failed: usize,
    /// Processes that were no ranks when they were attached to, and what to do instead.
    launchers: Vec<String>,
    /// How long attaching to all of them took, milliseconds.
    pub(super) attach_ms: f64,
}

/// Runs the command.
pub(crate) fn run(arguments: &AttachArguments) -> Exit {
    let ending = match Ending::install() {
        Ok(ending) => ending,
        Err(problem) => {
            error!("cannot handle signals: {problem}");
            return Exit::Error;
        }
    };
    let exit = try_run(arguments, &ending).unwrap_or_else(|(exit, error)| {
        error!("{error}");
        exit
    });
    log::flush(|| ending.asked());
    exit
}

fn try_run(arguments: &AttachArguments, ending: &Ending) -> Result<Exit, (Exit, String)> {
    let error = |error: String| (Exit::Error, error);
    // Files are looked at first and opened last: a process that cannot be watched costs no file its content.
    let mut outputs = Outputs::connect(arguments).map_err(error)?;
    let use_ebpf = if arguments.no_ebpf {
        UseEbpf::Never
    } else {
        UseEbpf::Auto
    };
    let options = ringsight_probes::Options {
        use_ebpf,
        network: if arguments.no_network {
            NetworkScope::Never
        } else {
            NetworkScope::Watched
        },
        variable: arguments.scope_env.clone(),
        ..Default::default()
    };
    let mut session = Session::new(options).map_err(|e| (Exit::NothingAttached, e.to_string()))?;

    let watched = attach(arguments, &mut session, ending);
    if watched.attached.is_empty() {
        return Err((Exit::NothingAttached, "nothing could be attached".into()));
    }
    let scope = scope(arguments, &watched.attached[0]).map_err(|e| (Exit::Usage, e))?;
    outputs.open_files(arguments).map_err(error)?;
    let mut collector = Collector::new(
        Options {
            scope,
            service: arguments.service.clone(),
            default_service: std::env::var("OTEL_SERVICE_NAME")
                .ok()
                .filter(|name| !name.is_empty()),
            lag_threshold_ns: u64::try_from(arguments.lag_threshold.as_nanos()).unwrap_or(u64::MAX),
            limits: Limits::default(),
            keep_operations: if arguments.summary.is_some() {
                Limits::LISTED_OPERATIONS
            } else {
                0
            },
            by_cgroup: arguments.apart == Apart::Cgroup,
        },
        Clock::system(),
        clock::monotonic_ns(),
    );
    let begun = Instant::now();
    let mut reader = Reader {
        session: &mut session,
        collector: &mut collector,
        outputs: &mut outputs,
        samples: Vec::new(),
        more: true,
        problems: Problems::default(),
    };
    if let (Some(destination), 0) = (reader.outputs.files.ready.take(), watched.failed) {
        let pids: Vec<u32> = watched
            .attached
            .iter()
            .map(|attached| attached.process.pid)
            .collect();
        let text = json!({ "version": 1, "pids": pids, "attach_ms": watched.attach_ms }).to_string();
        outputs::write_whole(destination, outputs::PATIENCE, move |file| {
            file.write_all(text.as_bytes())
        })
        .map_err(error)?;
    }
    reader.watch(ending, arguments.duration, begun);
    // A signal from here on is not the one that ended the watch: it cuts the delivery short.
    let by_signal = ending.asked();
    let letting_go = reader.let_go();
    // What the run came to is said before the kernel removes the probes and outputs take what is queued: both take their time.
    let mut summary = summarise(&session, &mut collector, &watched, begun.elapsed());
    if !arguments.quiet {
        log::say(&report(&summary, &collector));
    }
    findings::print_open(&collector.findings());
    let detached = letting_go + session.detach_all();
    summary.detach_ms = detached.as_secs_f64() * 1e3;
    info!(summary.detach_ms, "detached in {:.1} ms", summary.detach_ms);
    let flushing = Instant::now();
    summary.exporters = outputs.shutdown(arguments.flush_timeout, ending, by_signal);
    if !arguments.quiet {
        log::say(&report_exporters(&summary.exporters));
    }
    let summary = Arc::new(summary);
    let mut exit = if watched.failed == 0 {
        Exit::Success
    } else {
        Exit::Error
    };
    let received: u64 = summary.records.values().map(|count| count.received).sum();
    if received == 0 && !watched.launchers.is_empty() {
        for launcher in &watched.launchers {
            error!("nothing was seen: {launcher}");
        }
        exit = Exit::NothingAttached;
    }
    if let Some(destination) = outputs.files.summary.take()
        && !write_summary(
            destination,
            &summary,
            arguments.flush_timeout.saturating_sub(flushing.elapsed()),
        )
    {
        exit = Exit::ExportIncomplete;
    }
    for row in &summary.exporters {
        if let Some(problem) = &row.error {
            error!("{problem}");
        }
        for (items, reason, dropped) in row.incomplete() {
            error!(
                dropped,
                reason, "{}: {dropped} {items} were dropped ({reason})", row.target
            );
        }
        if row.error.is_some() || row.incomplete().next().is_some() {
            exit = Exit::ExportIncomplete;
        }
    }
    // The reason for which somebody looks goes before what became of the outputs, which was said above.
    if collector.has_seen_hang() {
        exit = Exit::HangSeen;
    }
    Ok(exit)
}

/// Writes the summary to its file; where that fails, says why and writes it to standard output, lest the run's account be
/// lost. `false` if it is not in its file. `limit` is what other outputs have left of the time.
fn write_summary(destination: Destination, summary: &Arc<Summary>, limit: Duration) -> bool {
    /// Enough for a disk that works.
    const LEAST: Duration = Duration::from_millis(150);
    let limit = limit.max(LEAST);
    let shared = Arc::clone(summary);
    // It may be long: it is never in memory as a text. The file may be a terminal.
    let write = move |file: &mut dyn io::Write| Ok(serde_json::to_writer(JsonWriter(file), &*shared)?);
    let Err(problem) = outputs::write_whole(destination, limit, write) else {
        return true;
    };
    match serde_json::to_string(&**summary) {
        Ok(text) => {
            print(&(text + "\n"));
            error!("{problem}; the summary went to standard output instead");
        }
        Err(second) => error!("{problem}; the summary cannot be written: {second}"),
    }
    false
}

/// Attaches to each process, telling how it went.
fn attach(arguments: &AttachArguments, session: &mut Session, ending: &Ending) -> Watched {
    let begun = Instant::now();
    let mut pids = arguments.pids.clone();
    let mut seen = std::collections::BTreeSet::new();
    pids.retain(|pid| seen.insert(*pid));
    let mut attached = Vec::new();
    let (mut failed, mut launchers) = (0, Vec::new());
    session.attach_all(
        &pids,
        || ending.asked(),
        |pid, result| match result {
            Ok(one) => attached.push(one),
            Err(error) => {
                error!(pid, "{error}");
                failed += 1;
                launchers.extend(launcher::hint(pid, "attach"));
            }
        },
    );
    let attach_ms = begun.elapsed().as_secs_f64() * 1e3;
    if let Some(unavailable) = session.unavailable()
        && !attached.is_empty()
    {
        warn!("{unavailable}; everything is read through the shared ring");
    }
    for one in &attached {
        info!(pid = one.process.pid, "{}", describe(one));
        launchers.extend(no_rank(one));
    }
    for launcher in &launchers {
        warn!("{launcher}");
    }
    for line in describe_network(session.network()) {
        info!("{line}");
    }
    Watched {
        attached,
        failed,
        launchers,
        attach_ms,
    }
}

/// What to say of a process that uses nothing of its library, if its children do.
fn no_rank(attached: &Attached) -> Option<String> {
    let process = &attached.process;
    let is_rank = || ringsight_probes::look(process.pid).is_ok_and(|look| !look.communicators.is_empty());
    if !process.instrumented || is_rank() {
        return None;
    }
    launcher::hint(process.pid, "attach")
}

/// The text for trace ids; `first` is the process whose environment `--scope-env` names a variable of.
fn scope(arguments: &AttachArguments, first: &Attached) -> Result<Scope, String> {
    let Some(name) = &arguments.scope_env else {
        return Scope::new(arguments.scope.as_deref().unwrap_or_default());
    };
    let pid = first.process.pid;
    let value = first
        .variable
        .clone()
        .map_err(|problem| format!("--scope-env: the environment of process {pid}: {problem}"))?
        .filter(|value| !value.is_empty())
        .ok_or_else(|| format!("--scope-env: process {pid} was not started with {name}, or it is empty"))?;
    Scope::new(&value).map_err(|problem| format!("--scope-env: {name} of process {pid}: {problem}"))
}

/// What went wrong, told as it comes, but not more often than somebody can read.
#[derive(Default)]
struct Problems {
    last: String,
    /// How many were told in the second that began then.
    told: Option<(Instant, u32)>,
    untold: u64,
}

impl Problems {
    /// Tells one. A problem that lasts is told once.
    fn tell(&mut self, problem: String) {
        if problem == self.last {
            return;
        }
        let told = match self.told {
            Some((since, told)) if since.elapsed() < Duration::from_secs(1) => (since, told),
            _ => (Instant::now(), 0),
        };
        let has_room = told.1 < PROBLEMS;
        self.told = Some((told.0, told.1 + u32::from(has_room)));
        if !has_room {
            self.untold += 1;
            return;
        }
        match std::mem::take(&mut self.untold) {
            0 => warn!("{problem}"),
            untold => warn!(
                untold,
                "{problem}; before it {untold} problems were not told, they were too many"
            ),
        }
        self.last = problem;
    }
}

struct Reader<'a> {
    session: &'a mut Session,
    collector: &'a mut Collector,
    outputs: &'a mut Outputs,
    /// What was polled and is not taken in.
    samples: Vec<Sample>,
    /// A process is left.
    more: bool,
    problems: Problems,
}

impl Reader<'_> {
    /// Reads until there is a reason to end.
    fn watch(&mut self, ending: &Ending, duration: Option<Duration>, begun: Instant) {
        let is_over = || ending.asked() || duration.is_some_and(|duration| begun.elapsed() >= duration);
        let (mut exported, mut metered, mut drawn) = (begun, begun, begun);
        loop {
            self.poll(is_over);
            if !self.more || is_over() {
                break;
            }
            let now = Instant::now();
            let busy = self.collector.batched() >= EXPORT_ITEMS;
            if busy || now.duration_since(exported) >= EXPORT {
                if now.duration_since(metered) >= METRICS {
                    self.meter();
                    metered = now;
                }
                self.outputs.export(self.collector);
                exported = now;
            }
            if self.outputs.status && now.duration_since(drawn) >= STATUS {
                self.draw(begun);
                drawn = now;
            }
            if !busy && !self.session.is_behind() {
                thread::sleep(POLL);
            }
        }
        if self.outputs.status {
            log::clear_status();
        }
    }

    /// Takes in what has come, until `is_over`: the rest waits for the next call.
    fn poll(&mut self, is_over: impl Fn() -> bool) {
        if self.samples.is_empty() {
            let now = clock::monotonic_ns();
            self.collector.clock_mut().refresh(now);
            self.more = match self.session.poll(&mut self.samples) {
                Ok(more) => more,
                Err(problem) => {
                    self.problems.tell(problem);
                    self.session.pids().next().is_some()
                }
            };
        }
        let mut samples = VecDeque::from(std::mem::take(&mut self.samples));
        loop {
            let slice = samples.len().min(SLICE);
            self.collector.ingest_each(samples.drain(..slice));
            if samples.is_empty() || is_over() {
                break;
            }
        }
        self.samples = samples.into();
    }

    fn meter(&mut self) {
        let stats = self.outputs.stats();
        self.collector.set_unseen(self.session.left_out());
        self.collector
            .add_metrics(clock::monotonic_ns(), cpu_seconds(), stats);
    }

    fn draw(&self, begun: Instant) {
        let readings = self.collector.readings();
        let (operations, incomplete, late) = self.collector.log().counts();
        let missed = match readings.counts.missed_total() {
            0 => String::new(),
            missed => format!(", {missed} missed before"),
        };
        log::draw_status(&format!(
            "{:.0} s: {} processes, {operations} operations ({} in flight, {late} with a late rank, {incomplete} incomplete), \
             {} records, {} lost{missed}",
            begun.elapsed().as_secs_f64(),
            self.session.pids().count(),
            readings.in_flight,
            readings.counts.received_total(),
            readings.counts.lost_total(),
        ));
    }

    /// Lets go of all processes, takes what is left and hands all of it to the exporters, for as long as [`LET_GO`]. Returns how long letting
    /// go took.
    fn let_go(&mut self) -> Duration {
        let begun = Instant::now();
        let is_over = || begun.elapsed() >= LET_GO;
        // What has happened until now is taken while everything still runs.
        loop {
            self.poll(is_over);
            self.export_if_due();
            let is_behind = self.session.is_behind() || !self.samples.is_empty();
            if !is_behind || is_over() {
                break;
            }
        }
        let letting_go = Instant::now();
        self.session.stop_all();
        let let_go = letting_go.elapsed();
        // The last samples of a process come with the poll after it was let go.
        while (self.more || !self.samples.is_empty()) && !is_over() {
            self.poll(is_over);
            self.export_if_due();
        }
        while !is_over() && self.collector.finish_some(clock::monotonic_ns(), EXPORT_ITEMS) {
            self.export_if_due();
        }
        self.collector.leave_out_the_rest(self.samples.len());
        self.meter();
        self.outputs.export(self.collector);
        let_go
    }

    fn export_if_due(&mut self) {
        if self.collector.batched() >= EXPORT_ITEMS {
            self.outputs.export(self.collector);
        }
    }
}
