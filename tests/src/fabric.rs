//! The RDMA ports of two ranks in a guest, two each, and how they fail: soft-RoCE links, or mlx5 devices on the stand-in for their
//! hardware. Shared by the test crates of the workspace through `#[path]`.

use std::{
    io,
    net::Ipv4Addr,
    path::Path,
    thread,
    time::{Duration, Instant},
};

#[path = "notices.rs"]
mod notices;

/// What the ports are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fabric {
    /// A link is a virtual wire: when one end of it is down, the other has no carrier, and both say so.
    SoftRoce,
    /// All ports are in one InfiniBand subnet: of one that is down only its own device says so. When and how the devices fail is the
    /// stand-in's choice.
    Mlx5,
    /// The same, with the two ports of a rank on one device: a card with two ports.
    DualPort,
}

/// A rank's port on one of the links.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Port {
    /// 0 or 1.
    pub(crate) rank: usize,
    /// 0 or 1. The ranks' ports of a link are the ends of a path.
    pub(crate) link: usize,
}

impl Port {
    const ALL: [Self; 4] = [
        Self { rank: 0, link: 0 },
        Self { rank: 0, link: 1 },
        Self { rank: 1, link: 0 },
        Self { rank: 1, link: 1 },
    ];

    /// Soft-RoCE: the network interface.
    fn interface(self) -> String {
        format!("{}{}", ["nic", "pnic"][self.rank], self.link)
    }
}

/// Where the stand-in is told what is to fail.
const FAULTS: &str = "/sys/kernel/debug/fakehca";

/// Devices say that they are up in less, under emulation on a busy machine.
const PATIENCE: Duration = Duration::from_secs(60);

impl Fabric {
    /// What this guest has.
    pub(crate) fn here() -> Self {
        if Path::new("/sys/class/infiniband/mlx5_0/ports/2").exists() {
            Self::DualPort
        } else if Path::new(FAULTS).exists() {
            Self::Mlx5
        } else {
            Self::SoftRoce
        }
    }

    /// mlx5: number of the device that a port is of.
    fn device_number(self, port: Port) -> usize {
        match self {
            Self::DualPort => port.rank,
            Self::Mlx5 | Self::SoftRoce => port.rank * 2 + port.link,
        }
    }

    /// The device that a port is of.
    pub(crate) fn device(self, port: Port) -> String {
        match self {
            Self::SoftRoce => format!("{}{}", ["hca", "peer"][port.rank], port.link),
            Self::Mlx5 | Self::DualPort => format!("mlx5_{}", self.device_number(port)),
        }
    }

    /// Number of a port on its device.
    pub(crate) fn number(self, port: Port) -> u8 {
        match self {
            Self::DualPort => 1 + port.link as u8,
            Self::Mlx5 | Self::SoftRoce => 1,
        }
    }

    /// A port as `NCCL_IB_HCA` and the log name it.
    pub(crate) fn name(self, port: Port) -> String {
        format!("{}:{}", self.device(port), self.number(port))
    }

    /// Brings a port up or down.
    pub(crate) fn set_up(self, port: Port, up: bool) {
        match self {
            Self::SoftRoce => set_interface(&port.interface(), up),
            Self::Mlx5 | Self::DualPort => {
                let what = if up { "port_up" } else { "port_down" };
                self.fault(port, &format!("{what} {}", self.number(port)));
            }
        }
    }

    /// Whether the device of `of` says that its port is down when `down` is.
    pub(crate) fn tells(self, of: Port, down: Port) -> bool {
        match self {
            Self::SoftRoce => of.link == down.link,
            Self::Mlx5 | Self::DualPort => of == down,
        }
    }

    /// Has the packets of a link lost, both ways, or no longer. No device notices.
    pub(crate) fn lose_packets(self, link: usize, lost: bool) {
        for rank in 0..2 {
            self.lose_sent(Port { rank, link }, lost);
        }
    }

    /// Has what a port sends lost, or no longer; with mlx5 also what is sent to it. No device notices.
    pub(crate) fn lose_sent(self, port: Port, lost: bool) {
        match self {
            Self::SoftRoce => misdirect(port, lost),
            Self::Mlx5 | Self::DualPort => {
                let what = format!("lose {} {}", u8::from(lost), self.number(port));
                self.fault(port, &what);
            }
        }
    }

    /// Has what tells of steps lost of all that a port sends, and not their bytes, or no longer. No device notices.
    pub(crate) fn lose_notices(self, port: Port, lost: bool) {
        match self {
            Self::SoftRoce => {
                let rank = 1 - port.rank;
                let lost = lost.then_some(notices::Lost::Notices);
                notices::lose(&Port { rank, ..port }.interface(), lost);
            }
            Self::Mlx5 | Self::DualPort => {
                let what = format!("lose_imm {} {}", u8::from(lost), self.number(port));
                self.fault(port, &what);
            }
        }
    }

    /// Soft-RoCE: has what comes to one queue pair of a port lost, until [`Fabric::mend`]. No device notices.
    pub(crate) fn lose_of_queue_pair(self, port: Port, number: u32) {
        assert_eq!(self, Self::SoftRoce);
        notices::lose(&port.interface(), Some(notices::Lost::OfQueuePair(number)));
    }

    /// Has the stand-in make a fault of a port's device.
    fn fault(self, port: Port, what: &str) {
        let line = format!("{} {what}", self.device_number(port));
        std::fs::write(FAULTS, &line).unwrap_or_else(|error| panic!("{line}: {error}"));
    }

    /// Brings everything up, with all packets, and waits until the devices say so.
    pub(crate) fn mend(self) {
        for port in Port::ALL {
            self.set_up(port, true);
            self.lose_notices(port, false);
        }
        for link in 0..2 {
            self.lose_packets(link, false);
        }
        let start = Instant::now();
        for port in Port::ALL {
            let (device, number) = (self.device(port), self.number(port));
            let file = format!("/sys/class/infiniband/{device}/ports/{number}/state");
            while !std::fs::read_to_string(&file).unwrap().contains("ACTIVE") {
                assert!(start.elapsed() < PATIENCE, "{device}:{number} does not come up");
                thread::sleep(Duration::from_millis(5));
            }
        }
    }

    /// Bytes that all ports have sent; `None` where nobody counts them.
    pub(crate) fn sent_bytes(self) -> Option<u64> {
        let of = |port: Port| {
            let file = format!("/sys/class/net/{}/statistics/tx_bytes", port.interface());
            let text = std::fs::read_to_string(file).unwrap();
            text.trim().parse::<u64>().unwrap()
        };
        (self == Self::SoftRoce).then(|| Port::ALL.into_iter().map(of).sum())
    }
}

/// mlx5: has a queue pair of a port's device fail, as if the device could not read its queue any more.
pub(crate) fn fail_queue_pair(port: Port, number: u32) {
    Fabric::here().fault(port, &format!("qp_fatal {number:#x}"));
}

/// mlx5: has a queue pair of a port's device answer what comes next with a remote operational error, and fail.
pub(crate) fn refuse(port: Port, number: u32) {
    Fabric::here().fault(port, &format!("qp_refuse {number:#x}"));
}

/// mlx5: has a port's device not answer commands of this number any more, nor those behind them; 0: it answers all.
pub(crate) fn hold_commands(port: Port, number: u16) {
    Fabric::here().fault(port, &format!("cmdhang {number:#x}"));
}

/// mlx5: has the first port of a port's device go down while it is given the `nth` command of this number from now on.
pub(crate) fn fall_at(port: Port, number: u16, nth: u32) {
    Fabric::here().fault(port, &format!("port_down_at {number:#x} {nth}"));
}

/// mlx5: has a port's device refuse commands of this number for want of resources; 0: none.
pub(crate) fn refuse_commands(port: Port, number: u16) {
    Fabric::here().fault(port, &format!("cmdfail {number:#x} 8 0"));
}

/// mlx5: has a port's device die, for good.
pub(crate) fn fail_device(port: Port) {
    Fabric::here().fault(port, "die");
}

/// mlx5: has the completion queue of a queue pair fail.
pub(crate) fn fail_completion_queue(port: Port, number: u32) {
    let (fabric, text) = (Fabric::here(), std::fs::read_to_string(FAULTS).unwrap());
    let section = text
        .split("hca ")
        .find(|section| section.starts_with(&format!("{}:", fabric.device_number(port))))
        .unwrap();
    let queue = section
        .lines()
        .find(|line| line.contains(&format!("qpn {number:#x} ")))
        .and_then(|line| line.split("cqn ").nth(1))
        .unwrap_or_else(|| panic!("no queue pair {number:#x} in {text}"));
    // 1 is an overrun.
    fabric.fault(port, &format!("cq_err {queue} 1"));
}

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
fn set_interface(interface: &str, up: bool) {
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

/// Has what an interface sends lost, or no longer: it goes to a hardware address that nobody has. Neither the interfaces nor the
/// devices notice.
fn misdirect(port: Port, lost: bool) {
    let interface = port.interface();
    // SAFETY: all-zero bytes are a valid request.
    let mut entry: libc::arpreq = unsafe { std::mem::zeroed() };
    let peer = Ipv4Addr::new(10, 0, port.link as u8, 2 - port.rank as u8);
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
    entry.arp_dev = named(&interface);
    let number = if lost {
        let hardware = [2, 0, 0, 0, port.link as u8, 0x77_u8].map(u8::cast_signed);
        entry.arp_ha.sa_family = ARPHRD_ETHER;
        entry.arp_ha.sa_data[..6].copy_from_slice(&hardware);
        entry.arp_flags = ATF_COM | ATF_PERM;
        SIOCSARP
    } else {
        let mut known = entry;
        let is_ours = request(SIOCGARP, &mut known).is_ok() && known.arp_flags & ATF_PERM != 0;
        if !is_ours {
            return;
        }
        // The address is asked for again.
        SIOCDARP
    };
    request(number, &mut entry).unwrap_or_else(|error| panic!("{interface}: {error}"));
}

const SIOCDARP: libc::Ioctl = 0x8953;
const SIOCGARP: libc::Ioctl = 0x8954;
const SIOCSARP: libc::Ioctl = 0x8955;
const ARPHRD_ETHER: libc::sa_family_t = 1;
const ATF_COM: libc::c_int = 2;
const ATF_PERM: libc::c_int = 4;
