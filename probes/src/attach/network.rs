//! The programs on the kernel's RDMA stack: attached once, for all processes.

use std::{
    io,
    os::fd::{AsFd as _, OwnedFd},
};

use aya::{
    Ebpf, Pod,
    maps::{Array, MapData, PerCpuArray},
    programs::{KProbe, RawTracePoint},
};
use ringsight_records::network::{NetworkTally, SITES, SitePlan};

use super::{Probes, chain, map_error};
use crate::{
    error::Unavailable,
    network::{Network, Programs, SiteState},
};

#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct PodPlan(SitePlan);
// SAFETY: integers whose sizes leave no padding: 4 bytes, then chains of 4 single bytes and 4 words each.
unsafe impl Pod for PodPlan {}

#[derive(Clone, Copy)]
#[repr(transparent)]
pub(super) struct PodNetworkTally(NetworkTally);
// SAFETY: 64-bit integers only, no padding.
unsafe impl Pod for PodNetworkTally {}

/// What the programs on the kernel's RDMA stack share.
pub(super) struct NetworkMaps {
    pub(super) plans: Array<MapData, PodPlan>,
    pub(super) scope: Array<MapData, u32>,
    pub(super) tally: PerCpuArray<MapData, PodNetworkTally>,
    /// Held for its descriptor.
    pub(super) _pending: MapData,
}

impl Probes {
    /// Attaches to the kernel's RDMA stack; what is passed in the context of a process is recorded of watched ones, or of `everybody`.
    /// What a site lacks is in its state.
    ///
    /// # Errors
    /// If not even the programs can be loaded.
    pub(crate) fn attach_network(&mut self, everybody: bool) -> Result<(), Unavailable> {
        for name in ["network_event", "network_entry", "network_return"] {
            let program: &mut KProbe = self.network_program(name)?;
            program.load().map_err(|error| map_error(chain(&error)))?;
        }
        let maps = &mut self.network_maps;
        maps.scope
            .set(0, u32::from(everybody), 0)
            .map_err(|error| map_error(chain(&error)))?;
        let fd = |ebpf: &Ebpf, name| -> Result<OwnedFd, Unavailable> {
            let program = ebpf.program(name).ok_or_else(|| map_error(name))?;
            let fd = program.fd().map_err(|error| map_error(chain(&error)))?;
            fd.as_fd().try_clone_to_owned().map_err(map_error)
        };
        let (event, entry, returned) = (
            fd(&self.ebpf, "network_event")?,
            fd(&self.ebpf, "network_entry")?,
            fd(&self.ebpf, "network_return")?,
        );
        let programs = Programs {
            event: event.as_fd(),
            entry: entry.as_fd(),
            returned: returned.as_fd(),
        };
        let ebpf = &mut self.ebpf;
        let network = Network::attach(
            &programs,
            |site, plan| {
                maps.plans
                    .set(site, PodPlan(plan), 0)
                    .map_err(|error| io::Error::other(chain(&error)))
            },
            || {
                let program = ebpf
                    .program_mut("network_command")
                    .ok_or("no program network_command in the object")?;
                let program: &mut RawTracePoint = program
                    .try_into()
                    .map_err(|error: aya::programs::ProgramError| chain(&error))?;
                program.load().map_err(|error| chain(&error))?;
                program
                    .attach("mlx5_cmd")
                    .map(drop)
                    .map_err(|error| chain(&error))
            },
        );
        self.network = Some(network);
        Ok(())
    }

    fn network_program(&mut self, name: &str) -> Result<&mut KProbe, Unavailable> {
        self.ebpf
            .program_mut(name)
            .ok_or_else(|| map_error(format!("no program {name} in the object")))?
            .try_into()
            .map_err(|error: aya::programs::ProgramError| map_error(chain(&error)))
    }

    /// What became of the sites in the kernel's RDMA stack; empty if they were not asked for.
    pub(crate) fn network_states(&self) -> &[SiteState] {
        self.network.as_ref().map_or(&[], Network::states)
    }

    /// What was seen of the kernel's RDMA stack so far, over all CPUs.
    pub(crate) fn network_tally(&self) -> NetworkTally {
        let mut sum = NetworkTally {
            hits: [0; SITES],
            lost: [0; SITES],
        };
        if let Ok(values) = self.network_maps.tally.get(&0, 0) {
            for PodNetworkTally(tally) in values.iter() {
                for site in 0..SITES {
                    sum.hits[site] += tally.hits[site];
                    sum.lost[site] += tally.lost[site];
                }
            }
        }
        sum
    }
}
