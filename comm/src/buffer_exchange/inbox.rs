//! What comes to the thread that maps.

use std::sync::mpsc::{Receiver, Sender, channel};

use super::message::Message;

/// What the thread that maps hears of.
pub(super) enum Event {
    /// A rank's message.
    Message(u32, Message),
    /// This rank has shown something, which is to be looked after.
    Shown,
    /// The communicator ends.
    End,
}

/// Where control messages wait for [`Maps`](super::Maps), whether there will be one or not: others may be ready before this rank is.
pub(crate) struct Inbox {
    pub(super) sender: Sender<Event>,
    pub(super) receiver: Receiver<Event>,
}

/// The end of it that messages go in at.
#[derive(Clone)]
pub(crate) struct Letters(Sender<Event>);

impl Inbox {
    pub(crate) fn new() -> Self {
        let (sender, receiver) = channel();
        Self { sender, receiver }
    }

    pub(crate) fn letters(&self) -> Letters {
        Letters(self.sender.clone())
    }
}

impl Letters {
    /// A control message has come.
    pub(crate) fn control(&self, from: u32, bytes: &[u8]) {
        if let Some(message) = Message::parse(bytes) {
            // Nobody is there where all ranks are of one process, or in the end.
            let _ = self.0.send(Event::Message(from, message));
        }
    }
}
