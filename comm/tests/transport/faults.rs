//! Peers that die, disagree or talk rubbish, and the abort word.

use std::{
    io::{Read as _, Write},
    net::{TcpListener, TcpStream},
    sync::atomic::{AtomicI32, Ordering},
    thread,
    time::{Duration, Instant},
};

use ringsight_comm::proxy::{ConnectionId, Error, ProxyAddress, client::ProxyClient, message::Request};

use super::{
    ranks::{PATIENCE, consume, produce, seed, turn, wait_for, world},
    requests::{client_of, connect_to, set_up},
};

#[test]
fn a_peer_that_dies_is_named_and_stop_returns() {
    let _turn = turn();
    world(&[1, 2], |rank| {
        let peer = 1 - rank.rank();
        if rank.rank() == 1 {
            let recv = rank.connector.connect_recv(peer, 0).unwrap();
            rank.post(rank.op(recv.proxy.unwrap(), peer, false, (1, 20)));
            consume(&recv.fifo, 1, 4);
            return; // with sixteen steps to go
        }
        let send = rank.connector.connect_send(peer, 0).unwrap();
        rank.post(rank.op(send.proxy.unwrap(), peer, true, (1, 20)));
        produce(&send.fifo, 1, 4);
        let text = rank.errors.recv_timeout(PATIENCE).unwrap();
        assert!(
            text.contains("rank 0 to rank 1, channel 0, step 4 of 20"),
            "{text}"
        );
        // What follows on the connection is given up without another word.
        rank.post(rank.op(send.proxy.unwrap(), peer, true, (2, 1)));
        rank.proxy.stop();
        assert!(rank.errors.try_recv().is_err() && rank.completed.try_recv().is_err());
        // Its proxy is gone, too.
        let error = rank.connector.connect_send(peer, 1).err().unwrap();
        assert!(
            matches!(&error, Error::Refused(text) if text.contains("rank 1")),
            "{error}"
        );
    });
}

/// One thread drives all connections of a rank: a peer that always has something to say must not keep it.
#[test]
fn a_peer_that_grants_nothing_new_without_end_fails_the_connection() {
    let _turn = turn();
    world(&[1, 2], |rank| {
        if rank.rank() == 1 {
            return rank.bootstrap.barrier().unwrap();
        }
        let client = client_of(&rank);
        let connection = connect_to(&rank, &client, 1, 0, true);
        set_up(&client, connection);
        let peer = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = Some(peer.local_addr().unwrap());
        let connecting = client
            .call_async(&Request::Connect { connection, address })
            .unwrap();
        let (mut stream, _) = peer.accept().unwrap();
        stream.read_exact(&mut [0; 40]).unwrap(); // its hello
        stream.write_all(b"RSNT\0\0\0\0\0\0\0\0").unwrap(); // welcome
        client.wait_for(connecting).unwrap().outcome.unwrap();
        rank.post(rank.op(ConnectionId(connection), 1, true, (1, 5)));
        let credits = [&b"RSCR"[..], &1_u64.to_le_bytes()].concat().repeat(1024);
        while stream.write_all(&credits).is_ok() {}
        let text = rank.errors.recv_timeout(PATIENCE).unwrap();
        assert!(text.contains("the peer grants 1 steps after 1"), "{text}");
        rank.bootstrap.barrier().unwrap();
    });
}

#[test]
fn ranks_that_disagree_are_told_so() {
    let _turn = turn();
    let errors = world(&[1, 2], |rank| {
        let peer = 1 - rank.rank();
        if rank.rank() == 1 {
            let recv = rank.connector.connect_recv(peer, 0).unwrap();
            rank.post(rank.op(recv.proxy.unwrap(), peer, false, (1, 3)));
            return rank.errors.recv_timeout(PATIENCE).unwrap();
        }
        let send = rank.connector.connect_send(peer, 0).unwrap();
        rank.post(rank.op(send.proxy.unwrap(), peer, true, (1, 2)));
        produce(&send.fifo, 1, 2);
        rank.proxy.stop(); // both steps had credit: the sender's own operation is complete
        String::new()
    });
    assert!(
        errors[1].contains("step 0 of 2") && errors[1].contains("of 3"),
        "{errors:?}"
    );
    assert!(
        errors[1].contains("do not call the same operations"),
        "{errors:?}"
    );
}

#[test]
fn the_abort_word_ends_network_operations() {
    let _turn = turn();
    let took = || {
        let took = world(&[1, 2], |rank| {
            let peer = 1 - rank.rank();
            let connection = if rank.rank() == 0 {
                rank.connector.connect_send(peer, 0).unwrap().proxy
            } else {
                rank.connector.connect_recv(peer, 0).unwrap().proxy
            };
            rank.post(rank.op(connection.unwrap(), peer, rank.rank() == 0, (1, 5)));
            rank.bootstrap.barrier().unwrap();
            let start = Instant::now();
            rank.abort.set();
            rank.proxy.stop();
            let took = start.elapsed();
            assert!(rank.completed.try_recv().is_err());
            assert!(matches!(
                rank.connector.connect_recv(peer, 3),
                Err(Error::Aborted(_)) | Ok(_)
            ));
            took
        });
        took.into_iter().max().unwrap()
    };
    // The machine may do something else meanwhile: once in three it does not.
    let took = [took(), took(), took()];
    assert!(
        took.iter().any(|took| *took < Duration::from_millis(100)),
        "{took:?}"
    );
}

#[test]
fn rubbish_at_the_proxy_changes_nothing() {
    let _turn = turn();
    world(&[1, 2], |rank| {
        let me = rank.rank();
        let peer = 1 - me;
        let mut open = Vec::new();
        for other in 0..2 {
            let address: ProxyAddress = rank.topology.info(other).proxy_address.parse().unwrap();
            for length in [0, 3, 32, 4000] {
                let mut stream = TcpStream::connect(address.tcp).unwrap();
                let _ = stream.write_all(&vec![0xa5; length]);
                open.push(stream);
            }
        }
        let send = rank.connector.connect_send(peer, 0).unwrap();
        let recv = rank.connector.connect_recv(peer, 0).unwrap();
        rank.proxy
            .save_op(rank.op(send.proxy.unwrap(), peer, true, (1, 12)));
        rank.proxy
            .save_op(rank.op(recv.proxy.unwrap(), peer, false, (1, 12)));
        rank.proxy.start();
        thread::scope(|scope| {
            scope.spawn(|| produce(&send.fifo, seed(me, peer, 0), 12));
            scope.spawn(|| consume(&recv.fifo, seed(peer, me, 0), 12));
        });
        rank.proxy.stop();
        rank.bootstrap.barrier().unwrap();
    });
}

/// A forked child, killed when the test is over.
struct Child(AtomicI32);

impl Drop for Child {
    fn drop(&mut self) {
        let child = *self.0.get_mut();
        if child > 0 {
            // SAFETY: our child, not waited for yet.
            unsafe {
                libc::kill(child, libc::SIGKILL);
                libc::waitpid(child, std::ptr::null_mut(), 0);
            }
        }
    }
}

/// A data loader's workers are forked from a rank and may live on when it has died.
#[test]
fn a_forked_child_keeps_no_connection_and_no_name_open() {
    let _turn = turn();
    let child = Child(AtomicI32::new(0));
    world(&[1, 2], |rank| {
        let peer = 1 - rank.rank();
        let of_peer: ProxyAddress = rank.topology.info(peer).proxy_address.parse().unwrap();
        if rank.rank() == 0 {
            let send = rank.connector.connect_send(peer, 0).unwrap();
            rank.post(rank.op(send.proxy.unwrap(), peer, true, (1, 20)));
            produce(&send.fifo, 1, 4);
            rank.bootstrap.barrier().unwrap();
            // SAFETY: the child does nothing but wait to be killed.
            let forked = unsafe {
                match libc::fork() {
                    0 => loop {
                        libc::pause();
                    },
                    child => child,
                }
            };
            assert!(forked > 0);
            child.0.store(forked, Ordering::Relaxed);
            return; // and the child lives
        }
        let recv = rank.connector.connect_recv(peer, 0).unwrap();
        rank.post(rank.op(recv.proxy.unwrap(), peer, false, (1, 20)));
        consume(&recv.fifo, 1, 4);
        rank.bootstrap.barrier().unwrap();
        let text = rank.errors.recv_timeout(PATIENCE).unwrap();
        assert!(
            text.contains("step 4 of 20") && text.contains("its process ended"),
            "{text}"
        );
        // The connection goes first, the rest of the proxy with it.
        wait_for("its port to be closed", || {
            TcpStream::connect(of_peer.tcp).is_err()
        });
        wait_for("its name to be gone", || {
            let client = ProxyClient::connect(&of_peer.unix, peer, rank.abort.clone(), PATIENCE);
            matches!(client, Err(Error::PeerLost(_)))
        });
    });
}
