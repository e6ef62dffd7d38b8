//! What a proxy is asked, and what it answers.

use std::{
    fs::File,
    io::{BufRead as _, BufReader, ErrorKind, Read, Write as _},
    net::TcpListener,
    os::fd::AsRawFd,
    process::{Child, ChildStdout, Stdio},
    thread,
};

use ringsight_comm::proxy::{
    Error, ProxyAddress,
    client::ProxyClient,
    message::{Endpoint, Reply, Request, Transport},
};

use ringsight_kernels::Fifo;

use super::ranks::{PATIENCE, Rank, SLOT, turn, world};
use crate::common::{
    processes::{alone, worker},
    variables::{ID, PLACE, WHAT},
};

/// A client of the rank's own proxy.
pub(super) fn client_of(rank: &Rank) -> ProxyClient {
    let address: ProxyAddress = rank.proxy.address().parse().unwrap();
    ProxyClient::connect(&address.unix, rank.rank(), rank.abort.clone(), PATIENCE).unwrap()
}

/// The rank's connection for sending to `peer` over the network, or for receiving from it in shared memory.
pub(super) fn connect_to(rank: &Rank, client: &ProxyClient, peer: u32, channel: u8, is_send: bool) -> u32 {
    let request = Request::Init {
        cookie: rank.bootstrap.cookie(),
        rank: rank.rank(),
        endpoint: Endpoint {
            comm: 0,
            peer,
            channel,
            p2p: true,
            is_send,
            transport: if is_send {
                Transport::NetSocket
            } else {
                Transport::Shm
            },
        },
    };
    match client.call_blocking(&request).unwrap() {
        Reply::Init { connection } => connection,
        other => panic!("{other:?}"),
    }
}

/// Brings a connection as far as its memory, whose handle it returns.
pub(super) fn set_up(client: &ProxyClient, connection: u32) -> u64 {
    let slot_bytes = SLOT as u32;
    let request = Request::SharedInit {
        connection,
        slot_bytes,
    };
    client.call_blocking(&request).unwrap();
    match client.call_blocking(&Request::Setup { connection }).unwrap() {
        Reply::Setup { handle, .. } => handle,
        other => panic!("{other:?}"),
    }
}

/// Connect is answered when the other proxy has answered; meanwhile everything else is.
#[test]
fn requests_are_asked_without_waiting_and_polled_for() {
    let _turn = turn();
    world(&[1, 2], |rank| {
        let peer = 1 - rank.rank();
        let client = client_of(&rank);
        let connection = connect_to(&rank, &client, peer, 9, true);
        let slot_bytes = SLOT as u32;
        // Three requests on their way at once.
        let ids = [
            Request::SharedInit {
                connection,
                slot_bytes,
            },
            Request::Setup { connection },
            Request::Setup { connection: 999 },
        ]
        .map(|request| client.call_async(&request).unwrap());
        let [shared, memory, unknown] = ids.map(|id| client.wait_for(id).unwrap().outcome);
        assert_eq!(shared.unwrap(), Reply::SharedInit);
        let Reply::Setup { handle, .. } = memory.unwrap() else {
            panic!("no handle");
        };
        assert!(matches!(unknown, Err(Error::Refused(text)) if text.contains("no connection 999")));
        // A proxy that takes its time.
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let connect = |address| Request::Connect {
            connection,
            address: Some(address),
        };
        let slow = client.call_async(&connect(silent.local_addr().unwrap())).unwrap();
        let (mut stream, _) = silent.accept().unwrap();
        stream.read_exact(&mut [0; 8]).unwrap(); // its hello
        drop(client.get_fd(handle).unwrap());
        let again = client.call_blocking(&connect(silent.local_addr().unwrap()));
        assert!(matches!(again, Err(Error::Refused(text)) if text.contains("being connected already")));
        assert!(client.poll(slow).unwrap().is_none(), "answered by nobody");
        drop(stream);
        let failed = loop {
            if let Some(response) = client.poll(slow).unwrap() {
                break response.outcome;
            }
            thread::yield_now();
        };
        assert!(
            matches!(&failed, Err(Error::Refused(text)) if text.contains(&format!("the proxy of rank {peer}"))),
            "{failed:?}"
        );
        // It can be tried again, and with the right one it works.
        let there: ProxyAddress = rank.topology.info(peer).proxy_address.parse().unwrap();
        assert_eq!(
            client.call_blocking(&connect(there.tcp)).unwrap(),
            Reply::Connect { rdma: None }
        );
        // Whoever waits for an answer is told when none will come.
        let endless = TcpListener::bind("127.0.0.1:0").unwrap();
        let connection = connect_to(&rank, &client, peer, 10, true);
        set_up(&client, connection);
        let address = Some(endless.local_addr().unwrap());
        let never = client
            .call_async(&Request::Connect { connection, address })
            .unwrap();
        rank.bootstrap.barrier().unwrap();
        drop(rank);
        assert!(matches!(client.wait_for(never), Err(Error::PeerLost(_))));
    });
}

/// Whoever holds the memory of a FIFO can neither take pages away from the others nor add any.
#[test]
fn descriptors_that_proxies_give_away_cannot_be_resized() {
    let _turn = turn();
    world(&[1, 1], |rank| {
        let client = client_of(&rank);
        let handle = set_up(&client, connect_to(&rank, &client, 1 - rank.rank(), 0, false));
        let file = File::from(client.get_fd(handle).unwrap());
        let bytes = file.metadata().unwrap().len();
        assert_eq!(bytes, Fifo::memory_bytes(SLOT) as u64);
        let fcntl = |what, value: libc::c_int| {
            // SAFETY: no pointers.
            unsafe { libc::fcntl(file.as_raw_fd(), what, value) }
        };
        let wanted = libc::F_SEAL_SHRINK | libc::F_SEAL_GROW | libc::F_SEAL_SEAL;
        assert_eq!(fcntl(libc::F_GET_SEALS, 0), wanted);
        assert_eq!(
            fcntl(libc::F_ADD_SEALS, libc::F_SEAL_WRITE),
            -1,
            "writers would die of it"
        );
        let reopened = File::options()
            .write(true)
            .open(format!("/proc/self/fd/{}", file.as_raw_fd()))
            .unwrap();
        for file in [&file, &reopened] {
            for size in [0, bytes - 1, bytes + 4096] {
                let error = file.set_len(size).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::PermissionDenied, "{size} bytes");
            }
        }
        assert_eq!(file.metadata().unwrap().len(), bytes);
        rank.bootstrap.barrier().unwrap();
    });
}

#[test]
fn requests_are_answered_by_id_in_their_order_of_life() {
    let _turn = turn();
    world(&[1, 1], |rank| {
        let me = rank.rank();
        let address: ProxyAddress = rank.proxy.address().parse().unwrap();
        let client = || ProxyClient::connect(&address.unix, me, rank.abort.clone(), PATIENCE).unwrap();
        let endpoint = Endpoint {
            comm: 0,
            peer: 1 - me,
            channel: 7,
            p2p: true,
            is_send: false,
            transport: Transport::Shm,
        };
        let cookie = rank.bootstrap.cookie();
        let refused = |client: &ProxyClient, request: Request, why: &str| match client.call_blocking(&request)
        {
            Err(Error::Refused(text)) => assert!(text.contains(why), "{text}"),
            other => panic!("{request:?}: {other:?}"),
        };
        let stranger = client();
        refused(&stranger, Request::GetFd { handle: 0 }, "no Init");
        refused(&stranger, Request::Stop, "no Init");
        refused(
            &stranger,
            Request::Init {
                cookie: cookie ^ 1,
                rank: me,
                endpoint,
            },
            "secret",
        );

        let client = client();
        let init = |endpoint| Request::Init {
            cookie,
            rank: me,
            endpoint,
        };
        refused(&client, init(Endpoint { peer: me, ..endpoint }), "no connection");
        refused(&client, init(Endpoint { peer: 2, ..endpoint }), "no connection");
        refused(
            &client,
            init(Endpoint {
                channel: 64,
                ..endpoint
            }),
            "channel 64",
        );
        let foreign = Request::Init {
            cookie,
            rank: 1 - me,
            endpoint: Endpoint {
                is_send: true,
                ..endpoint
            },
        };
        refused(&client, foreign, "no more");
        // Asked without waiting, taken in another order than answered.
        let ids: Vec<_> = (0..3)
            .map(|_| client.call_async(&init(endpoint)).unwrap())
            .collect();
        let replies: Vec<_> = ids
            .iter()
            .rev()
            .map(|id| client.wait_for(*id).unwrap().outcome.unwrap())
            .collect();
        let Reply::Init { connection } = replies[0] else {
            panic!("{replies:?}")
        };
        assert_eq!(replies, [replies[0]; 3], "one endpoint, one connection");
        assert!(client.poll(ids[0]).unwrap().is_none(), "a response is given once");
        refused(&client, Request::Setup { connection }, "before SharedInit");
        refused(
            &client,
            Request::Connect {
                connection,
                address: None,
            },
            "before Setup",
        );
        refused(
            &client,
            Request::SharedInit {
                connection,
                slot_bytes: 1,
            },
            "NCCL_BUFFSIZE",
        );
        let shared = client
            .call_blocking(&Request::SharedInit {
                connection,
                slot_bytes: SLOT as u32,
            })
            .unwrap();
        assert_eq!(shared, Reply::SharedInit);
        let Reply::Setup { handle, .. } = client.call_blocking(&Request::Setup { connection }).unwrap()
        else {
            panic!("no handle");
        };
        refused(&client, Request::GetFd { handle: handle ^ 1 }, "handle");
        drop((client.get_fd(handle).unwrap(), client.get_fd(handle).unwrap()));
        assert_eq!(
            client
                .call_blocking(&Request::Connect {
                    connection,
                    address: None
                })
                .unwrap(),
            Reply::Connect { rdma: None }
        );
        assert_eq!(client.call_blocking(&Request::Stop).unwrap(), Reply::Stop);
        assert_eq!(
            client.call_blocking(&Request::Destroy { connection }).unwrap(),
            Reply::Destroy
        );
        refused(&client, Request::Destroy { connection }, "no connection");
        refused(&client, Request::GetFd { handle }, "handle");
        rank.bootstrap.barrier().unwrap();
        // A proxy that is gone is an error, not a wait.
        let (abort, unix) = (rank.abort.clone(), address.unix.clone());
        drop(rank);
        assert!(matches!(
            client.call_blocking(&Request::Stop),
            Err(Error::PeerLost(_))
        ));
        assert!(matches!(
            ProxyClient::connect(&unix, me, abort, PATIENCE),
            Err(Error::PeerLost(_))
        ));
    });
}

/// A proxy whose process has no descriptor left says so at once, to each client, and serves clients again once it has one.
#[test]
fn a_proxy_without_descriptors_turns_clients_away() {
    let _turn = turn();
    world(&[1, 1], |rank| {
        if rank.rank() == 0 {
            let mut starved = Asking::new(rank.proxy.address());
            let mut served = Asking::new(rank.proxy.address());
            // Nothing is free below the number of the last one.
            let limit = rlimit(None);
            let mut taken = vec![File::open("/dev/null").unwrap()];
            let last = taken[0].as_raw_fd() as libc::rlim_t;
            rlimit(Some(libc::rlimit {
                rlim_cur: last + 1,
                ..limit
            }));
            while let Ok(file) = File::open("/dev/null") {
                taken.push(file);
            }
            let answer = starved.answer();
            drop(taken);
            rlimit(Some(limit));
            let (took, text) = answer.split_once(' ').unwrap();
            let expected = "the proxy of rank 0 refuses: accepting a client: Too many open files";
            assert!(text.contains(expected), "{answer}");
            assert!(took.parse::<u64>().unwrap() < 2000, "{answer}");
            // No Init: it is served, and refused for that.
            assert!(served.answer().contains("no Init"));
        }
        rank.bootstrap.barrier().unwrap();
    });
}

/// A process that asks a proxy when it is told to.
struct Asking {
    child: Child,
    output: BufReader<ChildStdout>,
}

impl Asking {
    fn new(address: String) -> Self {
        let mut child = worker("transport::asks_when_told")
            .env(WHAT, address)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let output = BufReader::new(child.stdout.take().unwrap());
        let mut asking = Self { child, output };
        assert_eq!(asking.line(), "ready");
        asking
    }

    fn line(&mut self) -> String {
        let mut line = String::new();
        self.output.read_line(&mut line).unwrap();
        line.trim_end().to_owned()
    }

    fn answer(&mut self) -> String {
        self.child.stdin.take().unwrap().write_all(b"ask\n").unwrap();
        let answer = self.line();
        assert!(self.child.wait().unwrap().success());
        answer
    }
}

/// How many descriptors this process may have; sets it first, if that is given.
fn rlimit(new: Option<libc::rlimit>) -> libc::rlimit {
    if let Some(new) = new {
        // SAFETY: a valid limit.
        assert_eq!(unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raw const new) }, 0);
    }
    let mut limit = libc::rlimit {
        rlim_cur: 0,
        rlim_max: 0,
    };
    // SAFETY: writes to the local.
    assert_eq!(unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &raw mut limit) }, 0);
    limit
}

/// Processes of one user may ask each other's proxies for what their ranks share, and for no more.
#[test]
fn another_process_asks_for_what_its_rank_sends_and_no_more() {
    let _turn = turn();
    world(&[1, 1], |rank| {
        if rank.rank() == 0 {
            let client = client_of(&rank);
            let theirs = connect_to(&rank, &client, 1, 3, false);
            let ours = connect_to(&rank, &client, 1, 3, true);
            set_up(&client, ours);
            let text = alone("transport::stranger", |command| {
                command
                    .env(ID, rank.bootstrap.cookie().to_string())
                    .env(PLACE, format!("{theirs} {ours}"))
                    .env(WHAT, rank.proxy.address());
            });
            for (number, expected) in [
                "no Init with the communicator's secret yet",
                "only the proxy's own process asks as rank 0",
                "Init { connection",
                "SharedInit",
                "Setup { handle",
                "the connection is none of the rank that asks",
                "the connection is none of the rank that asks",
                "rank 2 asks over another rank's connection",
                "only the proxy's own process may stop it",
                "only the proxy's own process may stop it",
            ]
            .iter()
            .enumerate()
            {
                let line = text.lines().nth(number).unwrap_or_default();
                assert!(line.contains(expected), "{number}: no {expected}:\n{text}");
            }
        }
        rank.bootstrap.barrier().unwrap();
    });
}

#[test]
fn a_proxys_name_controls_no_terminal() {
    let named = |name: &str| format!("{name}@127.0.0.1:7").parse::<ProxyAddress>();
    assert!(named("ringsight-proxy-1-0-0").is_ok());
    for name in ["", "a b", "a\n", "\u{1b}[2J"] {
        let text = named(name).unwrap_err().to_string();
        assert!(!text.chars().any(char::is_control), "{text:?}");
    }
}
