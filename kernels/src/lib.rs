//! Device code and its launch parameters.
//!
//! The planner describes a launch ([`launch`]). A device runs it: [`host`] on CPU threads, [`cuda`] on GPUs. Both execute the same channel
//! programs ([`schedule`]), and GPUs have further kernels for ranks that reach each other's memory.
//!
//! # Layers
//!
//! A module imports only modules above it in this table.
//!
//! | module | owns |
//! |---|---|
//! | [`minifloat`] | conversions of 8- and 16-bit floats |
//! | [`reduce`] | elementwise reductions on the host |
//! | [`fifo`] | the memory layout of a connection's slots |
//! | [`launch`] | launch parameters: [`Launch`], [`Work`], [`Connections`], [`Observer`] |
//! | [`schedule`] | the steps of a channel program |
//! | [`host`], [`cuda`] | device code and the arguments of its kernels; neither imports the other |
//! | [`check`] | which works a device has a program for |

pub mod check;
pub mod cuda;
pub mod fifo;
pub mod host;
pub mod launch;
pub mod minifloat;
pub mod reduce;
pub mod schedule;

pub use fifo::{Fifo, FifoHeader};
pub use launch::{
    AbortWord, ChannelWork, Connections, ExportedBuffer, Launch, Observer, PeerMemory, Scalar, When, Work,
    WorkError, ZeroCopy,
};
pub use schedule::Steps;
