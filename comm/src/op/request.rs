//! The arguments of a call.

use std::{fmt, sync::Arc};

use ringsight_kernels::{Scalar, launch::Window};
use ringsight_records::{DataType, Function, ReduceOp};

use super::call::{Call, WindowPlace, is_made_of_messages};

/// Opaque handle of a stream as it crosses the C ABI: the value of a `cudaStream_t`. 0 is the default stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord, Default)]
#[repr(transparent)]
pub struct Stream(pub usize);

/// The arguments of a communication function.
#[derive(Clone, Debug)]
pub struct Request {
    /// Which function.
    pub function: Function,
    /// Send buffer, 0 if it has none.
    pub send: usize,
    /// Receive buffer, 0 if it has none.
    pub recv: usize,
    /// Elements.
    pub count: usize,
    /// Their type.
    pub data_type: DataType,
    /// Reduction.
    pub reduce_op: ReduceOp,
    /// What a PreMulSum multiplies with.
    pub scalar: Scalar,
    /// Root of a rooted collective, peer of a send or receive.
    pub peer: Option<u32>,
    /// The stream given.
    pub stream: Stream,
    /// The symmetric window that one of its buffers is in, if copy engines do it there ([`DataPath::CopyEngine`](super::DataPath::CopyEngine)).
    pub(crate) window: Option<WindowBuffer>,
}

impl Request {
    /// An all_reduce of two floats.
    #[cfg(test)]
    pub(crate) fn example() -> Self {
        Self {
            function: Function::AllReduce,
            send: 0x1000,
            recv: 0x2000,
            count: 2,
            data_type: DataType::Float32,
            reduce_op: ReduceOp::Sum,
            scalar: Scalar::None,
            peer: None,
            stream: Stream(1),
            window: None,
        }
    }

    /// What the ranks must agree on.
    #[must_use]
    pub fn call(&self) -> Call {
        Call {
            function: self.function,
            count: self.count,
            data_type: self.data_type,
            reduce_op: self.reduce_op,
            peer: self.peer,
            place: self.window.as_ref().and_then(|found| found.place(self)),
        }
    }

    /// Bytes of [`Request::count`] elements.
    pub(crate) fn bytes_of_one(&self) -> u64 {
        (self.count * self.data_type.size()) as u64
    }

    /// Message bytes by nccl-tests' definition.
    #[must_use]
    pub fn bytes(&self, ranks: u32) -> u64 {
        let one = self.bytes_of_one();
        match self.function {
            Function::AllGather
            | Function::ReduceScatter
            | Function::AlltoAll
            | Function::Gather
            | Function::Scatter => one * u64::from(ranks),
            _ => one,
        }
    }

    /// Its (send, receive) buffers: address, 0 if it has none, and bytes.
    pub(crate) fn buffers(&self, ranks: u32) -> [(usize, usize); 2] {
        let one = self.count * self.data_type.size();
        let all = one * ranks as usize;
        let (send, recv) = match self.function {
            Function::AllGather | Function::Gather => (one, all),
            Function::ReduceScatter | Function::Scatter => (all, one),
            Function::AlltoAll => (all, all),
            _ => (one, one),
        };
        [(self.send, send), (self.recv, recv)]
    }

    /// The same, where this rank's part of the operation uses them.
    pub(crate) fn used_buffers(&self, rank: u32, ranks: u32) -> [(usize, usize); 2] {
        let is_root = self.peer == Some(rank);
        let [send, recv] = self.buffers(ranks);
        match self.function {
            Function::Broadcast | Function::Scatter if !is_root => [(0, 0), recv],
            Function::Reduce | Function::Gather if !is_root => [send, (0, 0)],
            _ => [send, recv],
        }
    }

    /// Bytes by which its algorithm is chosen: those of one message where it is made of several.
    pub(crate) fn bytes_of_choice(&self, ranks: u32) -> u64 {
        if is_made_of_messages(self.function) {
            self.bytes_of_one()
        } else {
            self.bytes(ranks)
        }
    }
}

/// The buffer of an operation in a symmetric window: the receive buffer, of a reduce_scatter the send buffer.
#[derive(Clone)]
#[cfg_attr(test, derive(Default))]
pub(crate) struct WindowBuffer {
    /// Number of the window.
    pub(crate) number: u32,
    /// Where in it the buffer begins, in bytes.
    pub(crate) offset: u64,
    /// `None` if not all ranks reach it.
    pub(crate) window: Option<Arc<Window>>,
}

impl WindowBuffer {
    /// Whether copy engines can do such an operation in it.
    pub(crate) fn serves(&self, request: &Request) -> bool {
        // Kernels reduce what begins with whole words. Windows begin with pages, so it does on all ranks or on none; and what others have for a rank
        // if it is so long.
        let is_aligned = self.offset.is_multiple_of(16)
            && (request.function != Function::ReduceScatter || request.bytes_of_one().is_multiple_of(16));
        let reduces = request.function.reduces();
        let has = |window: &Arc<Window>| !reduces || is_aligned && window.scratch.is_some();
        self.window.as_ref().is_some_and(has)
    }

    /// What the ranks must agree on, if copy engines are to use it for such an operation.
    pub(crate) fn place(&self, request: &Request) -> Option<WindowPlace> {
        self.serves(request).then_some(WindowPlace {
            window: self.number,
            offset: self.offset,
        })
    }
}

impl fmt::Debug for WindowBuffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "byte {} of window {}", self.offset, self.number)
    }
}
