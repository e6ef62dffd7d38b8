//! Ranks as processes, with proxies and no communicator.

#[path = "../transport/ranks.rs"]
#[expect(dead_code, reason = "shared with the tests")]
mod ranks;

use std::{sync::Arc, thread};

use ranks::{PATIENCE, Rank, consume, produce, seed};
use ringsight_comm::{
    bootstrap::{self, UniqueId},
    proxy::{
        ProxyAddress,
        client::ProxyClient,
        message::{Endpoint, Request, Transport},
    },
};

use crate::common::{
    processes::{place_of_process, variable},
    variables::{ID, PLACE, WHAT},
};

/// One of four ranks, of which rank 3 is killed in the second operation.
pub(crate) fn ring() {
    let (id, rank, ranks) = place_of_process();
    let id = UniqueId::from_bytes(&id.0).unwrap();
    let rank = Rank::new(&id, rank as u32, ranks as u32, None);
    assert_eq!(rank.topology.nodes(), 2);
    let me = rank.rank();
    let ring = rank.topology.ring(0);
    let (next, prev) = (ring[1], ring[3]);
    let connections = rank.connector.connect_ring(0).unwrap();
    let run = |op: u32, steps: u32, moved: u32| {
        if let Some(connection) = connections.next.proxy {
            rank.post(rank.op(connection, next, true, (op, steps)));
        }
        if let Some(connection) = connections.prev.proxy {
            rank.post(rank.op(connection, prev, false, (op, steps)));
        }
        thread::scope(|scope| {
            scope.spawn(|| produce(&connections.next.fifo, seed(me, next, op as u8), moved));
            scope.spawn(|| consume(&connections.prev.fifo, seed(prev, me, op as u8), moved));
        });
    };
    run(1, 50, 50);
    rank.proxy.stop();
    rank.bootstrap.barrier().unwrap();
    // The second operation never ends: rank 3's process is killed in it.
    run(2, 50, 5);
    if me == 3 {
        // Not before the others wait for nothing else.
        for other in 0..3 {
            rank.bootstrap.recv(other, 1).unwrap();
        }
        // SAFETY: kills this very process, as a machine would.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    }
    rank.bootstrap.send(3, 1, &[]).unwrap();
    // Its neighbours on the network see it by the connection, its node's ranks and everybody else by bootstrap.
    if connections.next.proxy.is_some() && next == 3 || connections.prev.proxy.is_some() && prev == 3 {
        let text = rank.errors.recv_timeout(PATIENCE).unwrap();
        assert!(
            text.contains("rank 3") && text.contains("channel 0, step"),
            "{text}"
        );
    }
    match rank.bootstrap.barrier() {
        Err(bootstrap::Error::PeerLost { rank: 3, .. }) => {}
        other => panic!("{other:?}"),
    }
}

/// A process that is none of rank 0's asks rank 0's proxy, as rank 1, and prints the answers.
pub(crate) fn stranger() {
    let address: ProxyAddress = variable(WHAT).parse().unwrap();
    let place = variable(PLACE);
    let (theirs, ours) = place.split_once(' ').unwrap();
    let (theirs, ours): (u32, u32) = (theirs.parse().unwrap(), ours.parse().unwrap());
    let client = ProxyClient::connect(&address.unix, 0, Arc::default(), PATIENCE).unwrap();
    let init = |rank, channel| Request::Init {
        cookie: variable(ID).parse().unwrap(),
        rank,
        endpoint: Endpoint {
            comm: 0,
            peer: 1,
            channel,
            p2p: true,
            is_send: false,
            transport: Transport::Shm,
        },
    };
    let slot_bytes = ranks::SLOT as u32;
    for request in [
        Request::Setup { connection: theirs },
        init(0, 4),
        init(1, 4),
        Request::SharedInit {
            connection: theirs,
            slot_bytes,
        },
        Request::Setup { connection: theirs },
        Request::Setup { connection: ours },
        Request::Connect {
            connection: ours,
            address: Some(address.tcp),
        },
        init(2, 4),
        Request::Stop,
        Request::Destroy { connection: theirs },
    ] {
        println!("{:?}", client.call_blocking(&request));
    }
}

/// Asks rank 0's proxy once it is told to, and prints the answer and how long it took, milliseconds.
pub(crate) fn asks_when_told() {
    let address: ProxyAddress = variable(WHAT).parse().unwrap();
    println!("ready");
    std::io::stdin().read_line(&mut String::new()).unwrap();
    let begun = std::time::Instant::now();
    let client = ProxyClient::connect(&address.unix, 0, Arc::default(), PATIENCE).unwrap();
    let answer = client.call_blocking(&Request::Stop);
    println!("{} {answer:?}", begun.elapsed().as_millis());
}
