//! Making an operation of a plan known: its description, its record, and what was called.

use ringsight_records::{Algorithm, Description, Protocol, State};

use super::{Plan, Task};
use crate::{
    checks,
    communicator::Communicator,
    device::{Way, device},
    log, observe,
};

/// How an operation is carried out.
pub(super) struct Carried {
    pub(super) channel_mask: u64,
    pub(super) proxy_ops: u32,
    pub(super) algorithm: Algorithm,
    pub(super) protocol: Protocol,
    /// How its kernel moves data.
    pub(super) kernel_protocol: Protocol,
    pub(super) among_peers: bool,
}

impl Plan {
    /// Describes an operation and lists it.
    pub(super) fn announce(&mut self, comm: &Communicator, group: u32, task: &Task, carried: &Carried) {
        self.describe(comm, group, task, carried);
        let how = (carried.algorithm, carried.protocol);
        log_choice(task, carried.channel_mask, how);
        task.info.emit_now(task.info.kind(), State::START);
        self.ops.push(task.info);
        self.calls
            .push(checks::Entry::new(&task.info, task.request.call()));
    }

    fn describe(&self, comm: &Communicator, group: u32, task: &Task, carried: &Carried) {
        let (request, info) = (&task.request, &task.info);
        let p2p = request.function.is_p2p();
        let peer = request.peer.map_or(-1, |peer| peer as i32);
        let way = Way {
            function: request.function,
            algorithm: carried.algorithm,
            protocol: carried.kernel_protocol,
            bytes: info.bytes,
            ranks: comm.ranks,
            among_peers: carried.among_peers,
        };
        observe::describe(&Description {
            comm: info.comm,
            seq: info.seq,
            count: request.count as u64,
            bytes: info.bytes,
            send_buffer: request.send as u64,
            recv_buffer: request.recv as u64,
            stream: request.stream.0 as u64,
            channel_mask: carried.channel_mask,
            api_start_ns: task.api_start_ns,
            api_end_ns: task.api_end_ns,
            op: info.op,
            group,
            plan: self.number,
            rank: info.rank,
            ranks: comm.ranks,
            root: if p2p { -1 } else { peer },
            peer: if p2p { peer } else { -1 },
            proxy_ops: carried.proxy_ops,
            graph: task.graph,
            node: task.node,
            group_depth: task.group_depth,
            tid: task.tid,
            function: request.function.code(),
            data_type: request.data_type.code(),
            reduce_op: request.reduce_op.code(),
            algorithm: carried.algorithm.code(),
            protocol: carried.protocol.code(),
            channels: carried.channel_mask.count_ones() as u8,
            // Without a device nothing would have come here.
            warps: device().map_or(1, |device| device.warps(&way)),
            flags: info.flags.0,
            ..Default::default()
        });
    }
}

/// Logs what was chosen for an operation.
fn log_choice(task: &Task, channels: u64, (algorithm, protocol): (Algorithm, Protocol)) {
    let (low, high) = if channels == 0 {
        (0, 0)
    } else {
        (channels.trailing_zeros(), channels.ilog2())
    };
    tracing::info!(
        target: log::TUNING,
        "{}: {} Bytes -> Algo {} proto {} channel{{Lo..Hi}}={{{low}..{high}}}",
        checks::api_name(task.request.function),
        task.info.bytes,
        algorithm.name().to_uppercase(),
        protocol.name().to_uppercase(),
    );
}
