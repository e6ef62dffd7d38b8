//! What goes over RDMA when nothing fails.

use std::{
    collections::BTreeSet,
    env,
    fs::File,
    io::Read as _,
    os::fd::{FromRawFd as _, OwnedFd},
    process::Command,
};

use ringsight_comm::{abi, device::Stream};
use ringsight_records::{Flags, Function, Kind, Record, State};

use super::{
    links::{set_mtu, two_ports},
    nodes::{check, ranks_of_two_nodes, two_nodes},
};
use crate::common::{Call, Rank, config, host, ok, place_of_process, watch::Watch};

/// Tells a rank to do no more than show that it can.
pub(crate) const LITTLE: &str = "RDMA_TEST_LITTLE";

#[test]
#[ignore = "helper: needs RDMA devices, run in a guest"]
fn data_goes_over_rdma() {
    let over_rdma = |what, change: &dyn Fn(&mut Command)| {
        let ended = two_nodes("data::worker", |_, command| change(command));
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
#[ignore = "helper: needs RDMA devices, run in a guest"]
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
#[ignore = "helper: the body of one rank; started by a test above"]
fn ring() {
    let Some((id, rank, ranks)) = place_of_process() else {
        return;
    };
    let rank = Rank::join_with(id, rank, ranks, &mut config());
    Call::new(Function::AllReduce, 5003).check(&rank, true);
    rank.leave();
    println!("rank done");
}

#[test]
#[ignore = "helper: needs RDMA devices, run in a guest"]
fn ports_with_different_mtus_use_the_smaller() {
    set_mtu("nic0", 1500);
    let ended = two_nodes("data::worker", |_, _| {});
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
#[ignore = "helper: needs RDMA devices, run in a guest"]
fn packets_are_of_the_programs_traffic_class_unless_the_environment_names_another() {
    for (variable, wanted) in [(None, 0x68), (Some("32"), 32)] {
        let packets = Packets::watch();
        let ended = two_nodes("data::worker", |_, command| {
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

/// The traffic class that a rank's program asks for.
const CLASS: &str = "RDMA_TEST_CLASS";

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

#[test]
#[ignore = "helper: the body of one rank; started by tests here and of what falls back"]
fn worker() {
    let Some((id, rank, ranks)) = place_of_process() else {
        return;
    };
    let mut settings = config();
    if let Ok(class) = env::var(CLASS) {
        settings.traffic_class = class.parse().unwrap();
    }
    let rank = Rank::join_with(id, rank, ranks, &mut settings);
    // Less than a slot, more than one, and what goes with a notice.
    for count in [1, 17, 5003] {
        Call::new(Function::AllReduce, count).check(&rank, count == 17);
    }
    if env::var_os(LITTLE).is_none() {
        for function in [Function::AllGather, Function::ReduceScatter, Function::Broadcast] {
            Call::new(function, 5003).check(&rank, false);
        }
        messages(&rank);
        replays(&rank);
        watched(rank, &Call::new(Function::AllReduce, 70_001));
    } else {
        rank.leave();
    }
    println!("rank done");
}

/// An operation whose work requests are on record: every step that is sent, every one that arrives, and all their bytes.
fn watched(rank: Rank, call: &Call) {
    let watch = Watch::begin_for(Kind::ProxyStep.bit() | Kind::NetPlugin.bit());
    call.check(&rank, true);
    // With the communicator its threads are gone: nothing more comes.
    rank.leave();
    let records = watch.end();
    let bytes = |records: Vec<&Record>| -> u64 { records.iter().map(|record| record.bytes).sum() };
    // A receiver's step ends when its device is done with it, which of the operation before may be now.
    for (sends, here) in [(true, State::STOP), (false, State::STEP_RECV_GPU_WAIT)] {
        let of = |kind, state| {
            let of = move |record: &&Record| record.kind() == Some(kind) && record.state == state;
            let of = records.iter().filter(of);
            of.filter(|record| record.flags().contains(Flags::SEND) == sends)
                .collect::<Vec<_>>()
        };
        let (steps, carried) = (of(Kind::ProxyStep, here), of(Kind::NetPlugin, State::STOP));
        assert!(!steps.is_empty());
        assert_eq!(carried.len(), steps.len(), "sends: {sends}");
        let is_of_port = |record: &&Record| record.carrier().port == Some(0) && record.carrier().number > 0;
        assert!(carried.iter().all(is_of_port), "sends: {sends}");
        assert_eq!(bytes(carried), bytes(steps), "sends: {sends}");
    }
}

/// Sends and receives of all sizes in one group, both ways.
pub(crate) fn messages(rank: &Rank) {
    let peer = 1 - rank.rank;
    let sizes = [0_usize, 1, 48, 49, 4096, 70_000];
    let content = |from: usize, size: usize| -> Vec<u8> {
        (0..size).map(|at| (at * 31 + from * 7 + size) as u8).collect()
    };
    let sent: Vec<Vec<u8>> = sizes.iter().map(|size| content(rank.rank, *size)).collect();
    let mut got: Vec<Vec<u8>> = sizes.iter().map(|size| vec![0; *size]).collect();
    // SAFETY: no arguments.
    ok(unsafe { abi::ncclGroupStart() });
    for (sent, got) in sent.iter().zip(&mut got) {
        let call = |function| Call {
            data_type: ringsight_records::DataType::Uint8,
            ..Call::peer(function, sent.len(), peer)
        };
        ok(rank.call(&call(Function::Send), sent.as_ptr(), std::ptr::null_mut()));
        ok(rank.call(&call(Function::Recv), std::ptr::null(), got.as_mut_ptr()));
    }
    // SAFETY: no arguments; the buffers of the calls live until the stream is synchronized.
    ok(unsafe { abi::ncclGroupEnd() });
    rank.synchronize();
    for (size, got) in sizes.iter().zip(&got) {
        assert!(*got == content(peer, *size), "{size} bytes");
    }
}

/// A captured all-reduce, replayed: each replay's network steps are posted without the host's doing.
pub(crate) fn replays(rank: &Rank) {
    const REPLAYS: i32 = 8;
    let device = host();
    let stream = device.stream_create().unwrap();
    let mut data = vec![1_f32; 3000];
    device.capture_begin(stream).unwrap();
    add_up(rank, stream, &mut data);
    let graph = device.capture_end(stream).unwrap();
    let exec = device.graph_instantiate(graph).unwrap();
    device.graph_destroy(graph).unwrap();
    for _ in 0..REPLAYS {
        device.graph_launch(exec, stream).unwrap();
    }
    device.stream_synchronize(stream).unwrap();
    assert!(
        data.iter().all(|value| *value == 2_f32.powi(REPLAYS)),
        "{}",
        data[0]
    );
    device.graph_exec_destroy(exec).unwrap();
    device.stream_destroy(stream).unwrap();
}

/// What a graph does with `data` when it is launched.
pub(crate) fn add_up(rank: &Rank, stream: Stream, data: &mut [f32]) {
    let at = data.as_mut_ptr().cast();
    let on = Rank { stream, ..*rank };
    ok(on.call(&Call::new(Function::AllReduce, data.len()), at, at));
}
