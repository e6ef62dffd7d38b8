//! Messages among peers: what `cuda/messages.cuh` is given.

use std::ffi::CStr;

use ringsight_records::Function;

use super::{
    layout::{Head, MOST_MESSAGES, MOST_ROLES, Message, Messages, Role},
    peer_launch::{MOST_BLOCKS, PeerArguments, PeerLaunch},
    peers::{CHUNK_ROWS, IS_LONG, MAX_PEERS, MESSAGE_LANES, ROW_BYTES, mappings_offset, messages_offset},
    program::address_error,
};
use crate::{
    launch::{Peers, Straight, Work},
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

/// Lanes of a message of so many rows, among so many ranks whose devices run so many blocks side by side: one for each row, up to as many as
/// there are warps for where a rank sends to all others and receives from all; then one for each whole chunk. Where a rank has less to
/// do, more warps move the bytes, and else each goes over several lanes in turn.
fn lanes(rows: usize, ranks: usize, most_blocks: u32) -> usize {
    let few = (blocks_of_role(2 * (ranks - 1), most_blocks) * WARPS).min(MESSAGE_LANES);
    // A multiple: all warps have as many.
    let most = MESSAGE_LANES / few * few;
    rows.min(few).max((rows / CHUNK_ROWS).min(most))
}

/// Blocks of one of so many roles at most.
fn blocks_of_role(roles: usize, most_blocks: u32) -> usize {
    (most_blocks.clamp(1, MOST_BLOCKS) as usize / roles).max(1)
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
    let mut all = Box::new(Messages {
        head: Head::default(),
        bases: [0; MAX_PEERS],
        at: messages_offset(ranks) as u64,
        mappings_at: mappings_offset(ranks) as u64,
        rank: peers.rank,
        roles: 0,
        messages: works.len() as u32,
        channel,
        reserved: [0; 3],
        role: [Role::default(); MOST_ROLES],
        message: [Message::default(); MOST_MESSAGES],
    });
    all.bases[..ranks].copy_from_slice(&peers.bases);
    let (mut count, mut most, mut whole) = (0, 1, true);
    for (peer, sends) in (0..ranks as u32).flat_map(|peer| [(peer, true), (peer, false)]) {
        let first = count;
        for work in works {
            if (work.root, work.function == Function::Send) != (peer, sends) {
                continue;
            }
            address_error(work)?;
            let message = message(work, peers);
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
    let roles = all.roles as usize;
    let blocks = most
        .div_ceil(WARPS)
        .min(blocks_of_role(roles.max(1), peers.most_blocks));
    Ok(PeerLaunch {
        blocks: (roles * blocks) as u32,
        arguments: PeerArguments::Messages(all),
        kernel: usize::from(whole),
        threads: MESSAGES_THREADS,
        between: None,
    })
}

/// Both ends come to the same lanes and chunks, by its length alone.
fn message(work: &Work, peers: &Peers) -> Message {
    let bytes = work.count * work.data_type.size();
    let rows = bytes.div_ceil(ROW_BYTES).max(1);
    let lanes = lanes(rows, peers.bases.len(), peers.most_blocks);
    let each = rows.div_ceil(lanes);
    let chunk_rows = each.div_ceil(each.div_ceil(CHUNK_ROWS));
    let address = if work.function == Function::Send {
        work.send
    } else {
        work.recv
    } as u64;
    let (place, generation) = match work.straight {
        Straight::No => (0, 0),
        // Senders write 16 bytes at a time.
        Straight::Open { received, .. } if work.function == Function::Recv && address.is_multiple_of(16) => (
            IS_LONG | received.place(address, peers.is_foreign(work.root)),
            received.generation,
        ),
        _ => (IS_LONG, 0),
    };
    Message {
        address,
        bytes: bytes as u64,
        place,
        generation,
        op: work.op,
        tag: work.tag,
        lanes: lanes as u16,
        rows: chunk_rows as u8,
        element_bytes: work.data_type.size() as u8,
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;
    use ringsight_records::{Algorithm, DataType, ReduceOp};

    use super::*;
    use crate::{
        cuda::{
            layout::Shown,
            peers::{IS_SHOWN, NUMBER_AT, OPEN},
        },
        launch::{Connections, Scalar},
    };

    /// Among so many ranks, of which the last is of another process than this one.
    fn peers(ranks: usize, most_blocks: u32) -> Arc<Peers> {
        Arc::new(Peers {
            rank: 0,
            bases: vec![0; ranks],
            most_blocks,
            foreign: 1 << (ranks - 1),
            memory: Box::new(()),
        })
    }

    fn work(function: Function, peer: u32, count: usize, peers: &Arc<Peers>, straight: Straight) -> Work {
        Work {
            op: 1,
            tag: 1,
            function,
            algorithm: Algorithm::Direct,
            data_type: DataType::Float32,
            reduce_op: ReduceOp::None,
            scalar: Scalar::None,
            send: 4 << 20,
            recv: 8 << 20,
            count,
            part: 0..count,
            rank: 0,
            ranks: peers.bases.len() as u32,
            root: peer,
            straight,
            pushes: false,
            connections: Connections::Peers(peers.clone()),
        }
    }

    proptest! {
        // Ends whose ranks have more or less to do meet in the same lanes, and there is room for all blocks.
        #[test]
        fn ends_agree(count in 1_usize..20_000_000, ranks in 2_usize..=8, most_blocks in 1_u32..=64, roles in 1_usize..=14) {
            let peers = peers(ranks, most_blocks);
            let all: Vec<_> = (1..ranks as u32)
                .flat_map(|peer| [(peer, Function::Send), (peer, Function::Recv)])
                .map(|(peer, function)| work(function, peer, count, &peers, Straight::No))
                .take(roles)
                .collect();
            let launch = launch(&all, 0, &peers).unwrap();
            let PeerArguments::Messages(arguments) = launch.arguments else { panic!("another kernel") };
            let first = arguments.message[0];
            for message in &arguments.message[..all.len()] {
                prop_assert_eq!((message.lanes, message.rows), (first.lanes, first.rows));
            }
            prop_assert!(usize::from(first.lanes) <= MESSAGE_LANES && first.lanes > 0);
            prop_assert!(usize::from(first.rows) <= CHUNK_ROWS && first.rows > 0);
            // As many for each role, and no more than run side by side where that is possible.
            prop_assert!(launch.blocks.is_multiple_of(arguments.roles));
            prop_assert!(launch.blocks <= most_blocks.max(arguments.roles));
        }
    }

    #[test]
    fn a_ring_of_four_has_as_many_warps_as_a_pair() {
        let blocks = |ranks| {
            let peers = peers(ranks, 64);
            let both = [Function::Send, Function::Recv]
                .map(|function| work(function, 1, 16 << 20, &peers, Straight::No));
            launch(&both, 0, &peers).unwrap().blocks
        };
        assert_eq!((blocks(2), blocks(4)), (64, 60));
    }

    #[test]
    fn launches_with_long_messages_do_not_overlap() {
        let peers = peers(4, 64);
        let of = |straight| work(Function::Recv, 1, 1 << 20, &peers, straight);
        let overlaps = |works: &[Work]| launch(works, 0, &peers).unwrap().arguments.may_overlap();
        assert!(overlaps(&[of(Straight::No), of(Straight::No)]));
        assert!(!overlaps(&[of(Straight::No), of(Straight::Closed)]));
    }

    #[test]
    fn receivers_of_long_messages_tell_places() {
        let peers = peers(4, 64);
        let shown = Shown {
            start: 7 << 20,
            generation: 3,
            number: 9,
        };
        let open = Straight::Open {
            sent: Shown::default(),
            received: shown,
        };
        let place = |function, peer, straight| {
            let message = message(&work(function, peer, 1 << 20, &peers, straight), &peers);
            (message.place, message.generation)
        };
        assert_eq!(place(Function::Recv, 1, Straight::No), (0, 0));
        assert_eq!(place(Function::Recv, 1, Straight::Closed), (IS_LONG, 0));
        // The sender's buffer need not be reached by others.
        assert_eq!(place(Function::Send, 1, open), (IS_LONG, 0));
        assert_eq!(place(Function::Recv, 1, open), (IS_LONG | OPEN | 8 << 20, 3));
        let of_another_process = IS_LONG | OPEN | IS_SHOWN | 9 << NUMBER_AT | 1 << 20;
        assert_eq!(place(Function::Recv, 3, open), (of_another_process, 3));
        let shifted = Work {
            recv: (8 << 20) + 4,
            ..work(Function::Recv, 1, 1 << 20, &peers, open)
        };
        assert_eq!(message(&shifted, &peers).place, IS_LONG);
    }
}
