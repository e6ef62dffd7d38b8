//! Ranks that do not call alike: every rank fails with who called what, and none hangs.

mod common;

use std::{ffi::c_int, thread};

use common::{
    COLLECTIVES, Call, Rank, host, last_error, ok, on_ranks, rank_of_process, run_processes, unique_id,
    waiting::eventually,
};
use ringsight_comm::{
    abi::{self, UniqueIdBytes},
    error::ResultCode,
};
use ringsight_records::{DataType, Function, ReduceOp};

/// What a group of calls is for each rank: the odd one out does something else.
#[derive(Clone, Debug)]
struct Case {
    usual: Vec<Call>,
    odd: Vec<Call>,
    /// The calls that the failure names: the others', and the odd one's.
    blamed: (Call, Call),
}

/// The rank that does something else.
const ODD: usize = 1;

impl Case {
    fn one(usual: Call, odd: Call) -> Self {
        Self {
            usual: vec![usual],
            odd: vec![odd],
            blamed: (usual, odd),
        }
    }
}

const ROOTED: [Function; 4] = [
    Function::Broadcast,
    Function::Reduce,
    Function::Gather,
    Function::Scatter,
];

/// Every kind of difference for every collective.
fn cases() -> Vec<Case> {
    let mut cases = Vec::new();
    for function in COLLECTIVES {
        let call = |count| Call::new(function, count);
        // Also where one takes more channels than the other.
        for (usual, odd) in [(10, 11), (10, 300_003), (300_003, 10), (200_000, 200_001)] {
            cases.push(Case::one(call(usual), call(odd)));
        }
        let data_type = DataType::Int32;
        cases.push(Case::one(
            call(70),
            Call {
                data_type,
                ..call(70)
            },
        ));
        if function.reduces() {
            let op = ReduceOp::Max;
            cases.push(Case::one(call(70), Call { op, ..call(70) }));
        }
        if ROOTED.contains(&function) {
            for root in [1, 2] {
                cases.push(Case::one(call(70), Call { root, ..call(70) }));
            }
        }
        for other in COLLECTIVES {
            if function != other {
                let (one, two) = (call(500), Call::new(other, 500));
                cases.push(Case::one(one, two));
                // The same calls in another order.
                cases.push(Case {
                    usual: vec![one, two],
                    odd: vec![two, one],
                    blamed: (one, two),
                });
            }
        }
    }
    cases
}

/// As the report names a call.
fn name(call: &Call) -> String {
    let function = match call.function {
        Function::AllReduce => "AllReduce",
        Function::AllGather => "AllGather",
        Function::ReduceScatter => "ReduceScatter",
        Function::Broadcast => "Broadcast",
        Function::Reduce => "Reduce",
        Function::AlltoAll => "AlltoAll",
        Function::Gather => "Gather",
        Function::Scatter => "Scatter",
        Function::Send => "Send",
        Function::Recv => "Recv",
    };
    let mut text = format!("{function}(count {}, {}", call.count, call.data_type);
    if call.function.reduces() {
        text += &format!(", {}", call.op);
    }
    match call.function {
        function if ROOTED.contains(&function) => text + &format!(", root {})", call.root),
        Function::Send => text + &format!(") to rank {}", call.root),
        Function::Recv => text + &format!(") from rank {}", call.root),
        _ => text + ")",
    }
}

/// Calls `calls` in one group, at once or in a graph that is then launched, and waits for the stream. The communicator may
/// have failed before all is called, since others are ahead.
fn run(rank: &Rank, calls: &[Call], captured: bool) {
    let device = host();
    let mut buffers: Vec<(Vec<u8>, Vec<u8>)> = calls
        .iter()
        .map(|call| {
            let (send, recv) = call.elements(rank.ranks);
            let size = call.data_type.size();
            (vec![1; send * size], vec![0; recv * size])
        })
        .collect();
    if captured {
        device.capture_begin(rank.stream).unwrap();
    }
    // SAFETY: no arguments.
    ok(unsafe { abi::ncclGroupStart() });
    let mut code = ResultCode::Success;
    for (call, (send, recv)) in calls.iter().zip(&mut buffers) {
        if code == ResultCode::Success {
            code = rank.call(call, send.as_ptr(), recv.as_mut_ptr());
        }
    }
    // SAFETY: no arguments.
    let end = unsafe { abi::ncclGroupEnd() };
    if end != ResultCode::Success {
        assert!(
            last_error().contains("failed earlier"),
            "{code:?} {end:?}: {}",
            last_error()
        );
    }
    let exec = captured.then(|| {
        let graph = device.capture_end(rank.stream).unwrap();
        let exec = device.graph_instantiate(graph).unwrap();
        device.graph_destroy(graph).unwrap();
        device.graph_launch(exec, rank.stream).unwrap();
        exec
    });
    // Also where the communicator fails: its waits are released.
    rank.synchronize();
    if let Some(exec) = exec {
        device.graph_exec_destroy(exec).unwrap();
    }
}

fn async_error(rank: &Rank) -> ResultCode {
    let mut code: c_int = -1;
    // SAFETY: a live communicator and a valid place.
    ok(unsafe { abi::ncclCommGetAsyncError(rank.comm, &raw mut code) });
    *ResultCode::ALL
        .iter()
        .find(|known| **known as c_int == code)
        .unwrap()
}

/// The text that the communicator failed with: of the next call on it.
fn failure(rank: &Rank) -> String {
    eventually("the communicator fails", || {
        async_error(rank) != ResultCode::Success
    });
    assert_eq!(async_error(rank), ResultCode::InvalidUsage);
    let mut data = [0f32; 1];
    let at = data.as_mut_ptr().cast();
    let code = rank.call(&Call::new(Function::AllReduce, 1), at, at);
    assert_eq!(code, ResultCode::InvalidUsage);
    let text = last_error();
    let (_, text) = text
        .split_once("comm has failed earlier: ")
        .unwrap_or_else(|| panic!("{text}"));
    text.to_owned()
}

/// Ends a communicator that has failed, one way or the other.
fn end(rank: Rank) {
    host().stream_destroy(rank.stream).unwrap();
    // SAFETY: a live communicator.
    let code = unsafe {
        if rank.rank.is_multiple_of(2) {
            abi::ncclCommAbort(rank.comm)
        } else {
            abi::ncclCommDestroy(rank.comm)
        }
    };
    let destroyed = [ResultCode::Success, ResultCode::InvalidUsage].contains(&code);
    assert!(destroyed, "{code:?}: {}", last_error());
}

/// One rank's part in one case, on a communicator of its own.
fn differ(id: UniqueIdBytes, (rank, ranks): (usize, usize), case: &Case, captured: bool) -> String {
    let rank = Rank::join(id, rank, ranks);
    run(&rank, &[Call::new(Function::AllReduce, 3)], false);
    run(
        &rank,
        if rank.rank == ODD { &case.odd } else { &case.usual },
        captured,
    );
    let text = failure(&rank);
    let (usual, odd) = (
        name(&case.blamed.0),
        format!("rank {ODD} called {}", name(&case.blamed.1)),
    );
    let number = if captured {
        "collective #0 of graph 1"
    } else {
        "collective #1"
    };
    assert!(
        text.contains(&usual) && text.contains(&odd) && text.contains(number),
        "rank {} of {case:?}, captured {captured}: {text}",
        rank.rank
    );
    end(rank);
    text
}

/// A message that is received as another number of bytes.
fn misfit(
    id: UniqueIdBytes,
    (rank, ranks): (usize, usize),
    (sent, received): (usize, usize),
    captured: bool,
) {
    let rank = Rank::join(id, rank, ranks);
    let call = match rank.rank {
        0 => vec![Call::peer(Function::Send, sent, ODD)],
        ODD => vec![Call::peer(Function::Recv, received, 0)],
        _ => vec![],
    };
    run(&rank, &call, captured && !call.is_empty());
    let text = failure(&rank);
    let (send, recv) = (
        format!("rank 0 called Send(count {sent}, float32) to rank {ODD}"),
        format!("rank {ODD} called Recv(count {received}, float32) from rank 0"),
    );
    assert!(
        text.contains(&send) && text.contains(&recv) && text.contains(&format!("from rank 0 to rank {ODD}")),
        "{text}"
    );
    end(rank);
}

const MISFITS: [(usize, usize); 4] = [(10, 11), (300_001, 10), (10, 300_001), (200_000, 200_100)];
const RANKS: usize = 3;

#[test]
fn threads_that_differ_are_all_told() {
    host();
    let on_threads = |part: &(dyn Fn(UniqueIdBytes, usize) -> String + Sync)| {
        let id = unique_id();
        let texts: Vec<String> = thread::scope(|scope| {
            let ranks: Vec<_> = (0..RANKS)
                .map(|rank| scope.spawn(move || part(id, rank)))
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        });
        assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
    };
    for captured in [false, true] {
        for case in cases() {
            on_threads(&|id, rank| differ(id, (rank, RANKS), &case, captured));
        }
        for counts in MISFITS {
            on_threads(&|id, rank| {
                misfit(id, (rank, RANKS), counts, captured);
                String::new()
            });
        }
    }
}

#[test]
fn processes_that_differ_are_all_told() {
    run_processes("worker", RANKS, 1);
}

#[test]
fn nodes_that_differ_are_all_told() {
    run_processes("worker", RANKS, RANKS);
}

/// The ids of further communicators, from rank 0.
fn share_ids(rank: &Rank, count: usize) -> Vec<UniqueIdBytes> {
    let mut ids: Vec<UniqueIdBytes> = (0..count)
        .map(|_| {
            if rank.rank == 0 {
                unique_id()
            } else {
                UniqueIdBytes([0; 128])
            }
        })
        .collect();
    let data_type = c_int::from(DataType::Uint8.code());
    let at = ids.as_mut_ptr().cast();
    // SAFETY: a buffer of that many bytes, that lives until the stream is synchronized.
    ok(unsafe { abi::ncclBroadcast(at, at, count * 128, data_type, 0, rank.comm, rank.stream) });
    rank.synchronize();
    ids
}

#[test]
#[ignore = "helper: the body of one rank; started by the other tests"]
fn worker() {
    let Some(rank) = rank_of_process() else { return };
    let place = (rank.rank, rank.ranks);
    for captured in [false, true] {
        for case in cases() {
            differ(share_ids(&rank, 1)[0], place, &case, captured);
        }
        for counts in MISFITS {
            misfit(share_ids(&rank, 1)[0], place, counts, captured);
        }
    }
    rank.leave();
    println!("rank done");
}

/// Numbers that look random and are the same for the same seed (SplitMix64).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ z >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ z >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ z >> 31) % limit as u64) as usize
    }

    fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

/// A group of calls that fit together, as rank `me` makes them.
fn matching(random: &mut Random, me: usize, ranks: usize) -> Vec<Call> {
    let mut calls = Vec::new();
    for _ in 0..1 + random.below(6) {
        let count = random.pick(&[0, 1, 2, 17, 1000, 20_000, 140_000]);
        let data_type = random.pick(&common::EXACT_TYPES);
        if random.below(3) > 0 {
            calls.push(Call {
                data_type,
                op: random.pick(&[ReduceOp::Sum, ReduceOp::Prod, ReduceOp::Max, ReduceOp::Min]),
                root: random.below(ranks),
                ..Call::new(random.pick(&COLLECTIVES), count)
            });
            continue;
        }
        let (from, to) = (random.below(ranks), random.below(ranks));
        // The same bytes; the types may differ.
        let bytes = count * data_type.size();
        let call = |function, peer, data_type: DataType| Call {
            data_type,
            ..Call::peer(function, bytes / data_type.size(), peer)
        };
        if from == me {
            calls.push(call(Function::Send, to, data_type));
        }
        if to == me {
            calls.push(call(Function::Recv, from, DataType::Uint8));
        }
    }
    calls
}

/// No matter what they call, ranks that call alike are left alone.
#[test]
fn ranks_that_call_alike_are_left_alone() {
    for seed in 0..4 {
        on_ranks(4, |rank| {
            let mut random = Random(seed);
            for _ in 0..120 {
                let captured = random.below(4) == 0;
                let calls = matching(&mut random, rank.rank, rank.ranks);
                let captured = captured && !calls.iter().all(|call| call.count == 0);
                run(&rank, &calls, captured);
            }
            assert_eq!(async_error(&rank), ResultCode::Success, "{}", last_error());
        });
    }
}
