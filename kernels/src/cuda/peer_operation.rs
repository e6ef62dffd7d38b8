//! The peer operation of a launch: one collective, or any number of messages.
//!
//! An operation is one kernel. By copy engines it is an entry kernel, a [`CopyPhase`] and an exit kernel.

use std::ffi::CStr;

use ringsight_records::Algorithm;

use super::{
    collective,
    copy_engine::{self, Copies},
    layout::{Combination, Head, PeerCall},
    messages, one_shot,
    peer_launch::PeerLaunch,
    peer_memory::MAX_PEERS,
    program::{argument, check_alignment, combination},
    tiles::{self, Tiles},
};
use crate::launch::{Connections, Launch, Scalar, Window, Work, WorkError};

/// Numbers of the first kernels of the modules' tables in [`PeerOperation::kernels`].
const ONE_SHOT: usize = 0;
const COLLECTIVE: usize = ONE_SHOT + one_shot::KERNELS.len();
const MESSAGES: usize = COLLECTIVE + collective::KERNELS.len();
const COPY_ENGINE: usize = MESSAGES + messages::KERNELS.len();
const TILES: usize = COPY_ENGINE + copy_engine::KERNELS.len();

/// What runs between the entry and the exit kernel of a copy-engine collective.
#[derive(Clone, Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "it lives on the stack of the launching call; the frequent variant must not allocate"
)]
pub enum CopyPhase {
    /// Only copies.
    Copies(Copies),
    /// A reduction by tiles.
    Tiles(Box<Tiles>),
}

/// A peer operation.
#[derive(Clone, Debug)]
pub struct PeerOperation {
    /// The kernel, or the entry kernel of a copy-engine collective.
    pub launch: PeerLaunch,
    /// Copy engines only: what runs behind the entry kernel and before the exit kernel, which has the next number and the same argument.
    pub copy_phase: Option<CopyPhase>,
}

impl PeerOperation {
    /// Names of all peer kernels, by number.
    pub fn kernels() -> impl Iterator<Item = &'static CStr> {
        one_shot::KERNELS
            .into_iter()
            .chain(collective::KERNELS)
            .chain(messages::KERNELS)
            .chain(copy_engine::KERNELS)
            .chain(tiles::KERNELS)
    }

    /// The peer operation of `launch`; `None` if `launch` runs channel programs.
    ///
    /// # Errors
    /// Peer work that shares its launch with other work, or a buffer that is not aligned to its element type.
    pub fn new(launch: &Launch) -> Result<Option<Self>, WorkError> {
        let peer_work = launch.channels.iter().find_map(|channel| {
            let mut works = channel.work.iter();
            works.find_map(|work| Some((channel.channel, work, work.connections.peers()?)))
        });
        let Some((channel, work, peers)) = peer_work else {
            return Ok(None);
        };
        let all = || launch.channels.iter().flat_map(|channel| &channel.work);
        if work.function.is_p2p() && launch.channels.len() == 1 && all().all(Work::is_peer_message) {
            let launch = messages::launch(&launch.channels[0].work, channel, peers)?;
            return Ok(Some(Self::kernel(MESSAGES, launch)));
        }
        if all().count() != 1 {
            return Err(WorkError(format!(
                "op {} ({}): peer work shares its launch",
                work.op, work.function
            )));
        }
        check_alignment(work)?;
        let mut bases = [0; MAX_PEERS];
        bases[..peers.bases.len()].copy_from_slice(&peers.bases);
        let call = PeerCall {
            head: Head {
                op: work.op,
                ..Head::default()
            },
            bases,
            argument: match work.scalar {
                Scalar::Immediate(bits) => argument(work, bits),
                // Sum kernels multiply by a factor.
                _ if combination(work) == Combination::Sum => u64::from(1_f32.to_bits()),
                _ => argument(work, 0),
            },
            tag: work.tag,
            rank: work.rank,
            ranks: work.ranks,
            data_type: work.data_type.code(),
            combine: combination(work) as u8,
            channel,
            reserved: 0,
        };
        let operation = match &work.connections {
            Connections::CopyEngine { window, offset } => Self::copy_engine(work, call, window, *offset)?,
            _ if work.algorithm == Algorithm::OneShot => {
                Self::kernel(ONE_SHOT, one_shot::launch(work, call, peers.max_blocks))
            }
            _ => Self::kernel(COLLECTIVE, collective::launch(work, call, peers)),
        };
        Ok(Some(operation))
    }

    /// An operation of one kernel. `first`: the number of the first kernel of its module.
    fn kernel(first: usize, mut launch: PeerLaunch) -> Self {
        launch.kernel += first;
        Self {
            launch,
            copy_phase: None,
        }
    }

    fn copy_engine(work: &Work, call: PeerCall, window: &Window, offset: u64) -> Result<Self, WorkError> {
        let copy_phase = if work.function.reduces() {
            let mut tiles = Tiles::new(work, call, window, offset).ok_or_else(|| {
                WorkError(format!(
                    "op {} ({}): copy engines cannot do it",
                    work.op, work.function
                ))
            })?;
            tiles.kernel += TILES;
            tiles.barrier_kernel += COPY_ENGINE;
            CopyPhase::Tiles(Box::new(tiles))
        } else {
            CopyPhase::Copies(copy_engine::copies(work, call, &window.addresses, offset))
        };
        let entry = copy_engine::kernel_launch(call, copy_engine::ENTRY, 0);
        Ok(Self {
            copy_phase: Some(copy_phase),
            ..Self::kernel(COPY_ENGINE, entry)
        })
    }
}
