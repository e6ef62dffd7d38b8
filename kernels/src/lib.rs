//! Device code and its launch parameters.
//!
//! [`launch`] is what the host hands to a device: which channels do which work over which [`fifo`]s. [`host`] is the
//! device code of the host device: channel programs that are stepped round-robin, as a GPU's blocks run side by side.
//! [`cuda`] is that of GPUs.

pub mod cuda;
pub mod fifo;
pub mod host;
pub mod launch;
pub mod minifloat;
pub mod reduce;
pub mod schedule;

pub use fifo::{Fifo, FifoHeader};
pub use launch::{AbortWord, ChannelWork, Connections, Launch, Observer, Scalar, Straight, When, Work};
pub use schedule::{Steps, WorkError};
