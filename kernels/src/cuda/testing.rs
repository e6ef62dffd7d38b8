//! Helpers for the tests of peer kernels.

use std::sync::Arc;

use ringsight_records::{Algorithm, DataType, Function, ReduceOp};

use super::PeerOperation;
use crate::{
    WorkError,
    launch::{
        ChannelWork, Connections, Launch, Observer, PeerMemory, Scalar, Scratch, When, Window, Work, ZeroCopy,
    },
};

/// Distance between two ranks' memory: rank `r` has its memory from `(r + 1) * APART` on, beginning with its window.
pub(super) const APART: usize = 1 << 40;
/// Offset of the receive buffers in the window.
pub(super) const OFFSET: u64 = 512;

struct Nobody;

impl Observer for Nobody {
    fn channel_started(&self, _op: u32, _replay: u32, _channel: u8, _when: When) {}
    fn channel_stopped(&self, _op: u32, _replay: u32, _channel: u8, _aborted: bool, _when: When) {}
    fn mismatch(&self, _op: u32, _replay: u32, _channel: u8, _theirs: u32) {}
    fn launch_finished(&self, _replay: u32, _aborted: bool) {}
}

/// The peer operation of works on channel 0. The first work must pass [`Work::check`].
pub(super) fn launched(work: Vec<Work>) -> Result<Option<PeerOperation>, WorkError> {
    work[0].check()?;
    PeerOperation::new(&Launch {
        channels: vec![ChannelWork { channel: 0, work }],
        abort: Arc::default(),
        observer: Arc::new(Nobody),
        peers: None,
    })
}

/// An AllGather of float32 by copy engines, whose send buffer lies behind the window.
pub(super) fn in_window(rank: u32, ranks: u32, count: usize, scratch: Option<Scratch>) -> Work {
    let base = (rank as usize + 1) * APART;
    let peers = PeerMemory {
        rank,
        bases: vec![0; ranks as usize],
        max_blocks: 64,
        foreign: 0,
        memory: Box::new(()),
    };
    let window = Window {
        peers: Arc::new(peers),
        addresses: (1..=u64::from(ranks)).map(|rank| rank * APART as u64).collect(),
        scratch: scratch.map(Arc::new),
        copy_engine: Arc::new(()),
        memory: Vec::new(),
    };
    Work {
        op: 1,
        tag: 7,
        function: Function::AllGather,
        algorithm: Algorithm::Direct,
        data_type: DataType::Float32,
        reduce_op: ReduceOp::None,
        scalar: Scalar::None,
        send: base + APART / 2,
        recv: base + OFFSET as usize,
        count,
        part: 0..count,
        rank,
        ranks,
        root: 0,
        zero_copy: ZeroCopy::Off,
        pushes: false,
        connections: Connections::CopyEngine {
            window: Arc::new(window),
            offset: OFFSET,
        },
    }
}
