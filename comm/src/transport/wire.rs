//! Messages between two proxies: the hello and its reply, steps and credits.

use ringsight_verbs::wire::OFFER_BYTES;

use super::error::ConnectionError;
use crate::{bootstrap::wire::word, op::ProxyOp};

/// First four bytes of a connection ("RSNT"), of a step ("RSST") and of a credit ("RSCR").
const HELLO_MAGIC: u32 = u32::from_le_bytes(*b"RSNT");
const STEP_MAGIC: u32 = u32::from_le_bytes(*b"RSST");
const CREDIT_MAGIC: u32 = u32::from_le_bytes(*b"RSCR");
const VERSION: u32 = 4;

/// Maximum length of the text after [`HelloReply::Sockets`], bytes.
pub(crate) const MAX_REASON: u32 = 512;
/// Bytes of a [`Hello`].
pub(crate) const HELLO_BYTES: usize = 40;
/// Bytes of a [`HelloReply`].
pub(crate) const HELLO_REPLY_BYTES: usize = 12;
pub(crate) const STEP_BYTES: usize = 24;
pub(super) const CREDIT_BYTES: usize = 12;

/// The first message of a sender's proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Hello {
    pub(crate) cookie: u64,
    /// Communicator id: see [`crate::op::Endpoint::comm`].
    pub(crate) comm: u64,
    pub(crate) from: u32,
    pub(crate) to: u32,
    pub(crate) channel: u8,
    pub(crate) p2p: bool,
    /// An [`Offer`](ringsight_verbs::wire::Offer) follows.
    pub(crate) rdma: bool,
    pub(crate) slot_bytes: u32,
}

impl Hello {
    /// Magic u32 | version u32 | cookie u64 | from u32 | to u32 | channel u8 | p2p u8 | RDMA u8 | zero u8 | slot bytes u32 |
    /// communicator u64.
    pub(crate) fn encode(&self) -> [u8; HELLO_BYTES] {
        let mut bytes = [0; HELLO_BYTES];
        bytes[..4].copy_from_slice(&HELLO_MAGIC.to_le_bytes());
        bytes[4..8].copy_from_slice(&VERSION.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.cookie.to_le_bytes());
        bytes[16..20].copy_from_slice(&self.from.to_le_bytes());
        bytes[20..24].copy_from_slice(&self.to.to_le_bytes());
        bytes[24] = self.channel;
        bytes[25] = self.p2p.into();
        bytes[26] = self.rdma.into();
        bytes[28..32].copy_from_slice(&self.slot_bytes.to_le_bytes());
        bytes[32..].copy_from_slice(&self.comm.to_le_bytes());
        bytes
    }

    /// How many bytes of a hello, with the offer that may follow, are still missing.
    pub(crate) fn missing(bytes: &[u8]) -> usize {
        let offer = match bytes.get(26) {
            Some(1) => OFFER_BYTES,
            _ => 0,
        };
        (HELLO_BYTES + offer).saturating_sub(bytes.len())
    }

    /// `None` for another secret than `cookie`, another version, and other bytes.
    pub(crate) fn parse(bytes: &[u8], cookie: u64) -> Option<Self> {
        let known = word(bytes, 0)? == HELLO_MAGIC
            && word(bytes, 4)? == VERSION
            && bytes.get(8..16)? == cookie.to_le_bytes()
            && bytes.len() == HELLO_BYTES
            && bytes[25] <= 1
            && bytes[26] <= 1
            && bytes[27] == 0;
        if !known {
            return None;
        }
        Some(Self {
            cookie,
            comm: u64::from_le_bytes(bytes[32..].try_into().ok()?),
            from: word(bytes, 16)?,
            to: word(bytes, 20)?,
            channel: bytes[24],
            p2p: bytes[25] == 1,
            rdma: bytes[26] == 1,
            slot_bytes: word(bytes, 28)?,
        })
    }
}

/// The answer of the receiver's proxy to a [`Hello`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HelloReply {
    /// The connection is made, over this stream.
    Welcome,
    /// RDMA was offered: the receiver's own offer follows. The sender answers with [`HelloReply::Rdma`] once it is connected, or with
    /// [`HelloReply::Sockets`].
    Rdma,
    /// RDMA was offered and cannot be used: the connection is made over this stream. So many bytes of reason follow.
    Sockets(u32),
    /// The receiver's slots have this many bytes.
    OtherSlots(u32),
    /// The connection exists already.
    Taken,
    /// No such rank or channel, or the receiver could not make its end.
    Impossible,
    /// The receiver's process has no descriptor or memory left for its end.
    Starved,
}

impl HelloReply {
    /// Magic u32 | code u32 | detail u32.
    pub(crate) fn encode(self) -> [u8; HELLO_REPLY_BYTES] {
        let (code, detail) = match self {
            Self::Welcome => (0, 0),
            Self::OtherSlots(bytes) => (1, bytes),
            Self::Taken => (2, 0),
            Self::Impossible => (3, 0),
            Self::Rdma => (4, 0),
            Self::Sockets(bytes) => (5, bytes),
            Self::Starved => (6, 0),
        };
        let mut bytes = [0; HELLO_REPLY_BYTES];
        for (place, value) in bytes
            .as_chunks_mut::<4>()
            .0
            .iter_mut()
            .zip([HELLO_MAGIC, code, detail])
        {
            *place = u32::to_le_bytes(value);
        }
        bytes
    }

    pub(crate) fn parse(bytes: &[u8; HELLO_REPLY_BYTES]) -> Option<Self> {
        match (word(bytes, 0)? == HELLO_MAGIC, word(bytes, 4)?, word(bytes, 8)?) {
            (true, 0, 0) => Some(Self::Welcome),
            (true, 1, bytes) => Some(Self::OtherSlots(bytes)),
            (true, 2, 0) => Some(Self::Taken),
            (true, 3, 0) => Some(Self::Impossible),
            (true, 4, 0) => Some(Self::Rdma),
            (true, 5, bytes) if bytes <= MAX_REASON => Some(Self::Sockets(bytes)),
            (true, 6, 0) => Some(Self::Starved),
            _ => None,
        }
    }
}

/// The header of a step, before its bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct StepHeader {
    /// Operations of this connection before this one, modulo 2^32, as both ends count them.
    pub(crate) op: u32,
    pub(crate) step: u32,
    pub(crate) steps: u32,
    pub(crate) bytes: u32,
    /// Tag of the slot, from the sender's kernel.
    pub(crate) tag: u32,
}

impl StepHeader {
    pub(crate) fn encode(&self) -> [u8; STEP_BYTES] {
        let mut bytes = [0; STEP_BYTES];
        let words = [STEP_MAGIC, self.op, self.step, self.steps, self.bytes, self.tag];
        for (place, value) in bytes.as_chunks_mut::<4>().0.iter_mut().zip(words) {
            *place = u32::to_le_bytes(value);
        }
        bytes
    }

    /// Checks that this is step `step` of the connection's operation number `ops`, which is `op`, and fits into a slot of `slot_bytes`.
    ///
    /// # Errors
    /// It is another step. A step with another tag is no error: it goes to the kernel, which reports how the calls of the ranks differ.
    pub(crate) fn check(
        &self,
        op: &ProxyOp,
        (ops, step): (u32, u32),
        slot_bytes: usize,
    ) -> Result<(), ConnectionError> {
        let expected = Self {
            op: ops,
            step,
            steps: op.steps,
            ..*self
        };
        if self.tag == op.tag && *self != expected {
            return Err(ConnectionError::Protocol(format!(
                "the peer sends step {} of {} of the connection's operation {}, expected was step {} of {} of operation \
                 {}: the ranks do not call the same operations with the same sizes",
                self.step, self.steps, self.op, expected.step, expected.steps, expected.op
            )));
        }
        if self.bytes as usize > slot_bytes {
            return Err(ConnectionError::Protocol(format!(
                "the peer sends a step of {} bytes, a slot has {slot_bytes}",
                self.bytes
            )));
        }
        Ok(())
    }

    pub(crate) fn parse(bytes: &[u8; STEP_BYTES]) -> Option<Self> {
        (word(bytes, 0)? == STEP_MAGIC).then_some(Self {
            op: word(bytes, 4)?,
            step: word(bytes, 8)?,
            steps: word(bytes, 12)?,
            bytes: word(bytes, 16)?,
            tag: word(bytes, 20)?,
        })
    }
}

/// A credit: magic u32 | steps granted since the connection began u64.
pub(super) fn encode_credit(granted: u64) -> [u8; CREDIT_BYTES] {
    let mut bytes = [0; CREDIT_BYTES];
    bytes[..4].copy_from_slice(&CREDIT_MAGIC.to_le_bytes());
    bytes[4..].copy_from_slice(&granted.to_le_bytes());
    bytes
}

pub(super) fn parse_credit(bytes: &[u8; CREDIT_BYTES]) -> Option<u64> {
    let granted = u64::from_le_bytes(bytes[4..].try_into().ok()?);
    (word(bytes, 0)? == CREDIT_MAGIC).then_some(granted)
}

/// The fuzz target of the parsers: every message that one accepts is encoded as it was.
pub(crate) fn fuzz(data: &[u8]) {
    let cookie = data
        .get(8..16)
        .and_then(|bytes| bytes.try_into().ok())
        .map_or(0, u64::from_le_bytes);
    if let Some(hello) = Hello::parse(data, cookie) {
        assert_eq!(hello.encode(), data);
    }
    if let Some(bytes) = data.first_chunk()
        && let Some(reply) = HelloReply::parse(bytes)
    {
        assert_eq!(reply.encode(), *bytes);
    }
    if let Some(bytes) = data.first_chunk()
        && let Some(header) = StepHeader::parse(bytes)
    {
        assert_eq!(header.encode(), *bytes);
    }
    if let Some(bytes) = data.first_chunk()
        && let Some(granted) = parse_credit(bytes)
    {
        assert_eq!(encode_credit(granted), *bytes);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn messages_round_trip_and_other_bytes_are_refused(
            cookie: u64, comm: u64, from: u32, to: u32, channel: u8, p2p: bool, rdma: bool, slot_bytes: u32, rubbish: [u8; HELLO_BYTES], flip in 0usize..16, bit in 0u8..8,
        ) {
            let hello = Hello { cookie, comm, from, to, channel, p2p, rdma, slot_bytes };
            let mut bytes = hello.encode();
            prop_assert_eq!(Hello::parse(&bytes, cookie), Some(hello));
            prop_assert_eq!(Hello::parse(&bytes, !cookie), None);
            prop_assert_eq!(Hello::parse(&bytes[..39], cookie), None);
            for length in 0..HELLO_BYTES {
                prop_assert!(Hello::missing(&bytes[..length]) >= HELLO_BYTES - length);
            }
            prop_assert_eq!(Hello::missing(&bytes), if rdma { OFFER_BYTES } else { 0 });
            bytes[flip] ^= 1 << bit;
            prop_assert_eq!(Hello::parse(&bytes, cookie), None);
            prop_assert_eq!(Hello::parse(&rubbish, cookie), None);
            for reply in [HelloReply::Welcome, HelloReply::OtherSlots(slot_bytes), HelloReply::Taken, HelloReply::Impossible, HelloReply::Starved, HelloReply::Rdma, HelloReply::Sockets(slot_bytes % (MAX_REASON + 1))] {
                prop_assert_eq!(HelloReply::parse(&reply.encode()), Some(reply));
            }
            let header = StepHeader { op: from, step: to, steps: slot_bytes, bytes: 7, tag: !from };
            let mut encoded = header.encode();
            prop_assert_eq!(StepHeader::parse(&encoded), Some(header));
            encoded[flip % 4] ^= 1 << bit;
            prop_assert_eq!(StepHeader::parse(&encoded), None);
            let mut encoded = encode_credit(cookie);
            prop_assert_eq!(parse_credit(&encoded), Some(cookie));
            encoded[flip % 4] ^= 1 << bit;
            prop_assert_eq!(parse_credit(&encoded), None);
        }
    }
}
