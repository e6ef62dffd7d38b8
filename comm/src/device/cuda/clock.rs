//! A GPU's clock: samples of its timer against the host's clock ([`crate::device::clock`]).
//!
//! A thread per GPU takes a sample: it runs a kernel of one thread for some microseconds (`kernels/cuda/clock.cuh`) and watches its answers. It does so
//! once a second while operations run and a collector reads the process's pages, and more often until it knows something. Otherwise it sleeps.

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

use super::driver::{Kernel, PinnedSlice, call};
use crate::{
    device::{
        Result,
        clock::{ClockSample, Fit},
    },
    observe::{self, now_ns},
};

/// Rounds of a sample. The quickest counts.
const ROUNDS: u16 = 8;
/// How long the kernel waits for the host to ask, nanoseconds.
const PATIENCE: u64 = 500_000;
/// How long the host waits for the kernel to begin, nanoseconds. The GPU may be full, or busy for another process.
const BEGIN: u64 = 50_000_000;
/// How long the host waits for an answer, and for the kernel's end, nanoseconds.
const ANSWER: u64 = 2_000_000;
/// How long the host watches for the kernel's beginning without a pause, nanoseconds. On a GPU with room it begins sooner. A thread that pauses may wake
/// up after the kernel has given up.
const LOOK: u64 = 100_000;
/// Pause between two looks after that. The wait may be long and must not keep a processor busy.
const PAUSE: Duration = Duration::from_micros(20);
/// Time between the first two samples, nanoseconds. It doubles from sample to sample.
const FIRST_GAP: u64 = 1_000_000;
/// The longest time between samples while no sample is of use, nanoseconds. If the host is busy, samples take a tenth of a processor; if the GPU is
/// busy, a thread watches for the kernel, with pauses, for [`BEGIN`] each time.
const UNKNOWN_GAP: u64 = 20_000_000;
/// The longest time between samples otherwise, nanoseconds.
const GAP: u64 = 1_000_000_000;
/// The longest acceptable step of a timer, nanoseconds.
const MOST_STEP: u64 = 10_000_000;
/// The largest acceptable uncertainty of a time, nanoseconds. Beyond it, the time at which the host noticed an event is as good.
const MOST_UNCERTAINTY: u64 = 1_000_000;

/// What a sample is taken with.
pub(super) struct Sampler {
    pub(super) device: c_int,
    pub(super) context: CUcontext,
    pub(super) kernel: CUfunction,
    /// Used for samples only.
    pub(super) stream: CUstream,
    pub(super) page: PinnedSlice<ClockPage>,
}

// SAFETY: any thread may use the handles, and one thread has them.
unsafe impl Send for Sampler {}

/// Shared by the drain thread and the sampling thread.
#[derive(Default)]
struct Shared {
    known: Mutex<Option<DeviceClock>>,
    /// When the next sample is due, `CLOCK_MONOTONIC` nanoseconds; `u64::MAX` while one is being taken.
    due_ns: AtomicU64,
}

/// A GPU's clock, as the drain thread uses it.
pub(super) struct Clock {
    shared: Arc<Shared>,
    /// `None` once its thread has started.
    sampler: Option<Sampler>,
    /// Asks the thread for a sample.
    ask: OnceLock<SyncSender<()>>,
    /// The clock at the last look.
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

    /// Refreshes the known clock, and asks for a sample if one is due and a collector reads kernel events. Called before events are reported.
    pub(super) fn look(&mut self) {
        self.known = *lock(&self.shared.known);
        // Relaxed: the thread stores it after it has stored what it found.
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
            // Without the thread, events get the time at which the host noticed them.
            if thread.is_ok() {
                self.ask.get_or_init(|| sender);
            }
        }
        if let Some(ask) = self.ask.get() {
            // The thread is waiting: no sample is asked for while one is being taken.
            let _ = ask.try_send(());
        }
    }

    /// The host's time when the device's timer was at `timer_ns`, which was before now. Now, if it is not known any better.
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
    /// The thread's loop: takes a sample whenever it is asked.
    fn run(self, shared: &Shared, asked: &Receiver<()>) {
        // SAFETY: retained for the life of the process.
        if unsafe { call!(cuCtxSetCurrent(self.context)) }.is_err() {
            return;
        }
        let (mut fit, mut launch, mut gap) = (Fit::default(), 0, FIRST_GAP);
        while asked.recv().is_ok() {
            // After a fault the GPU refuses all calls.
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

    /// The tightest reading of a sample, with the timer's step; `None` if the GPU was busy.
    fn sample(&self, launch: &mut u32) -> Result<Option<(ClockSample, u64)>> {
        let page = &self.page[0];
        // Acquire: pairs with the kernel's release. The kernel no longer writes to the page.
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
            // Relaxed, here and in `answered`: reading the host's clock waits for earlier loads, and the store comes after it. Any delay only widens the
            // bracket.
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
        // SAFETY: the kernel's argument; the page lives as long as the process.
        unsafe { Kernel::single(self.kernel).launch(self.stream, &mut arguments) }
    }
}

/// Polls until there is something, and returns it with the time; `None` after [`ANSWER`].
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
