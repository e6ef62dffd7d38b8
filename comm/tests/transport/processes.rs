//! Ranks as processes.

use std::{
    process::{Command, Stdio},
    thread,
};

use ringsight_comm::bootstrap::{self, UniqueId};

use super::ranks::{PATIENCE, Rank, consume, produce, seed, turn};

/// What one rank of [`ranks_may_be_processes`] does; its own process.
#[test]
#[ignore = "helper: the body of one rank; started by another test"]
fn process_rank() {
    let Ok(role) = std::env::var("RINGSIGHT_TEST_RANK") else {
        return;
    };
    let mut bytes = [0u8; UniqueId::BYTES];
    let (rank, id) = role.split_once(' ').unwrap();
    for (byte, digits) in bytes.iter_mut().zip(id.as_bytes().chunks(2)) {
        *byte = u8::from_str_radix(std::str::from_utf8(digits).unwrap(), 16).unwrap();
    }
    let id = UniqueId::from_bytes(&bytes).unwrap();
    let rank = Rank::new(&id, rank.parse().unwrap(), 4, None);
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
    println!("rank {me} saw rank 3 die");
}

#[test]
fn ranks_may_be_processes_and_a_killed_one_is_named() {
    let _turn = turn();
    let id: String = bootstrap::create_root()
        .unwrap()
        .to_bytes()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect();
    let children: Vec<_> = (0..4)
        .map(|rank| {
            Command::new(std::env::current_exe().unwrap())
                .args([
                    "--exact",
                    "transport::processes::process_rank",
                    "--ignored",
                    "--nocapture",
                ])
                .env("RINGSIGHT_TEST_RANK", format!("{rank} {id}"))
                .env("NCCL_HOSTID", format!("node{}", rank / 2))
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    for (rank, child) in children.into_iter().enumerate() {
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        let saw = text.contains(&format!("rank {rank} saw rank 3 die"));
        assert!(
            output.status.success() == (rank != 3) && saw == (rank != 3),
            "rank {rank}:\n{text}"
        );
    }
}
