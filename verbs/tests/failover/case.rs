//! Cases: what ranks do, what fails, and what must come of it.

use std::{collections::BTreeMap, time::Duration};

use ringsight_failover::{Cause, Settings, Status, transport_timeout};
use ringsight_verbs::{config::MAX_QPS, endpoint::SLOTS};

use super::{
    fabric::Port,
    seen::{Seen, TORN, WATCHED},
};

/// Which ports go down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Side {
    Sender,
    Receiver,
    Both,
}

/// What goes down, and what comes back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Failure {
    /// Nothing.
    None,
    Primary,
    Backup,
    /// The primary; when steps go over the backup, that one, and the primary comes back.
    PrimaryThenBackup,
    /// The primary, for `down-ms`, `flaps` times with as long between them.
    Flap,
    /// Packets of the primary are lost, both ways, and nothing says so.
    Silent,
    /// The same of what comes to the last queue pair of the primary at the receiver alone. Soft-RoCE only.
    SilentQueue,
    /// The primary's queue pair, of itself: its port is up, and the path comes back. mlx5 only.
    QueuePair,
    /// The same of its completion queue. mlx5 only.
    CompletionQueue,
    /// The primary's queue pair answers what comes next with an error, and fails: so does its peer's request. mlx5 only.
    Refusal,
    /// The primary's device, which dies. mlx5 only.
    Device,
    /// Both, for good.
    All,
    /// Links go down and come up at random, `flaps` times; at last the primary stays down. The boundary is the seed.
    Chaos,
}

/// What of the requests at the boundary is lost while it is under way, so that it is not through when the link goes down.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Lost {
    /// All that the sender's port sends: the step does not arrive.
    Steps,
    /// What tells of steps: the bytes arrive, and nobody is told.
    Notices,
    /// All that the receiver's port sends: the step arrives, and the sender does not know.
    Acknowledgements,
}

/// What the ranks do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Work {
    /// One sends, the other receives.
    SendRecv,
    /// Each sends to the other: reduce-scatter, then all-gather of a ring of two.
    AllReduce,
}

/// How often a device tries again: for soft-RoCE takes seven to be infinite.
pub(crate) const RETRIES: u8 = 6;

/// Queue pairs of a path.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Queues {
    /// `qps`: how many.
    pub(crate) count: usize,
    /// `split`: a step is cut into parts for all of them; else they take turns.
    pub(crate) is_split: bool,
    /// `ib-timeout`: the exponent of how long the device waits for an acknowledgement, of seven times.
    pub(crate) timeout: u8,
}

impl Default for Queues {
    fn default() -> Self {
        Self {
            count: 1,
            is_split: false,
            // 1.9 s in all, and 0.3 s for a packet that is lost: the machine is emulated, and may have other things to do.
            timeout: 16,
        }
    }
}

/// One case.
#[derive(Clone, Debug)]
pub(crate) struct Case {
    /// As it was given.
    pub(crate) line: String,
    pub(crate) work: Work,
    pub(crate) failure: Failure,
    pub(crate) side: Side,
    /// The step after one of whose two work requests the link goes down, before that one is through.
    pub(crate) boundary: u64,
    /// It is the request of the step's bytes: they arrive, and what tells of them does not.
    pub(crate) is_torn: bool,
    /// `ahead`: so many steps, that one the last, are posted at once; by default one to four, as the boundary is. With its bytes alone
    /// that one is the first: what follows it cannot be taken.
    pub(crate) ahead: u64,
    /// `steps`: steps of each sender.
    pub(crate) steps: u64,
    /// `load`: threads of each process that do nothing but be in the way.
    pub(crate) load: usize,
    /// `pace-us`: least time from one step to the next.
    pub(crate) pace: Duration,
    /// `away-ms`: the first rank sleeps at the boundary, with steps under way.
    pub(crate) away: Duration,
    /// `down-ms`: how long a link is down.
    pub(crate) down: Duration,
    /// `flaps`: how often.
    pub(crate) flaps: u32,
    /// `loose`: paths may be left for no reason, so any switches are right, and so is an error that no path works.
    pub(crate) loose: bool,
    /// `alone`: there is no path but the backup.
    pub(crate) alone: bool,
    /// Of each path.
    pub(crate) queues: Queues,
    /// `lean`: nothing but the ends runs: bytes are neither made nor looked at, nobody sleeps, and messages outside are seldom
    /// looked for.
    pub(crate) lean: bool,
    /// Settings that differ: `RINGSIGHT_NET_` and what stands in upper case.
    variables: BTreeMap<String, String>,
}

impl Case {
    /// Of `work failure side request`, and words `name=value`. A step is two requests, its bytes and what tells of them.
    pub(crate) fn parse(line: &str) -> Option<Self> {
        let mut words = line.split_whitespace();
        let mut case = Self {
            line: line.to_owned(),
            work: match words.next()? {
                "sendrecv" => Work::SendRecv,
                "allreduce" => Work::AllReduce,
                _ => return None,
            },
            failure: match words.next()? {
                "none" => Failure::None,
                "primary" => Failure::Primary,
                "backup" => Failure::Backup,
                "primary-backup" => Failure::PrimaryThenBackup,
                "flap" => Failure::Flap,
                "silent" => Failure::Silent,
                "silent-queue" => Failure::SilentQueue,
                "queue-pair" => Failure::QueuePair,
                "refusal" => Failure::Refusal,
                "device" => Failure::Device,
                "completion-queue" => Failure::CompletionQueue,
                "all" => Failure::All,
                "chaos" => Failure::Chaos,
                _ => return None,
            },
            side: match words.next()? {
                "sender" => Side::Sender,
                "receiver" => Side::Receiver,
                "both" => Side::Both,
                _ => return None,
            },
            boundary: words.next()?.parse().ok()?,
            is_torn: false,
            ahead: 0,
            steps: 64,
            load: 0,
            pace: Duration::ZERO,
            away: Duration::ZERO,
            down: Duration::from_millis(20),
            flaps: 1,
            loose: false,
            alone: false,
            queues: Queues::default(),
            lean: false,
            variables: BTreeMap::new(),
        };
        if case.failure != Failure::Chaos {
            (case.boundary, case.is_torn) = (case.boundary / 2, case.boundary.is_multiple_of(2));
        }
        if case.failure == Failure::PrimaryThenBackup {
            // Something is left to do when the second link fails, too.
            case.steps = 80;
        }
        for word in words {
            let (name, value) = word.split_once('=')?;
            let number = || value.parse::<u64>().ok();
            match name {
                "steps" => case.steps = number()?,
                "ahead" => case.ahead = number().filter(|ahead| (1..=SLOTS as u64).contains(ahead))?,
                "load" => case.load = number()? as usize,
                "pace-us" => case.pace = Duration::from_micros(number()?),
                "away-ms" => case.away = Duration::from_millis(number()?),
                "down-ms" => case.down = Duration::from_millis(number()?),
                "flaps" => case.flaps = number()? as u32,
                "loose" => case.loose = number()? > 0,
                "alone" => case.alone = number()? > 0,
                "qps" => {
                    case.queues.count = number().filter(|qps| (1..=MAX_QPS as u64).contains(qps))? as usize;
                }
                "split" => case.queues.is_split = number()? > 0,
                "ib-timeout" => case.queues.timeout = number().filter(|timeout| *timeout < 32)? as u8,
                // They tell runs of a case apart.
                "of" | "run" => {}
                "lean" => case.lean = number()? > 0,
                name if name
                    .chars()
                    .all(|letter| letter.is_ascii_uppercase() || letter == '_') =>
                {
                    case.variables
                        .insert(format!("RINGSIGHT_NET_{name}"), value.to_owned());
                }
                _ => return None,
            }
        }
        if case.ahead == 0 {
            case.ahead = 1 + case.boundary / 2 % 4;
        }
        let boundary_is_one = case.boundary < case.steps || case.failure == Failure::Chaos;
        (boundary_is_one && case.steps.is_multiple_of(2) && case.settings().is_some()).then_some(case)
    }

    /// What the connections are to keep to.
    pub(crate) fn settings(&self) -> Option<Settings> {
        let get = |name: &str| {
            let own = self.variables.get(name).cloned();
            // The machine is emulated, and may have other things to do. With one path the library's own times are what is looked at.
            own.or_else(|| match name {
                "NCCL_IB_TIMEOUT" => Some(self.queues.timeout.to_string()),
                "NCCL_IB_RETRY_CNT" => Some(RETRIES.to_string()),
                _ if self.alone => None,
                "RINGSIGHT_NET_TIMEOUT_MS" => Some("6000".into()),
                // How long does not matter.
                "RINGSIGHT_NET_GIVE_UP_MS" if self.failure == Failure::All => Some("3000".into()),
                "RINGSIGHT_NET_GIVE_UP_MS" => Some("30000".into()),
                _ => None,
            })
        };
        Settings::read(get, ringsight_comm_base::env::parse).ok()
    }

    /// How long the sender's device tries, if nothing else is to tell of the failure before.
    fn device_gives_up(&self) -> Option<Duration> {
        let tries = transport_timeout(self.queues.timeout, RETRIES)?;
        let own = self.settings()?.timeout;
        (self.failure == Failure::Silent && tries < own).then_some(tries)
    }

    /// What is lost over the link in use from right before the request of the boundary: what is under way when a cable is pulled.
    pub(crate) fn loses(&self) -> Option<Lost> {
        match self.failure {
            Failure::None
            | Failure::Silent
            | Failure::SilentQueue
            | Failure::QueuePair
            | Failure::Refusal
            | Failure::CompletionQueue
            | Failure::Device
            | Failure::Chaos => None,
            Failure::Primary
            | Failure::Backup
            | Failure::PrimaryThenBackup
            | Failure::Flap
            | Failure::All
                if self.is_torn =>
            {
                Some(Lost::Notices)
            }
            // By turns.
            Failure::Primary
            | Failure::Backup
            | Failure::PrimaryThenBackup
            | Failure::Flap
            | Failure::All => Some([Lost::Steps, Lost::Acknowledgements][(self.boundary % 2) as usize]),
        }
    }

    /// The link of a path.
    pub(crate) fn link(&self, path: usize) -> usize {
        path + usize::from(self.alone)
    }

    /// Ports of a path that fail.
    pub(crate) fn ports(&self, path: usize) -> Vec<Port> {
        let ranks = match self.side {
            Side::Sender => 0..1,
            Side::Receiver => 1..2,
            Side::Both => 0..2,
        };
        let link = self.link(path);
        ranks.map(|rank| Port { rank, link }).collect()
    }

    /// The path that is down from some moment on until the end, if one must be.
    pub(crate) fn stays_down(&self) -> Option<usize> {
        match self.failure {
            Failure::Primary | Failure::Device => Some(0),
            Failure::Backup | Failure::PrimaryThenBackup => Some(1),
            _ => None,
        }
    }

    /// What it came to.
    pub(crate) fn verdict(&self, seen: &Seen) -> Verdict {
        if let Some(wrong) = &seen.wrong {
            return Verdict::Wrong(wrong.clone());
        }
        let is_of_paths = |text: &String| text.contains("no path");
        if self.loose {
            // Whoever gives up first, the other learns of it.
            let errors = [&seen.error, &seen.peer];
            return match errors.into_iter().flatten().find(|text| !is_of_paths(text)) {
                Some(text) => Verdict::Wrong(text.clone()),
                None => Verdict::Right,
            };
        }
        if seen.down.is_none() && self.failure != Failure::None {
            return Verdict::Wrong("the link never went down".into());
        }
        match (&seen.error, self.failure) {
            (Some(text), Failure::All) if is_of_paths(text) => return Verdict::Right,
            (None, Failure::All) => return Verdict::Wrong("it went on without a link".into()),
            (Some(text), _) => return Verdict::Wrong(text.clone()),
            (None, _) => {}
        }
        if let Some(text) = &seen.peer {
            return Verdict::Wrong(format!("the other rank: {text}"));
        }
        // Steps that come one by one may all be there. Where packets are lost and nothing says so, what is posted from then on is what
        // is outstanding.
        let is_silent = matches!(self.failure, Failure::Silent | Failure::SilentQueue);
        let is_wanted = !is_silent && self.failure != Failure::None && self.pace.is_zero();
        if is_wanted && (seen.outstanding == 0 || self.loses().is_some() && seen.cut_off.contains(&0)) {
            let text = format!(
                "no work request was outstanding: {} before, {:?} when the link was down",
                seen.outstanding, seen.cut_off
            );
            return Verdict::Missed(text);
        }
        let away = seen.switches.first() == Some(&(0, 1));
        let back = seen.switches.get(1) == Some(&(1, 0));
        let (is_expected, may_miss) = match self.failure {
            Failure::Primary | Failure::Silent | Failure::Device => (away, false),
            // Nor is it back, ever.
            Failure::SilentQueue => (seen.switches == [(0, 1)], false),
            // A single one may be over before it is over for the connection, and the last steps may be there before both ends have agreed
            // to leave a path; after many it must be back.
            // The peer's NIC says that it could not.
            Failure::Refusal => {
                let is_back = seen.switches.last().is_some_and(|(_, to)| *to == 0);
                let refused = format!("0:{}", Cause::Completion(Status::Other(11)));
                (away && is_back && seen.broken.first() == Some(&refused), false)
            }
            // There is no other path: it is the same, made anew.
            Failure::Flap if self.alone => {
                let is_same = seen.switches.iter().all(|switch| *switch == (0, 0));
                let is_often = seen.switches.len() > 1;
                (
                    is_same && is_often == (self.flaps > 1) && !seen.switches.is_empty(),
                    false,
                )
            }
            Failure::Flap if self.flaps == 1 => (away, !seen.broken.is_empty() || seen.was_over_soon()),
            Failure::Flap => (
                away && seen.switches.last().is_some_and(|(_, to)| *to == 0),
                false,
            ),
            // Its end's device told of it, before any time was over, and the path was good again.
            Failure::QueuePair | Failure::CompletionQueue => {
                let causes = match self.side {
                    Side::Sender => &[Cause::Build][..],
                    Side::Receiver => &[Cause::Peer],
                    Side::Both => &[Cause::Build, Cause::Peer],
                };
                let is_back = seen.switches.last().is_some_and(|(_, to)| *to == 0);
                let mut told = causes.iter().map(|cause| format!("0:{cause}"));
                let is_told = told.any(|told| seen.broken.first() == Some(&told));
                (away && is_back && is_told, false)
            }
            // Everything may be over before the second link fails.
            Failure::PrimaryThenBackup => (away && back, away),
            Failure::None | Failure::Backup => (seen.switches.is_empty(), false),
            Failure::All | Failure::Chaos => (true, false),
        };
        let text = || format!("switches {:?}, broken {:?}", seen.switches, seen.broken);
        if let Some(tries) = self.device_gives_up() {
            // The receiver's credits are tried as often, and it may be the first to say so: all else would take either a minute.
            let causes = [Cause::Completion(Status::RetryExceeded), Cause::Peer];
            let is_told = causes
                .iter()
                .any(|cause| seen.broken.first() == Some(&format!("0:{cause}")));
            // The first try may have begun a moment before the packets are lost that it is made of.
            let is_late = seen.switch.is_some_and(|switch| switch >= tries.mul_f64(0.9));
            if !is_told || !is_late {
                return Verdict::Wrong(format!("{}, after {:?} of {tries:?}", text(), seen.switch));
            }
        }
        // Of the backup's failure the receiver need not hear in time, nor of a short one.
        let is_torn = matches!(self.failure, Failure::Primary | Failure::PrimaryThenBackup) && self.is_torn;
        if is_expected && is_torn && seen.costs[1][TORN] == 0 {
            let text = "the bytes of the boundary's step were not there without what tells of them";
            return Verdict::Missed(text.into());
        }
        // Of the backup nobody need have noticed: all may be over.
        let watched = seen.costs.map(|costs| costs[WATCHED]);
        let is_watched =
            self.failure == Failure::Backup || self.stays_down().is_none() || !watched.contains(&0);
        match (is_expected, may_miss) {
            (true, _) if !is_watched => Verdict::Missed(format!(
                "by rank, {watched:?} ends had given up the path that stayed down"
            )),
            (true, _) => Verdict::Right,
            (false, true) => Verdict::Missed(text()),
            (false, false) => Verdict::Wrong(text()),
        }
    }
}

/// What a case came to.
pub(crate) enum Verdict {
    Right,
    /// It did not come to what it is for: to be tried again.
    Missed(String),
    Wrong(String),
}

/// A number that follows from another one (splitmix64).
pub(crate) fn mix(value: u64) -> u64 {
    let mut z = value.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ z >> 31
}
