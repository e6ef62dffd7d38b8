//! Control messages between ranks about exported buffers.

use ringsight_kernels::ExportedBuffer;
use ringsight_kernels::cuda::peer_memory::MAX_EXPORTS;

use super::vmm_chunks::Ticket;
use crate::checks::wire::{self, Rest};

/// First four bytes of every message.
const MAGIC: u32 = 0x5250_414d;

/// A message to a rank of another process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// A buffer was exported, under this number and generation.
    Export {
        number: u32,
        generation: u32,
        access: ExportHandle,
    },
    /// It is withdrawn.
    Withdraw { number: u32, generation: u32 },
}

/// How an exported buffer is opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum ExportHandle {
    /// By a handle ([`Sharing::import_shared`](crate::device::Sharing::import_shared)).
    Whole(Vec<u8>),
    /// By a handle and descriptors of chunks of these lengths ([`Sharing::import_vmm_chunks`](crate::device::Sharing::import_vmm_chunks)).
    Chunks {
        handle: Vec<u8>,
        sizes: Vec<u64>,
        ticket: Ticket,
    },
}

impl Message {
    pub(super) fn export(exported: &ExportedBuffer, access: ExportHandle) -> Self {
        let (number, generation) = (exported.number, exported.generation);
        Self::Export {
            number,
            generation,
            access,
        }
    }

    pub(super) fn encode(&self) -> Vec<u8> {
        let (kind, number, generation) = match self {
            Self::Export {
                number,
                generation,
                access: ExportHandle::Whole(_),
            } => (0u8, number, generation),
            Self::Withdraw { number, generation } => (1, number, generation),
            Self::Export {
                number, generation, ..
            } => (2, number, generation),
        };
        let mut bytes = MAGIC.to_le_bytes().to_vec();
        bytes.push(kind);
        bytes.extend(number.to_le_bytes());
        bytes.extend(generation.to_le_bytes());
        match self {
            Self::Withdraw { .. } => {}
            Self::Export {
                access: ExportHandle::Whole(handle),
                ..
            } => bytes.extend(handle),
            Self::Export {
                access:
                    ExportHandle::Chunks {
                        handle,
                        sizes,
                        ticket,
                    },
                ..
            } => {
                put(&mut bytes, handle.len());
                bytes.extend(handle);
                put(&mut bytes, sizes.len());
                bytes.extend(sizes.iter().flat_map(|bytes| bytes.to_le_bytes()));
                bytes.extend(ticket.secret.to_le_bytes());
                bytes.extend(ticket.name.as_bytes());
            }
        }
        bytes
    }

    /// `None` for what [`Message::encode`] did not write.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let (kind, mut rest) = wire::open(MAGIC, bytes)?;
        let (number, generation) = (rest.u32()?, rest.u32()?);
        if number as usize >= MAX_EXPORTS || generation == 0 {
            return None;
        }
        let access = match kind {
            0 => ExportHandle::Whole(rest.0.to_vec()),
            1 if rest.is_empty() => return Some(Self::Withdraw { number, generation }),
            2 => chunks(rest)?,
            _ => return None,
        };
        Some(Self::Export {
            number,
            generation,
            access,
        })
    }
}

/// A length, in the four bytes that those of control messages have.
fn put(bytes: &mut Vec<u8>, length: usize) {
    bytes.extend((length as u32).to_le_bytes());
}

fn chunks(mut rest: Rest<'_>) -> Option<ExportHandle> {
    let length = rest.u32()? as usize;
    let (handle, behind) = rest.0.split_at_checked(length)?;
    rest = Rest(behind);
    let length = (rest.u32()? as usize).checked_mul(8)?;
    let (sizes, behind) = rest.0.split_at_checked(length)?;
    rest = Rest(behind);
    let secret = rest.u64()?;
    let name = std::str::from_utf8(rest.0).ok()?.to_owned();
    let (sizes, _) = sizes.as_chunks();
    Some(ExportHandle::Chunks {
        handle: handle.to_vec(),
        sizes: sizes.iter().map(|bytes| u64::from_le_bytes(*bytes)).collect(),
        ticket: Ticket { name, secret },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_the_way_and_rubbish_is_none() {
        let export = |access| Message::Export {
            number: 7,
            generation: 3,
            access,
        };
        let chunks = export(ExportHandle::Chunks {
            handle: vec![4, 5],
            sizes: vec![2 << 20, 1 << 40],
            ticket: Ticket {
                name: "ringsight-chunks-1".into(),
                secret: 9,
            },
        });
        let back = Message::Withdraw {
            number: 255,
            generation: u32::MAX,
        };
        for message in [
            export(ExportHandle::Whole(vec![1, 2, 3])),
            chunks.clone(),
            back.clone(),
        ] {
            assert_eq!(Message::parse(&message.encode()), Some(message));
        }
        let bytes = back.encode();
        assert_eq!(Message::parse(&bytes[..bytes.len() - 1]), None);
        assert_eq!(Message::parse(&[&bytes[..], &[0]].concat()), None);
        // Of chunks, what is before the name.
        let bytes = chunks.encode();
        for length in 0..bytes.len() - "ringsight-chunks-1".len() {
            assert_eq!(Message::parse(&bytes[..length]), None, "{length}");
        }
        let beyond = Message::Withdraw {
            number: MAX_EXPORTS as u32,
            generation: 1,
        };
        assert_eq!(Message::parse(&beyond.encode()), None);
        let never = Message::Withdraw {
            number: 0,
            generation: 0,
        };
        assert_eq!(Message::parse(&never.encode()), None);
    }
}
