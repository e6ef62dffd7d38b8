//! What is left of ranks that are gone: nothing.

use std::fs;

use ringsight_comm::bootstrap;

use super::ranks::{turn, wait_for, world};

fn descriptors() -> Vec<String> {
    let links = fs::read_dir("/proc/self/fd").unwrap().flatten();
    let mut links: Vec<_> = links
        .filter_map(|entry| fs::read_link(entry.path()).ok())
        .map(|link| link.display().to_string())
        .filter(|link| !link.starts_with("/proc/"))
        .collect();
    links.sort();
    links
}

fn our_threads() -> Vec<String> {
    let tasks = fs::read_dir("/proc/self/task").unwrap().flatten();
    let names = tasks.filter_map(|task| fs::read_to_string(task.path().join("comm")).ok());
    names
        .map(|name| name.trim().to_owned())
        .filter(|name| name.starts_with("rs-"))
        .collect()
}

fn mappings() -> usize {
    let maps = fs::read_to_string("/proc/self/maps").unwrap();
    maps.lines()
        .filter(|line| line.contains("ringsight-fifo"))
        .count()
}

#[test]
fn nothing_is_left_after_destroy_abort_or_death() {
    let _turn = turn();
    // Whatever earlier tests started has to be gone first; the root's thread ends by itself.
    wait_for("threads of earlier tests to end", || our_threads().is_empty());
    let before = descriptors();
    for how in 0..3 {
        world(&[1, 1, 2, 2], |rank| {
            let me = rank.rank();
            for channel in 0..2 {
                let ring = rank.connector.connect_ring(channel).unwrap();
                if let Some(connection) = ring.next.proxy {
                    rank.post(rank.op(connection, rank.topology.ring(channel)[1], true, (1, 4)));
                }
            }
            let peer = me ^ 2;
            let send = rank.connector.connect_send(peer, 0).unwrap();
            rank.post(rank.op(send.proxy.unwrap(), peer, true, (2, 4)));
            rank.bootstrap.barrier().unwrap(); // everyone is connected
            match how {
                0 => {} // all go at once, with operations under way
                1 => rank.abort.set(),
                // One goes first, and those who wait for each other hear of it from the one who waited for it.
                _ if me == 0 => {}
                _ => {
                    let error = rank.bootstrap.recv(me ^ 1, 1).unwrap_err();
                    assert!(
                        matches!(error, bootstrap::Error::PeerLost { rank: 0, .. }),
                        "{error}"
                    );
                }
            }
        });
        assert_eq!(mappings(), 0);
    }
    wait_for("our threads to end", || our_threads().is_empty());
    wait_for("our descriptors to be closed", || descriptors() == before);
    assert_eq!(mappings(), 0);
    let sockets = fs::read_to_string("/proc/net/unix").unwrap();
    let mine = format!("@ringsight-proxy-{}-", std::process::id());
    assert!(!sockets.contains(&mine), "an abstract name is left");
}
