//! The guest's links, which fail.

use std::{
    collections::VecDeque,
    io,
    net::Ipv4Addr,
    time::{Duration, Instant},
};

use super::{PATIENCE, case::mix};

/// A request of the kernel about an interface, sent by a socket of no other use.
fn request<T>(number: libc::Ioctl, request: &mut T) -> io::Result<()> {
    // SAFETY: a socket, of which only the number is used.
    let socket = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    assert!(socket >= 0, "{}", io::Error::last_os_error());
    // SAFETY: the callers' requests are of the type that the number stands for.
    let code = unsafe { libc::ioctl(socket, number, std::ptr::from_mut(request)) };
    let result = match code {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    };
    // SAFETY: from above, once.
    unsafe { libc::close(socket) };
    result
}

fn named<const N: usize>(name: &str) -> [libc::c_char; N] {
    let mut letters = [0; N];
    for (to, from) in letters.iter_mut().zip(name.bytes()) {
        *to = from.cast_signed();
    }
    letters
}

/// Brings an interface up or down.
pub(crate) fn set_up(interface: &str, up: bool) {
    // SAFETY: all-zero bytes are a valid request.
    let mut flags: libc::ifreq = unsafe { std::mem::zeroed() };
    flags.ifr_name = named(interface);
    request(libc::SIOCGIFFLAGS, &mut flags).unwrap();
    // SAFETY: the flags are what was just read.
    unsafe {
        match up {
            true => flags.ifr_ifru.ifru_flags |= libc::IFF_UP as i16,
            false => flags.ifr_ifru.ifru_flags &= !(libc::IFF_UP as i16),
        }
    }
    request(libc::SIOCSIFFLAGS, &mut flags).unwrap();
}

/// Has the packets of a link lost, both ways, or no longer: they go to a hardware address that nobody has. Neither the interfaces
/// nor the devices notice.
pub(crate) fn lose_packets(link: usize, lost: bool) {
    for (interface, other) in [("nic", 2), ("pnic", 1)] {
        // SAFETY: all-zero bytes are a valid request.
        let mut entry: libc::arpreq = unsafe { std::mem::zeroed() };
        let peer = Ipv4Addr::new(10, 0, link as u8, other);
        let address = libc::sockaddr_in {
            sin_family: libc::AF_INET as libc::sa_family_t,
            sin_port: 0,
            sin_addr: libc::in_addr {
                s_addr: u32::from_ne_bytes(peer.octets()),
            },
            sin_zero: [0; 8],
        };
        // SAFETY: both are addresses of a socket, of the same length.
        entry.arp_pa = unsafe { std::mem::transmute::<libc::sockaddr_in, libc::sockaddr>(address) };
        entry.arp_dev = named(&format!("{interface}{link}"));
        let hardware = [2, 0, 0, 0, link as u8, 0x77_u8].map(u8::cast_signed);
        entry.arp_ha.sa_family = ARPHRD_ETHER;
        entry.arp_ha.sa_data[..6].copy_from_slice(&hardware);
        entry.arp_flags = ATF_COM | ATF_PERM;
        // Removed, the address is asked for again.
        let number = if lost { SIOCSARP } else { SIOCDARP };
        request(number, &mut entry).unwrap_or_else(|error| panic!("{interface}{link}: {error}"));
    }
}

const SIOCSARP: libc::Ioctl = 0x8955;
const SIOCDARP: libc::Ioctl = 0x8953;
const ARPHRD_ETHER: libc::sa_family_t = 1;
const ATF_COM: libc::c_int = 2;
const ATF_PERM: libc::c_int = 4;

/// Brings everything up and waits until the devices say so.
pub(crate) fn mend() {
    for link in 0..2 {
        set_up(&format!("nic{link}"), true);
        set_up(&format!("pnic{link}"), true);
    }
    let start = Instant::now();
    for device in ["hca0", "hca1", "peer0", "peer1"] {
        let file = format!("/sys/class/infiniband/{device}/ports/1/state");
        while !std::fs::read_to_string(&file).unwrap().contains("ACTIVE") {
            assert!(start.elapsed() < PATIENCE, "{device} does not come up");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Bytes that all interfaces have sent.
pub(crate) fn sent_bytes() -> u64 {
    let of = |interface: &str| {
        let file = format!("/sys/class/net/{interface}/statistics/tx_bytes");
        let text = std::fs::read_to_string(file).unwrap();
        text.trim().parse::<u64>().unwrap()
    };
    ["nic0", "nic1", "pnic0", "pnic1"].into_iter().map(of).sum()
}

/// What is to be done to an interface, and when.
pub(crate) type Plan = VecDeque<(Duration, String, bool)>;

/// One link after the other down and up again at random, from `start` on; at last the primary's port of the first rank stays down.
pub(crate) fn chaos(seed: u64, start: Duration, times: u32) -> Plan {
    let mut plan = Plan::new();
    let (mut at, mut drawn) = (start, seed);
    for _ in 0..times {
        drawn = mix(drawn);
        let link = drawn & 1;
        let interface = format!("{}nic{link}", if drawn & 2 == 0 { "" } else { "p" });
        // Down for up to 128 ms, and the next from at once to 256 ms later: often before this one is up, and while ends recover.
        at += Duration::from_millis(drawn >> 8 & 0xff);
        let up = at + Duration::from_millis(1 + (drawn >> 16 & 0x7f));
        plan.push_back((at, interface.clone(), false));
        plan.push_back((up, interface, true));
    }
    plan.push_back((at + Duration::from_millis(200), "nic0".into(), false));
    plan.make_contiguous().sort_by_key(|(at, ..)| *at);
    plan
}
