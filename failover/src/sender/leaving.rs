//! The end of a connection whose receiver leaves first.

use super::{Phase, Sender};
use crate::{Action, Reason, Rules};

impl<R: Rules> Sender<R> {
    /// The receiver ends its communicator, and has `committed` steps. It is the last that comes of it, and may be all that ever tells of
    /// them: where acknowledgements were lost, there is nobody left to agree with. What else is still on its way, over a path, is older.
    pub(super) fn leave(&mut self, committed: u64, out: &mut Vec<Action>) {
        if committed < self.acked || committed > self.posted {
            // As of a switch: it says so when nothing is under way at its end.
            return self.give_up(Reason::Protocol("it left with other steps than were sent"), out);
        }
        self.acked = committed;
        (self.phase, self.held, self.probing) = (Phase::Left, None, false);
        self.timers.clear_all();
    }
}
