//! Arguments of `ringsightExplain`, by which a program asks the communication library which algorithm it would take.
//!
//! `ringsight.h` declares them for C. The library is asked in the process that loaded it, so they are no part of the pages and have
//! their size, not [`crate::VERSION`], to tell them by.

use core::ffi::{c_char, c_int};

/// `ringsightExplain_t`: an operation, and what the choice of an algorithm depends on.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct Explain {
    /// `sizeof` this.
    pub size: usize,
    /// [`crate::Function`] by name, ended by a zero byte.
    pub function: *const c_char,
    /// Elements, as the function takes them.
    pub count: usize,
    /// `ncclDataType_t`.
    pub data_type: c_int,
    /// `ncclRedOp_t`.
    pub op: c_int,
    /// Ranks of the communicator.
    pub ranks: c_int,
    /// Its channels.
    pub channels: c_int,
    /// Bytes of a FIFO slot.
    pub slot_bytes: usize,
    /// 1: all ranks' devices do operations in one shot, as GPUs and the host device do.
    pub one_shot: c_int,
    /// 1: all ranks' kernels have peer access, as among GPUs of one node.
    pub peers: c_int,
    /// Not 0: all ranks' `CTAPolicy` is zero.
    pub zero_cta: c_int,
    /// 1: the receive buffer, of a reduce_scatter the send buffer, is in a symmetric window of all ranks; 0: it is not; -1: not known.
    pub window: c_int,
}

/// `ringsightExplainRow_t`: a row of the library's table of algorithms. Texts are padded with zero bytes.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct ExplainRow {
    /// Algorithm's name.
    pub algorithm: [u8; 16],
    /// Protocol's name.
    pub protocol: [u8; 16],
    /// 1 if it is taken.
    pub chosen: c_int,
    /// Channels, if it is taken.
    pub channels: c_int,
    /// Why it is not taken; cut where it does not fit.
    pub reason: [u8; 128],
}

const _: () = assert!(size_of::<Explain>() == 64 && size_of::<ExplainRow>() == 168);
