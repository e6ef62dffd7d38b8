//! Messages that go to everyone, from rank to rank.

use std::collections::BTreeSet;

/// Messages that may be awaited; beyond it the first one is given up.
const MAX_AHEAD: usize = 4096;

/// Which of a rank's spread messages have come; over several ways they come several times and in any order.
#[derive(Debug, Default)]
pub(super) struct Seen {
    /// All up to this one.
    through: u32,
    /// Some after it.
    beyond: BTreeSet<u32>,
}

impl Seen {
    /// Whether it is the first time.
    pub(super) fn note(&mut self, number: u32) -> bool {
        if number <= self.through || !self.beyond.insert(number) {
            return false;
        }
        // What is missing for this long went down with whoever had to pass it on.
        if self.beyond.len() > MAX_AHEAD {
            self.through = self.beyond.pop_first().unwrap_or(self.through);
        }
        while self
            .beyond
            .first()
            .is_some_and(|first| *first - 1 == self.through)
        {
            self.beyond.pop_first();
            self.through += 1;
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_new_once_in_whatever_order() {
        let mut seen = Seen::default();
        let new: Vec<bool> = [1, 3, 1, 2, 3, 4, 0, u32::MAX, u32::MAX]
            .map(|number| seen.note(number))
            .to_vec();
        assert_eq!(new, [true, true, false, true, false, true, false, true, false]);
        assert_eq!((seen.through, seen.beyond.len()), (4, 1));
        // A hole that never fills does not grow the memory.
        for number in 6..6 + 2 * MAX_AHEAD as u32 {
            assert!(seen.note(number));
        }
        assert!(seen.beyond.len() <= MAX_AHEAD);
    }
}
