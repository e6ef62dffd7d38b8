//! What a case has fail, and when: the first rank's to do.

use std::{thread, time::Duration};

use ringsight_verbs::endpoint::Sender;

use super::{
    case::{Case, Failure, Lost},
    fabric::{Port, fail_completion_queue, fail_device, fail_queue_pair, refuse},
    links::{Plan, chaos},
    run::Run,
};

/// How long bytes may take that are to arrive before the link goes down: the stand-in's devices take requests up by themselves.
const ARRIVING: Duration = Duration::from_millis(20);

impl Run<'_> {
    /// Whether this rank has links fail, and has not yet.
    pub(super) fn is_to_fail(&self) -> bool {
        self.case.failure != Failure::None && self.rank.number == 0 && self.seen.down.is_none()
    }

    /// Whether the second link is to fail: a step went over it.
    pub(super) fn is_to_fail_again(&self) -> bool {
        self.case.failure == Failure::PrimaryThenBackup && self.seen.recovered.is_some() && !self.second
    }

    /// Has what is posted from here on not be through before the link is down, or no longer: soft-RoCE has done it all when the call
    /// that posts it returns.
    pub(super) fn lose(&self, lost: bool) {
        let link = self
            .case
            .link(usize::from(self.seen.recovered.is_some() && !self.case.alone));
        let fabric = self.rank.fabric;
        match self.case.loses() {
            Some(Lost::Steps) => fabric.lose_sent(Port { rank: 0, link }, lost),
            Some(Lost::Acknowledgements) => fabric.lose_sent(Port { rank: 1, link }, lost),
            Some(Lost::Notices) => fabric.lose_notices(Port { rank: 0, link }, lost),
            None => {}
        }
    }

    /// Brings links up, and down again, as was planned when the first one failed.
    pub(super) fn bring_up(&mut self) {
        let now = self.rank.port_health.now();
        while let Some((_, port, up)) = self.plan.pop_front_if(|(at, ..)| *at <= now) {
            self.rank.fabric.set_up(port, up);
            if up {
                self.seen.up = Some(self.rank.port_health.now());
            }
        }
    }

    /// The failing, which is the first rank's to do: when the request of the boundary was posted, before it is known to be through.
    pub(super) fn fail(&mut self) -> Result<(), String> {
        let Some(sender) = &mut self.sender else {
            return Ok(());
        };
        let (posted, outstanding) = (sender.posted(), sender.posted() - sender.acked());
        let boundary = match self.case.failure {
            Failure::Chaos => 0,
            _ => self.case.boundary,
        };
        if self.is_to_fail() && posted > boundary {
            if self.case.is_torn {
                thread::sleep(ARRIVING);
            }
            self.seen.outstanding = outstanding;
            self.fail_first();
            self.lose(false);
        } else if self.is_to_fail_again() && outstanding > 0 {
            self.second = true;
            self.look_at_left(0);
            for (link, up) in [(1, false), (0, true)] {
                for port in self.case.ports(link) {
                    self.rank.fabric.set_up(port, up);
                }
            }
            self.lose(false);
        } else {
            return Ok(());
        }
        let Some(sender) = &mut self.sender else {
            return Ok(());
        };
        // What the device had still done when the link was down is here now.
        sender.poll().map_err(|failure| failure.text)?;
        let cut_off = posted.saturating_sub(sender.acked());
        self.seen.cut_off.push(cut_off);
        Ok(())
    }

    fn fail_first(&mut self) {
        let now = self.rank.port_health.now();
        let fabric = self.rank.fabric;
        self.seen.down = Some(now);
        let paths: &[usize] = match self.case.failure {
            Failure::Primary | Failure::PrimaryThenBackup | Failure::Flap => &[0],
            Failure::Backup => &[1],
            Failure::All => &[0, 1],
            Failure::Silent
            | Failure::SilentQueue
            | Failure::QueuePair
            | Failure::Refusal
            | Failure::CompletionQueue
            | Failure::Device
            | Failure::Chaos
            | Failure::None => &[],
        };
        for port in paths.iter().flat_map(|path| self.case.ports(*path)) {
            fabric.set_up(port, false);
        }
        match self.case.failure {
            Failure::Device => self.case.ports(0).into_iter().for_each(fail_device),
            Failure::Flap => self.plan = flaps(&self.case, now),
            Failure::Silent => fabric.lose_packets(0, true),
            Failure::SilentQueue => {
                let peer = self.sender.as_ref().and_then(|sender| sender.paths()[0].peer());
                let last = peer.and_then(|peer| peer.path.qps.last()).expect("a queue pair");
                fabric.lose_of_queue_pair(Port { rank: 1, link: 0 }, last.number);
            }
            Failure::QueuePair | Failure::Refusal | Failure::CompletionQueue => {
                if let Some(sender) = &self.sender {
                    fail_queue(&self.case, sender);
                }
            }
            Failure::Chaos => self.plan = chaos(self.case.boundary, now, self.case.flaps),
            _ => {}
        }
    }
}

/// Has the last queue pair of the primary path fail, or its completion queue, at the ends that the case says.
fn fail_queue(case: &Case, sender: &Sender) {
    let path = &sender.paths()[0];
    let peer = path.peer().expect("a path that is connected");
    let last = path.qps().len() - 1;
    let numbers = [path.qps()[last].number(), peer.path.qps[last].number];
    for port in case.ports(0) {
        match case.failure {
            Failure::QueuePair => fail_queue_pair(port, numbers[port.rank]),
            Failure::Refusal => refuse(port, numbers[port.rank]),
            _ => fail_completion_queue(port, numbers[port.rank]),
        }
    }
}

/// A link that went down at `start` comes up, goes down, … and stays up.
fn flaps(case: &Case, start: Duration) -> Plan {
    let mut plan = Plan::new();
    for flap in 0..case.flaps {
        let up = start + case.down * (2 * flap + 1);
        for port in case.ports(0) {
            if flap > 0 {
                plan.push_back((up - case.down, port, false));
            }
            plan.push_back((up, port, true));
        }
    }
    plan.make_contiguous().sort_by_key(|(at, ..)| *at);
    plan
}
