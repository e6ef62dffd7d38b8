//! Reductions whose bytes copy engines move: what copies where, and what the kernels of `cuda/pieces.cuh` are given.
//!
//! Each rank has a part of the result, in pieces. Contributions to a piece are copied into memory beside it (*pushed*), a kernel reduces them, and the
//! result is copied into the others' receive buffers (*gathered*). Copies go one after another in a stream of their own, kernels in another, and while a piece is
//! reduced the copies of another one fill the link:
//!
//! | copies | push 0 | push 1 | gather 0 | push 2 | gather 1 | push 3 | … | gather n − 2 | gather n − 1 |
//! |---|---|---|---|---|---|---|---|---|---|
//! | kernels | | reduce 0 | reduce 1 | | reduce 2 | | … | | |

use std::ffi::CStr;

use super::{
    exchange::parts,
    gates::{Copies, Copy},
    layout::{Exchange, NO_ROOT, PeerCall},
    peer_launch::{PeerArguments, kernel_of_sum},
    peers::MAX_PEERS,
};
use crate::launch::{Scratch, Work};

/// Names of the kernels, by their numbers: `RINGSIGHT_PIECES` in `cuda/pieces.cuh`.
pub const KERNELS: [&CStr; 9] = [
    c"ringsight_piece_sum_f32_2",
    c"ringsight_piece_sum_f32_4",
    c"ringsight_piece_sum_f32_8",
    c"ringsight_piece_sum_f16_2",
    c"ringsight_piece_sum_f16_4",
    c"ringsight_piece_sum_f16_8",
    c"ringsight_piece_sum_bf16_2",
    c"ringsight_piece_sum_bf16_4",
    c"ringsight_piece_sum_bf16_8",
];

/// Threads of a block, all of which reduce.
pub const PIECE_THREADS: u32 = 512;

/// Blocks of a kernel, which is done long before the copies beside it are: 32 have 512 KiB and more of loads under way.
const BLOCKS: u32 = 32;

/// Of what begins a piece.
const LINE: u64 = 256;

/// Bytes of a piece if so many are wanted.
#[must_use]
pub const fn piece_bytes(wanted: u64) -> u64 {
    let lines = wanted / LINE;
    if lines == 0 { LINE } else { lines * LINE }
}

/// The most pieces of a part: `MOST_PIECES` in `cuda/pieces.cuh`.
const MOST_PIECES: u64 = 127;

/// Bytes of scratch of a rank: two pieces of each other one's contributions.
#[must_use]
pub const fn scratch_bytes(ranks: usize, piece_bytes: u64) -> u64 {
    (2 * (ranks as u64 - 1)).saturating_mul(piece_bytes)
}

/// The most bytes of a buffer that is reduced so among so many ranks.
#[must_use]
pub const fn most_bytes(ranks: usize, piece_bytes: u64) -> u64 {
    (MOST_PIECES * ranks as u64).saturating_mul(piece_bytes)
}

/// A reduction by copy engines.
#[derive(Clone, Debug)]
pub struct Pieces {
    /// Of all parts: what goes where.
    parts: Exchange,
    /// By rank: where its scratch is for this rank.
    scratch: [u64; MAX_PEERS],
    /// Of what there is room for there.
    slot_bytes: u64,
    /// By rank: where its receive buffer begins for this rank.
    places: [u64; MAX_PEERS],
    /// Where this rank's own does.
    recv: u64,
    /// Bytes of each piece but the last.
    bytes: u64,
    /// Their number.
    count: u64,
    /// Of the kernel, among [`KERNELS`].
    pub(super) kernel: usize,
}

impl Pieces {
    pub(super) fn new(
        work: &Work,
        call: PeerCall,
        places: &[u64],
        offset: u64,
        scratch: &Scratch,
    ) -> Option<Self> {
        let kernel = kernel_of_sum(work.reduce_op, work.data_type, work.ranks)?;
        let parts = parts(work, call);
        // Two, so that one is on its way while the other is reduced.
        let slot_bytes = scratch.piece_bytes;
        let count = parts.piece.div_ceil(slot_bytes).max(2);
        let of_all = |each: &[u64], more: u64| {
            let mut all = [0; MAX_PEERS];
            for (one, base) in all.iter_mut().zip(each) {
                *one = base + more;
            }
            all
        };
        Some(Self {
            scratch: of_all(&scratch.bases, 0),
            slot_bytes,
            places: of_all(places, offset),
            recv: work.recv as u64,
            bytes: parts.piece.div_ceil(count).next_multiple_of(LINE),
            count,
            kernel,
            parts,
        })
    }

    /// How many there are: the same on all ranks.
    #[must_use]
    pub fn count(&self) -> usize {
        self.count as usize
    }

    fn ranks(&self) -> usize {
        self.parts.call.ranks as usize
    }

    fn me(&self) -> usize {
        self.parts.call.rank as usize
    }

    /// Where a piece begins in a part of `all` bytes, and its length, which may be 0.
    fn piece(&self, number: usize, all: u64) -> (u64, u64) {
        let start = (self.bytes * number as u64).min(all);
        (start, self.bytes.min(all - start))
    }

    /// Where what `source` has for a piece of `rank`'s part comes, of `rank`'s scratch.
    fn slot(&self, rank: usize, source: usize, number: usize) -> u64 {
        let other = if source < rank { source } else { source - 1 };
        let slot = 2 * other + number % 2;
        self.scratch[rank] + self.slot_bytes * slot as u64
    }

    fn others(&self) -> impl Iterator<Item = usize> {
        let (me, ranks) = (self.me(), self.ranks());
        (1..ranks).map(move |hop| (me + hop) % ranks)
    }

    /// The kernel goes through buffers by 16 bytes. Receive buffers begin at such an address: that is the same on all ranks. Of the send buffer no other rank
    /// knows.
    fn is_own_beside(&self) -> bool {
        self.parts.result_bytes > 0 && !self.parts.own.is_multiple_of(16)
    }

    /// The copies of what this rank has for the others' pieces of this number; and if its own contribution cannot be reduced where it is, of that to where its result
    /// is to be.
    #[must_use]
    pub fn pushes(&self, number: usize) -> Copies {
        let mut copies = Copies::default();
        for rank in self.others() {
            let (start, bytes) = self.piece(number, self.parts.sends[rank]);
            copies.push(Copy {
                to: self.slot(rank, self.me(), number),
                from: self.parts.from[rank] + start,
                bytes,
            });
        }
        if self.is_own_beside() {
            let (start, bytes) = self.piece(number, self.parts.result_bytes);
            copies.push(Copy {
                to: self.parts.result + start,
                from: self.parts.own + start,
                bytes,
            });
        }
        copies
    }

    /// The copies of this rank's piece of the result to all others.
    #[must_use]
    pub fn gathers(&self, number: usize) -> Copies {
        let mut copies = Copies::default();
        let (start, bytes) = self.piece(number, self.parts.result_bytes);
        let from = self.parts.result + start;
        for rank in self.others() {
            copies.push(Copy {
                to: self.places[rank] + (from - self.recv),
                from,
                bytes,
            });
        }
        copies
    }

    /// The kernel that reduces a piece.
    #[must_use]
    pub fn kernel(&self, number: usize) -> PieceKernel {
        let (start, bytes) = self.piece(number, self.parts.result_bytes);
        let mut arguments = Exchange {
            from: [0; MAX_PEERS],
            own: if self.is_own_beside() {
                self.parts.result
            } else {
                self.parts.own
            } + start,
            result: self.parts.result + start,
            result_bytes: bytes,
            chunk: number as u32,
            passes: 0,
            root: NO_ROOT,
            ..self.parts
        };
        for rank in self.others() {
            arguments.from[rank] = self.slot(self.me(), rank, number);
        }
        PieceKernel {
            number: self.kernel,
            blocks: BLOCKS,
            threads: PIECE_THREADS,
            arguments: PeerArguments::Exchange(arguments),
        }
    }
}

/// A launch of a kernel between copies.
pub struct PieceKernel {
    /// Among [`super::PeerLaunch::kernels`].
    pub number: usize,
    /// Blocks.
    pub blocks: u32,
    /// Threads of each.
    pub threads: u32,
    /// Its argument, but for its [`super::Head`].
    pub arguments: PeerArguments,
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeMap, sync::Arc};

    use ringsight_records::{Algorithm, DataType, Function, ReduceOp};

    use super::*;
    use crate::{
        cuda::{PeerLaunch, gates::Between},
        launch::{ChannelWork, Connections, Launch, Observer, Peers, Scalar, Straight, When, Window},
    };

    /// As far apart as nothing reaches.
    const APART: usize = 1 << 40;
    const OFFSET: u64 = 512;
    /// Where scratch is, behind windows, and what is sent, behind that.
    const SCRATCH: usize = APART / 4;
    const SENDS: usize = APART / 2;

    struct Nobody;

    impl Observer for Nobody {
        fn channel_started(&self, _op: u32, _replay: u32, _channel: u8, _when: When) {}
        fn channel_stopped(&self, _op: u32, _replay: u32, _channel: u8, _aborted: bool, _when: When) {}
        fn mismatch(&self, _op: u32, _replay: u32, _channel: u8, _theirs: u32) {}
        fn launch_finished(&self, _replay: u32, _aborted: bool) {}
    }

    /// Rank `r` has its memory from `(r + 1) * APART` on.
    fn work(rank: u32, ranks: u32, count: usize, send: Option<usize>, piece_bytes: u64) -> Work {
        let base = (rank as usize + 1) * APART;
        let at = |more: usize| {
            (1..=ranks as usize)
                .map(|rank| (rank * APART + more) as u64)
                .collect()
        };
        let scratch = Scratch {
            piece_bytes,
            bases: at(SCRATCH),
            memory: Box::new(()),
        };
        let window = Window {
            peers: Arc::new(Peers {
                rank,
                bases: vec![0; ranks as usize],
                most_blocks: 64,
                foreign: 0,
                memory: Box::new(()),
            }),
            places: at(0),
            scratch: Some(Arc::new(scratch)),
            engines: Arc::new(()),
            memory: Vec::new(),
        };
        Work {
            op: 1,
            tag: 7,
            function: Function::AllReduce,
            algorithm: Algorithm::TwoShot,
            data_type: DataType::Float16,
            reduce_op: ReduceOp::Sum,
            scalar: Scalar::None,
            send: base + send.unwrap_or(OFFSET as usize),
            recv: base + OFFSET as usize,
            count,
            part: 0..count,
            rank,
            ranks,
            root: 0,
            straight: Straight::No,
            pushes: false,
            connections: Connections::Engines {
                window: Arc::new(window),
                offset: OFFSET,
            },
        }
    }

    fn launched(work: Work) -> Result<Box<Pieces>, crate::WorkError> {
        work.check()?;
        let launch = PeerLaunch::new(&Launch {
            channels: vec![ChannelWork {
                channel: 0,
                work: vec![work],
            }],
            abort: Arc::default(),
            observer: Arc::new(Nobody),
            peers: None,
        })?;
        match launch.expect("one").between {
            Some(Between::Pieces(pieces)) => Ok(pieces),
            other => panic!("{other:?}"),
        }
    }

    /// Goes through all that the ranks do, a byte standing for what it is made of: the ranks whose contribution to which element it has.
    #[test]
    fn every_element_is_made_of_all_ranks_and_comes_to_all() {
        for (ranks, count, send, piece) in [
            (2, 5000, None, 1 << 15),
            (2, 100_003, Some(SENDS), 1 << 15),
            (2, 3, None, LINE),
            (2, 10_000, None, LINE),
            (4, 40_001, Some(SENDS + 2), 1 << 13),
            (4, 60_000, None, 1 << 20),
            (8, 33_333, Some(SENDS), 1 << 12),
            (8, 0, None, LINE),
        ] {
            let bytes = 2 * count as u64;
            let all: Vec<_> = (0..ranks)
                .map(|rank| launched(work(rank, ranks, count, send, piece)).unwrap())
                .collect();
            let pieces = all[0].count();
            assert!(pieces >= 2 && all.iter().all(|one| one.count() == pieces));
            assert_eq!(pieces > 2, bytes.div_ceil(u64::from(ranks)) > 2 * piece);
            // By where something of a buffer begins and ends, how often it has been written.
            let mut results: Vec<BTreeMap<u64, u64>> = vec![BTreeMap::new(); ranks as usize];
            for number in 0..pieces {
                // What has come to a slot of which rank: where in the buffers it is from.
                let mut come: BTreeMap<u64, (usize, u64, u64)> = BTreeMap::new();
                for (me, rank) in all.iter().enumerate() {
                    let base = (me + 1) as u64 * APART as u64;
                    for copy in rank.pushes(number).others() {
                        let is_own = copy.to / APART as u64 - 1 == me as u64;
                        let from = copy.from - base - send.unwrap_or(OFFSET as usize) as u64;
                        if is_own {
                            assert_eq!((copy.to - base - OFFSET, send), (from, Some(SENDS + 2)));
                            continue;
                        }
                        let within = copy.to % APART as u64 - SCRATCH as u64;
                        assert!(
                            within + copy.bytes <= scratch_bytes(ranks as usize, piece)
                                && within.is_multiple_of(LINE)
                        );
                        let slot = (within, within + copy.bytes.max(1));
                        let base = copy.to - within;
                        let overlaps = |at: &u64, one: &(usize, u64, u64)| {
                            base <= *at
                                && *at < base + APART as u64 / 8
                                && at - base < slot.1
                                && slot.0 < at - base + one.2
                        };
                        assert!(
                            !come.iter().any(|(at, one)| overlaps(at, one)),
                            "slots of a piece overlap"
                        );
                        come.insert(copy.to, (me, from, copy.bytes));
                    }
                }
                for (me, rank) in all.iter().enumerate() {
                    let base = (me + 1) as u64 * APART as u64;
                    let kernel = rank.kernel(number);
                    assert!(
                        PeerLaunch::kernels()
                            .nth(kernel.number)
                            .unwrap()
                            .to_str()
                            .unwrap()
                            .ends_with(&format!("piece_sum_f16_{ranks}"))
                    );
                    let PeerArguments::Exchange(told) = kernel.arguments else {
                        panic!()
                    };
                    assert_eq!(
                        (told.chunk as usize, told.passes, told.root),
                        (number, 0, NO_ROOT)
                    );
                    let at = told.result - base - OFFSET;
                    let own = told.own - base;
                    let is_beside = send == Some(SENDS + 2) && told.result_bytes > 0;
                    assert_eq!(
                        own,
                        at + if is_beside {
                            OFFSET
                        } else {
                            send.unwrap_or(OFFSET as usize) as u64
                        }
                    );
                    let are_aligned = told.own.is_multiple_of(16) && told.result.is_multiple_of(16);
                    assert!(are_aligned || told.result_bytes == 0);
                    // Each of the others' contributions is of the same bytes.
                    for other in (0..ranks as usize).filter(|other| *other != me) {
                        assert_eq!(come[&told.from[other]], (other, at, told.result_bytes));
                    }
                    let gathered = rank.gathers(number);
                    assert_eq!(gathered.others().len() as u32, ranks - 1);
                    results[me].insert(at, told.result_bytes);
                    for copy in gathered.others() {
                        let to = copy.to / APART as u64 - 1;
                        assert_eq!((copy.from, copy.bytes), (told.result, told.result_bytes));
                        assert_eq!(copy.to % APART as u64 - OFFSET, at);
                        if copy.bytes > 0 {
                            let before = results[to as usize].insert(at, copy.bytes);
                            assert_eq!(before.filter(|bytes| *bytes > 0), None);
                        }
                    }
                }
            }
            for written in &mut results {
                written.retain(|_, bytes| *bytes > 0);
                let mut end = 0;
                for (at, bytes) in written {
                    assert_eq!(*at, end);
                    end += *bytes;
                }
                assert_eq!(end, bytes);
            }
        }
    }

    #[test]
    fn what_no_kernel_reduces_so_is_refused() {
        let good = || work(0, 2, 1000, None, LINE);
        assert!(launched(good()).is_ok());
        let most = most_bytes(2, LINE) as usize / 2;
        assert!(launched(work(0, 2, most, None, LINE)).is_ok());
        for other in [
            work(0, 2, most + 1, None, LINE),
            work(0, 3, 1000, None, LINE),
            Work {
                data_type: DataType::Int32,
                ..good()
            },
            Work {
                reduce_op: ReduceOp::Max,
                ..good()
            },
            Work {
                recv: good().recv + 2,
                ..good()
            },
            Work {
                algorithm: Algorithm::Direct,
                ..good()
            },
        ] {
            assert!(launched(other).is_err());
        }
    }
}
