//! The offer that the two ends of a connection exchange before it is connected. It holds no pointer, handle or descriptor of a process:
//! every field has a meaning at the other end.

use crate::{config::MAX_QPS, device::Mtu, error::OfferError};

/// First four bytes of an [`Offer`]: "RSIB".
const MAGIC: u32 = u32::from_le_bytes(*b"RSIB");
/// Version of the layout and of the protocol.
pub const VERSION: u16 = 6;
/// Paths of a connection at most: the primary and the backup.
pub const MAX_PATHS: usize = 2;
/// Bytes of a device's name.
const NAME_BYTES: usize = 24;
const HEAD_BYTES: usize = 32;
const PATH_BYTES: usize = 64 + MAX_QPS * 8;
/// Bytes of an offer.
pub const OFFER_BYTES: usize = HEAD_BYTES + MAX_PATHS * PATH_BYTES;

/// A queue pair, as its peer needs it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct QpOffer {
    /// Its number; 24 bits.
    pub number: u32,
    /// First packet number that it sends; 24 bits.
    pub psn: u32,
}

/// One path to an end: a port with its queue pairs, and the keys of the end's memory there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PathOffer {
    /// Name of the device, for messages.
    pub device: String,
    /// Its port.
    pub port: u8,
    /// The port is RoCE.
    pub ethernet: bool,
    /// The port is up. A connection begins on the first path with both ports up.
    pub up: bool,
    /// MTU of the port.
    pub mtu: Mtu,
    /// Address in an InfiniBand subnet.
    pub lid: u16,
    /// Its GID.
    pub gid: [u8; 16],
    /// Key of the slots; 0 for a sender, whose slots no peer writes.
    pub slots_key: u32,
    /// Key of the control page.
    pub control_key: u32,
    /// Its queue pairs, 1 to [`MAX_QPS`].
    pub qps: Vec<QpOffer>,
}

/// What an end of a connection offers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Offer {
    /// Failover is on: the end may replay lost steps on another path.
    pub failover: bool,
    /// Index of its primary port among the ports of its process.
    pub number: u8,
    /// How many of the connection's paths are missing before the first of [`Offer::paths`]: 1 if the primary port cannot be used.
    pub first: u8,
    /// Address of its slots; 0 for a sender.
    pub slots: u64,
    /// Address of its control page.
    pub control: u64,
    /// Its paths, the primary first; 1 or 2, counting those that are missing.
    pub paths: Vec<PathOffer>,
}

impl Offer {
    /// Head: magic u32 | version u16 | paths u8 | flags u8 (bit 0: failover) | slots u64 | control u64 | number u8 | first u8 | zero 6 bytes. Each path:
    /// name 24 bytes, zero-padded | GID 16 bytes | slots key u32 | control key u32 | LID u16 | port u8 | MTU u8 | RoCE u8 | queue pairs u8
    /// | up u8 | zero 9 bytes | 16 times number u32, psn u32. Paths and queue pairs beyond the number are zero. Little-endian.
    ///
    /// # Panics
    /// For more paths or queue pairs than there is room for, or none.
    #[must_use]
    pub fn encode(&self) -> [u8; OFFER_BYTES] {
        assert!(are_paths(self.first, self.paths.len()));
        let mut bytes = [0; OFFER_BYTES];
        bytes[..4].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[4..6].copy_from_slice(&VERSION.to_le_bytes());
        bytes[6] = self.paths.len() as u8;
        bytes[7] = self.failover.into();
        bytes[8..16].copy_from_slice(&self.slots.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.control.to_le_bytes());
        bytes[24..26].copy_from_slice(&[self.number, self.first]);
        for (path, bytes) in self
            .paths
            .iter()
            .zip(bytes[HEAD_BYTES..].chunks_exact_mut(PATH_BYTES))
        {
            assert!((1..=MAX_QPS).contains(&path.qps.len()));
            let name = &path.device.as_bytes()[..path.device.floor_char_boundary(NAME_BYTES)];
            bytes[..name.len()].copy_from_slice(name);
            bytes[24..40].copy_from_slice(&path.gid);
            bytes[40..44].copy_from_slice(&path.slots_key.to_le_bytes());
            bytes[44..48].copy_from_slice(&path.control_key.to_le_bytes());
            bytes[48..50].copy_from_slice(&path.lid.to_le_bytes());
            bytes[50..55].copy_from_slice(&[
                path.port,
                path.mtu.code(),
                path.ethernet.into(),
                path.qps.len() as u8,
                path.up.into(),
            ]);
            for (qp, bytes) in path.qps.iter().zip(bytes[64..].chunks_exact_mut(8)) {
                bytes[..4].copy_from_slice(&qp.number.to_le_bytes());
                bytes[4..].copy_from_slice(&qp.psn.to_le_bytes());
            }
        }
        bytes
    }

    /// Reads an offer.
    ///
    /// # Errors
    /// Another version, or bytes that [`Offer::encode`] does not write.
    pub fn parse(bytes: &[u8]) -> Result<Self, OfferError> {
        let malformed = OfferError::Malformed;
        let (head, rest) = bytes.split_at_checked(HEAD_BYTES).ok_or(malformed)?;
        let word = |bytes: &[u8], at: usize| {
            let bytes = bytes.get(at..at + 4)?.try_into().ok()?;
            Some(u32::from_le_bytes(bytes))
        };
        let long = |at: usize| {
            let bytes = head.get(at..at + 8)?.try_into().ok()?;
            Some(u64::from_le_bytes(bytes))
        };
        if word(head, 0) != Some(MAGIC) {
            return Err(malformed);
        }
        let version = u16::from_le_bytes([head[4], head[5]]);
        if version != VERSION {
            return Err(OfferError::Version {
                theirs: version,
                ours: VERSION,
            });
        }
        let count = usize::from(head[6]);
        let fits = are_paths(head[25], count) && head[7] <= 1 && head[26..] == [0; 6];
        if !fits || rest.len() != MAX_PATHS * PATH_BYTES {
            return Err(malformed);
        }
        let (used, unused) = rest.split_at(count * PATH_BYTES);
        let paths: Option<Vec<PathOffer>> = used.chunks_exact(PATH_BYTES).map(parse_path).collect();
        if unused.iter().any(|byte| *byte != 0) {
            return Err(malformed);
        }
        Ok(Self {
            failover: head[7] == 1,
            number: head[24],
            first: head[25],
            slots: long(8).ok_or(malformed)?,
            control: long(16).ok_or(malformed)?,
            paths: paths.ok_or(malformed)?,
        })
    }

    /// The fuzz target of the parser: an offer that it accepts is encoded as it was.
    pub fn fuzz(bytes: &[u8]) {
        if let Ok(offer) = Self::parse(bytes) {
            assert_eq!(offer.encode(), *bytes);
        }
    }
}

/// Whether a connection may have `count` paths after `first` missing ones.
fn are_paths(first: u8, count: usize) -> bool {
    count > 0 && usize::from(first) + count <= MAX_PATHS
}

fn parse_path(bytes: &[u8]) -> Option<PathOffer> {
    let word = |at: usize| Some(u32::from_le_bytes(bytes.get(at..at + 4)?.try_into().ok()?));
    let length = bytes[..NAME_BYTES]
        .iter()
        .position(|byte| *byte == 0)
        .unwrap_or(NAME_BYTES);
    let device = std::str::from_utf8(&bytes[..length]).ok()?;
    if bytes[length..NAME_BYTES].iter().any(|byte| *byte != 0) || device.chars().any(char::is_control) {
        return None;
    }
    let (port, ethernet, count) = (bytes[50], bytes[52], usize::from(bytes[53]));
    let mtu = Mtu::from_code(bytes[51].into())?;
    let up = bytes[54];
    if port == 0 || ethernet > 1 || up > 1 || !(1..=MAX_QPS).contains(&count) || bytes[55..64] != [0; 9] {
        return None;
    }
    let table = &bytes[64..];
    if table[count * 8..].iter().any(|byte| *byte != 0) {
        return None;
    }
    let qps: Option<Vec<QpOffer>> = (0..count)
        .map(|i| {
            let (number, psn) = (word(64 + i * 8)?, word(68 + i * 8)?);
            // Both have 24 bits.
            (number >> 24 == 0 && psn >> 24 == 0).then_some(QpOffer { number, psn })
        })
        .collect();
    Some(PathOffer {
        device: device.to_owned(),
        port,
        ethernet: ethernet == 1,
        up: up == 1,
        mtu,
        lid: u16::from_le_bytes([bytes[48], bytes[49]]),
        gid: bytes[24..40].try_into().ok()?,
        slots_key: word(40)?,
        control_key: word(44)?,
        qps: qps?,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn paths() -> impl Strategy<Value = Vec<PathOffer>> {
        let qp = (0_u32..1 << 24, 0_u32..1 << 24).prop_map(|(number, psn)| QpOffer { number, psn });
        let qps = proptest::collection::vec(qp, 1..=MAX_QPS);
        let path = (
            "[a-z0-9_]{0,24}",
            1_u8..,
            any::<(bool, bool)>(),
            1_u32..=5,
            any::<(u16, [u8; 16], u32, u32)>(),
            qps,
        );
        let path = path.prop_map(
            |(device, port, (ethernet, up), mtu, (lid, gid, slots_key, control_key), qps)| PathOffer {
                device,
                port,
                ethernet,
                up,
                mtu: Mtu::from_code(mtu).unwrap(),
                lid,
                gid,
                slots_key,
                control_key,
                qps,
            },
        );
        proptest::collection::vec(path, 1..=MAX_PATHS)
    }

    proptest! {
        #[test]
        fn offers_survive_and_rubbish_is_refused(
            failover: bool, number: u8, missing: bool, slots: u64, control: u64, paths in paths(), at in 0..OFFER_BYTES, bit in 0_u8..8, rubbish in proptest::collection::vec(any::<u8>(), 0..OFFER_BYTES + 8),
        ) {
            let first = u8::from(missing && paths.len() < MAX_PATHS);
            let offer = Offer { failover, number, first, slots, control, paths };
            let bytes = offer.encode();
            prop_assert_eq!(Offer::parse(&bytes), Ok(offer.clone()));
            prop_assert!(Offer::parse(&bytes[..at]).is_err());
            prop_assert!(Offer::parse(&rubbish).is_err());
            // A flipped bit gives an error, or another offer with these bytes.
            let mut flipped = bytes;
            flipped[at] ^= 1 << bit;
            match Offer::parse(&flipped) {
                Ok(other) => {
                    prop_assert_ne!(&other, &offer);
                    prop_assert_eq!(other.encode(), flipped);
                }
                Err(error) => prop_assert_eq!(matches!(error, OfferError::Version { .. }), at == 4 || at == 5),
            }
        }
    }
}
