//! Two processes move steps over real queue pairs, where there are two RDMA ports that reach each other.
//!
//! The ports are a guest's: soft-RoCE devices at the ends of a virtual wire, or mlx5 devices on a stand-in for their hardware. Elsewhere
//! `RINGSIGHT_TEST_HCAS=first,second` names two. Every byte of every step follows from its position, and is checked.

#[path = "../../tests/src/fabric.rs"]
#[allow(dead_code, reason = "each test uses a part of it")]
mod fabric;

use std::{
    io::{Read, Write},
    net::{TcpListener, TcpStream},
    path::Path as FilePath,
    process::{Command, Stdio},
    sync::Arc,
    time::{Duration, Instant},
};

use fabric::{Fabric, Port};
use ringsight_comm_base::names::NameFilter;
use ringsight_verbs::{
    config::Config,
    endpoint::{Control, Failover, Path, Peer, Receiver, SLOTS, Sender, Slots},
    memory::Memory,
    port::Net,
    port_health::PortHealth,
    sys, sysfs,
    wire::{OFFER_BYTES, Offer},
};

const SLOT: usize = 64 << 10;
const SLOTS_AT: Slots = Slots {
    offset: 4096,
    bytes: SLOT,
};
const PATIENCE: Duration = Duration::from_secs(60);

/// The two devices; the reason where they are not.
fn devices() -> Result<[String; 2], String> {
    let names = match std::env::var("RINGSIGHT_TEST_HCAS") {
        Ok(names) => {
            let (first, second) = names.split_once(',').ok_or("two devices are wanted")?;
            [first.to_owned(), second.to_owned()]
        }
        Err(_) => [0, 1].map(|rank| Fabric::here().device(Port { rank, link: 0 })),
    };
    let ports = sysfs::ports(FilePath::new("/sys"));
    for name in &names {
        if !ports.iter().any(|port| port.device == *name) {
            return Err(format!("there is no RDMA device {name}"));
        }
    }
    sys::lib().map_err(ToString::to_string)?;
    Ok(names)
}

/// What one run is about.
#[derive(Clone, Copy, Debug)]
struct Case {
    qps: usize,
    split: bool,
    steps: u64,
    /// Bytes of a step at most.
    most: usize,
    /// The receiver sleeps until it is told.
    sleeps: bool,
}

impl Case {
    fn text(self) -> String {
        let Self {
            qps,
            split,
            steps,
            most,
            sleeps,
        } = self;
        format!("{qps} {} {steps} {most} {}", u8::from(split), u8::from(sleeps))
    }

    fn parse(text: &str) -> Self {
        let numbers: Vec<u64> = text
            .split_whitespace()
            .map(|word| word.parse().unwrap())
            .collect();
        Self {
            qps: numbers[0] as usize,
            split: numbers[1] == 1,
            steps: numbers[2],
            most: numbers[3] as usize,
            sleeps: numbers[4] == 1,
        }
    }

    /// Bytes of a step: none, few, and many.
    fn bytes(self, position: u64) -> usize {
        (mix(position) % (self.most as u64 + 1)) as usize
    }
}

fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

fn content(position: u64, bytes: usize) -> Vec<u8> {
    (0..bytes.div_ceil(8) as u64)
        .flat_map(|word| mix(position << 20 ^ word).to_le_bytes())
        .take(bytes)
        .collect()
}

/// Memory with slots, and where it is.
fn slots() -> (Memory, *mut u8) {
    let bytes = SLOTS_AT.offset + SLOTS * SLOT;
    let memory = Box::leak(vec![0_u64; bytes / 8].into_boxed_slice());
    let base = memory.as_mut_ptr().cast::<u8>();
    // SAFETY: never freed, and from here on used by its address alone.
    (unsafe { Memory::new(base, bytes, Arc::new(())) }, base)
}

/// A path, and what its end needs besides: it fails with it.
fn path(device: &str, case: Case, end: (&Memory, bool), control: &Control) -> (Path, Failover) {
    let config = Config {
        devices: NameFilter::parse(&format!("={device}")),
        qps: case.qps,
        split: case.split,
        ..Config::default()
    };
    let net = Net::new(config, FilePath::new("/sys")).unwrap();
    let port = net.open(0).unwrap();
    let mut seed = u64::from(std::process::id());
    let draw = || {
        seed = mix(seed);
        seed as u32
    };
    let port_health = PortHealth::new(Arc::default());
    let path = Path::new(0, port, end, control, &port_health, draw).unwrap();
    (path, Failover::new(&port_health, None, Vec::new()).disabled())
}

fn exchange(stream: &mut TcpStream, mine: &Offer) -> Peer {
    stream.write_all(&mine.encode()).unwrap();
    let mut bytes = [0; OFFER_BYTES];
    stream.read_exact(&mut bytes).unwrap();
    let Offer {
        slots,
        control,
        mut paths,
        ..
    } = Offer::parse(&bytes).unwrap();
    Peer {
        slots,
        control,
        path: paths.remove(0),
    }
}

/// Sends every step and waits until the peer's device has all.
fn send(device: &str, case: Case, stream: &mut TcpStream) -> Sender {
    let (memory, base) = slots();
    let control = Control::new().unwrap();
    let (mut path, failover) = path(device, case, (&memory, false), &control);
    let offer = Offer {
        failover: false,
        number: 0,
        first: 0,
        slots: 0,
        control: control.memory().address(),
        paths: vec![path.offer()],
    };
    let peer = exchange(stream, &offer);
    path.connect(peer).unwrap();
    stream.write_all(b"+").unwrap();
    let mut sender = Sender::new(vec![path], control, SLOTS_AT, failover);
    let start = Instant::now();
    while sender.acked() < case.steps {
        assert!(
            start.elapsed() < PATIENCE,
            "at step {} of {}",
            sender.acked(),
            case.steps
        );
        let moved = sender.poll().unwrap();
        let free = sender.posted() < sender.acked() + SLOTS as u64;
        if sender.posted() < case.steps && free && sender.may_post() {
            let position = sender.posted();
            if case.sleeps && position + 1 == case.steps {
                // However fast we are, the receiver sleeps at least once: it says so.
                stream.read_exact(&mut [0]).unwrap();
            }
            let bytes = case.bytes(position);
            let content = content(position, bytes);
            let mut notice = (bytes as u64).to_le_bytes().to_vec();
            let in_notice = bytes <= 48;
            if in_notice {
                notice.extend(&content);
            } else {
                // SAFETY: a slot that was acknowledged: nobody else uses it.
                unsafe { base.add(SLOTS_AT.at(position)).copy_from(content.as_ptr(), bytes) };
            }
            sender.post(&notice, if in_notice { 0 } else { bytes }).unwrap();
        } else if !moved {
            sender.active().arm().unwrap();
            if !sender.poll().unwrap() {
                wait(sender.active());
            }
        }
    }
    sender
}

/// Sleeps until something ends on an armed path.
fn wait(path: &Path) {
    let mut fd = libc::pollfd {
        fd: path.fd(),
        events: libc::POLLIN,
        revents: 0,
    };
    // SAFETY: one descriptor.
    let ready = unsafe { libc::poll(&raw mut fd, 1, PATIENCE.as_millis() as i32) };
    assert_eq!(ready, 1, "nothing told of an end");
}

/// Receives and checks every step; how often it slept.
fn receive(device: &str, case: Case, stream: &mut TcpStream) -> u32 {
    let (memory, base) = slots();
    let control = Control::new().unwrap();
    let (mut path, failover) = path(device, case, (&memory, true), &control);
    let offer = Offer {
        failover: false,
        number: 0,
        first: 0,
        slots: memory.address(),
        control: control.memory().address(),
        paths: vec![path.offer()],
    };
    let peer = exchange(stream, &offer);
    path.connect(peer).unwrap();
    let mut ready = [0];
    stream.read_exact(&mut ready).unwrap();
    let mut receiver = Receiver::new(vec![path], control, failover);
    let mut sleeps = 0;
    let start = Instant::now();
    receiver.grant(SLOTS as u64).unwrap();
    while receiver.taken() < case.steps {
        assert!(
            start.elapsed() < PATIENCE,
            "at step {} of {}",
            receiver.taken(),
            case.steps
        );
        let mut moved = receiver.poll().unwrap();
        while let Some(arrived) = receiver.take().unwrap() {
            moved = true;
            let position = arrived.position;
            assert_eq!(position + 1, receiver.taken());
            let bytes = case.bytes(position);
            let notice = arrived.notice();
            assert_eq!(notice[..8], (bytes as u64).to_le_bytes());
            let expected = content(position, bytes);
            if bytes <= 48 {
                assert_eq!(notice[8..], expected[..], "step {position}");
            } else {
                let mut got = vec![0; bytes];
                // SAFETY: the step is here, and its slot is granted again only below.
                unsafe { got.as_mut_ptr().copy_from(base.add(SLOTS_AT.at(position)), bytes) };
                assert!(got == expected, "step {position} of {bytes} bytes");
            }
            receiver.grant(receiver.taken() + SLOTS as u64).unwrap();
        }
        if !moved && case.sleeps {
            receiver.active().arm().unwrap();
            if !receiver.poll().unwrap() {
                if receiver.taken() + 1 == case.steps {
                    stream.write_all(b"-").unwrap();
                }
                wait(receiver.active());
                sleeps += 1;
            }
        } else if !moved {
            // The devices' software needs the processor, too.
            std::thread::sleep(Duration::from_micros(200));
        }
    }
    // The sender's last completion needs our device.
    stream.read_exact(&mut ready).unwrap();
    sleeps
}

/// The receiving process: the port that the sender listens on, and the case.
const RECEIVER: &str = "VERBS_TEST_RECEIVER";

fn receiver_process(told: &str, device: &str) {
    let (port, case) = told.split_once(' ').unwrap();
    let mut stream = TcpStream::connect(("127.0.0.1", port.parse().unwrap())).unwrap();
    let case = Case::parse(case);
    let sleeps = receive(device, case, &mut stream);
    assert!(!case.sleeps || sleeps > 0, "it never slept");
    println!("received {} steps, slept {sleeps} times", case.steps);
}

#[test]
#[ignore = "guest: needs two RDMA devices"]
fn steps_arrive_once_and_whole() {
    let [device, receiver] = devices().unwrap();
    if let Ok(told) = std::env::var(RECEIVER) {
        return receiver_process(&told, &receiver);
    }
    let plain = Case {
        qps: 1,
        split: false,
        steps: 64,
        most: 48,
        sleeps: true,
    };
    for case in [
        plain,
        Case {
            sleeps: false,
            ..plain
        },
        Case { most: SLOT, ..plain },
        Case {
            qps: 4,
            most: SLOT,
            ..plain
        },
        Case {
            qps: 4,
            most: SLOT,
            split: true,
            ..plain
        },
        Case {
            qps: 16,
            most: 200,
            split: true,
            ..plain
        },
    ] {
        let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
        let child = Command::new(std::env::current_exe().unwrap())
            .args([
                "--exact",
                "steps_arrive_once_and_whole",
                "--ignored",
                "--nocapture",
            ])
            .env(
                RECEIVER,
                format!("{} {}", listener.local_addr().unwrap().port(), case.text()),
            )
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let (mut stream, _) = listener.accept().unwrap();
        let start = Instant::now();
        let sender = send(&device, case, &mut stream);
        println!("{case:?}: {:?}", start.elapsed());
        stream.write_all(b"+").unwrap();
        let output = child.wait_with_output().unwrap();
        let text = [output.stdout, output.stderr].concat();
        assert!(
            output.status.success(),
            "{case:?}: {}",
            String::from_utf8_lossy(&text)
        );
        assert_eq!((sender.acked(), sender.posted()), (case.steps, case.steps));
        assert!(sender.granted() <= case.steps + SLOTS as u64);
    }
}
