//! Everything that bounds what a watched process can make this collector keep or do, and what was left out at each bound.
//!
//! A target writes what it likes. So nothing grows with what it wrote but up to a [`Limit`], and the limits of a process come
//! first: one process cannot take another's share. Past a limit the rest of the work goes on, and [`LeftOut`] counts what was
//! left out under the limit's name.
//!
//! `docs/src/limits.md` has all limits in one table. A test holds the table against [`Limits::default`].

use std::collections::BTreeMap;

/// A bound, by its name in the summary, in metrics and in the documentation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[repr(usize)]
pub enum Limit {
    /// Communicators that a process is known to be in, each of its ranks counted.
    Communicators,
    /// Ranks that one process has in one communicator.
    RanksPerCommunicator,
    /// Ranks of a process that have a resource of their own.
    Resources,
    /// Attributes that a process brings for its resource.
    ResourceAttributes,
    /// Bytes of a text that a process brings for its resource.
    TextBytes,
    /// Operations in flight.
    Operations,
    /// Kernel channels, proxy operations, carried steps and verdicts of a process's operations, and its groups' links.
    OperationParts,
    /// Kernel channels of one operation.
    ChannelsPerOperation,
    /// Proxy operations of one operation.
    ProxiesPerOperation,
    /// Verdicts on one operation.
    VerdictsPerOperation,
    /// Verdicts in a second.
    Verdicts,
    /// Log records in a second.
    LogRecords,
    /// Open groups.
    Groups,
    /// Captured operations.
    CapturedOperations,
    /// Graphs that were destroyed and whose last replays are awaited.
    Graphs,
    /// Operations that wait for other ranks.
    Instances,
    /// Verdicts of ranks in the list of what is wrong.
    Findings,
    /// Ranks whose lags are kept.
    Stragglers,
    /// Ranks, functions and ways between nodes that metrics are kept of.
    MetricRows,
    /// Queue pairs.
    QueuePairs,
    /// Memory registrations.
    Registrations,
    /// Connections that fail over.
    Failovers,
    /// Operations that a summary lists.
    ListedOperations,
    /// What is handed on at the end.
    End,
}

impl Limit {
    /// All of them.
    pub const ALL: &'static [Self] = &[
        Self::Communicators,
        Self::RanksPerCommunicator,
        Self::Resources,
        Self::ResourceAttributes,
        Self::TextBytes,
        Self::Operations,
        Self::OperationParts,
        Self::ChannelsPerOperation,
        Self::ProxiesPerOperation,
        Self::VerdictsPerOperation,
        Self::Verdicts,
        Self::LogRecords,
        Self::Groups,
        Self::CapturedOperations,
        Self::Graphs,
        Self::Instances,
        Self::Findings,
        Self::Stragglers,
        Self::MetricRows,
        Self::QueuePairs,
        Self::Registrations,
        Self::Failovers,
        Self::ListedOperations,
        Self::End,
    ];

    /// Name in the summary, in metrics and in the documentation.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Communicators => "communicators",
            Self::RanksPerCommunicator => "ranks_per_communicator",
            Self::Resources => "resources",
            Self::ResourceAttributes => "resource_attributes",
            Self::TextBytes => "text_bytes",
            Self::Operations => "operations",
            Self::OperationParts => "operation_parts",
            Self::ChannelsPerOperation => "channels_per_operation",
            Self::ProxiesPerOperation => "proxies_per_operation",
            Self::VerdictsPerOperation => "verdicts_per_operation",
            Self::Verdicts => "verdicts",
            Self::LogRecords => "log_records",
            Self::Groups => "groups",
            Self::CapturedOperations => "captured_operations",
            Self::Graphs => "graphs",
            Self::Instances => "instances",
            Self::Findings => "findings",
            Self::Stragglers => "stragglers",
            Self::MetricRows => "metric_rows",
            Self::QueuePairs => "queue_pairs",
            Self::Registrations => "registrations",
            Self::Failovers => "failovers",
            Self::ListedOperations => "listed_operations",
            Self::End => "end",
        }
    }

    /// What is left out beyond it, for people.
    #[must_use]
    pub const fn items(self) -> &'static str {
        match self {
            Self::Communicators => "communicators of a process",
            Self::RanksPerCommunicator => "ranks that one process has in a communicator",
            Self::Resources => "ranks with a resource of their own",
            Self::ResourceAttributes => "resource attributes",
            Self::TextBytes => "ends of long texts",
            Self::Operations => "operations in flight",
            Self::OperationParts => "channels, proxy operations, steps and links of a process's operations",
            Self::ChannelsPerOperation => "kernel channels of one operation",
            Self::ProxiesPerOperation => "proxy operations of one operation",
            Self::VerdictsPerOperation => "verdicts on one operation",
            Self::Verdicts => "verdicts in one second",
            Self::LogRecords => "log records in one second",
            Self::Groups => "open groups",
            Self::CapturedOperations => "captured operations",
            Self::Graphs => "destroyed graphs",
            Self::Instances => "operations that wait for other ranks",
            Self::Findings => "verdicts in the list of what is wrong",
            Self::Stragglers => "operations of ranks whose lags are kept",
            Self::MetricRows => "ranks, functions and ways in metrics",
            Self::QueuePairs => "queue pairs",
            Self::Registrations => "memory registrations",
            Self::Failovers => "connections that fail over",
            Self::ListedOperations => "operations of the summary's list",
            Self::End => "samples and operations at the end",
        }
    }
}

/// A limit that holds for each process, and for all processes together.
///
/// With many processes each one's part of the whole is what bounds it. So processes do not compete for the whole.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shared {
    /// Of one process.
    pub process: usize,
    /// Of all processes, dealt to them in equal parts. A process has at least a 64th of its own limit.
    pub all: usize,
}

impl Shared {
    /// What one of `processes` may have.
    #[must_use]
    pub fn of_one(self, processes: usize) -> usize {
        let part = self.all / processes.max(1);
        part.max(self.process / 64).max(1).min(self.process)
    }
}

/// What bounds the collector's memory, work and patience.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// [`Limit::Communicators`]: as many as the library's table has at once, and those that were destroyed a moment ago.
    pub communicators: usize,
    /// [`Limit::RanksPerCommunicator`]: as many as the library's table has.
    pub ranks_per_communicator: usize,
    /// [`Limit::Resources`].
    pub resources: usize,
    /// [`Limit::ResourceAttributes`].
    pub resource_attributes: usize,
    /// [`Limit::TextBytes`].
    pub text_bytes: usize,
    /// [`Limit::Operations`].
    pub operations: Shared,
    /// [`Limit::OperationParts`].
    pub operation_parts: Shared,
    /// [`Limit::ChannelsPerOperation`]: as many as NCCL has.
    pub channels_per_operation: usize,
    /// [`Limit::ProxiesPerOperation`].
    pub proxies_per_operation: usize,
    /// [`Limit::VerdictsPerOperation`].
    pub verdicts_per_operation: usize,
    /// [`Limit::Verdicts`].
    pub verdicts: usize,
    /// [`Limit::LogRecords`].
    pub log_records: usize,
    /// [`Limit::Groups`].
    pub groups: usize,
    /// [`Limit::CapturedOperations`]: as many as the library's table has.
    pub captured_operations: usize,
    /// [`Limit::Graphs`].
    pub graphs: usize,
    /// [`Limit::Instances`].
    pub instances: Shared,
    /// [`Limit::Findings`].
    pub findings: Shared,
    /// [`Limit::Stragglers`].
    pub stragglers: Shared,
    /// [`Limit::MetricRows`].
    pub metric_rows: Shared,
    /// [`Limit::QueuePairs`].
    pub queue_pairs: Shared,
    /// [`Limit::Registrations`].
    pub registrations: Shared,
    /// [`Limit::Failovers`].
    pub failovers: Shared,
    /// [`Limit::ListedOperations`]: 0 where no summary is asked for.
    pub listed_operations: usize,
    /// How long a completed operation waits for the rest of its records after the last one, nanoseconds.
    pub linger_ns: u64,
    /// How long an instance waits for the other watched ranks.
    pub instance_linger_ns: u64,
    /// How far a process that is read slowly may hold up the instances of others, nanoseconds.
    pub delay_ns: u64,
}

impl Limits {
    /// Operations that a summary lists, all processes together.
    pub const LISTED_OPERATIONS: usize = 200_000;

    /// What a limit is for one process, and for all together; `None` where there is none.
    #[must_use]
    pub const fn figures(&self, limit: Limit) -> (Option<usize>, Option<usize>) {
        match limit {
            Limit::Communicators => (Some(self.communicators), None),
            Limit::RanksPerCommunicator => (Some(self.ranks_per_communicator), None),
            Limit::Resources => (Some(self.resources), None),
            Limit::ResourceAttributes => (Some(self.resource_attributes), None),
            Limit::TextBytes => (Some(self.text_bytes), None),
            Limit::Operations => self.operations.figures(),
            Limit::OperationParts => self.operation_parts.figures(),
            Limit::ChannelsPerOperation => (Some(self.channels_per_operation), None),
            Limit::ProxiesPerOperation => (Some(self.proxies_per_operation), None),
            Limit::VerdictsPerOperation => (Some(self.verdicts_per_operation), None),
            Limit::Verdicts => (Some(self.verdicts), None),
            Limit::LogRecords => (Some(self.log_records), None),
            Limit::Groups => (Some(self.groups), None),
            Limit::CapturedOperations => (Some(self.captured_operations), None),
            Limit::Graphs => (Some(self.graphs), None),
            Limit::Instances => self.instances.figures(),
            Limit::Findings => self.findings.figures(),
            Limit::Stragglers => self.stragglers.figures(),
            Limit::MetricRows => self.metric_rows.figures(),
            Limit::QueuePairs => self.queue_pairs.figures(),
            Limit::Registrations => self.registrations.figures(),
            Limit::Failovers => self.failovers.figures(),
            Limit::ListedOperations => (None, Some(Self::LISTED_OPERATIONS)),
            Limit::End => (None, None),
        }
    }
}

impl Default for Limits {
    fn default() -> Self {
        let shared = |process, all| Shared { process, all };
        Self {
            communicators: 4096,
            ranks_per_communicator: 1024,
            resources: 256,
            resource_attributes: 64,
            text_bytes: 4096,
            operations: shared(16_384, 131_072),
            operation_parts: shared(65_536, 262_144),
            channels_per_operation: 64,
            proxies_per_operation: 4096,
            verdicts_per_operation: 16,
            verdicts: 128,
            log_records: 2048,
            groups: 4096,
            captured_operations: 32_768,
            graphs: 1024,
            instances: shared(16_384, 65_536),
            findings: shared(1024, 16_384),
            stragglers: shared(4096, 65_536),
            metric_rows: shared(1024, 8192),
            queue_pairs: shared(16_384, 65_536),
            registrations: shared(16_384, 65_536),
            failovers: shared(4096, 16_384),
            listed_operations: 0,
            linger_ns: 500_000_000,
            instance_linger_ns: 2_000_000_000,
            delay_ns: 100_000_000,
        }
    }
}

impl Shared {
    const fn figures(self) -> (Option<usize>, Option<usize>) {
        (Some(self.process), Some(self.all))
    }
}

/// What was left out, by limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeftOut([u64; Limit::ALL.len()]);

impl LeftOut {
    pub(crate) fn count(&mut self, limit: Limit) {
        self.add(limit, 1);
    }

    pub(crate) fn add(&mut self, limit: Limit, count: u64) {
        let sum = &mut self.0[limit as usize];
        *sum = sum.saturating_add(count);
    }

    pub(crate) fn add_all(&mut self, other: &Self) {
        for limit in Limit::ALL {
            self.add(*limit, other.of(*limit));
        }
    }

    /// How much was left out at one limit.
    #[must_use]
    pub fn of(&self, limit: Limit) -> u64 {
        self.0[limit as usize]
    }

    /// The limits at which something was left out, and how much.
    pub fn iter(&self) -> impl Iterator<Item = (Limit, u64)> {
        Limit::ALL
            .iter()
            .map(|limit| (*limit, self.of(*limit)))
            .filter(|(_, count)| *count > 0)
    }

    /// The same by the limits' names.
    #[must_use]
    pub fn by_name(&self) -> BTreeMap<&'static str, u64> {
        self.iter().map(|(limit, count)| (limit.name(), count)).collect()
    }
}

/// How many of something there were in the second that began with the first of them.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct InSecond {
    since_ns: u64,
    count: usize,
}

impl InSecond {
    /// Whether there is room for one more at `now_ns`. Counts it if there is.
    pub(crate) fn has_room(&mut self, now_ns: u64, most: usize) -> bool {
        if self.count == 0 || now_ns.saturating_sub(self.since_ns) >= 1_000_000_000 {
            (self.since_ns, self.count) = (now_ns, 0);
        }
        let has = self.count < most;
        self.count += usize::from(has);
        has
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = include_str!("../../docs/src/limits.md");

    /// A number as the documentation writes it.
    fn written(number: usize) -> String {
        let digits = number.to_string();
        if digits.len() < 5 {
            return digits;
        }
        let mut text = String::new();
        for (at, digit) in digits.chars().enumerate() {
            if at > 0 && (digits.len() - at).is_multiple_of(3) {
                text.push(',');
            }
            text.push(digit);
        }
        text
    }

    #[test]
    fn the_table_says_what_holds() {
        let limits = Limits::default();
        let row = |name: &str| {
            let begin = format!("| `{name}` |");
            let mut rows = PAGE.lines().filter(|line| line.starts_with(&begin));
            let row = rows.next().unwrap_or_else(|| panic!("no row for {name}"));
            assert!(rows.next().is_none(), "two rows for {name}");
            row.split('|')
                .map(str::trim)
                .map(str::to_owned)
                .collect::<Vec<_>>()
        };
        for limit in Limit::ALL {
            let row = row(limit.name());
            let (process, all) = limits.figures(*limit);
            let said = |figure: Option<usize>| figure.map_or_else(|| "–".to_owned(), written);
            assert_eq!(
                [&row[3], &row[4]],
                [&said(process), &said(all)],
                "{}: what one process may have, and all",
                limit.name()
            );
        }
    }

    #[test]
    fn names_and_places_are_each_limits_own() {
        let names: std::collections::BTreeSet<_> = Limit::ALL.iter().map(|limit| limit.name()).collect();
        assert_eq!(names.len(), Limit::ALL.len());
        for (at, limit) in Limit::ALL.iter().enumerate() {
            assert_eq!(*limit as usize, at, "{}", limit.name());
        }
    }

    #[test]
    fn many_processes_share_and_each_keeps_something() {
        let shared = Shared {
            process: 640,
            all: 1000,
        };
        assert_eq!(
            [0, 1, 2, 10].map(|processes| shared.of_one(processes)),
            [640, 640, 500, 100]
        );
        assert_eq!(shared.of_one(100_000), 10);
    }

    #[test]
    fn a_second_has_room_for_so_many() {
        let mut seen = InSecond::default();
        let second = 1_000_000_000;
        let admitted = |seen: &mut InSecond, ns| (0..10).filter(|_| seen.has_room(ns, 4)).count();
        assert_eq!(admitted(&mut seen, 5), 4);
        assert_eq!(admitted(&mut seen, 4 + second), 0);
        assert_eq!(admitted(&mut seen, 5 + second), 4);
        // Whatever comes in another order.
        assert_eq!(admitted(&mut seen, 7), 0);
    }
}
