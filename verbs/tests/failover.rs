//! Connections whose ports fail, in a guest: two processes move numbered steps over two soft-RoCE links, and a link goes down.
//!
//! Which cases are run is in `RINGSIGHT_FAILOVER_CASES`, one in each line; `cargo xtask vm failover` makes them. A case is one line of
//! output: what it is, and what came of it.

use std::{
    collections::VecDeque,
    io::{self, Read, Write},
    net::{TcpListener, TcpStream},
    path::Path as FilePath,
    process::{Child, Command},
    sync::Arc,
    time::{Duration, Instant},
};

use ringsight_failover::{MESSAGE_BYTES, Report, Settings};
use ringsight_verbs::{
    config::{Config, Filter},
    device::Memory,
    endpoint::{Control, Failover, Noted, Path, Peer, Receiver, SLOTS, Sender, Slots},
    hub::Hub,
    port::Net,
    queue::Patience,
    wire::{OFFER_BYTES, Offer},
};

const STEPS: u64 = 64;
const SLOT: usize = 16 << 10;
const SLOTS_AT: Slots = Slots {
    offset: 0,
    bytes: SLOT,
};
/// No case takes so long.
const PATIENCE: Duration = Duration::from_secs(100);

/// Which ports go down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Side {
    Sender,
    Receiver,
    Both,
}

/// What goes down, and what comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Failure {
    Primary,
    Backup,
    /// The primary; when steps go over the backup, that one, and the primary comes back.
    PrimaryThenBackup,
    /// The primary, for some milliseconds.
    Flap,
    /// Both, for good.
    All,
}

/// What the ranks do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Work {
    /// One sends, the other receives.
    SendRecv,
    /// Each sends to the other: reduce-scatter, then all-gather of a ring of two.
    AllReduce,
}

/// One case.
#[derive(Clone, Copy, Debug)]
struct Case {
    work: Work,
    failure: Failure,
    side: Side,
    /// The work request before which the link goes down.
    boundary: u64,
}

impl Case {
    fn parse(line: &str) -> Option<Self> {
        let words: Vec<&str> = line.split_whitespace().collect();
        let [work, failure, side, boundary] = words[..] else {
            return None;
        };
        Some(Self {
            work: match work {
                "sendrecv" => Work::SendRecv,
                "allreduce" => Work::AllReduce,
                _ => return None,
            },
            failure: match failure {
                "primary" => Failure::Primary,
                "backup" => Failure::Backup,
                "primary-backup" => Failure::PrimaryThenBackup,
                "flap" => Failure::Flap,
                "all" => Failure::All,
                _ => return None,
            },
            side: match side {
                "sender" => Side::Sender,
                "receiver" => Side::Receiver,
                "both" => Side::Both,
                _ => return None,
            },
            boundary: boundary.parse().ok().filter(|boundary| *boundary < STEPS)?,
        })
    }

    /// Interfaces of a link that fail.
    fn interfaces(self, link: usize) -> Vec<String> {
        match self.side {
            Side::Sender => vec![format!("nic{link}")],
            Side::Receiver => vec![format!("pnic{link}")],
            Side::Both => vec![format!("nic{link}"), format!("pnic{link}")],
        }
    }
}

fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}

/// Words of a rank's part of the input.
fn input(rank: u64, case: u64, chunk: u64) -> impl Iterator<Item = u64> {
    (0..SLOT as u64 / 8).map(move |word| mix(rank << 60 ^ case << 32 ^ chunk << 16 ^ word))
}

/// Brings an interface up or down.
fn set_up(interface: &str, up: bool) {
    // SAFETY: a socket, of which only the number is used.
    let socket = unsafe { libc::socket(libc::AF_INET, libc::SOCK_DGRAM | libc::SOCK_CLOEXEC, 0) };
    assert!(socket >= 0, "{}", io::Error::last_os_error());
    // SAFETY: all-zero bytes are a valid request.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    for (to, from) in request.ifr_name.iter_mut().zip(interface.bytes()) {
        *to = from.cast_signed();
    }
    // SAFETY: a request with a name, which is written to.
    let got = unsafe { libc::ioctl(socket, libc::SIOCGIFFLAGS, &raw mut request) };
    assert_eq!(got, 0, "{interface}: {}", io::Error::last_os_error());
    // SAFETY: the flags are what was just read.
    unsafe {
        match up {
            true => request.ifr_ifru.ifru_flags |= libc::IFF_UP as i16,
            false => request.ifr_ifru.ifru_flags &= !(libc::IFF_UP as i16),
        }
    }
    // SAFETY: a request with a name and flags.
    let set = unsafe { libc::ioctl(socket, libc::SIOCSIFFLAGS, &raw mut request) };
    assert_eq!(set, 0, "{interface}: {}", io::Error::last_os_error());
    // SAFETY: from above, once.
    unsafe { libc::close(socket) };
}

/// Brings everything up and waits until the devices say so.
fn mend() {
    for link in 0..2 {
        set_up(&format!("nic{link}"), true);
        set_up(&format!("pnic{link}"), true);
    }
    let start = Instant::now();
    for device in ["hca0", "hca1", "peer0", "peer1"] {
        let file = format!("/sys/class/infiniband/{device}/ports/1/state");
        while !std::fs::read_to_string(&file).unwrap().contains("ACTIVE") {
            assert!(start.elapsed() < PATIENCE, "{device} does not come up");
            std::thread::sleep(Duration::from_millis(5));
        }
    }
}

/// Frames between the two processes, outside RDMA: tag, and bytes of a length that the tag says.
struct Outside {
    stream: TcpStream,
    buffer: Vec<u8>,
}

const OFFER: u8 = 1;
const READY: u8 = 2;
/// A message of the sending end of rank 0, or to it; of rank 1's.
const MESSAGE: [u8; 2] = [3, 4];
/// A rank has come to the end of a case; what was wrong there.
const DONE: u8 = 5;
/// All links are up: the next case.
const GO: u8 = 6;
/// Bytes that say what was wrong.
const TEXT: usize = 120;

impl Outside {
    fn put(&mut self, tag: u8, bytes: &[u8]) {
        let mut frame = vec![tag];
        frame.extend(bytes);
        self.stream.set_nonblocking(false).unwrap();
        self.stream.write_all(&frame).unwrap();
    }

    /// The next frame, if all of it is here.
    fn take(&mut self) -> Option<(u8, Vec<u8>)> {
        self.stream.set_nonblocking(true).unwrap();
        let mut more = [0; 4096];
        loop {
            match self.stream.read(&mut more) {
                Ok(0) => panic!("the other process is gone"),
                Ok(count) => self.buffer.extend(&more[..count]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => break,
                Err(error) => panic!("{error}"),
            }
        }
        let tag = *self.buffer.first()?;
        let length = match tag {
            OFFER => OFFER_BYTES,
            tag if MESSAGE.contains(&tag) => MESSAGE_BYTES,
            DONE => TEXT,
            _ => 0,
        };
        (self.buffer.len() > length).then(|| {
            let frame: Vec<u8> = self.buffer.drain(..=length).collect();
            (tag, frame[1..].to_vec())
        })
    }

    /// The next frame of a tag; messages before it are late ones of the case before.
    fn wait(&mut self, wanted: u8) -> Vec<u8> {
        let start = Instant::now();
        loop {
            match self.take() {
                Some((tag, bytes)) if tag == wanted => return bytes,
                Some((tag, _)) => assert!(MESSAGE.contains(&tag), "frame {tag} instead of {wanted}"),
                None => std::thread::sleep(Duration::from_micros(200)),
            }
            assert!(start.elapsed() < PATIENCE, "no frame {wanted}");
        }
    }
}

/// Memory with slots, and where it is. There are as many as ends of a process, and they serve all cases.
fn slots() -> (Memory, *mut u64) {
    let memory = Box::leak(vec![0_u64; SLOTS * SLOT / 8].into_boxed_slice());
    let base = memory.as_mut_ptr();
    // SAFETY: never freed, and from here on used by its address alone.
    (
        unsafe { Memory::new(base.cast(), SLOTS * SLOT, Arc::new(())) },
        base,
    )
}

/// A process: a rank, with its two ports.
struct Rank {
    number: usize,
    net: Arc<Net>,
    hub: Arc<Hub>,
    outside: Outside,
    sends: (Memory, *mut u64),
    receives: (Memory, *mut u64),
    seed: u64,
}

impl Rank {
    fn new(number: usize, stream: TcpStream) -> Self {
        let devices = [["hca0", "hca1"], ["peer0", "peer1"]][number];
        let config = Config {
            devices: Filter::parse(&format!("={}", devices.join(","))),
            // Seven tries, for soft-RoCE takes a retry count of seven to be infinite.
            patience: Patience {
                // 1.9 s in all, and 0.3 s for a packet that is lost: the machine is emulated, and may have other things to do.
                timeout: 16,
                retries: 6,
            },
            ..Config::default()
        };
        let settings = Settings {
            timeout: Duration::from_secs(6),
            give_up: Duration::from_secs(30),
            ..Settings::default()
        };
        stream.set_nodelay(true).unwrap();
        Self {
            number,
            net: Arc::new(Net::new(config, FilePath::new("/sys")).unwrap()),
            hub: Hub::new(Arc::new(settings)),
            outside: Outside {
                stream,
                buffer: Vec::new(),
            },
            sends: slots(),
            receives: slots(),
            seed: std::process::id().into(),
        }
    }

    /// Paths of an end over both ports.
    fn paths(&mut self, is_receiver: bool, control: &Control) -> Vec<Path> {
        (0..2)
            .map(|index| {
                let port = self.net.open(index).unwrap();
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
                Path::new(index, port, (memory, is_receiver), control, draw).unwrap()
            })
            .collect()
    }

    /// Connects an end's paths to the peer's.
    fn connect(&mut self, paths: &mut [Path], control: &Control, slots: u64) {
        let offer = Offer {
            failover: true,
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

    fn failover(&self) -> Failover {
        // What was told of the case before is over.
        self.hub.poll();
        Failover {
            hub: Arc::clone(&self.hub),
            net: Some(Arc::clone(&self.net)),
            ports: vec![0, 1],
        }
    }

    fn sender(&mut self) -> Sender {
        let control = Control::new().unwrap();
        let mut paths = self.paths(false, &control);
        self.connect(&mut paths, &control, 0);
        Sender::with_failover(paths, control, SLOTS_AT, self.failover())
    }

    fn receiver(&mut self) -> Receiver {
        let control = Control::new().unwrap();
        let mut paths = self.paths(true, &control);
        let slots = self.receives.0.address();
        self.connect(&mut paths, &control, slots);
        Receiver::with_failover(paths, control, self.failover())
    }
}

/// What came of a case, seen by one rank.
#[derive(Default)]
struct Seen {
    error: Option<String>,
    /// Work requests outstanding when the path in use broke.
    outstanding: u64,
    switches: Vec<(u8, u8)>,
    replayed: u64,
    broken: Vec<String>,
    /// When the link went down; to the first post on the other path, and to the first one that got over.
    down: Option<Duration>,
    switch: Option<Duration>,
    recovered: Option<Duration>,
    wrong: Option<String>,
    /// What the other rank found wrong, its error included.
    peer: Option<String>,
}

impl Seen {
    fn note(&mut self, noted: Noted) {
        let since = self.down.map(|down| noted.at.saturating_sub(down));
        match noted.report {
            Report::Switched {
                from, to, replayed, ..
            } => {
                self.switches.push((from, to));
                self.replayed += replayed;
                self.switch = self.switch.or(since);
            }
            Report::Recovered { .. } => self.recovered = self.recovered.or(since),
            Report::Broken { link, cause, .. } => self.broken.push(format!("{}:{cause}", link.path)),
            Report::Restored { .. } => {}
        }
    }
}

/// Moves all steps of a case, as one of the ranks.
struct Run<'a> {
    rank: &'a mut Rank,
    case: Case,
    number: u64,
    sender: Option<Sender>,
    receiver: Option<Receiver>,
    /// All-reduce: sums of what was received in the first half, by step.
    sums: VecDeque<Vec<u64>>,
    seen: Seen,
    /// What is to be done to links, and when.
    plan: Vec<(Duration, String, bool)>,
    second: bool,
}

impl Run<'_> {
    /// What goes out in a step.
    fn outgoing(&self, step: u64) -> Option<Vec<u64>> {
        let rank = self.rank.number as u64;
        match self.case.work {
            Work::SendRecv => Some(input(rank, self.number, step).collect()),
            // The other's half as it is here, then one's own half as it has become.
            Work::AllReduce if step < STEPS / 2 => {
                Some(input(rank, self.number, step + (1 - rank) * STEPS / 2).collect())
            }
            Work::AllReduce => self.sums.get((step - STEPS / 2) as usize).cloned(),
        }
    }

    /// What must come in, in a step; what is kept of it.
    fn incoming(&mut self, step: u64, got: &[u64]) {
        let (rank, number) = (self.rank.number as u64, self.number);
        let mut expected: Vec<u64> = match self.case.work {
            Work::SendRecv => input(1 - rank, number, step).collect(),
            Work::AllReduce => input(
                1 - rank,
                number,
                step % (STEPS / 2) + if step < STEPS / 2 { rank } else { 1 - rank } * STEPS / 2,
            )
            .collect(),
        };
        if self.case.work == Work::AllReduce {
            let half = if step < STEPS / 2 { rank } else { 1 - rank };
            let own: Vec<u64> = input(rank, number, step % (STEPS / 2) + half * STEPS / 2).collect();
            let sum = |other: &[u64]| -> Vec<u64> {
                own.iter().zip(other).map(|(a, b)| a.wrapping_add(*b)).collect()
            };
            if step < STEPS / 2 {
                self.sums.push_back(sum(got));
            } else {
                expected = sum(&expected);
            }
        }
        if got != expected && self.seen.wrong.is_none() {
            self.seen.wrong = Some(format!("step {step} is not what was sent"));
        }
    }

    fn run(mut self) -> Seen {
        let start = Instant::now();
        if let Some(receiver) = &mut self.receiver {
            receiver.set_busy(true);
            receiver.grant(SLOTS as u64).unwrap();
        }
        if let Some(sender) = &mut self.sender {
            sender.set_busy(true);
        }
        let mut is_done = false;
        let mut peer_is_done = false;
        while !(is_done && peer_is_done) {
            if start.elapsed() > PATIENCE {
                self.seen.error = Some("it hangs".into());
                return self.seen;
            }
            let result = self.turn();
            while let Some((tag, bytes)) = self.rank.outside.take() {
                match MESSAGE.iter().position(|message| *message == tag) {
                    // A connection is known by the rank that sends.
                    Some(of) if of == self.rank.number => {
                        drop(self.sender.as_mut().map(|sender| sender.hear(&bytes)));
                    }
                    Some(_) => drop(self.receiver.as_mut().map(|receiver| receiver.hear(&bytes))),
                    None => {
                        assert_eq!(tag, DONE);
                        peer_is_done = true;
                        let text = String::from_utf8_lossy(&bytes).trim_matches('\0').to_owned();
                        self.seen.peer = (!text.is_empty()).then_some(text);
                        // What follows is of the next case.
                        break;
                    }
                }
            }
            self.pass_on();
            let moved = match result {
                Ok(moved) => moved,
                Err(text) => {
                    self.seen.error.get_or_insert(text);
                    false
                }
            };
            let sent = self.sender.as_ref().is_none_or(|sender| sender.acked() == STEPS);
            let got = self
                .receiver
                .as_ref()
                .is_none_or(|receiver| receiver.taken() == STEPS);
            if !is_done && (sent && got || self.seen.error.is_some()) {
                is_done = true;
                let mut text = [0; TEXT];
                let wrong = self.seen.wrong.as_ref().or(self.seen.error.as_ref());
                for (to, from) in text.iter_mut().zip(wrong.map_or("", String::as_str).bytes()) {
                    *to = from;
                }
                self.rank.outside.put(DONE, &text);
            }
            if !moved {
                std::thread::sleep(Duration::from_micros(100));
            }
        }
        self.seen
    }

    /// Has the peer hear what is to be said, and keeps what is for the record.
    fn pass_on(&mut self) {
        let number = self.rank.number;
        while let Some(message) = self.sender.as_mut().and_then(Sender::take_outgoing) {
            self.rank.outside.put(MESSAGE[number], &message);
        }
        while let Some(message) = self.receiver.as_mut().and_then(Receiver::take_outgoing) {
            self.rank.outside.put(MESSAGE[1 - number], &message);
        }
        while let Some(noted) = self.sender.as_mut().and_then(Sender::take_noted) {
            if matches!(noted.report, Report::Broken { active: true, .. })
                && let Some(sender) = &self.sender
            {
                self.seen.outstanding = self.seen.outstanding.max(sender.posted() - sender.acked());
            }
            self.seen.note(noted);
        }
        while self.receiver.as_mut().and_then(Receiver::take_noted).is_some() {}
    }

    fn turn(&mut self) -> Result<bool, String> {
        let mut moved = false;
        self.links();
        let next = self
            .sender
            .as_ref()
            .filter(|sender| sender.may_post())
            .map(Sender::posted);
        if let Some(position) = next
            && position < STEPS
            && let Some(words) = self.outgoing(position)
            && let Some(sender) = &mut self.sender
            && position < sender.acked() + SLOTS as u64
        {
            // SAFETY: a slot that was acknowledged: nobody else uses it.
            unsafe {
                self.rank
                    .sends
                    .1
                    .byte_add(SLOTS_AT.at(position))
                    .copy_from(words.as_ptr(), words.len());
            };
            sender
                .post(&position.to_le_bytes(), SLOT)
                .map_err(|failure| failure.text)?;
            moved = true;
        }
        if let Some(sender) = &mut self.sender {
            moved |= sender.poll().map_err(|failure| failure.text)?;
        }
        let Some(mut receiver) = self.receiver.take() else {
            return Ok(moved);
        };
        let polled = receiver.poll().map_err(|failure| failure.text);
        let mut result = polled.map(|polled| polled | moved);
        while let Ok(moved) = &mut result {
            match receiver.take() {
                Ok(Some(arrived)) => {
                    *moved = true;
                    let step = arrived.position;
                    if arrived.notice() != step.to_le_bytes() || step + 1 != receiver.taken() {
                        self.seen.wrong = Some(format!("step {step} is not the one that was sent"));
                    }
                    let mut got = vec![0_u64; SLOT / 8];
                    // SAFETY: the step is here, and its slot is granted again only below.
                    unsafe {
                        got.as_mut_ptr()
                            .copy_from(self.rank.receives.1.byte_add(SLOTS_AT.at(step)), got.len());
                    };
                    self.incoming(step, &got);
                    let room = (receiver.taken() + SLOTS as u64).min(STEPS);
                    if let Err(failure) = receiver.grant(room) {
                        result = Err(failure.text);
                    }
                }
                Ok(None) => break,
                Err(failure) => result = Err(failure.text),
            }
        }
        self.receiver = Some(receiver);
        result
    }

    /// The failing, which is the first rank's to do.
    fn links(&mut self) {
        let now = self.rank.hub.now();
        self.plan.retain(|(at, interface, up)| {
            let due = *at <= now;
            if due {
                set_up(interface, *up);
            }
            !due
        });
        let Some(sender) = &self.sender else { return };
        if self.rank.number > 0 {
            return;
        }
        let next = sender.may_post() && sender.posted() == self.case.boundary;
        if next && self.seen.down.is_none() {
            self.seen.down = Some(now);
            let links: &[usize] = match self.case.failure {
                Failure::Primary | Failure::PrimaryThenBackup | Failure::Flap => &[0],
                Failure::Backup => &[1],
                Failure::All => &[0, 1],
            };
            for link in links {
                self.case
                    .interfaces(*link)
                    .iter()
                    .for_each(|interface| set_up(interface, false));
            }
            if self.case.failure == Failure::Backup {
                self.seen.outstanding = sender.posted() + 1 - sender.acked();
            }
            if self.case.failure == Failure::Flap {
                let up = now + Duration::from_millis(20);
                self.plan = self
                    .case
                    .interfaces(0)
                    .into_iter()
                    .map(|interface| (up, interface, true))
                    .collect();
            }
        }
        if self.case.failure == Failure::PrimaryThenBackup && self.seen.recovered.is_some() && !self.second {
            self.second = true;
            self.case
                .interfaces(1)
                .iter()
                .for_each(|interface| set_up(interface, false));
            self.case
                .interfaces(0)
                .iter()
                .for_each(|interface| set_up(interface, true));
        }
    }
}

fn run(rank: &mut Rank, case: Case, number: u64) -> Seen {
    if case.failure == Failure::All {
        // How long does not matter.
        let settings = Settings {
            give_up: Duration::from_secs(3),
            ..rank.hub.settings().as_ref().clone()
        };
        rank.hub.poll();
        rank.hub = Hub::new(Arc::new(settings));
    }
    let (sender, receiver) = match (case.work, rank.number) {
        (Work::SendRecv, 0) => (Some(rank.sender()), None),
        (Work::SendRecv, _) => (None, Some(rank.receiver())),
        (Work::AllReduce, 0) => {
            let sender = rank.sender();
            (Some(sender), Some(rank.receiver()))
        }
        (Work::AllReduce, _) => {
            let receiver = rank.receiver();
            (Some(rank.sender()), Some(receiver))
        }
    };
    let run = Run {
        rank,
        case,
        number,
        sender,
        receiver,
        sums: VecDeque::new(),
        seen: Seen::default(),
        plan: Vec::new(),
        second: false,
    };
    run.run()
}

/// What a case came to.
enum Verdict {
    Right,
    /// It did not come to what it is for: to be tried again.
    Missed(String),
    Wrong(String),
}

fn verdict(case: Case, seen: &Seen) -> Verdict {
    if let Some(wrong) = &seen.wrong {
        return Verdict::Wrong(wrong.clone());
    }
    if seen.down.is_none() {
        return Verdict::Wrong("the link never went down".into());
    }
    match (&seen.error, case.failure) {
        (Some(text), Failure::All) if text.contains("no path") => return Verdict::Right,
        (None, Failure::All) => return Verdict::Wrong("it went on without a link".into()),
        (Some(text), _) => return Verdict::Wrong(text.clone()),
        (None, _) => {}
    }
    if let Some(text) = &seen.peer {
        return Verdict::Wrong(format!("the other rank: {text}"));
    }
    if seen.outstanding == 0 {
        return Verdict::Missed("no work request was outstanding".into());
    }
    let away = seen.switches.first() == Some(&(0, 1));
    let back = seen.switches.get(1) == Some(&(1, 0));
    let (is_expected, may_miss) = match case.failure {
        Failure::Primary | Failure::Flap => (away, false),
        // Everything may be over before the second link fails.
        Failure::PrimaryThenBackup => (away && back, away),
        Failure::Backup => (seen.switches.is_empty(), false),
        Failure::All => (true, false),
    };
    let text = || format!("switches {:?}, broken {:?}", seen.switches, seen.broken);
    match (is_expected, may_miss) {
        (true, _) => Verdict::Right,
        (false, true) => Verdict::Missed(text()),
        (false, false) => Verdict::Wrong(text()),
    }
}

const PEER: &str = "RINGSIGHT_FAILOVER_PEER";
const CASES: &str = "RINGSIGHT_FAILOVER_CASES";

/// One of each kind, where nothing else is asked for.
const USUAL: [&str; 9] = [
    "sendrecv primary sender 0",
    "sendrecv primary receiver 31",
    "sendrecv backup sender 17",
    "sendrecv primary-backup both 9",
    "sendrecv flap sender 63",
    "allreduce primary both 32",
    "allreduce primary-backup sender 12",
    "allreduce flap receiver 40",
    "allreduce all both 5",
];

fn cases() -> Vec<(String, Case)> {
    let text = std::env::var(CASES).unwrap_or_else(|_| USUAL.join("\n"));
    text.lines()
        .map(|line| {
            let case = Case::parse(line).unwrap_or_else(|| panic!("no case: {line}"));
            (line.to_owned(), case)
        })
        .collect()
}

fn peer(listener: &TcpListener) -> Child {
    Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "links_fail", "--ignored", "--nocapture"])
        .env(PEER, listener.local_addr().unwrap().port().to_string())
        .spawn()
        .unwrap()
}

#[test]
#[ignore = "helper: needs two soft-RoCE links, run in a guest"]
fn links_fail() {
    if let Ok(port) = std::env::var(PEER) {
        let stream = TcpStream::connect(("127.0.0.1", port.parse().unwrap())).unwrap();
        let mut rank = Rank::new(1, stream);
        for (number, (_, case)) in (0..).zip(cases()) {
            rank.outside.wait(GO);
            run(&mut rank, case, number);
        }
        return;
    }
    mend();
    let listener = TcpListener::bind(("127.0.0.1", 0)).unwrap();
    let mut child = peer(&listener);
    let mut rank = Rank::new(0, listener.accept().unwrap().0);
    let mut wrong = 0;
    for (number, (line, case)) in (0..).zip(cases()) {
        rank.outside.put(GO, &[]);
        let start = Instant::now();
        let seen = run(&mut rank, case, number);
        let (is_right, counts, text) = match verdict(case, &seen) {
            Verdict::Right => (true, true, None),
            Verdict::Missed(text) => (true, false, Some(text)),
            Verdict::Wrong(text) => (false, true, Some(text)),
        };
        wrong += u32::from(!is_right);
        let milliseconds =
            |time: Option<Duration>| time.map(|time| (time.as_secs_f64() * 1e4).round() / 10.0);
        let outcome = serde_json::json!({
            "case": line,
            "ok": is_right,
            "counts": counts,
            "text": text,
            "outstanding": seen.outstanding,
            "replayed": seen.replayed,
            "switches": seen.switches,
            "broken": seen.broken,
            "switch_ms": milliseconds(seen.switch),
            "recovered_ms": milliseconds(seen.recovered),
            "took_ms": milliseconds(Some(start.elapsed())),
        });
        println!("\n{outcome}");
        mend();
    }
    assert!(child.wait().unwrap().success());
    assert_eq!(wrong, 0, "cases that went wrong");
}
