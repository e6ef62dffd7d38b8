//! Events for the thread that imports.

use std::sync::mpsc::{Receiver, Sender, channel};

use super::message::Message;

/// An event for the thread that imports.
pub(super) enum Event {
    /// A rank's message.
    Message(u32, Message),
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
pub(crate) struct InboxSender(Sender<Event>);

impl Inbox {
    /// Empty.
    pub(crate) fn new() -> Self {
        let (sender, receiver) = channel();
        Self { sender, receiver }
    }

    pub(crate) fn sender(&self) -> InboxSender {
        InboxSender(self.sender.clone())
    }
}

impl InboxSender {
    /// A control message has come.
    pub(crate) fn control(&self, from: u32, bytes: &[u8]) {
        if let Some(message) = Message::parse(bytes) {
            // Nobody is there where all ranks are of one process, or in the end.
            let _ = self.0.send(Event::Message(from, message));
        }
    }
}
