//! NCCL's structs and constants (`nccl.h` 2.30.7).

use std::ffi::{c_char, c_int};

/// `ncclUniqueId`.
#[derive(Clone, Copy)]
#[repr(C)]
pub struct UniqueIdBytes(pub [u8; 128]);

/// `NCCL_CONFIG_UNDEF_INT`.
pub const CONFIG_UNDEF_INT: c_int = c_int::MIN;
/// Magic of [`NcclConfig`].
pub const CONFIG_MAGIC: u32 = 0xcafe_beef;

/// `ncclConfig_t` of 2.30. Callers built against other versions pass other sizes: see `config::read`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct NcclConfig {
    /// Bytes of the caller's struct.
    pub size: usize,
    /// [`CONFIG_MAGIC`].
    pub magic: u32,
    /// The version that the caller was built against, as `NCCL_VERSION_CODE`.
    pub version: u32,
    /// 0: calls return `ncclInProgress`.
    pub blocking: c_int,
    /// Clusters of blocks (GPU).
    pub cga_cluster_size: c_int,
    /// Fewest channels.
    pub min_ctas: c_int,
    /// Most channels.
    pub max_ctas: c_int,
    /// Network to use.
    pub net_name: *const c_char,
    /// Children share resources.
    pub split_share: c_int,
    /// Traffic class of the network; since 2.26.
    pub traffic_class: c_int,
    /// Name; since 2.27.
    pub comm_name: *const c_char,
    /// Offload to switches; since 2.27.
    pub collnet_enable: c_int,
    /// Policy for channels; since 2.27.
    pub cta_policy: c_int,
    /// Shrunk communicators share resources; since 2.27.
    pub shrink_share: c_int,
    /// Channels of NVLink SHARP; since 2.27.
    pub nvls_ctas: c_int,
    /// Channels per network peer; since 2.28.
    pub n_channels_per_net_peer: c_int,
    /// Scheduling for NVLink; since 2.28.
    pub nvlink_centric_sched: c_int,
    /// Whether graphs and eager calls mix; since 2.29.
    pub graph_usage_mode: c_int,
    /// Contexts of one-sided operations; since 2.29.
    pub num_rma_ctx: c_int,
    /// Most peers of sends and receives; since 2.30.
    pub max_p2p_peers: c_int,
    /// Whether captured calls keep the order of their streams; since 2.30.5.
    pub graph_stream_ordering: c_int,
}

const _: () = assert!(size_of::<NcclConfig>() == 96 && size_of::<UniqueIdBytes>() == 128);
const _: () = assert!(std::mem::offset_of!(NcclConfig, comm_name) == 48);

/// Magic of [`NcclSimInfo`].
pub const SIM_INFO_MAGIC: u32 = 0x7468_5283;

/// `ncclSimInfo_t`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct NcclSimInfo {
    /// Bytes of the caller's struct.
    pub size: usize,
    /// [`SIM_INFO_MAGIC`].
    pub magic: u32,
    /// The version that the caller was built against.
    pub version: u32,
    /// Microseconds that the group's operations would take; set by `ncclGroupSimulateEnd`.
    pub estimated_time: f32,
}

const _: () = assert!(size_of::<NcclSimInfo>() == 24);
const _: () = assert!(std::mem::offset_of!(NcclSimInfo, estimated_time) == 16);
