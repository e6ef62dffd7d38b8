//! The event ring: kernels write when a channel began and ended an operation, and the host reads it.
//!
//! One ring serves all launches of a GPU. A kernel takes a ticket and writes the entry of that number over the oldest one. It never waits for
//! the host. Each of an entry's four words carries the ticket's lap in its low 16 bits (1..=65535). So a reader knows from the words alone
//! whether they belong together, in whatever order they become visible:
//!
//! | word | bits 63..32 | 31..16 |
//! |---|---|---|
//! | 0 | value, bits 47..16 | value, bits 15..0 |
//! | 1 | operation | kind << 8, channel |
//! | 2 | launch | value, bits 63..48 |
//! | 3 | replay | 0 |
//!
//! The value is the GPU's time in nanoseconds, or another rank's tag ([`EventKind::Mismatch`]).

use std::sync::atomic::{AtomicU64, Ordering, fence};

/// One entry as it lies in memory.
#[derive(Debug, Default)]
#[repr(C, align(32))]
pub struct Entry([AtomicU64; 4]);

const _: () = assert!(size_of::<Entry>() == 32);

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// The channel's first work of the operation begins.
    Started,
    /// Its last work is done.
    Stopped,
    /// Its works were given up.
    Aborted,
    /// A slot with another operation's tag arrived.
    Mismatch,
}

/// One event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// What happened.
    pub kind: EventKind,
    /// Launch number.
    pub launch: u32,
    /// Operation number.
    pub op: u32,
    /// Replay; 0 for a launch that runs once.
    pub replay: u32,
    /// Channel number.
    pub channel: u8,
    /// GPU time in nanoseconds; for a mismatch the other tag.
    pub value: u64,
}

/// The reader.
#[derive(Debug)]
pub struct Ring<'a> {
    entries: &'a [Entry],
    /// Ticket of the next event.
    next: u64,
    lost: u64,
}

/// Kind of an entry whose ticket was taken early and returned: nothing happened.
const NOTHING: u64 = 5;

/// Laps count from 1 to this and start again at 1. Memory that was never written has lap 0.
const LAPS: u64 = 0xffff;

impl<'a> Ring<'a> {
    /// A reader of entries that are zero and whose ticket is 0. Their number must be a power of two.
    #[must_use]
    pub fn new(entries: &'a [Entry]) -> Self {
        debug_assert!(entries.len().is_power_of_two());
        Self {
            entries,
            next: 0,
            lost: 0,
        }
    }

    /// Events that were overwritten before they were read.
    #[must_use]
    pub fn lost(&self) -> u64 {
        self.lost
    }

    /// The oldest unread event, if all its words are there.
    pub fn next_event(&mut self) -> Option<Event> {
        loop {
            let capacity = self.entries.len() as u64;
            let index = (self.next % capacity) as usize;
            // Relaxed: the laps say which words belong together. The fence keeps the caller's use of the event behind the loads.
            let words = self.entries[index]
                .0
                .each_ref()
                .map(|word| word.load(Ordering::Relaxed));
            fence(Ordering::Acquire);
            let expected = lap(self.next, capacity);
            let laps = words.map(|word| word & LAPS);
            if laps.iter().all(|found| *found == expected) {
                self.next += 1;
                if words[1] >> 24 & 0xff == NOTHING {
                    continue;
                }
                match Event::decode(words) {
                    Some(event) => return Some(event),
                    // No kernel writes such an entry.
                    None => {
                        self.lost += 1;
                        continue;
                    }
                }
            }
            // How many laps the writers are ahead. Writers that are behind, or have written nothing, appear many laps ahead.
            let ahead = laps
                .iter()
                .filter(|found| **found != 0)
                .map(|found| (found + LAPS - expected) % LAPS)
                .filter(|ahead| *ahead < LAPS / 2)
                .max()
                .unwrap_or(0);
            if ahead == 0 {
                return None;
            }
            // The rest of the previous lap may still be intact, but it is overwritten next.
            self.next += ahead * capacity;
            self.lost += ahead * capacity;
        }
    }
}

fn lap(ticket: u64, capacity: u64) -> u64 {
    ticket / capacity % LAPS + 1
}

impl Event {
    fn decode(words: [u64; 4]) -> Option<Self> {
        let kind = match words[1] >> 24 & 0xff {
            1 => EventKind::Started,
            2 => EventKind::Stopped,
            3 => EventKind::Aborted,
            4 => EventKind::Mismatch,
            _ => return None,
        };
        Some(Self {
            kind,
            launch: (words[2] >> 32) as u32,
            op: (words[1] >> 32) as u32,
            replay: (words[3] >> 32) as u32,
            channel: (words[1] >> 16) as u8,
            value: words[0] >> 16 | (words[2] >> 16 & 0xffff) << 48,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Writes as `Report::event_at` in `cuda/report.cuh`.
    fn write(entries: &[Entry], ticket: u64, event: &Event, words: std::ops::Range<usize>) {
        let lap = lap(ticket, entries.len() as u64);
        let kind = match event.kind {
            EventKind::Started => 1,
            EventKind::Stopped => 2,
            EventKind::Aborted => 3,
            EventKind::Mismatch => 4,
        };
        let all = [
            event.value << 16 | lap,
            u64::from(event.op) << 32 | kind << 24 | u64::from(event.channel) << 16 | lap,
            u64::from(event.launch) << 32 | event.value >> 48 << 16 | lap,
            u64::from(event.replay) << 32 | lap,
        ];
        let entry = &entries[ticket as usize % entries.len()];
        for word in words {
            entry.0[word].store(all[word], Ordering::Relaxed);
        }
    }

    fn event(number: u64) -> Event {
        Event {
            kind: [
                EventKind::Started,
                EventKind::Stopped,
                EventKind::Aborted,
                EventKind::Mismatch,
            ][number as usize % 4],
            launch: number as u32 ^ 0xdead_beef,
            op: u32::MAX - number as u32,
            replay: number as u32 * 3,
            channel: number as u8,
            value: u64::MAX - number * 0x1_0001_0001,
        }
    }

    fn entries(count: usize) -> Vec<Entry> {
        (0..count).map(|_| Entry::default()).collect()
    }

    #[test]
    fn events_are_read_in_order_and_only_when_whole() {
        let entries = entries(4);
        let mut ring = Ring::new(&entries);
        for ticket in 0..300_000 {
            assert_eq!(ring.next_event(), None);
            write(&entries, ticket, &event(ticket), 0..3);
            assert_eq!(ring.next_event(), None, "a word of {ticket} is missing");
            write(&entries, ticket, &event(ticket), 3..4);
            assert_eq!(ring.next_event(), Some(event(ticket)));
        }
        assert_eq!(ring.lost(), 0);
    }

    #[test]
    fn a_place_that_was_given_back_is_passed_over() {
        let entries = entries(4);
        let mut ring = Ring::new(&entries);
        for ticket in 0..20 {
            // Both tickets were taken together, and the first was returned.
            write(&entries, 2 * ticket + 1, &event(ticket), 0..4);
            assert_eq!(ring.next_event(), None, "its predecessor is not there yet");
            let place = &entries[2 * ticket as usize % entries.len()];
            let lap = lap(2 * ticket, entries.len() as u64);
            for word in &place.0 {
                word.store(NOTHING << 24 | lap, Ordering::Relaxed);
            }
            assert_eq!(ring.next_event(), Some(event(ticket)));
        }
        assert_eq!(ring.lost(), 0);
    }

    proptest! {
        #[test]
        fn what_is_written_over_is_counted(bursts in prop::collection::vec(0_u64..60, 1..20)) {
            let entries = entries(8);
            let mut ring = Ring::new(&entries);
            let (mut written, mut read) = (0, 0);
            for burst in bursts {
                for _ in 0..burst {
                    write(&entries, written, &event(written), 0..4);
                    written += 1;
                }
                let mut last = None;
                while let Some(found) = ring.next_event() {
                    last = Some(found);
                    read += 1;
                    // Every event was written, and none comes twice or out of order.
                    prop_assert_eq!(found, event(read + ring.lost() - 1));
                }
                if burst > 0 {
                    prop_assert_eq!(last, Some(event(written - 1)));
                }
                prop_assert_eq!(read + ring.lost(), written);
            }
        }
    }
}
