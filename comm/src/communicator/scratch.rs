//! Scratch memory into which copy engines move contributions to reductions. All ranks allocate it with the first window that is long enough.

use std::sync::Arc;

use ringsight_comm_base::{error::Result, log};
use ringsight_kernels::{
    cuda::{
        collective::has_sum_kernel,
        tiles::{scratch_bytes, tile_bytes},
    },
    launch::Scratch,
};
use ringsight_records::{DataType, Function, ReduceOp};

use super::{
    Communicator,
    peer_memory::{Memory, reach_all},
};

impl Communicator {
    /// The scratch memory for a window of `bytes` bytes, with number `number`. All ranks call it and get the same answer: `None` if the window is too
    /// short for reductions, or some rank cannot have the memory.
    ///
    /// # Errors
    /// A rank that is gone or does not come, or an abort.
    pub(super) fn scratch(&self, number: u32, bytes: u64) -> Result<Option<Arc<Scratch>>> {
        let has_kernels = has_sum_kernel(ReduceOp::Sum, DataType::Float32, self.ranks);
        let functions = [Function::AllReduce, Function::ReduceScatter];
        let least = functions.map(|function| {
            self.launch
                .capabilities
                .limits
                .copy_engine_bytes_of(function, self.ranks)
        });
        if !has_kernels || least.into_iter().all(|least| bytes < least) {
            return Ok(None);
        }
        if let Some(scratch) = self.windows.scratch.get() {
            return Ok(scratch.clone());
        }
        let made = self.make_scratch(number)?;
        if let Err(why) = &made {
            tracing::warn!(target: log::INIT, "Copy engines move nothing that is reduced: {why}");
        }
        Ok(self.windows.scratch.get_or_init(|| made.ok()).clone())
    }

    fn make_scratch(&self, number: u32) -> Result<std::result::Result<Arc<Scratch>, String>> {
        let tile_bytes = tile_bytes(self.ranks as usize, self.launch.capabilities.limits.tile_bytes);
        let bytes = scratch_bytes(self.ranks as usize, tile_bytes);
        let own = self
            .on_device(|device| Ok(device.allocate_shared(usize::try_from(bytes).unwrap_or(usize::MAX))?))
            .map_err(|error| error.text)
            .and_then(|share| share.ok_or_else(|| "the device shares no memory".to_owned()));
        let mine = own.as_ref().map(|share| &*share.handle).map_err(String::as_str);
        let handles = match self.agree_for_window(number, mine)? {
            Ok(handles) => handles,
            Err(why) => return Ok(Err(why)),
        };
        let mut memory = Memory::new(&self.peers_ended_well);
        let reached = own.and_then(|own| {
            memory.own = Some(own.memory);
            let reached =
                self.on_device(|device| Ok(reach_all(device, (self.rank, own.base), &handles, &mut memory)));
            let reached = reached.map_err(|error| error.text)?;
            reached.map_err(|why| why.to_string())
        });
        // No rank writes there before all ranks reach all memory. If one does not, none writes.
        let answer = reached.as_ref().map(|_| &[][..]).map_err(String::as_str);
        let agreed = self.agree_for_window(number, answer)?.and(reached);
        if agreed.is_err() {
            memory.foreign = false;
        }
        Ok(agreed.map(|reached| {
            Arc::new(Scratch {
                tile_bytes,
                bases: reached.bases,
                memory: Box::new(memory),
            })
        }))
    }
}
