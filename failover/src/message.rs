//! The messages between the ends, and their bytes.

use crate::links::{Link, MAX_PATHS};

/// Bytes of every message: few enough to go inline in a work request.
pub const MESSAGE_BYTES: usize = 96;
/// Bytes of an [`Address`].
pub const ADDRESS_BYTES: usize = 80;

/// First bytes of a message. The parser rejects another protocol, and another version of this one.
const MAGIC: [u8; 4] = *b"rsf2";

/// Where a path's queue pairs are reached. The drivers define the bytes, which hold no handle of a process: they must have a meaning
/// at the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Address(pub [u8; ADDRESS_BYTES]);

impl Default for Address {
    fn default() -> Self {
        Self([0; ADDRESS_BYTES])
    }
}

/// A message of one end to the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Message {
    /// Sender: this end has given up these queue pairs.
    Broken {
        /// The epoch that the sender is in.
        epoch: u32,
        /// By path: the newest generation given up; 0 for none.
        generations: [u32; MAX_PATHS],
    },
    /// Receiver: answers [`Message::Broken`] with the queue pairs that it has given up.
    BrokenAck {
        /// By path: the newest generation given up; 0 for none.
        generations: [u32; MAX_PATHS],
    },
    /// Receiver: an epoch begins. The active paths of earlier epochs are fenced at the receiver, or drained.
    Switch {
        /// The epoch.
        epoch: u32,
        /// The active queue pair of the epoch.
        link: Link,
        /// Steps committed since the connection began: the sender continues from there.
        committed: u64,
        /// Steps granted since the connection began.
        granted: u64,
    },
    /// Sender: it has entered this epoch.
    Switched {
        /// The epoch.
        epoch: u32,
    },
    /// Receiver: offers a new queue pair for a path.
    Offer {
        /// The queue pair.
        link: Link,
        /// Its address.
        address: Address,
    },
    /// Sender: its queue pair for an offered one, which is connected.
    Accept {
        /// The queue pair.
        link: Link,
        /// Its address.
        address: Address,
    },
    /// Either end: it gives up.
    GaveUp,
    /// Receiver: it is about to leave a path that works. The sender posts nothing more until the next epoch.
    Hold {
        /// The epoch that will begin.
        epoch: u32,
        /// The queue pair that is active until then.
        link: Link,
    },
    /// Sender: it has stopped, and no step is outstanding.
    Drained {
        /// The epoch that the sender waits for.
        epoch: u32,
        /// Steps posted since the connection began; the receiver's NIC has acknowledged all of them.
        posted: u64,
    },
    /// Receiver: its communicator ends. Every granted step is committed and consumed. This is the last message, and goes outside RDMA
    /// only: the queue pairs end with the communicator.
    Left {
        /// Steps committed since the connection began.
        committed: u64,
    },
}

struct Writer {
    bytes: [u8; MESSAGE_BYTES],
    at: usize,
}

impl Writer {
    fn put(&mut self, bytes: &[u8]) {
        self.bytes[self.at..self.at + bytes.len()].copy_from_slice(bytes);
        self.at += bytes.len();
    }

    fn link(&mut self, link: Link) {
        self.put(&[link.path]);
        self.put(&link.generation.to_le_bytes());
    }

    fn generations(&mut self, generations: &[u32; MAX_PATHS]) {
        for generation in generations {
            self.put(&generation.to_le_bytes());
        }
    }
}

struct Reader<'a>(&'a [u8]);

impl Reader<'_> {
    fn take<const N: usize>(&mut self) -> Option<[u8; N]> {
        let (bytes, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(*bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take().map(u64::from_le_bytes)
    }

    fn generations(&mut self) -> Option<[u32; MAX_PATHS]> {
        let mut generations = [0; MAX_PATHS];
        for generation in &mut generations {
            *generation = self.u32()?;
        }
        Some(generations)
    }

    /// A valid queue pair: its path is below [`MAX_PATHS`], its generation at least 1.
    fn link(&mut self) -> Option<Link> {
        let [path] = self.take()?;
        let generation = self.u32()?;
        (usize::from(path) < MAX_PATHS && generation > 0).then_some(Link { path, generation })
    }

    fn address(&mut self) -> Option<Address> {
        self.take().map(Address)
    }
}

impl Message {
    /// The bytes of the message; unused bytes are 0.
    #[must_use]
    pub fn encode(&self) -> [u8; MESSAGE_BYTES] {
        let mut to = Writer {
            bytes: [0; MESSAGE_BYTES],
            at: 0,
        };
        to.put(&MAGIC);
        match self {
            Self::Broken { epoch, generations } => {
                to.put(&[0]);
                to.put(&epoch.to_le_bytes());
                to.generations(generations);
            }
            Self::BrokenAck { generations } => {
                to.put(&[6]);
                to.generations(generations);
            }
            Self::Switch {
                epoch,
                link,
                committed,
                granted,
            } => {
                to.put(&[1]);
                to.put(&epoch.to_le_bytes());
                to.link(*link);
                to.put(&committed.to_le_bytes());
                to.put(&granted.to_le_bytes());
            }
            Self::Switched { epoch } => {
                to.put(&[2]);
                to.put(&epoch.to_le_bytes());
            }
            Self::Offer { link, address } => {
                to.put(&[3]);
                to.link(*link);
                to.put(&address.0);
            }
            Self::Accept { link, address } => {
                to.put(&[4]);
                to.link(*link);
                to.put(&address.0);
            }
            Self::GaveUp => to.put(&[5]),
            Self::Hold { epoch, link } => {
                to.put(&[7]);
                to.put(&epoch.to_le_bytes());
                to.link(*link);
            }
            Self::Drained { epoch, posted } => {
                to.put(&[8]);
                to.put(&epoch.to_le_bytes());
                to.put(&posted.to_le_bytes());
            }
            Self::Left { committed } => {
                to.put(&[9]);
                to.put(&committed.to_le_bytes());
            }
        }
        to.bytes
    }

    /// Parses a message; `None` if the bytes are none.
    #[must_use]
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        if bytes.len() != MESSAGE_BYTES {
            return None;
        }
        let mut from = Reader(bytes);
        if from.take()? != MAGIC {
            return None;
        }
        let message = match from.take::<1>()?[0] {
            0 => Self::Broken {
                epoch: from.u32()?,
                generations: from.generations()?,
            },
            1 => Self::Switch {
                epoch: from.u32()?,
                link: from.link()?,
                committed: from.u64()?,
                granted: from.u64()?,
            },
            2 => Self::Switched { epoch: from.u32()? },
            3 => Self::Offer {
                link: from.link()?,
                address: from.address()?,
            },
            4 => Self::Accept {
                link: from.link()?,
                address: from.address()?,
            },
            5 => Self::GaveUp,
            6 => Self::BrokenAck {
                generations: from.generations()?,
            },
            7 => Self::Hold {
                epoch: from.u32()?,
                link: from.link()?,
            },
            8 => Self::Drained {
                epoch: from.u32()?,
                posted: from.u64()?,
            },
            9 => Self::Left {
                committed: from.u64()?,
            },
            _ => return None,
        };
        from.0.iter().all(|byte| *byte == 0).then_some(message)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all() -> Vec<Message> {
        let link = Link {
            path: 3,
            generation: u32::MAX,
        };
        let address = Address([7; ADDRESS_BYTES]);
        vec![
            Message::Broken {
                epoch: 1,
                generations: [1, 2, 3, u32::MAX],
            },
            Message::Switch {
                epoch: 2,
                link,
                committed: u64::MAX,
                granted: 1 << 40,
            },
            Message::Switched { epoch: 3 },
            Message::Offer { link, address },
            Message::Accept { link, address },
            Message::GaveUp,
            Message::BrokenAck {
                generations: [0, 1, 2, 3],
            },
            Message::Hold { epoch: 4, link },
            Message::Drained {
                epoch: 5,
                posted: u64::MAX,
            },
            Message::Left { committed: u64::MAX },
        ]
    }

    #[test]
    fn what_is_written_is_read() {
        for message in all() {
            assert_eq!(Message::parse(&message.encode()), Some(message));
        }
    }

    #[test]
    fn rubbish_is_no_message() {
        for message in all() {
            let bytes = message.encode();
            for length in 0..MESSAGE_BYTES {
                assert_eq!(Message::parse(&bytes[..length]), None);
            }
            // Every change of a byte is another message or none, and never a panic.
            for at in 0..MESSAGE_BYTES {
                for value in [0, 1, 0x7f, 0xff] {
                    let mut changed = bytes;
                    changed[at] = value;
                    let read = Message::parse(&changed);
                    assert!(
                        changed == bytes || read != Some(message),
                        "{message:?}: byte {at}"
                    );
                }
            }
        }
        let mut other_path = all()[3].encode();
        other_path[5] = MAX_PATHS as u8;
        assert_eq!(Message::parse(&other_path), None);
        let mut never_built = all()[3].encode();
        never_built[6..10].fill(0);
        assert_eq!(Message::parse(&never_built), None);
    }
}
