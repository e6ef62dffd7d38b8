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
        operation.record(Kind::ProxyStep, &record);
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
    operation.record(Kind::ProxyStep, &step(State::STEP_SEND_WAIT, 9, 5));
    operation.record(Kind::ProxyStep, &step(State::STOP, 9, 6));
    assert_eq!(operation.proxies[0].steps_missed, 1);
    for i in 0..=ACTIVE_STEPS as u64 {
        operation.record(Kind::ProxyStep, &step(State::START, i, 10 + i));
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
        operation.record(Kind::ProxyOp, &record(State::START, time));
        operation.record(Kind::ProxyOp, &record(State::STOP, time + 5));
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
