//! Reading the GPU's timer between two readings of the host's clock: argument and answer of the kernel of `cuda/clock.cuh`.
//!
//! The host asks in rounds. It reads its own clock before it asks and after it has the answer, so the timer was read between the two.

use std::{
    mem::offset_of,
    sync::atomic::{AtomicU32, AtomicU64, Ordering},
};

/// Name of the kernel: one block of one thread.
pub const CLOCK_KERNEL: &std::ffi::CStr = c"ringsight_clock";

/// Words that kernel and host share, in host memory that the GPU reaches. Zeroed before the first launch; one launch at a time uses it.
#[derive(Debug, Default)]
#[repr(C, align(128))]
pub struct ClockPage {
    /// The host writes: the round that it asks for.
    pub ask: AtomicU32,
    apart0: [u32; 31],
    /// The kernel writes: 48 bits of the timer in the upper bits of each word, and the round in the low 16 bits of both.
    answer: [AtomicU64; 2],
    /// The timer's step, nanoseconds; valid once the launch is done.
    pub step: AtomicU64,
    /// Number of the last finished launch.
    pub done: AtomicU32,
    apart1: [u32; 25],
}

const _: () = assert!(offset_of!(ClockPage, answer) == 128);
const _: () = assert!(offset_of!(ClockPage, step) == 144);
const _: () = assert!(offset_of!(ClockPage, done) == 152);
const _: () = assert!(size_of::<ClockPage>() == 256);

impl ClockPage {
    /// Prepares the page for a launch.
    pub fn renew(&self) {
        // Relaxed: the launch orders it before the kernel. No round has this number.
        self.ask.store(0, Ordering::Relaxed);
        for word in &self.answer {
            word.store(LAP, Ordering::Relaxed);
        }
    }

    /// The timer as read in this round, if both words of the answer are there.
    #[must_use]
    pub fn answered(&self, round: u16) -> Option<u64> {
        // Relaxed: each word names its round.
        let [low, high] = self.answer.each_ref().map(|word| word.load(Ordering::Relaxed));
        let round = u64::from(round);
        (low & LAP == round && high & LAP == round).then_some(low >> 16 | high >> 16 << 48)
    }
}

/// The bits of an answer that hold its round.
const LAP: u64 = 0xffff;

/// The kernel's argument.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ClockArguments {
    /// Address of the [`ClockPage`].
    pub page: u64,
    /// Launch number, never 0.
    pub launch: u32,
    /// Number of rounds, less than 65535. A round 0, which the host does not ask for, comes before them.
    pub rounds: u32,
    /// How long the kernel waits for the host to ask, nanoseconds.
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
