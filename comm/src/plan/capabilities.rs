//! What a communicator can do, and the choice that follows from it: how an operation is done.

use std::sync::Arc;

use ringsight_comm_base::error::Result;
use ringsight_records::Function;

use super::{
    limits::Limits,
    table::{self, Query, WindowSupport},
};
use crate::{
    op::{Method, Request, WindowBuffer, is_made_of_messages},
    topology::Topology,
};

/// What a communicator and its device can do. It is fixed when the communicator is made, and together with the tasks it is all that planning
/// depends on.
#[derive(Clone, Debug)]
pub(crate) struct Capabilities {
    /// This rank.
    pub(crate) rank: u32,
    /// Number of ranks.
    pub(crate) ranks: u32,
    /// Which rank runs where.
    pub(crate) topology: Arc<Topology>,
    /// Number of channels.
    pub(crate) channels: usize,
    /// Bytes of a FIFO slot.
    pub(crate) slot_bytes: usize,
    /// Parts of a message that have room in the memory of GPUs, if all FIFOs are there.
    pub(crate) device_fifo_parts: Option<usize>,
    /// Work elements of the communicator's work FIFO.
    pub(crate) work_fifo_depth: usize,
    /// Whether all ranks' devices have programs for an operation in one shot.
    pub(crate) one_shot: bool,
    /// Whether all ranks' kernels reach each other's memory.
    pub(crate) peer_access: bool,
    /// What the ranks' environments leave to the choice of algorithms.
    pub(crate) limits: Limits,
}

impl Capabilities {
    /// Chooses how an operation is done: the same on all ranks. `window` is the symmetric window that the operation's buffer is in.
    ///
    /// # Errors
    /// The environment leaves no way to do it.
    pub(crate) fn choose(&self, request: &Request, window: Option<&WindowBuffer>) -> Result<Method> {
        let function = request.function;
        let bytes = request.bytes_of_choice(self.ranks);
        let support = match window {
            None => WindowSupport::NoWindow,
            Some(buffer) if buffer.window.is_none() => WindowSupport::NotReached,
            Some(buffer) if buffer.serves(request) => WindowSupport::Reach,
            Some(_) => WindowSupport::Unfit,
        };
        let query = Query {
            window: support,
            function,
            reduce_op: request.reduce_op,
            data_type: request.data_type,
            bytes,
            ranks: self.ranks,
            slot_bytes: self.slot_bytes,
            one_shot: self.one_shot,
            peer_access: self.peer_access,
            limits: self.limits,
        };
        let row = table::choose(&query).ok_or_else(|| table::none_left(&query))?;
        // A message has as many channels as there is room for, the same on all ranks; an operation round rings has all channels.
        let available = match self.device_fifo_parts {
            Some(parts) if is_made_of_messages(function) => parts,
            _ => self.channels,
        };
        Ok(Method {
            algorithm: row.algorithm,
            path: row.path,
            channels: row
                .path
                .channels(bytes, available, self.device_fifo_parts.is_some()),
        })
    }
}

/// Whether a task drains with the messages of its group: its function is made of messages, and no kernel does all of it in peer memory.
pub(crate) fn drains_with_messages(function: Function, method: &Method) -> bool {
    function.is_p2p() || is_made_of_messages(function) && !method.path.is_peer_access()
}
