//! RDMA between nodes: devices, ports, queue pairs, and connections that survive a failed path.
//!
//! libibverbs is loaded at run time, at its first use. A program that links this crate runs on a machine without the library, and an error
//! says what is missing.
//!
//! # Modules, from the bottom
//! | module | owns |
//! |---|---|
//! | [`sys`] | the structs and calls of libibverbs |
//! | [`error`] | errors of calls, ports and connections |
//! | [`sysfs`] | the RDMA ports as the kernel lists them |
//! | [`choice`] | which port serves a rank, and which is its backup: pure functions over [`sysfs`] |
//! | [`device`] | opened devices: port attributes and asynchronous events |
//! | [`memory`], [`completion`], [`queue`] | memory regions, completion queues, queue pairs |
//! | [`config`] | the configuration from the environment |
//! | [`port`] | the ports of the process, with their opened devices and chosen GIDs |
//! | [`wire`] | the offer that the ends of a connection exchange before they are connected |
//! | `waker` | ends a thread's sleep on descriptors |
//! | [`port_health`] | what all connections of the process share about ports and paths |
//! | [`endpoint`] | the two ends of a connection |
//!
//! # Threads
//! `ringsight-ports` reads asynchronous events ([`port_health`]). `ringsight-qp` makes calls that may block, one thread per path while
//! there is something to do ([`endpoint`]). Everything else runs on the caller's threads.

pub mod choice;
pub mod completion;
pub mod config;
pub mod device;
pub mod endpoint;
pub mod error;
pub mod memory;
pub mod port;
pub mod port_health;
pub mod queue;
pub mod sys;
pub mod sysfs;
mod waker;
pub mod wire;

pub use error::{Error, Result};
pub use ringsight_failover as failover;
