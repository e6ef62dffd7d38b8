//! A path in use: what is posted to it, and what ends.

use std::os::fd::{AsRawFd, RawFd};

use ringsight_failover::MESSAGE_BYTES;

use super::{
    Control, Failure,
    control::{self, credit_at},
    path::{MESSAGES, Path, Peer, post_receive},
    work::{Ended, Work},
};
use crate::{
    completion::{BATCH, Completion, Status},
    queue::{Source, Write},
};

impl Path {
    /// Sends a message, if not too many are under way.
    pub(super) fn post_message(&mut self, message: &[u8; MESSAGE_BYTES]) -> Result<(), Failure> {
        if self.messages < MESSAGES {
            self.qps[0]
                .send(Work::Message.id(), message)
                .map_err(|error| self.failure(None, &error.to_string()))?;
            self.messages += 1;
            self.counts.others += 1;
        }
        Ok(())
    }

    /// Posts a write of nothing to each queue pair: they end well only if the path works. Networks may carry each queue pair's packets
    /// another way.
    pub(super) fn post_probe(&mut self) -> Result<(), Failure> {
        for qp in 0..self.qps.len() {
            let peer = self.connected()?;
            let probe = Write {
                id: Work::Probe { qp }.id(),
                source: Source::Inline(&[]),
                address: peer.control,
                key: peer.path.control_key,
                immediate: None,
                signaled: true,
            };
            self.post(qp, &[probe])?;
            self.probes += 1;
            self.counts.others += 1;
        }
        Ok(())
    }

    /// The peer; a path that is used is connected.
    fn connected(&self) -> Result<&Peer, Failure> {
        self.peer
            .as_ref()
            .ok_or_else(|| self.failure(None, "it is not connected"))
    }

    fn post(&self, qp: usize, writes: &[Write<'_>]) -> Result<(), Failure> {
        self.qps[qp]
            .post(writes)
            .map_err(|error| self.failure(None, &error.to_string()))
    }

    /// Posts a step, or its part for one queue pair: `data` of the slots (the same place at the peer), then what tells of it.
    pub(super) fn post_step(
        &mut self,
        qp: usize,
        position: u64,
        notice: &[u8],
        data: std::ops::Range<usize>,
    ) -> Result<(), Failure> {
        let peer = self.connected()?;
        let tell = Write {
            id: Work::Step { qp, position }.id(),
            source: Source::Inline(notice),
            address: peer.control + control::notice_at(position) as u64,
            key: peer.path.control_key,
            immediate: Some(position as u32),
            signaled: true,
        };
        if data.is_empty() {
            self.post(qp, &[tell])?;
            self.counts.steps += 1;
            return Ok(());
        }
        let bytes = Write {
            id: Work::Data { qp, position }.id(),
            address: peer.slots + data.start as u64,
            source: Source::Registered(&self.slots, data),
            key: peer.path.slots_key,
            immediate: None,
            // The completion of what follows on the same queue pair is that of both.
            signaled: false,
        };
        self.post(qp, &[bytes, tell])?;
        self.counts.steps += 2;
        Ok(())
    }

    /// Posts a credit: into this path's own word at the peer.
    pub(super) fn post_credit(&mut self, granted: u64) -> Result<(), Failure> {
        let peer = self.connected()?;
        let word = granted.to_le_bytes();
        let credit = Write {
            id: Work::Credit { granted }.id(),
            source: Source::Inline(&word),
            address: peer.control + credit_at(self.index) as u64,
            key: peer.path.control_key,
            // Wakes a sender that sleeps; what it says is in the word.
            immediate: Some(granted as u32),
            signaled: true,
        };
        self.post(0, &[credit])?;
        self.counts.credits += 1;
        Ok(())
    }

    /// Takes what has ended, and gives each end to `sink`; whether there was any. Receive requests are posted again.
    ///
    /// # Errors
    /// When the queue itself fails, or the sink does.
    pub(super) fn poll(
        &mut self,
        control: &Control,
        mut sink: impl FnMut(Ended) -> Result<(), Failure>,
    ) -> Result<bool, Failure> {
        let mut room = [Completion::EMPTY; BATCH];
        let mut any = false;
        loop {
            let ended = self
                .cq
                .poll(&mut room)
                .map_err(|error| self.failure(None, &error.to_string()))?;
            self.counts.completions += ended.len() as u64;
            for completion in ended {
                any = true;
                // Of queue pairs that are gone nothing is told.
                if !self.qps.iter().any(|qp| qp.number() == completion.qp) {
                    continue;
                }
                let work = Work::of(completion.id);
                if work == Some(Work::Message) {
                    self.messages = self.messages.saturating_sub(1);
                }
                if let (Some(Work::Marker { .. }), Some(drain)) = (work, &mut self.draining) {
                    drain.ended += 1;
                    continue;
                }
                // The status before anything else: the rest means nothing without.
                if let Status::Failed { code, .. } = completion.status {
                    let qp = completion.qp;
                    sink(Ended::Failed { work, code, qp })?;
                    continue;
                }
                match work {
                    Some(Work::Step { position, .. }) => sink(Ended::Sent { position })?,
                    Some(Work::Credit { granted }) => sink(Ended::Credited { granted })?,
                    Some(Work::Probe { .. }) => {
                        self.probes = self.probes.saturating_sub(1);
                        if self.probes == 0 {
                            sink(Ended::Probed)?;
                        }
                    }
                    Some(Work::Receive { qp, index }) => {
                        let message = completion
                            .received
                            .filter(|bytes| *bytes == MESSAGE_BYTES)
                            .map(|_| control.message(self.index, index));
                        // A queue pair that is being drained takes no more.
                        if self.draining.is_none() {
                            self.receive(qp, index)?;
                        }
                        if let Some(message) = message {
                            sink(Ended::Message(message))?;
                        }
                        if let Some(immediate) = completion.immediate {
                            sink(Ended::Arrived { qp, immediate })?;
                        }
                    }
                    // Told only with an error.
                    Some(Work::Data { .. } | Work::Message | Work::Marker { .. }) | None => {}
                }
            }
            if ended.len() < BATCH {
                return Ok(any);
            }
        }
    }

    /// Posts a receive request.
    fn receive(&self, qp: usize, index: usize) -> Result<(), Failure> {
        let posted = post_receive(self.index, &self.qps[qp], (qp, index), &self.control);
        posted.map_err(|error| self.failure(None, &error.to_string()))
    }

    /// In libibverbs' words, for messages.
    pub(super) fn status_text(&self, work: Option<Work>, code: u32, qp: u32) -> String {
        let what = work.map_or_else(|| "a request".to_owned(), |work| format!("{work:?}"));
        let text = Status::Failed { code, vendor: 0 }.text(self.port().context());
        format!("{what} on queue pair {qp} ended with {text}")
    }

    /// Has [`Path::fd`] become readable at the next end of anything. Poll once more before waiting for it.
    ///
    /// # Errors
    /// As the device says.
    pub fn arm(&self) -> Result<(), Failure> {
        self.cq.take_events();
        self.cq
            .arm()
            .map_err(|error| self.failure(None, &error.to_string()))
    }

    /// What to wait for once armed.
    #[must_use]
    pub fn fd(&self) -> RawFd {
        self.cq.as_raw_fd()
    }
}
