//! A process of the test: a rank with its two ports.

use std::{net::TcpStream, path::Path as FilePath, sync::Arc};

use ringsight_comm_base::names::NameFilter;
use ringsight_verbs::{
    config::Config,
    endpoint::{Control, Failover, Path, Peer, Receiver, SLOTS, Sender, Slots},
    memory::Memory,
    port::Net,
    port_health::PortHealth,
    queue::RetryPolicy,
    wire::Offer,
};

use super::{
    calls::Calls,
    case::{Case, Queues, RETRIES, mix},
    fabric::{Fabric, Port},
    outside::{OFFER, Outside, READY},
};

/// Bytes of a slot, and of a step.
pub(crate) const SLOT: usize = 16 << 10;
pub(crate) const SLOTS_AT: Slots = Slots {
    offset: 0,
    bytes: SLOT,
};

/// Memory with slots, and where it is. There are as many as ends of a process, and they serve all cases.
pub(crate) fn slots() -> (Memory, *mut u64) {
    let memory = Box::leak(vec![0_u64; SLOTS * SLOT / 8].into_boxed_slice());
    let base = memory.as_mut_ptr();
    // SAFETY: never freed, and from here on used by its address alone.
    (
        unsafe { Memory::new(base.cast(), SLOTS * SLOT, Arc::new(())) },
        base,
    )
}

/// A rank's two ports.
pub(crate) fn net(rank: usize, queues: Queues) -> Arc<Net> {
    let devices = [0, 1].map(|link| Fabric::here().device(Port { rank, link }));
    let config = Config {
        devices: NameFilter::parse(&format!("={}", devices.join(","))),
        qps: queues.count,
        split: queues.is_split,
        retry: RetryPolicy {
            timeout: queues.timeout,
            retries: RETRIES,
        },
        ..Config::default()
    };
    Arc::new(Net::new(config, FilePath::new("/sys")).unwrap())
}

/// A process: a rank, with its two ports.
pub(crate) struct Rank {
    pub(crate) number: usize,
    pub(crate) fabric: Fabric,
    pub(crate) net: Arc<Net>,
    /// What `net` makes.
    queues: Queues,
    pub(crate) port_health: Arc<PortHealth>,
    pub(crate) outside: Outside,
    pub(crate) sends: (Memory, *mut u64),
    pub(crate) receives: (Memory, *mut u64),
    /// System calls of this process, and of this thread.
    pub(crate) calls: [Calls; 2],
    seed: u64,
}

impl Rank {
    pub(crate) fn new(number: usize, stream: TcpStream) -> Self {
        let queues = Queues::default();
        Self {
            number,
            fabric: Fabric::here(),
            net: net(number, queues),
            queues,
            port_health: PortHealth::new(Arc::default()),
            outside: Outside::new(stream),
            sends: slots(),
            receives: slots(),
            calls: [Calls::of_all(), Calls::of_this_thread()],
            seed: std::process::id().into(),
        }
    }

    /// Has all connections from here on keep to a case's settings.
    pub(crate) fn prepare(&mut self, case: &Case) {
        if self.queues != case.queues {
            self.queues = case.queues;
            self.net = net(self.number, case.queues);
        }
        let settings = case.settings().expect("settings of a case that was parsed");
        self.port_health = PortHealth::new(Arc::new(settings));
    }

    /// Numbers of the ports that a case's paths are over. Without failover there is no backup, as in the library.
    fn ports(&self, case: &Case) -> Vec<usize> {
        match case.alone {
            true => vec![1],
            false if !self.port_health.settings().enabled => vec![0],
            false => vec![0, 1],
        }
    }

    /// Paths of an end.
    fn paths(&mut self, is_receiver: bool, control: &Control, case: &Case) -> Vec<Path> {
        self.ports(case)
            .into_iter()
            .enumerate()
            .map(|(index, port)| {
                let port = self.net.open(port).unwrap();
                let memory = if is_receiver {
                    &self.receives.0
                } else {
                    &self.sends.0
                };
                let mut seed = self.seed;
                self.seed = mix(self.seed);
                let draw = || {
                    seed = mix(seed);
                    seed as u32
                };
                Path::new(
                    index,
                    port,
                    (memory, is_receiver),
                    control,
                    &self.port_health,
                    draw,
                )
                .unwrap()
            })
            .collect()
    }

    /// Connects an end's paths to the peer's.
    fn connect(&mut self, paths: &mut [Path], control: &Control, slots: u64) {
        let offer = Offer {
            failover: self.port_health.settings().enabled,
            number: 0,
            first: 0,
            slots,
            control: control.memory().address(),
            paths: paths.iter().map(Path::offer).collect(),
        };
        self.outside.put(OFFER, &offer.encode());
        let peer = Offer::parse(&self.outside.wait(OFFER)).unwrap();
        for (path, other) in paths.iter_mut().zip(peer.paths) {
            let peer = Peer {
                slots: peer.slots,
                control: peer.control,
                path: other,
            };
            path.connect(peer).unwrap();
        }
        self.outside.put(READY, &[]);
        self.outside.wait(READY);
    }

    fn failover(&self, case: &Case) -> Failover {
        let is_on = self.port_health.settings().enabled;
        let ports = if is_on { self.ports(case) } else { Vec::new() };
        Failover::new(&self.port_health, is_on.then_some(&self.net), ports)
    }

    pub(crate) fn sender(&mut self, case: &Case) -> Sender {
        let control = Control::new().unwrap();
        let mut paths = self.paths(false, &control, case);
        self.connect(&mut paths, &control, 0);
        Sender::new(paths, control, SLOTS_AT, self.failover(case))
    }

    pub(crate) fn receiver(&mut self, case: &Case) -> Receiver {
        let control = Control::new().unwrap();
        let mut paths = self.paths(true, &control, case);
        let slots = self.receives.0.address();
        self.connect(&mut paths, &control, slots);
        Receiver::new(paths, control, self.failover(case))
    }
}
