//! What the tests share: ranks with their proxies, and what kernels do with a FIFO.

use std::{
    sync::{Arc, Mutex, MutexGuard, PoisonError, mpsc},
    thread,
    time::{Duration, Instant},
};

use ringsight_comm::{
    bootstrap::{self, Bootstrap, UniqueId},
    proxy::{ConnectionId, Connector, Proxy, ProxyConfig, ProxyOp},
    topology::{RankInfo, Topology},
};
use ringsight_kernels::{AbortWord, Fifo};

pub(super) const SLOT: usize = 4096;
/// Tag of every operation here.
pub(super) const TAG: u32 = 7;
pub(super) const PATIENCE: Duration = Duration::from_secs(20);

/// Tests look at the descriptors, threads and shared pages of the process, so they take turns.
pub(super) fn turn() -> MutexGuard<'static, ()> {
    static TURN: Mutex<()> = Mutex::new(());
    TURN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for something that another thread brings about.
pub(super) fn wait_for(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < PATIENCE, "waited in vain: {what}");
        thread::sleep(Duration::from_micros(200));
    }
}

/// One rank.
pub(super) struct Rank {
    pub(super) bootstrap: Bootstrap,
    pub(super) topology: Arc<Topology>,
    pub(super) proxy: Arc<Proxy>,
    pub(super) connector: Connector,
    pub(super) abort: Arc<AbortWord>,
    pub(super) completed: mpsc::Receiver<(u32, u32)>,
    pub(super) errors: mpsc::Receiver<String>,
}

impl Rank {
    pub(super) fn new(id: &UniqueId, rank: u32, ranks: u32, host: Option<u64>) -> Self {
        Self::with((id, rank, ranks, host), |_| {}, |address| address)
    }

    /// The same with a proxy that is made otherwise, and that the other ranks find where `published` says.
    pub(super) fn with(
        (id, rank, ranks, host): (&UniqueId, u32, u32, Option<u64>),
        change: impl FnOnce(&mut ProxyConfig),
        published: impl FnOnce(String) -> String,
    ) -> Self {
        let abort = Arc::new(AbortWord::default());
        let bootstrap = Bootstrap::init(id, rank, ranks, abort.clone(), PATIENCE).unwrap();
        let (tell_completed, completed) = mpsc::channel();
        let (tell_error, errors) = mpsc::channel();
        let mut config = ProxyConfig {
            rank,
            ranks,
            cookie: bootstrap.cookie(),
            listen: bootstrap.local_address(),
            slot_bytes: SLOT,
            cpus: None,
            rdma: None,
            abort: abort.clone(),
            on_completed: Arc::new(move |op, replay| {
                let _ = tell_completed.send((op, replay));
            }),
            on_error: Arc::new(move |_, text| {
                let _ = tell_error.send(text);
            }),
        };
        change(&mut config);
        let proxy = Arc::new(Proxy::new(config).unwrap());
        let mut info = RankInfo::local(rank, 0, published(proxy.address()), 1);
        info.host_hash = host.unwrap_or(info.host_hash);
        let topology = Arc::new(Topology::exchange(&bootstrap, info).unwrap());
        let connector = Connector::new(topology.clone(), proxy.clone(), abort.clone(), PATIENCE);
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

    pub(super) fn rank(&self) -> u32 {
        self.topology.rank()
    }

    pub(super) fn op(
        &self,
        connection: ConnectionId,
        peer: u32,
        is_send: bool,
        (op, steps): (u32, u32),
    ) -> ProxyOp {
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

    pub(super) fn post(&self, op: ProxyOp) {
        self.proxy.save_op(op);
        self.proxy.start();
    }
}

/// Runs `body` on one thread for each rank; `hosts` are the nodes that the ranks live on.
pub(super) fn world<T: Send>(hosts: &[u64], body: impl Fn(Rank) -> T + Sync) -> Vec<T> {
    world_of(hosts, |id, rank, ranks, host| {
        body(Rank::new(id, rank, ranks, host))
    })
}

/// The same where `body` makes its rank itself.
pub(super) fn world_of<T: Send>(
    hosts: &[u64],
    body: impl Fn(&UniqueId, u32, u32, Option<u64>) -> T + Sync,
) -> Vec<T> {
    let id = bootstrap::create_root().unwrap();
    thread::scope(|scope| {
        let (body, id) = (&body, &id);
        let ranks = hosts.len() as u32;
        let start = |(rank, host): (u32, &u64)| {
            let host = *host;
            scope.spawn(move || body(id, rank, ranks, Some(host)))
        };
        let threads: Vec<_> = (0..).zip(hosts).map(start).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// Numbers that look random and are the same for the same seed (SplitMix64).
pub(super) struct Random(pub(super) u64);

impl Random {
    pub(super) fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ z >> 31
    }

    /// The bytes of one slot: any length from nothing to the whole.
    pub(super) fn slot(&mut self) -> Vec<u8> {
        let length = match self.next() % 4 {
            0 => 0,
            1 => SLOT,
            _ => self.next() as usize % SLOT,
        };
        (0..length).map(|_| self.next() as u8).collect()
    }
}

/// Does what a sending kernel does.
pub(super) fn produce(fifo: &Fifo, seed: u64, steps: u32) {
    let mut random = Random(seed);
    for _ in 0..steps {
        let bytes = random.slot();
        wait_for("room in a FIFO", || fifo.free().is_some());
        let position = fifo.free().unwrap();
        // SAFETY: the slot is free and ours until posted; `bytes` is no longer than a slot.
        unsafe {
            std::ptr::copy_nonoverlapping(bytes.as_ptr(), fifo.slot(position, bytes.len()), bytes.len());
        };
        fifo.post(position, bytes.len(), TAG);
    }
}

/// Does what a receiving kernel does, and checks every byte.
pub(super) fn consume(fifo: &Fifo, seed: u64, steps: u32) {
    let mut random = Random(seed);
    for step in 0..steps {
        let expected = random.slot();
        wait_for("data in a FIFO", || fifo.posted().is_some());
        let (position, length) = fifo.posted().unwrap();
        // SAFETY: the slot is posted, so nobody writes it until it is released; `length` is no longer than a slot.
        let bytes = unsafe { std::slice::from_raw_parts(fifo.slot(position, length), length) };
        assert!(
            bytes == expected,
            "step {step}: {length} bytes, expected {}",
            expected.len()
        );
        fifo.release(position);
    }
}

pub(super) fn seed(from: u32, to: u32, channel: u8) -> u64 {
    u64::from(from) << 32 | u64::from(to) << 8 | u64::from(channel)
}
