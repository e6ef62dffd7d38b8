//! How far operations are on the device.
//!
//! [`PlanObserver`] is the one writer: the device calls it from its own threads while it runs a plan. It has two kinds of readers.
//! Collectors read the records and descriptions that it writes ([`crate::observe`]). The watchdog reads [`PlanObserver::operations`], without a lock,
//! and the [`ArrivalLog`] of a communicator over several nodes.
//!
//! | state of an operation ([`Seen`]) | entered when |
//! |---|---|
//! | `NotReached` | its plan is submitted |
//! | `Launched` | events show that its graph was launched; kernels do not report that |
//! | `InProgress` | its first channel starts |
//! | `Completed` | its last channel stops, or its plan is aborted |
//!
//! Invariants:
//! - Replays of a plan run one after another, so one state serves all of them.
//! - An operation is made ready for its next replay before anybody learns that this one is completed.
//! - An operation whose works are in several plans is completed by the last of them.
//! - A plan that runs once goes to the [`RetireQueue`] when it is finished; the thread that makes calls on the communicator gives back what it
//!   holds. No thread of the device frees memory.

mod arrivals;
mod durations;
mod observer;
mod op_progress;
mod retire;

pub(crate) use arrivals::{ArrivalLog, ArrivedOperation, Dependencies};
pub(crate) use durations::DURATIONS_KEPT;
pub(crate) use observer::{Contents, OpState, PlanObserver, Shared, Stage};
pub(crate) use op_progress::Seen;
pub(crate) use retire::{RetireQueue, Retired};
