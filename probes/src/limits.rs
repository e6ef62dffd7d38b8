//! Limits on what one target can make this crate read or wait for, and the counts of what was left out past them.
//!
//! A target that stays within them is seen whole. Past one, the rest of the work goes on and [`LeftOut`] counts what was left out.

use std::time::Duration;

/// Processor time to find the library of a target among the files that it maps, its version included. Past it, the files that are left are
/// not looked at.
pub const SEARCH_TIME: Duration = Duration::from_millis(80);
/// Time, by the clock, for the kernel and the disks to answer what is asked about a target before it is watched. The records of other
/// targets are taken meanwhile. Past it, the target is not watched.
pub const ANSWER_TIME: Duration = Duration::from_secs(1);
/// Time, by the clock, after which the next target is asked about, whether or not this one is answered.
pub const TURN_TIME: Duration = Duration::from_millis(50);
/// Time, by the clock, to check a reader that a target's lease names. Past it, nobody is named.
pub const CHECK_TIME: Duration = Duration::from_millis(20);
/// Questions about readers that are open at a time. Past them, nothing is asked: the answer is as if the time were over. About a process
/// that is only looked at, one question is open at a time.
pub const UNANSWERED: usize = 8;
/// Bytes of `/proc/PID/maps`, about 100 a mapping. Past them, mappings are not seen.
pub const MAPS_BYTES: usize = 16 << 20;
/// Files that a target maps as code. Past them, files are not looked at.
pub const MAPPED_FILES: usize = 4096;
/// Bytes of any other text of the kernel about a target (`stat`, `status`, `comm`). The longest one has 65,536 groups of a user. Past
/// them, the text is not read.
pub const TEXT_BYTES: usize = 1 << 20;
/// Bytes of the environment that a target was started with. Past them, variables are not seen.
pub const ENVIRONMENT_BYTES: usize = 2 << 20;
/// Bytes of one variable's value. Past them, the value is cut.
pub const VARIABLE_BYTES: usize = 16 << 10;
/// Descriptors of a target that one look for its pages goes through. The next look, 50 ms later, goes on behind them.
pub const DESCRIPTORS: usize = 4096;
/// Processor time to go through all descriptors of a target that is only looked at (`list`, `snapshot`). Past it, it has no pages.
pub const DESCRIPTORS_TIME: Duration = Duration::from_secs(1);
/// Records that one poll takes from the rings of all targets, dealt to them in equal parts. Past them, the rest waits for the next poll, which
/// is due at once: [`Session::is_behind`](crate::Session::is_behind).
pub const POLL_RECORDS: usize = 8192;
/// Records of them that one target has at least.
pub const POLL_RECORDS_EACH: usize = 128;
/// Events that one poll takes from the kernel's ring. Past them, the rest waits for the next poll.
pub const POLL_EVENTS: usize = 8192;
/// Time that a target which has ended is read on, as others may hold its pages and go on writing. Past it, the rest is counted as lost.
pub const END_TIME: Duration = Duration::from_secs(1);
/// Processor time that one poll spends on the records in one target's ring, and on those in the kernel's. Past it, the rest waits for the next
/// poll.
pub const POLL_TIME: Duration = Duration::from_millis(20);
/// Processor time that letting go of targets spends on what is left in their rings. Past it, the rest is counted as lost.
pub const LET_GO_TIME: Duration = Duration::from_millis(100);
/// Samples that letting go of targets makes of what is left. Past them, the rest is counted as lost.
pub const LET_GO_SAMPLES: usize = 1 << 18;
/// Records of one target that came through probes and wait until its ring is drained. Past them, records are counted as lost.
pub const HELD_RECORDS: usize = 1 << 16;
/// Places of a target's tables of communicators and of connections that it is followed by, four times what its library has. Past them, entries
/// are not seen.
pub const TABLE_ENTRIES: usize = 4096;
/// Verdicts of a target whose details one poll looks up: more than its pages keep. Past them, a verdict comes without details.
pub const VERDICTS_A_POLL: usize = 64;

/// Sections of a library file. Past them, the file is not examined.
pub const ELF_SECTIONS: usize = 1024;
/// Segments of a library file. Past them, the file is not examined.
pub const ELF_SEGMENTS: usize = 256;
/// Symbols that are gone through one by one, where a file has no hash table. Past them, symbols are not seen.
pub const ELF_SYMBOLS: usize = 1 << 20;
/// Symbols of one chain of a hash table. Past them, the name counts as missing.
pub const ELF_CHAIN: usize = 1024;
/// Bytes that are read of a file for its symbols. Past them, the file is not examined any further.
pub const ELF_BYTES: usize = 64 << 20;
/// Bytes of a build id. Past them, the file has none.
pub const BUILD_ID_BYTES: usize = 64;
/// Bytes of constants that are searched for the library's version. Past them, the version is not known.
pub const CONSTANTS_BYTES: usize = 64 << 20;

/// A limit that was reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{what} ({limit} {unit} at most)", what = self.what(), limit = self.bound(), unit = self.unit())]
pub enum Limit {
    /// [`SEARCH_TIME`]
    SearchTime,
    /// [`ANSWER_TIME`]
    AnswerTime,
    /// [`MAPS_BYTES`]
    Maps,
    /// [`MAPPED_FILES`]
    MappedFiles,
    /// [`TEXT_BYTES`]
    Text,
    /// [`ENVIRONMENT_BYTES`]
    Environment,
    /// [`VARIABLE_BYTES`]
    Variable,
    /// [`DESCRIPTORS_TIME`]
    Descriptors,
    /// [`ELF_SECTIONS`]
    ElfSections,
    /// [`ELF_SEGMENTS`]
    ElfSegments,
    /// [`ELF_SYMBOLS`]
    ElfSymbols,
    /// [`ELF_CHAIN`]
    ElfChain,
    /// [`ELF_BYTES`]
    ElfBytes,
    /// [`BUILD_ID_BYTES`]
    BuildId,
    /// [`CONSTANTS_BYTES`]
    Constants,
}

impl Limit {
    /// Every limit, in the order of their numbers.
    pub const ALL: [Self; 15] = [
        Self::SearchTime,
        Self::AnswerTime,
        Self::Maps,
        Self::MappedFiles,
        Self::Text,
        Self::Environment,
        Self::Variable,
        Self::Descriptors,
        Self::ElfSections,
        Self::ElfSegments,
        Self::ElfSymbols,
        Self::ElfChain,
        Self::ElfBytes,
        Self::BuildId,
        Self::Constants,
    ];

    /// Name in metrics and in the documentation.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::SearchTime => "search_time",
            Self::AnswerTime => "answer_time",
            Self::Maps => "maps",
            Self::MappedFiles => "mapped_files",
            Self::Text => "text",
            Self::Environment => "environment",
            Self::Variable => "variable",
            Self::Descriptors => "descriptors",
            Self::ElfSections => "elf_sections",
            Self::ElfSegments => "elf_segments",
            Self::ElfSymbols => "elf_symbols",
            Self::ElfChain => "elf_chain",
            Self::ElfBytes => "elf_bytes",
            Self::BuildId => "build_id",
            Self::Constants => "constants",
        }
    }

    /// How much is within the limit, in units of [`Self::unit`].
    #[must_use]
    pub const fn bound(self) -> u64 {
        (match self {
            Self::SearchTime => SEARCH_TIME.as_millis() as usize,
            Self::AnswerTime => ANSWER_TIME.as_millis() as usize,
            Self::Maps => MAPS_BYTES,
            Self::MappedFiles => MAPPED_FILES,
            Self::Text => TEXT_BYTES,
            Self::Environment => ENVIRONMENT_BYTES,
            Self::Variable => VARIABLE_BYTES,
            Self::Descriptors => DESCRIPTORS_TIME.as_millis() as usize,
            Self::ElfSections => ELF_SECTIONS,
            Self::ElfSegments => ELF_SEGMENTS,
            Self::ElfSymbols => ELF_SYMBOLS,
            Self::ElfChain => ELF_CHAIN,
            Self::ElfBytes => ELF_BYTES,
            Self::BuildId => BUILD_ID_BYTES,
            Self::Constants => CONSTANTS_BYTES,
        }) as u64
    }

    /// What [`Self::bound`] counts.
    #[must_use]
    pub const fn unit(self) -> &'static str {
        match self {
            Self::SearchTime | Self::AnswerTime | Self::Descriptors => "ms",
            Self::MappedFiles => "files",
            Self::ElfSections => "sections",
            Self::ElfSegments => "segments",
            Self::ElfSymbols | Self::ElfChain => "symbols",
            _ => "bytes",
        }
    }

    const fn what(self) -> &'static str {
        match self {
            Self::SearchTime => "going through its files takes too long",
            Self::AnswerTime => "the kernel takes too long to answer about it",
            Self::Maps => "its list of mappings is too long",
            Self::MappedFiles => "it maps too many files",
            Self::Text => "a text of the kernel about it is too long",
            Self::Environment => "its environment is too long",
            Self::Variable => "a variable of its environment is too long",
            Self::Descriptors => "going through its descriptors takes too long",
            Self::ElfSections => "a file that it maps has too many sections",
            Self::ElfSegments => "a file that it maps has too many segments",
            Self::ElfSymbols => "a file that it maps has too many symbols without a hash table",
            Self::ElfChain => "a file that it maps has too long a chain in its hash table",
            Self::ElfBytes => "a file that it maps takes too much reading",
            Self::BuildId => "its library has too long a build id",
            Self::Constants => "its library has too many constants to search for a version",
        }
    }
}

/// What was left out of what targets showed, over all processes of a session.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LeftOut {
    reached: [u64; Limit::ALL.len()],
    /// Files that a target passed off as its shared pages: no memfd, or one that it could shrink.
    pub pages_refused: u64,
}

impl LeftOut {
    /// How often a limit was reached.
    #[must_use]
    pub const fn reached(&self, limit: Limit) -> u64 {
        self.reached[limit as usize]
    }

    /// Every limit that was reached, and how often.
    pub fn limits(&self) -> impl Iterator<Item = (Limit, u64)> + '_ {
        Limit::ALL
            .into_iter()
            .zip(self.reached)
            .filter(|(_, count)| *count > 0)
    }

    /// The counts above 0 by their names in metrics and in the documentation.
    pub fn by_name(&self) -> impl Iterator<Item = (&'static str, u64)> {
        let limits = self.limits().map(|(limit, count)| (limit.name(), count));
        limits.chain(Some(("pages_refused", self.pages_refused)).filter(|(_, count)| *count > 0))
    }

    pub(crate) fn count(&mut self, limit: Limit) {
        self.reached[limit as usize] += 1;
    }

    pub(crate) fn add(&mut self, other: &Self) {
        for (count, more) in self.reached.iter_mut().zip(other.reached) {
            *count += more;
        }
        self.pages_refused += other.pages_refused;
    }
}

/// Events between two looks at the clock.
pub(crate) const STRIDE: usize = 256;

/// Processor time of the calling thread that something may take. Unlike time by the clock, it goes on neither while a disk is read nor
/// while this thread is kept from running, so a busy machine or a small share of it fails no honest target.
#[derive(Clone, Copy, Debug)]
pub(crate) struct CpuBudget(Duration);

impl CpuBudget {
    /// So much from now on, for this thread.
    pub(crate) fn of(time: Duration) -> Self {
        Self(thread_time() + time)
    }

    /// Whether it is used up. For the thread that it was made by.
    pub(crate) fn is_spent(self) -> bool {
        thread_time() >= self.0
    }

    /// `Err` with `limit` once it is used up.
    pub(crate) fn check(self, limit: Limit) -> Result<(), Limit> {
        if self.is_spent() { Err(limit) } else { Ok(()) }
    }
}

/// Processor time of this thread so far.
fn thread_time() -> Duration {
    let time = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(time.tv_sec.unsigned_abs(), time.tv_nsec as u32)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The page has each limit's figure, in the unit that it is easiest to read in.
    #[test]
    fn the_table_says_what_holds() {
        let page = include_str!("../../docs/src/limits.md");
        for limit in Limit::ALL {
            let begin = format!("| `{}` |", limit.name());
            let rows: Vec<_> = page.lines().filter(|line| line.starts_with(&begin)).collect();
            let [row] = rows[..] else {
                panic!("{} rows for {}", rows.len(), limit.name());
            };
            let bound = limit.bound();
            let figure = match limit.unit() {
                "bytes" if bound.is_multiple_of(1 << 20) => format!("{} MiB", bound >> 20),
                "bytes" if bound.is_multiple_of(1 << 10) => format!("{} KiB", bound >> 10),
                "ms" if bound.is_multiple_of(1000) => format!("{} s", bound / 1000),
                unit => format!("{bound} {unit}"),
            };
            assert_eq!(row.split('|').nth(3).map(str::trim), Some(&*figure), "{row}");
        }
        assert!(page.contains("| `pages_refused` |"));
    }

    #[test]
    fn each_limit_has_its_place_and_its_words() {
        let mut left_out = LeftOut::default();
        for (index, limit) in Limit::ALL.into_iter().enumerate() {
            assert_eq!(limit as usize, index, "{limit}");
            left_out.count(limit);
            assert!(limit.bound() > 0);
        }
        assert_eq!(left_out.limits().count(), Limit::ALL.len());
        assert_eq!(
            Limit::SearchTime.to_string(),
            "going through its files takes too long (80 ms at most)"
        );
    }
}
