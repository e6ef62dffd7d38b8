//! What happened to connections and when; of each kind the first ones are kept, and the last.

use ringsight_records::{PathCause, PathChange, State};

/// Kinds of what can happen; a record may have a state that is none of them.
const KINDS: usize = 8;
/// Kept of each besides the last one.
const FIRST: usize = 16;

/// A change of a path.
#[derive(Clone, Copy, Debug)]
pub(super) struct Moment {
    pub(super) ns: u64,
    pub(super) state: State,
    pub(super) change: PathChange,
    /// Sent again.
    pub(super) bytes: u64,
}

impl Moment {
    /// Whether somebody should know of it when it happens: a change of the path that is not the way back, which is how it ends, and
    /// the end of all paths.
    pub(super) fn is_told_at_once(&self) -> bool {
        match self.state {
            State::PATH_SWITCHED => self.change.cause != Some(PathCause::Failback),
            State::ABORTED => true,
            _ => false,
        }
    }

    /// That a connection returns is another thing than that it leaves.
    fn kind(&self) -> (u8, bool) {
        (self.state.0, self.change.cause == Some(PathCause::Failback))
    }
}

/// One that is kept: which of all it was, itself, whose.
type Entry<T> = (u64, Moment, T);

#[derive(Clone, Debug)]
struct Kept<T> {
    kind: (u8, bool),
    first: Vec<Entry<T>>,
    last: Option<Entry<T>>,
    left_out: u64,
}

/// All that is kept. A port with many connections, or one that flaps, fills it with breaks and switches; how it went on is there still.
#[derive(Clone, Debug)]
pub(super) struct Moments<T> {
    kinds: Vec<Kept<T>>,
    count: u64,
}

impl<T> Default for Moments<T> {
    fn default() -> Self {
        Self {
            kinds: Vec::new(),
            count: 0,
        }
    }
}

impl<T: Copy> Moments<T> {
    pub(super) fn push(&mut self, moment: Moment, whose: T) {
        self.count += 1;
        let entry = (self.count, moment, whose);
        let kind = moment.kind();
        let Some(kept) = self.kinds.iter_mut().find(|kept| kept.kind == kind) else {
            if self.kinds.len() < KINDS {
                self.kinds.push(Kept {
                    kind,
                    first: vec![entry],
                    last: None,
                    left_out: 0,
                });
            }
            return;
        };
        if kept.first.len() < FIRST {
            kept.first.push(entry);
            return;
        }
        match kept.last {
            // Processes' records do not come in the order of their times.
            Some((_, last, _)) if last.ns > moment.ns => kept.left_out += 1,
            ref mut last => kept.left_out += u64::from(last.replace(entry).is_some()),
        }
    }

    /// In the order of their times, each with how many of its kind before it are left out.
    pub(super) fn in_order(&self) -> impl Iterator<Item = (&Moment, &T, u64)> {
        let mut all: Vec<(&Entry<T>, u64)> = Vec::new();
        for kept in &self.kinds {
            all.extend(kept.first.iter().map(|entry| (entry, 0)));
            all.extend(kept.last.iter().map(|entry| (entry, kept.left_out)));
        }
        all.sort_by_key(|((count, moment, _), _)| (moment.ns, *count));
        all.into_iter()
            .map(|((_, moment, whose), left_out)| (moment, whose, left_out))
    }
}

#[cfg(test)]
mod tests {
    use super::{FIRST, KINDS, Moment, Moments};
    use ringsight_records::{PathChange, State};

    fn moment(ns: u64, state: State) -> Moment {
        Moment {
            ns,
            state,
            change: PathChange::from_value(0),
            bytes: 0,
        }
    }

    #[test]
    fn the_first_and_the_last_of_each_kind_are_kept_in_order() {
        let mut moments = Moments::default();
        for round in 0..100 {
            moments.push(moment(10 * round, State::START), ());
            moments.push(moment(10 * round + 5, State::PATH_RECOVERED), ());
        }
        // Of another process, and earlier.
        moments.push(moment(3, State::START), ());
        let kept: Vec<_> = moments
            .in_order()
            .map(|(moment, (), left_out)| (moment.ns, moment.state, left_out))
            .collect();
        assert_eq!(kept.len(), 2 * (FIRST + 1));
        assert!(kept.is_sorted_by_key(|(ns, ..)| *ns));
        let left_out = 100 - 1 - FIRST as u64;
        assert_eq!(
            kept[2 * FIRST..],
            [
                (990, State::START, left_out + 1),
                (995, State::PATH_RECOVERED, left_out)
            ]
        );
    }

    #[test]
    fn what_no_library_writes_takes_no_room() {
        let mut moments = Moments::default();
        for state in 0..=u8::MAX {
            moments.push(moment(0, State(state)), ());
        }
        assert_eq!(moments.in_order().count(), KINDS);
    }
}
