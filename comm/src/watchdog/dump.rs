//! Dumps of a rank's operations. When a rank finds a hang, every rank of the communicator that can hear it writes one.

use std::{
    path::PathBuf,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    thread,
    time::{Duration, SystemTime},
};

use ringsight_comm_base::{env, log, sys::StandardTaken};
use ringsight_dump::{Format, Group, Moment};

use super::{Watch, message::WatchdogMessage, thread::watches_of_rank};
use crate::observe;

/// The shortest time from one dump to the next: one is enough for several verdicts.
const SHORTEST_INTERVAL: Duration = Duration::from_secs(1);

/// Where dumps go, and when the last one was written.
#[derive(Debug)]
pub(super) struct DumpFiles {
    prefixes: Vec<(PathBuf, Format)>,
    /// `CLOCK_MONOTONIC` nanoseconds, 0 for none.
    last_ns: AtomicU64,
}

impl DumpFiles {
    /// Reads the environment.
    pub(super) fn from_env() -> Self {
        let formats = [
            ("RINGSIGHT_DUMP_FILE", Format::Pickle),
            ("RINGSIGHT_DUMP_JSON", Format::Json),
        ];
        let prefix = |(name, format)| env::text(name).map(|prefix| (PathBuf::from(prefix), format));
        Self {
            prefixes: formats.into_iter().filter_map(prefix).collect(),
            last_ns: AtomicU64::new(0),
        }
    }

    /// Whether a dump is to be written at `now`.
    fn take_turn(&self, now: u64) -> bool {
        // Relaxed: nothing depends on it but how often a file is written.
        let last = self.last_ns.load(Ordering::Relaxed);
        let is_due = last == 0 || now.saturating_sub(last) >= SHORTEST_INTERVAL.as_nanos() as u64;
        !self.prefixes.is_empty()
            && is_due
            && self
                .last_ns
                .compare_exchange(last, now, Ordering::Relaxed, Ordering::Relaxed)
                .is_ok()
    }
}

impl Watch {
    /// This rank found a hang: it writes a dump, and asks all others to do so.
    pub(super) fn dump_on_all_ranks(&self) {
        if !self.dump_files.prefixes.is_empty() {
            (self.post)(None, &WatchdogMessage::WriteDump.encode());
            self.dump();
        }
    }

    /// Writes a dump of this rank, on a thread of its own because file systems may block.
    pub(super) fn dump(&self) {
        let watches = watches_of_rank(self);
        // The file is the rank's: of its communicators that all find a hang, one writes it.
        let first = watches
            .first()
            .map_or(&self.dump_files, |watch| &watch.dump_files);
        if !first.take_turn(observe::now_ns()) {
            return;
        }
        let groups = groups(&watches);
        let (device, prefixes) = (self.device, self.dump_files.prefixes.clone());
        let started = thread::Builder::new()
            .name("rs-dump".into())
            .spawn(move || write(device, &groups, &prefixes));
        if let Err(error) = started {
            tracing::warn!(target: log::INIT, "no thread to write a dump: {error}");
        }
    }
}

fn write(device: i32, groups: &[Group], prefixes: &[(PathBuf, Format)]) {
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
    // What a program writes to a closed descriptor goes into no dump.
    let _standard = StandardTaken::new();
    for (prefix, format) in prefixes {
        let line = match ringsight_dump::write(prefix, main.rank, *format, &dump) {
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

/// The communicators of a rank, the largest first. The largest one counts as the job: its rank numbers are those of the
/// members of the others, and of the file.
fn groups(watches: &[Arc<Watch>]) -> Vec<Group> {
    let mut watches: Vec<&Arc<Watch>> = watches.iter().collect();
    // Stable: of equally large ones the one that was made first.
    watches.sort_by_key(|watch| std::cmp::Reverse(watch.ranks));
    let job = watches.first().map(|watch| watch.places()).unwrap_or_default();
    watches
        .iter()
        .filter_map(|watch| {
            Some(Group {
                id: watch.comm,
                name: watch.name.clone(),
                rank: watch.rank,
                members: ringsight_dump::members(&job, &watch.places())?,
            })
        })
        .collect()
}
