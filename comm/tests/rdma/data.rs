//! What goes over RDMA when nothing fails.

use std::{
    collections::BTreeSet,
    fs::File,
    io::Read as _,
    os::fd::{FromRawFd as _, OwnedFd},
    process::Command,
};

use super::{
    links::{set_mtu, two_ports},
    nodes::{check, ranks_of_two_nodes, two_nodes},
    shared::{CLASS, LITTLE},
};

#[test]
#[ignore = "guest: needs RDMA devices"]
fn data_goes_over_rdma() {
    let over_rdma = |what, change: &dyn Fn(&mut Command)| {
        let ended = two_nodes("data::transfers", |_, command| change(command));
        check(
            what,
            &ended,
            &["[send] via NET/IB/0", "[receive] via NET/IB/0"],
            &["via NET/Socket", "NCCL WARN NET/IB"],
        );
    };
    over_rdma("one queue pair", &|_| {});
    over_rdma("four queue pairs, in turn", &|command| {
        command.env("NCCL_IB_QPS_PER_CONNECTION", "4");
    });
    over_rdma("four queue pairs, in parts", &|command| {
        command
            .env("NCCL_IB_QPS_PER_CONNECTION", "4")
            .env("NCCL_IB_SPLIT_DATA_ON_QPS", "1");
    });
    over_rdma("nothing else allowed, link-local GID, in order", &|command| {
        command
            .env("NCCL_NET", "IB")
            .env("NCCL_IB_GID_INDEX", "0")
            .env("NCCL_IB_PCI_RELAXED_ORDERING", "0");
    });
}

/// Each link is a network of its own. The ring goes from a rank that begins with its second port to one that begins with its first.
#[test]
#[ignore = "guest: needs RDMA devices"]
fn ports_of_a_connection_are_of_one_number_unless_they_may_be_others() {
    let with = |cross: Option<&str>| {
        ranks_of_two_nodes("data::ring", 4, |rank, command| {
            two_ports(rank / 2, command).env("NCCL_IB_MERGE_NICS", "1");
            if let Some(cross) = cross {
                command.env("NCCL_CROSS_NIC", cross);
            }
        })
    };
    for cross in [None, Some("0")] {
        let ended = with(cross);
        let what = format!("NCCL_CROSS_NIC={cross:?}");
        check(
            &what,
            &ended,
            &["NCCL_IB_MERGE_NICS has no effect: "],
            &["use a socket", "NCCL WARN NET/IB"],
        );
        // Both ports are used, each for one channel of each ring.
        for port in ["via NET/IB/0", "via NET/IB/1"] {
            assert!(
                ended.iter().any(|(_, text)| text.contains(port)),
                "{what}: {port}"
            );
        }
    }
    let ended = with(Some("1"));
    let said = |text: &str| ended.iter().any(|(well, all)| *well && all.contains(text));
    assert!(said("use a socket on channel 0, not RDMA"), "{ended:?}");
}

#[test]
#[ignore = "guest: needs RDMA devices"]
fn ports_with_different_mtus_use_the_smaller() {
    set_mtu("nic0", 1500);
    let ended = two_nodes("data::transfers", |_, _| {});
    set_mtu("nic0", 4200);
    // Requests of the larger one would not get over: the interface takes no packets of that length.
    check(
        "different MTUs",
        &ended,
        &["[send] via NET/IB/0", "an MTU of ", ": the smaller is used"],
        &["via NET/Socket", "NCCL WARN NET/IB"],
    );
    assert!(
        ended[0]
            .1
            .contains("hca0 has an MTU of 1024 bytes, the peer's peer0 one of 4096")
    );
}

#[test]
#[ignore = "guest: needs RDMA devices"]
fn packets_are_of_the_programs_traffic_class_unless_the_environment_names_another() {
    for (variable, wanted) in [(None, 0x68), (Some("32"), 32)] {
        let packets = Packets::watch();
        let ended = two_nodes("data::transfers", |_, command| {
            command.env(LITTLE, "1").env(CLASS, "104");
            if let Some(class) = variable {
                command.env("NCCL_IB_TC", class);
            }
        });
        check(
            "traffic class",
            &ended,
            &["[send] via NET/IB/0"],
            &["via NET/Socket"],
        );
        let seen = packets.classes();
        assert!(
            !seen.is_empty() && seen.iter().all(|class| *class == wanted),
            "{seen:?}"
        );
    }
}

/// RoCE packets that interfaces of this machine send and receive.
struct Packets(OwnedFd);

impl Packets {
    /// From here on.
    fn watch() -> Self {
        let ip = (libc::ETH_P_ALL as u16).to_be();
        // SAFETY: no pointers.
        let socket =
            unsafe { libc::socket(libc::AF_PACKET, libc::SOCK_DGRAM | libc::SOCK_NONBLOCK, ip.into()) };
        assert!(socket >= 0, "{}", std::io::Error::last_os_error());
        // SAFETY: just opened.
        Self(unsafe { OwnedFd::from_raw_fd(socket) })
    }

    /// What classes they were of, as many as the socket had room for.
    fn classes(self) -> BTreeSet<u8> {
        const ROCE: [u8; 2] = 4791_u16.to_be_bytes();
        let mut file = File::from(self.0);
        let mut packet = [0; 64];
        let mut classes = BTreeSet::new();
        while let Ok(length) = file.read(&mut packet) {
            // IPv4 without options, and UDP.
            if length >= 28 && packet[0] == 0x45 && packet[9] == 17 && packet[22..24] == ROCE {
                classes.insert(packet[1]);
            }
        }
        classes
    }
}
