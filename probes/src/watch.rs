//! One watched process: its pages, and the samples made of its raw events.

use std::{sync::Arc, time::Duration};

use ringsight_records::{
    Flags, Kind, Record, State, VERSION,
    connection::ConnectionSlot,
    pages::{CommSlot, Holder, Pages, Reader},
    probed::{ProbedCall, site_of},
    verdicts::GivenVerdict,
};

use crate::{
    account::{Account, Base, ByKind},
    ask::Question,
    error::AttachError,
    limits::{HELD_RECORDS, TABLE_ENTRIES, VERDICTS_A_POLL},
    pages::{Access, Hold, Mapped, Search, Seen, devices},
    procfs::ProcessDirectory,
    sample::{Carrier, HostCall, Sample},
    signature,
    stats::Counters,
};

/// How often to look for pages that are not there yet, and for communicators whose record was lost.
const LOOK_NS: u64 = 50_000_000;

/// How long after a watch began what was emitted before it may still be on its way into the ring: what a thread does between counting an event and
/// writing it takes it no longer than it is kept from running.
const RECOVERY_NS: u64 = 1_000_000_000;

/// Up to when what a carrier held has been handed on, though it may never be found empty.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Through {
    /// Monotonic nanoseconds.
    pub(crate) ns: u64,
    /// A place in the carrier, and a time by which nothing was beyond it.
    mark: Option<(u64, u64)>,
}

impl Through {
    /// The carrier was read at `now_ns`, and found empty or not. `is_read_to` tells whether it was read up to a place, `end` is where
    /// it ends now.
    pub(crate) fn look(
        &mut self,
        now_ns: u64,
        is_empty: bool,
        is_read_to: impl Fn(u64) -> bool,
        end: impl Fn() -> u64,
    ) {
        if is_empty {
            (self.ns, self.mark) = (now_ns, None);
            return;
        }
        match self.mark {
            Some((place, ns)) if is_read_to(place) => (self.ns, self.mark) = (ns, Some((end(), now_ns))),
            Some(_) => {}
            None => self.mark = Some((end(), now_ns)),
        }
    }
}

/// A look for the pages, and where the next one goes on.
type Looking = Question<(Result<Option<Mapped>, AttachError>, Search)>;

/// State of one process.
#[derive(Debug)]
pub(crate) struct Watched {
    pid: u32,
    instrumented: bool,
    /// Sparse records come through probes where the ring does not take them.
    probed: bool,
    pages: Option<Mapped>,
    search: Search,
    /// A look for the pages that is under way.
    looking: Option<Looking>,
    /// The pages may have been there before the probes: the look at that time did not go through all descriptors.
    was_cut: bool,
    account: Account,
    recovery: Option<Recovery>,
    /// Emitted when the end began: what comes after is not ours to see.
    end: Option<ByKind>,
    looked_ns: u64,
    /// A layout version that is not ours was reported.
    foreign: bool,
    /// What kept the pages from being used was reported.
    refused: bool,
    /// The last drain left records in the ring.
    is_behind: bool,
    /// How far the ring has been read.
    read: Through,
    /// Records of the probes, with their threads, that wait for what the ring held before them: up to `held_until`.
    held: Vec<(u32, Record)>,
    held_until: u64,
    /// Verdicts that may still be looked up for records of the probes, until the next drain.
    probed_verdicts: usize,
    /// The verdicts that stood in the pages when the watch began were handed on.
    adopted: bool,
}

/// The beginning of a watch: what the ring held by then is still being read.
#[derive(Debug)]
struct Recovery {
    /// Where that ends.
    until: u64,
    began_ns: u64,
}

impl Watched {
    /// `pages` are leased, with the account that begins with them; `probed` says that the probes are in place.
    pub(crate) fn new(
        pid: u32,
        instrumented: bool,
        probed: bool,
        (pages, search): (Option<(Mapped, Base)>, Search),
        now_ns: u64,
    ) -> Self {
        let mut watched = Self {
            pid,
            instrumented,
            probed,
            pages: None,
            was_cut: search.is_under_way(),
            search,
            looking: None,
            account: Account::new(),
            recovery: None,
            end: None,
            looked_ns: 0,
            foreign: false,
            refused: false,
            is_behind: false,
            read: Through::default(),
            held: Vec::new(),
            held_until: 0,
            probed_verdicts: VERDICTS_A_POLL,
            adopted: false,
        };
        if let Some((pages, base)) = pages {
            watched.begin(pages, base, now_ns);
        }
        watched
    }

    fn begin(&mut self, pages: Mapped, base: Base, now_ns: u64) {
        self.account.begin(base);
        self.recovery = Some(Recovery {
            until: pages.head(),
            began_ns: now_ns,
        });
        self.pages = Some(pages);
    }

    /// Has a thread look for the pages, from where the last look ended.
    fn ask_for_pages(&mut self, directory: &Arc<ProcessDirectory>) -> Option<Looking> {
        let (directory, mut search) = (Arc::clone(directory), std::mem::take(&mut self.search));
        let look = move || (Mapped::find(&directory, &mut search, Access::Lease), search);
        Question::ask(look).ok()
    }

    /// Looks for the pages, if there are none yet and it is time: a library makes them with its first communicator.
    pub(crate) fn look(
        &mut self,
        directory: &Arc<ProcessDirectory>,
        now_ns: u64,
        own: &Reader,
        mask: u64,
    ) -> Result<(), AttachError> {
        if !self.instrumented || self.pages.is_some() || self.end.is_some() {
            return Ok(());
        }
        let Some(looking) = &self.looking else {
            if now_ns.saturating_sub(self.looked_ns) >= LOOK_NS {
                self.looked_ns = now_ns;
                self.looking = self.ask_for_pages(directory);
            }
            return Ok(());
        };
        let found = match looking.answer_within(Duration::ZERO) {
            Ok(None) => return Ok(()),
            Ok(Some((found, search))) => {
                self.search = search;
                found
            }
            Err(_) => Ok(None),
        };
        self.looking = None;
        let problem = match found {
            Ok(None) | Err(AttachError::Gone { .. }) => return Ok(()),
            Ok(Some(mut pages)) => match pages.lease(own, mask) {
                Ok(base) => {
                    self.begin_later(pages, base, now_ns);
                    return Ok(());
                }
                Err(_) if self.refused => return Ok(()),
                Err(holder) => leased(&pages, &holder, own, directory),
            },
            Err(error) => error,
        };
        // Told once. Another reader may be gone later, and what is damaged stays so.
        if std::mem::replace(&mut self.refused, true) {
            Ok(())
        } else {
            Err(problem)
        }
    }

    /// Begins with pages that were not there at the beginning of the watch.
    fn begin_later(&mut self, mut pages: Mapped, mut base: Base, now_ns: u64) {
        // The probes were there before the pages, and have had what no ring took.
        if !self.probed || self.was_cut || !pages.count_from_zero(&mut base) {
            // What came through the probes by now has been counted by the reader before.
            self.account = Account::new();
        }
        self.begin(pages, base, now_ns);
    }

    /// See [`Mapped::renew`].
    pub(crate) fn renew(&mut self, directory: &ProcessDirectory, own: &Reader, now_ns: u64) -> Hold {
        self.pages
            .as_mut()
            .map_or(Hold::AsBefore, |pages| pages.renew(directory, own, now_ns))
    }

    /// Notes what has been emitted by now as all that is to be accounted for.
    pub(crate) fn begin_to_end(&mut self) {
        self.end = Some(self.pages.as_ref().map_or([0; Kind::LIMIT], Mapped::emitted));
    }

    /// Whether that has come, or is known to be lost.
    pub(crate) fn is_even(&self) -> bool {
        self.end.is_none_or(|emitted| self.account.is_even(&emitted))
    }

    /// Stops new events in the ring; what is in there stays ours to read.
    pub(crate) fn disarm(&mut self) {
        if let Some(pages) = &mut self.pages {
            pages.disarm();
        }
    }

    /// Whether the last drain had no time for all that the ring held.
    pub(crate) fn is_cut(&self) -> bool {
        self.pages.as_ref().is_some_and(|pages| pages.is_cut)
    }

    /// Up to when everything of it in the ring has been handed on, and what the probes brought meanwhile.
    pub(crate) fn read_through(&self) -> u64 {
        self.read.ns
    }

    /// Hands on what the shared ring holds; see [`Mapped::drain`].
    pub(crate) fn drain(&mut self, limit: usize, now_ns: u64, dead: bool, samples: &mut Vec<Sample>) {
        let Some(mut pages) = self.pages.take() else {
            self.read.ns = now_ns;
            return;
        };
        let mut foreign = 0;
        let mut verdicts = VERDICTS_A_POLL;
        self.probed_verdicts = VERDICTS_A_POLL;
        let mut seen = std::mem::take(&mut pages.seen);
        let begins = pages.begins;
        let complete = pages.drain(limit, now_ns, dead, |pages, position, record| {
            self.account
                .received(record.kind, (position.wrapping_sub(begins) as i64) < 0);
            if record.version() == VERSION {
                deliver(
                    self.pid,
                    0,
                    Carrier::Ring,
                    record,
                    Some((pages, &mut seen, &mut verdicts)),
                    samples,
                );
            } else {
                foreign += 1;
            }
        });
        pages.seen = seen;
        let may_go = complete || pages.is_read_to(self.held_until);
        self.pages = Some(pages);
        if foreign > 0 {
            samples.push(Sample::Lost {
                pid: Some(self.pid),
                carrier: Carrier::Ring,
                kind: None,
                count: foreign,
            });
        }
        self.is_behind = !complete;
        if may_go {
            for (tid, record) in std::mem::take(&mut self.held) {
                self.probed_record(tid, record, samples);
            }
        }
        if let Some(pages) = &self.pages {
            let is_all = self.held.is_empty();
            let is_read_to = |place| is_all && pages.is_read_to(place);
            self.read.look(now_ns, complete, is_read_to, || pages.head());
        }
        self.recover(now_ns, samples);
    }

    /// Once what was in the ring at the beginning has been read: what was not in there is missed.
    fn recover(&mut self, now_ns: u64, samples: &mut Vec<Sample>) {
        let Some(pages) = &self.pages else { return };
        if let Some(recovery) = &self.recovery
            && now_ns.saturating_sub(recovery.began_ns) >= RECOVERY_NS
            && pages.is_read_to(recovery.until)
        {
            self.recovery = None;
            let emitted = pages.emitted();
            self.missed(&emitted, samples);
        }
    }

    fn missed(&mut self, emitted: &ByKind, samples: &mut Vec<Sample>) {
        for (kind, count) in self.account.missed(emitted) {
            samples.push(Sample::Missed {
                pid: self.pid,
                kind,
                count,
            });
        }
    }

    /// Tells the pages what has been accounted for; see [`Mapped::publish`].
    pub(crate) fn publish(&mut self) {
        if let Some(pages) = self.pages.as_ref().filter(|pages| pages.is_held()) {
            pages.publish(&self.account.publish());
        }
    }

    /// The end: what was emitted and has not come is missed or lost, whatever the carriers say.
    pub(crate) fn close(&mut self, samples: &mut Vec<Sample>) {
        for (tid, record) in std::mem::take(&mut self.held) {
            self.probed_record(tid, record, samples);
        }
        self.lost(samples);
        self.devices(samples);
        let Some(pages) = &self.pages else { return };
        let emitted = self.end.unwrap_or_else(|| pages.emitted());
        self.missed(&emitted, samples);
        for (kind, count) in self.account.unaccounted(&emitted) {
            let carrier = if self.probed && Kind::SPARSE & kind.bit() != 0 {
                Carrier::Probe
            } else {
                Carrier::Ring
            };
            self.report_lost(carrier, kind, count, samples);
        }
        self.publish();
    }

    /// Hands a loss on.
    pub(crate) fn report_lost(
        &mut self,
        carrier: Carrier,
        kind: Kind,
        count: u64,
        samples: &mut Vec<Sample>,
    ) {
        self.account.lost(kind, count);
        samples.push(Sample::Lost {
            pid: Some(self.pid),
            carrier,
            kind: Some(kind),
            count,
        });
    }

    /// Hands a probed record on, with what must come before it: that includes what the ring held, or it would have gone there.
    pub(crate) fn record(&mut self, tid: u32, record: Record, samples: &mut Vec<Sample>) {
        if !self.is_behind {
            self.account.received(record.kind, false);
            self.probed_record(tid, record, samples);
        } else if self.held.len() < HELD_RECORDS {
            if self.held.is_empty() {
                self.held_until = self.pages.as_ref().map_or(0, Mapped::head);
            }
            self.account.received(record.kind, false);
            self.held.push((tid, record));
        } else if let Some(kind) = record.kind() {
            self.report_lost(Carrier::Probe, kind, 1, samples);
        }
    }

    fn probed_record(&mut self, tid: u32, record: Record, samples: &mut Vec<Sample>) {
        let carrier = Carrier::Probe;
        let Some(pages) = &mut self.pages else {
            deliver(self.pid, tid, carrier, record, None, samples);
            return;
        };
        let mut seen = std::mem::take(&mut pages.seen);
        let known = (&pages.view(), &mut seen, &mut self.probed_verdicts);
        deliver(self.pid, tid, carrier, record, Some(known), samples);
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
            let view = pages.view();
            announce(self.pid, &view, &mut seen, samples);
            if !std::mem::replace(&mut self.adopted, true) {
                open_verdicts(self.pid, &view, samples);
            }
            pages.seen = seen;
        }
    }

    /// The same, now and then: for communicators whose record was lost.
    pub(crate) fn communicators_if_due(&mut self, now_ns: u64, samples: &mut Vec<Sample>) {
        if self.pages.is_some() && now_ns.saturating_sub(self.looked_ns) >= LOOK_NS {
            self.looked_ns = now_ns;
            self.communicators(samples);
            self.devices(samples);
            self.ports(samples);
        }
    }

    /// Hands on network ports that are new.
    fn ports(&mut self, samples: &mut Vec<Sample>) {
        let Some(pages) = &mut self.pages else { return };
        let mut ports = std::mem::take(&mut pages.ports);
        let slots = pages.view().connections();
        for connection in slots.iter().take(TABLE_ENTRIES).filter_map(ConnectionSlot::read) {
            for path in connection.paths().filter(|path| !path.device().is_empty()) {
                if !ports.contains(&path.index) {
                    ports.push(path.index);
                    samples.push(Sample::Port {
                        pid: self.pid,
                        index: path.index,
                        device: path.device().to_owned(),
                        number: path.port,
                        gid: (path.gid != [0; 16]).then(|| path.gid.into()),
                    });
                }
            }
        }
        pages.ports = ports;
    }

    /// Hands on what devices' clocks show now, and what they overwrote.
    fn devices(&mut self, samples: &mut Vec<Sample>) {
        let Some(pages) = &mut self.pages else { return };
        let now = devices(&pages.view());
        for (device, (now, seen)) in (0..).zip(now.iter().zip(&mut pages.devices)) {
            if now != seen {
                samples.push(Sample::Device {
                    pid: self.pid,
                    device,
                    clock: now.0,
                    overwritten: now.1.wrapping_sub(seen.1),
                });
                *seen = *now;
            }
        }
    }

    /// Reports what the ring lost since the last report, of the kinds that nothing else carries when it is full.
    pub(crate) fn lost(&mut self, samples: &mut Vec<Sample>) {
        let alone = if self.probed { Kind::DENSE } else { Kind::EVERY };
        let lost = self
            .pages
            .as_mut()
            .map(|pages| pages.newly_lost(alone))
            .unwrap_or_default();
        for (kind, count) in lost {
            self.report_lost(Carrier::Ring, kind, count, samples);
        }
    }

    /// The target's counters since attach.
    pub(crate) fn counters(&self) -> Option<Counters> {
        self.pages.as_ref().map(|pages| Counters::new(pages.counters()))
    }
}

/// Hands a record on, after the communicator or description that it speaks of.
fn deliver(
    pid: u32,
    tid: u32,
    carrier: Carrier,
    record: Record,
    known: Option<(&Pages<'_>, &mut Seen, &mut usize)>,
    samples: &mut Vec<Sample>,
) {
    match record.kind() {
        Some(Kind::OpLaunched | Kind::OpCompleted) => {
            match known.and_then(|(pages, ..)| pages.description(record.op)) {
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
        Some(Kind::Verdict) => {
            let given = known.and_then(|(pages, _, left)| {
                *left = left.checked_sub(1)?;
                let is_it = |given: &GivenVerdict| (given.op, given.time_ns) == (record.op, record.time_ns);
                pages.verdicts().find(is_it)
            });
            samples.extend(given.map(|given| Sample::Verdict {
                pid,
                given: Box::new(given),
            }));
        }
        Some(Kind::CommInit) => {
            // The record names its slot. Others come with the next look at all.
            if let Some((pages, seen, _)) = known {
                let slots = pages.communicators();
                seen.resize(slots.len(), None);
                let slot = usize::try_from(record.value).ok();
                if let Some((slot, seen)) = slot.and_then(|slot| slots.get(slot).zip(seen.get_mut(slot))) {
                    announce_one(pid, slot, seen, samples);
                }
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

/// Hands on the last verdict on each operation that is still in progress, with the operation's description: a watchdog that gave it before
/// this process was watched does not repeat it.
fn open_verdicts(pid: u32, pages: &Pages<'_>, samples: &mut Vec<Sample>) {
    let mut open: Vec<GivenVerdict> = Vec::new();
    for given in pages.verdicts() {
        match open
            .iter_mut()
            .find(|known| (known.op, known.replay) == (given.op, given.replay))
        {
            Some(known) if known.time_ns < given.time_ns => *known = given,
            Some(_) => {}
            None => open.push(given),
        }
    }
    for given in open {
        let Some(description) = pages.description(given.op).filter(|described| {
            // An entry of a captured operation has the times of its latest replay.
            described.comm == given.comm && described.device_end_ns <= given.begun_ns
        }) else {
            continue;
        };
        let state = if given.is_hang != 0 {
            State::STOP
        } else {
            State::START
        };
        let record = Record {
            comm: given.comm,
            seq: given.seq,
            bytes: description.bytes,
            value: u64::from(given.cause) << 32 | u64::from(given.culprit),
            op: given.op,
            replay: given.replay,
            rank: given.rank,
            peer: given.peer,
            pid,
            ..Record::new(Kind::Verdict, state, given.time_ns)
        };
        samples.push(Sample::Description {
            pid,
            description: Box::new(description),
        });
        samples.push(Sample::Verdict {
            pid,
            given: Box::new(given),
        });
        samples.push(Sample::Record {
            pid,
            tid: 0,
            carrier: Carrier::Ring,
            record: record.with_flags(Flags(given.flags)),
        });
    }
}

/// Hands on the communicators that are not in `seen`, and puts them there.
fn announce(pid: u32, pages: &Pages<'_>, seen: &mut Seen, samples: &mut Vec<Sample>) {
    let slots = pages.communicators();
    seen.resize(slots.len(), None);
    for (slot, seen) in slots.iter().zip(seen).take(TABLE_ENTRIES) {
        announce_one(pid, slot, seen, samples);
    }
}

fn announce_one(pid: u32, slot: &CommSlot, seen: &mut Option<(u64, u64)>, samples: &mut Vec<Sample>) {
    let Some(communicator) = slot.is_live().then(|| slot.read()).flatten() else {
        return;
    };
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

/// That another reader holds the lease of a process's ring.
pub(crate) fn leased(
    pages: &Mapped,
    holder: &Holder,
    own: &Reader,
    directory: &ProcessDirectory,
) -> AttachError {
    AttachError::Leased {
        pid: directory.pid(),
        holder: pages.holder(holder, own, directory),
        silent_ms: holder.silent_ns / 1_000_000,
    }
}

#[cfg(test)]
mod tests {
    use ringsight_records::{State, ring};

    use super::*;
    use crate::pages::tests::{owners, sealed};

    #[test]
    fn what_overflowed_comes_after_what_had_room() {
        let file = sealed();
        let (mut mapped, owner) = (Mapped::of_file(&file).unwrap(), owners(&file));
        let base = mapped.lease(&Reader::new(1, 2, 3), u64::MAX).unwrap();
        let mut watched = Watched::new(1, true, true, (Some((mapped, base)), Search::default()), 0);
        let record = |time| Record::new(Kind::Failover, State::START, time);
        for time in 1..=3 {
            assert!(ring::push(&owner.header().cursor, owner.ring(), &record(time)));
        }
        let mut samples = Vec::new();
        // No time for more than one of them in this poll, in which a later record comes by a probe.
        watched.drain(1, 1, false, &mut samples);
        assert!(watched.is_cut());
        watched.record(7, record(4), &mut samples);
        watched.drain(10, 1, false, &mut samples);
        assert!(!watched.is_cut());
        watched.record(7, record(5), &mut samples);
        let times: Vec<_> = samples
            .iter()
            .filter_map(|sample| match sample {
                Sample::Record { record, .. } => Some(record.time_ns),
                _ => None,
            })
            .collect();
        assert_eq!(times, [1, 2, 3, 4, 5]);
    }
}
