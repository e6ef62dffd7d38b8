//! The unique id: 128 bytes that a user carries from one rank to all others.

use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6};

use ringsight_comm_base::hash::fnv1a;

use super::{Error, Result};

/// First eight bytes of every unique id.
const MAGIC: u64 = u64::from_le_bytes(*b"RSUNIQID");
/// Layout of the id and of every bootstrap message.
pub(super) const VERSION: u16 = 3;
/// Where the checksum over everything before it stands.
const CHECKSUM: usize = 48;

/// What `ncclUniqueId` holds: where the root listens and the secret to present there.
///
/// Little-endian: magic u64 | version u16 | flags u16 | family u16 (4, 6) | port u16 | address 16 bytes | scope u32 |
/// zero u32 | cookie u64 | FNV-1a of these 48 bytes u64 | zeros to 128.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct UniqueId {
    /// Where the root listens.
    pub(super) address: SocketAddr,
    /// Secret of this rendezvous.
    pub(super) cookie: u64,
    /// `NCCL_COMM_ID` gave the address: rank 0 starts the root when it joins.
    pub(crate) fixed: bool,
}

impl UniqueId {
    /// Bytes of an id (`NCCL_UNIQUE_ID_BYTES`).
    pub const BYTES: usize = 128;

    /// The bytes that a user passes around.
    #[must_use]
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..8].copy_from_slice(&MAGIC.to_le_bytes());
        bytes[8..10].copy_from_slice(&VERSION.to_le_bytes());
        bytes[10..12].copy_from_slice(&u16::from(self.fixed).to_le_bytes());
        bytes[12..36].copy_from_slice(&encode_address(&self.address));
        bytes[40..48].copy_from_slice(&self.cookie.to_le_bytes());
        with_checksum(bytes)
    }

    /// Reads an id.
    ///
    /// # Errors
    /// [`Error::InvalidId`] for bytes that no version of this library wrote, or another version did.
    pub fn from_bytes(bytes: &[u8; Self::BYTES]) -> Result<Self> {
        let invalid = |text: &str| Err(Error::InvalidId(format!("unique id: {text}")));
        if bytes[..8] != MAGIC.to_le_bytes() {
            return invalid("not made by ncclGetUniqueId of this library (wrong magic)");
        }
        let version = u16::from_le_bytes([bytes[8], bytes[9]]);
        if version != VERSION {
            return invalid(&format!(
                "made by another version of this library (layout {version}, not {VERSION})"
            ));
        }
        let (head, rest) = bytes.split_at(CHECKSUM);
        let (checksum, zeros) = rest.split_at(8);
        if checksum != fnv1a(head).to_le_bytes() || zeros.iter().any(|byte| *byte != 0) {
            return invalid("damaged on its way (checksum differs)");
        }
        let mut address = [0; 24];
        address.copy_from_slice(&head[12..36]);
        let Some(address) = decode_address(&address) else {
            return invalid("holds no address");
        };
        let mut cookie = [0; 8];
        cookie.copy_from_slice(&head[40..48]);
        Ok(Self {
            address,
            cookie: u64::from_le_bytes(cookie),
            fixed: head[10] & 1 != 0,
        })
    }
}

/// `bytes` with the checksum that belongs to them.
pub(super) fn with_checksum(mut bytes: [u8; UniqueId::BYTES]) -> [u8; UniqueId::BYTES] {
    let checksum = fnv1a(&bytes[..CHECKSUM]);
    bytes[CHECKSUM..CHECKSUM + 8].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

/// Family u16 (4 or 6) | port u16 | address 16 bytes | scope u32, little-endian but for the address itself.
pub(crate) fn encode_address(address: &SocketAddr) -> [u8; 24] {
    let mut bytes = [0; 24];
    bytes[2..4].copy_from_slice(&address.port().to_le_bytes());
    match address {
        SocketAddr::V4(v4) => {
            bytes[0] = 4;
            bytes[4..8].copy_from_slice(&v4.ip().octets());
        }
        SocketAddr::V6(v6) => {
            bytes[0] = 6;
            bytes[4..20].copy_from_slice(&v6.ip().octets());
            bytes[20..24].copy_from_slice(&v6.scope_id().to_le_bytes());
        }
    }
    bytes
}

/// Reads what [`encode_address`] wrote; `None` for anything else.
pub(crate) fn decode_address(bytes: &[u8; 24]) -> Option<SocketAddr> {
    let port = u16::from_le_bytes([bytes[2], bytes[3]]);
    if port == 0 {
        return None;
    }
    match u16::from_le_bytes([bytes[0], bytes[1]]) {
        4 if bytes[8..] == [0; 16] => Some(SocketAddr::new(
            IpAddr::V4(Ipv4Addr::new(bytes[4], bytes[5], bytes[6], bytes[7])),
            port,
        )),
        6 => {
            let mut octets = [0; 16];
            octets.copy_from_slice(&bytes[4..20]);
            let scope = u32::from_le_bytes([bytes[20], bytes[21], bytes[22], bytes[23]]);
            Some(SocketAddr::V6(SocketAddrV6::new(
                Ipv6Addr::from(octets),
                port,
                0,
                scope,
            )))
        }
        _ => None,
    }
}
