//! Making an operation of a plan known: its description, its record, its log line.

use ringsight_comm_base::log;
use ringsight_records::{Description, State};

use crate::{
    device::device,
    observe,
    op::{Method, Task, api_name},
};

/// How an operation of a plan is done, as it is described.
#[derive(Clone, Copy)]
pub(super) struct Described {
    /// As far as this rank knows: its kernel may find that it is done otherwise.
    pub(super) method: Method,
    pub(super) channel_mask: u64,
    pub(super) proxy_ops: u32,
}

/// Writes the description of an operation of plan `plan` and group `group` of a communicator of `ranks` ranks, its log line, and the record that it
/// is planned.
pub(super) fn announce(task: &Task, described: Described, (ranks, group, plan): (u32, u32, u32)) {
    let Described {
        method,
        channel_mask,
        proxy_ops,
    } = described;
    let (request, info) = (&task.request, &task.info);
    let p2p = request.function.is_p2p();
    let peer = request.peer.map_or(-1, |peer| peer as i32);
    observe::describe(&Description {
        comm: info.comm,
        seq: info.seq,
        count: request.count as u64,
        bytes: info.bytes,
        send_buffer: request.send as u64,
        recv_buffer: request.recv as u64,
        stream: request.stream.0 as u64,
        channel_mask,
        api_start_ns: task.api_start_ns,
        api_end_ns: task.api_end_ns,
        op: info.op,
        group,
        plan,
        rank: info.rank,
        ranks,
        root: if p2p { -1 } else { peer },
        peer: if p2p { peer } else { -1 },
        proxy_ops,
        graph: task.graph,
        node: task.node,
        group_depth: task.group_depth,
        tid: task.tid,
        function: request.function.code(),
        data_type: request.data_type.code(),
        reduce_op: request.reduce_op.code(),
        algorithm: method.algorithm.code(),
        protocol: method.path.protocol().code(),
        channels: channel_mask.count_ones() as u8,
        // Without a device nothing would have come here.
        warps: device().map_or(1, |device| device.warps(task, ranks)),
        flags: info.flags.0,
        ..Default::default()
    });
    log_method(task, channel_mask, method);
    info.emit_now(info.kind(), State::START);
}

/// Logs how an operation is done.
fn log_method(task: &Task, channels: u64, method: Method) {
    let (low, high) = if channels == 0 {
        (0, 0)
    } else {
        (channels.trailing_zeros(), channels.ilog2())
    };
    tracing::info!(
        target: log::TUNING,
        "{}: {} Bytes -> Algo {} proto {} channel{{Lo..Hi}}={{{low}..{high}}}",
        api_name(task.request.function),
        task.info.bytes,
        method.algorithm.name().to_uppercase(),
        method.path.protocol().name().to_uppercase(),
    );
}
