//! Keeps a GPU's clock: how its timer stands to the host's clock ([`crate::device::clock`]).
//!
//! A thread for each GPU runs a kernel of one thread for some microseconds (`cuda/clock.cuh` in the kernels) and watches it,
//! once a second while operations run and somebody reads what the process shows, and more often until it knows something. Otherwise it sleeps: nobody else needs the
//! device's times.

use std::{
    ffi::c_int,
    hint,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicU64, Ordering},
        mpsc::{Receiver, SyncSender, sync_channel},
    },
    thread,
    time::Duration,
};

use cudarc::driver::sys::{CUcontext, CUfunction, CUstream};
use ringsight_comm_base::sync::lock;
use ringsight_kernels::cuda::{ClockArguments, ClockPage};
use ringsight_records::{DeviceClock, Kind};

use super::{
    driver::{Kernel, call},
    gpu::Memory,
};
use crate::{
    device::{
        Result,
        clock::{ClockSample, Fit},
    },
    observe::{self, now_ns},
};

/// Rounds of a sample, of which the quickest counts.
const ROUNDS: u16 = 8;
/// How long the kernel waits for the host to ask, nanoseconds.
const PATIENCE: u64 = 500_000;
/// How long the host waits for the kernel to begin: the GPU may be full, or another process's for now.
const BEGIN: u64 = 50_000_000;
/// And for an answer, and for the kernel's end.
const ANSWER: u64 = 2_000_000;
/// How long it looks for the kernel's beginning without a pause: on a GPU that has room for it, it begins sooner. Whoever pauses may be woken when the kernel has
/// lost its patience.
const LOOK: u64 = 100_000;
/// Between two looks for it after that: it may be long until the GPU has room, no reason to keep a processor busy.
const PAUSE: Duration = Duration::from_micros(20);
/// Time between the first two samples, nanoseconds; it doubles from each to the next.
const FIRST_GAP: u64 = 1_000_000;
/// Until it is this, while none was had that is still of use. Where the host has no time for them, they keep a processor busy for a tenth of it; where the GPU has
/// none, a thread looks for it, with pauses, as long as [`BEGIN`] of each.
const UNKNOWN_GAP: u64 = 20_000_000;
/// And this otherwise.
const GAP: u64 = 1_000_000_000;
/// The longest step of a timer, nanoseconds: it is seen to go on.
const MOST_STEP: u64 = 10_000_000;
/// A time that can be further off is not given, nanoseconds: when the host noticed is as good.
const MOST_UNCERTAINTY: u64 = 1_000_000;

/// What samples are taken with.
pub(super) struct Sampler {
    pub(super) device: c_int,
    pub(super) context: CUcontext,
    pub(super) kernel: CUfunction,
    /// Nothing else is in it.
    pub(super) stream: CUstream,
    pub(super) page: Memory<ClockPage>,
}

// SAFETY: the handles may be used by any thread, and one thread has them.
unsafe impl Send for Sampler {}

/// What the thread that drains events and the one that takes samples share.
#[derive(Default)]
struct Shared {
    known: Mutex<Option<DeviceClock>>,
    /// When the next sample is due, `CLOCK_MONOTONIC` nanoseconds; `u64::MAX` while one is being taken.
    due_ns: AtomicU64,
}

/// A GPU's clock, as the thread that drains its events uses it.
pub(super) struct Clock {
    shared: Arc<Shared>,
    /// Until its thread is there.
    sampler: Option<Sampler>,
    /// Asks for a sample.
    ask: OnceLock<SyncSender<()>>,
    /// What is known, as of the last look.
    known: Option<DeviceClock>,
}

impl Clock {
    pub(super) fn new(sampler: Sampler) -> Self {
        Self {
            shared: Arc::default(),
            sampler: Some(sampler),
            ask: OnceLock::new(),
            known: None,
        }
    }

    /// Before events are told: brings what is known up to date, and has a sample taken if one is due and anybody wants it.
    pub(super) fn look(&mut self) {
        self.known = *lock(&self.shared.known);
        // Relaxed: the thread stores it after it has put down what it found.
        if now_ns() < self.shared.due_ns.load(Ordering::Relaxed) || !observe::wants(Kind::KernelCh) {
            return;
        }
        self.shared.due_ns.store(u64::MAX, Ordering::Relaxed);
        if let Some(sampler) = self.sampler.take() {
            let (sender, receiver) = sync_channel(1);
            let shared = self.shared.clone();
            let thread = thread::Builder::new()
                .name(format!("rs-clock-{}", sampler.device))
                .spawn(move || sampler.run(&shared, &receiver));
            // Without it times are those when the host noticed.
            if thread.is_ok() {
                self.ask.get_or_init(|| sender);
            }
        }
        if let Some(ask) = self.ask.get() {
            // It is waiting: none is asked for while one is being taken.
            let _ = ask.try_send(());
        }
    }

    /// When the device's timer was at `timer_ns`, which it was before now; now, if that is not known any better.
    pub(super) fn host_ns(&self, timer_ns: u64) -> u64 {
        let now = now_ns();
        let known = self
            .known
            .as_ref()
            .filter(|clock| clock.uncertainty_at(timer_ns) < MOST_UNCERTAINTY);
        known.map_or(now, |clock| clock.host_ns(timer_ns).min(now))
    }
}

impl Sampler {
    /// Takes a sample whenever it is asked to.
    fn run(self, shared: &Shared, asked: &Receiver<()>) {
        // SAFETY: retained for the life of the process.
        if unsafe { call!(cuCtxSetCurrent(self.context)) }.is_err() {
            return;
        }
        let (mut fit, mut launch, mut gap) = (Fit::default(), 0, FIRST_GAP);
        while asked.recv().is_ok() {
            // A GPU on which something went wrong refuses all calls: there is nothing to be had from it any more.
            let Ok(sample) = self.sample(&mut launch) else {
                return;
            };
            if let Some((sample, step_ns)) = sample {
                fit.add(sample, step_ns);
                *lock(&shared.known) = fit.clock().copied();
                let pages = observe::pages();
                let slot = pages.and_then(|pages| pages.header().device(self.device));
                if let (Some(slot), Some(clock)) = (slot, fit.clock()) {
                    slot.write(clock);
                }
            }
            shared.due_ns.store(now_ns() + gap, Ordering::Relaxed);
            let is_of_use = |clock: &DeviceClock| {
                let age = now_ns().saturating_sub(clock.host_ns);
                clock.uncertainty_at(clock.timer_ns.wrapping_add(age)) < MOST_UNCERTAINTY
            };
            let is_known = fit.clock().is_some_and(is_of_use);
            gap = (2 * gap).min(if is_known { GAP } else { UNKNOWN_GAP });
        }
    }

    /// The tightest of some readings, with the timer's step; `None` if the GPU had no time for it.
    fn sample(&self, launch: &mut u32) -> Result<Option<(ClockSample, u64)>> {
        let page = &self.page[0];
        // Acquire: pairs with the kernel's release; it writes to the page no more.
        let is_over = |launch| page.done.load(Ordering::Acquire) == launch;
        if !is_over(*launch) {
            return Ok(None);
        }
        *launch = launch.wrapping_add(1).max(1);
        page.renew();
        self.launch(*launch)?;
        let since = now_ns();
        while page.answered(0).is_none() {
            let waited = now_ns() - since;
            if waited > BEGIN {
                return Ok(None);
            }
            if waited > LOOK {
                thread::sleep(PAUSE);
            } else {
                hint::spin_loop();
            }
        }
        let mut best: Option<ClockSample> = None;
        for round in 1..=ROUNDS {
            let before_ns = now_ns();
            // Relaxed, here and in `answered`: reading the host's clock waits for earlier loads, and the store comes after
            // it. Whatever takes longer makes the bracket wider.
            page.ask.store(round.into(), Ordering::Relaxed);
            let Some((timer_ns, after_ns)) = spin(|| page.answered(round)) else {
                break;
            };
            let sample = ClockSample {
                before_ns,
                timer_ns,
                after_ns,
            };
            if best.is_none_or(|best| sample.width_ns() < best.width_ns()) {
                best = Some(sample);
            }
        }
        let over = spin(|| is_over(*launch).then_some(())).is_some();
        let step = page.step.load(Ordering::Relaxed);
        Ok(best
            .filter(|_| over && step <= MOST_STEP)
            .map(|sample| (sample, step)))
    }

    fn launch(&self, launch: u32) -> Result<()> {
        let mut arguments = ClockArguments {
            page: self.page.as_ptr() as u64,
            launch,
            rounds: ROUNDS.into(),
            patience: PATIENCE,
        };
        let mut arguments = [std::ptr::from_mut(&mut arguments).cast()];
        // SAFETY: the kernel's one argument; the page lives as long as the process.
        unsafe { Kernel::single(self.kernel).launch(self.stream, &mut arguments) }
    }
}

/// What there is at last, and when it was there; `None` after [`ANSWER`].
fn spin<T>(mut look: impl FnMut() -> Option<T>) -> Option<(T, u64)> {
    let since = now_ns();
    loop {
        let found = look();
        let now = now_ns();
        match found {
            Some(found) => return Some((found, now)),
            None if now - since > ANSWER => return None,
            None => hint::spin_loop(),
        }
    }
}
