//! Stalls: a connection over RDMA that waits for the network.
//!
//! While a NIC still retries, or a connection is between two paths, the kernel that waits for it is not stuck. The watchdog reads stalls
//! from the proxy's [table](crate::proxy::stalls).

use std::fmt;

use ringsight_records::{PathCause, connection::DEVICE_NAME_BYTES, pages::text};

/// Why a connection does not move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum StallCause {
    /// This end's port is down.
    PortDown,
    /// This end gave its path up: the cause, and `enum ibv_wc_status` of the completion that reported it (0: no completion).
    Left(PathCause, u8),
    /// Posted requests have neither completed nor failed.
    Unanswered,
    /// The path was left because of a report of the peer or of another connection.
    Told,
}

impl StallCause {
    /// Severity; 0 is the gravest, which knows most about the failure.
    pub(crate) fn level(self) -> u8 {
        match self {
            Self::PortDown => 0,
            Self::Left(..) => 1,
            Self::Unanswered => 2,
            Self::Told => 3,
        }
    }
}

/// One end of a connection that waits for the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Stall {
    pub(crate) why: StallCause,
    /// Time since it last moved, nanoseconds.
    pub(crate) for_ns: u64,
    /// The rank at the other end.
    pub(crate) peer: u32,
    /// This end sends.
    pub(crate) is_send: bool,
    pub(crate) channel: u8,
    /// Name of this end's device, zero-padded.
    pub(crate) device: [u8; DEVICE_NAME_BYTES],
    /// Port of the device, from 1.
    pub(crate) port: u8,
    /// Number of this end's first queue pair.
    pub(crate) queue_pair: u32,
}

impl Stall {
    /// Sort key: the least of several stalls is the one to report. It has the gravest cause, or has lasted longest.
    pub(crate) fn order(&self) -> impl Ord + use<> {
        let for_ns = std::cmp::Reverse(self.for_ns);
        (self.why.level(), for_ns, self.channel, self.peer)
    }
}

impl fmt::Display for Stall {
    /// As in `sends to rank 1 over mlx5_0:1, queue pair 18, channel 0, whose port is down`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            peer,
            channel,
            port,
            queue_pair,
            ..
        } = self;
        let verb = if self.is_send { "sends to" } else { "receives from" };
        let device = text(&self.device);
        write!(
            f,
            "{verb} rank {peer} over {device}:{port}, queue pair {queue_pair}, channel {channel}, "
        )?;
        match self.why {
            StallCause::PortDown => f.write_str("whose port is down"),
            StallCause::Left(cause, 0) => write!(f, "which has failed ({})", cause.name()),
            StallCause::Left(cause, status) => {
                write!(f, "which has failed ({}, status {status})", cause.name())
            }
            StallCause::Unanswered => f.write_str("of which nothing is acknowledged"),
            StallCause::Told => f.write_str("which the peer has given up"),
        }
    }
}
