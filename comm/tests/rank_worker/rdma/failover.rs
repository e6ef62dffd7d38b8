//! Operations whose ports go down.

use std::{collections::HashMap, time::Instant};

use ringsight_comm::{abi, communicator::Handle};
use ringsight_records::{
    Flags, Function, Kind, PathChange, Record, State,
    connection::{Connection, LinkStage, PathCondition},
};

use super::{
    connections::{ends, until_none},
    data::{add_up, messages, replays},
    links::{lose_packets, move_gid},
    shared::DOWN,
};
use crate::{
    common::{
        Call, Rank, ok,
        processes::{rank_of_process, variable},
        waiting::PATIENCE,
        watch::Watch,
    },
    fabric::{Fabric, Port},
};

/// The rank that this process was started as, and the port that is taken down.
pub(crate) fn rank_and_port() -> (Rank, Port) {
    let rank = variable(DOWN).parse().unwrap();
    (rank_of_process(), Port { rank, link: 0 })
}

/// All-reduces of a ring, one of whose links loses its packets for a while.
pub(crate) fn lose_and_find() {
    let rank = rank_of_process();
    let rank = &rank;
    let start = Instant::now();
    let work = || {
        assert!(start.elapsed() < 2 * PATIENCE, "{:?}", ends());
        Call::new(Function::AllReduce, 5003).check(rank, true);
    };
    // Over the link's wire.
    let crossing = || {
        let own = rank.rank as u32;
        let ends = ends();
        let crossing = ends.into_iter().filter(move |end| own == 1 || end.peer == 1);
        crossing.collect::<Vec<_>>()
    };
    let count = |is_so: fn(&Connection) -> bool| crossing().iter().filter(|end| is_so(end)).count() as u64;
    work();
    assert!(!crossing().is_empty());
    if rank.rank == 0 {
        lose_packets(0, true);
    }
    until_none(rank, work, || count(|end| end.active != 1));
    let bad = [PathCondition::Suspect as u8, PathCondition::Down as u8];
    for end in crossing() {
        assert!(bad.contains(&end.path[0].condition), "{end:?}");
    }
    Call::new(Function::AllReduce, 1).check(rank, true);
    if rank.rank == 0 {
        lose_packets(0, false);
    }
    until_none(rank, work, || {
        count(|end| {
            let known = end.path[0].condition;
            end.active != 0 || known == PathCondition::Suspect as u8 || known == PathCondition::Down as u8
        })
    });
    rank.leave();
}

/// All-reduces that leave the first path, and come back to it when its GID stands at another index.
pub(crate) fn move_it() {
    let rank = rank_of_process();
    let rank = &rank;
    let link = Port { rank: 1, link: 0 };
    let start = Instant::now();
    let work = || {
        assert!(start.elapsed() < PATIENCE, "the path does not come back");
        Call::new(Function::AllReduce, 5003).check(rank, true);
    };
    let not_on = |path: u8| ends().iter().filter(|end| end.active != path).count() as u64;
    work();
    if rank.rank == 0 {
        Fabric::here().set_up(link, false);
    }
    until_none(rank, work, || u64::from(ends().iter().all(|end| end.epoch == 0)));
    if rank.rank == 0 {
        let [before, now] = move_gid();
        assert_ne!(before, now);
        Fabric::here().set_up(link, true);
    }
    until_none(rank, work, || not_on(0));
    // Connections that are made from here on find it there, too.
    let child = split(rank);
    Call::new(Function::AllReduce, 5003).check(&child, true);
    assert_eq!(not_on(0), 0, "{:?}", ends());
    // SAFETY: a live communicator.
    ok(unsafe { abi::ncclCommDestroy(child.comm) });
    rank.leave();
}

/// A communicator of the same ranks, with connections of its own.
pub(crate) fn split(rank: &Rank) -> Rank {
    let (mut comm, key) = (Handle(0), rank.rank as i32);
    // SAFETY: a live communicator, a valid place, and no settings.
    ok(unsafe { abi::ncclCommSplit(rank.comm, 0, key, &raw mut comm, std::ptr::null_mut()) });
    Rank { comm, ..*rank }
}

/// Collectives, messages and replays, each kind with connections of its own, while one link is down, then the other.
pub(crate) fn go_on() {
    let rank = rank_of_process();
    let rank = &rank;
    Call::new(Function::AllReduce, 1).check(rank, true);
    for round in 0..6 {
        let port = Port {
            rank: 0,
            link: round % 2,
        };
        if rank.rank == 0 && round % 3 != 2 {
            Fabric::here().set_up(port, false);
        }
        Call::new(Function::AllReduce, 70_001).check(rank, true);
        messages(rank);
        replays(rank);
        if rank.rank == 0 {
            Fabric::here().set_up(port, true);
        }
        Call::new(Function::AllGather, 5003).check(rank, false);
    }
    rank.leave();
}

/// All-reduces, during one of which a port goes down.
pub(crate) fn survive() {
    const ROUNDS: i32 = 10;
    let fabric = Fabric::here();
    let (rank, port) = rank_and_port();
    let watch = Watch::begin_for(Kind::Failover.bit() | Kind::NetPlugin.bit());
    let mut data = vec![1_f32; 30_001];
    for round in 0..ROUNDS {
        add_up(&rank, rank.stream, &mut data);
        if round == 3 && rank.rank == 0 {
            Fabric::here().set_up(port, false);
        }
        rank.synchronize();
        let expected = 2_f32.powi(round + 1);
        assert!(
            data.iter().all(|value| *value == expected),
            "round {round}: {}",
            data[0]
        );
    }
    // What `ringsight snapshot` shows, with the link still down.
    let shown = ends();
    let left = shown
        .iter()
        .find(|end| end.active == 1)
        .expect("an end that left its path");
    assert_eq!(
        (left.paths, left.phase, left.peer),
        (2, Connection::FLOWS, 1 - rank.rank as u32)
    );
    assert!(
        left.epoch > 0 && left.switches > 0 && left.last_switch_ns > 0 && left.cause > 0,
        "{left:?}"
    );
    let [primary, backup] = [left.path[0], left.path[1]];
    let own = [0, 1].map(|link| Port {
        rank: rank.rank,
        link,
    });
    let names = own.map(|port| fabric.device(port));
    assert_eq!([primary.device(), backup.device()], names, "{left:?}");
    let is_up = u8::from(!fabric.tells(own[0], port));
    assert_eq!((primary.port_up, backup.port_up), (is_up, 1), "{left:?}");
    assert_ne!(primary.condition, PathCondition::Good as u8, "{left:?}");
    assert_eq!(backup.stage, LinkStage::Ready as u8, "{left:?}");
    assert!(
        primary.consecutive_failures > 0 && primary.last_switch_ns > 0 && primary.cause > 0,
        "{left:?}"
    );
    // With the communicator its threads are gone: nothing more comes, and its connections are nobody's.
    rank.leave();
    assert_eq!(ends(), []);
    let records = watch.end();
    let changes = |state| {
        records
            .iter()
            .filter(move |record| record.kind() == Some(Kind::Failover) && record.state == state)
    };
    // Of either direction: an end that has nothing under way may notice later.
    assert!(changes(State::START).count() > 0);
    let switch = changes(State::PATH_SWITCHED).next().expect("a switch on record");
    let change = PathChange::from_value(switch.value);
    assert_eq!((change.from, change.to, change.port), (0, 1, Some(1)));
    assert!(change.cause.is_some() && change.number > 0, "{change:?}");
    assert!(changes(State::PATH_RECOVERED).count() > 0);
    for sends in [true, false] {
        let of = |record: &&Record| record.flags().contains(Flags::SEND) == sends;
        // With its first operation each end says which queue pairs it has, also of the path that may never be used.
        let told = changes(State::PATH_RESTORED).filter(of);
        let told = told.map(|record| PathChange::from_value(record.value));
        let queue_pairs: Vec<_> = told.take(2).map(|change| (change.port, change.number)).collect();
        assert_eq!(queue_pairs.len(), 2, "{queue_pairs:?}");
        for (queue_pair, port) in queue_pairs.iter().zip([Some(0), Some(1)]) {
            assert!(queue_pair.0 == port && queue_pair.1 > 0, "{queue_pairs:?}");
        }
    }
    // What is sent again is told once more, with what carries it then.
    let is_sent = |record: &&Record| record.flags().contains(Flags::SEND);
    let replayed: u64 = changes(State::PATH_SWITCHED)
        .filter(is_sent)
        .map(|record| record.bytes)
        .sum();
    assert_eq!(bytes_sent_again(records.iter().filter(is_sent)), replayed);
}

/// Bytes of steps that begin on their way while they are on it.
fn bytes_sent_again<'a>(records: impl Iterator<Item = &'a Record>) -> u64 {
    let mut under_way = HashMap::new();
    let mut bytes = 0;
    for record in records.filter(|record| record.kind() == Some(Kind::NetPlugin)) {
        let carrier = record.carrier();
        let step = (record.op, record.channel, record.peer, carrier.step);
        match record.state {
            State::START => {
                if let Some(before) = under_way.insert(step, carrier.number) {
                    assert_ne!(before, carrier.number, "over the same queue pair: {step:?}");
                    bytes += record.bytes;
                }
            }
            State::STOP => assert!(under_way.remove(&step).is_some(), "{step:?}"),
            _ => {}
        }
    }
    assert!(under_way.is_empty(), "{under_way:?}");
    bytes
}
