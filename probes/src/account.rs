//! What became of a target's events. The library counts what it emits; its readers count what came, and leave the sum in the
//! pages. So neither events that a carrier swallows without a word stay unnoticed, nor those of a time without a reader.

use ringsight_records::Kind;

/// Events by kind: indexed by [`Kind`]'s number.
pub type ByKind = [u64; Kind::LIMIT];

/// The account of one target.
#[derive(Debug)]
pub(crate) struct Account {
    /// Where it begins; `None` without pages.
    base: Option<Base>,
    /// Records that came, by any carrier, each once.
    received: ByKind,
    /// Of those, records that were in the ring already when this reader came.
    recovered: ByKind,
    /// Events that a carrier or its counter said are lost.
    lost: ByKind,
    /// What the pages were told of.
    published: ByKind,
    /// What was reported as missed.
    missed: ByKind,
}

/// Counters when the ring was armed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Base {
    /// Emitted.
    pub(crate) emitted: ByKind,
    /// Accounted for by earlier readers; what was emitted if there was none.
    pub(crate) taken: ByKind,
}

impl Account {
    pub(crate) fn new() -> Self {
        let none = [0; Kind::LIMIT];
        Self {
            base: None,
            received: none,
            recovered: none,
            lost: none,
            published: none,
            missed: none,
        }
    }

    pub(crate) fn begin(&mut self, base: Base) {
        self.base = Some(base);
    }

    /// A record came; `old` says that it was in the ring when this reader came.
    pub(crate) fn received(&mut self, kind: u8, old: bool) {
        let kind = usize::from(kind) % Kind::LIMIT;
        self.received[kind] += 1;
        self.recovered[kind] += u64::from(old);
    }

    /// A loss was reported.
    pub(crate) fn lost(&mut self, kind: Kind, count: u64) {
        let lost = &mut self.lost[kind as usize];
        *lost = lost.saturating_add(count);
    }

    /// What the pages have not been told of yet: events since the ring was armed that came or are known to be lost.
    pub(crate) fn publish(&mut self) -> ByKind {
        std::array::from_fn(|kind| {
            let now = (self.received[kind] - self.recovered[kind]).saturating_add(self.lost[kind]);
            let news = now.saturating_sub(self.published[kind]);
            self.published[kind] = self.published[kind].saturating_add(news);
            news
        })
    }

    /// Whether all that was emitted until now has come, or is known to be lost.
    pub(crate) fn is_even(&self, emitted: &ByKind) -> bool {
        (0..Kind::LIMIT).all(|kind| {
            let missed = self.missed[kind].max(self.unseen(kind, emitted[kind]));
            self.outstanding(kind, emitted[kind]) <= missed
        })
    }

    /// Emitted before this reader came, and not received: no more than are outstanding, since of events that were under way
    /// at that moment it is not known on which side of it they were counted.
    fn unseen(&self, kind: usize, emitted: u64) -> u64 {
        self.base.map_or(0, |base| {
            base.emitted[kind]
                .saturating_sub(base.taken[kind])
                .saturating_sub(self.recovered[kind])
                .min(self.outstanding(kind, emitted))
        })
    }

    /// Emitted since the last reader, and neither received nor known to be lost.
    fn outstanding(&self, kind: usize, emitted: u64) -> u64 {
        self.base.map_or(0, |base| {
            emitted
                .saturating_sub(base.taken[kind])
                .saturating_sub(self.received[kind])
                .saturating_sub(self.lost[kind])
        })
    }

    /// What happened while nobody watched and has not come. To be asked once what was in the ring at the beginning has been
    /// read; what was told is not told again.
    pub(crate) fn missed(&mut self, emitted: &ByKind) -> Vec<(Kind, u64)> {
        let mut missed = Vec::new();
        for kind in Kind::ALL {
            let at = *kind as usize;
            let news = self.unseen(at, emitted[at]).saturating_sub(self.missed[at]);
            if news > 0 {
                self.missed[at] += news;
                missed.push((*kind, news));
            }
        }
        missed
    }

    /// What was emitted and is nowhere, to be asked at the end: lost without anybody having said so.
    pub(crate) fn unaccounted(&self, emitted: &ByKind) -> Vec<(Kind, u64)> {
        let of = |kind: &Kind| {
            let at = *kind as usize;
            (
                *kind,
                self.outstanding(at, emitted[at]).saturating_sub(self.missed[at]),
            )
        };
        Kind::ALL.iter().map(of).filter(|(_, count)| *count > 0).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIND: Kind = Kind::OpLaunched;

    fn counts(count: u64) -> ByKind {
        let mut counts = [0; Kind::LIMIT];
        counts[KIND as usize] = count;
        counts
    }

    fn account(emitted: u64, taken: u64) -> Account {
        let mut account = Account::new();
        account.begin(Base {
            emitted: counts(emitted),
            taken: counts(taken),
        });
        account
    }

    #[test]
    fn what_no_carrier_delivers_is_lost() {
        let mut account = account(100, 100);
        for _ in 0..7 {
            account.received(KIND as u8, false);
        }
        account.lost(KIND, 2);
        assert!(account.missed(&counts(110)).is_empty());
        assert_eq!(account.unaccounted(&counts(110)), [(KIND, 1)]);
        assert!(account.is_even(&counts(109)) && !account.is_even(&counts(110)));
        assert_eq!((account.publish(), account.publish()), (counts(9), counts(0)));
    }

    #[test]
    fn what_happened_between_two_readers_is_recovered_or_missed() {
        // The last reader had 60 of 100; 25 of the rest were in the ring.
        let mut account = account(100, 60);
        for _ in 0..25 {
            account.received(KIND as u8, true);
        }
        account.received(KIND as u8, false);
        assert!(account.is_even(&counts(101)));
        assert_eq!(account.missed(&counts(101)), [(KIND, 15)]);
        assert!(account.missed(&counts(101)).is_empty(), "told once");
        assert!(account.is_even(&counts(101)) && !account.is_even(&counts(102)));
        assert!(account.unaccounted(&counts(101)).is_empty());
        assert_eq!(
            account.publish(),
            counts(1),
            "the rest was accounted for at the beginning"
        );
    }

    #[test]
    fn what_was_under_way_at_the_beginning_is_not_missed() {
        // Two events were counted, and came into the ring only after this reader had looked.
        let mut account = account(100, 90);
        for old in [true, true, true, true, true, true, true, true, false, false] {
            account.received(KIND as u8, old);
        }
        assert!(account.missed(&counts(100)).is_empty());
        assert!(account.unaccounted(&counts(100)).is_empty());
    }

    #[test]
    fn damaged_counters_are_survived() {
        let mut account = account(5, u64::MAX);
        account.received(KIND as u8, true);
        account.lost(KIND, u64::MAX);
        account.lost(KIND, 1);
        let _ = (account.publish(), account.missed(&counts(3)));
        assert!(account.unaccounted(&counts(u64::MAX)).is_empty());
    }
}
