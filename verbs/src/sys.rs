//! libibverbs, as much of it as is used here: its structs here, its calls in [`Lib`].
//!
//! The layouts are those of `infiniband/verbs.h` (rdma-core 28 and later; they have not changed since 2009 but for what was
//! appended). `tests/layout.rs` holds each of them against the header. Data-path calls are functions in
//! the context that the device's driver filled in, as in the header's inline functions.

mod library;

use std::{
    ffi::{c_int, c_uint, c_void},
    mem::offset_of,
};

pub use library::{LIBRARY, Lib, RegDmabufMr, RegMrIova2, lib};

/// A device of [`Lib::get_device_list`].
#[repr(C)]
pub struct Device {
    _opaque: [u8; 0],
}

/// A protection domain.
#[repr(C)]
pub struct Pd {
    _opaque: [u8; 0],
}

/// Where completion events come out.
#[repr(C)]
pub struct CompChannel {
    /// The device.
    pub context: *mut Context,
    /// Readable when an event waits.
    pub fd: c_int,
    /// Who uses it.
    pub refcnt: c_int,
}

/// A completion queue.
#[repr(C)]
pub struct Cq {
    /// The device.
    pub context: *mut Context,
}

/// The beginning of a queue pair.
#[repr(C)]
pub struct Qp {
    /// The device.
    pub context: *mut Context,
    _before: [u8; 44],
    /// Its number.
    pub qp_num: u32,
}

/// The beginning of a memory region.
#[repr(C)]
pub struct Mr {
    _before: [u8; 36],
    /// For local use.
    pub lkey: u32,
    /// For peers.
    pub rkey: u32,
}

/// The functions of a device's driver that are called without the library.
#[repr(C)]
pub struct ContextOps {
    _before: [*mut c_void; 11],
    /// Takes completions.
    pub poll_cq: unsafe extern "C" fn(*mut Cq, c_int, *mut Wc) -> c_int,
    /// Asks for an event at the next completion.
    pub req_notify_cq: unsafe extern "C" fn(*mut Cq, c_int) -> c_int,
    _between: [*mut c_void; 12],
    /// Posts work requests.
    pub post_send: unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int,
    /// Posts receive requests.
    pub post_recv: unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int,
    _after: [*mut c_void; 5],
}

/// An opened device.
#[repr(C)]
pub struct Context {
    /// The device.
    pub device: *mut Device,
    /// Its driver's functions.
    pub ops: ContextOps,
    /// For commands.
    pub cmd_fd: c_int,
    /// Readable when an asynchronous event waits.
    pub async_fd: c_int,
    /// Completion vectors.
    pub num_comp_vectors: c_int,
}

/// What a device can do.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct DeviceAttr {
    _before: [u8; 96],
    /// PCI vendor.
    pub vendor_id: u32,
    _between: [u8; 12],
    /// Work requests of a queue.
    pub max_qp_wr: c_int,
    _rest: [u8; 116],
}

/// What a port is like. The library's function writes what its oldest version knew.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct PortAttr {
    /// [`PORT_ACTIVE`] when it is up.
    pub state: c_uint,
    /// Largest MTU, as a code.
    pub max_mtu: c_uint,
    /// MTU in use, as a code.
    pub active_mtu: c_uint,
    /// GIDs.
    pub gid_tbl_len: c_int,
    _between: [u8; 16],
    /// P_Keys.
    pub pkey_tbl_len: u16,
    /// Address in an InfiniBand subnet.
    pub lid: u16,
    _after: [u8; 10],
    /// [`LINK_LAYER_ETHERNET`] or InfiniBand.
    pub link_layer: u8,
    _rest: [u8; 17],
}

/// [`PortAttr::state`] of a port that is up.
pub const PORT_ACTIVE: c_uint = 4;
/// [`PortAttr::link_layer`] of RoCE.
pub const LINK_LAYER_ETHERNET: u8 = 2;

/// How large a queue pair is.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct QpCap {
    /// Work requests.
    pub max_send_wr: u32,
    /// Receive requests.
    pub max_recv_wr: u32,
    /// Pieces of a work request.
    pub max_send_sge: u32,
    /// Pieces of a receive request.
    pub max_recv_sge: u32,
    /// Bytes that a work request may carry itself.
    pub max_inline_data: u32,
}

/// What a queue pair is made of.
#[repr(C)]
pub struct QpInitAttr {
    /// The owner's.
    pub qp_context: *mut c_void,
    /// Completions of work requests.
    pub send_cq: *mut Cq,
    /// Completions of receive requests.
    pub recv_cq: *mut Cq,
    /// None.
    pub srq: *mut c_void,
    /// Its size.
    pub cap: QpCap,
    /// [`QPT_RC`].
    pub qp_type: c_uint,
    /// Every work request gives a completion.
    pub sq_sig_all: c_int,
}

/// A reliable connection.
pub const QPT_RC: c_uint = 2;

/// A way through a routed network. Aligned as the header's union of a GID is.
#[repr(C, align(8))]
#[derive(Clone, Copy, Default)]
pub struct GlobalRoute {
    /// Destination.
    pub dgid: [u8; 16],
    /// IPv6's.
    pub flow_label: u32,
    /// Source, as an index.
    pub sgid_index: u8,
    /// Routers to pass.
    pub hop_limit: u8,
    /// IPv6's.
    pub traffic_class: u8,
}

/// A way to another port.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct AhAttr {
    /// With [`AhAttr::is_global`].
    pub grh: GlobalRoute,
    /// Destination in an InfiniBand subnet.
    pub dlid: u16,
    /// Service level.
    pub sl: u8,
    /// Of the LID.
    pub src_path_bits: u8,
    /// 0: the link's.
    pub static_rate: u8,
    /// By GID.
    pub is_global: u8,
    /// The local port.
    pub port_num: u8,
}

/// What a queue pair is set to, as far as a mask says.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct QpAttr {
    /// One of the `QPS_` states.
    pub qp_state: c_uint,
    /// The state that it is thought to be in.
    pub cur_qp_state: c_uint,
    /// A code.
    pub path_mtu: c_uint,
    /// Unused.
    pub path_mig_state: c_uint,
    /// Unused.
    pub qkey: u32,
    /// First packet number expected.
    pub rq_psn: u32,
    /// First packet number sent.
    pub sq_psn: u32,
    /// The peer's queue pair.
    pub dest_qp_num: u32,
    /// What the peer may do.
    pub qp_access_flags: c_uint,
    /// Unused.
    pub cap: QpCap,
    /// The way to the peer.
    pub ah_attr: AhAttr,
    /// Unused.
    pub alt_ah_attr: AhAttr,
    /// Of the port's table.
    pub pkey_index: u16,
    /// Unused.
    pub alt_pkey_index: u16,
    /// Unused.
    pub en_sqd_async_notify: u8,
    /// Unused.
    pub sq_draining: u8,
    /// Reads under way.
    pub max_rd_atomic: u8,
    /// The peer's reads under way.
    pub max_dest_rd_atomic: u8,
    /// Pause after "receiver not ready", a code.
    pub min_rnr_timer: u8,
    /// The local port.
    pub port_num: u8,
    /// Of a packet: 4.096 µs × 2^this.
    pub timeout: u8,
    /// Attempts after the first.
    pub retry_cnt: u8,
    /// Attempts after "receiver not ready", 7: without end.
    pub rnr_retry: u8,
    /// Unused.
    pub alt_port_num: u8,
    /// Unused.
    pub alt_timeout: u8,
    /// Unused.
    pub rate_limit: u32,
}

/// States of a queue pair.
pub const QPS_RESET: c_uint = 0;
/// It may take receive requests.
pub const QPS_INIT: c_uint = 1;
/// It receives.
pub const QPS_RTR: c_uint = 2;
/// It sends.
pub const QPS_RTS: c_uint = 3;
/// It ends everything with an error.
pub const QPS_ERR: c_uint = 6;

/// Bits of [`Lib::modify_qp`]'s mask.
pub mod qp_attr {
    use std::ffi::c_int;

    /// The state.
    pub const STATE: c_int = 1;
    /// The peer's rights.
    pub const ACCESS_FLAGS: c_int = 1 << 3;
    /// The P_Key.
    pub const PKEY_INDEX: c_int = 1 << 4;
    /// The port.
    pub const PORT: c_int = 1 << 5;
    /// The way.
    pub const AV: c_int = 1 << 7;
    /// The MTU.
    pub const PATH_MTU: c_int = 1 << 8;
    /// The time-out.
    pub const TIMEOUT: c_int = 1 << 9;
    /// Attempts.
    pub const RETRY_CNT: c_int = 1 << 10;
    /// Attempts of another kind.
    pub const RNR_RETRY: c_int = 1 << 11;
    /// First number expected.
    pub const RQ_PSN: c_int = 1 << 12;
    /// Reads.
    pub const MAX_QP_RD_ATOMIC: c_int = 1 << 13;
    /// A pause.
    pub const MIN_RNR_TIMER: c_int = 1 << 15;
    /// First number sent.
    pub const SQ_PSN: c_int = 1 << 16;
    /// The peer's reads.
    pub const MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
    /// The peer.
    pub const DEST_QPN: c_int = 1 << 20;
}

/// A piece of local memory.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Sge {
    /// Where.
    pub addr: u64,
    /// Bytes.
    pub length: u32,
    /// Of the region.
    pub lkey: u32,
}

/// A work request. Of the unions only the RDMA half is used.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct SendWr {
    /// Comes back with the completion.
    pub wr_id: u64,
    /// The next one.
    pub next: *mut SendWr,
    /// Its pieces.
    pub sg_list: *mut Sge,
    /// How many.
    pub num_sge: c_int,
    /// [`WR_RDMA_WRITE`], [`WR_RDMA_WRITE_WITH_IMM`] or [`WR_SEND`].
    pub opcode: c_uint,
    /// [`SEND_SIGNALED`], [`SEND_INLINE`].
    pub send_flags: c_uint,
    /// In network order.
    pub imm_data: u32,
    /// Where to at the peer.
    pub remote_addr: u64,
    /// The peer's key.
    pub rkey: u32,
    /// Atomics' and other kinds of requests' fields: 0.
    pub rest: [u64; 9],
}

impl SendWr {
    /// One that does nothing yet.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            wr_id: 0,
            next: std::ptr::null_mut(),
            sg_list: std::ptr::null_mut(),
            num_sge: 0,
            opcode: 0,
            send_flags: 0,
            imm_data: 0,
            remote_addr: 0,
            rkey: 0,
            rest: [0; 9],
        }
    }
}

impl Default for SendWr {
    fn default() -> Self {
        Self::new()
    }
}

/// A write into the peer's memory.
pub const WR_RDMA_WRITE: c_uint = 0;
/// The same, which the peer is told of.
pub const WR_RDMA_WRITE_WITH_IMM: c_uint = 1;
/// It gives a completion.
pub const SEND_SIGNALED: c_uint = 2;
/// Its bytes are taken while it is posted.
pub const SEND_INLINE: c_uint = 8;

/// A receive request.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct RecvWr {
    /// Comes back with the completion.
    pub wr_id: u64,
    /// The next one.
    pub next: *mut RecvWr,
    /// Its pieces.
    pub sg_list: *mut Sge,
    /// How many.
    pub num_sge: c_int,
}

/// A completion.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub struct Wc {
    /// Of the request.
    pub wr_id: u64,
    /// 0: it was done.
    pub status: c_uint,
    /// Means nothing with an error.
    pub opcode: c_uint,
    /// What the device adds to an error.
    pub vendor_err: u32,
    /// Bytes received.
    pub byte_len: u32,
    /// In network order.
    pub imm_data: u32,
    /// The local queue pair.
    pub qp_num: u32,
    /// Unused.
    pub src_qp: u32,
    /// Unused.
    pub wc_flags: c_uint,
    /// Unused.
    pub pkey_index: u16,
    /// Unused.
    pub slid: u16,
    /// Unused.
    pub sl: u8,
    /// Unused.
    pub dlid_path_bits: u8,
}

/// Takes a receive request of the peer, and fills its memory.
pub const WR_SEND: c_uint = 2;
/// [`Wc::opcode`] of a receive request that a send has taken.
pub const WC_RECV: c_uint = 128;
/// [`Wc::opcode`] of a receive request that a write with immediate has taken.
pub const WC_RECV_RDMA_WITH_IMM: c_uint = 129;

/// Rights of a memory region.
pub const ACCESS_LOCAL_WRITE: c_uint = 1;
/// A peer may write.
pub const ACCESS_REMOTE_WRITE: c_uint = 2;
/// Writes may reach memory in any order before their completion.
pub const ACCESS_RELAXED_ORDERING: c_uint = 1 << 20;

/// Something that happened to a device.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct AsyncEvent {
    /// A port number or an object, by type.
    pub element: *mut c_void,
    /// One of `enum ibv_event_type`.
    pub event_type: c_uint,
}

const _: () = {
    assert!(size_of::<ContextOps>() == 256);
    assert!(offset_of!(ContextOps, poll_cq) == 88);
    assert!(offset_of!(ContextOps, post_send) == 200);
    assert!(offset_of!(Context, ops) == 8);
    assert!(offset_of!(Context, async_fd) == 268);
    assert!(offset_of!(Qp, qp_num) == 52);
    assert!(offset_of!(Mr, lkey) == 36 && offset_of!(Mr, rkey) == 40);
    assert!(size_of::<DeviceAttr>() == 232 && offset_of!(DeviceAttr, max_qp_wr) == 112);
    assert!(offset_of!(PortAttr, lid) == 34 && offset_of!(PortAttr, link_layer) == 46);
    assert!(size_of::<PortAttr>() == 64); // the library's is 52
    assert!(size_of::<QpInitAttr>() == 64 && offset_of!(QpInitAttr, qp_type) == 52);
    assert!(size_of::<QpAttr>() == 144 && offset_of!(QpAttr, ah_attr) == 56);
    assert!(offset_of!(QpAttr, timeout) == 130 && offset_of!(QpAttr, rate_limit) == 136);
    assert!(size_of::<AhAttr>() == 32 && offset_of!(AhAttr, dlid) == 24);
    assert!(size_of::<SendWr>() == 128 && offset_of!(SendWr, imm_data) == 36);
    assert!(offset_of!(SendWr, remote_addr) == 40 && offset_of!(SendWr, rkey) == 48);
    assert!(size_of::<RecvWr>() == 32);
    assert!(size_of::<Wc>() == 48 && offset_of!(Wc, qp_num) == 28);
    assert!(size_of::<AsyncEvent>() == 16);
};
