//! How the data of an operation moves.

use ringsight_records::{Algorithm, Protocol};

/// How the data of an operation moves between its ranks. All ranks of an operation use the same path.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DataPath {
    /// Through FIFOs between pairs of ranks: a kernel copies data into slots and out of them, and proxies move slots between nodes.
    Fifo,
    /// Through the library's peer memory, in lines of 16 bytes: 8 bytes of data, with the operation's epoch beside each half.
    Ll,
    /// Through the library's peer memory, in lines of 128 bytes of which 8 are flags.
    Ll128,
    /// Zero-copy: kernels load from and store to the callers' buffers. An operation falls back to [`DataPath::Ll128`] if its kernels
    /// find that some rank cannot reach another rank's buffer.
    ZeroCopy,
    /// Each rank stores its contributions into the peer memory of the rank that reduces them, and results into the callers' buffers. An
    /// operation falls back as with [`DataPath::ZeroCopy`].
    Push,
    /// Copy engines move the data, within a symmetric window, between an entry and an exit kernel.
    CopyEngine,
}

/// Bytes for which an operation through FIFOs takes one more channel.
const FIFO_BYTES_PER_CHANNEL: u64 = 256 << 10;
/// The same where FIFOs are in the memory of GPUs: one block is far from filling a link.
const DEVICE_FIFO_BYTES_PER_CHANNEL: u64 = 32 << 10;

impl DataPath {
    /// The protocol that records and `RINGSIGHT_PROTO` know it by.
    #[must_use]
    pub const fn protocol(self) -> Protocol {
        match self {
            Self::Fifo | Self::ZeroCopy => Protocol::Simple,
            Self::Ll => Protocol::Ll,
            Self::Ll128 => Protocol::Ll128,
            Self::Push => Protocol::Push,
            Self::CopyEngine => Protocol::Ce,
        }
    }

    /// Whether kernels reach the memory of all ranks: otherwise data goes through FIFOs.
    #[must_use]
    pub const fn is_peer_access(self) -> bool {
        !matches!(self, Self::Fifo)
    }

    /// Whether kernels use the callers' buffers where all ranks reach them.
    #[must_use]
    pub const fn is_zero_copy(self) -> bool {
        matches!(self, Self::ZeroCopy | Self::Push)
    }

    /// Whether copy engines move the data.
    #[must_use]
    pub const fn is_copy_engine(self) -> bool {
        matches!(self, Self::CopyEngine)
    }

    /// Channels for `bytes` bytes when the communicator has `available`; `near` if its FIFOs are in the memory of GPUs.
    #[must_use]
    pub fn channels(self, bytes: u64, available: usize, near: bool) -> usize {
        let each = match self {
            Self::Fifo if near => DEVICE_FIFO_BYTES_PER_CHANNEL,
            Self::Fifo => FIFO_BYTES_PER_CHANNEL,
            _ => u64::MAX,
        };
        usize::try_from(bytes.div_ceil(each))
            .unwrap_or(usize::MAX)
            .clamp(1, available)
    }
}

/// How an operation is done. It is chosen once, when the operation is called, and is the same on all of its ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Method {
    /// Arrangement of the ranks.
    pub algorithm: Algorithm,
    /// How data moves.
    pub path: DataPath,
    /// Most channels that it is spread over.
    pub channels: usize,
}
