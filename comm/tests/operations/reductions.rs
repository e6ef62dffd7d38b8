//! Reductions that callers make.

use std::{
    ffi::{c_int, c_void},
    ptr::null_mut,
};

use ringsight_comm::{abi, communicator::Handle, error::ResultCode};
use ringsight_records::Function;

use super::calls::{
    ARGUMENT, DEVICE, FLOAT, HOST, all_reduce, destroy, group_end, group_start, on_one_rank, pre_mul_sum,
};
use crate::common::{Call, fails, host, ok, on_ranks, watch::turn};

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
