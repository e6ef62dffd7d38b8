//! Operations over the network, whose records are compared with what was done.

use ringsight_comm::observe;
use ringsight_records::{Flags, Function, Kind, Record, State};

use crate::common::{
    Call, host, ok,
    processes::rank_of_process,
    send_around,
    watch::{Watch, count, description, graphs_settle, of},
};

/// One rank of [`network_work_is_seen_on_two_nodes`].
pub(crate) fn network() {
    let rank = rank_of_process();
    let device = host();
    // Several slots on each of two channels.
    let call = Call::new(Function::AllReduce, 400_000);
    call.check(&rank, false);
    let watch = Watch::begin();
    let graphs_before = observe::emitted(Kind::Graph);
    call.check(&rank, false);
    send_around(&rank);
    let (data, mut sum) = (vec![1f32; 1000], vec![0f32; 1000]);
    device.capture_begin(rank.stream).unwrap();
    let small = Call::new(Function::AllReduce, 1000);
    ok(rank.call(&small, data.as_ptr().cast(), sum.as_mut_ptr().cast()));
    let graph = device.capture_end(rank.stream).unwrap();
    let exec = device.graph_instantiate(graph).unwrap();
    device.graph_destroy(graph).unwrap();
    for _ in 0..3 {
        device.graph_launch(exec, rank.stream).unwrap();
    }
    rank.synchronize();
    device.graph_exec_destroy(exec).unwrap();
    // Finalize waits for the proxy: all its records are there.
    rank.leave();
    graphs_settle(graphs_before, 2);
    let records = watch.end();

    let ops: Vec<&Record> = of(&records, Kind::OpCompleted).collect();
    assert_eq!(ops.len(), 1 + 2 + 3);
    assert_eq!(
        count(&records, Kind::ProxyCompleted, State::STOP),
        ops.len(),
        "each operation crosses the network"
    );
    for op in ops {
        let about = description(op.op);
        let mine =
            |kind| of(&records, kind).filter(move |record| (record.op, record.replay) == (op.op, op.replay));
        let starts: Vec<&Record> = mine(Kind::ProxyOp)
            .filter(|record| record.state == State::START)
            .collect();
        assert_eq!(starts.len() as u32, about.proxy_ops);
        assert_eq!(
            mine(Kind::ProxyOp)
                .filter(|record| record.state == State::STOP)
                .count(),
            starts.len()
        );
        let completed = mine(Kind::ProxyCompleted).next().unwrap();
        assert_eq!(completed.value, u64::from(about.proxy_ops));
        assert_eq!((completed.seq, completed.comm), (op.seq, op.comm));
        let mut steps = 0;
        for start in &starts {
            let (planned, chunk) = start.proxy_op_shape();
            assert!(planned > 0 && chunk > 0);
            assert_eq!((start.comm, start.seq, start.rank), (op.comm, op.seq, op.rank));
            assert_eq!(start.peer, 1 - op.rank as i32);
            steps += planned;
        }
        assert_eq!(
            mine(Kind::ProxyStep)
                .filter(|record| record.state == State::STOP)
                .count() as u32,
            steps
        );
        // Sockets carry all of them.
        for state in [State::START, State::STOP] {
            let carried: Vec<&Record> = mine(Kind::NetPlugin)
                .filter(|record| record.state == state)
                .collect();
            assert_eq!(carried.len() as u32, steps);
            let is_socket = |record: &&Record| record.carrier().port.is_none() && record.carrier().number > 2;
            assert!(carried.iter().all(is_socket));
        }
        if about.function == Function::AllReduce.code() {
            let sends = starts
                .iter()
                .filter(|record| record.flags().contains(Flags::SEND))
                .count();
            assert_eq!(sends * 2, starts.len(), "each channel sends and receives");
            assert_eq!(starts.len(), 2 * usize::from(about.channels));
        }
    }
}
