//! Where the ranks of one unique id meet, with the table or with a way to who has it.

use std::{
    collections::HashSet,
    net::SocketAddr,
    time::{Duration, Instant},
};

use super::{
    super::{
        link::Link,
        sys,
        wire::{Answer, EVERYONE, GaveUp, Hello, Joining, MAX_RANKS, NAMED, Upward},
    },
    ANSWER_PATIENCE, Id, Role, Root, unreachable,
};

/// How long after the first rank the others hear for the first time who is missing: usually all have come by then.
const FIRST_NEWS: Duration = Duration::from_millis(50);
/// How often they hear of it at most.
const NEWS: Duration = Duration::from_millis(500);

/// A rank that waits for the others.
pub(super) struct Member {
    pub(super) address: SocketAddr,
    /// When it gives up, and with it the attempt of all.
    pub(super) deadline: Instant,
    /// How long it waits in all.
    pub(super) timeout_ms: u32,
    /// The connection that its answer goes to: its own, or its relay's.
    pub(super) by: Id,
    pub(super) relayed: bool,
}

/// Where the ranks of one id meet.
pub(super) enum Hall {
    /// With the table.
    Main {
        /// What the first said; the others must say the same.
        first: Joining,
        /// By rank.
        members: Vec<Option<Member>>,
        /// When the ranks may be told again who is missing, so that they know should the root's process be killed.
        news: Instant,
        /// Ranks have come since they were told.
        has_news: bool,
    },
    /// Without: everything goes to the root of another id.
    Relay { main: (u64, SocketAddr), by: Id },
}

impl Hall {
    /// When there is something to be told without anybody saying anything.
    pub(super) fn next_deadline(&self) -> Option<Instant> {
        let Self::Main {
            members,
            news,
            has_news,
            ..
        } = self
        else {
            return None;
        };
        let deadlines = members.iter().flatten().map(|member| member.deadline);
        deadlines.chain(has_news.then_some(*news)).min()
    }
}

/// An attempt that was given up.
pub(super) struct Failed {
    /// How many ranks it was for.
    ranks: u32,
    /// The missing ranks that have not come since: each is told once, and is then free to try again.
    late: HashSet<u32>,
    gave_up: GaveUp,
}

impl Root {
    /// A rank has come, by itself or by a relay.
    pub(super) fn join(&mut self, cookie: u64, joining: Joining, by: Id, relayed: bool) {
        let to = relayed.then_some(joining.rank);
        if let Some(gave_up) = self.too_late(cookie, &joining) {
            return self.answer(by, to, &Answer::Missing(gave_up));
        }
        match self.try_join(cookie, joining, by, relayed) {
            Ok(()) => {}
            Err(text) => self.answer(by, to, &Answer::Refused(text)),
        }
        if let Some(Hall::Main { members, .. }) = self.halls.get(&cookie)
            && members.iter().all(Option::is_some)
        {
            self.give_table(cookie);
        }
    }

    /// What a rank is told for whom the others have waited until they gave up, unless they wait again.
    fn too_late(&mut self, cookie: u64, joining: &Joining) -> Option<GaveUp> {
        if self.halls.contains_key(&cookie) {
            return None;
        }
        let failed = self.failed.get_mut(&cookie)?;
        (failed.ranks == joining.ranks && failed.late.remove(&joining.rank)).then(|| failed.gave_up.clone())
    }

    pub(super) fn try_join(
        &mut self,
        cookie: u64,
        joining: Joining,
        by: Id,
        relayed: bool,
    ) -> Result<(), String> {
        let Joining { rank, ranks, .. } = joining;
        if ranks == 0 || ranks > MAX_RANKS || rank >= ranks {
            return Err(format!("rank {rank} of {ranks} is not possible"));
        }
        if joining.main.0 != cookie {
            if relayed {
                return Err(format!("rank {rank} came by a root that is not its own"));
            }
            return self.relay(cookie, joining);
        }
        let hall = self.halls.entry(cookie).or_insert_with(|| Hall::Main {
            first: joining,
            members: Vec::new(),
            news: Instant::now() + FIRST_NEWS,
            has_news: false,
        });
        let Hall::Main {
            first,
            members,
            has_news,
            ..
        } = hall
        else {
            return Err(format!(
                "rank {rank} has the unique ids in another order than others"
            ));
        };
        if members.iter().all(Option::is_none) {
            *first = joining;
            members.clear();
            members.resize_with(ranks as usize, || None);
        }
        if first.ranks != ranks {
            return Err(format!(
                "rank {rank} says {ranks} ranks, the first that came said {}",
                first.ranks
            ));
        }
        if first.ids != joining.ids {
            return Err(format!(
                "rank {rank} was given other unique ids than rank {}",
                first.rank
            ));
        }
        if first.library != joining.library {
            return Err(format!(
                "rank {rank} uses library version {}, rank {} version {}",
                joining.library, first.rank, first.library
            ));
        }
        let place = &mut members[rank as usize];
        if place.is_some() {
            return Err(twice(rank));
        }
        *place = Some(Member {
            address: joining.address,
            deadline: Instant::now() + Duration::from_millis(joining.timeout_ms.into()),
            timeout_ms: joining.timeout_ms,
            by,
            relayed,
        });
        *has_news = true;
        Ok(())
    }

    /// Passes a rank on to the root that has the table.
    pub(super) fn relay(&mut self, cookie: u64, joining: Joining) -> Result<(), String> {
        let (main, address) = joining.main;
        // Its own connection counts already.
        if self.ranks_of(cookie, |other| other.rank == joining.rank).len() > 1 {
            return Err(twice(joining.rank));
        }
        let by = match self.halls.get(&cookie) {
            Some(Hall::Relay { main, by }) if *main == joining.main => *by,
            Some(_) => {
                return Err(format!(
                    "rank {} has the unique ids in another order than others",
                    joining.rank
                ));
            }
            None => {
                let link = Link::open(0, &address, &Hello::Relay.encode(main))
                    .map_err(|error| unreachable(&address, &error.to_string()))?;
                let by = self.enter(link, cookie, Role::Main(Vec::new()));
                self.halls.insert(
                    cookie,
                    Hall::Relay {
                        main: joining.main,
                        by,
                    },
                );
                by
            }
        };
        if let Some(connection) = self.connections.get(&by) {
            connection.link.push(&[&Upward::Joined(joining).encode()]);
            // A broken connection is found by reading.
            let _ = connection.link.flush();
        }
        Ok(())
    }

    /// Connections of ranks that wait under an id.
    pub(super) fn ranks_of(&self, cookie: u64, which: impl Fn(&Joining) -> bool) -> Vec<Id> {
        self.connections
            .iter()
            .filter(|(_, connection)| {
                connection.cookie == cookie
                    && matches!(&connection.role, Role::Rank(joining) if which(joining))
            })
            .map(|(id, _)| *id)
            .collect()
    }

    /// Tells everyone that a rank that had come is gone; they may try again, also in another number.
    pub(super) fn lost(&mut self, cookie: u64, is_gone: impl Fn(u32, &Member) -> bool) {
        let Some(Hall::Main { members, .. }) = self.halls.get_mut(&cookie) else {
            return;
        };
        let gone = |(rank, member): (u32, &Option<Member>)| {
            member
                .as_ref()
                .is_some_and(|member| is_gone(rank, member))
                .then_some(rank)
        };
        let Some(rank) = (0u32..).zip(members.iter()).find_map(gone) else {
            return;
        };
        let mut others = std::mem::take(members);
        for (other, place) in (0u32..).zip(&mut others) {
            place.take_if(|member| is_gone(other, member));
        }
        self.halls.remove(&cookie);
        self.registry.set_failed(cookie);
        self.tell(&others, &Answer::Lost(rank));
    }

    /// Ends attempts for which a rank has waited long enough. All its ranks hear who is missing: with one of them gone
    /// the others would wait in vain, and as soon as it has failed its process, which may be the root's, may end.
    pub(super) fn give_up(&mut self) {
        let now = Instant::now();
        let is_over = |hall: &Hall| match hall {
            Hall::Main { members, .. } => members.iter().flatten().any(|member| member.deadline <= now),
            Hall::Relay { .. } => false,
        };
        for (cookie, hall) in self.halls.extract_if(|_, hall| is_over(hall)).collect::<Vec<_>>() {
            let Hall::Main { members, .. } = hall else {
                continue;
            };
            let waiting = (0u32..)
                .zip(&members)
                .filter_map(|(rank, member)| Some((rank, member.as_ref()?)));
            let Some((waiter, member)) = waiting.min_by_key(|(_, member)| member.deadline) else {
                continue;
            };
            let gave_up = GaveUp {
                waiter,
                waited_ms: member.timeout_ms,
                missing: missing(&members).collect(),
            };
            self.tell(&members, &Answer::Missing(gave_up.clone()));
            self.registry.set_failed(cookie);
            let failed = Failed {
                ranks: members.len() as u32,
                late: gave_up.missing.iter().copied().collect(),
                gave_up,
            };
            self.failed.insert(cookie, failed);
        }
    }

    /// Tells ranks that have waited for a while who is missing.
    pub(super) fn tell_news(&mut self) {
        let now = Instant::now();
        let due: Vec<u64> = self
            .halls
            .iter()
            .filter(|(_, hall)| matches!(hall, Hall::Main { news, has_news: true, .. } if *news <= now))
            .map(|(cookie, _)| *cookie)
            .collect();
        for cookie in due {
            let Some(Hall::Main {
                members,
                news,
                has_news,
                ..
            }) = self.halls.get_mut(&cookie)
            else {
                continue;
            };
            (*news, *has_news) = (now + NEWS, false);
            let answer = Answer::Waiting {
                missing: missing(members).count() as u32,
                first: missing(members).take(NAMED).collect(),
            };
            // Nobody comes or goes meanwhile.
            let members = std::mem::take(members);
            self.tell(&members, &answer);
            if let Some(Hall::Main { members: place, .. }) = self.halls.get_mut(&cookie) {
                *place = members;
            }
        }
    }

    /// Gives all members the same answer, those that came by a relay with one message to it.
    fn tell(&mut self, members: &[Option<Member>], answer: &Answer) {
        let (relays, own): (Vec<&Member>, Vec<&Member>) =
            members.iter().flatten().partition(|member| member.relayed);
        let relays: HashSet<Id> = relays.iter().map(|member| member.by).collect();
        for member in own {
            self.answer(member.by, None, answer);
        }
        for by in relays {
            self.answer(by, Some(EVERYONE), answer);
        }
    }

    /// Everyone is there. The secret that they get keeps out who knows the id's, which for that of `NCCL_COMM_ID` is everybody.
    pub(super) fn give_table(&mut self, cookie: u64) {
        let Some(Hall::Main { members, .. }) = self.halls.remove(&cookie) else {
            return;
        };
        let answer = match sys::random_u64() {
            Ok(secret) => Answer::Table {
                secret,
                addresses: members.iter().flatten().map(|member| member.address).collect(),
            },
            Err(error) => Answer::Refused(format!("it has no random number for a secret: {error}")),
        };
        self.tell(&members, &answer);
        self.close(cookie);
    }

    /// An id has done its service.
    pub(super) fn close(&mut self, cookie: u64) {
        self.registry.remove(cookie);
        self.failed.remove(&cookie);
        self.leave_hall(cookie);
        for connection in self.connections.values_mut() {
            if connection.cookie == cookie && !matches!(connection.role, Role::Done(_)) {
                connection.role = Role::Done(Instant::now() + ANSWER_PATIENCE);
            }
        }
    }

    /// Nobody waits under an id any more; a relay says so by closing.
    pub(super) fn leave_hall(&mut self, cookie: u64) {
        if let Some(Hall::Relay { by, .. }) = self.halls.remove(&cookie) {
            self.connections.remove(&by);
        }
    }
}

/// The ranks that have not come.
fn missing(members: &[Option<Member>]) -> impl Iterator<Item = u32> {
    (0u32..)
        .zip(members)
        .filter(|(_, member)| member.is_none())
        .map(|(rank, _)| rank)
}

fn twice(rank: u32) -> String {
    format!("rank {rank} is there already: two processes use one rank")
}
