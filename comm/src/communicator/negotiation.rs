//! Parameters that the ranks of a communicator negotiate before they connect: each rank proposes, and all use what every rank can do.

use ringsight_comm_base::{
    env::number,
    error::{Error, Result},
};
use ringsight_kernels::fifo::SLOTS;
use ringsight_records::Algorithm;

use super::config::{Config, MAX_CHANNELS};
use crate::{
    device,
    op::WORK_FIFO_DEPTH,
    plan::{environment, limits::Limits},
};

const DEFAULT_CHANNELS: u32 = 2;
/// `NCCL_CTA_POLICY_ZERO`.
const ZERO_CTA: u32 = 1 << 1;
/// `NCCL_BUFFSIZE` by default: slots of 128 KiB stay in a core's cache between its producer and its consumer.
const DEFAULT_BUFFER_BYTES: usize = 1 << 20;

/// What one rank proposes.
pub(super) struct Proposal {
    min_channels: u32,
    /// Where FIFOs are in the memory of devices; 0 if they cannot be.
    device_fifo_channels: u32,
    max_channels: u32,
    slot_bytes: u64,
    work_fifo_depth: u64,
    /// It can share its parent's proxy.
    share: bool,
    /// Its device has programs of [`Algorithm::OneShot`].
    one_shot: bool,
    /// What its environment and its `CTAPolicy` leave to the choice of algorithms.
    limits: Limits,
}

/// What all ranks use.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct NegotiatedParameters {
    pub(super) channels: u32,
    /// Channels where FIFOs are in the memory of devices; `None` if any rank has no such memory.
    pub(super) device_fifo_channels: Option<u32>,
    pub(super) slot_bytes: usize,
    pub(super) work_fifo_depth: usize,
    /// All of them can share their parent's proxies.
    pub(super) share: bool,
    /// All of their devices have programs of [`Algorithm::OneShot`].
    pub(super) one_shot: bool,
    /// What no rank leaves out of the choice of algorithms.
    pub(super) limits: Limits,
}

impl Proposal {
    const BYTES: usize = 30 + Limits::BYTES;

    /// The proposal of this rank.
    ///
    /// # Errors
    /// A variable with an impossible value.
    pub(super) fn mine(config: &Config, share: bool) -> Result<Self> {
        let buffer: usize = number("NCCL_BUFFSIZE")?.unwrap_or(DEFAULT_BUFFER_BYTES);
        if !(4096..=1 << 30).contains(&buffer) {
            return Err(Error::argument(format!(
                "environment variable NCCL_BUFFSIZE={buffer}: must be between 4096 and 1073741824 bytes"
            )));
        }
        let depth: usize = number("RINGSIGHT_WORK_FIFO_DEPTH")?.unwrap_or(WORK_FIFO_DEPTH);
        let near = device::device()?.min_p2p_channels().unwrap_or(0);
        Ok(Self {
            device_fifo_channels: match config.min_channels {
                Some(min) if near > 0 => min.clamp(1, MAX_CHANNELS),
                _ => near,
            },
            min_channels: match config.min_channels {
                Some(min) => min.clamp(1, MAX_CHANNELS),
                None => device::device()?.min_channels(),
            },
            max_channels: config.max_channels.unwrap_or(MAX_CHANNELS).clamp(1, MAX_CHANNELS),
            slot_bytes: (buffer / SLOTS).next_multiple_of(64) as u64,
            work_fifo_depth: depth.clamp(2, 1 << 20) as u64,
            share,
            one_shot: device::device()?.supports(Algorithm::OneShot),
            limits: environment::limits(config.cta_policy & ZERO_CTA != 0)?,
        })
    }

    pub(super) fn to_bytes(&self) -> [u8; Self::BYTES] {
        let mut bytes = [0; Self::BYTES];
        bytes[..4].copy_from_slice(&self.min_channels.to_le_bytes());
        bytes[4..8].copy_from_slice(&self.max_channels.to_le_bytes());
        bytes[8..16].copy_from_slice(&self.slot_bytes.to_le_bytes());
        bytes[16..24].copy_from_slice(&self.work_fifo_depth.to_le_bytes());
        bytes[24] = self.share.into();
        bytes[25] = self.one_shot.into();
        bytes[26..30].copy_from_slice(&self.device_fifo_channels.to_le_bytes());
        bytes[30..].copy_from_slice(&self.limits.to_bytes());
        bytes
    }

    /// `None` for what [`Proposal::to_bytes`] did not write.
    pub(super) fn from_bytes(bytes: &[u8]) -> Option<Self> {
        let (min, rest) = bytes.split_first_chunk()?;
        let (max, rest) = rest.split_first_chunk()?;
        let (slot, rest) = rest.split_first_chunk()?;
        let (depth, rest) = rest.split_first_chunk()?;
        let ([share @ (0 | 1), one_shot @ (0 | 1)], rest) = rest.split_first_chunk()? else {
            return None;
        };
        let (near, limits) = rest.split_first_chunk()?;
        Some(Self {
            min_channels: u32::from_le_bytes(*min),
            max_channels: u32::from_le_bytes(*max),
            slot_bytes: u64::from_le_bytes(*slot),
            work_fifo_depth: u64::from_le_bytes(*depth),
            share: *share == 1,
            one_shot: *one_shot == 1,
            device_fifo_channels: u32::from_le_bytes(*near),
            limits: Limits::from_bytes(limits)?,
        })
    }

    /// Feeds bytes to the parser, for [`crate::fuzzing`]: whatever a rank says, what all agree on is possible.
    pub(super) fn fuzz(data: &[u8]) {
        if let Some(proposal) = Self::from_bytes(data) {
            assert_eq!(proposal.to_bytes(), data);
            let agreed = Self::agree(&[proposal]);
            assert!((1..=MAX_CHANNELS).contains(&agreed.channels));
            assert!((64..=1 << 30).contains(&agreed.slot_bytes));
            assert!((2..=1 << 20).contains(&agreed.work_fifo_depth));
        }
    }

    /// What holds for everybody: the greatest minimum, the least maximum.
    pub(super) fn agree(all: &[Self]) -> NegotiatedParameters {
        let min = all
            .iter()
            .map(|proposal| proposal.min_channels)
            .max()
            .unwrap_or(1);
        let max = all
            .iter()
            .map(|proposal| proposal.max_channels)
            .min()
            .unwrap_or(MAX_CHANNELS);
        let slot = all
            .iter()
            .map(|proposal| proposal.slot_bytes)
            .min()
            .unwrap_or(4096)
            .clamp(64, 1 << 30);
        let near = all.iter().map(|proposal| proposal.device_fifo_channels);
        let all_near = near.clone().all(|channels| channels > 0);
        let near = near.max().filter(|_| all_near);
        let depth = all
            .iter()
            .map(|proposal| proposal.work_fifo_depth)
            .min()
            .unwrap_or(2);
        let depth = depth.clamp(2, 1 << 20);
        let limits = all
            .iter()
            .map(|proposal| proposal.limits)
            .reduce(|left, own| left.and(&own));
        NegotiatedParameters {
            channels: DEFAULT_CHANNELS.max(min).min(max).clamp(1, MAX_CHANNELS),
            device_fifo_channels: near.map(|near| near.min(max).clamp(1, MAX_CHANNELS)),
            slot_bytes: slot as usize,
            work_fifo_depth: usize::try_from(depth).unwrap_or(WORK_FIFO_DEPTH),
            share: all.iter().all(|proposal| proposal.share),
            one_shot: all.iter().all(|proposal| proposal.one_shot),
            limits: limits.unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_agree_whatever_they_ask_for() {
        let proposal = |min_channels, max_channels| Proposal {
            min_channels,
            device_fifo_channels: 4 * min_channels - 4,
            max_channels,
            slot_bytes: 4096 * u64::from(min_channels),
            work_fifo_depth: 8,
            share: min_channels == 4,
            one_shot: max_channels == 32,
            limits: Limits {
                zero_copy_bytes: Some(u64::from(max_channels)),
                push_bytes: u64::from(min_channels),
                ..Limits::default()
            },
        };
        assert_eq!(Proposal::agree(&[proposal(1, 32), proposal(1, 32)]).channels, 2);
        let agreed = NegotiatedParameters {
            channels: 4,
            // One of them has no memory for that.
            device_fifo_channels: None,
            slot_bytes: 4096,
            work_fifo_depth: 8,
            share: false,
            one_shot: false,
            // Nobody does what another does not.
            limits: Limits {
                zero_copy_bytes: Some(32),
                push_bytes: 4,
                ..Limits::default()
            },
        };
        assert_eq!(Proposal::agree(&[proposal(4, 8), proposal(1, 32)]), agreed);
        assert!(Proposal::agree(&[proposal(4, 8), proposal(4, 9)]).share);
        assert!(Proposal::agree(&[proposal(4, 32), proposal(1, 32)]).one_shot);
        assert_eq!(
            Proposal::agree(&[proposal(4, 32), proposal(3, 10)]).device_fifo_channels,
            Some(10)
        );
        assert_eq!(
            Proposal::agree(&[proposal(4, 8), proposal(1, 1)]).channels,
            1,
            "the least maximum wins"
        );
        let there_and_back = Proposal::from_bytes(&proposal(4, 8).to_bytes()).unwrap();
        assert_eq!(
            (there_and_back.min_channels, there_and_back.slot_bytes),
            (4, 4 * 4096)
        );
        assert_eq!(there_and_back.device_fifo_channels, 12);
        assert!(
            Proposal::from_bytes(&[0; Proposal::BYTES - 1]).is_none()
                && Proposal::from_bytes(&[0; Proposal::BYTES + 1]).is_none()
        );
        assert!(Proposal::from_bytes(&[2; Proposal::BYTES]).is_none());
    }
}
