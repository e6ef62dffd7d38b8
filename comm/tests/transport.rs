//! Ranks as threads and as processes, on one node and on several, moving data through real proxies.

use std::{
    collections::HashMap,
    fs,
    io::Write,
    net::TcpStream,
    process::{Command, Stdio},
    sync::{Arc, Barrier, Mutex, MutexGuard, PoisonError, mpsc},
    thread,
    time::{Duration, Instant},
};

use ringsight_comm::{
    bootstrap::{self, Bootstrap, UniqueId},
    observe,
    proxy::{
        ConnectionId, Error, Proxy, ProxyAddress, ProxyConfig, ProxyOp,
        client::ProxyClient,
        message::{Endpoint, Reply, Request, Transport},
    },
    topology::{RankInfo, Topology},
    transport::Connector,
};
use ringsight_kernels::{AbortWord, Fifo, fifo::SLOTS};
use ringsight_records::{Flags, Kind, Record, State, ring};

const SLOT: usize = 4096;
/// Tag of every operation here.
const TAG: u32 = 7;
const PATIENCE: Duration = Duration::from_secs(20);

/// Tests look at the descriptors, threads and shared pages of the process, so they take turns.
fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for something that another thread brings about.
fn wait_for(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "waited in vain: {what}");
        thread::sleep(Duration::from_micros(200));
    }
}

/// One rank.
struct Rank {
    bootstrap: Bootstrap,
    topology: Arc<Topology>,
    proxy: Arc<Proxy>,
    connector: Connector,
    abort: Arc<AbortWord>,
    completed: mpsc::Receiver<(u32, u32)>,
    errors: mpsc::Receiver<String>,
}

impl Rank {
    fn new(id: &UniqueId, rank: u32, ranks: u32, host: Option<u64>) -> Self {
        let abort = Arc::new(AbortWord::default());
        let bootstrap = Bootstrap::init(id, rank, ranks, abort.clone(), PATIENCE).unwrap();
        let (tell_completed, completed) = mpsc::channel();
        let (tell_error, errors) = mpsc::channel();
        let config = ProxyConfig {
            rank,
            ranks,
            cookie: bootstrap.cookie(),
            listen: bootstrap.local_ip(),
            slot_bytes: SLOT,
            abort: abort.clone(),
            on_completed: Arc::new(move |op, replay| {
                let _ = tell_completed.send((op, replay));
            }),
            on_error: Arc::new(move |_, text| {
                let _ = tell_error.send(text);
            }),
        };
        let proxy = Arc::new(Proxy::new(config).unwrap());
        let mut info = RankInfo::local(rank, 0, proxy.address(), 1);
        info.host_hash = host.unwrap_or(info.host_hash);
        let topology = Arc::new(Topology::exchange(&bootstrap, info).unwrap());
        let connector = Connector::new(topology.clone(), proxy.clone(), abort.clone());
        Self {
            bootstrap,
            topology,
            proxy,
            connector,
            abort,
            completed,
            errors,
        }
    }

    fn rank(&self) -> u32 {
        self.topology.rank()
    }

    fn op(&self, connection: ConnectionId, peer: u32, is_send: bool, (op, steps): (u32, u32)) -> ProxyOp {
        ProxyOp {
            connection,
            op,
            replay: 3,
            comm: 77,
            seq: 5,
            rank: self.rank(),
            peer,
            channel: 0,
            is_send,
            p2p: true,
            graph: true,
            steps,
            tag: TAG,
            counted: true,
            chunk_bytes: SLOT as u32,
            pid: 99,
        }
    }

    fn post(&self, op: ProxyOp) {
        self.proxy.save_op(op);
        self.proxy.start();
    }
}

/// Runs `body` on one thread for each rank; `hosts` are the nodes that the ranks live on.
fn world<T: Send>(hosts: &[u64], body: impl Fn(Rank) -> T + Sync) -> Vec<T> {
    let id = bootstrap::create_root().unwrap();
    thread::scope(|scope| {
        let (body, id) = (&body, &id);
        let ranks = hosts.len() as u32;
        let start = |(rank, host): (u32, &u64)| {
            let host = *host;
            scope.spawn(move || body(Rank::new(id, rank, ranks, Some(host))))
        };
        let threads: Vec<_> = (0..).zip(hosts).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Numbers that look random and are the same for the same seed (SplitMix64).
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// The bytes of one slot: any length from nothing to the whole.
    fn slot(&mut self) -> Vec<u8> {
        let length = match self.next() % 4 {
            0 => 0,
            1 => SLOT,
            _ => self.next() as usize % SLOT,
        };
        (0..length).map(|_| self.next() as u8).collect()
    }
}

/// Does what a sending kernel does.
fn produce(fifo: &Fifo, seed: u64, steps: u32) {
    let mut random = Random(seed);
    for _ in 0..steps {
        let bytes = random.slot();
        wait_for("room in a FIFO", || fifo.free().is_some());
        let position = fifo.free().unwrap();
        // SAFETY: the slot is free and ours until posted; `bytes` is no longer than a slot.
        unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), fifo.slot(position), bytes.len()) };
        fifo.post(position, bytes.len(), TAG);
    }
}

/// Does what a receiving kernel does, and checks every byte.
fn consume(fifo: &Fifo, seed: u64, steps: u32) {
    let mut random = Random(seed);
    for step in 0..steps {
        let expected = random.slot();
        wait_for("data in a FIFO", || fifo.posted().is_some());
        let (position, length) = fifo.posted().unwrap();
        // SAFETY: the slot is posted, so nobody writes it until it is released; `length` is no longer than a slot.
        let bytes = unsafe { std::slice::from_raw_parts(fifo.slot(position), length) };
        assert!(
            bytes == expected,
            "step {step}: {length} bytes, expected {}",
            expected.len()
        );
        fifo.release(position);
    }
}

fn seed(from: u32, to: u32, channel: u8) -> u64 {
    u64::from(from) << 32 | u64::from(to) << 8 | u64::from(channel)
}

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

/// Takes the ring of this process while it lives.
struct Armed(u64);

impl Armed {
    fn new(mask: u64) -> Self {
        observe::prepare().unwrap();
        let lease = &observe::pages().unwrap().header().lease;
        Self(
            lease
                .acquire((std::process::id(), 1), observe::now_ns(), mask, |_, _| false)
                .unwrap(),
        )
    }

    fn take(&self) -> Vec<Record> {
        let pages = observe::pages().unwrap();
        std::iter::from_fn(|| ring::pop(&pages.header().cursor, pages.ring())).collect()
    }
}

impl Drop for Armed {
    fn drop(&mut self) {
        self.take();
        observe::pages().unwrap().header().lease.release(self.0);
    }
}

#[test]
fn a_sender_waits_for_credit_and_every_wait_is_recorded() {
    let _turn = turn();
    const STEPS: u32 = 3 * SLOTS as u32;
    let armed = Armed::new(Kind::ProxyOp.bit() | Kind::ProxyStep.bit() | Kind::ProxyCtrl.bit());
    let waiting = Barrier::new(2);
    let early = Mutex::new(Vec::new());
    world(&[1, 2], |rank| {
        let (me, peer) = (rank.rank(), 1 - rank.rank());
        if me == 0 {
            let send = rank.connector.connect_send(peer, 0).unwrap();
            rank.post(rank.op(send.proxy.unwrap(), peer, true, (40, STEPS)));
            thread::scope(|scope| {
                scope.spawn(|| produce(&send.fifo, 1, STEPS));
                wait_for("the sender's wait for credit", || {
                    early.lock().unwrap().extend(armed.take());
                    early
                        .lock()
                        .unwrap()
                        .iter()
                        .any(|record| record.state == State::STEP_SEND_PEER_WAIT)
                });
                assert_eq!(send.fifo.released(), 0, "a slot left without credit");
                waiting.wait();
            });
        } else {
            let recv = rank.connector.connect_recv(peer, 0).unwrap();
            waiting.wait();
            rank.post(rank.op(recv.proxy.unwrap(), peer, false, (41, STEPS)));
            consume(&recv.fifo, 1, STEPS);
        }
        rank.proxy.stop();
        rank.bootstrap.barrier().unwrap();
    });
    let mut records = early.into_inner().unwrap();
    records.extend(armed.take());
    let of = |op: u32, kind: Kind| -> Vec<&Record> {
        records
            .iter()
            .filter(move |record| record.kind() == Some(kind) && record.op == op)
            .collect()
    };
    for (op, is_send) in [(40, true), (41, false)] {
        let states: Vec<_> = of(op, Kind::ProxyOp).iter().map(|record| record.state).collect();
        assert_eq!(states, [State::START, State::OP_IN_PROGRESS, State::STOP]);
        let record = of(op, Kind::ProxyOp)[2];
        assert_eq!(
            (record.comm, record.seq, record.replay, record.pid),
            (77, 5, 3, 99)
        );
        assert_eq!(
            (record.rank, record.peer),
            (u32::from(!is_send), i32::from(is_send))
        );
        assert_eq!(record.proxy_op_shape(), (STEPS, SLOT as u32));
        assert_eq!(
            record.flags(),
            Flags::SEND.when(is_send).with(Flags::P2P).with(Flags::GRAPH)
        );
        let steps = of(op, Kind::ProxyStep);
        assert!(steps.iter().all(|step| step.flags() == record.flags()));
        let mut random = Random(1);
        let mut total = 0;
        for step in 0..u64::from(STEPS) {
            let bytes = random.slot().len() as u64;
            total += bytes;
            let life: Vec<_> = steps
                .iter()
                .filter(|record| record.value == step)
                .map(|record| (record.state, record.bytes))
                .collect();
            let expected: &[_] = if is_send {
                &[
                    (State::START, 0),
                    (State::STEP_SEND_GPU_WAIT, 0),
                    (State::STEP_SEND_PEER_WAIT, 0),
                    (State::STEP_SEND_WAIT, 0),
                    (State::STOP, bytes),
                ]
            } else {
                &[
                    (State::START, 0),
                    (State::STEP_RECV_WAIT, 0),
                    (State::STEP_RECV_FLUSH_WAIT, bytes),
                    (State::STEP_RECV_GPU_WAIT, bytes),
                    (State::STOP, bytes),
                ]
            };
            assert_eq!(life, expected, "step {step} of operation {op}");
        }
        assert_eq!(record.bytes, total);
    }
    // A step leaves only after the receiver has begun it, and the receiver begins at most a FIFO ahead of its device.
    let time = |op: u32, step: u64, state: State| {
        let found = of(op, Kind::ProxyStep)
            .into_iter()
            .find(|record| record.value == step && record.state == state);
        found.unwrap().time_ns
    };
    for step in 0..u64::from(STEPS) {
        assert!(
            time(40, step, State::STEP_SEND_WAIT) >= time(41, step, State::START),
            "step {step} left uncalled"
        );
        if step >= SLOTS as u64 {
            let freed = time(41, step - SLOTS as u64, State::STOP);
            assert!(
                time(41, step, State::START) >= freed,
                "step {step} was granted a slot that was in use"
            );
        }
    }
    let control: Vec<_> = records
        .iter()
        .filter(|record| record.kind() == Some(Kind::ProxyCtrl) && record.rank == 0)
        .map(|record| record.state)
        .filter(|state| ![State::CTRL_SLEEP, State::CTRL_WAKEUP].contains(state))
        .collect();
    let life = [
        State::CTRL_APPEND,
        State::CTRL_APPEND_END,
        State::CTRL_ACTIVE,
        State::CTRL_IDLE,
    ];
    assert_eq!(control, life);
}

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
    world(&[1, 2], |rank| {
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
        assert!(
            start.elapsed() < Duration::from_millis(100),
            "{:?}",
            start.elapsed()
        );
        assert!(rank.completed.try_recv().is_err());
        assert!(matches!(
            rank.connector.connect_recv(peer, 3),
            Err(Error::Aborted(_)) | Ok(_)
        ));
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
            Reply::Connect
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
    rank.bootstrap.barrier().unwrap();
    if me == 3 {
        // SAFETY: kills this very process, as a machine would.
        unsafe { libc::kill(libc::getpid(), libc::SIGKILL) };
    }
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
                .args(["--exact", "process_rank", "--ignored", "--nocapture"])
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
