//! A plan that never ends, to be found by a watchdog.

use ringsight_comm_base::error::{Error, Result, ResultCode};
use ringsight_kernels::{ChannelWork, Connections, Scalar};
use ringsight_records::{Algorithm, DataType, Flags, Function, ReduceOp};
use smallvec::{SmallVec, smallvec};

use super::{
    LaunchContext,
    announce::{Described, announce},
    bind::{BoundPlan, BoundPlans, assemble, message_of},
};
use crate::{
    observe,
    op::{DataPath, Method, OpInfo, Request, SIMULATED, Stream, Task},
    progress::{Contents, OpState},
    transport,
};

/// A plan of one operation that never ends on this rank, and that no other rank takes part in: a receive from itself over a
/// FIFO that nobody sends to.
pub(super) fn stuck(context: &LaunchContext, stream: Stream, group: u32) -> Result<BoundPlans> {
    let capabilities = &context.capabilities;
    let fifo = transport::fifo_memory::private(capabilities.slot_bytes)
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
            peer: Some(capabilities.rank),
            stream,
            window: None,
        },
        info: OpInfo {
            op,
            comm: context.comm,
            // Of no sequence that counts anything.
            seq: SIMULATED | u64::from(op),
            bytes: 1,
            rank: capabilities.rank,
            peer: capabilities.rank.cast_signed(),
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
    let mut plan = BoundPlan::new(observe::next_plan());
    let described = Described {
        method: task.method,
        channel_mask: 1,
        proxy_ops: 0,
    };
    announce(&task, described, (capabilities.ranks, group, plan.number));
    plan.enter(&task);
    let mut contents = Contents {
        number: plan.number,
        states: smallvec![OpState::new(task.info, None, 1, 0)],
        shared: Vec::new(),
        persistent: false,
    };
    let work = message_of(context, &task, Function::Recv, 0..1, Connections::Recv(fifo));
    let works = vec![ChannelWork {
        channel: 0,
        work: vec![work],
    }];
    plan.ready = Some(assemble(context, None, works, &mut contents, None)?);
    Ok(SmallVec::from_iter([plan]))
}
