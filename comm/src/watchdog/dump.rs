//! Dumps of what ranks are in, written when one of them finds a hang: by every rank of the communicator that can still hear it.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, SystemTime},
};

use ringsight_dump::{Format, Group, Moment};

use super::{Watch, detector, message::Message};
use crate::{env, log, observe};

/// Of several verdicts in so short a time one dump is enough.
const APART: Duration = Duration::from_secs(1);

/// Where dumps go, and when the last one was written.
#[derive(Debug)]
pub(super) struct Dumps {
    files: Vec<(PathBuf, Format)>,
    /// `CLOCK_MONOTONIC` nanoseconds, 0 for none.
    last_ns: AtomicU64,
}

impl Dumps {
    /// What the environment asks for.
    pub(super) fn read() -> Self {
        let forms = [
            ("RINGSIGHT_DUMP_FILE", Format::Pickle),
            ("RINGSIGHT_DUMP_JSON", Format::Json),
        ];
        let file = |(name, form)| env::text(name).map(|prefix| (PathBuf::from(prefix), form));
        Self {
            files: forms.into_iter().filter_map(file).collect(),
            last_ns: AtomicU64::new(0),
        }
    }

    /// Whether it is time for one.
    fn is_due(&self, now: u64) -> bool {
        // Relaxed: nothing hangs on it but how often a file is written.
        let last = self.last_ns.load(Ordering::Relaxed);
        let due = last == 0 || now.saturating_sub(last) >= APART.as_nanos() as u64;
        !self.files.is_empty()
            && due
            && self
                .last_ns
                .compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    }
}

impl Watch {
    /// A hang has been found here: this rank and all others write what they are in.
    pub(super) fn dump_all(&self) {
        if !self.dumps.files.is_empty() {
            (self.post)(None, &Message::Dump.encode());
            self.dump();
        }
    }

    /// Writes what this rank is in, on a thread of its own: file systems may block.
    pub(super) fn dump(&self) {
        let watches = detector::of_rank(self);
        // The file is the rank's: of its communicators that all find a hang one writes it.
        let first = watches.first().map_or(&self.dumps, |watch| &watch.dumps);
        if !first.is_due(observe::now_ns()) {
            return;
        }
        let groups = groups(&watches);
        let (device, files) = (self.device, self.dumps.files.clone());
        let started = thread::Builder::new()
            .name("rs-dump".into())
            .spawn(move || write(device, &groups, &files));
        if let Err(error) = started {
            tracing::warn!(target: log::INIT, "no thread to write a dump: {error}");
        }
    }
}

fn write(device: i32, groups: &[Group], files: &[(PathBuf, Format)]) {
    let (Some(main), Some(pages)) = (groups.first(), observe::pages()) else {
        return;
    };
    let since_epoch = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH);
    let moment = Moment {
        monotonic_ns: observe::now_ns(),
        realtime_ns: since_epoch.map_or(0, |time| time.as_nanos() as u64),
    };
    let operations: Vec<_> = pages.descriptions().collect();
    let dump = ringsight_dump::dump(groups, &operations, &moment);
    for (prefix, form) in files {
        let line = match ringsight_dump::write(prefix, main.rank, *form, &dump) {
            Ok(path) => format!("what rank {} is in is written to {}", main.rank, path.display()),
            Err(error) => format!(
                "what rank {} is in cannot be written to {}{}: {error}",
                main.rank,
                prefix.display(),
                main.rank
            ),
        };
        log::alarm(device, &[line]);
    }
}

/// The communicators of a rank. The one with the most ranks is the job, as far as can be known here: its numbers are those of
/// the others' ranks, too, and of the file.
fn groups(watches: &[Arc<Watch>]) -> Vec<Group> {
    let mut watches: Vec<&Arc<Watch>> = watches.iter().collect();
    // Stable: of several with as many ranks the first that was made.
    watches.sort_by_key(|watch| std::cmp::Reverse(watch.ranks));
    let main = watches.first().map(|watch| watch.places()).unwrap_or_default();
    watches
        .iter()
        .filter_map(|watch| {
            Some(Group {
                id: watch.comm,
                name: watch.name.clone(),
                rank: watch.rank,
                members: ringsight_dump::members(&main, &watch.places())?,
            })
        })
        .collect()
}
