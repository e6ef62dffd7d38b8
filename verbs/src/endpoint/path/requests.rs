//! Posting to a path, and polling its completions.

use std::os::fd::{AsRawFd, RawFd};

use ringsight_failover::MESSAGE_BYTES;

use super::{MESSAGES, Path, Peer, post_receive};
use crate::{
    completion::{BATCH, Completion, Status},
    endpoint::{
        control::{self, Control, credit_at},
        work::{PathEvent, WorkRequest},
    },
    error::Failure,
    queue::{Source, Write},
};

impl Path {
    /// Sends a message, unless too many are outstanding.
    pub(in crate::endpoint) fn post_message(&mut self, message: &[u8; MESSAGE_BYTES]) -> Result<(), Failure> {
        if self.messages < MESSAGES {
            self.qps[0]
                .send(WorkRequest::Message.id(), message)
                .map_err(|error| self.failure(None, &error.to_string()))?;
            self.messages += 1;
            self.counts.others += 1;
        }
        Ok(())
    }

    /// Posts a write of no bytes to each queue pair. They complete only if the path works. Every queue pair is probed, because a network
    /// may route the packets of each differently.
    pub(in crate::endpoint) fn post_probe(&mut self) -> Result<(), Failure> {
        for qp in 0..self.qps.len() {
            let peer = self.connected()?;
            let probe = Write {
                id: WorkRequest::Probe { qp }.id(),
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

    /// The peer of a connected path.
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

    /// Posts a step, or its part for one queue pair: the range `data` of the slots, to the same range at the peer, then the notice.
    pub(in crate::endpoint) fn post_step(
        &mut self,
        qp: usize,
        position: u64,
        head: &[u8],
        data: std::ops::Range<usize>,
    ) -> Result<(), Failure> {
        let peer = self.connected()?;
        let notice = Write {
            id: WorkRequest::Step { qp, position }.id(),
            source: Source::Inline(head),
            address: peer.control + control::notice_at(position) as u64,
            key: peer.path.control_key,
            immediate: Some(position as u32),
            signaled: true,
        };
        if data.is_empty() {
            self.post(qp, &[notice])?;
            self.counts.steps += 1;
            return Ok(());
        }
        let bytes = Write {
            id: WorkRequest::Data { qp, position }.id(),
            address: peer.slots + data.start as u64,
            source: Source::Registered(&self.slots, data),
            key: peer.path.slots_key,
            immediate: None,
            // The completion of the notice, on the same queue pair, covers both.
            signaled: false,
        };
        self.post(qp, &[bytes, notice])?;
        self.counts.steps += 2;
        Ok(())
    }

    /// Posts a credit, into this path's word at the peer.
    pub(in crate::endpoint) fn post_credit(&mut self, granted: u64) -> Result<(), Failure> {
        let peer = self.connected()?;
        let word = granted.to_le_bytes();
        let credit = Write {
            id: WorkRequest::Credit { granted }.id(),
            source: Source::Inline(&word),
            address: peer.control + credit_at(self.index) as u64,
            key: peer.path.control_key,
            // The immediate only wakes a sender that sleeps; it reads the word.
            immediate: Some(granted as u32),
            signaled: true,
        };
        self.post(0, &[credit])?;
        self.counts.credits += 1;
        Ok(())
    }

    /// Polls all completions, passes each event to `sink`, and posts receive requests again. Returns whether there was any completion.
    ///
    /// # Errors
    /// The completion queue or the sink failed.
    pub(in crate::endpoint) fn poll(
        &mut self,
        control: &Control,
        mut sink: impl FnMut(PathEvent) -> Result<(), Failure>,
    ) -> Result<bool, Failure> {
        let mut room = [Completion::EMPTY; BATCH];
        let mut any = false;
        loop {
            let completions = self
                .cq
                .poll(&mut room)
                .map_err(|error| self.failure(None, &error.to_string()))?;
            self.counts.completions += completions.len() as u64;
            for completion in completions {
                any = true;
                // Completions of replaced queue pairs are ignored.
                if !self.qps.iter().any(|qp| qp.number() == completion.qp) {
                    continue;
                }
                let work = WorkRequest::from_id(completion.id);
                if work == Some(WorkRequest::Message) {
                    self.messages = self.messages.saturating_sub(1);
                }
                if let (Some(WorkRequest::Marker { .. }), Some(drain)) = (work, &mut self.draining) {
                    drain.completed += 1;
                    continue;
                }
                // The status before anything else: without success the other fields are undefined.
                if let Status::Failed { code, .. } = completion.status {
                    let qp = completion.qp;
                    sink(PathEvent::Failed { work, code, qp })?;
                    continue;
                }
                match work {
                    Some(WorkRequest::Step { position, .. }) => sink(PathEvent::Sent { position })?,
                    Some(WorkRequest::Credit { granted }) => sink(PathEvent::Credited { granted })?,
                    Some(WorkRequest::Probe { .. }) => {
                        self.probes = self.probes.saturating_sub(1);
                        if self.probes == 0 {
                            sink(PathEvent::Probed)?;
                        }
                    }
                    Some(WorkRequest::Receive { qp, index }) => {
                        let message = completion
                            .received
                            .filter(|bytes| *bytes == MESSAGE_BYTES)
                            .map(|_| control.message(self.index, index));
                        // A draining queue pair accepts no more.
                        if self.draining.is_none() {
                            self.receive(qp, index)?;
                        }
                        if let Some(message) = message {
                            sink(PathEvent::Message(message))?;
                        }
                        if let Some(immediate) = completion.immediate {
                            sink(PathEvent::Arrived { qp, immediate })?;
                        }
                    }
                    // Only their errors matter.
                    Some(WorkRequest::Data { .. } | WorkRequest::Message | WorkRequest::Marker { .. })
                    | None => {}
                }
            }
            if completions.len() < BATCH {
                return Ok(any);
            }
        }
    }

    /// Posts a receive request.
    fn receive(&self, qp: usize, index: usize) -> Result<(), Failure> {
        let posted = post_receive(self.index, &self.qps[qp], (qp, index), &self.control);
        posted.map_err(|error| self.failure(None, &error.to_string()))
    }

    /// Describes a failed request, with libibverbs' text for the status.
    pub(in crate::endpoint) fn status_text(&self, work: Option<WorkRequest>, code: u32, qp: u32) -> String {
        let what = work.map_or_else(|| "a request".to_owned(), |work| format!("{work:?}"));
        let text = Status::Failed { code, vendor: 0 }.text(self.port().context());
        format!("{what} on queue pair {qp} ended with {text}")
    }

    /// Has [`Path::fd`] become readable at the next completion. Poll once more before waiting for it.
    ///
    /// # Errors
    /// A call of the device failed.
    pub fn arm(&self) -> Result<(), Failure> {
        self.cq.take_events();
        self.cq
            .arm()
            .map_err(|error| self.failure(None, &error.to_string()))
    }

    /// The descriptor to wait for, once armed.
    #[must_use]
    pub fn fd(&self) -> RawFd {
        self.cq.as_raw_fd()
    }
}
