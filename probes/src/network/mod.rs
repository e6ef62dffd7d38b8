//! Probes in the kernel's RDMA stack: queue pairs, memory registrations, events of devices and ports, and what mlx5 drivers learn from
//! their firmware.
//!
//! [`TABLE`] says what is probed. A site whose module is not loaded, or whose function or fields the running kernel does not have, is
//! left out and reported as such; the others work.

mod btf;
mod event;
mod link;
mod path;
mod site;

use std::{
    io,
    os::fd::{BorrowedFd, OwnedFd},
    path::Path,
    sync::Arc,
};

use ringsight_records::network::{COMMAND_SITE, NetworkRecord, SitePlan};

use btf::Btf;
pub use event::{NetworkEvent, NetworkSample, QpState, VerbsEvent};
pub use site::{Site, TABLE, Tells};

/// What became of a site.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SiteState {
    /// What it tells.
    pub tells: Tells,
    /// `module:function`, or the tracepoint.
    pub name: String,
    /// Why it is not attached; `None` if it is.
    pub absent: Option<String>,
}

/// Whether this kernel has an RDMA stack to probe.
#[must_use]
pub fn is_present() -> bool {
    loaded("ib_core")
}

fn loaded(module: &str) -> bool {
    // What is built in has a folder too, if it has parameters; its type information is the kernel's own.
    Path::new("/sys/module").join(module).is_dir()
}

/// The programs' descriptors.
pub(crate) struct Programs<'a> {
    /// Records at the entry.
    pub(crate) event: BorrowedFd<'a>,
    /// Keeps the entry until the return.
    pub(crate) entry: BorrowedFd<'a>,
    /// Records at the return.
    pub(crate) returned: BorrowedFd<'a>,
}

/// Attached sites.
#[derive(Debug)]
pub(crate) struct Network {
    states: Vec<SiteState>,
    _links: Vec<[OwnedFd; 2]>,
}

impl Network {
    /// Attaches to every site that this kernel has. `set` puts a plan into the programs' table, before anything is attached to it;
    /// `command` attaches the tracepoint.
    pub(crate) fn attach(
        programs: &Programs<'_>,
        mut set: impl FnMut(u32, SitePlan) -> io::Result<()>,
        command: impl FnOnce() -> Result<(), String>,
    ) -> Self {
        let mut states = Vec::new();
        let mut links = Vec::new();
        let mut types: Vec<(&str, Result<Btf, String>)> = Vec::new();
        let mut kernel = None;
        for (number, site) in TABLE.iter().enumerate() {
            let name = format!("{}:{}", site.module, site.functions[0]);
            let mut attach = |links: &mut Vec<_>| -> Result<String, String> {
                if !loaded(site.module) {
                    return Err(format!("the module {} is not loaded", site.module));
                }
                let known = types.iter().position(|(module, _)| *module == site.module);
                let known = known.unwrap_or_else(|| {
                    types.push((site.module, module_types(site.module, &mut kernel)));
                    types.len() - 1
                });
                let types = types[known].1.as_ref().map_err(Clone::clone)?;
                let (function, plan) = site::plan(site, types)?;
                let told = |error: io::Error| format!("{function} of {}: {error}", site.module);
                set(number as u32, plan).map_err(told)?;
                let mut link = |program, returns| {
                    link::link(program, site.module, function, returns, number as u64)
                        .map(|pair| links.push(pair))
                        .map_err(told)
                };
                if site.returns {
                    // Returns first: an entry whose return is not probed yet would stay pending.
                    link(programs.returned, true)?;
                    link(programs.entry, false)?;
                } else {
                    link(programs.event, false)?;
                }
                Ok(format!("{}:{function}", site.module))
            };
            let before = links.len();
            let attached = attach(&mut links);
            if attached.is_err() {
                links.truncate(before);
            }
            states.push(SiteState {
                tells: site.tells,
                name: attached.clone().unwrap_or(name),
                absent: attached.err(),
            });
        }
        let attached = if loaded("mlx5_core") {
            set(COMMAND_SITE as u32, site::command_plan())
                .map_err(|error| error.to_string())
                .and_then(|()| command())
        } else {
            Err("the module mlx5_core is not loaded".to_owned())
        };
        states.push(SiteState {
            tells: Tells::Mlx5CommandRefused,
            name: "mlx5:mlx5_cmd".to_owned(),
            absent: attached.err(),
        });
        Self {
            states,
            _links: links,
        }
    }

    pub(crate) fn states(&self) -> &[SiteState] {
        &self.states
    }
}

/// Type information of a module, on top of the kernel's, which is read once.
fn module_types(module: &str, kernel: &mut Option<Arc<Btf>>) -> Result<Btf, String> {
    let problem = |what: &str, error: io::Error| format!("no type information of {what}: {error}");
    let base = match kernel {
        Some(base) => Arc::clone(base),
        None => Arc::clone(kernel.insert(Arc::new(
            Btf::of("vmlinux", None).map_err(|error| problem("the kernel", error))?,
        ))),
    };
    Btf::of(module, Some(base)).map_err(|error| problem(module, error))
}

/// What a record says; `None` if it is of no site.
pub(crate) fn decode(record: &NetworkRecord, pid: Option<u32>) -> Option<NetworkSample> {
    let tells = if u64::from(record.site) == COMMAND_SITE {
        Tells::Mlx5CommandRefused
    } else {
        TABLE.get(usize::from(record.site))?.tells
    };
    Some(NetworkSample {
        pid,
        time_ns: record.time_ns,
        duration_ns: record.duration_ns.into(),
        result: record.result,
        device: event::name(&record.device),
        event: NetworkEvent::of(tells, record),
    })
}
