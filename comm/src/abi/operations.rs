//! Entry points that communicate.

#![expect(non_snake_case, reason = "NCCL's names")]
#![expect(clippy::too_many_arguments, reason = "NCCL's signatures")]

use std::{
    ffi::{c_int, c_void},
    sync::Arc,
};

use ringsight_comm_base::error::{Result, ResultCode};
use ringsight_kernels::Scalar;
use ringsight_records::{Function, ReduceOp};

use super::{
    arguments::{buffer, count as check_count, data_type, rank},
    entry,
};
use crate::{
    communicator::{self, Communicator, Handle},
    device::Stream,
    group, observe,
    op::Request,
};

/// Checks the arguments as NCCL does and enqueues the operation.
pub(super) fn operation(
    function: Function,
    (send, recv): (*const c_void, *mut c_void),
    count: usize,
    type_code: c_int,
    op_code: Option<c_int>,
    peer: Option<(&str, c_int)>,
    comm: Handle,
    stream: Stream,
) -> Result<()> {
    let start = observe::now_ns();
    let enqueue = |comm: Arc<Communicator>| {
        let data_type = data_type(type_code)?;
        // What the number stands for is kept from here on: it may be destroyed as soon as this call returns.
        let (reduce_op, scalar) = op_code.map_or(Ok((ReduceOp::None, Scalar::None)), |code| {
            comm.reduce_ops.resolve(code, data_type)
        })?;
        let peer = peer.map(|(name, value)| rank(name, value, &comm)).transpose()?;
        let count = check_count(count, data_type, comm.ranks)?;
        let is_root = peer == Some(comm.rank);
        // Which buffers this rank uses; NCCL does not look at the others.
        let (sends, receives) = match function {
            Function::Send => (true, false),
            Function::Recv => (false, true),
            Function::Broadcast | Function::Scatter => (is_root, true),
            Function::Reduce | Function::Gather => (true, is_root),
            _ => (true, true),
        };
        let request = Request {
            function,
            send: if sends {
                buffer("sendbuff", send, count)?
            } else {
                0
            },
            recv: if receives {
                buffer("recvbuff", recv.cast_const(), count)?
            } else {
                0
            },
            count,
            data_type,
            reduce_op,
            scalar,
            peer,
            stream,
            window: None,
        };
        group::enqueue(comm, request, start)
    };
    let result = communicator::lookup(comm).and_then(enqueue);
    if let Err(error) = &result {
        group::note_error(error);
    }
    result
}

entry! {
    /// Reduces `count` elements of every rank; every rank gets the result.
    ncclAllReduce, pncclAllReduce(
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: c_int, op: c_int, comm: Handle,
        stream: Stream,
    ) {
        operation(Function::AllReduce, (sendbuff, recvbuff), count, datatype, Some(op), None, comm, stream)
    }
}

entry! {
    /// Every rank gets the `sendcount` elements of each rank, in rank order.
    ncclAllGather, pncclAllGather(
        sendbuff: *const c_void, recvbuff: *mut c_void, sendcount: usize, datatype: c_int, comm: Handle,
        stream: Stream,
    ) {
        operation(Function::AllGather, (sendbuff, recvbuff), sendcount, datatype, None, None, comm, stream)
    }
}

entry! {
    /// Reduces `recvcount` times ranks elements; rank `r` gets block `r` of the result.
    ncclReduceScatter, pncclReduceScatter(
        sendbuff: *const c_void, recvbuff: *mut c_void, recvcount: usize, datatype: c_int, op: c_int, comm: Handle,
        stream: Stream,
    ) {
        operation(Function::ReduceScatter, (sendbuff, recvbuff), recvcount, datatype, Some(op), None, comm, stream)
    }
}

entry! {
    /// Every rank gets the `count` elements of `root`.
    ncclBroadcast, pncclBroadcast(
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: c_int, root: c_int, comm: Handle,
        stream: Stream,
    ) {
        let root = Some(("root", root));
        operation(Function::Broadcast, (sendbuff, recvbuff), count, datatype, None, root, comm, stream)
    }
}

entry! {
    /// [`ncclBroadcast`] in place.
    ncclBcast, pncclBcast(
        buff: *mut c_void, count: usize, datatype: c_int, root: c_int, comm: Handle, stream: Stream,
    ) {
        let root = Some(("root", root));
        operation(Function::Broadcast, (buff.cast_const(), buff), count, datatype, None, root, comm, stream)
    }
}

entry! {
    /// Reduces `count` elements of every rank; `root` gets the result.
    ncclReduce, pncclReduce(
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: c_int, op: c_int, root: c_int,
        comm: Handle, stream: Stream,
    ) {
        let root = Some(("root", root));
        operation(Function::Reduce, (sendbuff, recvbuff), count, datatype, Some(op), root, comm, stream)
    }
}

entry! {
    /// Sends block `r` of `count` elements to rank `r`; what rank `r` sends here becomes block `r` of the result. The
    /// buffers must not overlap unless there is one rank only.
    ncclAlltoAll, pncclAlltoAll(
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: c_int, comm: Handle, stream: Stream,
    ) {
        operation(Function::AlltoAll, (sendbuff, recvbuff), count, datatype, None, None, comm, stream)
    }
}

entry! {
    /// `root` gets the `count` elements of each rank, in rank order; in place if its own are where they belong.
    ncclGather, pncclGather(
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: c_int, root: c_int, comm: Handle,
        stream: Stream,
    ) {
        let root = Some(("root", root));
        operation(Function::Gather, (sendbuff, recvbuff), count, datatype, None, root, comm, stream)
    }
}

entry! {
    /// Rank `r` gets block `r` of `count` elements of `root`; in place if the root's own stay where they are.
    ncclScatter, pncclScatter(
        sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: c_int, root: c_int, comm: Handle,
        stream: Stream,
    ) {
        let root = Some(("root", root));
        operation(Function::Scatter, (sendbuff, recvbuff), count, datatype, None, root, comm, stream)
    }
}

entry! {
    /// Sends `count` elements to `peer`, which receives as many.
    ncclSend, pncclSend(
        sendbuff: *const c_void, count: usize, datatype: c_int, peer: c_int, comm: Handle, stream: Stream,
    ) {
        let buffers = (sendbuff, std::ptr::null_mut());
        operation(Function::Send, buffers, count, datatype, None, Some(("peer", peer)), comm, stream)
    }
}

entry! {
    /// Receives `count` elements from `peer`, which sends as many.
    ncclRecv, pncclRecv(
        recvbuff: *mut c_void, count: usize, datatype: c_int, peer: c_int, comm: Handle, stream: Stream,
    ) {
        let buffers = (std::ptr::null(), recvbuff);
        operation(Function::Recv, buffers, count, datatype, None, Some(("peer", peer)), comm, stream)
    }
}
