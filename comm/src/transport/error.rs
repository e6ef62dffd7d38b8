//! Errors of connections.

use std::{io, sync::Arc};

use ringsight_verbs::endpoint::Failure;

/// Why a connection has failed.
#[derive(Clone, Debug, thiserror::Error)]
pub(crate) enum ConnectionError {
    /// The peer has closed the stream.
    #[error("{0}: it aborted, was destroyed or its process ended")]
    PeerGone(String),
    /// A call on the stream failed.
    #[error("{0}")]
    Stream(Arc<io::Error>),
    /// The peer or the device broke the protocol.
    #[error("{0}")]
    Protocol(String),
    /// No path of an RDMA connection works.
    #[error(transparent)]
    Paths(#[from] Failure),
    /// The GPU could not be flushed.
    #[error("{0}")]
    Flush(String),
}

impl ConnectionError {
    pub(super) fn protocol(text: impl Into<String>) -> Self {
        Self::Protocol(text.into())
    }
}
