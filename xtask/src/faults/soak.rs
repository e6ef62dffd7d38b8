//! `cargo xtask faults --soak`: for minutes ranks are slow and pause, and no verdict may be false.
//!
//! Two jobs run beside each other, one whose ranks are processes on two nodes and one whose ranks are threads. Step by step one rank
//! is late for an operation, mostly by less than the threshold, now and then by much more, on its host or on its stream.
//! Hangs abort: a single one ends the job.

use std::{
    ffi::c_void,
    fs,
    sync::mpsc::RecvTimeoutError,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use serde::Serialize;

use super::{
    Place,
    call::Call,
    cases::{Operation, PROMISED, Ranks, Source, THRESHOLD},
    job::{Heard, Job, Reports, Said, Started},
    score::first_rank,
    truth::{self, Account, Event, What},
    worker::{Stage, Stages, say},
};
use crate::{
    demo::random::Random,
    nccl::{Buffer, Communicator, Nccl, UniqueId},
};

const RANKS: u32 = 4;
const NODES: u32 = 2;
/// From the end of a rank's lateness on a verdict that was asked for before may still be said.
const AFTER: Duration = Duration::from_millis(700);
/// How long the job may take to end once told to.
const LIMIT: Duration = Duration::from_secs(30);

/// What a step is like; every rank draws the same.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Step {
    victim: u32,
    late: Duration,
    /// Late is its stream, not its host.
    computes: bool,
    graph: bool,
}

impl Step {
    fn draw(random: &mut Random) -> Self {
        let threshold = THRESHOLD.as_millis() as u64;
        let late = match random.below(10) {
            0 => threshold + PROMISED.as_millis() as u64 + 100 + random.below(1200),
            1..=6 => random.below(threshold * 7 / 10),
            _ => random.below(5),
        };
        Self {
            victim: random.below(u64::from(RANKS)) as u32,
            late: Duration::from_millis(late),
            computes: random.below(3) == 0,
            graph: random.below(2) == 0,
        }
    }
}

/// What the stream of a late rank computes.
struct Compute<'a> {
    truth: &'a Account,
    rank: u32,
    step: u32,
    late: Duration,
}

unsafe extern "C" fn compute(argument: *mut c_void) {
    // SAFETY: the step's, which lives until the stream is synchronised.
    let compute = unsafe { &*argument.cast::<Compute<'_>>() };
    thread::sleep(compute.late);
    let arrived = What::Arrived { step: compute.step };
    // What cannot be noted is missed by the judge.
    let _ = compute.truth.note(compute.rank, arrived);
}

/// One rank.
///
/// # Errors
/// The library's: none is expected.
pub(super) fn rank(
    nccl: &Nccl,
    id: UniqueId,
    rank: u32,
    stages: &Stages,
    seed: u64,
    truth: &Account,
) -> Result<()> {
    nccl.set_device(rank)?;
    let communicator = nccl.communicator(RANKS, id, rank)?;
    let mut work = Call::new(&communicator, Operation::AllReduce, 4000, (rank, RANKS))?;
    let mut word = communicator.buffer(1)?;
    let graph = communicator.capture(|| work.call(&communicator))?;
    let mut random = Random::new(seed);
    if rank == 0 {
        say("fault")?;
    }
    for number in 0.. {
        let step = Step::draw(&mut random);
        let mut computing = None;
        if step.victim == rank && !step.computes {
            thread::sleep(step.late);
        }
        truth.note(rank, What::Called { step: number })?;
        if step.victim == rank && step.computes {
            let compute_now = computing.insert(Compute {
                truth,
                rank,
                step: number,
                late: step.late,
            });
            // SAFETY: it lives until the stream is synchronised, below.
            unsafe { communicator.host_function(compute, std::ptr::from_mut(compute_now).cast()) }?;
        } else {
            truth.note(rank, What::Arrived { step: number })?;
        }
        if step.graph {
            communicator.replay(&graph)?;
        } else {
            work.call(&communicator)?;
        }
        communicator.synchronise()?;
        if !work.is_right(1) {
            bail!("the result of step {number} is wrong");
        }
        work.fill();
        if is_over(&communicator, rank, stages, &mut word)? {
            break;
        }
    }
    communicator.forget(graph)?;
    let (code, text) = communicator.state()?;
    if code != 0 {
        bail!("the communicator's state is {code}: {text}");
    }
    communicator.destroy()?;
    truth.note(rank, What::Done)
}

/// Whether rank 0 has been told to end; all ranks hear the same.
fn is_over(communicator: &Communicator<'_>, rank: u32, stages: &Stages, word: &mut Buffer) -> Result<bool> {
    word.get()[0] = f32::from(rank == 0 && stages.now() >= Stage::End);
    communicator.all_reduce(word, crate::nccl::Reduce::Sum)?;
    communicator.synchronise()?;
    Ok(word.get()[0] > 0.0)
}

/// What came of it, as the last line says.
#[derive(Clone, Debug, Default, Serialize)]
pub(super) struct Report {
    pub(super) ok: bool,
    pub(super) seed: u64,
    pub(super) minutes: f64,
    pub(super) steps: usize,
    /// Times that a rank waited for another for so long that a verdict is promised, and those that got none.
    pub(super) long_waits: usize,
    pub(super) missed: usize,
    pub(super) verdicts: usize,
    pub(super) false_verdicts: usize,
}

/// Soaks.
///
/// # Errors
/// If a job fails, which none may.
pub(super) fn run(place: &Place, minutes: f64, seed: u64, source: Source) -> Result<Report> {
    let folder = &place.folder;
    fs::create_dir_all(folder).with_context(|| format!("creating {}", folder.display()))?;
    let time = Duration::from_secs_f64(minutes * 60.0);
    let reports = thread::scope(|scope| {
        [Ranks::Process, Ranks::Thread]
            .map(|kind| scope.spawn(move || soak(place, time, (kind, source), seed)))
            .map(|thread| thread.join().unwrap_or_else(|_| bail!("a thread panicked")))
    });
    let mut total = Report {
        seed,
        minutes,
        ..Report::default()
    };
    for report in reports {
        let report = report?;
        total.steps += report.steps;
        total.long_waits += report.long_waits;
        total.missed += report.missed;
        total.verdicts += report.verdicts;
        total.false_verdicts += report.false_verdicts;
    }
    total.ok = total.false_verdicts == 0 && total.missed == 0 && total.long_waits > 0;
    Ok(total)
}

fn soak(place: &Place, time: Duration, (kind, source): (Ranks, Source), seed: u64) -> Result<Report> {
    let account = place.folder.join(format!("soak-{kind:?}.jsonl"));
    let _ = fs::remove_file(&account);
    let started = Started {
        xtask: &place.xtask,
        library: &place.library,
        ranks: RANKS,
        nodes: if kind == Ranks::Process { NODES } else { 1 },
        kind,
        device: place.device,
        source,
    };
    let mut job = Job::start(
        &started,
        |command| {
            command
                .args(["fault-worker", "--soak", &seed.to_string(), "--truth"])
                .arg(&account);
        },
        &[("RINGSIGHT_WATCHDOG_ACTION", "abort".to_owned())],
    )?;
    let (mut open, mut text) = (2 * job.count(), String::new());
    let mut reports: Vec<Reports> = (0..job.count()).map(|_| Reports::default()).collect();
    let mut said = Vec::new();
    let (mut begin, mut told) = (Instant::now(), false);
    while open > 0 {
        match job.heard.recv_timeout(Duration::from_millis(100)) {
            Ok((index, Heard::Line { line, ns })) => {
                said.extend(reports[index].line(&line, ns));
                if line.starts_with("id ") {
                    (1..job.count()).for_each(|other| job.tell(other, &line));
                } else if line == "fault" {
                    begin = Instant::now();
                }
                text = text + &line + "\n";
            }
            Ok((_, Heard::End)) => open -= 1,
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => break,
        }
        if begin.elapsed() >= time && !told {
            told = true;
            job.tell_all("end");
        }
        if begin.elapsed() > time + LIMIT {
            bail!("the ranks have not ended:\n{text}");
        }
    }
    if let Some(wrong) = job.wait(LIMIT, None) {
        bail!("{wrong}:\n{text}");
    }
    let mut report = judge(&truth::read(&account)?, &said);
    report.seed = seed;
    Ok(report)
}

/// When each rank called and came to each step.
fn times(truth: &[Event]) -> Vec<[(u64, u64); RANKS as usize]> {
    let mut steps = Vec::new();
    for event in truth {
        let (What::Called { step } | What::Arrived { step }) = event.what else {
            continue;
        };
        let at = step as usize;
        if steps.len() <= at {
            steps.resize(at + 1, [(0, u64::MAX); RANKS as usize]);
        }
        let (called, arrived) = &mut steps[at][event.rank as usize];
        match event.what {
            What::Called { .. } => *called = event.ns,
            _ => *arrived = event.ns,
        }
    }
    steps
}

/// Holds what was said against what was true, whether it was meant or came of a busy machine.
fn judge(truth: &[Event], said: &[Said]) -> Report {
    let steps = times(truth);
    let ns = |time: Duration| time.as_nanos() as u64;
    // Who asks does so a little early by the others' clocks.
    let waited = ns(THRESHOLD) * 9 / 10;
    let mut answered = vec![[[false; RANKS as usize]; RANKS as usize]; steps.len()];
    let mut false_verdicts = 0;
    for said in said {
        let late = said.verdict.split("): ").next().unwrap_or_default();
        let late = matches!(late, "NOT_LAUNCHED (late" | "QUEUED_BEHIND_COMPUTE (late");
        let by = said.rank as usize;
        let culprit = first_rank(&said.verdict).map_or(usize::MAX, |rank| rank as usize);
        // One that is said when the next step is long under way is of that.
        let step = steps.iter().rposition(|ranks| {
            let Some((_, arrived)) = ranks.get(culprit) else {
                return false;
            };
            let called = ranks[by].0;
            called > 0
                && called + waited <= said.ns
                && arrived.saturating_sub(called) >= waited
                && said.ns <= arrived.saturating_add(ns(AFTER))
        });
        match step {
            Some(step) if late => answered[step][by][culprit] = true,
            _ => {
                println!("false: {said:?}");
                false_verdicts += 1;
            }
        }
    }
    let (mut long_waits, mut missed) = (0, 0);
    for (step, ranks) in steps.iter().enumerate() {
        // Of several that are late each may be named.
        let Some(last) = (0..ranks.len()).max_by_key(|rank| ranks[*rank].1) else {
            continue;
        };
        for by in (0..ranks.len()).filter(|by| *by != last) {
            // From when it waits itself.
            let waits = ranks[by].0.max(ranks[by].1);
            if ranks[last].1.saturating_sub(waits) >= ns(THRESHOLD + PROMISED) {
                long_waits += 1;
                if !answered[step][by].contains(&true) {
                    println!("missed: rank {by} in step {step} waited for rank {last}");
                    missed += 1;
                }
            }
        }
    }
    Report {
        steps: steps.len(),
        long_waits,
        missed,
        verdicts: said.len(),
        false_verdicts,
        ..Report::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MS: u64 = 1_000_000;

    #[test]
    fn a_verdict_is_true_while_the_rank_is_late_and_a_long_wait_must_have_one() {
        let event = |rank, ms: u64, what| Event {
            rank,
            ns: ms * MS,
            what,
        };
        let mut truth = Vec::new();
        for (rank, called) in [(0, 1000), (1, 1010), (2, 3000), (3, 1020)] {
            truth.push(event(rank, called, What::Called { step: 0 }));
            truth.push(event(rank, called, What::Arrived { step: 0 }));
        }
        let verdict = |rank, ms: u64, text: &str| Said {
            rank,
            ns: ms * MS,
            operation: String::new(),
            verdict: text.to_owned(),
        };
        let right = "NOT_LAUNCHED (late): rank 2 has not launched it";
        let said = [0, 1, 3].map(|rank| verdict(rank, 1400, right));
        let report = judge(&truth, &said);
        assert_eq!(
            (report.long_waits, report.missed, report.false_verdicts),
            (3, 0, 0),
            "{report:?}"
        );
        assert_eq!(judge(&truth, &said[..2]).missed, 1);
        for wrong in [
            verdict(0, 1400, "NOT_LAUNCHED (late): rank 3 has not launched it"),
            verdict(0, 1400, "NOT_LAUNCHED (hang): rank 2 has not launched it"),
            verdict(0, 1100, right),
            verdict(0, 4000, right),
            verdict(2, 1400, right),
        ] {
            assert_eq!(
                judge(&truth, std::slice::from_ref(&wrong)).false_verdicts,
                1,
                "{wrong:?}"
            );
        }
    }
}
