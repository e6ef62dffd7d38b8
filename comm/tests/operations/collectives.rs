//! Operations with a root or several messages a rank, and operations of nothing.

use std::{
    ffi::c_void,
    ptr::{null, null_mut},
};

use ringsight_comm::abi;
use ringsight_records::{DataType, Flags, Function, Kind, State};

use super::calls::{ARGUMENT, FLOAT, all_reduce, group_end, group_start};
use crate::common::{
    COLLECTIVES, Call, fails, ok, on_ranks,
    watch::{Watch, count, description, of, turn},
};

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
