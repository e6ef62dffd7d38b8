//! Where the ranks of one unique id meet, with the table or with a way to who has it.

use std::{
    collections::HashSet,
    net::SocketAddr,
    time::{Duration, Instant},
};

use super::{
    super::{
        link::Link,
        wire::{Answer, EVERYONE, Hello, Joining, MAX_RANKS, Upward},
    },
    ANSWER_PATIENCE, Id, Role, Root, unreachable,
};

/// A rank that waits for the others.
pub(super) struct Member {
    pub(super) address: SocketAddr,
    /// When it wants to be told who is missing.
    pub(super) deadline: Instant,
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
    },
    /// Without: everything goes to the root of another id.
    Relay { main: (u64, SocketAddr), by: Id },
}

impl Root {
    /// A rank has come, by itself or by a relay.
    pub(super) fn join(&mut self, cookie: u64, joining: Joining, by: Id, relayed: bool) {
        let to = relayed.then_some(joining.rank);
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
        });
        let Hall::Main { first, members } = hall else {
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
            by,
            relayed,
        });
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
        let waiting = std::mem::take(members);
        self.halls.remove(&cookie);
        for (other, member) in (0u32..).zip(waiting).filter_map(|(rank, m)| m.map(|m| (rank, m))) {
            if !is_gone(other, &member) {
                let relayed = member.relayed.then_some(other);
                self.answer(member.by, relayed, &Answer::Lost(rank));
            }
        }
    }

    /// Tells ranks whose time is up who is missing.
    pub(super) fn tell_the_late(&mut self) {
        let now = Instant::now();
        let mut answers = Vec::new();
        self.halls.retain(|_, hall| {
            let Hall::Main { members, .. } = hall else {
                return true;
            };
            if members.iter().flatten().any(|member| member.deadline <= now) {
                let missing: Vec<u32> = (0u32..)
                    .zip(members.iter())
                    .filter(|(_, member)| member.is_none())
                    .map(|(rank, _)| rank)
                    .collect();
                for (rank, place) in (0u32..).zip(members.iter_mut()) {
                    if let Some(late) = place.take_if(|member| member.deadline <= now) {
                        answers.push((late.by, late.relayed.then_some(rank), missing.clone()));
                    }
                }
            }
            members.iter().any(Option::is_some)
        });
        for (by, relayed, missing) in answers {
            self.answer(by, relayed, &Answer::Missing(missing));
        }
    }

    /// Everyone is there.
    pub(super) fn give_table(&mut self, cookie: u64) {
        let Some(Hall::Main { members, .. }) = self.halls.get(&cookie) else {
            return;
        };
        let table = Answer::Table(members.iter().flatten().map(|member| member.address).collect());
        let (relays, own): (Vec<&Member>, Vec<&Member>) =
            members.iter().flatten().partition(|member| member.relayed);
        let own: Vec<Id> = own.iter().map(|member| member.by).collect();
        let relays: HashSet<Id> = relays.iter().map(|member| member.by).collect();
        for by in own {
            self.answer(by, None, &table);
        }
        for by in relays {
            self.answer(by, Some(EVERYONE), &table);
        }
        self.close(cookie);
    }

    /// An id has done its service.
    pub(super) fn close(&mut self, cookie: u64) {
        self.registry.open().cookies.remove(&cookie);
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

fn twice(rank: u32) -> String {
    format!("rank {rank} is there already: two processes use one rank")
}
