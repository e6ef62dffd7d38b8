//! A session: processes being watched, and the samples that come of it.
//!
//! Everything happens in the caller's thread, in [`Session::poll`], which never waits: how often to look is for the caller
//! (1 ms is what the buffers are sized for).

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    io,
    os::fd::OwnedFd,
    sync::Arc,
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use ringsight_records::{
    Kind, VERSION,
    pages::Reader,
    probed::{RING_BYTES, Tally},
};

use crate::{
    ask::Question,
    attach::{Event, Probes, RECORD_BYTES},
    error::{AttachError, Unavailable},
    kernel,
    limits::{
        ANSWER_TIME, CpuBudget, END_TIME, LET_GO_SAMPLES, LET_GO_TIME, LeftOut, Limit, POLL_EVENTS,
        POLL_RECORDS, POLL_RECORDS_EACH, TURN_TIME,
    },
    network::{self, SiteState},
    process::{self, now_ns},
    sample::{Carrier, Process, Sample, Source},
    site::{self, Site},
    stats::{Counters, ProbeStats},
    survey::{Survey, Surveyed},
    target::{FileKey, Flavour, Library},
    watch::{Through, Watched, leased},
};
use state::Target;

mod options;
mod state;

pub use options::{NetworkScope, Options, UseEbpf};

/// Events that the kernel's ring holds at most: once so many were taken, all that was in there before them was.
const EVENTS_HELD: u64 = RING_BYTES as u64 / RECORD_BYTES + 1;
/// How often the eBPF tallies are read for losses: a system call a process.
const TALLY_NS: u64 = 20_000_000;
/// How often to look whether processes still run the program that was attached to.
const PROGRAM_NS: u64 = 50_000_000;
/// How often the others' records are taken while a process is looked at: what the buffers are sized for.
const TICK: Duration = Duration::from_millis(1);
/// How long letting go waits for events that were counted and have not come.
const REST: Duration = Duration::from_millis(5);

/// What attaching did.
#[derive(Clone, Debug)]
pub struct Attached {
    /// The process.
    pub process: Arc<Process>,
    /// Sites that its library is probed at; empty with the ring alone.
    pub sites: Vec<Site>,
    /// Its [`Options::variable`]; `None` if it was started without. Or why that cannot be told.
    pub variable: Result<Option<String>, String>,
    /// How long it took.
    pub elapsed: Duration,
    /// What carries sparse records that the ring does not take; [`Carrier::Ring`] where eBPF is not available.
    pub carrier: Carrier,
}

/// What came of placing the probes of a library.
enum Linked {
    /// There are no probes.
    Never,
    /// Another process brought them, or they are placed together with the process.
    Already,
    /// They got this number.
    Anew(u64, io::Result<Vec<OwnedFd>>),
    /// They were not placed in time.
    Late,
}

/// Processes being watched.
pub struct Session {
    options: Options,
    probes: Option<Probes>,
    unavailable: Option<Unavailable>,
    targets: BTreeMap<u32, Target>,
    /// Questions about processes that were not answered in time.
    unanswered: HashMap<u32, Question<Surveyed>>,
    /// Libraries whose probes were not placed in time: some process that maps one, watched or not, keeps its memory lock.
    late_libraries: HashSet<FileKey>,
    /// Final counters of processes that have ended or were let go.
    finished: HashMap<u32, Counters>,
    past: ProbeStats,
    /// Threads that close links.
    closing: Vec<JoinHandle<()>>,
    left_out: LeftOut,
    ready: Vec<Sample>,
    problems: Vec<String>,
    own: Reader,
    tallied_ns: u64,
    programs_ns: u64,
    /// Events of the kernel's RDMA stack that were reported as lost.
    network_lost: u64,
    /// How far the kernel's ring has been read, and events taken from it.
    probes_read: Through,
    taken: u64,
    /// The last poll left events for the next one.
    is_behind: bool,
}

impl std::fmt::Debug for Session {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Session")
            .field("options", &self.options)
            .field("unavailable", &self.unavailable)
            .field("pids", &self.targets.keys().collect::<Vec<_>>())
            .finish_non_exhaustive()
    }
}

impl Session {
    /// A session that watches nobody yet; loads the eBPF object unless told not to.
    ///
    /// # Errors
    /// [`Unavailable`] if eBPF is required and cannot be used.
    pub fn new(options: Options) -> Result<Self, Unavailable> {
        let (mut probes, unavailable) = match options.use_ebpf {
            UseEbpf::Never => (None, None),
            UseEbpf::Auto | UseEbpf::Require => match Probes::load(options.force_perf_event) {
                Ok(probes) => (Some(probes), None),
                Err(unavailable) if options.use_ebpf == UseEbpf::Require => return Err(unavailable),
                Err(unavailable) => (None, Some(unavailable)),
            },
        };
        let mut problems = Vec::new();
        if options.network != NetworkScope::Never
            && network::is_present()
            && let Some(probes) = &mut probes
            && let Err(problem) = probes.attach_network(options.network == NetworkScope::Everybody)
        {
            problems.push(format!("the kernel's RDMA stack cannot be probed: {problem}"));
        }
        Ok(Self {
            options,
            network_lost: 0,
            probes_read: Through::default(),
            taken: 0,
            is_behind: false,
            probes,
            unavailable,
            targets: BTreeMap::new(),
            unanswered: HashMap::new(),
            late_libraries: HashSet::new(),
            finished: HashMap::new(),
            past: ProbeStats::default(),
            closing: Vec::new(),
            left_out: LeftOut::default(),
            ready: Vec::new(),
            problems,
            own: process::own_reader(),
            tallied_ns: 0,
            programs_ns: 0,
        })
    }

    /// Why eBPF is not in use although it was wanted: to be shown once.
    #[must_use]
    pub fn unavailable(&self) -> Option<&Unavailable> {
        self.unavailable.as_ref()
    }

    /// Which kind of kernel link carries the probes; `None` without eBPF.
    #[must_use]
    pub fn link_kind(&self) -> Option<&'static str> {
        self.probes.as_ref().map(Probes::link_kind)
    }

    /// What became of the sites in the kernel's RDMA stack: empty where it is not probed.
    #[must_use]
    pub fn network(&self) -> &[SiteState] {
        self.probes.as_ref().map_or(&[], Probes::network_states)
    }

    /// The processes being watched.
    pub fn pids(&self) -> impl Iterator<Item = u32> {
        self.targets.keys().copied()
    }

    /// Whether the last [`Session::poll`] left events for the next one, which is then due at once.
    #[must_use]
    pub fn is_behind(&self) -> bool {
        self.is_behind
    }

    /// Begins to watch the process that `pid` is, or is a thread of. What exists of it already (its communicators) comes with
    /// the next [`Session::poll`].
    ///
    /// # Errors
    /// See [`AttachError`]; the session and its other processes are as before.
    pub fn attach(&mut self, pid: u32) -> Result<Attached, AttachError> {
        let begun = Instant::now();
        let question = self.question(pid)?;
        let surveyed = self.answer(pid, &question, ANSWER_TIME, &|| false);
        self.attach_surveyed(pid, question, surveyed, begun, &|| false)
    }

    /// Begins to watch each of `pids` until `is_over`, and hands on what came of each. What is not reached until then is not handed on.
    ///
    /// A process that keeps back what is asked about it holds up the next one by [`TURN_TIME`], and itself alone for longer.
    pub fn attach_all(
        &mut self,
        pids: &[u32],
        is_over: impl Fn() -> bool,
        mut each: impl FnMut(u32, Result<Attached, AttachError>),
    ) {
        let mut late = Vec::new();
        for pid in pids {
            if is_over() {
                return;
            }
            let begun = Instant::now();
            let question = match self.question(*pid) {
                Ok(question) => question,
                Err(error) => {
                    each(*pid, Err(error));
                    continue;
                }
            };
            match self.answer(*pid, &question, TURN_TIME, &is_over) {
                Ok(None) => late.push((*pid, question, begun)),
                surveyed => {
                    let attached = self.attach_surveyed(*pid, question, surveyed, begun, &is_over);
                    each(*pid, attached);
                }
            }
        }
        for (pid, question, begun) in late {
            let left = ANSWER_TIME.saturating_sub(begun.elapsed());
            let surveyed = self.answer(pid, &question, left, &is_over);
            if is_over() {
                return;
            }
            let attached = self.attach_surveyed(pid, question, surveyed, begun, &is_over);
            each(pid, attached);
        }
    }

    /// The question about a process: the one that is still open, or a new one.
    fn question(&mut self, pid: u32) -> Result<Question<Surveyed>, AttachError> {
        if let Some(question) = self.unanswered.remove(&pid) {
            return Ok(question);
        }
        Survey::begin(pid, self.options.variable.as_deref()).map_err(|error| unasked(pid, &error))
    }

    /// Waits for `time` at most, and takes the records of watched processes meanwhile.
    fn answer<T: Send + 'static>(
        &mut self,
        pid: u32,
        question: &Question<T>,
        time: Duration,
        is_over: &impl Fn() -> bool,
    ) -> Result<Option<T>, AttachError> {
        let begun = Instant::now();
        loop {
            let answer = question
                .answer_within(TICK)
                .map_err(|error| unasked(pid, &error))?;
            if answer.is_some() || begun.elapsed() >= time || is_over() {
                return Ok(answer);
            }
            if self.ready.len() < LET_GO_SAMPLES {
                let pids: Vec<u32> = self.pids().collect();
                let mut samples = std::mem::take(&mut self.ready);
                self.drain_both(&pids, &mut samples);
                self.ready = samples;
            }
        }
    }

    /// Attaches to a process, if the question about it was answered.
    fn attach_surveyed(
        &mut self,
        pid: u32,
        question: Question<Surveyed>,
        surveyed: Result<Option<Surveyed>, AttachError>,
        begun: Instant,
        is_over: &impl Fn() -> bool,
    ) -> Result<Attached, AttachError> {
        let Some((surveyed, mut left_out)) = surveyed? else {
            self.unanswered.insert(pid, question);
            let limit = Limit::AnswerTime;
            self.left_out.count(limit);
            return Err(AttachError::Limit { pid, limit });
        };
        let attached = surveyed.and_then(|survey| self.attach_to(survey, begun, is_over));
        if let Err(AttachError::Refused { .. }) = &attached {
            left_out.pages_refused += 1;
        }
        if attached.is_ok() {
            let limits: Vec<_> = left_out.limits().map(|(limit, _)| limit.to_string()).collect();
            if !limits.is_empty() {
                let limits = limits.join("; ");
                self.problems
                    .push(format!("process {pid} is not seen whole: {limits}"));
            }
        }
        self.left_out.add(&left_out);
        attached
    }

    /// Has the probes of a library placed, for [`ANSWER_TIME`] at most. The records of watched processes are taken meanwhile.
    fn link(
        &mut self,
        pid: u32,
        library: &Library,
        sites: &[Site],
        is_over: &impl Fn() -> bool,
    ) -> Result<Linked, AttachError> {
        let Some(probes) = &mut self.probes else {
            return Ok(Linked::Never);
        };
        if self.late_libraries.contains(&library.key) {
            return Ok(Linked::Late);
        }
        let linking = match probes.begin_link(library, sites) {
            Ok(Some(linking)) => linking,
            Ok(None) => return Ok(Linked::Already),
            Err(error) => return Ok(Linked::Anew(0, Err(error))),
        };
        // Whoever keeps one lock may keep more of them.
        let time = if self.late_libraries.is_empty() {
            ANSWER_TIME
        } else {
            TURN_TIME
        };
        match self.answer(pid, &linking.question, time, is_over)? {
            Some(links) => Ok(Linked::Anew(linking.number, links)),
            None if is_over() => Ok(Linked::Late),
            None => {
                self.late_libraries.insert(library.key);
                self.left_out.count(Limit::AnswerTime);
                self.problems.push(format!(
                    "process {pid}: a process that maps {} keeps probes from being placed there: everything is read through the shared ring",
                    library.path.display()
                ));
                Ok(Linked::Late)
            }
        }
    }

    fn attach_to(
        &mut self,
        survey: Survey,
        begun: Instant,
        is_over: &impl Fn() -> bool,
    ) -> Result<Attached, AttachError> {
        let Survey {
            directory,
            started,
            pidfd,
            program,
            library,
            said,
            pages: found,
            search,
        } = survey;
        let pid = directory.pid();
        if self.targets.contains_key(&pid) {
            return Err(AttachError::Twice { pid });
        }
        let kernel = if self.options.force_nop1 {
            (0, 0)
        } else {
            kernel::version()
        };
        let sites = site::plan(&library, kernel);
        let instrumented = library.flavour == Flavour::Instrumented;

        let mut pages = None;
        if let Some(mut found) = found {
            // Before any probe is placed: a second reader must not disturb the first. The ring is armed from here on, and what it has no room for
            // before the probes are in place is lost.
            match found.lease(&self.own, self.mask()) {
                Ok(base) => pages = Some((found, base)),
                Err(holder) => return Err(leased(&found, &holder, &self.own, &directory)),
            }
        }
        let mut probed = None;
        let linked = match self.link(pid, &library, &sites, is_over)? {
            Linked::Late if instrumented => None,
            Linked::Late => {
                let limit = Limit::AnswerTime;
                return Err(AttachError::Limit { pid, limit });
            }
            Linked::Never => None,
            Linked::Already => Some(None),
            Linked::Anew(number, links) => Some(Some((number, links))),
        };
        if let (Some(probes), Some(linked)) = (&mut self.probes, linked) {
            match probes.watch(&directory, &library, &sites, linked) {
                Ok(keys) => probed = Some(keys),
                Err(error) => {
                    let denied = matches!(error.raw_os_error(), Some(libc::EPERM | libc::EACCES));
                    let unused = self.targets.values().all(|target| target.probed.is_none());
                    if !(denied && unused && self.options.use_ebpf == UseEbpf::Auto) {
                        return Err(AttachError::Attach {
                            pid,
                            library: library.path,
                            problem: error.to_string(),
                        });
                    }
                    self.unavailable = Some(Unavailable::explain(error));
                    self.probes = None;
                }
            }
        }
        if !instrumented && probed.is_none() {
            let unavailable = self.unavailable.clone().unwrap_or_else(|| Unavailable {
                problem: "this session was told not to use them".into(),
                remedy: "a library without shared pages can be watched in no other way".into(),
            });
            return Err(AttachError::Ebpf { pid, unavailable });
        }
        let identity = pages.as_ref().map(|(pages, _)| pages.identity());
        let variable = said.variable.clone();
        let process = process::describe(&directory, started, said, &library, identity);
        let process = Arc::new(process);
        // The process may have ended while it was looked at.
        if process::ended(&[&pidfd]) != [false] {
            if let (Some(probes), Some((key, _))) = (&mut self.probes, probed) {
                probes.forget(key);
                drop(probes.unlink(key, library.key));
            }
            return Err(AttachError::Gone { pid });
        }
        self.ready.push(Sample::Process(Arc::clone(&process)));
        let mut watched = Watched::new(pid, instrumented, probed.is_some(), (pages, search), now_ns());
        watched.communicators(&mut self.ready);
        let target = Target {
            directory,
            pidfd,
            program,
            replaced: false,
            library: library.key,
            probed,
            reported: Tally::new(0),
            watched,
            ended_ns: None,
            through_ns: 0,
        };
        self.targets.insert(pid, target);
        self.finished.remove(&pid);
        Ok(Attached {
            process,
            sites: if probed.is_some() { sites } else { Vec::new() },
            variable,
            elapsed: begun.elapsed(),
            carrier: if probed.is_some() {
                Carrier::Probe
            } else {
                Carrier::Ring
            },
        })
    }

    /// Lets go of a process; its last samples come with the next [`Session::poll`]. Returns how long it took, `None` if it was
    /// not being watched.
    pub fn detach(&mut self, pid: u32) -> Option<Duration> {
        let begun = Instant::now();
        if !self.targets.contains_key(&pid) {
            return None;
        }
        self.let_go(&[pid]);
        self.wait_for_links();
        Some(begun.elapsed())
    }

    /// Lets go of every process. Returns how long it took.
    pub fn detach_all(&mut self) -> Duration {
        let begun = Instant::now();
        self.stop_all();
        self.wait_for_links();
        begun.elapsed()
    }

    /// Lets go of every process, and does not wait until the kernel has removed the probes: [`Session::detach_all`] does.
    pub fn stop_all(&mut self) {
        let pids: Vec<u32> = self.targets.keys().copied().collect();
        self.let_go(&pids);
    }

    /// Waits until the kernel has removed the probes of processes that were let go.
    fn wait_for_links(&mut self) {
        for closing in self.closing.drain(..) {
            // It only drops descriptors.
            let _ = closing.join();
        }
    }

    /// The target's own counts of its events, also after it was let go or has ended; `None` if it never had pages.
    #[must_use]
    pub fn counters(&self, pid: u32) -> Option<Counters> {
        match self.targets.get(&pid) {
            Some(target) => target.watched.counters(),
            None => self.finished.get(&pid).copied(),
        }
    }

    /// What the probes did so far.
    #[must_use]
    pub fn probe_stats(&self) -> ProbeStats {
        let mut stats = self.past;
        if let Some(probes) = &self.probes {
            for (key, _) in self.targets.values().filter_map(|target| target.probed) {
                stats.add(&probes.tally(key));
            }
        }
        stats
    }

    /// What was left out of what targets showed, by the limits of [`limits`](crate::limits).
    #[must_use]
    pub fn left_out(&self) -> LeftOut {
        self.left_out
    }

    /// Kinds that the rings are armed for. What an operation's caller writes into one costs it a tenth of a probe, and should this
    /// reader be killed, its successor finds it there.
    fn mask(&self) -> u64 {
        self.options.dense & Kind::DENSE | Kind::SPARSE
    }

    /// Takes what happened until now, also of threads that have counted an event and are about to write it.
    fn come_to_rest(&mut self, pids: &[u32], samples: &mut Vec<Sample>) {
        for target in self.targets.iter_mut().filter(|(pid, _)| pids.contains(pid)) {
            target.1.watched.begin_to_end();
        }
        let begun = Instant::now();
        while samples.len() < LET_GO_SAMPLES {
            self.drain_both(pids, samples);
            let mut targets = pids.iter().filter_map(|pid| self.targets.get(pid));
            if targets.all(|target| target.watched.is_even()) || begun.elapsed() >= REST {
                return;
            }
            thread::yield_now();
        }
    }

    /// Hands on some of what both carriers hold of `pids`, in the order of [`Session::poll`]; whether the kernel's ring was drained.
    fn drain_both(&mut self, pids: &[u32], samples: &mut Vec<Sample>) -> bool {
        for pid in pids {
            // Each of many processes may have filled its ring.
            let left = LET_GO_SAMPLES.saturating_sub(samples.len()).min(POLL_RECORDS);
            if let Some(target) = self.targets.get_mut(pid)
                && left > 0
            {
                target.watched.drain(left, now_ns(), false, samples);
            }
        }
        self.drain_probes(samples)
    }

    /// Stops the events of `pids`, takes what they left in both carriers, then takes the links away.
    fn let_go(&mut self, pids: &[u32]) {
        let mut samples = std::mem::take(&mut self.ready);
        self.come_to_rest(pids, &mut samples);
        for pid in pids {
            if let Some(target) = self.targets.get_mut(pid) {
                if let (Some(probes), Some((key, _))) = (&mut self.probes, target.probed) {
                    target.report(&probes.tally(key), *pid, &mut samples);
                    self.past.add(&probes.tally(key));
                    probes.forget(key);
                }
                target.watched.disarm();
            }
        }
        // Bounded all the same: what comes meanwhile is other processes', or written by one that goes on.
        let budget = CpuBudget::of(LET_GO_TIME);
        loop {
            let drained = self.drain_both(pids, &mut samples);
            let mut targets = pids.iter().filter_map(|pid| self.targets.get(pid));
            let is_all = drained && !targets.any(|target| target.watched.is_cut());
            if is_all || budget.is_spent() || samples.len() >= LET_GO_SAMPLES {
                break;
            }
        }
        for pid in pids {
            if let Some(target) = self.targets.remove(pid) {
                self.close(*pid, target, false, &mut samples);
            }
        }
        self.ready = samples;
    }

    /// The end of a target whose events were all taken.
    fn close(&mut self, pid: u32, mut target: Target, ended: bool, samples: &mut Vec<Sample>) {
        target.watched.close(samples);
        if let Some(counters) = target.watched.counters() {
            self.finished.insert(pid, counters);
        }
        if let (Some(probes), Some((key, _))) = (&mut self.probes, target.probed) {
            // Not in this thread: the kernel may take 100 ms for each probe.
            if let Some(unlinked) = probes.unlink(key, target.library) {
                let closing = thread::Builder::new().name("ringsight-unlink".into());
                self.closing.retain(|closing| !closing.is_finished());
                self.closing.extend(closing.spawn(move || drop(unlinked)));
            }
        }
        samples.push(Sample::Exited { pid, ended });
    }

    /// Notices processes that have begun another program (`execve`): nothing of what was attached to exists any more.
    fn look_for_other_programs(&mut self, now_ns: u64, ended: &[bool]) {
        if now_ns.saturating_sub(self.programs_ns) < PROGRAM_NS {
            return;
        }
        self.programs_ns = now_ns;
        for ((pid, target), ended) in self.targets.iter_mut().zip(ended) {
            if *ended || target.replaced || !target.program.is_replaced(&target.directory) {
                continue;
            }
            target.replaced = true;
            let name = target.directory.text("comm").unwrap_or_default();
            self.problems.push(format!(
                "process {pid} has begun another program ({}): what the one before was doing ended with it; \
                 attach again once this one has loaded the library",
                name.trim_end()
            ));
        }
    }

    fn report_network_losses(&mut self, samples: &mut Vec<Sample>) {
        let Some(probes) = self
            .probes
            .as_ref()
            .filter(|probes| !probes.network_states().is_empty())
        else {
            return;
        };
        let lost: u64 = probes.network_tally().lost.iter().sum();
        if lost > self.network_lost {
            let count = lost - self.network_lost;
            self.network_lost = lost;
            samples.push(Sample::NetworkLost { count });
        }
    }

    /// Hands on what the eBPF ring buffer holds; `true` if it was drained.
    fn drain_probes(&mut self, samples: &mut Vec<Sample>) -> bool {
        let Some(probes) = &mut self.probes else {
            return true;
        };
        // A handful of processes on a node: a list beats a hash.
        let keys: Vec<(u64, u64, u32)> = self
            .targets
            .iter()
            .filter_map(|(pid, target)| target.probed.map(|(key, library)| (key, library, *pid)))
            .collect();
        let everybody = self.options.network == NetworkScope::Everybody;
        let targets = &mut self.targets;
        let problems = &mut self.problems;
        let taken = &mut self.taken;
        probes.drain(POLL_EVENTS, |event| {
            *taken += 1;
            let (cookie, process) = match &event {
                Event::Record(record) => (record.cookie, record.process),
                Event::Call(call) => (call.cookie, call.process),
                Event::Network(record) => {
                    let own = keys.iter().find(|(key, _, _)| *key == record.process);
                    // In the initial namespace the key is the process id, also of one that is not watched.
                    let other = || (everybody && record.process != 0).then_some(record.process as u32);
                    let pid = own.map(|(_, _, pid)| *pid).or_else(other);
                    samples.extend(network::decode(record, pid).map(|one| Sample::Network(Box::new(one))));
                    return;
                }
            };
            let library = ringsight_records::probed::library_of(cookie);
            // Events of a process that was let go are nobody's.
            let Some((_, _, pid)) = keys
                .iter()
                .find(|(key, number, _)| *number == library && *key == process)
            else {
                return;
            };
            let Some(target) = targets.get_mut(pid) else {
                return;
            };
            match event {
                Event::Record(probed) if probed.record.version() != VERSION => {
                    target.watched.foreign(probed.record.version(), problems);
                }
                Event::Record(probed) => {
                    target.watched.record(probed.tid, probed.record, samples);
                }
                Event::Call(call) => target.watched.call(&call, samples),
                Event::Network(_) => {}
            }
        })
    }
}

/// That nobody can ask about a process.
fn unasked(pid: u32, error: &io::Error) -> AttachError {
    AttachError::Io {
        pid,
        what: "asking about it",
        error: error.to_string(),
    }
}

impl Source for Session {
    fn poll(&mut self, samples: &mut Vec<Sample>) -> Result<bool, String> {
        samples.append(&mut self.ready);
        // Time and deaths are read before the carriers: what they hold at the end of this poll covers both.
        let now = now_ns();
        let mut ended = process::ended(
            &self
                .targets
                .values()
                .map(|target| &target.pidfd)
                .collect::<Vec<_>>(),
        );
        self.look_for_other_programs(now, &ended);
        let mask = self.mask();
        for target in self.targets.values_mut() {
            if let Err(problem) = target.watched.look(&target.directory, now, &self.own, mask) {
                if let AttachError::Refused { .. } = &problem {
                    self.left_out.pages_refused += 1;
                }
                self.problems.push(problem.to_string());
            }
        }
        // The rings first, and before leases are renewed: what a process writes past a full ring, or while its lease has lapsed, comes after what is in
        // there, and before what it writes once there is room again.
        let each = (POLL_RECORDS / self.targets.len().max(1)).max(POLL_RECORDS_EACH);
        self.is_behind = false;
        for (target, ended) in self.targets.values_mut().zip(&mut ended) {
            // What ran the library is gone either way.
            *ended |= target.replaced;
            if *ended && target.ended_ns.is_none() {
                target.ended_ns = Some(now);
                if let Some(status) = if target.replaced {
                    None
                } else {
                    target.directory.failure()
                } {
                    let pid = target.directory.pid();
                    samples.push(Sample::Failed { pid, status });
                }
            }
            target.watched.drain(each, now, *ended, samples);
            self.is_behind |= target.watched.is_cut();
        }
        let drained = self.drain_probes(samples);
        self.is_behind |= !drained;
        let taken = self.taken;
        self.probes_read
            .look(now, drained, |mark| taken >= mark, || taken + EVENTS_HELD);

        let tallying = now.saturating_sub(self.tallied_ns) >= TALLY_NS;
        let mut over = Vec::new();
        for ((pid, target), ended) in self.targets.iter_mut().zip(ended) {
            self.problems.extend(target.renew(*pid, &self.own, now));
            target.watched.lost(samples);
            if let (Some(probes), Some((key, _))) = (&self.probes, target.probed)
                && (tallying || ended)
            {
                target.report(&probes.tally(key), *pid, samples);
            }
            target.watched.publish();
            target.watched.communicators_if_due(now, samples);
            let through_ns = target.watched.read_through().min(self.probes_read.ns);
            if through_ns > target.through_ns {
                target.through_ns = through_ns;
                samples.push(Sample::Watermark {
                    pid: *pid,
                    time_ns: through_ns,
                });
            }
            let is_over = |ended_ns: u64| {
                through_ns >= ended_ns || u128::from(now.saturating_sub(ended_ns)) >= END_TIME.as_nanos()
            };
            if target.ended_ns.is_some_and(is_over) {
                over.push(*pid);
            }
        }
        if tallying {
            self.report_network_losses(samples);
            self.tallied_ns = now;
        }
        for pid in over {
            let Some(target) = self.targets.remove(&pid) else {
                continue;
            };
            if let (Some(probes), Some((key, _))) = (&mut self.probes, target.probed) {
                self.past.add(&probes.tally(key));
                probes.forget(key);
            }
            self.close(pid, target, true, samples);
        }
        if self.problems.is_empty() {
            Ok(!self.targets.is_empty())
        } else {
            Err(std::mem::take(&mut self.problems).join("; "))
        }
    }
}
