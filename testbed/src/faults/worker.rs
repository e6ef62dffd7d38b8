//! What each rank of a round does.
//!
//! Standard output:
//! - `id <hex>`: rank 0's unique id;
//! - `fault`: the fault begins; `hold`: a debugger is to begin it;
//! - `launched`: a rank has called the operation;
//! - `failed`: a rank's communicator has failed;
//! - `completed`: a rank's operations are done.
//!
//! Standard input:
//! - `id <hex>`: the unique id, for processes without rank 0;
//! - `turn`: the rank that comes last may come;
//! - `end`: all that was to be said has been said;
//! - `exit`: all ranks have completed.

mod mismatch;

use std::{
    ffi::c_void,
    path::PathBuf,
    sync::atomic::Ordering,
    thread,
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail};
use clap::Args;
use fs_err as fs;

use super::{
    call::{Call, Launched},
    cases::{Action, Fault, Operation, PROMISED, Round, SUCCESS, SYSTEM_ERROR},
    journal::{Journal, What},
    kernels, soak,
    stages::{Stage, Stages, run_members},
};
use crate::{
    nccl::{Communicator, DeviceKind},
    ranks::say,
};

/// Which ranks, and what they do.
#[derive(Args, Debug)]
pub struct Arguments {
    /// Ranks of this process.
    #[arg(long, value_delimiter = ',')]
    members: Vec<u32>,
    /// JSON file with the [`Round`].
    #[arg(long, required_unless_present = "soak")]
    round: Option<PathBuf>,
    /// Soak with this seed instead.
    #[arg(long, conflicts_with = "round")]
    soak: Option<u64>,
    /// File that the ranks append what they know to.
    #[arg(long)]
    truth: PathBuf,
    /// What they run on.
    #[arg(long, value_enum)]
    device: DeviceKind,
}

/// Put on a stream: computes, that is, keeps it busy, until the fault is to end.
unsafe extern "C" fn compute(stages: *mut c_void) {
    // SAFETY: the `Stages` of the process, which outlive its streams.
    unsafe { &*stages.cast::<Stages>() }.wait(Stage::End);
}

/// Put on the victim's stream right before the kernel that is to be stopped.
unsafe extern "C" fn come(stages: *mut c_void) {
    // SAFETY: the `Stages` of the process, which outlive its streams.
    let stages = unsafe { &*stages.cast::<Stages>() };
    // SAFETY: asks for this thread's number.
    let thread = unsafe { libc::gettid() };
    // Relaxed: nothing is handed over but the number.
    stages.kernel_thread.store(thread, Ordering::Relaxed);
}

/// Runs the ranks.
///
/// # Errors
/// The library's where no error is expected.
pub fn run(arguments: &Arguments) -> Result<()> {
    // Streams may refer to it until the process ends.
    let truth: &'static Journal = Box::leak(Box::new(Journal::open(&arguments.truth)?));
    if let Some(seed) = arguments.soak {
        return run_members(&arguments.members, arguments.device, |nccl, id, rank, stages| {
            soak::Member {
                rank,
                stages,
                seed,
                truth,
                on_host: arguments.device == DeviceKind::Host,
            }
            .run(nccl, id)
        });
    }
    let file = arguments.round.as_ref().context("--round is missing")?;
    let text = fs::read_to_string(file)?;
    let round: Round = serde_json::from_str(&text).context("round")?;
    let member = arguments.members[0];
    thread::spawn(move || note_stalls(truth, member));
    run_members(&arguments.members, arguments.device, |nccl, id, rank, stages| {
        nccl.set_device(rank)?;
        let communicator = nccl.communicator(round.ranks, id, rank)?;
        Member {
            round: &round,
            rank,
            truth,
            stages,
        }
        .run(communicator)
    })
}

/// Stalls below this any machine has, and a verdict's time has room for them, however often they come.
const SHORT: Duration = Duration::from_millis(10);

/// Notes each time for how long this process is kept from running when it is to.
fn note_stalls(truth: &Journal, rank: u32) {
    const TURN: Duration = Duration::from_millis(10);
    loop {
        let begin = Instant::now();
        thread::sleep(TURN);
        let stall = begin.elapsed().saturating_sub(TURN);
        if stall >= SHORT {
            let ms = stall.as_millis() as u64;
            // A folder that is gone has no judge.
            let _ = truth.note(rank, What::Stalled { ms });
        }
    }
}

/// One rank.
struct Member<'a> {
    round: &'a Round,
    rank: u32,
    truth: &'a Journal,
    stages: &'static Stages,
}

impl Member<'_> {
    fn is_victim(&self) -> bool {
        self.rank == self.round.victim
    }

    fn note(&self, what: What) -> Result<()> {
        self.truth.note(self.rank, what)
    }

    fn new_call(
        &self,
        communicator: &Communicator<'_>,
        operation: Operation,
        elements: usize,
    ) -> Result<Call> {
        Call::new(communicator, operation, elements, (self.rank, self.round.ranks))
    }

    fn run(&self, communicator: Communicator<'_>) -> Result<()> {
        match self.round.fault {
            Fault::Count | Fault::Order | Fault::Crossed => self.mismatch(communicator),
            Fault::TwoGraphs => self.two_graphs(communicator),
            _ => self.waits(communicator),
        }?;
        self.note(What::Done)
    }

    /// An operation before the fault.
    fn before(&self, number: u32, call: impl FnOnce() -> Result<()>) -> Result<()> {
        let note = |launched| self.note(What::Before { number, launched });
        note(false)?;
        call()?;
        note(true)
    }

    /// The operation has been called.
    fn launched(&self) -> Result<()> {
        self.note(What::Launched)?;
        say("launched")
    }

    /// The victim lets the others come to wait, and begins.
    fn begin(&self) -> Result<()> {
        if self.is_victim() && self.round.fault != Fault::Frozen {
            if self.round.victim_calls_last() {
                self.stages.wait(Stage::Turn);
            } else {
                thread::sleep(Duration::from_millis(self.round.pause_ms));
            }
            if self.round.fault == Fault::Traced {
                // Where only parents may hold a process; other systems do not know what this is.
                // SAFETY: no memory is touched.
                unsafe { libc::prctl(libc::PR_SET_PTRACER, libc::PR_SET_PTRACER_ANY) };
                return say("hold");
            }
            self.note(What::Fault)?;
            say("fault")?;
        }
        Ok(())
    }

    /// All ranks call the same, and one comes late or never.
    fn waits(&self, communicator: Communicator<'_>) -> Result<()> {
        let round = self.round;
        let mut call = match round.leaver() {
            Some(root) => Call::broadcast(&communicator, round.elements, (self.rank, round.ranks), root),
            None => self.new_call(&communicator, round.operation, round.elements),
        }?;
        let launched = Launched::prepare(round.mode, &communicator, || call.call(&communicator))?;
        self.stages.have_graphs(&[&communicator])?;
        let launch = |call: &Call| launched.launch(&communicator, || call.call(&communicator));
        for number in 0..round.before {
            self.before(number, || launch(&call))?;
        }
        communicator.synchronise()?;
        call.fill();
        if round.comes_last() == Some(self.rank) {
            thread::sleep(Duration::from_millis(round.pause_ms));
            self.stages.wait(Stage::Turn);
        }
        self.begin()?;
        if self.is_victim() {
            match round.fault {
                Fault::Withheld => {
                    self.stages.wait(Stage::End);
                    launched.forget(&communicator)?;
                    return communicator.abort();
                }
                Fault::Aborted => {
                    launched.forget(&communicator)?;
                    return communicator.abort();
                }
                // SAFETY: a signal to this thread, which does not go on; all others are soon there, too.
                Fault::Killed => unsafe {
                    libc::raise(libc::SIGKILL);
                },
                // SAFETY: as above.
                Fault::Stopped => unsafe {
                    libc::raise(libc::SIGSTOP);
                },
                Fault::SlowBelow | Fault::SlowAbove | Fault::Unusual | Fault::Left => {
                    thread::sleep(Duration::from_millis(round.late_ms));
                }
                Fault::Traced | Fault::Checkpoint | Fault::Replay | Fault::ReplayQueued => {
                    self.stages.wait(Stage::End);
                }
                // SAFETY: what it refers to is never freed.
                Fault::Computing => unsafe {
                    communicator.host_function(compute, std::ptr::from_ref(self.stages).cast_mut().cast())
                }?,
                Fault::Stuck => communicator.simulate_kernel_timeout()?,
                Fault::Frozen | Fault::Count | Fault::Order | Fault::Crossed | Fault::TwoGraphs => {}
            }
        }
        if round.fault == Fault::Stuck {
            self.stages.wait(Stage::End);
            self.check_state(&communicator)?;
            return communicator.abort();
        }
        if communicator.state()?.0 != SUCCESS {
            // On a busy machine the news of a death may be faster than this rank, which then is in nothing.
            self.note(What::TooLate)?;
            self.fails(&communicator)?;
            launched.forget(&communicator)?;
            return communicator.abort();
        }
        let times = 1 + u32::from(round.fault == Fault::ReplayQueued);
        self.note(What::Called)?;
        let is_frozen = round.fault == Fault::Frozen && self.is_victim();
        if is_frozen {
            // SAFETY: what it refers to is never freed.
            unsafe { communicator.host_function(come, std::ptr::from_ref(self.stages).cast_mut().cast()) }?;
        }
        for _ in 0..times {
            launch(&call)?;
        }
        self.launched()?;
        if is_frozen {
            kernels::await_kernel(&self.stages.kernel_thread)?;
            kernels::hold()?;
            self.note(What::Fault)?;
            say("fault")?;
            self.stages.wait(Stage::End);
            kernels::let_go();
        }
        match round.fault {
            Fault::Withheld | Fault::Aborted | Fault::Killed => {
                if round.fault == Fault::Killed {
                    self.fails(&communicator)?;
                }
                self.stages.wait(Stage::End);
                launched.forget(&communicator)?;
                communicator.abort()
            }
            _ => {
                communicator.synchronise()?;
                let right = call.is_right(times);
                self.completed(&communicator, right)?;
                launched.forget(&communicator)?;
                self.check_state(&communicator)?;
                self.leave(communicator)
            }
        }
    }

    fn completed(&self, communicator: &Communicator<'_>, right: bool) -> Result<()> {
        let (code, _) = communicator.state()?;
        self.note(What::Completed { code, right })?;
        say("completed")
    }

    /// A hang becomes an error where that is asked for, and nothing else does.
    fn check_state(&self, communicator: &Communicator<'_>) -> Result<()> {
        let expectation = self.round.expectation();
        let hang = expectation.promises.iter().any(|promise| promise.class == "hang");
        let says = self.round.expects_of(expectation.by, self.rank);
        let expected = match (self.round.action, hang && says) {
            (Action::Error | Action::Abort, true) => SYSTEM_ERROR,
            _ => SUCCESS,
        };
        let (code, text) = communicator.state()?;
        if code != expected {
            bail!("the communicator's state is {code}, not {expected}: {text}");
        }
        Ok(())
    }

    fn leave(&self, communicator: Communicator<'_>) -> Result<()> {
        if communicator.state()?.0 != SUCCESS {
            // Others may still need this rank's network work, which such a communicator's end does not wait for.
            self.stages.wait(Stage::Exit);
            return communicator.abort();
        }
        if self.round.leaver() == Some(self.rank) && self.round.leaver_aborts() {
            return communicator.abort();
        }
        communicator.destroy()
    }

    /// Waits for the failure of the communicator.
    fn fails(&self, communicator: &Communicator<'_>) -> Result<()> {
        let end = Instant::now() + self.round.expectation().within() + PROMISED;
        while Instant::now() < end {
            let (code, text) = communicator.state()?;
            if code != SUCCESS {
                self.note(What::Failed { code, text })?;
                return say("failed");
            }
            thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    }

    /// Two graphs of one communicator on two streams; the victim launches the first only, until it is told to go on.
    fn two_graphs(&self, communicator: Communicator<'_>) -> Result<()> {
        let round = self.round;
        communicator.beside(|beside| {
            let on = [&communicator, beside];
            let call = || self.new_call(&communicator, round.operation, round.elements);
            let mut calls = [call()?, call()?];
            let graphs = [
                communicator.capture(|| calls[0].call(&communicator))?,
                beside.capture(|| calls[1].call(beside))?,
            ];
            self.stages.have_graphs(&on)?;
            for _ in 0..round.before {
                for (on, graph) in on.iter().zip(&graphs) {
                    on.replay(graph)?;
                }
            }
            for on in on {
                on.synchronise()?;
            }
            for call in &mut calls {
                call.fill();
            }
            self.begin()?;
            self.note(What::Called)?;
            communicator.replay(&graphs[0])?;
            if self.is_victim() {
                self.stages.wait(Stage::End);
            }
            beside.replay(&graphs[1])?;
            for on in on {
                on.synchronise()?;
            }
            let right = calls.iter_mut().all(|call| call.is_right(1));
            self.completed(&communicator, right)?;
            graphs
                .into_iter()
                .try_for_each(|graph| communicator.forget(graph))
        })?;
        self.check_state(&communicator)?;
        self.leave(communicator)
    }
}
