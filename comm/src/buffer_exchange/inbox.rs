//! Events for the thread that imports.

use std::sync::{
    Arc,
    atomic::{AtomicUsize, Ordering},
    mpsc::{Receiver, Sender, channel},
};

use super::message::Message;

/// Bytes of one rank's messages that are kept at a time, until its buffers are imported or it takes them back. An export takes some hundred
/// bytes, one of VMM chunks 8 for each chunk.
const MAX_KEPT: usize = 4 << 20;
/// What a message takes besides its bytes, about.
const OVERHEAD: usize = 128;
/// Ranks that may send: those that may be in a communicator whose ranks import from each other.
const RANKS: usize = 8;

/// An event for the thread that imports.
pub(super) enum Event {
    /// A rank's message.
    Message(u32, Message, Kept),
    /// This rank has exported a buffer, which is to be looked after.
    Exported,
    /// The communicator ends.
    End,
}

/// Control messages that wait for the [`BufferExchange`](super::BufferExchange), whether there will be one or not: other ranks may be ready before
/// this one is.
pub(crate) struct Inbox {
    pub(super) sender: Sender<Event>,
    pub(super) receiver: Receiver<Event>,
}

/// The sending end of an [`Inbox`].
#[derive(Clone)]
pub(crate) struct InboxSender {
    sender: Sender<Event>,
    /// By rank, the bytes of its messages that are kept.
    kept: Arc<[AtomicUsize; RANKS]>,
}

/// A message counts for its rank while this lives.
pub(super) struct Kept {
    from: usize,
    bytes: usize,
    kept: Arc<[AtomicUsize; RANKS]>,
}

impl Drop for Kept {
    fn drop(&mut self) {
        // Relaxed, as in `control`: a count that orders nothing.
        self.kept[self.from].fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

impl Inbox {
    /// Empty.
    pub(crate) fn new() -> Self {
        let (sender, receiver) = channel();
        Self { sender, receiver }
    }

    pub(crate) fn sender(&self) -> InboxSender {
        InboxSender {
            sender: self.sender.clone(),
            kept: Arc::default(),
        }
    }
}

impl InboxSender {
    /// A control message has come. One of a rank that has too many is lost: its buffers are reached by way of slots then.
    pub(crate) fn control(&self, from: u32, bytes: &[u8]) {
        let Some(count) = self.kept.get(from as usize) else {
            return;
        };
        let Some(message) = Message::parse(bytes) else {
            return;
        };
        let kept = Kept {
            from: from as usize,
            bytes: bytes.len() + OVERHEAD,
            kept: Arc::clone(&self.kept),
        };
        // Relaxed: one thread brings all messages.
        if count.fetch_add(kept.bytes, Ordering::Relaxed) + kept.bytes <= MAX_KEPT {
            // Nobody is there where all ranks are of one process, or in the end.
            let _ = self.sender.send(Event::Message(from, message, kept));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn message(number: u32) -> Vec<u8> {
        let (number, generation) = (number, 1);
        Message::Withdraw { number, generation }.encode()
    }

    #[test]
    fn messages_that_nobody_takes_are_bounded_for_each_rank() {
        let inbox = Inbox::new();
        let sender = inbox.sender();
        let count = || sender.kept.each_ref().map(|bytes| bytes.load(Ordering::Relaxed));
        for _ in 0..2 * MAX_KEPT / OVERHEAD {
            sender.control(3, &message(7));
        }
        let held = count()[3];
        assert!((MAX_KEPT - 1024..=MAX_KEPT).contains(&held), "{held}");
        // Another rank has its own share, and one that cannot be there has none.
        for from in [4, RANKS as u32, u32::MAX] {
            sender.control(from, &message(7));
        }
        let kept: Vec<_> = inbox.receiver.try_iter().collect();
        let of = |rank| {
            let is_of = |event: &&Event| matches!(event, Event::Message(from, ..) if *from == rank);
            kept.iter().filter(is_of).count()
        };
        let bytes = OVERHEAD + message(7).len();
        assert_eq!((of(3), of(4), kept.len()), (MAX_KEPT / bytes, 1, of(3) + 1));
        // What is dealt with makes room.
        drop(kept);
        assert_eq!(count(), [0; RANKS]);
        sender.control(3, &message(7));
        assert_eq!(inbox.receiver.try_iter().count(), 1);
    }
}
