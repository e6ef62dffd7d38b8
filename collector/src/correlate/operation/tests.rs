use super::*;
use crate::correlate::proxy::{ACTIVE_STEPS, StateSum};

fn step(state: State, step: u64, time_ns: u64) -> Record {
    Record {
        value: step,
        bytes: 100,
        peer: 1,
        ..Record::new(Kind::ProxyStep, state, time_ns)
    }
    .with_flags(Flags::SEND)
}

fn operation() -> RankOperation {
    let mut operation = RankOperation::default();
    operation.reset(1, 7, 0);
    operation
}

/// Takes in a record that has room.
fn take(operation: &mut RankOperation, kind: Kind, record: &Record) {
    assert_eq!(operation.record(kind, record, true, &Limits::default()), None);
}

#[test]
fn steps_add_up_by_state() {
    let mut operation = operation();
    for record in [
        step(State::START, 0, 10),
        step(State::STEP_SEND_GPU_WAIT, 0, 10),
        step(State::START, 1, 12),
        step(State::STEP_SEND_GPU_WAIT, 1, 12),
        step(State::STEP_SEND_WAIT, 0, 20),
        step(State::STEP_SEND_WAIT, 1, 32),
        step(State::STOP, 0, 25),
        step(State::STOP, 1, 40),
    ] {
        take(&mut operation, Kind::ProxyStep, &record);
    }
    let proxy = &operation.proxies[0];
    assert_eq!(
        (
            proxy.steps_done,
            proxy.bytes,
            proxy.max_step_ns,
            proxy.steps_missed
        ),
        (2, 200, 28, 0)
    );
    assert_eq!(
        proxy.sums[0],
        StateSum {
            first_ns: 10,
            total_ns: 30,
            max_ns: 20,
            count: 2
        }
    );
    assert_eq!(
        proxy.sums[2],
        StateSum {
            first_ns: 20,
            total_ns: 13,
            max_ns: 8,
            count: 2
        }
    );
    assert_eq!(proxy.sums[1], StateSum::default());
}

#[test]
fn steps_without_a_beginning_or_beyond_the_limit_are_counted() {
    let mut operation = operation();
    take(
        &mut operation,
        Kind::ProxyStep,
        &step(State::STEP_SEND_WAIT, 9, 5),
    );
    take(&mut operation, Kind::ProxyStep, &step(State::STOP, 9, 6));
    assert_eq!(operation.proxies[0].steps_missed, 1);
    for i in 0..=ACTIVE_STEPS as u64 {
        take(&mut operation, Kind::ProxyStep, &step(State::START, i, 10 + i));
    }
    assert_eq!(operation.proxies[0].steps_missed, 2);
    assert!(!operation.proxies[0].is_whole());
}

#[test]
fn equal_proxy_operations_are_told_apart_by_index() {
    let mut operation = operation();
    let record = |state, time| Record {
        peer: 1,
        ..Record::new(Kind::ProxyOp, state, time)
    };
    for time in [10, 20] {
        take(&mut operation, Kind::ProxyOp, &record(State::START, time));
        take(&mut operation, Kind::ProxyOp, &record(State::STOP, time + 5));
    }
    let times: Vec<_> = operation
        .proxies
        .iter()
        .map(|p| (p.index, p.start_ns, p.stop_ns))
        .collect();
    assert_eq!(times, [(0, 10, 15), (1, 20, 25)]);
}

#[test]
fn a_later_description_keeps_times_that_it_lacks() {
    let mut operation = operation();
    let base = Description {
        op: 7,
        comm: 1,
        ranks: 2,
        api_start_ns: 5,
        ..Default::default()
    };
    operation.describe(Box::new(Description {
        api_end_ns: 6,
        launch_end_ns: 9,
        ..base
    }));
    operation.describe(Box::new(Description {
        device_end_ns: 20,
        ..base
    }));
    assert_eq!(operation.api_times(), (5, 6));
    assert_eq!(operation.launch_times().1, 9);
    assert_eq!(operation.description.as_ref().unwrap().device_end_ns, 20);
}

#[test]
fn both_ends_of_a_message_are_one_instance() {
    let end = |function: Function, rank, peer| {
        let mut operation = operation();
        operation.describe(Box::new(Description {
            comm: 9,
            seq: 3,
            ranks: 4,
            rank,
            peer,
            function: function.code(),
            ..Default::default()
        }));
        operation.instance().unwrap()
    };
    assert_eq!(end(Function::Send, 1, 3), end(Function::Recv, 3, 1));
    assert_ne!(end(Function::Send, 1, 3), end(Function::Send, 3, 1));
}

#[test]
fn of_many_proxy_operations_each_is_found() {
    let mut operation = operation();
    let record = |n: u32, state, time| Record {
        peer: (n / 2).cast_signed(),
        channel: 3,
        ..Record::new(Kind::ProxyOp, state, time)
    };
    // Two of each connection, more than are looked through.
    let all = 5 * FEW_PROXIES as u32;
    for n in 0..all {
        take(&mut operation, Kind::ProxyOp, &record(n, State::START, 10));
        take(
            &mut operation,
            Kind::ProxyOp,
            &record(n, State::STOP, u64::from(20 + n)),
        );
    }
    // To the last one of a connection.
    take(&mut operation, Kind::ProxyOp, &record(0, State::STOP, 1000));
    let found: Vec<_> = operation
        .proxies
        .iter()
        .map(|proxy| (proxy.index, proxy.stop_ns))
        .collect();
    let expected = (0..all).map(|n| (n % 2, if n == 1 { 1000 } else { u64::from(20 + n) }));
    assert_eq!(found, expected.collect::<Vec<_>>());
}
