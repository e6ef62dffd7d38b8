//! Fault injection, and whether the watchdog says of each fault what `docs/src/watchdog.md` promises (`cargo xtask faults`).
//!
//! A *case* is a cell of a matrix: a fault, how ranks run, how operations are launched, and the watchdog's source. A *round* is one run of a
//! case with drawn details. The ranks write what happened to them into a file, the journal; the watchdog writes verdicts to the log.
//! A round passes through these files, in this order:
//!
//! | file | owns |
//! |---|---|
//! | `cases` | the faults, the matrix, and what is drawn for a round |
//! | `expectation` | what is promised of a fault: verdicts, failures, and their times |
//! | `journal` | what ranks write down |
//! | `observed` | what came of a round: verdicts read from logs, and the journal |
//! | `premise` | whether the round happened as drawn; if not, it is left out and run again |
//! | `score`, `tally` | one round judged; many rounds summed up, and the report |
//! | `call`, `kernels`, `debugger` | operations with memory; a stopped kernel; a process that holds another |
//! | `stages`, `worker` | the ranks of one process, and what each does |
//! | `job` | the processes of a round, and listening to them |
//! | `soak` | minutes without a fault, in which no verdict may be false |
//!
//! Rounds run on `--jobs` threads, which share a list of what is left. A thread of each worker process only sleeps and notes when the
//! machine did not run it; `premise` reads these notes.

use std::{
    collections::BTreeMap,
    io::Write as _,
    path::PathBuf,
    sync::{Mutex, PoisonError},
};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use fs_err as fs;

mod call;
mod cases;
pub mod debugger;
mod expectation;
mod job;
mod journal;
mod kernels;
mod observed;
mod premise;
mod score;
mod soak;
mod stages;
mod tally;
pub mod worker;

use crate::{nccl::DeviceKind, process, random::fresh_seed, workspace};
use cases::{Case, Round, Source};
use job::Setup;
use score::Score;
use tally::{Report, Tally};

/// Rounds of each case of the whole matrix.
const FULL: u32 = 20;
/// A round that another fault happened in than was meant to is repeated so often.
const REPEATED: u32 = 20;
/// What the short soaks of `cargo xtask test` draw their steps from: early ones are long by themselves, without which a soak has not been one.
pub const SOAKED_SEED: u64 = 83;
/// Minutes of a soak, unless said.
const SOAKED: &str = "10";

/// Which faults, how often, and what to do with the outcome.
#[derive(Args, Clone, Debug)]
pub struct Arguments {
    /// Rounds of each case [default: 1; with --full 20].
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rounds: Option<u32>,
    /// Seed of everything that is drawn; by default another one each time.
    #[arg(long)]
    seed: Option<u64>,
    /// Only cases whose name contains this: FAULT/process|thread/eager|graph/pages|events.
    #[arg(long, value_name = "FILTER")]
    case: Option<String>,
    /// Only cases in which the watchdog knows by this how far operations are; with --soak pages, unless said.
    #[arg(long, value_enum)]
    source: Option<Source>,
    /// The whole matrix.
    #[arg(long)]
    full: bool,
    /// JSON lines, one a case: cases found there with this seed and as many rounds are not run again, others are added.
    #[arg(long, value_name = "FILE")]
    resume: Option<PathBuf>,
    /// Fail if a goal is missed.
    #[arg(long)]
    check: bool,
    /// Rounds at a time.
    #[arg(long, value_name = "N", default_value_t = 2, value_parser = clap::value_parser!(u32).range(1..=64))]
    jobs: u32,
    /// Instead of the matrix: so many minutes in which ranks are slow and pause, and no verdict may be false.
    #[arg(long, value_name = "MINUTES", num_args = 0..=1, default_missing_value = SOAKED,
        conflicts_with_all = ["rounds", "case", "full", "resume"])]
    soak: Option<f64>,
    /// Folder with `libnccl.so.2`, where nothing can be built; the ranks are this program.
    #[arg(long, value_name = "DIR")]
    library: Option<PathBuf>,
    /// What the ranks run on: the library's host device, or GPUs, which ranks beyond their number share.
    #[arg(long, value_enum, default_value_t)]
    device: DeviceKind,
    /// Only list the cases.
    #[arg(long)]
    list: bool,
}

/// Runs the faults; `false` if a goal is missed, with `--check`.
///
/// # Errors
/// If ranks cannot be built or started.
pub fn run(arguments: &Arguments) -> Result<bool> {
    let wanted = |case: &Case| {
        let filter = arguments.case.as_deref();
        filter.is_none_or(|filter| case.to_string().contains(filter))
            && arguments.source.is_none_or(|source| source == case.source)
    };
    let (possible, impossible): (Vec<Case>, Vec<Case>) = Case::all()
        .into_iter()
        .filter(wanted)
        .partition(|case| case.impossible(arguments.device).is_none());
    let impossible: Vec<String> = impossible
        .iter()
        .map(|case| {
            format!(
                "{case}: {}",
                case.impossible(arguments.device).unwrap_or_default()
            )
        })
        .collect();
    if arguments.list {
        possible.iter().for_each(|case| println!("{case}"));
        impossible.iter().for_each(|case| println!("impossible: {case}"));
        return Ok(true);
    }
    if possible.is_empty() {
        bail!(
            "no case is called {}",
            arguments.case.as_deref().unwrap_or_default()
        );
    }
    let seed = arguments.seed.unwrap_or_else(fresh_seed);
    if let Some(minutes) = arguments.soak {
        return soak(arguments, minutes, seed);
    }
    let rounds = arguments.rounds.unwrap_or(if arguments.full { FULL } else { 1 });
    let setup = Setup::of(arguments)?;
    println!(
        "{} cases, {rounds} rounds each, seed {seed}; {} cells are impossible",
        possible.len(),
        impossible.len()
    );
    let mut done = resumed(arguments, seed, rounds)?;
    let folder = &setup.folder;
    let open: Vec<Case> = possible
        .iter()
        .filter(|case| !done.contains_key(&case.to_string()))
        .copied()
        .collect();
    let keep = |tally: &Tally| -> Result<()> {
        let Some(file) = &arguments.resume else {
            return Ok(());
        };
        let mut file = fs::OpenOptions::new().create(true).append(true).open(file)?;
        Ok(writeln!(file, "{}", serde_json::to_string(tally)?)?)
    };
    let matrix = Matrix {
        setup: &setup,
        seed,
        rounds,
    };
    for tally in matrix.run(&open, arguments.jobs, keep)? {
        done.insert(tally.case.clone(), tally);
    }
    let tallies: Vec<Tally> = possible
        .iter()
        .filter_map(|case| done.remove(&case.to_string()))
        .collect();
    tally::print(&tallies);
    for cell in &impossible {
        println!("impossible: {cell}");
    }
    let report = Report::of(seed, &tallies, impossible);
    if report.wrong.is_empty() {
        let _ = fs::remove_dir_all(folder);
    } else {
        println!("what the ranks wrote is in {}", folder.display());
    }
    println!("{}", serde_json::to_string(&report)?);
    Ok(report.ok || !arguments.check)
}

fn soak(arguments: &Arguments, minutes: f64, seed: u64) -> Result<bool> {
    if !(minutes > 0.0 && minutes < 1e4) {
        bail!("--soak {minutes}: a number of minutes");
    }
    let setup = Setup::of(arguments)?;
    println!("{minutes} minutes, seed {seed}");
    let source = arguments.source.unwrap_or(Source::Pages);
    let report = soak::run(&setup, minutes, seed, source)?;
    if report.ok {
        let _ = fs::remove_dir_all(&setup.folder);
    } else {
        println!("what the ranks wrote is in {}", setup.folder.display());
    }
    println!("{}", serde_json::to_string(&report)?);
    Ok(report.ok || !arguments.check)
}

/// The cases that a file has already, by name.
fn resumed(arguments: &Arguments, seed: u64, rounds: u32) -> Result<BTreeMap<String, Tally>> {
    let Some(file) = arguments.resume.as_ref().filter(|file| file.exists()) else {
        return Ok(BTreeMap::new());
    };
    let text = fs::read_to_string(file)?;
    let mut done = BTreeMap::new();
    for line in text.lines() {
        // A run that was cut off may have left part of a line.
        let Ok(tally) = serde_json::from_str::<Tally>(line) else {
            continue;
        };
        if (tally.seed, tally.rounds) == (seed, rounds) {
            done.insert(tally.case.clone(), tally);
        }
    }
    println!("{} cases are in {}", done.len(), file.display());
    Ok(done)
}

impl Setup {
    /// Builds them, unless the library is given.
    fn of(arguments: &Arguments) -> Result<Self> {
        let own = format!("faults-{}", std::process::id());
        if let Some(library) = &arguments.library {
            let file = library.join("libnccl.so.2");
            if !file.is_file() {
                bail!("there is no {}", file.display());
            }
            return Ok(Self {
                xtask: process::own_executable()?,
                library: fs::canonicalize(library)?,
                device: arguments.device,
                folder: std::env::temp_dir().join(own),
            });
        }
        let artifacts = workspace::build_job()?;
        Ok(Self {
            xtask: artifacts.xtask,
            library: artifacts.library_folder,
            device: arguments.device,
            folder: artifacts.target.join(own),
        })
    }
}

struct Matrix<'a> {
    setup: &'a Setup,
    seed: u64,
    rounds: u32,
}

impl Matrix<'_> {
    /// Runs the rounds of all cases, several at a time; `keep` is given each case when it is done.
    fn run(
        &self,
        cases: &[Case],
        jobs: u32,
        keep: impl Fn(&Tally) -> Result<()> + Sync,
    ) -> Result<Vec<Tally>> {
        let next = Mutex::new(0..cases.len() * self.rounds as usize);
        let scores: Mutex<Vec<Vec<(u32, Score)>>> = Mutex::new(vec![Vec::new(); cases.len()]);
        let tallies = Mutex::new(Vec::new());
        let work = || -> Result<()> {
            loop {
                let Some(index) = lock(&next).next() else {
                    return Ok(());
                };
                let (at, number) = (index / self.rounds as usize, index as u32 % self.rounds);
                let score = self.round(&cases[at], number)?;
                let mut scores = lock(&scores);
                scores[at].push((number, score));
                if scores[at].len() == self.rounds as usize {
                    let mut of_case = std::mem::take(&mut scores[at]);
                    drop(scores);
                    of_case.sort_by_key(|(number, _)| *number);
                    let of_case: Vec<Score> = of_case.into_iter().map(|(_, score)| score).collect();
                    let promised = Round::draw(&cases[at], self.setup.device, self.seed, 0)
                        .expectation()
                        .within();
                    let tally = Tally::of(cases[at].to_string(), self.seed, promised, &of_case);
                    let mut tallies = lock(&tallies);
                    keep(&tally)?;
                    tallies.push(tally);
                    let last = &tallies[tallies.len() - 1];
                    println!(
                        "{:>3} of {}: {}: class {}, culprit {}, in time {} of {}, {} false",
                        tallies.len(),
                        cases.len(),
                        last.case,
                        last.class,
                        last.culprit,
                        last.in_time,
                        last.rounds,
                        last.false_verdicts
                    );
                }
            }
        };
        process::on_threads(0..jobs, |_| work())?;
        Ok(tallies.into_inner().unwrap_or_else(PoisonError::into_inner))
    }

    fn round(&self, case: &Case, number: u32) -> Result<Score> {
        let round = Round::draw(case, self.setup.device, self.seed, number);
        let folder = self
            .setup
            .folder
            .join(format!("{}-{number}", case.to_string().replace('/', "-")));
        let mut left_out = BTreeMap::new();
        for _ in 0..REPEATED {
            let observed = job::run(&round, case.ranks, &folder, self.setup)
                .with_context(|| format!("{case}, round {number}, seed {}", self.seed))?;
            let score = match score::judge(&round, &observed) {
                Ok(score) => Score { left_out, ..score },
                Err(reason) => {
                    *left_out.entry(reason).or_default() += 1;
                    println!(
                        "{case}, round {number}: left out ({reason}; not run for {:?}): {:?}",
                        observed.stalled, observed.verdicts
                    );
                    continue;
                }
            };
            if score.problems.is_empty() {
                let _ = fs::remove_dir_all(&folder);
            } else {
                fs::write(folder.join("log"), &observed.text)?;
            }
            return Ok(score);
        }
        bail!("{case}, round {number}: the machine is too busy: left out {REPEATED} times, {left_out:?}")
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
