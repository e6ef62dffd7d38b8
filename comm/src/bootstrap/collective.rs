//! What ranks do together over the bootstrap: gather, and make a bootstrap of some of them.

use std::{
    net::SocketAddr,
    sync::{Arc, PoisonError},
    time::Duration,
};

use ringsight_kernels::AbortWord;

use super::{
    Bootstrap, Error, Result, fnv1a,
    frame::{Frame, MAX_MESSAGE, join_parts, split_parts},
    id::{decode_address, encode_address, on_link_of},
    listen_at,
    shared::{Class, Wait},
    sys, system,
    wire::printable,
};

/// Tags with this bit are hashes of who gathers; the others count the calls of all ranks.
const AMONG: u64 = 1 << 63;

impl Bootstrap {
    /// Gives every rank everyone's bytes, in rank order. Lengths may differ. Every rank calls it, in the same order.
    ///
    /// # Errors
    /// As [`Bootstrap::recv`]; [`Error::InvalidArgument`] when it is more than 64 MiB together.
    pub fn all_gather(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        let mut calls = self.collectives.lock().unwrap_or_else(PoisonError::into_inner);
        *calls += 1;
        let members: Vec<u32> = (0..self.ranks()).collect();
        self.gather(&members, *calls & !AMONG, mine, self.shared.wait())
    }

    /// Returns when every rank has called it.
    ///
    /// # Errors
    /// As [`Bootstrap::recv`].
    pub fn barrier(&self) -> Result<()> {
        self.all_gather(&[]).map(drop)
    }

    /// Gives each of `members` everyone's bytes, in the order of `members`. Each member calls it, with the same list and
    /// tag; ranks that are no members take no part, and may be dead. Calls with the same members and tag are matched in
    /// order, so a tag of which a call failed should not be used again.
    ///
    /// # Errors
    /// [`Error::PeerLost`] when a member is gone, [`Error::TimedOut`], [`Error::Aborted`]; [`Error::InvalidArgument`] when
    /// this rank is no member, or a member is twice there or no rank.
    pub fn gather_among(&self, members: &[u32], tag: u32, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.gather_among_with(members, tag, mine, &self.shared.abort)
    }

    /// As [`Bootstrap::gather_among`], with another abort word than the bootstrap's, which may be set.
    ///
    /// # Errors
    /// As [`Bootstrap::gather_among`].
    pub fn gather_among_with(
        &self,
        members: &[u32],
        tag: u32,
        mine: &[u8],
        abort: &AbortWord,
    ) -> Result<Vec<Vec<u8>>> {
        self.check_members(members)?;
        let wait = Wait {
            abort,
            needs: Some(members),
            ..self.shared.wait()
        };
        self.gather(members, among(b"gather", members, tag.into()), mine, wait)
    }

    /// A bootstrap of `members` (ranks of this one, in the order of the child's ranks), made over this one: other ranks
    /// may be dead, and this one's abort word set. `salt` is the same on all members and another one for each child.
    /// The child's waits end by `abort` and after `timeout`.
    ///
    /// # Errors
    /// As [`Bootstrap::gather_among`] (ranks in texts are this bootstrap's), and [`Error::System`].
    pub fn child(
        &self,
        members: &[u32],
        salt: u64,
        abort: Arc<AbortWord>,
        timeout: Duration,
    ) -> Result<Self> {
        let rank = self.check_members(members)?;
        let listener = listen_at(self.local)?;
        let address = listener.local_addr().map_err(system("asking for the port"))?;
        let part = sys::random_u64().map_err(system("drawing a random secret"))?;
        let mine = [&encode_address(&address)[..], &part.to_le_bytes()].concat();
        let wait = Wait {
            abort: &abort,
            timeout,
            grace: Duration::ZERO,
            needs: Some(members),
        };
        let parts = self.gather(members, among(b"child", members, salt), &mine, wait)?;
        let table: Option<Vec<SocketAddr>> = parts
            .iter()
            .map(|part| {
                let (address, secret) = part.split_first_chunk::<24>()?;
                let address = decode_address(address).filter(|_| secret.len() == 8)?;
                Some(on_link_of(&self.local, address))
            })
            .collect();
        let table = table.ok_or_else(|| Error::Protocol("a rank gives no address for the child".into()))?;
        let secret = [&self.cookie().to_le_bytes()[..], &parts.concat()].concat();
        Self::open(
            (rank, fnv1a(&secret), table),
            listener,
            self.local,
            abort,
            timeout,
        )
    }

    /// Our place in `members`, if they are possible.
    fn check_members(&self, members: &[u32]) -> Result<u32> {
        let mut sorted = members.to_vec();
        sorted.sort_unstable();
        sorted.dedup();
        let place = members.iter().position(|member| *member == self.rank());
        match place {
            Some(place)
                if sorted.len() == members.len()
                    && sorted.last().is_some_and(|last| *last < self.ranks()) =>
            {
                Ok(place as u32)
            }
            _ => Err(Error::InvalidArgument(format!(
                "members {members:?}: must be distinct ranks below {}, this rank ({}) among them",
                self.ranks(),
                self.rank()
            ))),
        }
    }

    /// Up a binary tree over the places in `members` and down again: 2 (n - 1) messages, and no more connections than
    /// the tree has edges.
    ///
    /// A rank that waits in vain is not always below or above the one that is missing, so whoever runs out of time says
    /// for whom he waited, and those who wait for him wait a little longer: every rank names the one that did not come.
    fn gather(&self, members: &[u32], tag: u64, mine: &[u8], wait: Wait<'_>) -> Result<Vec<Vec<u8>>> {
        let Some(me) = members.iter().position(|member| *member == self.rank()) else {
            return Err(Error::InvalidArgument(format!(
                "rank {} is no member",
                self.rank()
            )));
        };
        let gather = Gather {
            bootstrap: self,
            members,
            tag,
            wait,
            me,
        };
        let result = gather.run(mine);
        if let Err(Error::TimedOut(text) | Error::Protocol(text)) = &result {
            gather.say_failed(text);
        }
        result
    }
}

/// What a message of a gather begins with: parts follow, or a text that says why there are none.
const PARTS: u8 = 0;
const FAILED: u8 = 1;
/// How much longer each step of the way from who ran out of time may take.
const STEP_GRACE: Duration = Duration::from_millis(100);

/// One gather.
struct Gather<'a> {
    bootstrap: &'a Bootstrap,
    members: &'a [u32],
    tag: u64,
    wait: Wait<'a>,
    /// Our place.
    me: usize,
}

impl Gather<'_> {
    fn parent(&self) -> Option<usize> {
        (self.me > 0).then(|| (self.me - 1) / 2)
    }

    fn children(&self) -> impl Iterator<Item = usize> {
        let end = self.members.len();
        [2 * self.me + 1, 2 * self.me + 2]
            .into_iter()
            .filter(move |child| *child < end)
    }

    fn frame(&self) -> Frame {
        Frame::Gather {
            tag: self.tag,
            data: Vec::new(),
        }
    }

    fn send(&self, place: usize, data: &[u8]) -> Result<()> {
        if data.len() > MAX_MESSAGE {
            let text = format!("{} bytes to gather (limit {MAX_MESSAGE})", data.len());
            return Err(Error::InvalidArgument(text));
        }
        self.bootstrap
            .shared
            .send(self.members[place], &self.frame(), data, self.wait)
    }

    /// The message from a place, whose own wait was `steps` messages earlier.
    fn recv(&self, place: usize, steps: u32) -> Result<Vec<u8>> {
        let wait = Wait {
            grace: STEP_GRACE * steps,
            ..self.wait
        };
        let shared = &self.bootstrap.shared;
        let mut message = shared.recv(self.members[place], Class::Gather, self.tag, wait)?;
        match message.first() {
            Some(&PARTS) => {
                message.remove(0);
                Ok(message)
            }
            Some(&FAILED) => Err(Error::TimedOut(printable(&message[1..]))),
            _ => Err(Error::Protocol(format!(
                "rank {} sent something else than its part",
                self.members[place]
            ))),
        }
    }

    /// Tells those who wait for us, if they still can be told without waiting.
    fn say_failed(&self, text: &str) {
        let data = [&[FAILED], text.as_bytes()].concat();
        let others = self.parent().into_iter().chain(self.children());
        for place in others {
            self.bootstrap
                .shared
                .post(self.members[place], &self.frame(), &data);
        }
    }

    fn run(&self, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        // Steps to the deepest leaf of the whole tree, and to the deepest below us.
        let (height, depth) = (self.members.len().ilog2(), (self.me + 1).ilog2());
        let mut message = vec![PARTS];
        message.extend(join_parts([(self.me as u32, mine)]));
        for child in self.children() {
            message.extend(self.recv(child, height - depth)?);
        }
        if let Some(parent) = self.parent() {
            self.send(parent, &message)?;
            message = vec![PARTS];
            message.extend(self.recv(parent, height + depth)?);
        }
        let parts = in_order(&message[1..], self.members.len()).ok_or_else(|| {
            Error::Protocol(format!(
                "the {} ranks that gather have not sent one part each",
                self.members.len()
            ))
        })?;
        for child in self.children() {
            self.send(child, &message)?;
        }
        Ok(parts)
    }
}

fn among(what: &[u8], members: &[u32], tag: u64) -> u64 {
    let members = members.iter().flat_map(|member| member.to_le_bytes());
    let bytes: Vec<u8> = what
        .iter()
        .copied()
        .chain(tag.to_le_bytes())
        .chain(members)
        .collect();
    fnv1a(&bytes) | AMONG
}

/// The parts of a message by number, if it holds exactly those below `count`.
fn in_order(message: &[u8], count: usize) -> Option<Vec<Vec<u8>>> {
    let mut parts: Vec<Option<&[u8]>> = vec![None; count];
    for (number, part) in split_parts(message)? {
        if parts.get_mut(number as usize)?.replace(part).is_some() {
            return None;
        }
    }
    parts.into_iter().map(|part| part.map(<[u8]>::to_vec)).collect()
}
