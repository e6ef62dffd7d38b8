//! The thread that finds out what went wrong and says so, once.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::mpsc::{Receiver, RecvTimeoutError},
    time::{Duration, Instant},
};

use super::{
    Checks,
    calls::Entry,
    message::{Answer, Message},
    verdict::{self, Finding},
};
use crate::{
    communicator::lock,
    error::Error,
    op::{Call, Identity},
};

/// How long the rank that asks waits for the others' answers. They come from threads that nothing blocks; but a process may be
/// stopped.
const ANSWERS: Duration = Duration::from_secs(1);
/// How long the others wait for what it found out.
const VERDICT: Duration = Duration::from_secs(2);
/// How long a broken connection may turn out to be a death or the end of a rank that had its reason.
const REASON: Duration = Duration::from_millis(500);

/// What the reporter hears.
#[derive(Clone, Debug)]
pub(super) enum Event {
    /// An operation of ours met one with another tag.
    Differs { mine: Option<Entry>, theirs: u32 },
    /// From another rank.
    Message { from: u32, message: Message },
    /// A rank is gone.
    Lost { rank: u32, text: String },
    /// A connection is broken.
    Network { text: String },
}

/// Where a difference was noticed: by whom, at which operation, and the tag that was not expected.
type Seen = (u32, (Identity, Call), u32);

pub(super) struct Reporter<'a> {
    checks: &'a Checks,
    /// On the rank that asks.
    seen: Option<Seen>,
    answers: BTreeMap<u32, Answer>,
    lost: BTreeSet<u32>,
    /// What to fail with, and when, if nothing better is heard.
    otherwise: Option<(Instant, Error)>,
    /// The ranks differ, and are finding out about it.
    differs: bool,
    /// The ranks that are wrong, once that is known.
    odd: Vec<u32>,
}

impl<'a> Reporter<'a> {
    pub(super) fn new(checks: &'a Checks) -> Self {
        Self {
            checks,
            seen: None,
            answers: BTreeMap::new(),
            lost: BTreeSet::new(),
            otherwise: None,
            differs: false,
            odd: Vec::new(),
        }
    }

    /// Returns when the communicator has failed, or has ended (the sender of `queue` is gone).
    pub(super) fn run(&mut self, first: Event, queue: &Receiver<Event>) {
        let mut event = first;
        loop {
            if let Some(error) = self.hear(event) {
                return self.fail(error);
            }
            let left = self
                .otherwise
                .as_ref()
                .map(|(when, _)| when.saturating_duration_since(Instant::now()));
            // Nothing to wait for only if there is nothing to report yet.
            let next = match left {
                Some(left) => queue.recv_timeout(left),
                None => queue.recv().map_err(|_| RecvTimeoutError::Disconnected),
            };
            event = match (next, self.otherwise.take()) {
                (Ok(event), otherwise) => {
                    self.otherwise = otherwise;
                    event
                }
                (Err(RecvTimeoutError::Timeout), Some((_, error))) => {
                    let error = self.verdict().unwrap_or(error);
                    return self.fail(error);
                }
                (Err(_), _) => return,
            };
        }
    }

    fn fail(&self, error: Error) {
        // First: what is in progress ends with the communicator's failure.
        let tell = self.checks.differ.get().filter(|_| !self.odd.is_empty());
        let told = tell.map(|tell| tell(&error.text, &self.odd));
        (self.checks.fail)(error);
        if let Some(after) = told {
            after();
        }
    }

    /// What to fail with now, if that is known.
    fn hear(&mut self, event: Event) -> Option<Error> {
        let alone = event.alone();
        match event {
            Event::Differs { mine, theirs } => {
                self.wait(VERDICT, alone);
                // Without it nobody can look for the operation.
                let mine = mine?.into();
                let message = Message::Differs { mine, theirs }.encode();
                let own = self.checks.rank;
                let first = (0..own).find(|rank| (self.checks.post)(Some(*rank), &message));
                if first.is_some() {
                    None
                } else {
                    self.ask((own, mine, theirs))
                }
            }
            Event::Message { from, message } => self.read(from, message),
            Event::Lost { rank, .. } => {
                self.lost.insert(rank);
                if self.differs {
                    self.complete()
                } else {
                    Some(alone)
                }
            }
            Event::Network { .. } => {
                if self.otherwise.is_none() {
                    self.otherwise = Some((Instant::now() + REASON, alone));
                }
                None
            }
        }
    }

    fn read(&mut self, from: u32, message: Message) -> Option<Error> {
        let checks = self.checks;
        if from >= checks.ranks {
            return None;
        }
        match message {
            Message::Differs { mine, theirs } => self.ask((from, mine, theirs)),
            Message::Ask { identity, theirs } => {
                self.wait(VERDICT, Error::usage("the ranks do not call the same operations"));
                let answer = Message::Called(self.answer(identity, theirs));
                (checks.post)(Some(from), &answer.encode());
                None
            }
            Message::Called(answer) => {
                self.answers.insert(from, answer);
                self.complete()
            }
            Message::Verdict(Finding { text, mut odd }) => {
                odd.retain(|rank| *rank < checks.ranks);
                self.odd = odd;
                Some(Error::usage(text))
            }
        }
    }

    /// Asks all what they called, unless that is being done.
    fn ask(&mut self, seen: Seen) -> Option<Error> {
        if self.seen.is_some() {
            return None;
        }
        let (_, (identity, _), theirs) = seen;
        self.seen = Some(seen);
        self.wait(ANSWERS, Error::usage("the ranks do not call the same operations"));
        (self.checks.post)(None, &Message::Ask { identity, theirs }.encode());
        self.answers
            .insert(self.checks.rank, self.answer(identity, theirs));
        self.complete()
    }

    /// The ranks differ: fails with `error` after `time`, whatever else was to be waited for. A connection that broke
    /// before was broken by a rank that heard of it earlier.
    fn wait(&mut self, time: Duration, error: Error) {
        if !std::mem::replace(&mut self.differs, true) || self.seen.is_some() {
            self.otherwise = Some((Instant::now() + time, error));
        }
    }

    fn answer(&self, identity: Identity, theirs: u32) -> Answer {
        let calls = lock(&self.checks.calls);
        Answer {
            calls: calls.around(identity),
            tagged: calls.tagged(theirs).map(Into::into),
        }
    }

    /// On the rank that asks: the verdict, if everyone has answered.
    fn complete(&mut self) -> Option<Error> {
        let missing = (0..self.checks.ranks)
            .any(|rank| !self.answers.contains_key(&rank) && !self.lost.contains(&rank));
        if missing { None } else { self.verdict() }
    }

    /// On the rank that asks: tells all and returns it.
    fn verdict(&mut self) -> Option<Error> {
        let finding = verdict::find(self.seen?, &self.answers, self.checks.ranks);
        (self.checks.post)(None, &Message::Verdict(finding.clone()).encode());
        self.odd = finding.odd;
        Some(Error::usage(finding.text))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Mutex, OnceLock, Weak, mpsc};

    use ringsight_kernels::fifo::SLOTS;
    use ringsight_records::{DataType, Flags, Function, ReduceOp};

    use super::*;
    use crate::{error::ResultCode, op::OpInfo};

    /// Ranks that talk by function calls; `deaf` ones hear nothing.
    struct World {
        ranks: Vec<Arc<Checks>>,
        failed: Vec<Receiver<Error>>,
        /// Ranks that were told to be wrong, with the text.
        wrong: Vec<Receiver<(String, Vec<u32>)>>,
    }

    fn world(count: u32, deaf: &[u32]) -> World {
        let all: Arc<OnceLock<Vec<Weak<Checks>>>> = Arc::default();
        let (mut ranks, mut failed, mut wrong) = (Vec::new(), Vec::new(), Vec::new());
        for rank in 0..count {
            let (tell, told) = mpsc::channel();
            let tell = Mutex::new(tell);
            let (all, deaf) = (Arc::clone(&all), deaf.to_vec());
            let post = move |to: Option<u32>, bytes: &[u8]| {
                for peer in (0..count).filter(|peer| to.map_or(*peer != rank, |to| to == *peer)) {
                    if let Some(checks) = all.get().and_then(|all| all[peer as usize].upgrade())
                        && !deaf.contains(&peer)
                    {
                        checks.control(rank, bytes);
                    }
                }
                true
            };
            let fail = move |error| lock(&tell).send(error).unwrap();
            let checks = Checks::new(rank, count, Box::new(post), Box::new(fail));
            let (tell, heard) = mpsc::channel();
            let tell = Mutex::new(tell);
            checks.on_difference(Box::new(move |text, odd| {
                lock(&tell).send((text.to_owned(), odd.to_vec())).unwrap();
                Box::new(|| ())
            }));
            ranks.push(checks);
            failed.push(told);
            wrong.push(heard);
        }
        let _ = all.set(ranks.iter().map(Arc::downgrade).collect());
        World { ranks, failed, wrong }
    }

    const PATIENCE: Duration = Duration::from_secs(20);

    impl World {
        fn note(&self, rank: usize, op: u32, seq: u64, count: usize) -> Call {
            let call = Call {
                function: Function::AllReduce,
                count,
                data_type: DataType::Float32,
                reduce_op: ReduceOp::Sum,
                peer: None,
                place: None,
            };
            let info = OpInfo {
                op,
                comm: 1,
                seq,
                bytes: 0,
                rank: rank as u32,
                peer: -1,
                flags: Flags(0),
            };
            self.ranks[rank].note(0, &[Entry::new(&info, call)]);
            call
        }

        fn error(&self, rank: usize) -> Error {
            self.failed[rank].recv_timeout(PATIENCE).unwrap()
        }
    }

    /// A rank that had told what was found gave up before this one had failed by it, and was then called late here.
    #[test]
    fn what_another_has_found_is_known_before_this_one_fails_by_it() {
        let (go_on, held) = mpsc::channel::<()>();
        let (tell, told) = mpsc::channel();
        let (held, tell) = (Mutex::new(held), Mutex::new(tell));
        let fail = move |error: Error| {
            lock(&held).recv_timeout(PATIENCE).unwrap();
            lock(&tell).send(error).unwrap();
        };
        let checks = Checks::new(1, 2, Box::new(|_, _| true), Box::new(fail));
        let finding = Finding {
            text: "rank 0 waits for rank 1, rank 1 for rank 0".to_owned(),
            odd: vec![0, 1],
        };
        assert!(!checks.have_found());
        checks.control(0, &Message::Verdict(finding.clone()).encode());
        assert!(checks.have_found());
        go_on.send(()).unwrap();
        let error: Error = told.recv_timeout(PATIENCE).unwrap();
        assert_eq!((error.code, error.text), (ResultCode::InvalidUsage, finding.text));
        checks.stop();
    }

    #[test]
    fn every_rank_hears_the_same_whoever_notices() {
        for by in 0..4 {
            let world = world(4, &[]);
            for rank in 0..4 {
                for seq in 0..SLOTS {
                    let odd = rank == 2 && seq >= 5;
                    world.note(rank, 100 + seq as u32, seq as u64, if odd { 9 } else { 3 });
                }
            }
            // Noticed at a later operation than the first that differs.
            world.ranks[by].mismatch(106, 7);
            let errors: Vec<Error> = (0..4).map(|rank| world.error(rank)).collect();
            assert_eq!(errors[0].code, ResultCode::InvalidUsage);
            assert_eq!(
                errors[0].text,
                "ranks 0-1, 3 called AllReduce(count 3, float32, sum) while rank 2 called AllReduce(count 9, float32, \
                 sum): collective #5"
            );
            assert!(errors.iter().all(|error| *error == errors[0]), "{errors:?}");
            // Who is wrong has been told before.
            for wrong in &world.wrong {
                assert_eq!(wrong.try_recv().unwrap(), (errors[0].text.clone(), vec![2]));
            }
            // Once and for all.
            world.ranks[by].mismatch(107, 7);
            world.ranks.iter().for_each(|checks| checks.stop());
            assert!(world.failed.iter().all(|failed| failed.try_recv().is_err()));
            assert!(world.wrong.iter().all(|wrong| wrong.try_recv().is_err()));
        }
    }

    #[test]
    fn a_rank_that_does_not_answer_is_not_waited_for() {
        let world = world(3, &[1]);
        let call = world.note(0, 1, 0, 3);
        world.note(2, 1, 0, 4);
        world.ranks[2].mismatch(1, call.tag());
        for rank in [0, 2] {
            let text = world.error(rank).text;
            assert!(
                text.ends_with("collective #0 (rank 1 did not yet call it)"),
                "{text}"
            );
        }
        // And if nothing is heard of rank 0, each rank fails by itself.
        let world = self::world(2, &[0]);
        world.note(1, 1, 0, 4);
        world.ranks[1].mismatch(1, 5);
        let text = world.error(1).text;
        assert!(
            text.contains("AllReduce(count 4, float32, sum) of this rank met"),
            "{text}"
        );
    }

    #[test]
    fn a_broken_connection_is_the_last_thing_to_blame() {
        let world = world(2, &[]);
        world.ranks[0].network("rank 0 to rank 1 broke".into());
        world.ranks[0].lost(1, "killed");
        assert_eq!(world.error(0).text, "rank 1 is gone: killed");
        assert!(world.wrong[0].try_recv().is_err(), "nobody is wrong");
        world.ranks[1].network("rank 1 to rank 0 broke".into());
        assert_eq!(world.error(1).text, "rank 1 to rank 0 broke");
        assert_eq!(world.ranks[1].ranks, 2);

        let world = self::world(2, &[]);
        let call = world.note(0, 1, 0, 3);
        world.note(1, 1, 0, 4);
        world.ranks[1].network("rank 1 to rank 0 broke".into());
        world.ranks[1].mismatch(1, call.tag());
        assert!(world.error(1).text.ends_with("collective #0"));
        assert!(world.error(0).text.ends_with("collective #0"));
    }

    #[test]
    fn nothing_is_reported_after_the_end() {
        let world = world(2, &[0, 1]);
        world.ranks[0].mismatch(1, 2);
        world.ranks[0].stop();
        world.ranks[0].mismatch(1, 2);
        world.ranks[0].lost(1, "killed");
        assert!(world.failed[0].try_recv().is_err());
        assert!(lock(&world.ranks[0].thread).handle.is_none());
    }
}
