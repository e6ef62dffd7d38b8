//! Words in host memory that a stream writes in order and the host reads: counters and journals.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering, fence},
};

use ringsight_kernels::cuda::journal::{JOURNAL_SLOTS, JOURNAL_WORDS};

/// A word that the device increments, from 0; see [`Graphs::increment`](super::Graphs::increment).
#[derive(Clone)]
pub struct Counter(Arc<dyn AsRef<AtomicU64> + Send + Sync>);

impl Counter {
    /// In plain memory, for the host device.
    pub(super) fn of_host() -> Self {
        struct Word(AtomicU64);
        impl AsRef<AtomicU64> for Word {
            fn as_ref(&self) -> &AtomicU64 {
                &self.0
            }
        }
        Self::new(Word(AtomicU64::new(0)))
    }

    pub(super) fn new(word: impl AsRef<AtomicU64> + Send + Sync + 'static) -> Self {
        Self(Arc::new(word))
    }

    pub(super) fn word(&self) -> &AtomicU64 {
        (*self.0).as_ref()
    }

    /// The count. Only reads memory.
    #[must_use]
    pub fn value(&self) -> u64 {
        // Acquire: what the device did before it counted is visible.
        self.word().load(Ordering::Acquire)
    }
}

/// A ring of words to which the device appends; see [`Graphs::append`](super::Graphs::append). It keeps the last [`JOURNAL_SLOTS`] words.
#[derive(Clone)]
pub struct Journal(Arc<dyn AsRef<[AtomicU64]> + Send + Sync>);

/// Words were appended faster than they were read, and are lost.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Overrun;

impl Journal {
    /// In plain memory, for the host device.
    pub(super) fn of_host() -> Self {
        struct Words(Box<[AtomicU64]>);
        impl AsRef<[AtomicU64]> for Words {
            fn as_ref(&self) -> &[AtomicU64] {
                &self.0
            }
        }
        Self::new(Words((0..JOURNAL_WORDS).map(|_| AtomicU64::new(0)).collect()))
    }

    /// In [`JOURNAL_WORDS`] words, all 0.
    pub(super) fn new(words: impl AsRef<[AtomicU64]> + Send + Sync + 'static) -> Self {
        debug_assert_eq!(words.as_ref().len(), JOURNAL_WORDS);
        Self(Arc::new(words))
    }

    pub(super) fn words(&self) -> &[AtomicU64] {
        (*self.0).as_ref()
    }

    /// Appends as the kernel does. One caller at a time.
    pub(super) fn append(&self, word: u64) {
        let count = self.words()[0].load(Ordering::Relaxed);
        // Release, both: see `kernels/cuda/journal.cuh`.
        self.slot(count).store(word, Ordering::Release);
        self.words()[0].store(count + 1, Ordering::Release);
    }

    fn slot(&self, number: u64) -> &AtomicU64 {
        &self.words()[1 + (number % JOURNAL_SLOTS as u64) as usize]
    }

    /// How many words have been appended. Only reads memory.
    #[must_use]
    pub fn count(&self) -> u64 {
        // Acquire: what the device did before it appended is visible, and so are the words.
        self.words()[0].load(Ordering::Acquire)
    }

    /// The words from number `from` on, oldest first.
    ///
    /// # Errors
    /// Some of them are overwritten.
    pub fn read(&self, from: u64) -> Result<Vec<u64>, Overrun> {
        let count = self.count();
        if count.saturating_sub(from) > JOURNAL_SLOTS as u64 {
            return Err(Overrun);
        }
        // Acquire: a reused slot comes with a count that says so. The fence keeps that count from being read earlier.
        let words = (from..count)
            .map(|number| self.slot(number).load(Ordering::Acquire))
            .collect();
        fence(Ordering::Acquire);
        // The device writes a slot before it counts.
        if self.words()[0].load(Ordering::Relaxed) >= from + JOURNAL_SLOTS as u64 && count > from {
            return Err(Overrun);
        }
        Ok(words)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_read_once_in_their_order_or_are_known_to_be_lost() {
        let journal = Journal::of_host();
        assert_eq!(journal.read(0), Ok(vec![]));
        (10..13).for_each(|word| journal.append(word));
        assert_eq!(journal.read(0), Ok(vec![10, 11, 12]));
        assert_eq!(journal.read(2), Ok(vec![12]));
        assert_eq!(journal.read(3), Ok(vec![]));
        // Round the ring, as long as it is read in time.
        let mut read = 3;
        for round in 0..3 {
            let more = JOURNAL_SLOTS as u64 - 1;
            (0..more).for_each(|word| journal.append(round * more + word));
            let words = journal.read(read).unwrap();
            assert_eq!(
                words,
                (0..more).map(|word| round * more + word).collect::<Vec<_>>()
            );
            read = journal.count();
        }
        (0..=JOURNAL_SLOTS as u64).for_each(|word| journal.append(word));
        assert_eq!(journal.read(read), Err(Overrun));
        assert_eq!(
            journal.read(journal.count()),
            Ok(vec![]),
            "what comes later is read"
        );
    }
}
