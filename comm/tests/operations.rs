//! What operations do beyond moving the right bytes: reductions that callers make, simulated groups, groups that fail.
//! Some look at the process's records, so all take turns.

mod common;

use std::{
    ffi::{c_int, c_void},
    ptr::{null, null_mut},
    sync::Arc,
};

use common::{
    COLLECTIVES, Call, Rank, host, last_error, ok, on_ranks,
    watch::{Watch, count, description, of, turn},
};
use ringsight_comm::{
    abi::{self, NcclSimInfo, SIM_INFO_MAGIC},
    communicator::Handle,
    device::Stream,
    error::ResultCode,
};
use ringsight_records::{DataType, Flags, Function, Kind, State};

const FLOAT: c_int = 7;
const DEVICE: c_int = 0;
const HOST: c_int = 1;
const ARGUMENT: ResultCode = ResultCode::InvalidArgument;

/// Asserts the code and that the text says `what`.
#[track_caller]
fn fails(code: ResultCode, expected: ResultCode, what: &str) {
    let text = last_error();
    assert_eq!(code, expected, "{text}");
    assert!(text.contains(what), "{text:?} does not say {what:?}");
}

fn group_start() {
    // SAFETY: no arguments.
    ok(unsafe { abi::ncclGroupStart() });
}

fn group_end() -> ResultCode {
    // SAFETY: no arguments.
    unsafe { abi::ncclGroupEnd() }
}

/// A PreMulSum of floats.
fn pre_mul_sum(comm: Handle, scalar: *mut f32, residence: c_int) -> c_int {
    let mut op = -1;
    // SAFETY: valid places.
    ok(unsafe {
        abi::ncclRedOpCreatePreMulSum(&raw mut op, scalar.cast::<c_void>(), FLOAT, residence, comm)
    });
    assert!(op >= 5, "no built-in reduction's number");
    op
}

fn all_reduce(rank: &Rank, send: &[f32], recv: &mut [f32], op: c_int) -> ResultCode {
    let (from, to) = (send.as_ptr().cast(), recv.as_mut_ptr().cast());
    // SAFETY: buffers of as many elements, which live until the stream is synchronized.
    unsafe { abi::ncclAllReduce(from, to, send.len(), FLOAT, op, rank.comm, rank.stream) }
}

fn destroy(rank: &Rank, op: c_int) -> ResultCode {
    // SAFETY: numbers and handles, right or wrong.
    unsafe { abi::ncclRedOpDestroy(op, rank.comm) }
}

#[test]
fn a_scalar_on_the_host_is_read_by_the_call_that_makes_the_reduction() {
    let _turn = turn();
    on_ranks(3, |rank| {
        let input = vec![1f32; 3000];
        let mut sums = vec![vec![0f32; 3000]; 2];
        let mut scalar = 1.0 + rank.rank as f32;
        let op = pre_mul_sum(rank.comm, &raw mut scalar, HOST);
        scalar = 100.0;
        let other = pre_mul_sum(rank.comm, &raw mut scalar, HOST);
        assert_ne!(op, other);
        group_start();
        for (sum, op) in sums.iter_mut().zip([op, other]) {
            ok(all_reduce(&rank, &input, sum, op));
            // As frameworks do: the group is not even launched yet.
            ok(destroy(&rank, op));
        }
        ok(group_end());
        rank.synchronize();
        assert_eq!(sums[0], vec![6f32; 3000], "each rank's own scalar");
        assert_eq!(sums[1], vec![300f32; 3000]);
    });
}

#[test]
fn a_scalar_on_the_device_is_read_when_the_operation_runs() {
    let _turn = turn();
    on_ranks(2, |rank| {
        let device = host();
        let input = vec![1f32; 1000];
        let mut sum = vec![0f32; 1000];
        let mut scalar = Box::new(1f32);
        let later = Box::new(5f32);
        let op = pre_mul_sum(rank.comm, &raw mut *scalar, DEVICE);
        // The copy runs before the operation, though long after the reduction was made.
        let (to, from) = (&raw mut *scalar as usize, &raw const *later as usize);
        device.memcpy(to, from, 4, rank.stream).unwrap();
        ok(all_reduce(&rank, &input, &mut sum, op));
        ok(destroy(&rank, op));
        rank.synchronize();
        assert_eq!(sum, vec![10f32; 1000]);
    });
}

#[test]
fn captured_scalars_stay_with_the_graph() {
    let _turn = turn();
    on_ranks(2, |rank| {
        let device = host();
        let input = vec![1f32; 1000];
        let mut sums = vec![vec![0f32; 1000]; 2];
        let mut on_device = Box::new(0f32);
        let mut on_host = Box::new(3f32);
        let ops = [
            pre_mul_sum(rank.comm, &raw mut *on_host, HOST),
            pre_mul_sum(rank.comm, &raw mut *on_device, DEVICE),
        ];
        device.capture_begin(rank.stream).unwrap();
        for (sum, op) in sums.iter_mut().zip(ops) {
            ok(all_reduce(&rank, &input, sum, op));
        }
        let graph = device.capture_end(rank.stream).unwrap();
        ops.iter().for_each(|op| ok(destroy(&rank, *op)));
        *on_host = -1.0;
        let exec = device.graph_instantiate(graph).unwrap();
        device.graph_destroy(graph).unwrap();
        for replay in 0..5 {
            *on_device = replay as f32;
            device.graph_launch(exec, rank.stream).unwrap();
            rank.synchronize();
            assert_eq!(
                sums[0],
                vec![6f32; 1000],
                "an immediate scalar is the graph's own"
            );
            assert_eq!(
                sums[1],
                vec![2.0 * replay as f32; 1000],
                "a device scalar is read anew"
            );
        }
        device.graph_exec_destroy(exec).unwrap();
    });
}

#[test]
fn reductions_belong_to_their_communicator_and_type() {
    let _turn = turn();
    on_ranks(2, |rank| {
        let mut scalar = 2f32;
        let at = (&raw mut scalar).cast();
        let mut op = -7;
        let create = |op: *mut c_int, at: *mut c_void, kind, residence, comm| {
            // SAFETY: places are valid or null.
            unsafe { abi::pncclRedOpCreatePreMulSum(op, at, kind, residence, comm) }
        };
        let place = &raw mut op;
        fails(
            create(place, at, FLOAT, HOST, Handle(0)),
            ARGUMENT,
            "comm is NULL",
        );
        fails(
            create(null_mut(), at, FLOAT, HOST, rank.comm),
            ARGUMENT,
            "op is NULL",
        );
        fails(
            create(place, null_mut(), FLOAT, HOST, rank.comm),
            ARGUMENT,
            "scalar is NULL",
        );
        fails(
            create(place, at, 12, HOST, rank.comm),
            ResultCode::InternalError,
            "datatype (12)",
        );
        fails(create(place, at, FLOAT, 2, rank.comm), ARGUMENT, "residence (2)");
        assert_eq!(op, -7, "a failed call sets nothing");

        let other = on_one_rank();
        let op = pre_mul_sum(rank.comm, &raw mut scalar, HOST);
        let (input, mut sum) = ([1f32; 4], [0f32; 4]);
        fails(
            all_reduce(&other, &input, &mut sum, op),
            ARGUMENT,
            "not a reduction of this communicator",
        );
        fails(
            destroy(&other, op),
            ARGUMENT,
            "not a reduction of this communicator",
        );
        let (from, to) = (input.as_ptr().cast(), sum.as_mut_ptr().cast());
        // SAFETY: a refused call touches no buffer.
        let code = unsafe { abi::ncclAllReduce(from, to, 1, 8, op, rank.comm, rank.stream) };
        fails(code, ARGUMENT, "was made for float32");
        for built_in in 0..5 {
            fails(destroy(&rank, built_in), ARGUMENT, "built in");
        }
        for garbage in [-1, i32::MIN, i32::MAX] {
            fails(destroy(&rank, garbage), ARGUMENT, "not a reduction");
        }
        ok(destroy(&rank, op));
        fails(destroy(&rank, op), ARGUMENT, "not a reduction");
        fails(
            all_reduce(&rank, &input, &mut sum, op),
            ARGUMENT,
            "not a reduction",
        );
        other.leave();
        Call::new(Function::AllReduce, 100).check(&rank, false);
    });
}

/// A communicator of one rank.
fn on_one_rank() -> Rank {
    Rank::join(common::unique_id(), 0, 1)
}

#[test]
fn one_rank_multiplies_too() {
    let _turn = turn();
    host();
    let rank = on_one_rank();
    let input: Vec<f32> = (0..100).map(|i| i as f32).collect();
    let mut output = vec![0f32; 100];
    let mut scalar = 0.5;
    let op = pre_mul_sum(rank.comm, &raw mut scalar, HOST);
    ok(all_reduce(&rank, &input, &mut output, op));
    rank.synchronize();
    assert!(
        output
            .iter()
            .enumerate()
            .all(|(i, value)| *value == 0.5 * i as f32)
    );
    // In place, and with nothing to do.
    let at = output.as_mut_ptr().cast();
    // SAFETY: a buffer of 100 elements that lives until the stream is synchronized.
    ok(unsafe { abi::ncclReduce(at, at, 100, FLOAT, op, 0, rank.comm, rank.stream) });
    // SAFETY: as above.
    ok(unsafe { abi::ncclAllReduce(at, at, 0, FLOAT, op, rank.comm, rank.stream) });
    rank.synchronize();
    assert!(
        output
            .iter()
            .enumerate()
            .all(|(i, value)| *value == 0.25 * i as f32)
    );
    rank.leave();
}

#[test]
fn gathers_and_scatters_look_only_at_the_buffers_that_they_use() {
    let _turn = turn();
    on_ranks(2, |rank| {
        let is_root = rank.rank == 1;
        let (mut one, mut two) = ([rank.rank as f32; 4], [9f32; 8]);
        let (small, large) = (one.as_mut_ptr().cast(), two.as_mut_ptr().cast::<c_void>());
        let large = if is_root { large } else { null_mut() };
        // SAFETY: buffers that are not used may be null; the others have their sizes.
        unsafe {
            ok(abi::ncclGather(small, large, 4, FLOAT, 1, rank.comm, rank.stream));
            ok(abi::ncclScatter(
                large,
                small,
                4,
                FLOAT,
                1,
                rank.comm,
                rank.stream,
            ));
            if is_root {
                let gather = abi::ncclGather(small, null_mut(), 4, FLOAT, 1, rank.comm, rank.stream);
                fails(gather, ARGUMENT, "recvbuff is NULL");
                let scatter = abi::ncclScatter(null(), small, 4, FLOAT, 1, rank.comm, rank.stream);
                fails(scatter, ARGUMENT, "sendbuff is NULL");
            }
            let gather = abi::ncclGather(small, large, 4, FLOAT, 2, rank.comm, rank.stream);
            fails(gather, ARGUMENT, "root (2)");
            let scatter = abi::ncclScatter(small, large, 4, FLOAT, -1, rank.comm, rank.stream);
            fails(scatter, ARGUMENT, "root (-1)");
            let all = abi::ncclAlltoAll(small, null_mut(), 4, FLOAT, rank.comm, rank.stream);
            fails(all, ARGUMENT, "recvbuff is NULL");
        }
        rank.synchronize();
        assert_eq!(one, [rank.rank as f32; 4]);
        if is_root {
            assert_eq!(two, [0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0]);
        }
    });
}

fn sim_info() -> NcclSimInfo {
    NcclSimInfo {
        size: size_of::<NcclSimInfo>(),
        magic: SIM_INFO_MAGIC,
        version: 22809,
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
fn operations_of_nothing_disturb_no_group() {
    let _turn = turn();
    on_ranks(3, |rank| {
        let data = vec![2f32; 12];
        let mut sum = vec![0f32; 12];
        group_start();
        for function in COLLECTIVES.into_iter().chain([Function::Send, Function::Recv]) {
            // On some ranks only, and with no buffers: they are dropped where they are called.
            if rank.rank != 1 {
                ok(rank.call(&Call::new(function, 0), null(), null_mut()));
            }
            ok(all_reduce(&rank, &data, &mut sum, 0));
        }
        ok(group_end());
        rank.synchronize();
        assert_eq!(sum, [6.0; 12]);
        group_start();
        group_start();
        ok(group_end());
        ok(group_end());
    });
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

fn of_comm(rank: &Rank) -> Arc<ringsight_comm::communicator::Communicator> {
    ringsight_comm::communicator::lookup(rank.comm).expect("a live communicator")
}

#[test]
fn an_all_to_all_is_one_operation_in_the_records() {
    let _turn = turn();
    let watch = Watch::begin();
    const COUNT: usize = 1000;
    on_ranks(3, |rank| {
        for function in [Function::AlltoAll, Function::Gather, Function::Scatter] {
            Call {
                root: 1,
                ..Call::new(function, COUNT)
            }
            .check(&rank, false);
        }
    });
    let records = watch.end();
    for (kind, each) in [(Kind::CollApi, 1), (Kind::Coll, 1), (Kind::OpLaunched, 1)] {
        assert_eq!(count(&records, kind, State::START), 9 * each, "{kind}");
    }
    assert_eq!(count(&records, Kind::OpCompleted, State::STOP), 9);
    assert_eq!(
        of(&records, Kind::P2p).chain(of(&records, Kind::P2pApi)).count(),
        0
    );
    for launched in of(&records, Kind::OpLaunched) {
        let about = description(launched.op);
        let function = Function::from_code(about.function).unwrap();
        let (seq, root) = match function {
            Function::AlltoAll => (0, -1),
            Function::Gather => (1, 1),
            Function::Scatter => (2, 1),
            other => panic!("{other}"),
        };
        assert_eq!((launched.seq, about.root, about.peer), (seq, root, -1));
        assert!(!launched.flags().contains(Flags::P2P));
        assert_eq!(about.bytes, 3 * 4 * COUNT as u64, "nccl-tests' size");
        assert_eq!(
            (about.count, about.data_type),
            (COUNT as u64, DataType::Float32.code())
        );
        // A channel starts and stops once, however many messages it has.
        let channels: Vec<_> = of(&records, Kind::KernelCh)
            .filter(|record| record.op == launched.op)
            .collect();
        assert_eq!(channels.len() as u32, 2 * about.channel_mask.count_ones());
        assert_eq!(u32::from(about.channels), about.channel_mask.count_ones());
    }
}
