//! Messages by peer kernels: the arguments of `cuda/messages.cuh`.
//!
//! One launch runs all sends and receives of a group side by side. A *role* is one peer and one direction; each role has the same number of
//! blocks. A message is cut into chunks that go over lanes in turn, one warp per lane.

use std::ffi::CStr;

use ringsight_records::Function;

use super::{
    layout::{Head, MAX_MESSAGES, MAX_ROLES, Message, Messages, Role, buffer_address},
    peer_launch::{MAX_BLOCKS, PeerArguments, PeerLaunch},
    peer_memory::{
        CHUNK_ROWS, MAX_PEERS, MAY_ZERO_COPY, MESSAGE_LANES, ROW_BYTES, imports_offset, messages_offset,
    },
    program::check_alignment,
};
use crate::launch::{PeerMemory, Work, WorkError, ZeroCopy};

/// Names of the kernels by number.
pub const KERNELS: [&CStr; 2] = [c"ringsight_messages_elements", c"ringsight_messages_words"];

/// The most messages of a launch.
pub const MAX: usize = MAX_MESSAGES;

/// Warps of a block.
const WARPS: usize = 8;
/// Threads of a block.
pub const MESSAGES_THREADS: u32 = WARPS as u32 * 32;

/// Lanes of a message of `rows` rows. Both ends must come to the same number, so it depends on the length and the communicator alone.
///
/// There is one lane per row, up to the warps that a rank has for a role when it sends to all ranks and receives from all. Beyond that there is
/// one lane per whole chunk. A rank with fewer roles has more warps at work; a rank with fewer warps than lanes serves several lanes per warp
/// in turn.
fn lanes(rows: usize, ranks: usize, max_blocks: u32) -> usize {
    let few = (blocks_of_role(2 * (ranks - 1), max_blocks) * WARPS).min(MESSAGE_LANES);
    // A multiple, so that all warps have the same number of lanes.
    let most = MESSAGE_LANES / few * few;
    rows.min(few).max((rows / CHUNK_ROWS).min(most))
}

/// The most blocks of one role if there are `roles` roles.
fn blocks_of_role(roles: usize, max_blocks: u32) -> usize {
    (max_blocks.clamp(1, MAX_BLOCKS) as usize / roles).max(1)
}

/// The launch of sends and receives. The caller sets where it reports to. Messages between two ranks match in this order.
///
/// # Errors
/// More than [`MAX`] messages, or a buffer that is not aligned to its element type.
pub(super) fn launch(works: &[Work], channel: u8, peers: &PeerMemory) -> Result<PeerLaunch, WorkError> {
    if works.len() > MAX {
        return Err(WorkError(format!(
            "{} messages of one launch, {MAX} at most",
            works.len()
        )));
    }
    let ranks = peers.bases.len();
    let mut all = Box::new(Messages {
        head: Head::default(),
        bases: [0; MAX_PEERS],
        area_offset: messages_offset(ranks) as u64,
        imports_offset: imports_offset(ranks) as u64,
        rank: peers.rank,
        roles: 0,
        messages: works.len() as u32,
        channel,
        reserved: [0; 3],
        role: [Role::default(); MAX_ROLES],
        message: [Message::default(); MAX_MESSAGES],
    });
    all.bases[..ranks].copy_from_slice(&peers.bases);
    let (mut count, mut most, mut whole) = (0, 1, true);
    for (peer, sends) in (0..ranks as u32).flat_map(|peer| [(peer, true), (peer, false)]) {
        let first = count;
        for work in works {
            if (work.root, work.function == Function::Send) != (peer, sends) {
                continue;
            }
            check_alignment(work)?;
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
        .min(blocks_of_role(roles.max(1), peers.max_blocks));
    Ok(PeerLaunch {
        blocks: (roles * blocks) as u32,
        arguments: PeerArguments::Messages(all),
        kernel: usize::from(whole),
        threads: MESSAGES_THREADS,
    })
}

/// One message. Both ends come to the same lanes and chunks from its length.
fn message(work: &Work, peers: &PeerMemory) -> Message {
    let bytes = work.count * work.data_type.size();
    let rows = bytes.div_ceil(ROW_BYTES).max(1);
    let lanes = lanes(rows, peers.bases.len(), peers.max_blocks);
    let each = rows.div_ceil(lanes);
    let chunk_rows = each.div_ceil(each.div_ceil(CHUNK_ROWS));
    let address = if work.function == Function::Send {
        work.send
    } else {
        work.recv
    } as u64;
    let (peer_address, generation) = match work.zero_copy {
        ZeroCopy::Off => (0, 0),
        // Senders write 16 bytes at a time.
        ZeroCopy::Reachable { recv, .. } if work.function == Function::Recv && address.is_multiple_of(16) => {
            (
                MAY_ZERO_COPY | buffer_address(recv, address, peers.is_foreign(work.root)),
                recv.generation,
            )
        }
        _ => (MAY_ZERO_COPY, 0),
    };
    Message {
        address,
        bytes: bytes as u64,
        peer_address,
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
        cuda::peer_memory::{ADDRESS_EXPORTED, ADDRESS_VALID, EXPORT_SHIFT},
        launch::{Connections, ExportedBuffer, Scalar},
    };

    /// Peer memory of `ranks` ranks, the last of which belongs to another process.
    fn peers(ranks: usize, max_blocks: u32) -> Arc<PeerMemory> {
        Arc::new(PeerMemory {
            rank: 0,
            bases: vec![0; ranks],
            max_blocks,
            foreign: 1 << (ranks - 1),
            memory: Box::new(()),
        })
    }

    fn work(
        function: Function,
        peer: u32,
        count: usize,
        peers: &Arc<PeerMemory>,
        zero_copy: ZeroCopy,
    ) -> Work {
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
            zero_copy,
            pushes: false,
            connections: Connections::Peers(peers.clone()),
        }
    }

    proptest! {
        // Both ends use the same lanes, whatever else their ranks do, and all blocks fit.
        #[test]
        fn ends_agree(count in 1_usize..20_000_000, ranks in 2_usize..=8, max_blocks in 1_u32..=64, roles in 1_usize..=14) {
            let peers = peers(ranks, max_blocks);
            let all: Vec<_> = (1..ranks as u32)
                .flat_map(|peer| [(peer, Function::Send), (peer, Function::Recv)])
                .map(|(peer, function)| work(function, peer, count, &peers, ZeroCopy::Off))
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
            // Every role has the same number of blocks, and they fit side by side where possible.
            prop_assert!(launch.blocks.is_multiple_of(arguments.roles));
            prop_assert!(launch.blocks <= max_blocks.max(arguments.roles));
        }
    }

    #[test]
    fn a_ring_of_four_has_as_many_warps_as_a_pair() {
        let blocks = |ranks| {
            let peers = peers(ranks, 64);
            let both = [Function::Send, Function::Recv]
                .map(|function| work(function, 1, 16 << 20, &peers, ZeroCopy::Off));
            launch(&both, 0, &peers).unwrap().blocks
        };
        assert_eq!((blocks(2), blocks(4)), (64, 60));
    }

    #[test]
    fn launches_with_long_messages_do_not_overlap() {
        let peers = peers(4, 64);
        let of = |zero_copy| work(Function::Recv, 1, 1 << 20, &peers, zero_copy);
        let overlaps = |works: &[Work]| launch(works, 0, &peers).unwrap().arguments.may_overlap();
        assert!(overlaps(&[of(ZeroCopy::Off), of(ZeroCopy::Off)]));
        assert!(!overlaps(&[of(ZeroCopy::Off), of(ZeroCopy::Unreachable)]));
    }

    #[test]
    fn receivers_of_long_messages_announce_their_buffers() {
        let peers = peers(4, 64);
        let export = ExportedBuffer {
            start: 7 << 20,
            generation: 3,
            number: 9,
        };
        let open = ZeroCopy::Reachable {
            send: ExportedBuffer::default(),
            recv: export,
        };
        let address_word = |function, peer, zero_copy| {
            let message = message(&work(function, peer, 1 << 20, &peers, zero_copy), &peers);
            (message.peer_address, message.generation)
        };
        assert_eq!(address_word(Function::Recv, 1, ZeroCopy::Off), (0, 0));
        assert_eq!(
            address_word(Function::Recv, 1, ZeroCopy::Unreachable),
            (MAY_ZERO_COPY, 0)
        );
        // Other ranks need not reach the sender's buffer.
        assert_eq!(address_word(Function::Send, 1, open), (MAY_ZERO_COPY, 0));
        assert_eq!(
            address_word(Function::Recv, 1, open),
            (MAY_ZERO_COPY | ADDRESS_VALID | 8 << 20, 3)
        );
        let of_another_process =
            MAY_ZERO_COPY | ADDRESS_VALID | ADDRESS_EXPORTED | 9 << EXPORT_SHIFT | 1 << 20;
        assert_eq!(address_word(Function::Recv, 3, open), (of_another_process, 3));
        let shifted = Work {
            recv: (8 << 20) + 4,
            ..work(Function::Recv, 1, 1 << 20, &peers, open)
        };
        assert_eq!(message(&shifted, &peers).peer_address, MAY_ZERO_COPY);
    }
}
