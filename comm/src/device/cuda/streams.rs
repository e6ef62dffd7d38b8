//! Streams and events: the driver's.

use cudarc::driver::sys::{self, CUevent, CUresult};
use ringsight_comm_base::sync::lock;

use super::{
    CudaDevice,
    driver::{self, OutsideCapture, call, check, stream as handle},
};
use crate::device::{Contexts, DeviceError, Event, Progress, Result, Stream, Streams};

/// The last handle of a default stream (`CU_STREAM_PER_THREAD`).
const PER_THREAD: usize = 2;

impl Streams for CudaDevice {
    fn check_stream(&self, stream: Stream, device: i32) -> Result<()> {
        // A default stream is of the current context.
        if stream.0 <= PER_THREAD {
            return Ok(());
        }
        let own = self.gpu(device)?;
        let (known, context) = driver::context_of(stream);
        match known {
            CUresult::CUDA_SUCCESS => {}
            CUresult::CUDA_ERROR_INVALID_HANDLE | CUresult::CUDA_ERROR_CONTEXT_IS_DESTROYED => {
                return check("cuStreamGetCtx", known);
            }
            // Older drivers cannot answer for streams of green contexts, which are usable.
            _ => return Ok(()),
        }
        if context == own.context || context.is_null() {
            return Ok(());
        }
        let whose = match driver::device_of(context) {
            Ok(other) if other != device => format!("GPU {other}'s, the communicator's is GPU {device}"),
            Ok(_) => format!("of a context of GPU {device} that is not its primary one"),
            Err(error) => {
                format!(
                    "of a context that says nothing of its GPU, the communicator's is GPU {device}: {error}"
                )
            }
        };
        Err(DeviceError::InvalidHandle(format!("{:#x} is {whose}", stream.0)))
    }

    fn stream_create(&self) -> Result<Stream> {
        self.set_current(self.current()?)?;
        Ok(Stream(driver::new_stream()? as usize))
    }

    fn stream_destroy(&self, stream: Stream) -> Result<()> {
        // SAFETY: the caller's handle, as with every CUDA call.
        unsafe { call!(cuStreamDestroy_v2(handle(stream))) }
    }

    fn stream_id(&self, stream: Stream) -> Result<u64> {
        let mut id = 0;
        // SAFETY: the caller's handle; writes to the local. Also for default streams, of which each thread and context may have its own.
        unsafe { call!(cuStreamGetId(handle(stream), &raw mut id)) }.map(|()| id)
    }

    fn stream_wait_event(&self, stream: Stream, event: Event) -> Result<()> {
        // SAFETY: as above.
        unsafe { call!(cuStreamWaitEvent(handle(stream), event.0 as CUevent, 0)) }
    }

    fn event_create(&self) -> Result<Event> {
        Ok(Event(driver::new_order_event()? as usize))
    }

    fn event_destroy(&self, event: Event) -> Result<()> {
        lock(&self.captures).forget_event(event);
        // SAFETY: the caller's handle.
        unsafe { call!(cuEventDestroy_v2(event.0 as CUevent)) }
    }

    fn event_record(&self, event: Event, stream: Stream) -> Result<()> {
        // SAFETY: as above.
        unsafe { call!(cuEventRecord(event.0 as CUevent, handle(stream))) }
    }

    fn event_query(&self, event: Event) -> Result<Progress> {
        // SAFETY: as above.
        match unsafe { sys::cuEventQuery(event.0 as CUevent) } {
            CUresult::CUDA_ERROR_NOT_READY => Ok(Progress::Pending),
            result => check("cuEventQuery", result).map(|()| Progress::Done),
        }
    }

    fn allow_queries_during_captures(&self) -> Result<()> {
        OutsideCapture::enter_for_good()
    }
}
