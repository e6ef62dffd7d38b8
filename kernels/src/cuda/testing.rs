//! What the tests of kernels among peers have in common.

use std::sync::Arc;

use super::PeerLaunch;
use crate::{
    WorkError,
    launch::{ChannelWork, Launch, Observer, When, Work},
};

struct Nobody;

impl Observer for Nobody {
    fn channel_started(&self, _op: u32, _replay: u32, _channel: u8, _when: When) {}
    fn channel_stopped(&self, _op: u32, _replay: u32, _channel: u8, _aborted: bool, _when: When) {}
    fn mismatch(&self, _op: u32, _replay: u32, _channel: u8, _theirs: u32) {}
    fn launch_finished(&self, _replay: u32, _aborted: bool) {}
}

/// The launch of works on channel 0, of which the first is one that may run.
pub(super) fn launched(work: Vec<Work>) -> Result<Option<PeerLaunch>, WorkError> {
    work[0].check()?;
    PeerLaunch::new(&Launch {
        channels: vec![ChannelWork { channel: 0, work }],
        abort: Arc::default(),
        observer: Arc::new(Nobody),
        peers: None,
    })
}
