//! RDMA between nodes.
//!
//! libibverbs is loaded when it is first asked for ([`sys`]): what is linked against this runs where there is none, and says what is
//! missing. Over it lies a layer of owned objects ([`device`], [`memory`], [`queue`], [`completion`]). Which device serves whom is decided by pure functions
//! ([`choice`]) over what the kernel says of its devices ([`sysfs`]) and what the environment wishes for ([`config`]). A connection
//! ([`endpoint`]) moves slots of one memory into the slots of another; what its ends tell each other first is in [`wire`].

mod bell;
pub mod choice;
pub mod completion;
pub mod config;
pub mod device;
pub mod endpoint;
mod error;
pub mod hub;
pub mod memory;
pub mod port;
pub mod queue;
pub mod sys;
pub mod sysfs;
pub mod wire;

pub use error::{Error, Result};
pub use ringsight_failover as failover;
