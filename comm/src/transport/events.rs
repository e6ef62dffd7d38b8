//! Records of proxy operations, of their steps, and of the progress thread.

use ringsight_records::{Carrier, Flags, Kind, Numbering, PathChange, Record, State};

use crate::{observe, op::ProxyOp};

/// Writes a record of this operation, if its description counts it and a reader wants records of this kind.
fn write(op: &ProxyOp, kind: Kind, state: State, value: u64, bytes: u64) {
    write_with(op, (kind, Flags::NONE), state, value, bytes);
}

/// As [`write`], with further flags.
fn write_with(op: &ProxyOp, (kind, flags): (Kind, Flags), state: State, value: u64, bytes: u64) {
    // Sparse kinds are written whether or not a reader wants them.
    if !op.counted || (kind.probe().is_none() && !observe::wants(kind)) {
        return;
    }
    let flags = flags
        .with(Flags::SEND.when(op.is_send))
        .with(Flags::P2P.when(op.p2p))
        .with(Flags::GRAPH.when(op.graph));
    let record = Record {
        comm: op.comm,
        seq: op.seq,
        bytes,
        value,
        op: op.op,
        replay: op.replay,
        rank: op.rank,
        peer: op.peer.cast_signed(),
        pid: op.pid,
        channel: op.channel,
        ..Record::new(kind, state, observe::now_ns())
    };
    observe::emit(&record.with_flags(flags));
}

/// A state of the operation, which has transferred `bytes` so far.
pub(crate) fn op(op: &ProxyOp, state: State, bytes: u64) {
    write(
        op,
        Kind::ProxyOp,
        state,
        Record::pack_proxy_op_shape(op.steps, op.chunk_bytes),
        bytes,
    );
}

/// A state of one of its steps, which has transferred `bytes` so far.
pub(crate) fn step(op: &ProxyOp, step: u32, state: State, bytes: usize) {
    write(op, Kind::ProxyStep, state, step.into(), bytes as u64);
}

/// The carrier of one of its steps, of `bytes` bytes.
pub(crate) fn carried(op: &ProxyOp, carrier: Carrier, state: State, bytes: usize) {
    write(op, Kind::NetPlugin, state, carrier.to_value(), bytes as u64);
}

/// As [`carried`], for a connection with several paths.
pub(crate) fn carried_over(op: &ProxyOp, carrier: Carrier, is_backup: bool, state: State, bytes: usize) {
    let kind = (Kind::NetPlugin, Flags::BACKUP.when(is_backup));
    write_with(op, kind, state, carrier.to_value(), bytes as u64);
}

/// How its connection numbers the work requests of its steps.
pub(crate) fn numbered(op: &ProxyOp, numbering: Numbering) {
    let state = State::NET_PLUGIN_UPDATE;
    write(op, Kind::NetPlugin, state, numbering.to_value(), 0);
}

/// A change of its connection's paths; `bytes` are sent again.
pub(crate) fn path(op: &ProxyOp, state: State, change: PathChange, bytes: u64) {
    write(op, Kind::Failover, state, change.to_value(), bytes);
}

/// A state of the progress thread of `rank`, which has taken over `appended` operations so far.
pub(crate) fn control(rank: u32, state: State, appended: u64) {
    if observe::wants(Kind::ProxyCtrl) {
        observe::emit(&Record {
            bytes: appended,
            rank,
            pid: observe::pid(),
            ..Record::new(Kind::ProxyCtrl, state, observe::now_ns())
        });
    }
}
