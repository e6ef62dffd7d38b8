//! Which address to listen on: `NCCL_SOCKET_IFNAME` and `NCCL_SOCKET_FAMILY`.

use std::{
    ffi::CStr,
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6},
    sync::Arc,
};

use super::{Error, Result};
use crate::env;

/// An interface that is up, with one of its addresses; port 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Interface {
    pub(super) name: String,
    pub(super) address: SocketAddr,
}

/// The filter of `NCCL_SOCKET_IFNAME`: `[^][=]name,name…`. `^` excludes, `=` wants the whole name instead of a prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Filter<'a> {
    exclude: bool,
    exact: bool,
    names: Vec<&'a str>,
}

impl<'a> Filter<'a> {
    fn parse(text: &'a str) -> Self {
        let text = text.trim();
        let (exclude, text) = text.strip_prefix('^').map_or((false, text), |rest| (true, rest));
        let (exact, text) = text.strip_prefix('=').map_or((false, text), |rest| (true, rest));
        let names = text
            .split(',')
            .map(str::trim)
            .filter(|name| !name.is_empty())
            .collect();
        Self {
            exclude,
            exact,
            names,
        }
    }

    fn admits(&self, interface: &str) -> bool {
        let listed = self.names.iter().any(|name| {
            if self.exact {
                interface == *name
            } else {
                interface.starts_with(name)
            }
        });
        listed != self.exclude
    }
}

/// The interface that the environment asks for; `None` if it asks for none.
pub(super) fn requested() -> Result<Option<Interface>> {
    env::text("NCCL_SOCKET_IFNAME")
        .map(|filter| choose(&up()?, Some(&filter), family().as_deref()))
        .transpose()
}

/// The interface to use: the requested one, else the first that is neither loopback nor docker's, else docker's, else
/// loopback (NCCL's order).
pub(super) fn default() -> Result<Interface> {
    let filter = env::text("NCCL_SOCKET_IFNAME");
    choose(&up()?, filter.as_deref(), family().as_deref())
}

fn family() -> Option<String> {
    env::text("NCCL_SOCKET_FAMILY")
}

/// Whether `NCCL_SOCKET_FAMILY` allows an address.
pub(super) fn family_admits(address: &SocketAddr) -> Result<bool> {
    admits(family().as_deref(), address)
}

fn admits(family: Option<&str>, address: &SocketAddr) -> Result<bool> {
    match family.map(str::trim) {
        Some("AF_INET") => Ok(address.is_ipv4()),
        Some("AF_INET6") => Ok(address.is_ipv6()),
        None | Some("") => Ok(true),
        Some(other) => Err(Error::InvalidArgument(format!(
            "NCCL_SOCKET_FAMILY={other}: neither AF_INET nor AF_INET6"
        ))),
    }
}

fn choose(interfaces: &[Interface], filter: Option<&str>, family: Option<&str>) -> Result<Interface> {
    let mut admitted = Vec::new();
    for interface in interfaces {
        if admits(family, &interface.address)?
            && filter.is_none_or(|f| Filter::parse(f).admits(&interface.name))
        {
            admitted.push(interface);
        }
    }
    // A listed interface is used whatever it is; NCCL's preference is for when nothing is listed.
    let rank = |interface: &Interface| match interface.name.as_str() {
        _ if filter.is_some_and(|f| !Filter::parse(f).exclude) => 0,
        "lo" => 2,
        name if name.starts_with("docker") => 1,
        _ => 0,
    };
    admitted
        .into_iter()
        .min_by_key(|interface| rank(interface))
        .cloned()
        .ok_or_else(|| {
            let names: Vec<&str> = interfaces
                .iter()
                .map(|interface| interface.name.as_str())
                .collect();
            Error::InvalidArgument(format!(
                "NCCL_SOCKET_IFNAME={} NCCL_SOCKET_FAMILY={}: no interface that is up matches; there are: {}",
                filter.unwrap_or(""),
                family.unwrap_or(""),
                names.join(" ")
            ))
        })
}

/// Interfaces that are up and have an address, in the system's order, IPv4 before IPv6 for each.
fn up() -> Result<Vec<Interface>> {
    let mut list = std::ptr::null_mut();
    // SAFETY: `list` is a valid place for the head of the list.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        let source = Arc::new(std::io::Error::last_os_error());
        return Err(Error::System {
            what: "listing network interfaces".into(),
            source,
        });
    }
    let mut found: Vec<Interface> = Vec::new();
    let mut next = list;
    while !next.is_null() {
        // SAFETY: an entry of the list that getifaddrs made and that is freed below.
        let entry = unsafe { &*next };
        next = entry.ifa_next;
        let is_up = entry.ifa_flags & libc::IFF_UP as libc::c_uint != 0;
        // SAFETY: `ifa_addr` is null or an address of an entry of the list.
        if let Some(address) = is_up.then(|| unsafe { read_address(entry.ifa_addr) }).flatten() {
            // SAFETY: `ifa_name` is a string that ends in zero.
            let name = unsafe { CStr::from_ptr(entry.ifa_name) }
                .to_string_lossy()
                .into_owned();
            found.push(Interface { name, address });
        }
    }
    // SAFETY: the list of above, not used any more.
    unsafe { libc::freeifaddrs(list) };
    found.sort_by_key(|interface| interface.address.is_ipv6()); // stable: the system's order within a family
    Ok(found)
}

/// # Safety
/// `address` is null or points to a socket address of its family's size.
unsafe fn read_address(address: *const libc::sockaddr) -> Option<SocketAddr> {
    if address.is_null() {
        return None;
    }
    // SAFETY: not null, so every address begins with its family.
    match i32::from(unsafe { (*address).sa_family }) {
        libc::AF_INET => {
            // SAFETY: AF_INET means `sockaddr_in`; it may be less aligned than we read.
            let raw = unsafe { address.cast::<libc::sockaddr_in>().read_unaligned() };
            Some(SocketAddr::new(
                IpAddr::V4(Ipv4Addr::from(raw.sin_addr.s_addr.to_ne_bytes())),
                0,
            ))
        }
        libc::AF_INET6 => {
            // SAFETY: AF_INET6 means `sockaddr_in6`.
            let raw = unsafe { address.cast::<libc::sockaddr_in6>().read_unaligned() };
            let ip = Ipv6Addr::from(raw.sin6_addr.s6_addr);
            // A link-local address is of use to one link only, and the peer would need our scope id.
            (!ip.is_unicast_link_local())
                .then(|| SocketAddr::V6(SocketAddrV6::new(ip, 0, 0, raw.sin6_scope_id)))
        }
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine() -> Vec<Interface> {
        [
            ("lo", "127.0.0.1:0"),
            ("docker0", "172.17.0.1:0"),
            ("eth0", "10.0.0.1:0"),
            ("eth01", "10.1.0.1:0"),
            ("ib0", "[fd00::1]:0"),
        ]
        .map(|(name, address)| Interface {
            name: name.into(),
            address: address.parse().unwrap(),
        })
        .to_vec()
    }

    fn name(filter: Option<&str>, family: Option<&str>) -> String {
        choose(&machine(), filter, family).map_or_else(|error| error.to_string(), |interface| interface.name)
    }

    #[test]
    fn filters_mean_what_nccl_says() {
        assert_eq!(name(None, None), "eth0");
        assert_eq!(name(Some("eth01"), None), "eth01");
        assert_eq!(name(Some("=eth0"), None), "eth0");
        assert_eq!(
            name(Some("=eth"), None).find("no interface"),
            Some("NCCL_SOCKET_IFNAME==eth NCCL_SOCKET_FAMILY=: ".len())
        );
        assert_eq!(name(Some("^eth,docker,ib"), None), "lo");
        assert_eq!(name(Some("^=eth0"), None), "eth01");
        assert_eq!(name(Some("lo,eth"), None), "lo");
        assert_eq!(name(None, Some("AF_INET6")), "ib0");
        assert!(name(None, Some("AF_IB")).contains("AF_IB"));
    }

    #[test]
    fn this_machine_has_an_interface() {
        assert!(!up().unwrap().is_empty());
    }
}
