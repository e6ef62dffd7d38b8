//! A collective-communication library behind NCCL's ABI whose every operation can be seen.
//!
//! The layers, lowest first. A module imports only modules below it (tests/layers checks that). Below all of them is the crate
//! `ringsight-comm-base`: environment, errors, log, locks, forks, system calls.
//!
//! | layer | owns |
//! |---|---|
//! | [`observe`] | the records and pages that a collector reads |
//! | [`op`] | an operation as data: request, task, identity, and [`op::DataPath`], which says how its data moves |
//! | [`device`] | memory, streams, graphs and launches of a GPU, or of the host in its place |
//! | [`bootstrap`] | how the ranks of a new communicator find each other, and control messages between them |
//! | [`topology`] | which rank runs where, and the rings that follow from it |
//! | [`transport`] | connections between ranks: shared memory, GPU memory, sockets, RDMA |
//! | [`proxy`] | the threads that set connections up and move network steps |
//! | `checks` | whether the ranks call alike, and are there |
//! | `buffer_exchange` | callers' buffers that ranks of other processes import |
//! | `plan` | a pure function from what a communicator can do and its tasks to plans |
//! | `progress` | how far operations are on the device |
//! | `watchdog` | whom an operation that does not end waits for |
//! | `launch` | handing plans to the device, one transaction for each |
//! | [`communicator`] | one rank's part in a set of ranks, from its making to its end |
//! | `group` | what is called between `ncclGroupStart` and `ncclGroupEnd` |
//! | [`abi`] | the C entry points |
//!
//! Along the path of an operation: [`abi`] checks the arguments, `group` makes a task of them and chooses how it is done, `plan` lays the
//! group's tasks out, `launch` binds and launches the plans, [`device`] runs them, [`proxy`] moves their network steps, and `progress` hears of
//! their end.

pub mod abi;
pub mod bootstrap;
pub(crate) mod buffer_exchange;
pub(crate) mod checks;
pub mod communicator;
pub mod device;
#[doc(hidden)]
pub mod fuzzing;
pub(crate) mod group;
pub(crate) mod launch;
pub mod observe;
pub mod op;
pub(crate) mod plan;
pub(crate) mod progress;
pub mod proxy;
pub mod topology;
pub mod transport;
pub(crate) mod watchdog;

pub use ringsight_comm_base::error;
pub(crate) use ringsight_comm_base::{env, log, threads};
