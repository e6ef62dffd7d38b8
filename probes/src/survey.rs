//! What is found out about a process before it is watched.

use std::{io, os::fd::OwnedFd, sync::Arc};

use crate::{
    ask::Question,
    error::AttachError,
    limits::{CpuBudget, LeftOut, SEARCH_TIME},
    pages::{Access, Mapped, Search},
    process::{self, Program, Said},
    procfs::ProcessDirectory,
    target::{self, Flavour, Library},
};

/// A process, and what it and the kernel say of it.
#[derive(Debug)]
pub(crate) struct Survey {
    pub(crate) directory: Arc<ProcessDirectory>,
    /// When it started, clock ticks since boot.
    pub(crate) started: u64,
    pub(crate) pidfd: OwnedFd,
    pub(crate) program: Program,
    pub(crate) library: Library,
    pub(crate) said: Said,
    /// Its shared pages, if the library has any yet, and how far its descriptors have been looked through for them.
    pub(crate) pages: Option<Mapped>,
    pub(crate) search: Search,
}

/// A survey, and what was left out of it.
pub(crate) type Surveyed = (Result<Survey, AttachError>, LeftOut);

impl Survey {
    /// Has a thread look at the process that `pid` is, or is a thread of. `variable` is a variable of its environment that the session wants.
    pub(crate) fn begin(pid: u32, variable: Option<&str>) -> io::Result<Question<Surveyed>> {
        let variable = variable.map(str::to_owned);
        Question::ask(move || Self::of(pid, variable.as_deref()))
    }

    fn of(pid: u32, variable: Option<&str>) -> Surveyed {
        let mut left_out = LeftOut::default();
        let survey = Self::make(pid, variable, &mut left_out);
        (survey, left_out)
    }

    fn make(pid: u32, variable: Option<&str>, left_out: &mut LeftOut) -> Result<Self, AttachError> {
        let directory = process::directory_of(pid)?;
        let pid = directory.pid();
        let started = directory.start_time().ok_or(AttachError::Gone { pid })?;
        let pidfd = process::pidfd(pid).map_err(|error| target::process_error(pid, "pidfd", &error))?;
        // Before the library is looked for: another program from here on is noticed.
        let program = Program::of(&directory).map_err(|error| target::process_error(pid, "maps", &error))?;
        let library = target::find_within(&directory, CpuBudget::of(SEARCH_TIME), left_out)?;
        let said = Said::by(&directory, variable, left_out);
        let mut search = Search::default();
        let pages = match library.flavour {
            Flavour::Instrumented => Mapped::find(&directory, &mut search, Access::Lease)?,
            Flavour::Stock => None,
        };
        // From here on, this is known without asking.
        let _ = directory.pid_namespace();
        Ok(Self {
            directory: Arc::new(directory),
            started,
            pidfd,
            program,
            library,
            said,
            pages,
            search,
        })
    }
}
