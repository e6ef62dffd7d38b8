//! What a session keeps of one process.

use std::{os::fd::OwnedFd, sync::Arc};

use ringsight_records::{Kind, pages::Reader, probed::Tally};

use crate::{
    pages::Hold,
    process::Program,
    procfs::ProcessDirectory,
    sample::{Carrier, Sample},
    target::FileKey,
    watch::Watched,
};

/// One process of a session.
pub(super) struct Target {
    pub(super) directory: Arc<ProcessDirectory>,
    pub(super) pidfd: OwnedFd,
    pub(super) program: Program,
    /// The process runs another program by now.
    pub(super) replaced: bool,
    pub(super) library: FileKey,
    /// Key in the programs' table and library number, while probes are attached.
    pub(super) probed: Option<(u64, u64)>,
    pub(super) reported: Tally,
    pub(super) watched: Watched,
    /// When its end was seen.
    pub(super) ended_ns: Option<u64>,
    /// Up to when everything of it has been handed on.
    pub(super) through_ns: u64,
}

impl Target {
    /// Reports what the probes lost since the last report.
    pub(super) fn report(&mut self, now: &Tally, pid: u32, samples: &mut Vec<Sample>) {
        for kind in Kind::ALL {
            let at = *kind as usize;
            let count = now.lost[at].saturating_sub(self.reported.lost[at]);
            if count > 0 {
                self.watched.report_lost(Carrier::Probe, *kind, count, samples);
            }
        }
        let nameless = |tally: &Tally| tally.faults + tally.calls_lost;
        let count = nameless(now).saturating_sub(nameless(&self.reported));
        if count > 0 {
            samples.push(Sample::Lost {
                pid: Some(pid),
                carrier: Carrier::Probe,
                kind: None,
                count,
            });
        }
        self.reported = *now;
    }

    /// Keeps the lease of the ring. What became of it, if it is worth a word.
    pub(super) fn renew(&mut self, pid: u32, own: &Reader, now_ns: u64) -> Option<String> {
        match self.watched.renew(&self.directory, own, now_ns) {
            Hold::AsBefore => None,
            Hold::Lost { holder, silent_ns } => Some(format!(
                "process {pid}: {holder} has taken its ring over (a lease lapses after 5 s; the last sign of life of this \
                 reader is {:.1} s old): all but what finds the ring full goes there until that lease is given back or lapses",
                silent_ns as f64 / 1e9
            )),
            Hold::Regained => Some(format!("process {pid}: its ring is this reader's again")),
        }
    }
}
