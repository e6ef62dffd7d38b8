//! A collective-communication library behind NCCL's ABI whose every operation can be seen.
//!
//! Along the path of an operation: [`abi`] (C entry points) → [`group`] (task queues) → [`plan`] (algorithm, channels,
//! work budget) → [`launch`] (streams, capture) → [`device`]; beside it [`communicator`], [`bootstrap`], [`topology`],
//! [`transport`], [`proxy`], [`checks`] (do the ranks call alike?), `watchdog` (whom do they wait for?), and [`observe`], which writes the records and pages that a collector reads.

pub mod abi;
pub mod bootstrap;
pub(crate) mod buffer_exchange;
pub mod checks;
pub mod communicator;
pub mod device;
#[doc(hidden)]
pub mod fuzzing;
pub mod group;
pub mod launch;
pub mod observe;
pub mod op;
pub mod plan;
pub(crate) mod progress;
pub mod proxy;
pub mod topology;
pub mod transport;
pub(crate) mod watchdog;

pub use ringsight_comm_base::error;
pub(crate) use ringsight_comm_base::{env, log, process, threads};
