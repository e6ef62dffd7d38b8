//! What cannot go over RDMA, and what is said of it.

use std::{os::unix::process::CommandExt as _, path::Path, process::Command};

use super::{
    links::{hide_addresses, mend, set_link, two_ports},
    nodes::{check, patient, two_nodes},
    shared::LITTLE,
};
use crate::fabric::Fabric;

#[test]
#[ignore = "guest: needs RDMA devices"]
fn what_cannot_go_over_rdma_goes_over_sockets_and_says_why() {
    let falls_back = |what, reasons: [&str; 2], change: &dyn Fn(usize, &mut Command)| {
        let ended = two_nodes("data::transfers", |rank, command| {
            command.env(LITTLE, "1");
            change(rank, command);
        });
        check(what, &ended, &["[send] via NET/Socket"], &[]);
        for (reason, (_, text)) in reasons.iter().zip(&ended) {
            assert!(text.contains(reason), "{what}: no {reason:?} in\n{text}");
        }
    };
    falls_back(
        "no RDMA on one side",
        ["rank 0 and rank 1 use a socket", "NCCL_IB_DISABLE is set"],
        &|rank, command| {
            if rank == 1 {
                command.env("NCCL_IB_DISABLE", "1");
            }
        },
    );
    falls_back(
        "no such GID",
        [
            "index 9 (NCCL_IB_GID_INDEX) was looked for",
            "index 9 (NCCL_IB_GID_INDEX) was looked for",
        ],
        &|_, command| {
            command.env("NCCL_IB_GID_INDEX", "9");
        },
    );
    falls_back(
        "another number of queue pairs",
        [
            "NCCL_IB_QPS_PER_CONNECTION differs",
            "NCCL_IB_QPS_PER_CONNECTION differs",
        ],
        &|rank, command| {
            command.env("NCCL_IB_QPS_PER_CONNECTION", (rank + 1).to_string());
        },
    );
    falls_back(
        "no such device",
        [
            "no RDMA, sockets are used: NCCL_IB_HCA allows none",
            "no RDMA, sockets are used",
        ],
        &|_, command| {
            command.env("NCCL_IB_HCA", "=mlx5_77");
        },
    );
    falls_back(
        "no such P_Key",
        ["no P_Key at index 77", "no P_Key at index 77"],
        &|_, command| {
            command.env("NCCL_IB_PKEY", "77");
        },
    );
    falls_back(
        "no memory to lock",
        ["see ulimit -l", "see ulimit -l"],
        &|_, command| {
            // SAFETY: two system calls between fork and exec.
            unsafe { command.pre_exec(lock_little) };
        },
    );
}

/// Lets the process that is about to begin lock 64 KiB, as a user may.
fn lock_little() -> std::io::Result<()> {
    const CAP_IPC_LOCK: libc::c_ulong = 14;
    let limit = libc::rlimit {
        rlim_cur: 64 << 10,
        rlim_max: 64 << 10,
    };
    // SAFETY: no pointers, and a limit that is read.
    let failed = unsafe {
        libc::prctl(libc::PR_CAPBSET_DROP, CAP_IPC_LOCK) < 0
            || libc::setrlimit(libc::RLIMIT_MEMLOCK, &raw const limit) < 0
    };
    if failed {
        return Err(std::io::Error::last_os_error());
    }
    Ok(())
}

/// Nobody says what hardware has the peer's address.
#[test]
#[ignore = "guest: needs soft-RoCE devices"]
fn a_peer_that_is_not_found_is_reached_by_a_socket() {
    // Down and up again: what was known of addresses is forgotten.
    set_link(0, false);
    hide_addresses(true);
    Fabric::here().mend();
    let ended = two_nodes("data::transfers", |_, command| {
        command.env(LITTLE, "1");
    });
    mend();
    check(
        "not found",
        &ended,
        &["[send] via NET/Socket", "use a socket on channel 0, not RDMA: "],
        &[],
    );
}

/// A communicator that is made when the process has used its ports, and all of them are down by now.
#[test]
#[ignore = "guest: needs RDMA devices"]
fn without_a_port_that_is_up_a_connection_goes_over_a_socket() {
    let ended = two_nodes("fallback::late", |rank, command| {
        patient(two_ports(rank, command));
    });
    mend();
    check(
        "all ports down",
        &ended,
        &["no RDMA, sockets are used: no RDMA port is up", "via NET/Socket"],
        &[],
    );
}

/// That no port is up is so for one communicator, not for the process.
#[test]
#[ignore = "guest: needs RDMA devices"]
fn a_process_that_began_without_a_port_uses_rdma_once_there_is_one() {
    set_link(0, false);
    set_link(1, false);
    let ended = two_nodes("fallback::early", |rank, command| {
        patient(two_ports(rank, command));
    });
    mend();
    check(
        "no port at first",
        &ended,
        &[
            "no RDMA, sockets are used: no RDMA port is up",
            "via NET/Socket",
            "via NET/IB/0",
        ],
        &["has failed"],
    );
}

#[test]
#[ignore = "guest: needs RDMA devices"]
fn where_only_rdma_is_allowed_its_absence_is_an_error() {
    let ended = two_nodes("data::transfers", |rank, command| {
        command.env("NCCL_NET", "IB");
        if rank == 1 {
            command.env("NCCL_IB_GID_INDEX", "9");
        }
    });
    // Rank 0 sees the other one give up.
    for (rank, (well, _)) in ended.iter().enumerate() {
        assert!(!well, "rank {rank} got its communicator");
    }
    let text = &ended[1].1;
    assert!(
        text.contains("NCCL_IB_GID_INDEX") && text.contains("NCCL_NET=IB"),
        "{text}"
    );
}

/// On any machine: a file that is no library is found before the one that is.
#[test]
fn without_libibverbs_sockets_are_used_and_the_log_names_it() {
    let folder = std::env::temp_dir().join(format!("ringsight-no-verbs-{}", std::process::id()));
    std::fs::create_dir_all(&folder).unwrap();
    std::fs::write(folder.join("libibverbs.so.1"), "").unwrap();
    let before = std::env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let folders = [folder.clone()].into_iter().chain(std::env::split_paths(&before));
    let path = std::env::join_paths(folders).unwrap();
    let ended = two_nodes("data::transfers", |_, command| {
        command
            .env_remove("NCCL_IB_HCA")
            .env("LD_LIBRARY_PATH", &path)
            .env(LITTLE, "1");
    });
    std::fs::remove_dir_all(&folder).unwrap();
    for (well, text) in &ended {
        let said = text
            .lines()
            .find(|line| line.contains("NET/IB : no RDMA, sockets are used: "));
        let named = said.is_some_and(|line| line.contains("libibverbs.so.1"));
        assert!(
            *well && named && text.contains("via NET/Socket"),
            "{said:?}: {text}"
        );
    }
}

/// On a machine that has no RDMA.
#[test]
fn without_rdma_sockets_are_used_and_the_log_says_what_is_missing() {
    if Path::new("/sys/class/infiniband").exists() {
        return println!("skipped: this machine has RDMA");
    }
    let ended = two_nodes("data::transfers", |_, command| {
        command.env_remove("NCCL_IB_HCA").env(LITTLE, "1");
    });
    check(
        "no RDMA",
        &ended,
        &["NET/IB : no RDMA, sockets are used: ", "via NET/Socket"],
        &["NCCL WARN NET/IB"],
    );
    // Who asks for a device by its name is warned.
    let ended = two_nodes("data::transfers", |_, command| {
        command.env(LITTLE, "1");
    });
    check("a device by name", &ended, &["NCCL WARN NET/IB : no RDMA"], &[]);
    let ended = two_nodes("data::transfers", |_, command| {
        command.env("NCCL_NET", "IB");
    });
    assert!(
        ended
            .iter()
            .all(|(well, text)| !well && text.contains("network IB")),
        "{ended:?}"
    );
    let ended = two_nodes("data::transfers", |_, command| {
        command.env("NCCL_IB_TIMEOUT", "40");
    });
    assert!(
        ended
            .iter()
            .all(|(well, text)| !well && text.contains("NCCL_IB_TIMEOUT=40: ")),
        "{ended:?}"
    );
}
