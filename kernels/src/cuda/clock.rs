//! Reading the GPU's timer between two readings of the host's clock: what the kernel of `cuda/clock.cuh` is given, and what it
//! answers.

use std::{
    mem::offset_of,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};

/// The kernel's name: one block of one thread.
pub const CLOCK_KERNEL: &std::ffi::CStr = c"ringsight_clock";

/// What the kernel and the host share, in host memory that the GPU reaches; zeroed before the first launch. One launch at a time
/// may use it.
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub struct ClockPage {
    /// The round that the host asks for.
    pub ask: AtomicU32,
    apart0: [u32; 31],
    /// The timer in the upper 48 bits of two words, and in both the round that it was read in.
    answer: [AtomicU64; 2],
    /// The timer's step, nanoseconds; valid once the launch is done.
    pub step: AtomicU64,
    /// The number of the last launch that is over.
    pub done: AtomicU32,
    apart1: [u32; 25],
}

const _: () = assert!(offset_of!(ClockPage, answer) == 128);
const _: () = assert!(offset_of!(ClockPage, step) == 144);
const _: () = assert!(offset_of!(ClockPage, done) == 152);
const _: () = assert!(size_of::<ClockPage>() == 256);

impl ClockPage {
    /// Ready for a launch of which nothing has been seen yet.
    pub fn renew(&self) {
        // Relaxed: the launch orders it before the kernel. No round has this number.
        self.ask.store(0, Ordering::Relaxed);
        for word in &self.answer {
            word.store(LAP, Ordering::Relaxed);
        }
    }

    /// The timer as it was read in this round, if the answer is there.
    #[must_use]
    pub fn answered(&self, round: u16) -> Option<u64> {
        // Relaxed: each word says by itself what it is of.
        let [low, high] = self.answer.each_ref().map(|word| word.load(Ordering::Relaxed));
        let round = u64::from(round);
        (low & LAP == round && high & LAP == round).then_some(low >> 16 | high >> 16 << 48)
    }
}

/// The bits of an answer that say its round.
const LAP: u64 = 0xffff;

/// The kernel's one argument.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ClockArguments {
    /// Where the [`ClockPage`] is.
    pub page: u64,
    /// The launch's number, never 0.
    pub launch: u32,
    /// Rounds, less than 65535. Round 0 is not asked for, and comes before them.
    pub rounds: u32,
    /// How long the kernel waits to be asked for the next, nanoseconds.
    pub patience: u64,
}

const _: () = assert!(size_of::<ClockArguments>() == 24);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_answer_is_taken_when_both_its_words_are_there() {
        let page = ClockPage::default();
        page.renew();
        let timer = 0xfedc_ba98_7654_3210_u64;
        assert_eq!(page.answered(0), None);
        page.answer[0].store(timer << 16 | 3, Ordering::Relaxed);
        assert_eq!(page.answered(3), None);
        page.answer[1].store(timer >> 48 << 16 | 3, Ordering::Relaxed);
        assert_eq!(page.answered(3), Some(timer));
        assert_eq!(page.answered(2), None);
    }
}
