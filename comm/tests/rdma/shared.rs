//! What the tests here and the bodies that they start have in common: environment variables, durations, ports, and what is printed.

use std::time::Duration;

use crate::fabric::Port;

/// How long a recovery may take where a port goes down long before the first operation.
pub(crate) const BEGIN_GIVE_UP: Duration = Duration::from_secs(5);

/// The port that is not found where a backup cannot be made.
pub(crate) const HIDDEN: Port = Port { rank: 1, link: 1 };

/// Tells a rank to do no more than show that it can.
pub(crate) const LITTLE: &str = "RDMA_TEST_LITTLE";

/// The traffic class that a rank's program asks for.
pub(crate) const CLASS: &str = "RDMA_TEST_CLASS";

/// How long a recovery may take where communicators end and it is meant to fail.
pub(crate) const END_GIVE_UP: Duration = Duration::from_millis(2500);

/// The rank whose first port rank 0 takes down.
pub(crate) const DOWN: &str = "RDMA_TEST_DOWN";

/// How long a peer that does not answer may be missing: to be noticed, and for a recovery.
pub(crate) const MISSING: Duration = Duration::from_secs(4);

/// The port on which nothing can be made.
pub(crate) const BACKUP: Port = Port { rank: 0, link: 1 };

/// What fails, by [`WHAT`](crate::common::variables::WHAT), where it is the device, which does not come back.
pub(crate) const DEVICE: &str = "device";

/// What ranks print before each phase of a network that carries nothing.
pub(crate) const PHASES: [&str; 3] = [
    "phase: before it",
    "phase: in the middle",
    "phase: port down, replays",
];

/// How long requests may neither end nor fail where a communicator finds a path dead.
pub(crate) const FOUND_DEAD_AFTER: Duration = Duration::from_secs(10);

/// What a rank prints of which ends left the path by what the process knew.
pub(crate) const BY_PROCESS: &str = "left by what the process knew";

/// What it prints of a communicator that was made when it knew.
pub(crate) const LATER: &str = "left by what the process had known before";
