//! The unique id: 128 bytes that a user carries from one rank to all others.

use std::{
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6},
    ops::Range,
};

use ringsight_comm_base::hash::fnv1a;

use super::{Error, Result};

/// First eight bytes of every unique id.
const MAGIC: u64 = u64::from_le_bytes(*b"RSUNIQID");
/// Layout of the id and of every bootstrap message.
pub(super) const VERSION: u16 = 4;
/// Where the address's scope, the name and the secret stand.
const SCOPE: Range<usize> = 32..36;
const NAME: Range<usize> = 40..48;
const COOKIE: Range<usize> = 48..56;
/// Where the checksum over everything before it stands.
const CHECKSUM: usize = 56;

/// What `ncclUniqueId` holds: where the root listens, the secret to present there, and a name that may be told.
///
/// Little-endian: magic u64 | version u16 | flags u16 | family u16 (4, 6) | port u16 | address 16 bytes | scope u32 |
/// zero u32 | name u64 | cookie u64 | FNV-1a of these 56 bytes u64 | zeros to 128.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct UniqueId {
    /// Where the root listens.
    pub(super) address: SocketAddr,
    /// Tells it from other ids of its root. Not derived from the secret: communicators are called by it in logs and traces, and FNV-1a hides
    /// nothing.
    pub(super) name: u64,
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
        bytes[NAME].copy_from_slice(&self.name.to_le_bytes());
        bytes[COOKIE].copy_from_slice(&self.cookie.to_le_bytes());
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
        let [mut name, mut cookie] = [[0; 8]; 2];
        name.copy_from_slice(&head[NAME]);
        cookie.copy_from_slice(&head[COOKIE]);
        Ok(Self {
            address,
            name: u64::from_le_bytes(name),
            cookie: u64::from_le_bytes(cookie),
            fixed: head[10] & 1 != 0,
        })
    }

    /// What everybody may know of an id's bytes, the same on all hosts: all but the secret, the checksum, which depends on it, and the scope of
    /// the address, which is a number of one host.
    #[must_use]
    pub fn public_part(bytes: &[u8; Self::BYTES]) -> Vec<u8> {
        [&bytes[..SCOPE.start], &bytes[NAME]].concat()
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

/// `address` for this host, whose own address on the same link is `own`. The scope of a link-local address is an interface's number on one host, so
/// that of another host's means nothing here.
pub(crate) fn on_link_of(own: &SocketAddr, address: SocketAddr) -> SocketAddr {
    match (own, address) {
        (SocketAddr::V6(own), SocketAddr::V6(mut address)) if address.ip().is_unicast_link_local() => {
            address.set_scope_id(own.scope_id());
            SocketAddr::V6(address)
        }
        (_, address) => address,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_may_be_told_of_an_id_does_not_depend_on_its_secret() {
        let id = |name, cookie, scope| UniqueId {
            address: SocketAddrV6::new(Ipv6Addr::new(0xfe80, 0, 0, 0, 0, 0, 0, 1), 7, 0, scope).into(),
            name,
            cookie,
            fixed: false,
        };
        let public = |id: UniqueId| UniqueId::public_part(&id.to_bytes());
        assert_eq!(public(id(1, 2, 3)), public(id(1, 4, 5)));
        assert_ne!(public(id(1, 2, 3)), public(id(2, 2, 3)));
        assert_ne!(id(1, 2, 3).to_bytes(), id(1, 4, 3).to_bytes());
        assert_eq!(
            UniqueId::from_bytes(&id(1, 2, 3).to_bytes()).ok(),
            Some(id(1, 2, 3))
        );
    }

    #[test]
    fn a_scope_is_that_of_the_host_that_uses_it() {
        let on = |own: &str, address: &str| {
            on_link_of(&own.parse().unwrap(), address.parse().unwrap()).to_string()
        };
        assert_eq!(on("[fe80::1%2]:0", "[fe80::2%7]:9"), "[fe80::2%2]:9");
        assert_eq!(on("[fe80::1%2]:0", "[fd00::2]:9"), "[fd00::2]:9");
        assert_eq!(on("10.0.0.1:0", "10.0.0.2:9"), "10.0.0.2:9");
        assert_eq!(on("10.0.0.1:0", "[fe80::2%7]:9"), "[fe80::2%7]:9");
    }
}
