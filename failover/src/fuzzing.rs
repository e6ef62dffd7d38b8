//! The fuzz target: both ends with a peer that sends any message at any time, and ports that change at random.
//!
//! The [model](crate) shows that two correct ends reach a correct result. A peer may be another version, or broken. Then an end may
//! give up, but it must not panic, revoke what it has reported, or exceed its slots and credits.

use std::{sync::Arc, time::Duration};

use crate::{
    links::{Link, PathSet, Status, Work},
    message::{Address, MESSAGE_BYTES, Message},
    protocol::{Action, Event, Protocol},
    receiver::Receiver,
    rules::Sound,
    sender::Sender,
    settings::Settings,
};

const SLOTS: u64 = 4;
const PATHS: usize = 2;
/// Maximum number of actions that follow from one event. More would be an endless loop.
const MAX_ACTIONS: u32 = 200;

/// Numbers from the fuzzer's bytes; 0 once they are used up.
struct Bytes<'a>(&'a [u8]);

impl Bytes<'_> {
    fn next(&mut self) -> Option<u8> {
        let (first, rest) = self.0.split_first()?;
        self.0 = rest;
        Some(*first)
    }

    fn number(&mut self, below: u8) -> u8 {
        self.next().unwrap_or(0) % below
    }

    /// Few values, so that some of them are valid; one path too many.
    fn link(&mut self) -> Link {
        Link {
            path: self.number(PATHS as u8 + 1),
            generation: u32::from(self.number(4)),
        }
    }

    fn message(&mut self) -> Option<Message> {
        let epoch = u32::from(self.number(4));
        let link = self.link();
        let address = Address::default();
        let generations = [epoch, link.generation, 0, 0];
        Some(match self.number(11) {
            0 => Message::Broken { epoch, generations },
            1 => Message::BrokenAck { generations },
            2 => Message::Switch {
                epoch,
                link,
                committed: self.number(16).into(),
                granted: self.number(24).into(),
            },
            3 => Message::Switched { epoch },
            4 => Message::Offer { link, address },
            5 => Message::Accept { link, address },
            6 => Message::GaveUp,
            8 => Message::Hold { epoch, link },
            9 => Message::Drained {
                epoch,
                posted: self.number(16).into(),
            },
            10 => Message::Left {
                committed: self.number(16).into(),
            },
            _ => {
                let (bytes, rest) = self.0.split_at_checked(MESSAGE_BYTES)?;
                self.0 = rest;
                parse(bytes)?
            }
        })
    }

    /// An event that may happen in any state.
    fn event(&mut self) -> Option<Event> {
        let path = self.number(PATHS as u8 + 1);
        let link = self.link();
        Some(match self.number(8) {
            0 => Event::PortDown { path },
            1 => Event::PortUp { path },
            2 => Event::Suspected { path },
            3 => Event::Condemned { path },
            4 => Event::Completed {
                link,
                work: match self.number(4) {
                    0 => Work::Probe,
                    1 => Work::Credit(self.number(24).into()),
                    2 => Work::Message,
                    _ => Work::Step(self.number(16).into()),
                },
                status: Status::from_verbs(self.number(24).into()),
            },
            5 => Event::Arrived {
                link,
                immediate: self.number(16).into(),
            },
            6 => Event::Granted {
                steps: self.number(24).into(),
            },
            _ => Event::Failed { link },
        })
    }
}

/// Parses a message, and checks that it is encoded as it was.
fn parse(bytes: &[u8]) -> Option<Message> {
    let message = Message::parse(bytes)?;
    assert_eq!(message.encode()[..], *bytes);
    Some(message)
}

/// The event by which a driver answers an action that succeeds.
fn answer(action: Action) -> Option<Event> {
    match action {
        Action::Fence { link } => Some(Event::Fenced { link, sure: true }),
        Action::Rebuild { link } => Some(Event::Rebuilt {
            link,
            address: Address::default(),
        }),
        Action::Connect { link, .. } => Some(Event::Connected { link }),
        _ => None,
    }
}

macro_rules! settle {
    ($end:expr, $now:expr, $actions:expr) => {
        let mut done = 0;
        while let Some(action) = $actions.pop() {
            done += 1;
            assert!(done < MAX_ACTIONS, "actions without end");
            if let Some(event) = answer(action) {
                $end.handle($now, event, &mut $actions);
            }
        }
    };
}

/// Runs both ends on the fuzzer's bytes.
///
/// # Panics
/// When an end violates an invariant.
pub fn ends(data: &[u8]) {
    let mut bytes = Bytes(data);
    let settings = Arc::new(Settings::default());
    let ready = match bytes.number(2) {
        0 => PathSet::EMPTY.with(0).with(1),
        _ => PathSet::EMPTY.with(1),
    };
    let (Some(mut sender), Some(mut receiver)) = (
        Sender::<Sound>::new(settings.clone(), SLOTS, PATHS, ready),
        Receiver::<Sound>::new(settings, PATHS, ready),
    ) else {
        unreachable!("a path is ready");
    };
    let mut now = Duration::ZERO;
    let mut actions = Vec::new();
    while let Some(next) = bytes.next() {
        let before = (
            (
                sender.epoch(),
                sender.posted(),
                sender.acked(),
                sender.has_given_up(),
            ),
            (
                receiver.epoch(),
                receiver.committed(),
                receiver.granted(),
                receiver.has_given_up(),
            ),
        );
        match next % 6 {
            0 | 1 => {
                let Some(message) = bytes.message() else { continue };
                sender.handle(now, Event::Received(message), &mut actions);
                settle!(sender, now, actions);
                receiver.handle(now, Event::Received(message), &mut actions);
            }
            2 => {
                let Some(event) = bytes.event() else { continue };
                sender.handle(now, event, &mut actions);
                settle!(sender, now, actions);
                receiver.handle(now, event, &mut actions);
            }
            3 if sender.link().is_some() => sender.post(now),
            4 => receiver.grant(now, receiver.committed() + SLOTS, &mut actions),
            _ => {
                now += Duration::from_millis(u64::from(next) * 10);
                sender.set_busy(now, next & 1 == 0);
                receiver.set_busy(now, next & 2 == 0);
                sender.expire(now, &mut actions);
                settle!(sender, now, actions);
                receiver.expire(now, &mut actions);
            }
        }
        settle!(receiver, now, actions);
        let ((epoch, posted, acked, over), (its_epoch, committed, granted, its_over)) = before;
        assert!(
            sender.epoch() >= epoch && receiver.epoch() >= its_epoch,
            "an epoch decreased"
        );
        assert!(
            sender.posted() >= posted && sender.acked() >= acked,
            "a step was revoked"
        );
        assert!(
            receiver.committed() >= committed && receiver.granted() >= granted,
            "a credit was revoked"
        );
        assert!(sender.acked() <= sender.posted() && sender.posted() <= sender.granted());
        assert!(
            sender.granted() <= sender.posted() + SLOTS,
            "more credits than slots"
        );
        assert!(
            receiver.committed() <= receiver.granted(),
            "a step without a credit"
        );
        assert!(
            (sender.has_given_up() || !over) && (receiver.has_given_up() || !its_over),
            "an end that had given up came back"
        );
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2_000))]

        #[test]
        fn no_peer_breaks_an_invariant(data in proptest::collection::vec(any::<u8>(), 0..400)) {
            ends(&data);
        }
    }
}
