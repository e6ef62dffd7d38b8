//! The host side of NCCL's device API: what a program asks before it launches kernels that communicate themselves.
//!
//! Such kernels read NVIDIA's own structs, so no device communicator is made here: [`ncclDevCommCreate`] says so. What
//! only computes (teams, ranks within them, sizes of resources) gives NCCL 2.30.7's results.

#![expect(non_snake_case, reason = "NCCL's names")]

use std::ffi::{c_int, c_void};

use ringsight_comm_base::{
    error::{Error, Result, ResultCode},
    release,
};

use super::{arguments::out, call};
use crate::communicator::{self, Communicator, Handle};

/// `ncclTeam_t`: the ranks `(r - rank) * stride` away from this one, for `r` in `0..ranks`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C)]
pub struct Team {
    /// Ranks of the team.
    pub ranks: c_int,
    /// This rank in the team.
    pub rank: c_int,
    /// Distance of neighbours, in ranks of the communicator.
    pub stride: c_int,
}

impl Team {
    /// What NCCL returns where a team cannot be told.
    const NONE: Self = Self {
        ranks: 0,
        rank: 0,
        stride: 0,
    };

    /// `rank` of this team, told from where this rank has number `own`. Wraps on numbers that no team has.
    fn locate(self, own: c_int, rank: c_int) -> c_int {
        own.wrapping_add(rank.wrapping_sub(self.rank).wrapping_mul(self.stride))
    }
}

/// `ncclDevResourceRequirements_t`: an element of the list that `ncclDevCommCreate` is given.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ResourceRequirements {
    /// Next element.
    pub next: *mut ResourceRequirements,
    /// Bytes of a buffer on each rank.
    pub buffer_size: usize,
    /// Its alignment.
    pub buffer_align: usize,
    /// Receives the buffer's handle.
    pub out_buffer_handle: *mut u32,
    /// Signals of the network.
    pub gin_signal_count: c_int,
    /// Counters of the network.
    pub gin_counter_count: c_int,
    /// Receives the first signal.
    pub out_gin_signal_start: *mut u32,
    /// Receives the first counter.
    pub out_gin_counter_start: *mut u32,
}

impl ResourceRequirements {
    const NONE: Self = Self {
        next: std::ptr::null_mut(),
        buffer_size: 0,
        buffer_align: 0,
        out_buffer_handle: std::ptr::null_mut(),
        gin_signal_count: 0,
        gin_counter_count: 0,
        out_gin_signal_start: std::ptr::null_mut(),
        out_gin_counter_start: std::ptr::null_mut(),
    };
}

/// `ncclLLA2AHandle_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LlA2aHandle {
    /// Of the buffer.
    pub buffer: u32,
    /// Slots of a block and epoch.
    pub slots: u32,
}

/// `ncclLsaBarrierHandle_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct LsaBarrierHandle {
    /// Of the buffer.
    pub buffer: u32,
    /// Barriers.
    pub barriers: c_int,
}

/// `ncclGinBarrierHandle_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct GinBarrierHandle {
    /// First signal.
    pub signal: u32,
    /// Of the buffer.
    pub buffer: u32,
}

const _: () = assert!(size_of::<Team>() == 12 && size_of::<ResourceRequirements>() == 56);
const _: () = assert!(size_of::<LlA2aHandle>() == 8 && size_of::<LsaBarrierHandle>() == 8);
const _: () = assert!(size_of::<GinBarrierHandle>() == 8);

/// Bytes of a line of the low-latency all-to-all: 8 of data, each word beside its flag.
const LINE_BYTES: usize = 16;
/// `NCCL_API_MAGIC`, in the structs that programs fill.
const API_MAGIC: u32 = super::types::CONFIG_MAGIC;

/// `ncclCommProperties_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Properties {
    /// Bytes of the caller's struct.
    pub size: usize,
    /// `NCCL_API_MAGIC`.
    pub magic: u32,
    /// The version that the caller was built against.
    pub version: u32,
    /// This rank.
    pub rank: c_int,
    /// Ranks.
    pub ranks: c_int,
    /// Device number.
    pub device: c_int,
    /// The same: the library does not ask NVML.
    pub nvml_device: c_int,
    /// Whether device communicators can be made.
    pub device_api: bool,
    /// Whether the device reaches several ranks' memory by one address.
    pub multimem: bool,
    /// How kernels reach the network; 0 for not at all.
    pub gin_type: c_int,
    /// Teams of ranks that reach each other's memory; since 2.29.4.
    pub lsa_teams: c_int,
    /// Whether one-sided operations from the host are served; since 2.29.4.
    pub host_rma: bool,
    /// As `gin_type`, between ranks of a rail; since 2.29.4.
    pub railed_gin_type: c_int,
}

const _: () = assert!(size_of::<Properties>() == 56);
const _: () = assert!(std::mem::offset_of!(Properties, gin_type) == 36);
const _: () = assert!(std::mem::offset_of!(Properties, railed_gin_type) == 48);

/// A struct of a version whose layout is not known here.
fn other_version(name: &str, version: u32) -> Error {
    let dotted = |version: u32| format!("{}.{}.{}", version / 10_000, version / 100 % 100, version % 100);
    Error::usage(format!(
        "{name}.version is that of NCCL {}; this library has NCCL {}, and knows this struct from 2.29 on",
        dotted(version),
        dotted(release::LIBRARY_VERSION)
    ))
}

fn without_cft(function: &str) -> Error {
    Error::usage(format!(
        "{function}: counted fabric transfers (CFT) are not served"
    ))
}

fn without_gin(function: &str) -> Error {
    Error::usage(format!(
        "{function}: kernels that use the network (GIN) are not served: use NVIDIA's NCCL for them"
    ))
}

/// As [`call`], for functions that return a value: `failed` where there is none.
fn value<T>(function: &str, failed: T, body: impl FnOnce() -> Result<T>) -> T {
    let mut value = failed;
    call(function, || {
        value = body()?;
        Ok(())
    });
    value
}

fn world(comm: &Communicator) -> Team {
    Team {
        ranks: comm.ranks as c_int,
        rank: comm.rank as c_int,
        stride: 1,
    }
}

/// The ranks of the node, if every node has as many and each node's follow each other; else this rank alone. All ranks
/// come to the same size, on which the rails depend.
pub(super) fn lsa(comm: &Communicator) -> Team {
    let topology = &comm.topology;
    let size = topology.local_ranks().len() as u32;
    let even = comm.ranks.is_multiple_of(size)
        && topology.nodes() == comm.ranks / size
        && (0..comm.ranks).all(|rank| topology.node_of(rank) == rank / size);
    let (ranks, rank) = if even { (size, comm.rank % size) } else { (1, 0) };
    Team {
        ranks: ranks as c_int,
        rank: rank as c_int,
        stride: 1,
    }
}

fn rail(comm: &Communicator) -> Team {
    let (world, lsa) = (world(comm), lsa(comm));
    Team {
        ranks: world.ranks / lsa.ranks,
        rank: world.rank / lsa.ranks,
        stride: lsa.ranks,
    }
}

/// A number of things.
fn number(name: &str, value: c_int) -> Result<usize> {
    usize::try_from(value).map_err(|_| Error::argument(format!("{name} ({value}) is negative")))
}

/// Bytes that fit NCCL's own arithmetic in `int`.
fn bytes(what: &str, bytes: Option<usize>) -> Result<usize> {
    bytes
        .filter(|bytes| c_int::try_from(*bytes).is_ok())
        .ok_or_else(|| Error::argument(format!("{what} need more than 2 GiB")))
}

fn lla2a(blocks: c_int, slots: c_int) -> Result<usize> {
    let (blocks, slots) = (number("nBlocks", blocks)?, number("nSlots", slots)?);
    // Per block a line of state and two epochs of slots.
    let lines = slots
        .checked_mul(2)
        .and_then(|lines| lines.checked_add(1)?.checked_mul(blocks));
    bytes(
        "nBlocks and nSlots",
        lines.and_then(|lines| lines.checked_mul(LINE_BYTES)),
    )
}

macro_rules! functions {
    ($(
        $(#[$meta:meta])*
        fn $name:ident, $twin:ident($($argument:ident: $type:ty),* $(,)?) -> $result:ty = $failed:expr; $body:block
    )+) => {$(
        mod $name {
            use super::*;

            pub(super) fn body($($argument: $type),*) -> $result {
                value(stringify!($name), $failed, || $body)
            }
        }

        $(#[$meta])*
        ///
        /// # Safety
        /// Pointers are null or point to what NCCL's documentation says.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> $result {
            $name::body($($argument),*)
        }

        #[doc = concat!("[`", stringify!($name), "`] under its profiling name.")]
        ///
        /// # Safety
        #[doc = concat!("As [`", stringify!($name), "`].")]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $twin($($argument: $type),*) -> $result {
            $name::body($($argument),*)
        }
    )+};
}

macro_rules! entries {
    ($(
        $(#[$meta:meta])*
        fn $name:ident, $twin:ident($($argument:ident: $type:ty),* $(,)?) $body:block
    )+) => {$( $crate::abi::entry! { $(#[$meta])* $name, $twin($($argument: $type),*) $body } )+};
}

functions! {
    /// `{0, 0, 0}`: there are no teams for counted fabric transfers (CFT; NCCL 2.32).
    fn ncclTeamCft, pncclTeamCft(comm: Handle, _mode: c_int) -> Team = Team::NONE; {
        communicator::lookup(comm)?;
        Err(without_cft("ncclTeamCft"))
    }

    /// `{0, 0, 0}`: there are no teams for counted fabric transfers (CFT; NCCL 2.32).
    fn ncclTeamCftMultimem, pncclTeamCftMultimem(comm: Handle) -> Team = Team::NONE; {
        communicator::lookup(comm)?;
        Err(without_cft("ncclTeamCftMultimem"))
    }

    /// All ranks; `{0, 0, 0}` if `comm` is no communicator.
    fn ncclTeamWorld, pncclTeamWorld(comm: Handle) -> Team = Team::NONE; {
        Ok(world(&*communicator::lookup(comm)?))
    }

    /// The ranks of this rank's node, where nodes are even and contiguous; else this rank alone. `{0, 0, 0}` if `comm` is
    /// no communicator.
    fn ncclTeamLsa, pncclTeamLsa(comm: Handle) -> Team = Team::NONE; {
        Ok(lsa(&*communicator::lookup(comm)?))
    }

    /// The ranks with this rank's number in their [`ncclTeamLsa`]; `{0, 0, 0}` if `comm` is no communicator.
    fn ncclTeamRail, pncclTeamRail(comm: Handle) -> Team = Team::NONE; {
        Ok(rail(&*communicator::lookup(comm)?))
    }

    /// The rank in the communicator of `rank` of `team`; -1 if `comm` is no communicator.
    fn ncclTeamRankToWorld, pncclTeamRankToWorld(comm: Handle, team: Team, rank: c_int) -> c_int = -1; {
        Ok(team.locate(world(&*communicator::lookup(comm)?).rank, rank))
    }

    /// The rank in [`ncclTeamLsa`] of `rank` of `team`; -1 if `comm` is no communicator.
    fn ncclTeamRankToLsa, pncclTeamRankToLsa(comm: Handle, team: Team, rank: c_int) -> c_int = -1; {
        Ok(team.locate(lsa(&*communicator::lookup(comm)?).rank, rank))
    }

    /// Slots that hold `maxElts` elements of at most `maxEltSize` bytes, 8 bytes of data each; -1 for negative arguments
    /// and more slots than can be counted.
    fn ncclLLA2ACalcSlots, pncclLLA2ACalcSlots(maxElts: c_int, maxEltSize: c_int) -> c_int = -1; {
        number("maxElts", maxElts)?
            .checked_mul(number("maxEltSize", maxEltSize)?.div_ceil(8))
            .and_then(|slots| c_int::try_from(slots).ok())
            .ok_or_else(|| Error::argument(format!("maxElts ({maxElts}) and maxEltSize ({maxEltSize}): too many slots")))
    }
}

entries! {
    /// What a low-latency all-to-all of `nBlocks` blocks with `nSlots` slots needs.
    fn ncclLLA2ACreateRequirement, pncclLLA2ACreateRequirement(
        nBlocks: c_int, nSlots: c_int, outHandle: *mut LlA2aHandle, outReq: *mut ResourceRequirements,
    ) {
        let bytes = lla2a(nBlocks, nSlots)?;
        // SAFETY: null or valid, says the entry point's contract.
        let (handle, requirements) = unsafe { (out("outHandle", outHandle)?, out("outReq", outReq)?) };
        handle.slots = nSlots as u32;
        *requirements = ResourceRequirements {
            buffer_size: bytes,
            buffer_align: LINE_BYTES,
            out_buffer_handle: &raw mut handle.buffer,
            ..ResourceRequirements::NONE
        };
        Ok(())
    }

    /// What `nBarriers` barriers over `team`, whose ranks reach each other's memory, need.
    fn ncclLsaBarrierCreateRequirement, pncclLsaBarrierCreateRequirement(
        team: Team, nBarriers: c_int, outHandle: *mut LsaBarrierHandle, outReq: *mut ResourceRequirements,
    ) {
        // Three words of a barrier's own, and an inbox from each rank.
        let (ranks, barriers) = (number("team.nRanks", team.ranks)?, number("nBarriers", nBarriers)?);
        let words = ranks.checked_add(3).and_then(|words| words.checked_mul(barriers));
        let bytes = bytes("nBarriers", words.and_then(|words| words.checked_mul(size_of::<u32>())))?;
        // SAFETY: null or valid, says the entry point's contract.
        let (handle, requirements) = unsafe { (out("outHandle", outHandle)?, out("outReq", outReq)?) };
        handle.barriers = nBarriers;
        *requirements = ResourceRequirements {
            buffer_size: bytes,
            buffer_align: align_of::<u32>(),
            out_buffer_handle: &raw mut handle.buffer,
            ..ResourceRequirements::NONE
        };
        Ok(())
    }

    /// What `nBarriers` barriers over the network need. As NCCL, it does not look at `comm`.
    fn ncclGinBarrierCreateRequirement, pncclGinBarrierCreateRequirement(
        _comm: Handle, team: Team, nBarriers: c_int, outHandle: *mut GinBarrierHandle,
        outReq: *mut ResourceRequirements,
    ) {
        let (ranks, barriers) = (number("team.nRanks", team.ranks)?, number("nBarriers", nBarriers)?);
        let signals = bytes("nBarriers", ranks.checked_mul(barriers))?;
        // SAFETY: null or valid, says the entry point's contract.
        let (handle, requirements) = unsafe { (out("outHandle", outHandle)?, out("outReq", outReq)?) };
        *requirements = ResourceRequirements {
            gin_signal_count: signals as c_int,
            out_gin_signal_start: &raw mut handle.signal,
            ..ResourceRequirements::NONE
        };
        Ok(())
    }

    /// Fails with `ncclInvalidUsage`: kernels that use the network are not served.
    fn ncclGinOutboxCreateRequirement, pncclGinOutboxCreateRequirement(
        _nBlocks: c_int, _size_log2: c_int, _outHandle: *mut c_void, _outReq: *mut ResourceRequirements,
    ) {
        Err(without_gin("ncclGinOutboxCreateRequirement"))
    }

    /// Fails with `ncclInvalidUsage`: kernels that use the network are not served.
    fn ncclGinInboxA2ACreateRequirement, pncclGinInboxA2ACreateRequirement(
        _peers: Team, _nBlocks: c_int, _size_log2: c_int, _outHandle: *mut c_void, _outReq: *mut ResourceRequirements,
    ) {
        Err(without_gin("ncclGinInboxA2ACreateRequirement"))
    }

    /// What a communicator can do for kernels that communicate themselves. Writes no more than the struct of
    /// `props->version` has.
    fn ncclCommQueryProperties, pncclCommQueryProperties(comm: Handle, props: *mut Properties) {
        let comm = communicator::lookup(comm)?;
        if props.is_null() {
            return Err(Error::argument("props is NULL"));
        }
        // SAFETY: not null, so a struct that begins with its head, says the entry point's contract.
        let (size, magic, version) = unsafe { ((*props).size, (*props).magic, (*props).version) };
        if magic != API_MAGIC {
            return Err(Error::usage("props.magic is wrong: initialise the struct with NCCL_COMM_PROPERTIES_INITIALIZER"));
        }
        let bytes = match version {
            22900..=22903 => std::mem::offset_of!(Properties, lsa_teams),
            22904..=release::LIBRARY_VERSION => size_of::<Properties>(),
            _ => return Err(other_version("props", version)),
        };
        if size < bytes {
            return Err(Error::argument(format!("props.size ({size}) is less than the {bytes} bytes of its version")));
        }
        let (world, lsa) = (world(&comm), lsa(&comm));
        let filled = Properties {
            size,
            magic,
            version,
            rank: world.rank,
            ranks: world.ranks,
            device: comm.device,
            nvml_device: comm.device,
            device_api: false,
            multimem: false,
            gin_type: 0,
            lsa_teams: world.ranks / lsa.ranks,
            host_rma: false,
            railed_gin_type: 0,
        };
        // SAFETY: the caller's struct has that many bytes, and no struct overlaps ours.
        unsafe { std::ptr::copy_nonoverlapping((&raw const filled).cast::<u8>(), props.cast(), bytes) };
        Ok(())
    }

    /// Fails with `ncclInvalidUsage`: counted fabric transfers (NCCL 2.32) are not served.
    fn ncclGetMultimemDeviceLeInfo, pncclGetMultimemDeviceLeInfo(
        _window: usize, _offset: usize, _leId: *mut c_void, _leOffset: *mut usize,
    ) {
        Err(without_cft("ncclGetMultimemDeviceLeInfo"))
    }

    /// Fails with `ncclInvalidUsage`: counted fabric transfers (NCCL 2.32) are not served.
    fn ncclGetCftDeviceLeInfo, pncclGetCftDeviceLeInfo(
        _window: usize, _offset: usize, _peerCft: c_int, _cftTeam: Team, _leId: *mut c_void, _leOffset: *mut usize,
    ) {
        Err(without_cft("ncclGetCftDeviceLeInfo"))
    }

    /// Fails with `ncclInvalidUsage`: counted fabric transfers (NCCL 2.32) are not served.
    fn ncclGetPeerDeviceLeInfo, pncclGetPeerDeviceLeInfo(
        _window: usize, _offset: usize, _peerWorld: c_int, _leId: *mut c_void, _leOffset: *mut usize,
    ) {
        Err(without_cft("ncclGetPeerDeviceLeInfo"))
    }

    /// Fails with `ncclInvalidUsage`: kernels that communicate themselves are not served.
    fn ncclDevCommCreate, pncclDevCommCreate(
        comm: Handle, requirements: *const c_void, outDevComm: *mut c_void,
    ) {
        communicator::lookup(comm)?.check_usable()?;
        for (name, pointer) in [("reqs", requirements), ("outDevComm", outDevComm.cast_const())] {
            if pointer.is_null() {
                return Err(Error::argument(format!("{name} is NULL")));
            }
        }
        Err(Error::usage(
            "device communicators are not served: launch collectives from the host, or use NVIDIA's NCCL for kernels that \
             communicate themselves",
        ))
    }

    /// Fails with `ncclInvalidUsage`: there is no device communicator to destroy.
    fn ncclDevCommDestroy, pncclDevCommDestroy(comm: Handle, devComm: *const c_void) {
        communicator::lookup(comm)?;
        if devComm.is_null() {
            return Err(Error::argument("devComm is NULL"));
        }
        Err(Error::usage("devComm was not made by ncclDevCommCreate: device communicators are not served"))
    }
}
