//! An operation whose work is in several plans.

use std::collections::HashMap;

use ringsight_records::{Function, Kind, Record, State};

use crate::common::{
    Call, group, ok,
    processes::rank_of_process,
    watch::{Watch, count, description, of},
};

/// One rank, whose plans are too small for its group.
pub(crate) fn split() {
    let rank = rank_of_process();
    const COUNT: usize = 3000;
    let watch = Watch::begin();
    let calls = [
        Function::AlltoAll,
        Function::AllReduce,
        Function::Gather,
        Function::AlltoAll,
        Function::Scatter,
    ];
    let ranks = rank.ranks;
    let input: Vec<f32> = (0..ranks * COUNT)
        .map(|i| (rank.rank * 1000 + i % 89) as f32)
        .collect();
    let mut outputs = vec![vec![0f32; ranks * COUNT]; calls.len() + 1];
    let (next, prev) = ((rank.rank + 1) % ranks, (rank.rank + ranks - 1) % ranks);
    group(|| {
        // What goes from one rank to another keeps its order: the receive of the first message comes first.
        let (to, message) = (outputs.last_mut().unwrap().as_mut_ptr().cast(), COUNT);
        ok(rank.call(&Call::peer(Function::Recv, message, prev), std::ptr::null(), to));
        ok(rank.call(
            &Call::peer(Function::Send, message, next),
            input.as_ptr().cast(),
            std::ptr::null_mut(),
        ));
        for (function, output) in calls.iter().zip(&mut outputs) {
            let call = Call::new(*function, COUNT);
            ok(rank.call(&call, input.as_ptr().cast(), output.as_mut_ptr().cast()));
        }
    });
    rank.synchronize();
    let value = |from: usize, i: usize| (from * 1000 + i % 89) as f32;
    for (function, output) in calls.iter().zip(&outputs) {
        let (filled, expected): (usize, Box<dyn Fn(usize) -> f32>) = match function {
            Function::AlltoAll => (
                ranks * COUNT,
                Box::new(|i| value(i / COUNT, rank.rank * COUNT + i % COUNT)),
            ),
            Function::AllReduce => (COUNT, Box::new(|i| (0..ranks).map(|from| value(from, i)).sum())),
            Function::Gather if rank.rank == 0 => (ranks * COUNT, Box::new(|i| value(i / COUNT, i % COUNT))),
            Function::Gather => (0, Box::new(|_| 0.0)),
            _ => (COUNT, Box::new(|i| value(0, rank.rank * COUNT + i))),
        };
        for (i, got) in output.iter().enumerate() {
            let expected = if i < filled { expected(i) } else { 0.0 };
            assert_eq!(*got, expected, "{function} element {i}");
        }
    }
    assert!((0..COUNT).all(|i| outputs[calls.len()][i] == value(prev, i)));
    // Finalize waits for the proxy: all its records are there.
    rank.leave();
    let records = watch.end();

    assert!(
        count(&records, Kind::KernelLaunch, State::START) > 3,
        "several plans"
    );
    let launched: Vec<&Record> = of(&records, Kind::OpLaunched).collect();
    assert_eq!(launched.len(), calls.len() + 2);
    let mut split = 0;
    for launch in launched {
        let about = description(launch.op);
        let mine = |kind| of(&records, kind).filter(move |record| record.op == launch.op);
        for kind in [Kind::OpLaunched, Kind::OpCompleted] {
            assert_eq!(mine(kind).count(), 1, "{kind} of {:?}", about.function);
        }
        assert!(mine(Kind::OpCompleted).all(|record| record.state == State::STOP && record.value > 0));
        // Each of its channels starts once, then stops once.
        let mut channels: HashMap<u8, Vec<State>> = HashMap::new();
        for record in mine(Kind::KernelCh) {
            channels.entry(record.channel).or_default().push(record.state);
        }
        let mask = channels.keys().fold(0u64, |mask, channel| mask | 1 << channel);
        assert_eq!(mask, about.channel_mask);
        assert!(
            channels
                .values()
                .all(|states| *states == [State::START, State::STOP])
        );
        let proxied: Vec<_> = mine(Kind::ProxyCompleted).collect();
        assert_eq!(
            mine(Kind::ProxyOp)
                .filter(|record| record.state == State::START)
                .count(),
            about.proxy_ops as usize
        );
        assert_eq!(proxied.len(), usize::from(about.proxy_ops > 0));
        assert!(
            proxied
                .iter()
                .all(|record| record.value == u64::from(about.proxy_ops))
        );
        let first = of(&records, Kind::KernelLaunch)
            .find(|record| record.op == about.plan)
            .unwrap();
        // Its last work is later than the launch of a plan after its own.
        let later = of(&records, Kind::KernelLaunch).any(|record| {
            record.op > first.op && record.time_ns < about.device_end_ns && record.state == State::STOP
        });
        split += usize::from(later && about.function == Function::AlltoAll.code());
    }
    assert!(split > 0, "no all-to-all went on in a later plan");
}
