//! Messages among peers: what `cuda/messages.cuh` is given.

use std::ffi::CStr;

use ringsight_records::Function;

use super::{
    layout::{Head, MOST_MESSAGES, MOST_ROLES, Message, Messages, Role},
    peer_launch::{MOST_BLOCKS, PeerArguments, PeerLaunch},
    peers::{CHUNK_ROWS, MAX_PEERS, MESSAGE_LANES, ROW_BYTES, messages_offset},
    program::address_error,
};
use crate::{
    launch::{Peers, Work},
    schedule::WorkError,
};

/// Names of the kernels, by their numbers.
pub const KERNELS: [&CStr; 2] = [c"ringsight_messages_elements", c"ringsight_messages_words"];

/// The most messages of a launch.
pub const MOST: usize = MOST_MESSAGES;

/// Warps of a block.
const WARPS: usize = 8;
/// Threads of a block.
pub const MESSAGES_THREADS: u32 = WARPS as u32 * 32;

/// Lanes of a message at most, among so many ranks whose devices run so many blocks side by side: as many as there are where a rank
/// sends to all others and receives from all.
fn most_lanes(ranks: usize, most_blocks: u32) -> usize {
    let blocks = most_blocks.clamp(1, MOST_BLOCKS) as usize / (2 * (ranks - 1));
    (blocks.max(1) * WARPS).min(MESSAGE_LANES)
}

/// The launch of sends and receives, but for where it reports to. Messages between the same two ranks meet in this order.
///
/// # Errors
/// More than [`MOST`] messages, or a buffer that does not stand at a multiple of its elements' size.
pub(super) fn launch(works: &[Work], channel: u8, peers: &Peers) -> Result<PeerLaunch, WorkError> {
    if works.len() > MOST {
        return Err(WorkError(format!(
            "{} messages of one launch, {MOST} at most",
            works.len()
        )));
    }
    let ranks = peers.bases.len();
    let mut all = Messages {
        head: Head::default(),
        bases: [0; MAX_PEERS],
        at: messages_offset(ranks) as u64,
        rank: peers.rank,
        roles: 0,
        messages: works.len() as u32,
        channel,
        reserved: [0; 3],
        role: [Role::default(); MOST_ROLES],
        message: [Message::default(); MOST_MESSAGES],
    };
    all.bases[..ranks].copy_from_slice(&peers.bases);
    let (mut count, mut most, mut whole) = (0, 1, true);
    for (peer, sends) in (0..ranks as u32).flat_map(|peer| [(peer, true), (peer, false)]) {
        let first = count;
        for work in works {
            if (work.root, work.function == Function::Send) != (peer, sends) {
                continue;
            }
            address_error(work)?;
            let message = message(work, most_lanes(ranks, peers.most_blocks));
            most = most.max(usize::from(message.lanes));
            whole &= message.address.is_multiple_of(8) && message.bytes.is_multiple_of(8);
            all.message[count] = message;
            count += 1;
        }
        if count > first {
            all.role[all.roles as usize] = Role {
                peer,
                sends: sends.into(),
                first: first as u32,
                end: count as u32,
            };
            all.roles += 1;
        }
    }
    Ok(PeerLaunch {
        blocks: all.roles * most.div_ceil(WARPS) as u32,
        arguments: PeerArguments::Messages(all),
        kernel: usize::from(whole),
        threads: MESSAGES_THREADS,
    })
}

/// Both ends come to the same lanes and chunks, by its length alone.
fn message(work: &Work, most_lanes: usize) -> Message {
    let bytes = work.count * work.data_type.size();
    let rows = bytes.div_ceil(ROW_BYTES).max(1);
    let lanes = rows.min(most_lanes);
    let each = rows.div_ceil(lanes);
    let chunk_rows = each.div_ceil(each.div_ceil(CHUNK_ROWS));
    Message {
        address: (if work.function == Function::Send {
            work.send
        } else {
            work.recv
        }) as u64,
        bytes: bytes as u64,
        op: work.op,
        tag: work.tag,
        chunk: (chunk_rows * ROW_BYTES) as u32,
        lanes: lanes as u16,
        element_bytes: work.data_type.size() as u8,
        reserved: 0,
    }
}
