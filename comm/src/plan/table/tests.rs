use ringsight_records::{DataType, Protocol, ReduceOp};

use super::*;
use crate::plan::limits::{COPY_ENGINE_BYTES, Limits};

fn query(function: Function, bytes: u64) -> Query {
    Query {
        function,
        reduce_op: ReduceOp::Sum,
        data_type: DataType::Float32,
        bytes,
        ranks: 4,
        slot_bytes: 8 << 10,
        one_shot: true,
        peer_access: false,
        window: WindowSupport::NoWindow,
        limits: Limits::default(),
    }
}

#[test]
fn peers_do_a_short_all_reduce_in_one_shot_and_a_longer_one_in_two() {
    let chosen = |ranks: u32, bytes| {
        let query = Query {
            ranks,
            peer_access: true,
            ..query(AllReduce, bytes)
        };
        let row = choose(&query).unwrap();
        assert_eq!(row.path.is_peer_access(), ranks > 1);
        row.algorithm
    };
    for ranks in 2..=8 {
        let most = (512 << 10) / u64::from(ranks);
        assert_eq!(chosen(ranks, 1), Algorithm::OneShot);
        // As far as lines are whole.
        assert_eq!(chosen(ranks, most - 8 * u64::from(ranks)), Algorithm::OneShot);
        assert_eq!(chosen(ranks, most + 1), Algorithm::TwoShot);
    }
    assert_eq!(chosen(1, 8), Algorithm::Ring);
}

#[test]
fn peers_do_all_that_they_reach_and_have_a_program_for() {
    for function in Function::ALL {
        for (ranks, bytes) in [(2, 8), (2, 1 << 30), (4, 8), (4, 1 << 30)] {
            let near = Query {
                ranks,
                peer_access: true,
                ..query(*function, bytes)
            };
            assert!(choose(&near).unwrap().path.is_peer_access(), "{near:?}");
            let apart = Query {
                peer_access: false,
                ..near
            };
            let own_factors = Query {
                reduce_op: ReduceOp::PreMulSum,
                ..near
            };
            for other in [apart, own_factors] {
                assert!(!choose(&other).unwrap().path.is_peer_access(), "{other:?}");
            }
        }
    }
}

#[test]
fn the_others_pass_on_parts_of_what_is_long_if_there_are_others() {
    let near = |function, ranks, bytes, data_type| {
        let query = Query {
            ranks,
            peer_access: true,
            data_type,
            ..query(function, bytes)
        };
        let row = choose(&query).unwrap();
        (row.algorithm, row.path.protocol())
    };
    use Algorithm::{Direct, TwoShot};
    for function in [Broadcast, Reduce] {
        let float = |ranks, bytes| near(function, ranks, bytes, DataType::Float32);
        assert_eq!(float(2, 1 << 20), (Direct, Protocol::Ll128));
        assert_eq!(float(2, 64 << 20), (Direct, Protocol::Simple));
        assert_eq!(float(4, 256 << 10), (Direct, Protocol::Ll128));
        assert_eq!(float(4, 1 << 20), (TwoShot, Protocol::Ll128));
        assert_eq!(float(4, 64 << 20), (TwoShot, Protocol::Simple));
    }
    // Which no kernel reduces straight.
    assert_eq!(
        near(Reduce, 4, 64 << 20, DataType::Int32),
        (TwoShot, Protocol::Ll128)
    );
    assert_eq!(
        near(Broadcast, 4, 64 << 20, DataType::Int32),
        (TwoShot, Protocol::Simple)
    );
}

#[test]
fn what_is_long_goes_straight_unless_told_otherwise() {
    let cases = Function::ALL
        .iter()
        .flat_map(|function| [(function, 2), (function, 8)]);
    for (function, ranks) in cases {
        let messages = if matches!(function, AlltoAll | Gather | Scatter) {
            ranks
        } else {
            1
        };
        let whole = Limits::default().zero_copy_bytes_of(*function, ranks);
        let least = whole.div_ceil(messages.into());
        let near = |bytes, zero_copy_bytes: Option<u64>| Query {
            ranks,
            peer_access: true,
            limits: Limits {
                zero_copy_bytes,
                ..Limits::default()
            },
            ..query(*function, bytes)
        };
        let may_zero_copy = |query| choose(&query).unwrap().path.is_zero_copy();
        for told in [None, Some(whole)] {
            assert!(may_zero_copy(near(least, told)), "{function}");
            assert!(!may_zero_copy(near(least - 1, told)), "{function}");
        }
        assert!(!may_zero_copy(near(1 << 40, Some(u64::MAX))), "{function}");
        assert!(
            choose(&near(1 << 40, Some(u64::MAX)))
                .unwrap()
                .path
                .is_peer_access()
        );
    }
}

#[test]
fn what_no_kernel_reduces_straight_goes_in_lines() {
    let near = |function, data_type, reduce_op, ranks| Query {
        ranks,
        peer_access: true,
        data_type,
        reduce_op,
        ..query(function, 1 << 30)
    };
    for function in [AllReduce, ReduceScatter] {
        for ranks in 2..=8 {
            let has_kernels = matches!(ranks, 2 | 4 | 8);
            let of = |data_type, reduce_op| choose(&near(function, data_type, reduce_op, ranks)).unwrap();
            assert_eq!(
                of(DataType::Bfloat16, ReduceOp::Avg).path.is_zero_copy(),
                has_kernels
            );
            for other in [
                of(DataType::Float32, ReduceOp::Max),
                of(DataType::Int32, ReduceOp::Sum),
            ] {
                assert_eq!(other.path.protocol(), Protocol::Ll128, "{function} among {ranks}");
            }
        }
    }
    let integers = near(AllReduce, DataType::Int32, ReduceOp::Sum, 4);
    let reasons: Vec<_> = explain(&integers)
        .filter(|(row, _)| row.path.is_zero_copy())
        .map(|(_, reason)| reason.unwrap())
        .collect();
    assert_eq!(reasons[..2], [Reason::NoZeroCopyKernel; 2]);
    // What copies has no reduction.
    assert!(
        choose(&near(AllGather, DataType::Int32, ReduceOp::None, 7))
            .unwrap()
            .path
            .is_zero_copy()
    );
}

#[test]
fn a_long_all_reduce_pushes_unless_told_otherwise() {
    let near = |function, bytes, zero_copy_bytes, push_bytes| {
        let query = Query {
            ranks: 2,
            peer_access: true,
            limits: Limits {
                zero_copy_bytes: Some(zero_copy_bytes),
                push_bytes,
                ..Limits::default()
            },
            ..query(function, bytes)
        };
        choose(&query).unwrap().path.protocol()
    };
    assert_eq!(near(AllReduce, 1 << 20, 1 << 10, 2 << 20), Protocol::Push);
    assert_eq!(near(AllReduce, (1 << 20) - 1, 1 << 10, 2 << 20), Protocol::Simple);
    // Results go straight.
    assert_eq!(near(AllReduce, 1 << 20, u64::MAX, 2 << 20), Protocol::Ll128);
    assert_eq!(near(ReduceScatter, 1 << 30, 1, 1), Protocol::Simple);
}

#[test]
fn copy_engines_do_what_is_in_a_window_of_all_ranks_if_they_are_to() {
    let near = |function, window| Query {
        peer_access: true,
        window,
        limits: Limits::default().with_zero_cta(),
        ..query(function, 8)
    };
    for function in Function::ALL {
        let serves = matches!(function, AllGather | AlltoAll);
        let chosen = |query| choose(&query).unwrap().path.is_copy_engine();
        assert_eq!(
            chosen(near(*function, WindowSupport::Reach)),
            serves,
            "{function}"
        );
        for (window, why) in [
            (WindowSupport::NoWindow, Reason::NoWindow),
            (WindowSupport::NotReached, Reason::NotReached),
            (WindowSupport::Unknown, Reason::UnknownWindow),
        ] {
            let query = near(*function, window);
            assert!(!chosen(query));
            let (_, reason) = explain(&query)
                .find(|(row, _)| (row.algorithm, row.path) == (Algorithm::Direct, DataPath::CopyEngine))
                .unwrap();
            let expected = match function {
                // Kernels reduce whatever the policy.
                ReduceScatter => Reason::ShortForReducingCopyEngines(COPY_ENGINE_BYTES),
                _ if serves => why,
                _ => Reason::Function,
            };
            assert_eq!(reason, Some(expected));
        }
    }
    // Where kernels may do it, only what is long, of the larger of a rank's buffers.
    for function in [AllGather, AlltoAll] {
        let by_engines = |bytes| {
            let query = Query {
                bytes,
                limits: Limits::default(),
                ..near(function, WindowSupport::Reach)
            };
            let (_, reason) = explain(&query)
                .find(|(row, _)| (row.algorithm, row.path) == (Algorithm::Direct, DataPath::CopyEngine))
                .unwrap();
            assert_eq!(choose(&query).unwrap().path.is_copy_engine(), reason.is_none());
            reason
        };
        let short = Some(Reason::ShortForCopyEngines(COPY_ENGINE_BYTES));
        let messages = if function == AlltoAll { 4 } else { 1 };
        assert_eq!(by_engines(COPY_ENGINE_BYTES / messages - 1), short);
        assert_eq!(by_engines(COPY_ENGINE_BYTES / messages), None);
    }
    // Without memory in which kernels meet there is no way to begin.
    let apart = Query {
        peer_access: false,
        ..near(AllGather, WindowSupport::Reach)
    };
    assert!(!choose(&apart).unwrap().path.is_copy_engine());
    let alone = Query {
        ranks: 1,
        ..near(AllGather, WindowSupport::Reach)
    };
    assert!(!choose(&alone).unwrap().path.is_copy_engine());
}

#[test]
fn copy_engines_move_what_is_reduced_if_they_are_to() {
    for function in [AllReduce, ReduceScatter] {
        copy_engines_move_what_this_reduces(function);
    }
}

fn copy_engines_move_what_this_reduces(function: Function) {
    const LEAST: u64 = 8 << 20;
    let near = |ranks, data_type, bytes, least, window| Query {
        ranks,
        data_type,
        peer_access: true,
        window,
        limits: Limits {
            copy_engine_reduce_bytes: Some(least),
            ..Limits::default()
        },
        ..query(function, bytes)
    };
    let why = |query| {
        let is_it = |row: &Row| row.path.is_copy_engine() && row.functions.contains(&function);
        let (row, reason) = explain(&query).find(|(row, _)| is_it(row)).unwrap();
        assert_eq!(choose(&query) == Some(row), reason.is_none());
        reason
    };
    let float = |bytes, least| near(4, DataType::Float32, bytes, least, WindowSupport::Reach);
    assert_eq!(why(float(LEAST, LEAST)), None);
    assert_eq!(
        why(float(LEAST - 1, LEAST)),
        Some(Reason::ShortForReducingCopyEngines(LEAST))
    );
    assert_eq!(
        why(float(1 << 40, u64::MAX)),
        Some(Reason::ShortForReducingCopyEngines(u64::MAX))
    );
    assert!(matches!(why(float(1 << 40, LEAST)), Some(Reason::Tiles(_))));
    // One shot is faster.
    let short = (function == AllReduce).then_some(Reason::Earlier);
    assert_eq!(why(float(8, 0)), short);
    for (ranks, data_type, window, reason) in [
        (4, DataType::Int32, WindowSupport::Reach, Reason::NoZeroCopyKernel),
        (
            3,
            DataType::Float32,
            WindowSupport::Reach,
            Reason::NoZeroCopyKernel,
        ),
        (4, DataType::Float32, WindowSupport::NoWindow, Reason::NoWindow),
        (
            4,
            DataType::Float32,
            WindowSupport::NotReached,
            Reason::NotReached,
        ),
        (4, DataType::Float32, WindowSupport::Unfit, Reason::Unfit),
    ] {
        assert_eq!(why(near(ranks, data_type, LEAST, LEAST, window)), Some(reason));
    }
}

#[test]
fn small_messages_take_one_channel_and_large_ones_all() {
    let path = DataPath::Fifo;
    assert_eq!(path.channels(8, 4, false), 1);
    assert_eq!(path.channels(0, 4, false), 1);
    assert_eq!(path.channels((256 << 10) + 1, 4, false), 2);
    assert_eq!(path.channels(256 << 10, 4, true), 4);
    assert_eq!(path.channels(32 << 10, 4, true), 1);
    assert_eq!(path.channels(u64::MAX, 4, false), 4);
    assert_eq!(DataPath::Ll.channels(u64::MAX, 4, true), 1);
}

#[test]
fn every_row_but_the_chosen_one_has_a_reason() {
    for function in Function::ALL {
        for bytes in [0, 4 << 10, 64 << 10, u64::MAX] {
            for peer_access in [false, true] {
                let query = Query {
                    peer_access,
                    ..query(*function, bytes)
                };
                let rows: Vec<_> = explain(&query).collect();
                assert_eq!(rows.len(), TABLE.len());
                let taken: Vec<_> = rows.iter().filter(|(_, reason)| reason.is_none()).collect();
                assert_eq!(taken.len(), 1, "{query:?}");
                assert_eq!(Some(taken[0].0), choose(&query));
            }
        }
    }
    let reason = |query: Query, algorithm, protocol| {
        let row = |(row, _): &(&Row, Option<Reason>)| {
            row.functions.contains(&query.function)
                && (row.algorithm, row.path.protocol()) == (algorithm, protocol)
        };
        explain(&query).find(row).unwrap().1
    };
    use Algorithm::{Direct, OneShot, Ring, TwoShot};
    use Protocol::{Ll, Ll128, Simple};
    let short = query(AllReduce, 8);
    assert_eq!(reason(short, OneShot, Ll), Some(Reason::NoPeerAccess));
    assert_eq!(reason(short, TwoShot, Ll128), Some(Reason::NoPeerAccess));
    assert_eq!(reason(short, OneShot, Simple), None);
    assert_eq!(reason(short, Ring, Simple), Some(Reason::Earlier));
    let without = Query {
        one_shot: false,
        ..short
    };
    assert_eq!(reason(without, OneShot, Simple), Some(Reason::NoProgram));
    let long = query(AllReduce, 1 << 20);
    assert_eq!(reason(long, OneShot, Ll), Some(Reason::BytesOfAll(512 << 10)));
    assert_eq!(reason(long, OneShot, Simple), Some(Reason::BytesOfAll(16 << 10)));
    assert_eq!(reason(long, Ring, Simple), None);
    let slot = Query {
        slot_bytes: 2 << 10,
        ..query(AllReduce, 4 << 10)
    };
    assert_eq!(reason(slot, OneShot, Simple), Some(Reason::Slot(2 << 10)));
    let alone = Query { ranks: 1, ..short };
    assert_eq!(reason(alone, OneShot, Ll), Some(Reason::OneRank));
    let scaled = Query {
        reduce_op: ReduceOp::PreMulSum,
        ..short
    };
    assert_eq!(reason(scaled, OneShot, Simple), Some(Reason::OwnFactors));
    let four = Query {
        peer_access: true,
        ..query(Broadcast, 1 << 30)
    };
    assert_eq!(reason(four, Direct, Ll128), Some(Reason::Ranks(2)));
    assert_eq!(explain(&short).last().unwrap().1, Some(Reason::Function));
}

#[test]
fn every_function_served_is_served_at_every_size() {
    for function in Function::ALL {
        for bytes in [0, u64::MAX] {
            assert!(choose(&query(*function, bytes)).is_some(), "{function}");
        }
    }
}

#[test]
fn a_short_all_reduce_is_done_in_one_shot_where_that_is_possible() {
    let chosen = |query: Query| choose(&query).unwrap().algorithm;
    let short = query(AllReduce, 4 << 10);
    assert_eq!(chosen(short), Algorithm::OneShot);
    let longer = query(AllReduce, (4 << 10) + 1);
    let others = [
        longer,
        query(Reduce, 8),
        Query { ranks: 1, ..short },
        Query { ranks: 5, ..short },
        Query {
            slot_bytes: 2 << 10,
            ..short
        },
        Query {
            one_shot: false,
            ..short
        },
        Query {
            reduce_op: ReduceOp::PreMulSum,
            ..short
        },
    ];
    for other in others {
        assert_eq!(chosen(other), Algorithm::Ring, "{other:?}");
    }
}
