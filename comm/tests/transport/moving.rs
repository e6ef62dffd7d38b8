//! Pairs and rings connect and move bytes.

use std::{collections::HashMap, sync::Arc, thread};

use ringsight_comm::proxy::Error;

use super::ranks::{Random, consume, produce, seed, turn, world};

#[test]
fn every_pair_moves_bytes_in_both_directions_at_once() {
    let _turn = turn();
    const STEPS: u32 = 90;
    // Two nodes of two ranks, and one of one.
    let hosts = [1, 1, 2, 2, 3];
    world(&hosts, |rank| {
        let me = rank.rank();
        let peers: Vec<u32> = (0..5).filter(|peer| *peer != me).collect();
        let mut network_ops = 0;
        thread::scope(|scope| {
            for channel in 0..2 {
                for peer in &peers {
                    let send = rank.connector.connect_send(*peer, channel).unwrap();
                    let recv = rank.connector.connect_recv(*peer, channel).unwrap();
                    let same_node = hosts[me as usize] == hosts[*peer as usize];
                    let transport = if same_node { "shm" } else { "net/socket" };
                    assert_eq!((send.transport, recv.transport), (transport, transport));
                    assert_eq!(
                        (send.proxy.is_some(), recv.proxy.is_some()),
                        (!same_node, !same_node)
                    );
                    if let (Some(to), Some(from)) = (send.proxy, recv.proxy) {
                        // Two operations follow each other on a connection.
                        for (op, steps) in [(0, 30), (1, STEPS - 30)] {
                            rank.proxy.save_op(rank.op(to, *peer, true, (op, steps)));
                            rank.proxy.save_op(rank.op(from, *peer, false, (op, steps)));
                            network_ops += 2;
                        }
                    }
                    let (to, from) = (seed(me, *peer, channel), seed(*peer, me, channel));
                    scope.spawn(move || produce(&send.fifo, to, STEPS));
                    scope.spawn(move || consume(&recv.fifo, from, STEPS));
                }
            }
            rank.proxy.start();
        });
        rank.proxy.stop();
        let mut completed: HashMap<(u32, u32), u32> = HashMap::new();
        for done in rank.completed.try_iter() {
            *completed.entry(done).or_default() += 1;
        }
        assert_eq!(
            completed,
            HashMap::from([((0, 3), network_ops / 2), ((1, 3), network_ops / 2)])
        );
        assert_eq!(rank.errors.try_iter().collect::<Vec<_>>(), Vec::<String>::new());
        rank.bootstrap.barrier().unwrap();
    });
}

#[test]
fn rings_connect_and_each_rank_talks_to_its_neighbours() {
    let _turn = turn();
    world(&[1, 2, 1, 2], |rank| {
        let me = rank.rank();
        for channel in 0..4 {
            let ring = rank.topology.ring(channel);
            let connections = rank.connector.connect_ring(channel).unwrap();
            let (next, prev) = (ring[1], ring[3]);
            if let Some(connection) = connections.next.proxy {
                rank.post(rank.op(connection, next, true, (1, 20)));
            }
            if let Some(connection) = connections.prev.proxy {
                rank.post(rank.op(connection, prev, false, (1, 20)));
            }
            thread::scope(|scope| {
                scope.spawn(|| produce(&connections.next.fifo, seed(me, next, channel), 20));
                scope.spawn(|| consume(&connections.prev.fifo, seed(prev, me, channel), 20));
            });
        }
        rank.proxy.stop();
        rank.bootstrap.barrier().unwrap();
    });
}

#[test]
fn pairs_connect_in_any_order_without_waiting_for_each_other() {
    let _turn = turn();
    world(&[1, 1, 2, 2, 3, 3, 4, 4], |rank| {
        let mut random = Random(rank.rank().into());
        let mut calls: Vec<(u32, u8, bool)> = (0..8)
            .flat_map(|peer| (0..4).flat_map(move |channel| [(peer, channel, true), (peer, channel, false)]))
            .collect();
        calls.retain(|(peer, ..)| *peer != rank.rank());
        calls.sort_by_cached_key(|_| random.next());
        for (peer, channel, is_send) in calls {
            // Each call blocks, and each rank makes them in another order.
            let first = if is_send {
                rank.connector.connect_send(peer, channel).unwrap().fifo
            } else {
                rank.connector.connect_recv(peer, channel).unwrap().fifo
            };
            let again = if is_send {
                rank.connector.connect_send(peer, channel).unwrap().fifo
            } else {
                rank.connector.connect_recv(peer, channel).unwrap().fifo
            };
            assert!(Arc::ptr_eq(&first, &again));
        }
        assert!(matches!(
            rank.connector.connect_send(rank.rank(), 0),
            Err(Error::Refused(_))
        ));
        assert!(matches!(
            rank.connector.connect_send(8, 0),
            Err(Error::Refused(_))
        ));
        let other = (rank.rank() + 1) % 8;
        assert!(matches!(
            rank.connector.connect_send(other, 64),
            Err(Error::Refused(_))
        ));
        rank.bootstrap.barrier().unwrap();
    });
}
