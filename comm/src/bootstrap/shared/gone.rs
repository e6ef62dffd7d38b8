//! Ranks that are not there any more, and which waits end for their sake.

use std::{
    collections::BTreeMap,
    time::{Duration, Instant},
};

use super::super::frame::Frame;

/// How long the reason why a rank cannot be reached may take to arrive by way of others.
pub(super) const GRACE: Duration = Duration::from_millis(500);
/// How long a wait that needs all ranks goes on after one has left: what it said before may still be under way.
const LEFT_GRACE: Duration = Duration::from_secs(2);

/// Why a rank is gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum How {
    /// Its process died or its connection broke.
    Died,
    /// It said goodbye, or is said to have.
    Left,
    /// It cannot be reached, and nobody has said why yet.
    Unreachable,
}

/// A rank that is not there any more.
pub(super) struct Gone {
    pub(super) how: How,
    /// Its own goodbye has come, behind its messages.
    pub(super) direct: bool,
    pub(super) since: Instant,
    pub(super) text: String,
    /// Everyone has been told.
    pub(super) told: bool,
}

impl Gone {
    /// From now on; nobody has been told.
    pub(super) fn new(how: How, text: String) -> Self {
        Self {
            how,
            direct: false,
            since: Instant::now(),
            text,
            told: false,
        }
    }

    pub(super) fn frame(&self, rank: u32) -> Frame {
        Frame::Gone {
            rank,
            died: self.how == How::Died,
            text: self.text.clone(),
        }
    }
}

/// The rank for whose sake a wait for `peer` is in vain, if one is: nothing more can come from `peer` itself, or one
/// that is needed died, or has left for longer than its last messages could take. Of several, one that died; then
/// one over which others have given up, since they left for its sake.
pub(super) fn missing(ranks: &BTreeMap<u32, Gone>, peer: u32, needs: Option<&[u32]>) -> Option<u32> {
    let needed = || {
        let is_needed = move |rank: u32| needs.is_none_or(|needs| needs.contains(&rank));
        ranks
            .iter()
            .map(|(rank, gone)| (*rank, gone))
            .filter(move |(rank, _)| is_needed(*rank))
    };
    let end = |(rank, gone): &(u32, &Gone)| {
        let ends = match gone.how {
            How::Died => true,
            How::Left if *rank == peer && gone.direct => true,
            How::Left => gone.since.elapsed() >= LEFT_GRACE,
            How::Unreachable => *rank == peer && gone.since.elapsed() >= GRACE,
        };
        ends.then_some(*rank)
    };
    let found = needed().find_map(|gone| end(&gone))?;
    let died = needed().find(|(_, gone)| gone.how == How::Died);
    let blamed = needed().find(|(_, gone)| gone.how == How::Left && !gone.direct);
    Some(died.or(blamed).map_or(found, |(rank, _)| rank))
}
