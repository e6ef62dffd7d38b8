//! Memory as a device tells of it: callers', and what it makes for others to reach.

use std::{any::Any, os::fd::OwnedFd};

/// An allocation of a caller's.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// No other ever has this number.
    pub id: u64,
    /// Its address.
    pub start: usize,
}

/// A piece of memory that a caller has mapped by pieces (`cuMemMap`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Piece {
    /// What is mapped there anew has another number.
    pub id: u64,
    /// The device whose memory it is.
    pub device: i32,
    /// Its address.
    pub start: usize,
    /// Its length.
    pub bytes: usize,
}

/// Memory of a device that others reach.
pub struct Share {
    /// Where it is for kernels of the device that it is on.
    pub base: u64,
    /// What others reach it by.
    pub handle: Vec<u8>,
    /// Blocks of kernels that the device runs side by side.
    pub blocks: u32,
    /// Gives it back, or keeps it for others; to drop it waits for nothing.
    pub memory: Box<dyn Any + Send + Sync>,
}

/// Another rank's [`Share`].
pub struct Reached {
    /// Where it is for kernels of the current device.
    pub base: u64,
    /// The rank is one of another process.
    pub is_foreign: bool,
    /// It is on the current device, too.
    pub is_on_same_device: bool,
    /// Keeps it reachable, and lets go of it as [`Share::memory`].
    pub memory: Box<dyn Any + Send + Sync>,
}

/// Memory of a device that network devices read and write.
pub struct Direct {
    /// Where it is for kernels of the device that it is on.
    pub base: u64,
    /// What network devices reach it by, from `base` on.
    pub dma_buf: OwnedFd,
    /// What they have written is there for kernels only after [`super::Device::flush_direct`].
    pub needs_flush: bool,
    /// Gives it back when dropped, on whatever thread: no call of the driver waits for that.
    pub memory: Box<dyn Any + Send + Sync>,
}
