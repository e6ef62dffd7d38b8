//! Records of proxy operations, their steps, and what the progress thread does besides.

use ringsight_records::{Carrier, Flags, Kind, Numbering, PathChange, Record, State};

use super::ProxyOp;
use crate::observe;

/// A record of this operation, if it is one of those that its description counts, and anybody wants such.
fn write(op: &ProxyOp, kind: Kind, state: State, value: u64, bytes: u64) {
    write_with(op, (kind, Flags::NONE), state, value, bytes);
}

/// The same with flags of its own.
fn write_with(op: &ProxyOp, (kind, flags): (Kind, Flags), state: State, value: u64, bytes: u64) {
    // Sparse kinds are told without being asked for.
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

/// The operation itself: `bytes` is what it has transferred so far.
pub(crate) fn op(op: &ProxyOp, state: State, bytes: u64) {
    write(
        op,
        Kind::ProxyOp,
        state,
        Record::pack_proxy_op_shape(op.steps, op.chunk_bytes),
        bytes,
    );
}

/// One of its steps: `bytes` is what the step has transferred so far.
pub(crate) fn step(op: &ProxyOp, step: u32, state: State, bytes: usize) {
    write(op, Kind::ProxyStep, state, step.into(), bytes as u64);
}

/// What carries one of its steps, of `bytes` bytes.
pub(crate) fn carried(op: &ProxyOp, carrier: Carrier, state: State, bytes: usize) {
    write(op, Kind::NetPlugin, state, carrier.to_value(), bytes as u64);
}

/// The same over a connection that has several paths.
pub(crate) fn carried_over(op: &ProxyOp, carrier: Carrier, is_backup: bool, state: State, bytes: usize) {
    let kind = (Kind::NetPlugin, Flags::BACKUP.when(is_backup));
    write_with(op, kind, state, carrier.to_value(), bytes as u64);
}

/// How the connection that it runs over numbers the work requests of its steps.
pub(crate) fn numbered(op: &ProxyOp, numbering: Numbering) {
    let state = State::NET_PLUGIN_UPDATE;
    write(op, Kind::NetPlugin, state, numbering.to_value(), 0);
}

/// What has happened to the paths of the connection that it runs over; `bytes` are sent again.
pub(crate) fn path(op: &ProxyOp, state: State, change: PathChange, bytes: u64) {
    write(op, Kind::Failover, state, change.to_value(), bytes);
}

/// The progress thread of `rank`: `appended` is how many operations it took over so far.
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
