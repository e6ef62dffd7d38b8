//! What two proxies offer each other for RDMA, read wrong: a relay between them changes a byte of it. Needs RDMA devices that reach each
//! other.

use std::{
    io::{Read as _, Write as _},
    net::{Shutdown, SocketAddr, TcpListener, TcpStream},
    path::Path,
    sync::Arc,
    thread,
};

use ringsight_comm::{
    proxy::ProxyAddress,
    transport::{NET_SOCKET, NET_VERBS, rdma::Rdma},
};
use ringsight_comm_base::names::NameFilter;
use ringsight_verbs::{config::Config, failover::Settings, port::Net, port_health::PortHealth};

use super::ranks::{PATIENCE, Rank, consume, produce, seed, turn, world_of};

/// Bytes before the offer in what the sender says, and in what the receiver answers.
const BEFORE: [usize; 2] = [40, 12];
/// Where an offer has its version, and where it has zeros.
const VERSION_AT: usize = 4;
const ZEROS_AT: usize = 28;
const STEPS: u32 = 20;

/// What is changed on the way.
#[derive(Clone, Copy, Debug)]
struct Change {
    /// In the offer of the sender (0) or the receiver (1).
    of: usize,
    /// The byte's place in the offer.
    at: usize,
}

/// RDMA over one device.
fn rdma(device: &str, required: bool) -> Rdma {
    let config = Config {
        devices: NameFilter::parse(device),
        ..Config::default()
    };
    Rdma {
        net: Arc::new(Net::new(config, Path::new("/sys")).unwrap()),
        port_health: PortHealth::new(Arc::new(Settings::default())),
        required,
        class: None,
    }
}

/// Passes on what comes from `from`, but for one bit of the byte at `changed`.
fn pass_on(mut from: TcpStream, mut to: TcpStream, changed: Option<usize>) {
    let (mut bytes, mut passed) = ([0; 4096], 0);
    while let Ok(count @ 1..) = from.read(&mut bytes) {
        if let Some(at) = changed
            .and_then(|at| at.checked_sub(passed))
            .filter(|at| *at < count)
        {
            bytes[at] ^= 0x40;
        }
        passed += count;
        if to.write_all(&bytes[..count]).is_err() {
            break;
        }
    }
    // The other end has closed it already, if not.
    let _ = to.shutdown(Shutdown::Write);
}

/// Where a relay to `there` listens for one connection.
fn relay(there: SocketAddr, change: Option<Change>) -> SocketAddr {
    let listener = TcpListener::bind((there.ip(), 0)).unwrap();
    let here = listener.local_addr().unwrap();
    thread::spawn(move || {
        let near = listener.accept().unwrap().0;
        let far = TcpStream::connect(there).unwrap();
        let changed = [0, 1].map(|of| {
            let change = change.filter(|change| change.of == of)?;
            Some(BEFORE[of] + change.at)
        });
        let (answers, back) = (far.try_clone().unwrap(), near.try_clone().unwrap());
        thread::spawn(move || pass_on(answers, back, changed[1]));
        pass_on(near, far, changed[0]);
    });
    here
}

/// Connects rank 0 to rank 1 by way of a relay, and moves steps; over which transport, or why not.
fn connect(change: Option<Change>, required: bool) -> Result<&'static str, String> {
    let results = world_of(&[1, 2], |id, rank, ranks, host| {
        let device = ["=hca0", "=peer0"][rank as usize];
        let rank = Rank::with(
            (id, rank, ranks, host),
            |config| config.rdma = Some(rdma(device, required)),
            |address| {
                let there: ProxyAddress = address.parse().unwrap();
                let tcp = if rank == 1 {
                    relay(there.tcp, change)
                } else {
                    there.tcp
                };
                ProxyAddress { tcp, ..there }.to_string()
            },
        );
        rank.proxy.use_ports(vec![0], None);
        let (me, peer) = (rank.rank(), 1 - rank.rank());
        let result = if me == 0 {
            rank.connector
                .connect_send(peer, 0)
                .map_err(|error| error.to_string())
                .map(|send| {
                    rank.post(rank.op(send.proxy.unwrap(), peer, true, (1, STEPS)));
                    produce(&send.fifo, seed(0, 1, 0), STEPS);
                    rank.completed.recv_timeout(PATIENCE).unwrap();
                    send.transport
                })
        } else {
            let recv = rank.connector.connect_recv(peer, 0).unwrap();
            // Not where the sender has given up.
            if !required {
                rank.post(rank.op(recv.proxy.unwrap(), peer, false, (1, STEPS)));
                consume(&recv.fifo, seed(0, 1, 0), STEPS);
                rank.completed.recv_timeout(PATIENCE).unwrap();
            }
            Ok("")
        };
        rank.bootstrap.barrier().unwrap();
        result
    });
    results.into_iter().next().unwrap()
}

#[test]
#[ignore = "guest: needs RDMA devices"]
fn offers_of_another_version_or_malformed_are_named_and_sockets_are_used() {
    let _turn = turn();
    assert_eq!(connect(None, false), Ok(NET_VERBS), "the relay is no hindrance");
    let reasons = [
        (
            VERSION_AT,
            "the peer speaks version 70 of the connection data, we version 6",
        ),
        (ZEROS_AT, "the peer's connection data is malformed"),
    ];
    for (at, reason) in reasons {
        for of in [0, 1] {
            let change = Some(Change { of, at });
            assert_eq!(connect(change, false), Ok(NET_SOCKET), "{change:?}");
            let error = connect(change, true).unwrap_err();
            assert!(
                error.contains(reason) && error.contains("NCCL_NET=IB"),
                "{change:?}: {error}"
            );
        }
    }
}
