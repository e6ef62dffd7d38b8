//! A plan that never ends, to be found by a watchdog.

use ringsight_kernels::{Connections, Scalar};
use ringsight_records::{Algorithm, DataType, Flags, Function, ReduceOp};

use super::{Plans, builder::Builder};
use crate::{
    communicator::Communicator,
    error::{Error, Result, ResultCode},
    observe,
    op::{DataPath, Method, OpInfo, Request, SIMULATED, Stream, Task},
};

/// A plan of one operation that never ends on this rank, and that no other rank takes part in: a receive from itself over a
/// FIFO that nobody sends to.
pub(crate) fn stuck(comm: &Communicator, stream: Stream, group: u32) -> Result<Plans<'_>> {
    let fifo = crate::proxy::memory::private(comm.slot_bytes)
        .map_err(|error| Error::new(ResultCode::SystemError, format!("memory for a FIFO: {error}")))?;
    let (op, now) = (observe::next_op(), observe::now_ns());
    let task = Task {
        request: Request {
            function: Function::Recv,
            send: 0,
            recv: 0,
            count: 1,
            data_type: DataType::Int8,
            reduce_op: ReduceOp::None,
            scalar: Scalar::None,
            peer: Some(comm.rank),
            stream,
            window: None,
        },
        info: OpInfo {
            op,
            comm: comm.id,
            // Of no sequence that counts anything.
            seq: SIMULATED | u64::from(op),
            bytes: 1,
            rank: comm.rank,
            peer: comm.rank.cast_signed(),
            flags: Flags::P2P,
        },
        method: Method {
            algorithm: Algorithm::Direct,
            path: DataPath::Fifo,
            channels: 1,
        },
        node: 0,
        graph: 0,
        api_start_ns: now,
        api_end_ns: now,
        group_depth: 1,
        tid: 0,
    };
    let mut plan = Builder::new(comm, Some(group), None);
    let work = plan.message_of(&task, Function::Recv, 0..1, Connections::Recv(fifo));
    plan.add_work(0, work);
    plan.add_op(&task, None, 1, 0, task.method);
    plan.finish(false)?;
    Ok(Plans::of(comm, plan))
}
