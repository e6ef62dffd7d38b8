//! Probes in the kernel's RDMA stack, against what really happens there. They need its modules and devices, so they run in a guest:
//! `cargo xtask vm test network`.
#![allow(clippy::disallowed_methods, reason = "tests make and read files of their own")]

mod overhead;

use std::{
    fs::File,
    os::fd::OwnedFd,
    process::{Child, Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use ringsight_probes::{
    NetworkSample, NetworkScope, Options, Sample, Session, Source as _,
    network::{NetworkEvent, QpState, TABLE, Tells, VerbsEvent},
};
use ringsight_verbs::{
    completion::{BATCH, Completion, Cq, Status},
    device::{Context, Mtu},
    memory::{Access, Memory, Pd},
    queue::{Qp, RetryPolicy, Route, Size},
    sys,
};

/// How long anything may take that was caused: far longer than it does under emulation on a busy machine.
const LIMIT: Duration = Duration::from_secs(30);

/// A session that sees everybody's events, and what it has seen.
struct Watch {
    session: Session,
    samples: Vec<Sample>,
    seen: Vec<NetworkSample>,
}

impl Watch {
    fn begin() -> Self {
        let options = Options {
            network: NetworkScope::Everybody,
            ..Options::default()
        };
        let session = Session::new(options).expect("eBPF works in a guest");
        assert!(session.unavailable().is_none(), "{:?}", session.unavailable());
        Self {
            session,
            samples: Vec::new(),
            seen: Vec::new(),
        }
    }

    /// Every site of the modules is attached, and what is not says which module is missing.
    fn assert_attached(&self, modules: &[&str]) {
        let states = self.session.network();
        assert_eq!(states.len(), TABLE.len() + 1);
        for (site, state) in TABLE.iter().zip(states) {
            if modules.contains(&site.module) {
                assert_eq!(state.absent, None, "{}", state.name);
            }
        }
        let absent: Vec<_> = states.iter().filter_map(|state| state.absent.as_ref()).collect();
        assert!(
            absent.iter().all(|why| why.ends_with("is not loaded")),
            "{absent:?}"
        );
    }

    fn poll(&mut self) {
        self.session.poll(&mut self.samples).expect("nothing breaks");
        for sample in self.samples.drain(..) {
            match sample {
                Sample::Network(sample) => self.seen.push(*sample),
                Sample::NetworkLost { count } => panic!("{count} events were lost"),
                _ => {}
            }
        }
    }

    /// Waits for an event that is like this among those from `from` on; returns it.
    fn wait(&mut self, what: &str, like: impl Fn(&NetworkSample) -> bool) -> NetworkSample {
        let begun = Instant::now();
        loop {
            self.poll();
            if let Some(found) = self.seen.iter().find(|sample| like(sample)) {
                return found.clone();
            }
            assert!(begun.elapsed() < LIMIT, "no {what} among {:#?}", self.seen);
            std::thread::sleep(Duration::from_millis(2));
        }
    }

    fn wait_for(&mut self, device: &str, event: NetworkEvent) -> NetworkSample {
        self.wait(&format!("{event:?} of {device}"), |sample| {
            sample.event == event && sample.device == device
        })
    }

    /// Calls of a process, in order.
    fn of(&self, child: &Child) -> Vec<&NetworkSample> {
        self.seen
            .iter()
            .filter(|sample| sample.pid == Some(child.id()))
            .collect()
    }
}

fn run(line: &str) {
    let status = Command::new("sh").args(["-c", line]).status().unwrap();
    assert!(status.success(), "{line}");
}

fn inject(line: &str) {
    std::fs::write("/sys/kernel/debug/fakehca", line).unwrap_or_else(|error| panic!("{line}: {error}"));
}

fn pingpong(device: &str, arguments: &[&str]) -> Child {
    Command::new("ibv_rc_pingpong")
        .args(["-d", device])
        .args(arguments)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

/// Whether anybody listens where pingpong's server does (port 18515).
fn listening() -> bool {
    ["/proc/net/tcp", "/proc/net/tcp6"].iter().any(|table| {
        let table = std::fs::read_to_string(table).unwrap_or_default();
        table
            .lines()
            .any(|line| line.contains(":4853 ") && line.contains(" 0A "))
    })
}

fn wait_for_listener(device: &str) {
    let begun = Instant::now();
    while !listening() {
        assert!(begun.elapsed() < LIMIT, "the server on {device} does not listen");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// A server that waits for its client.
fn server(device: &str, arguments: &[&str]) -> Child {
    let child = pingpong(device, arguments);
    wait_for_listener(device);
    child
}

/// One end of what writes to the other end's memory without a pause.
fn writer(device: &str, arguments: &[&str]) -> Child {
    Command::new("ib_write_bw")
        .args(["-F", "-x", "1", "-d", device])
        .args(arguments)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap()
}

fn end(mut child: Child) {
    child.kill().unwrap();
    child.wait().unwrap();
}

/// Two processes talk over a queue pair each: its whole life is seen, with the right numbers, of the right process.
fn a_pair_of_queue_pairs(watch: &mut Watch, devices: [&str; 2], arguments: &[&str]) {
    let mut ends = [server(devices[0], arguments), {
        let arguments: Vec<_> = arguments.iter().copied().chain(["127.0.0.1"]).collect();
        pingpong(devices[1], &arguments)
    }];
    for child in &mut ends {
        assert!(child.wait().unwrap().success());
    }
    for child in &ends {
        watch.wait("destroyed queue pair", |sample| {
            sample.pid == Some(child.id()) && matches!(sample.event, NetworkEvent::QpDestroyed { .. })
        });
        watch.wait("deregistered memory", |sample| {
            sample.pid == Some(child.id()) && matches!(sample.event, NetworkEvent::MrDeregistered { .. })
        });
    }
    let mut numbers = Vec::new();
    let mut peers = Vec::new();
    for (child, device) in ends.iter().zip(devices) {
        let calls = watch.of(child);
        assert!(
            calls.iter().all(|call| call.device == device && call.result == 0),
            "{calls:#?}"
        );
        assert!(
            calls.is_sorted_by_key(|call| call.time_ns + call.duration_ns),
            "{calls:#?}"
        );
        let mut states = Vec::new();
        let (mut keys, mut gone, mut created, mut destroyed) =
            (Vec::new(), Vec::new(), Vec::new(), Vec::new());
        for call in calls {
            match call.event {
                // RC is 2. The call that was waited for took its time.
                NetworkEvent::QpCreated { qpn, kind: 2 } if call.duration_ns > 0 => created.push(qpn),
                NetworkEvent::QpModified {
                    qpn,
                    state,
                    port,
                    peer,
                } => {
                    states.push((qpn, state.map(QpState::name), port));
                    peers.extend(peer.map(|peer| (qpn, peer)));
                }
                NetworkEvent::QpDestroyed { qpn } => destroyed.push(qpn),
                NetworkEvent::MrRegistered {
                    lkey,
                    rkey,
                    length: 4096,
                } => keys.push((lkey, rkey)),
                NetworkEvent::MrDeregistered { lkey, rkey } => gone.push((lkey, rkey)),
                _ => panic!("not expected: {call:?}"),
            }
        }
        assert_eq!(created.len(), 1);
        let qpn = created[0];
        // Linux 6.12's mlx5 driver makes a queue pair of its own at a device's first registration, in its caller's context.
        states.retain(|(number, _, _)| *number == qpn);
        assert_eq!(
            states,
            [
                (qpn, Some("INIT"), Some(1)),
                (qpn, Some("RTR"), None),
                (qpn, Some("RTS"), None)
            ]
        );
        assert_eq!((destroyed, &keys, keys.len()), (vec![qpn], &gone, 1));
        numbers.push(qpn);
    }
    peers.retain(|(own, _)| numbers.contains(own));
    let crossed = [(numbers[0], numbers[1]), (numbers[1], numbers[0])];
    assert_eq!(peers, crossed, "each was connected to the other");
}

/// A queue pair of `hca0` that sends to one which does not exist, until the device gives it up: its number, and how the request ended.
fn send_to_nobody() -> (u32, Status) {
    let open = |name| Context::open(sys::lib().unwrap(), name).unwrap();
    let (context, peer) = (open("hca0"), open("peer0"));
    let pd = Pd::new(context.clone()).unwrap();
    let cq = Cq::new(&context, 4).unwrap();
    let size = Size {
        sends: 1,
        receives: 1,
        inline_bytes: 1,
    };
    let qp = Qp::new(&pd, &cq, size).unwrap();
    let route = Route {
        qp: 0xff_fff0,
        psn: 0,
        mtu: Mtu::from_code(3).unwrap(),
        lid: 0,
        // The second GID is that of the address.
        gid: Some((peer.gid(1, 1).unwrap(), 1)),
        service_level: 0,
        traffic_class: 0,
    };
    // Two tries of 4 ms.
    let patience = RetryPolicy {
        timeout: 10,
        retries: 1,
    };
    qp.init(1, 0).unwrap();
    qp.receive_from(1, &route).unwrap();
    qp.send_from(0, patience).unwrap();
    qp.send(7, &[1]).unwrap();
    let begun = Instant::now();
    let mut room = [Completion::EMPTY; BATCH];
    loop {
        if let [ended, ..] = cq.poll(&mut room).unwrap() {
            return (qp.number(), ended.status);
        }
        assert!(begun.elapsed() < LIMIT, "a request to nobody does not end");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Bytes of what is no dma-buf.
const NO_DMA_BUF: usize = 2 << 12;

/// Asks a device to register a dma-buf, by a descriptor that is none: who is asked for it finds out himself.
fn register_no_dma_buf(device: &str) {
    let context = Context::open(sys::lib().unwrap(), device).unwrap();
    let file: OwnedFd = File::open("/dev/null").unwrap().into();
    let memory = Memory::of_device(0, NO_DMA_BUF, (Arc::new(file), 0), Arc::new(()));
    let pd = Pd::new(context).unwrap();
    assert!(pd.register(&memory, Access::RemoteWrite).is_err());
}

#[test]
#[ignore = "guest: needs a soft-RoCE link and its kernel's functions"]
fn soft_roce() {
    let mut watch = Watch::begin();
    watch.assert_attached(&["ib_core", "ib_uverbs", "rdma_rxe"]);
    a_pair_of_queue_pairs(&mut watch, ["peer0", "hca0"], &["-g", "1", "-n", "20"]);

    // Nobody answers: the device gives the queue pair up, by itself, which is no call of the process.
    let (qpn, status) = send_to_nobody();
    assert!(matches!(status, Status::Failed { code: 12, .. }), "{status:?}");
    let given_up = watch.wait_for("hca0", NetworkEvent::SoftQpError { qpn });
    assert_eq!(given_up.result, 0);
    assert!(
        !watch.seen.iter().any(|sample| matches!(
            sample.event,
            NetworkEvent::QpModified { qpn: number, state, .. } if number == qpn && state.map(QpState::name) == Some("ERR")
        )),
        "it was told to"
    );

    // The carrier goes and comes back: each end says so of its port.
    let port = |event| NetworkEvent::Device { event, port: Some(1) };
    run("ip link set pnic0 down");
    for device in ["hca0", "peer0"] {
        watch.wait_for(device, port(VerbsEvent::PORT_ERR));
    }
    run("ip link set pnic0 up");
    for device in ["hca0", "peer0"] {
        watch.wait_for(device, port(VerbsEvent::PORT_ACTIVE));
    }

    // A device whose own link is down can be connected to nobody: the call and its error are seen.
    watch.seen.clear();
    run("ip link set nic0 down");
    watch.wait_for("hca0", port(VerbsEvent::PORT_ERR));
    // The server connects first, when it has heard of the client.
    let mut connecting = server("hca0", &["-g", "1"]);
    let mut client = pingpong("peer0", &["-g", "1", "127.0.0.1"]);
    let refused = watch.wait("refused call", |sample| sample.result < 0);
    assert_eq!(refused.device, "hca0");
    assert_eq!(refused.pid, Some(connecting.id()));
    let NetworkEvent::QpModified { state, .. } = refused.event else {
        panic!("{refused:?}")
    };
    assert_eq!(state.map(QpState::name), Some("RTR"));
    assert!(!connecting.wait().unwrap().success());
    assert!(!client.wait().unwrap().success());
    run("ip link set nic0 up");
    watch.wait_for("hca0", port(VerbsEvent::PORT_ACTIVE));
}

#[test]
#[ignore = "guest: needs two mlx5 devices and their kernel's functions"]
fn mlx5() {
    /// The stand-in's first function.
    const PCI: &str = "10000:00:00.0";

    let mut watch = Watch::begin();
    watch.assert_attached(&["ib_core", "ib_uverbs", "mlx5_ib", "mlx5_core"]);
    let command = watch.session.network().last().unwrap();
    assert_eq!(
        (command.tells, &command.absent),
        (Tells::Mlx5CommandRefused, &None)
    );
    a_pair_of_queue_pairs(&mut watch, ["mlx5_1", "mlx5_0"], &["-n", "20"]);

    // What the driver is told by the firmware, and what the verbs say of it.
    for (line, change, event) in [
        ("0 port_down", 1, VerbsEvent::PORT_ERR),
        ("0 port_up", 4, VerbsEvent::PORT_ACTIVE),
    ] {
        inject(line);
        watch.wait_for("mlx5_0", NetworkEvent::Mlx5Port { change, port: 1 });
        watch.wait_for("mlx5_0", NetworkEvent::Device { event, port: Some(1) });
    }
    assert!(
        !watch.seen.iter().any(|sample| {
            sample.device == "mlx5_1"
                && matches!(
                    sample.event,
                    NetworkEvent::Mlx5Port { .. } | NetworkEvent::Device { .. }
                )
        }),
        "the other device was left alone"
    );

    let waiting = server("mlx5_0", &[]);
    let created = watch.wait("queue pair", |sample| {
        sample.pid == Some(waiting.id()) && matches!(sample.event, NetworkEvent::QpCreated { .. })
    });
    let NetworkEvent::QpCreated { qpn, .. } = created.event else {
        panic!("{created:?}")
    };
    // Events of a queue pair: 5 is the work queue catastrophic error, 0x11 the access error; 1 and 3 are the verbs' for these.
    for (line, kind, event) in [("qp_fatal", 5, VerbsEvent(1)), ("qp_access", 0x11, VerbsEvent(3))] {
        inject(&format!("0 {line} {qpn:#x}"));
        watch.wait_for("mlx5_0", NetworkEvent::Mlx5Qp { kind, qpn });
        watch.wait_for("mlx5_0", NetworkEvent::Qp { event, qpn });
    }
    let queues = std::fs::read_to_string("/sys/kernel/debug/fakehca").unwrap();
    let line = queues
        .lines()
        .find(|line| line.contains(&format!("qpn {qpn:#x} ")))
        .unwrap();
    let cqn = line.split("cqn 0x").nth(1).unwrap();
    let cqn = u32::from_str_radix(cqn, 16).unwrap();
    inject(&format!("0 cq_err {cqn:#x} 1"));
    watch.wait_for(PCI, NetworkEvent::Mlx5CqError { cqn, syndrome: 1 });
    watch.wait_for("mlx5_0", NetworkEvent::Cq { event: VerbsEvent(0) });
    end(waiting);

    // A region of a dma-buf, which the driver refuses here: the stand-in lacks what its table would be loaded by (UMR).
    watch.seen.clear();
    register_no_dma_buf("mlx5_0");
    let region = watch.wait("region of a dma-buf", |sample| {
        matches!(sample.event, NetworkEvent::MrRegistered { .. })
    });
    let nothing = NetworkEvent::MrRegistered {
        lkey: 0,
        rkey: 0,
        length: NO_DMA_BUF as u64,
    };
    assert_eq!(
        (region.device.as_str(), &region.event, region.result),
        ("mlx5_0", &nothing, -libc::EINVAL)
    );
    assert_eq!(region.pid, Some(std::process::id()));

    // A refused command: what the firmware said, and what became of the call.
    watch.seen.clear();
    inject("0 cmdfail 0x503 3 0x1234ab");
    let mut connecting = server("mlx5_0", &[]);
    let mut client = pingpong("mlx5_1", &["127.0.0.1"]);
    let refused = watch.wait("refused call", |sample| sample.result < 0);
    assert_eq!(
        (refused.device.as_str(), refused.result),
        ("mlx5_0", -libc::EINVAL)
    );
    assert_eq!(refused.pid, Some(connecting.id()));
    watch.wait_for(
        "",
        NetworkEvent::Mlx5CommandRefused {
            opcode: 0x503,
            modifier: 0,
            status: 3,
            syndrome: 0x12_34ab,
            error: -libc::EINVAL,
        },
    );
    assert!(!connecting.wait().unwrap().success());
    assert!(!client.wait().unwrap().success());
    inject("0 cmdfail 0 0 0");

    // The firmware fails: the driver sees it, gives the device up, and tries to get it back.
    watch.seen.clear();
    inject("0 health 1 0x80");
    watch.wait("health record", |sample| {
        sample.device == PCI && matches!(sample.event, NetworkEvent::Mlx5Health { .. })
    });
    watch.wait_for(
        "mlx5_0",
        NetworkEvent::Device {
            event: VerbsEvent::DEVICE_FATAL,
            port: None,
        },
    );
    watch.wait("recovery", |sample| {
        sample.device == PCI && sample.event == NetworkEvent::Mlx5Recovery
    });
}
