//! Lines that several places would otherwise put together. Each costs one relaxed load when nobody wants it.

use ringsight_records::{Algorithm, Protocol, ReduceOp};

use super::{COLL, GRAPH, NET, P2P, SHM, TUNING};
use crate::{
    checks::api_name,
    plan::{OpInfo, Request, Task},
    proxy::message::Endpoint,
    topology::Topology,
    transport,
};

/// The rings of a communicator: the whole of each by rank 0, its own neighbours by every rank.
pub(crate) fn rings(topology: &Topology, channels: u32) {
    if !tracing::enabled!(target: GRAPH, tracing::Level::INFO) {
        return;
    }
    for channel in 0..channels {
        let ring = topology.ring(channel as u8);
        if topology.rank() == 0 {
            let order: Vec<_> = ring.iter().map(u32::to_string).collect();
            tracing::info!(target: GRAPH, "Channel {channel:02}/{channels:02} : {}", order.join(" "));
        }
        if let [own, next, ..] = *ring
            && let Some(prev) = ring.last()
        {
            tracing::info!(target: GRAPH, "Ring {channel:02} : {prev} -> {own} -> {next}");
        }
    }
}

/// A connection that stands, from this rank's side, over a transport of that name; of RDMA over that port, and whether its slots are in
/// the memory of the GPU.
pub(crate) fn connection(
    topology: &Topology,
    endpoint: &Endpoint,
    transport: &str,
    (port, is_direct): (Option<u8>, bool),
) {
    let Endpoint {
        peer,
        channel,
        p2p,
        is_send,
        ..
    } = *endpoint;
    let name = match transport {
        transport::P2P => "P2P".into(),
        transport::SHM => "SHM".into(),
        _ => match port {
            Some(port) if is_direct => format!("NET/IB/{port}/GDRDMA"),
            Some(port) => format!("NET/IB/{port}"),
            None => "NET/Socket".into(),
        },
    };
    let rank = topology.rank();
    let (from, to) = if is_send { (rank, peer) } else { (peer, rank) };
    let (from_device, to_device) = (topology.info(from).device, topology.info(to).device);
    let line = format_args!(
        "Channel {channel:02}/{} : {from}[{from_device}] -> {to}[{to_device}] [{}] via {name}",
        u8::from(p2p),
        if is_send { "send" } else { "receive" },
    );
    match transport {
        transport::P2P => tracing::info!(target: P2P, "{line}"),
        transport::SHM if p2p => tracing::info!(target: P2P, "{line}"),
        transport::SHM => tracing::info!(target: SHM, "{line}"),
        _ => tracing::info!(target: NET, "{line}"),
    }
}

/// An operation as it was called.
pub(crate) fn operation(request: &Request, info: &OpInfo, ranks: u32) {
    tracing::info!(
        target: COLL,
        "{}: opCount {:x} sendbuff {:#x} recvbuff {:#x} count {} datatype {} op {} {} {} comm {:#x} [nranks={ranks}] stream {:#x}",
        api_name(request.function),
        info.seq,
        request.send,
        request.recv,
        request.count,
        request.data_type.code(),
        match request.reduce_op {
            ReduceOp::None => 0,
            op => op.code(),
        },
        if request.function.is_p2p() { "peer" } else { "root" },
        request.peer.unwrap_or(0),
        info.comm,
        request.stream.0,
    );
}

/// What was chosen for an operation.
pub(crate) fn choice(task: &Task, channels: u64, (algorithm, protocol): (Algorithm, Protocol)) {
    let (low, high) = if channels == 0 {
        (0, 0)
    } else {
        (channels.trailing_zeros(), channels.ilog2())
    };
    tracing::info!(
        target: TUNING,
        "{}: {} Bytes -> Algo {} proto {} channel{{Lo..Hi}}={{{low}..{high}}}",
        api_name(task.request.function),
        task.info.bytes,
        algorithm.name().to_uppercase(),
        protocol.name().to_uppercase(),
    );
}
