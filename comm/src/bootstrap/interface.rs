//! Which address to listen on: `NCCL_SOCKET_IFNAME` and `NCCL_SOCKET_FAMILY`.
//!
//! Only interfaces that run are used: they are up, and have a carrier. Where the user lists none that are wanted, NCCL's order of names
//! decides ([`preference`]), and among interfaces of one place in it the system's order.

use std::{
    ffi::{CStr, CString},
    net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, SocketAddrV6},
    sync::Arc,
};

use ringsight_comm_base::names::NameFilter;

use super::{Error, Result, sys};
use crate::env;

/// An interface with one of its addresses; port 0.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Interface {
    pub(super) name: String,
    pub(super) address: SocketAddr,
    /// It is up and has a carrier.
    runs: bool,
}

/// How little an interface of this name is wanted: InfiniBand before all others, docker's bridges, loopback and bridges of virtual machines
/// after them, in this order.
fn preference(name: &str) -> usize {
    const LAST: [&str; 3] = ["docker", "lo", "virbr"];
    if name.starts_with("ib") {
        return 0;
    }
    let last = LAST.iter().position(|beginning| name.starts_with(beginning));
    last.map_or(1, |place| place + 2)
}

/// The interface that the environment asks for; `None` if it asks for none.
pub(super) fn requested() -> Result<Option<Interface>> {
    env::text("NCCL_SOCKET_IFNAME")
        .map(|filter| choose(&all()?, Some(&filter), family().as_deref()))
        .transpose()
}

/// The interface to use: the requested one, else the most wanted.
pub(super) fn default() -> Result<Interface> {
    let filter = env::text("NCCL_SOCKET_IFNAME");
    choose(&all()?, filter.as_deref(), family().as_deref())
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
    let names = NameFilter::parse(filter.unwrap_or_default());
    let mut admitted = Vec::new();
    for interface in interfaces {
        if interface.runs && admits(family, &interface.address)? && names.allows(&interface.name, None) {
            admitted.push(interface);
        }
    }
    // A listed interface is used whatever it is.
    let rank = |interface: &&Interface| match names.is_choice() {
        true => 0,
        false => preference(&interface.name),
    };
    admitted.into_iter().min_by_key(rank).cloned().ok_or_else(|| {
        let list = |runs: bool| {
            let mut names: Vec<&str> = Vec::new();
            for interface in interfaces.iter().filter(|interface| interface.runs == runs) {
                if !names.contains(&&*interface.name) {
                    names.push(&interface.name);
                }
            }
            names.join(" ")
        };
        let down = match list(false) {
            none if none.is_empty() => none,
            down => format!("; down or without a carrier: {down}"),
        };
        Error::InvalidArgument(format!(
            "NCCL_SOCKET_IFNAME={} NCCL_SOCKET_FAMILY={}: no interface that runs matches; there are: {}{down}",
            filter.unwrap_or_default(),
            family.unwrap_or_default(),
            list(true)
        ))
    })
}

/// The index of the interface that a scope names: by its name or by the index itself. `None` if there is no such interface.
pub(super) fn index_of(scope: &str) -> Option<u32> {
    let name = CString::new(scope).ok()?;
    // SAFETY: a string that ends in zero.
    match unsafe { libc::if_nametoindex(name.as_ptr()) } {
        // No interface has index 0.
        0 => scope.parse().ok().filter(|index| *index != 0),
        index => Some(index),
    }
}

/// Interfaces that have an address, in the system's order, IPv4 before IPv6 for each.
fn all() -> Result<Vec<Interface>> {
    let mut list = std::ptr::null_mut();
    // It asks the kernel over a socket.
    let standard = sys::StandardTaken::new();
    // SAFETY: `list` is a valid place for the head of the list.
    if unsafe { libc::getifaddrs(&raw mut list) } != 0 {
        let source = Arc::new(std::io::Error::last_os_error());
        return Err(Error::System {
            what: "listing network interfaces".into(),
            source,
        });
    }
    drop(standard);
    let mut found: Vec<Interface> = Vec::new();
    let mut next = list;
    while !next.is_null() {
        // SAFETY: an entry of the list that getifaddrs made and that is freed below.
        let entry = unsafe { &*next };
        next = entry.ifa_next;
        let running = (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_uint;
        // SAFETY: `ifa_addr` is null or an address of an entry of the list.
        if let Some(address) = unsafe { read_address(entry.ifa_addr) } {
            // SAFETY: `ifa_name` is a string that ends in zero.
            let name = unsafe { CStr::from_ptr(entry.ifa_name) }
                .to_string_lossy()
                .into_owned();
            found.push(Interface {
                name,
                address,
                runs: entry.ifa_flags & running == running,
            });
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

    fn interface(name: &str, address: &str, runs: bool) -> Interface {
        Interface {
            name: name.into(),
            address: address.parse().unwrap(),
            runs,
        }
    }

    fn machine() -> Vec<Interface> {
        vec![
            interface("lo", "127.0.0.1:0", true),
            interface("docker0", "172.17.0.1:0", true),
            interface("eth0", "10.0.0.1:0", true),
            interface("eth01", "10.1.0.1:0", true),
            interface("ens0", "[fd00::1]:0", true),
        ]
    }

    fn chosen(interfaces: &[Interface], filter: Option<&str>, family: Option<&str>) -> String {
        choose(interfaces, filter, family).map_or_else(|error| error.to_string(), |interface| interface.name)
    }

    #[test]
    fn filters_mean_what_nccl_says() {
        let name = |filter, family| chosen(&machine(), filter, family);
        assert_eq!(name(None, None), "eth0");
        assert_eq!(name(Some("eth01"), None), "eth01");
        assert_eq!(name(Some("=eth0"), None), "eth0");
        assert_eq!(
            name(Some("=eth"), None).find("no interface"),
            Some("NCCL_SOCKET_IFNAME==eth NCCL_SOCKET_FAMILY=: ".len())
        );
        assert_eq!(name(Some("^eth,docker,ens"), None), "lo");
        assert_eq!(name(Some("^=eth0"), None), "eth01");
        assert_eq!(name(Some("lo,eth"), None), "lo");
        assert_eq!(name(None, Some("AF_INET6")), "ens0");
        assert!(name(None, Some("AF_IB")).contains("AF_IB"));
    }

    #[test]
    fn names_are_preferred_in_nccls_order() {
        let all = ["virbr0", "lo", "docker0", "eth0", "ib0"].map(|name| interface(name, "10.0.0.1:0", true));
        for (left, expected) in [(5, "ib0"), (4, "eth0"), (3, "docker0"), (2, "lo"), (1, "virbr0")] {
            assert_eq!(chosen(&all[..left], None, None), expected);
            // Of what is left by a list of names that are not wanted, too.
            assert_eq!(chosen(&all[..left], Some("^none"), None), expected);
        }
        assert_eq!(
            chosen(&all, Some("eth,ib"), None),
            "eth0",
            "the system's order of what is listed"
        );
        let names = ["ibs3", "enp1s0", "docker_gwbridge", "lo", "virbr0-nic"];
        assert_eq!(names.map(preference), [0, 1, 2, 3, 4]);
    }

    #[test]
    fn an_interface_without_a_carrier_is_named_and_not_used() {
        let mut interfaces = vec![interface("enp1s0", "10.2.0.1:0", false)];
        let refused = chosen(&interfaces, None, None);
        assert!(
            refused.ends_with("there are: ; down or without a carrier: enp1s0"),
            "{refused}"
        );
        interfaces.extend(machine());
        assert_eq!(chosen(&interfaces, None, None), "eth0");
        assert_eq!(chosen(&interfaces, Some("en,eth"), Some("AF_INET")), "eth0");
    }

    #[test]
    fn this_machine_has_an_interface_that_scopes_name() {
        assert!(all().unwrap().iter().any(|interface| interface.runs));
        assert_eq!(
            (index_of("lo"), index_of("7"), index_of("0")),
            (Some(1), Some(7), None)
        );
        assert_eq!((index_of("no such"), index_of("")), (None, None));
    }
}
