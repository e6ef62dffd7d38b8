//! Completion queues.

use std::{
    ffi::CStr,
    os::fd::{AsRawFd, RawFd},
    ptr,
    sync::Arc,
};

use ringsight_comm_base::sys::StandardTaken;

use crate::{
    device::{Context, Queue, check, set_nonblocking},
    error::{Error, Result},
    sys,
};

/// A completion queue, with a descriptor that reports completions to a thread that sleeps.
pub struct Cq {
    pub(crate) raw: *mut sys::Cq,
    channel: *mut sys::CompChannel,
    context: Arc<Context>,
}

// SAFETY: the library's calls may be made from any thread; polling takes the queue's own lock.
unsafe impl Send for Cq {}
// SAFETY: as above.
unsafe impl Sync for Cq {}

/// The completion of a work or receive request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Completion {
    /// [`crate::queue::Write::id`] or the receive request's.
    pub id: u64,
    /// Status. Read it first: after an error only `id` and `qp` are defined.
    pub status: Status,
    /// A peer's write with this immediate has consumed the receive request.
    pub immediate: Option<u32>,
    /// A peer's send of so many bytes has consumed the receive request.
    pub received: Option<usize>,
    /// The local queue pair.
    pub qp: u32,
}

impl Completion {
    /// A placeholder, for buffers.
    pub const EMPTY: Self = Self {
        id: 0,
        status: Status::Done,
        immediate: None,
        received: None,
        qp: 0,
    };
}

/// Status of a completion.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// Success. For a write: the peer's device has acknowledged it.
    Done,
    /// An error.
    Failed {
        /// `enum ibv_wc_status`.
        code: u32,
        /// The vendor's error code.
        vendor: u32,
    },
}

impl Status {
    /// `IBV_WC_WR_FLUSH_ERR`: flushed, because its queue pair was in the error state.
    pub const FLUSHED: u32 = 5;

    /// libibverbs' text for it.
    #[must_use]
    pub fn text(self, context: &Context) -> String {
        match self {
            Self::Done => "done".into(),
            Self::Failed { code, vendor } => {
                // SAFETY: any number has a text, a C string of the library's own.
                let text = unsafe { CStr::from_ptr((context.lib().wc_status_str)(code)) };
                format!("{} (status {code}, vendor {vendor:#x})", text.to_string_lossy())
            }
        }
    }
}

/// Completions of one poll at most.
pub const BATCH: usize = 16;

impl Cq {
    /// A completion queue with room for `entries` completions.
    ///
    /// # Errors
    /// A call of the device failed.
    pub fn new(context: &Arc<Context>, entries: u32) -> Result<Arc<Self>> {
        let lib = context.lib();
        // The channel is a descriptor.
        let _standard = StandardTaken::new();
        // SAFETY: an open device.
        let channel = unsafe { (lib.create_comp_channel)(context.raw()) };
        if channel.is_null() {
            let what = format!("making a completion channel of {}", context.name());
            return Err(Error::last(what));
        }
        // SAFETY: an open device and a channel of it.
        let raw =
            unsafe { (lib.create_cq)(context.raw(), entries.cast_signed(), ptr::null_mut(), channel, 0) };
        if raw.is_null() {
            let error = Error::last(format!(
                "making a completion queue of {entries} entries of {}",
                context.name()
            ));
            // SAFETY: made above, and nobody uses it.
            unsafe { (lib.destroy_comp_channel)(channel) };
            return Err(error.of_locking(entries as usize * 64));
        }
        let cq = Self {
            raw,
            channel,
            context: Arc::clone(context),
        };
        set_nonblocking(cq.as_raw_fd()).map_err(|error| Error::new("reading completion events", error))?;
        Ok(Arc::new(cq))
    }

    /// Its name in the events of its device.
    pub(crate) fn name(&self) -> Queue {
        Queue::Completions(self.raw.addr())
    }

    /// Polls completions into `room`.
    ///
    /// # Errors
    /// The queue has overrun.
    pub fn poll<'a>(&self, room: &'a mut [Completion; BATCH]) -> Result<&'a [Completion]> {
        let mut raw = [sys::Wc::default(); BATCH];
        // SAFETY: a queue of an open device, whose driver fills at most as many as it is told.
        let count = unsafe {
            let poll = (*self.context.raw()).ops.poll_cq;
            poll(self.raw, BATCH as i32, raw.as_mut_ptr())
        };
        if count < 0 {
            return Err(Error::code(
                format!("polling a completion queue of {}", self.context.name()),
                libc::EIO,
            ));
        }
        let count = count as usize;
        for (completion, raw) in room.iter_mut().zip(&raw[..count]) {
            let status = match raw.status {
                0 => Status::Done,
                code => Status::Failed {
                    code,
                    vendor: raw.vendor_err,
                },
            };
            let arrived = status == Status::Done && raw.opcode == sys::WC_RECV_RDMA_WITH_IMM;
            *completion = Completion {
                id: raw.wr_id,
                status,
                immediate: arrived.then(|| u32::from_be(raw.imm_data)),
                received: (status == Status::Done && raw.opcode == sys::WC_RECV)
                    .then_some(raw.byte_len as usize),
                qp: raw.qp_num,
            };
        }
        Ok(&room[..count])
    }

    /// Has the descriptor become readable at the next completion. Poll once more before waiting for it: earlier completions do not make it
    /// readable.
    ///
    /// # Errors
    /// A call of the device failed.
    pub fn arm(&self) -> Result<()> {
        // SAFETY: a queue of an open device.
        let code = unsafe { ((*self.context.raw()).ops.req_notify_cq)(self.raw, 0) };
        check(code, || {
            format!("arming a completion queue of {}", self.context.name())
        })
    }

    /// Takes the descriptor's events. Afterwards it is neither readable nor armed.
    pub fn take_events(&self) {
        let lib = self.context.lib();
        let (mut cq, mut own) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: the channel of this queue alone; both are writable; the descriptor does not block.
        while unsafe { (lib.get_cq_event)(self.channel, &raw mut cq, &raw mut own) } == 0 {
            // SAFETY: one event of this queue.
            unsafe { (lib.ack_cq_events)(cq, 1) };
        }
    }
}

impl AsRawFd for Cq {
    fn as_raw_fd(&self) -> RawFd {
        // SAFETY: a channel that lives as long as this.
        unsafe { (*self.channel).fd }
    }
}

impl Drop for Cq {
    fn drop(&mut self) {
        self.take_events();
        let lib = self.context.lib();
        // SAFETY: its queue pairs are gone, because they hold it; the queue is destroyed before its channel.
        unsafe {
            (lib.destroy_cq)(self.raw);
            (lib.destroy_comp_channel)(self.channel);
        }
    }
}
