//! Collectives by copy engines: what copies where, between the kernels of `cuda/gates.cuh`.

use std::ffi::CStr;

use super::{
    exchange::parts,
    layout::{Gate, PeerCall},
    peer_launch::{PeerArguments, PeerLaunch, SERVICE},
    peers::MAX_PEERS,
    pieces::Pieces,
};
use crate::launch::{Window, Work};

/// Names of the kernels, by their numbers: `RINGSIGHT_GATES` in `cuda/gates.cuh`. The first one comes before the copies, the second one behind
/// them, and the third one between them.
pub const KERNELS: [&CStr; 3] = [
    c"ringsight_gate_begin",
    c"ringsight_gate_end",
    c"ringsight_gate_meet",
];

/// Threads of the one block of each: those that serve.
pub const GATE_THREADS: u32 = SERVICE;

/// Bytes that a copy engine moves.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Copy {
    /// Where to, as this rank's device knows it.
    pub to: u64,
    /// Where from: this rank's send buffer.
    pub from: u64,
    /// How many.
    pub bytes: u64,
}

/// What copy engines and kernels do between the two gates.
#[derive(Clone, Debug)]
#[expect(
    clippy::large_enum_variant,
    reason = "on the stack of the call that launches it: what is short shall not allocate, and copies may be"
)]
pub enum Between {
    /// Nothing but copies.
    Copies(Copies),
    /// A reduction, of at least some megabytes.
    Pieces(Box<Pieces>),
}

/// The copies of one collective, or of one piece of it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Copies {
    others: [Copy; MAX_PEERS],
    count: usize,
    /// What stays here, if it does not stand in its place already.
    pub own: Option<Copy>,
}

impl Copies {
    /// One to each other rank, beginning with the next one so that not all write to the same rank at a time.
    #[must_use]
    pub fn others(&self) -> &[Copy] {
        &self.others[..self.count]
    }

    pub(super) fn push(&mut self, copy: Copy) {
        self.others[self.count] = copy;
        self.count += 1;
    }
}

/// The launch of a collective of whose buffers one begins at byte `offset` of a window, but for where it reports to; `None` if it reduces what no kernel does.
pub(super) fn launch(work: &Work, call: PeerCall, window: &Window, offset: u64) -> Option<PeerLaunch> {
    let between = if work.function.reduces() {
        Between::Pieces(Box::new(Pieces::new(work, call, window, offset)?))
    } else {
        Between::Copies(copies(work, call, &window.places, offset))
    };
    Some(PeerLaunch {
        between: Some(between),
        ..gate(call, 0, 0)
    })
}

/// The launch of one of the kernels; `meeting`: of one between copies, which.
pub(super) fn gate(call: PeerCall, kernel: usize, meeting: u32) -> PeerLaunch {
    PeerLaunch {
        arguments: PeerArguments::Gate(Gate {
            call,
            gives_up: 0,
            meeting,
        }),
        kernel,
        blocks: 1,
        threads: GATE_THREADS,
        between: None,
    }
}

/// What goes where if nothing is reduced.
fn copies(work: &Work, call: PeerCall, places: &[u64], offset: u64) -> Copies {
    let arguments = parts(work, call);
    let (ranks, me) = (work.ranks as usize, work.rank as usize);
    let mut copies = Copies::default();
    for rank in (1..ranks).map(|hop| (me + hop) % ranks) {
        // A receive buffer has a block of each rank.
        let bytes = arguments.sends[rank];
        copies.push(Copy {
            to: places[rank] + offset + bytes * me as u64,
            from: arguments.from[rank],
            bytes,
        });
    }
    copies.own = (arguments.own != arguments.result).then_some(Copy {
        to: arguments.result,
        from: arguments.own,
        bytes: arguments.result_bytes,
    });
    copies
}

#[cfg(test)]
mod tests {
    use ringsight_records::{Function, ReduceOp};

    use super::*;
    use crate::cuda::testing::{APART, OFFSET, in_window, launched};

    fn work(function: Function, rank: u32, ranks: u32, count: usize, in_place: bool) -> Work {
        let work = in_window(rank, ranks, count, None);
        let in_recv = work.recv + rank as usize * count * 4;
        Work {
            function,
            send: if in_place { in_recv } else { work.send },
            ..work
        }
    }

    #[test]
    fn every_byte_of_every_receive_buffer_is_copied_once() {
        for (function, ranks, in_place) in [
            (Function::AllGather, 2, false),
            (Function::AllGather, 3, true),
            (Function::AllGather, 8, false),
            (Function::AlltoAll, 2, false),
            (Function::AlltoAll, 8, false),
        ] {
            let (count, bytes) = (1001, 4004);
            let mut written: Vec<Vec<(u64, u64)>> = vec![Vec::new(); ranks as usize];
            for rank in 0..ranks {
                let launch = launched(vec![work(function, rank, ranks, count, in_place)])
                    .unwrap()
                    .unwrap();
                let name = PeerLaunch::kernels().nth(launch.kernel).unwrap();
                assert_eq!((name, launch.blocks, launch.threads), (KERNELS[0], 1, 32));
                assert_eq!(PeerLaunch::kernels().nth(launch.kernel + 1).unwrap(), KERNELS[1]);
                let Some(Between::Copies(copies)) = launch.between else {
                    panic!("{:?}", launch.between)
                };
                assert_eq!(copies.others().len() as u32, ranks - 1);
                assert_eq!(copies.own.is_none(), in_place);
                for (at, copy) in copies.others().iter().chain(&copies.own).enumerate() {
                    let to = copy.to as usize / APART - 1;
                    // Each begins with another rank, and ends with itself.
                    assert_eq!(to as u32, (rank + 1 + at as u32) % ranks);
                    let send = work(function, rank, ranks, count, in_place).send as u64;
                    let block = if function == Function::AlltoAll {
                        to as u64 * bytes
                    } else {
                        0
                    };
                    assert_eq!(copy.from, send + block);
                    written[to].push((copy.to % APART as u64, copy.bytes));
                }
                if in_place {
                    written[rank as usize].push((OFFSET + u64::from(rank) * bytes, bytes));
                }
            }
            for mut blocks in written {
                blocks.sort_unstable();
                let expected = (0..u64::from(ranks)).map(|block| (OFFSET + block * bytes, bytes));
                assert!(blocks.into_iter().eq(expected), "{function}");
            }
        }
    }

    #[test]
    fn what_engines_cannot_do_is_refused() {
        let gather = || work(Function::AllGather, 0, 2, 8, false);
        assert!(launched(vec![gather(), gather()]).is_err(), "two in a launch");
        let reduce = Work {
            reduce_op: ReduceOp::Sum,
            ..work(Function::ReduceScatter, 0, 2, 8, false)
        };
        assert!(launched(vec![reduce]).is_err());
        let fewer = Work { ranks: 3, ..gather() };
        assert!(launched(vec![fewer]).is_err(), "a window of other ranks");
    }
}
