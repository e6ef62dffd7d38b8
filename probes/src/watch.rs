//! One watched process: its pages, and the samples made of its raw events.

use ringsight_records::{
    Kind, Record, VERSION,
    pages::Pages,
    probed::{ProbedCall, site_of},
};

use crate::{
    error::AttachError,
    pages::Mapped,
    sample::{Carrier, HostCall, Sample},
    signature,
    stats::Counters,
};

/// How often to look for pages that are not there yet, and for communicators whose record was lost.
const LOOK_NS: u64 = 50_000_000;

/// State of one process.
#[derive(Debug)]
pub(crate) struct Watched {
    pid: u32,
    instrumented: bool,
    pages: Option<Mapped>,
    looked_ns: u64,
    /// A layout version that is not ours was reported.
    foreign: bool,
    /// What kept the pages from being used was reported.
    refused: bool,
}

impl Watched {
    pub(crate) fn new(pid: u32, instrumented: bool, pages: Option<Mapped>) -> Self {
        Self {
            pid,
            instrumented,
            pages,
            looked_ns: 0,
            foreign: false,
            refused: false,
        }
    }

    /// Looks for the pages, if there are none yet and it is time: a library makes them with its first communicator.
    pub(crate) fn look(
        &mut self,
        now_ns: u64,
        own: (u32, u64),
        mask: impl FnOnce() -> u64,
    ) -> Result<(), AttachError> {
        if !self.instrumented
            || self.refused
            || self.pages.is_some()
            || now_ns.saturating_sub(self.looked_ns) < LOOK_NS
        {
            return Ok(());
        }
        self.looked_ns = now_ns;
        let found = Mapped::find(self.pid).and_then(|found| {
            let Some(mut pages) = found else { return Ok(None) };
            pages.lease(self.pid, own)?;
            pages.arm(mask());
            // The probes were there before the pages: the library's counts are complete from zero for sparse events.
            pages.count_from_zero();
            Ok(Some(pages))
        });
        match found {
            Ok(pages) => self.pages = pages,
            Err(AttachError::Gone { .. }) => {}
            Err(error) => {
                self.refused = true;
                return Err(error);
            }
        }
        Ok(())
    }

    /// See [`Mapped::renew`].
    pub(crate) fn renew(&mut self, now_ns: u64) -> bool {
        self.pages.as_mut().is_none_or(|pages| pages.renew(now_ns))
    }

    /// Stops new dense events; what is in the ring stays ours to read.
    pub(crate) fn disarm(&mut self) {
        if let Some(pages) = &mut self.pages {
            pages.disarm();
        }
    }

    /// Hands on what the shared ring holds; see [`Mapped::drain`].
    pub(crate) fn drain(&mut self, limit: usize, now_ns: u64, dead: bool, samples: &mut Vec<Sample>) -> bool {
        let Some(mut pages) = self.pages.take() else {
            return true;
        };
        let mut foreign = 0;
        let seen = std::mem::take(&mut pages.seen);
        let mut seen = seen;
        let complete = pages.drain(limit, now_ns, dead, |pages, record| {
            if record.version() == VERSION {
                deliver(
                    self.pid,
                    0,
                    Carrier::Ring,
                    record,
                    Some((pages, &mut seen)),
                    samples,
                );
            } else {
                foreign += 1;
            }
        });
        pages.seen = seen;
        self.pages = Some(pages);
        if foreign > 0 {
            samples.push(Sample::Lost {
                pid: Some(self.pid),
                carrier: Carrier::Ring,
                kind: None,
                count: foreign,
            });
        }
        complete
    }

    /// Hands a probed record on, with what must come before it.
    pub(crate) fn record(&mut self, tid: u32, carrier: Carrier, record: Record, samples: &mut Vec<Sample>) {
        let Some(pages) = &mut self.pages else {
            deliver(self.pid, tid, carrier, record, None, samples);
            return;
        };
        let mut seen = std::mem::take(&mut pages.seen);
        let view = pages.view();
        deliver(
            self.pid,
            tid,
            carrier,
            record,
            view.as_ref().map(|view| (view, &mut seen)),
            samples,
        );
        pages.seen = seen;
    }

    /// Hands a stock library's call on.
    pub(crate) fn call(&self, call: &ProbedCall, samples: &mut Vec<Sample>) {
        if let Some(decoded) = signature::decode(site_of(call.cookie), &call.arguments) {
            samples.push(Sample::Call(Box::new(HostCall {
                pid: self.pid,
                tid: call.tid,
                call: decoded,
                start_ns: call.start_ns,
                end_ns: Some(call.end_ns),
                result: Some(call.result),
            })));
        }
    }

    /// A probed record of another layout version came.
    pub(crate) fn foreign(&mut self, version: u8, problems: &mut Vec<String>) {
        if !std::mem::replace(&mut self.foreign, true) {
            problems.push(format!(
                "process {}: its library writes records of layout version {version}, this collector reads {VERSION}: \
                 use the collector of the library's release",
                self.pid
            ));
        }
    }

    /// Hands on communicators that are new.
    pub(crate) fn communicators(&mut self, samples: &mut Vec<Sample>) {
        if let Some(pages) = &mut self.pages {
            let mut seen = std::mem::take(&mut pages.seen);
            if let Some(view) = pages.view() {
                announce(self.pid, &view, &mut seen, samples);
            }
            pages.seen = seen;
        }
    }

    /// The same, now and then: for communicators whose record was lost.
    pub(crate) fn communicators_if_due(&mut self, now_ns: u64, samples: &mut Vec<Sample>) {
        if self.pages.is_some() && now_ns.saturating_sub(self.looked_ns) >= LOOK_NS {
            self.looked_ns = now_ns;
            self.communicators(samples);
        }
    }

    /// Reports what the ring lost since the last report.
    pub(crate) fn lost(&mut self, samples: &mut Vec<Sample>) {
        if let Some(pages) = &mut self.pages {
            for (kind, count) in pages.newly_lost() {
                samples.push(Sample::Lost {
                    pid: Some(self.pid),
                    carrier: Carrier::Ring,
                    kind: Some(kind),
                    count,
                });
            }
        }
    }

    /// The target's counters since attach.
    pub(crate) fn counters(&self) -> Option<Counters> {
        self.pages.as_ref().map(|pages| Counters::new(pages.counters()))
    }
}

/// What was read from each communicator slot: (id, start of its initialisation).
pub(crate) type Seen = Vec<Option<(u64, u64)>>;

/// Hands a record on, after the communicator or description that it speaks of.
fn deliver(
    pid: u32,
    tid: u32,
    carrier: Carrier,
    record: Record,
    pages: Option<(&Pages<'_>, &mut Seen)>,
    samples: &mut Vec<Sample>,
) {
    match record.kind() {
        Some(Kind::OpLaunched | Kind::OpCompleted) => {
            match pages.and_then(|(pages, _)| pages.description(record.op)) {
                Some(description) => {
                    samples.push(Sample::Description {
                        pid,
                        description: Box::new(description),
                    });
                }
                // Its slot went to a later operation before we came.
                None => samples.push(Sample::Lost {
                    pid: Some(pid),
                    carrier: Carrier::Ring,
                    kind: None,
                    count: 1,
                }),
            }
        }
        Some(Kind::CommInit) => {
            if let Some((pages, seen)) = pages {
                announce(pid, pages, seen, samples);
            }
        }
        _ => {}
    }
    samples.push(Sample::Record {
        pid,
        tid,
        carrier,
        record,
    });
}

/// Hands on the communicators that are not in `seen`, and puts them there.
fn announce(pid: u32, pages: &Pages<'_>, seen: &mut Seen, samples: &mut Vec<Sample>) {
    let slots = pages.communicators();
    seen.resize(slots.len(), None);
    for (slot, seen) in slots.iter().zip(seen) {
        if !slot.is_live() {
            continue;
        }
        if let Some(communicator) = slot.read() {
            // One id may live in several slots: ranks of one process.
            let identity = (
                communicator.id ^ u64::from(communicator.rank) << 48,
                communicator.init_start_ns,
            );
            if *seen != Some(identity) {
                *seen = Some(identity);
                samples.push(Sample::Communicator {
                    pid,
                    communicator: Box::new(communicator),
                });
            }
        }
    }
}
