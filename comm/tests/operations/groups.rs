//! Groups that are only simulated, or fail midway.

use std::ptr::null_mut;

use ringsight_comm::{
    abi::{self, NcclSimInfo, SIM_INFO_MAGIC},
    device::Stream,
    error::ResultCode,
};
use ringsight_records::{Function, Kind, State};

use super::calls::{ARGUMENT, all_reduce, group_end, group_start, of_comm, on_one_rank};
use crate::common::{
    COLLECTIVES, Call, Rank, fails, host, last_error, ok, on_ranks,
    watch::{Watch, count, of, turn},
};

fn sim_info() -> NcclSimInfo {
    NcclSimInfo {
        size: size_of::<NcclSimInfo>(),
        magic: SIM_INFO_MAGIC,
        version: 23007,
        estimated_time: -1.0,
    }
}

/// Closes the group with a simulation; what it says.
fn simulate(info: &mut NcclSimInfo) -> ResultCode {
    // SAFETY: a valid place.
    unsafe { abi::ncclGroupSimulateEnd(&raw mut *info) }
}

#[test]
fn a_simulated_group_tells_its_time_and_launches_nothing() {
    let _turn = turn();
    let watch = Watch::begin();
    on_ranks(2, |rank| {
        let input = vec![1f32; 1 << 20];
        let mut output = vec![0f32; 1 << 20];
        let mut call = |function, count| {
            let call = Call::peer(function, count, 1 - rank.rank);
            ok(rank.call(&call, input.as_ptr().cast(), output.as_mut_ptr().cast()));
        };
        let mut times = Vec::new();
        // Rank 1 simulates more than rank 0: afterwards both must still speak of the same operations.
        for count in [8, 1 << 19].into_iter().take(1 + rank.rank) {
            for functions in [
                &COLLECTIVES[..1],
                &[Function::AllReduce],
                &[Function::AllReduce, Function::Send, Function::AllReduce],
            ] {
                group_start();
                group_start();
                functions.iter().for_each(|function| call(*function, count));
                let mut info = sim_info();
                ok(simulate(&mut info));
                assert_eq!(info.estimated_time, -1.0, "an inner level does nothing");
                ok(simulate(&mut info));
                assert!(
                    info.estimated_time > 0.0 && info.estimated_time < 1e7,
                    "{} µs",
                    info.estimated_time
                );
                times.push(info.estimated_time);
            }
        }
        assert!(times[1] < times[2], "more operations, more time: {times:?}");
        if let [.., all_reduce, _] = times[3..] {
            assert!(times[1] < all_reduce, "more bytes, more time: {times:?}");
        }
        rank.synchronize();
        assert!(output.iter().all(|value| *value == 0.0), "nothing was launched");
        Call::new(Function::AllReduce, 100).check(&rank, false);
    });
    let records = watch.end();
    assert_eq!(count(&records, Kind::KernelLaunch, State::START), 2);
    let launched: Vec<_> = of(&records, Kind::OpLaunched).map(|record| record.seq).collect();
    assert_eq!(launched, [0, 0], "the simulated ones have left no trace");
}

#[test]
fn a_simulation_checks_its_argument_and_forgets_the_group() {
    let _turn = turn();
    host();
    let rank = on_one_rank();
    let (input, mut output) = ([1f32; 4], [0f32; 4]);
    let mut attempt = |info: *mut NcclSimInfo| {
        group_start();
        ok(all_reduce(&rank, &input, &mut output, 0));
        // SAFETY: null or a valid place.
        let code = unsafe { abi::ncclGroupSimulateEnd(info) };
        rank.synchronize();
        assert_eq!(output, [0.0; 4]);
        code
    };
    let changed = |change: fn(&mut NcclSimInfo)| {
        let mut info = sim_info();
        change(&mut info);
        info
    };
    fails(attempt(null_mut()), ARGUMENT, "simInfo is NULL");
    fails(
        attempt(&mut changed(|info| info.magic = 0)),
        ARGUMENT,
        "simInfo.magic",
    );
    fails(
        attempt(&mut changed(|info| info.size = 8)),
        ARGUMENT,
        "simInfo.size (8)",
    );
    // A struct that ends before the time is left as it is; a larger one is a later version's.
    let mut short = changed(|info| info.size = 16);
    ok(attempt(&raw mut short));
    assert_eq!(short.estimated_time, -1.0);
    let mut long = changed(|info| info.size = 64);
    ok(attempt(&raw mut long));
    assert!(long.estimated_time > 0.0);
    fails(
        simulate(&mut sim_info()),
        ResultCode::InvalidUsage,
        "without ncclGroupStart",
    );
    // A bad call fails the group here too.
    group_start();
    fails(all_reduce(&rank, &input, &mut [], 9), ARGUMENT, "op (9)");
    let mut info = sim_info();
    fails(simulate(&mut info), ARGUMENT, "op (9)");
    assert_eq!(info.estimated_time, -1.0);
    rank.leave();
}

#[test]
fn a_group_that_fails_midway_says_what_was_launched() {
    let _turn = turn();
    let watch = Watch::begin();
    on_ranks(1, |first| {
        let device = host();
        let second = on_one_rank();
        let (data, mut out) = ([1f32; 8], [[0f32; 8]; 3]);
        // Which communicator is launched first is the library's affair: only one of them keeps its stream.
        let streams = [device.stream_create().unwrap(), device.stream_create().unwrap()];
        let lose = |rank: &Rank, stream: Stream| Rank { stream, ..*rank };
        let launches = |rank: &Rank| of_comm(rank).held_plans().0;
        for (lost, kept) in [(&first, &second), (&second, &first)] {
            let stream = streams[usize::from(std::ptr::eq(lost, &raw const second))];
            group_start();
            ok(all_reduce(&lose(lost, stream), &data, &mut out[0], 0));
            ok(all_reduce(kept, &data, &mut out[1], 0));
            device.stream_destroy(stream).unwrap();
            let code = group_end();
            let text = last_error();
            assert_eq!(code, ARGUMENT, "{text}");
            kept.synchronize();
            // It went one way or the other, and the text says which.
            let went = out[1] == [1.0; 8];
            assert_eq!(
                text.contains("1 of the group's 2 operations were launched"),
                went,
                "{text}"
            );
            assert_eq!(out[0], [0.0; 8]);
            out[1] = [0.0; 8];
            assert_eq!(launches(lost), 0, "a plan that was not launched is not held");
        }
        // Both go on where they were.
        for rank in [&first, &second] {
            ok(all_reduce(rank, &data, &mut out[2], 0));
            rank.synchronize();
        }
        second.leave();
    });
    let records = watch.end();
    let launched: Vec<_> = of(&records, Kind::OpLaunched).collect();
    assert_eq!(
        launched.len(),
        3,
        "one of the two groups got one out, and two followed"
    );
    for launch in &launched {
        let ends = of(&records, Kind::OpCompleted).filter(|record| record.op == launch.op);
        assert_eq!(ends.count(), 1);
    }
    // Numbers that were not used are used by what follows.
    let mut seqs: Vec<_> = launched.iter().map(|record| (record.comm, record.seq)).collect();
    seqs.sort_unstable_by_key(|(comm, seq)| (*seq, *comm));
    assert_eq!(seqs.iter().map(|(_, seq)| *seq).collect::<Vec<_>>(), [0, 0, 1]);
    assert_eq!(
        count(&records, Kind::Coll, State::START),
        count(&records, Kind::Coll, State::STOP) + count(&records, Kind::Coll, State::ABORTED)
    );
}
