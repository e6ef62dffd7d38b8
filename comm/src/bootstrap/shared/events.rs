//! What happens on the service thread: frames, connections that begin and end, deaths.

use std::{sync::Arc, time::Instant};

use super::{
    super::{Error, frame::Frame, link::Link},
    Class, Gone, How, MAX_HELD, Shared, State,
};

/// Control messages that may wait for someone to take them, and their bytes; beyond it the oldest are dropped.
const MAX_WAITING: usize = 4096;
const MAX_WAITING_BYTES: usize = 64 << 20;

impl Shared {
    /// A connection that a peer opened.
    pub(in crate::bootstrap) fn adopt(&self, link: &Arc<Link>) {
        let mut state = self.state();
        // It can be reached.
        if !state.has_end(link.peer) {
            state.gone.remove(&link.peer);
        }
        state.outs.entry(link.peer).or_insert_with(|| Arc::clone(link));
        self.begin(&state, link);
        state.links.push(Arc::clone(link));
    }

    /// What is said first on every connection, whoever opened it.
    pub(super) fn begin(&self, state: &State, link: &Link) {
        if state.bears_silence {
            link.bear_silence();
        }
        for (rank, gone) in &state.gone {
            if gone.how == How::Died {
                link.push(&[&gone.frame(*rank).encode()]);
            }
        }
        #[cfg(test)]
        if state.is_killed {
            return;
        }
        if state.left {
            // It came too late to hear the goodbye; also where we open it to answer a rank, of whose watchdog we hear by way of others.
            let (aborted, elsewhere) = (self.abort.is_set(), false);
            link.push(&[&Frame::Goodbye { aborted, elsewhere }.encode()]);
        }
    }

    /// Notes a death, once: everyone is told, and the tree may need mending.
    pub(super) fn note_death(&self, state: &mut State, rank: u32, text: &str, from: Option<&Arc<Link>>) {
        if state.left
            || rank == self.rank
            || rank as usize >= self.table.len()
            || state.gone.get(&rank).is_some_and(|gone| gone.how == How::Died)
        {
            return;
        }
        let gone = Gone {
            told: true,
            ..Gone::new(How::Died, text.to_owned())
        };
        let frame = gone.frame(rank);
        state.gone.insert(rank, gone);
        state.losses.push_back((rank, text.to_owned()));
        state.heal = true;
        self.tell_all(state, &frame, from);
    }

    /// Gives callbacks what waits for them; on the service thread, which holds no lock meanwhile.
    pub(in crate::bootstrap) fn deliver(&self) {
        loop {
            let mut state = self.state();
            if let Some(callback) = state.on_control.clone()
                && let Some((from, data)) = state.next_control()
            {
                drop(state);
                callback(from, &data);
            } else if let Some(callback) = state.on_lost.clone()
                && let Some((rank, text)) = state.losses.pop_front()
            {
                drop(state);
                callback(rank, &text);
            } else {
                return;
            }
        }
    }

    /// After a death: connects to the ranks that are above and below us now. Both ways, since what was above or below
    /// the dead one may have died with it, and only who tries to connect finds that out.
    pub(in crate::bootstrap) fn heal(&self) {
        let mut state = self.state();
        while std::mem::take(&mut state.heal) && !state.left {
            let above = Self::parent(&state, self.rank);
            let below = (self.rank + 1..self.table.len() as u32)
                .filter(|rank| Self::parent(&state, *rank) == Some(self.rank));
            let neighbours: Vec<u32> = above.into_iter().chain(below).collect();
            for rank in neighbours {
                // A rank that has left keeps nobody together, and the communicator is at its end.
                if state.outs.contains_key(&rank) || state.has_end(rank) {
                    continue;
                }
                if let Err(Error::PeerLost { text, .. }) = self.link_of(&mut state, rank) {
                    self.note_death(&mut state, rank, &text, None);
                }
            }
        }
    }

    /// Takes a frame; an error text when the connection must end.
    pub(in crate::bootstrap) fn take(&self, link: &Arc<Link>, frame: Frame) -> Result<(), String> {
        let mut state = self.state();
        let peer = link.peer;
        match frame {
            Frame::Data { tag, data } => self.hold(&mut state, (peer, Class::Message, tag), data)?,
            Frame::Gather { tag, data } => self.hold(&mut state, (peer, Class::Gather, tag), data)?,
            Frame::Control { data } => state.control(peer, data),
            Frame::Spread { from, number, data } => {
                if from as usize >= self.table.len() {
                    return Err(format!("sent a message of rank {from}, which does not exist"));
                }
                if from != self.rank && state.seen.entry(from).or_default().note(number) {
                    let frame = Frame::Spread {
                        from,
                        number,
                        data: data.clone(),
                    };
                    self.tell_all(&state, &frame, Some(link));
                    state.control(from, data);
                }
            }
            Frame::Gone { rank, died, text } => {
                if died {
                    self.note_death(&mut state, rank, &text, Some(link));
                } else if (rank as usize) < self.table.len() && rank != self.rank {
                    let gone = state.note_left(rank, text);
                    if !std::mem::replace(&mut gone.told, true) {
                        let frame = gone.frame(rank);
                        self.tell_all(&state, &frame, Some(link));
                    }
                }
            }
            Frame::Goodbye { elsewhere: true, .. } => {
                state.leaving.insert(peer);
            }
            Frame::Goodbye { aborted, .. } => {
                let how = if aborted { "aborted" } else { "has left" };
                let text = format!("rank {peer} {how}: it destroyed its communicator or failed to make it");
                state.note_left(peer, text).direct = true;
            }
            Frame::Refused { text } => return Err(format!("refused the connection: {text}")),
        }
        drop(state);
        self.arrived.notify_all();
        Ok(())
    }

    /// Keeps a message of a peer; an error text if too many of it wait.
    fn hold(
        &self,
        state: &mut State,
        (peer, class, tag): (u32, Class, u64),
        data: Vec<u8>,
    ) -> Result<(), String> {
        if state.hold(peer, class, tag, data) {
            return Ok(());
        }
        Err(format!(
            "sent more than {MAX_HELD} bytes that rank {} has not asked for",
            self.rank
        ))
    }

    /// A connection is at its end.
    pub(in crate::bootstrap) fn ended(&self, link: &Arc<Link>, why: &str) {
        let mut state = self.state();
        let peer = link.peer;
        state.links.retain(|other| !Arc::ptr_eq(other, link));
        if state.outs.get(&peer).is_some_and(|out| Arc::ptr_eq(out, link)) {
            state.outs.remove(&peer);
        }
        let other = state.links.iter().find(|other| other.peer == peer).cloned();
        if let Some(other) = other {
            state.outs.entry(peer).or_insert(other);
        } else if !state.has_end(peer) && !state.leaving.contains(&peer) {
            let text = format!("rank {peer} {why} (seen by rank {})", self.rank);
            if link.was_made() || state.gone.values().any(|gone| gone.how == How::Died) {
                self.note_death(&mut state, peer, &text, None);
            } else {
                // It may have left long ago, and those it was connected to know.
                state.cannot_reach(peer, text);
            }
        }
        drop(state);
        self.arrived.notify_all();
    }

    /// Last frames go out; the connections end.
    pub(in crate::bootstrap) fn close(&self) {
        let state = self.state();
        for link in &state.links {
            let _ = link.flush();
            link.shut_down();
        }
    }
}

impl State {
    /// Whether it is known how a rank ended.
    pub(in crate::bootstrap) fn has_end(&self, rank: u32) -> bool {
        let gone = self.gone.get(&rank);
        gone.is_some_and(|gone| gone.how != How::Unreachable)
    }

    /// A rank cannot be reached; why, others may know.
    pub(in crate::bootstrap) fn cannot_reach(&mut self, rank: u32, text: String) {
        let gone = self.gone.entry(rank);
        gone.or_insert_with(|| Gone::new(How::Unreachable, text));
    }

    /// A rank has left, as it or somebody else says, unless more is known.
    fn note_left(&mut self, rank: u32, text: String) -> &mut Gone {
        let gone = self.gone.entry(rank);
        let gone = gone.or_insert_with(|| Gone::new(How::Unreachable, String::new()));
        if gone.how == How::Unreachable {
            (gone.how, gone.since, gone.text) = (How::Left, Instant::now(), text);
        }
        gone
    }

    /// Keeps a control message until somebody takes it.
    pub(super) fn control(&mut self, from: u32, data: Vec<u8>) {
        self.control_bytes += data.len();
        self.controls.push_back((from, data));
        while self.controls.len() > MAX_WAITING || self.control_bytes > MAX_WAITING_BYTES {
            self.next_control();
        }
    }

    /// Takes the oldest control message.
    pub(super) fn next_control(&mut self) -> Option<(u32, Vec<u8>)> {
        let (from, data) = self.controls.pop_front()?;
        self.control_bytes -= data.len();
        Some((from, data))
    }
}
