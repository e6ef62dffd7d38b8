//! What can be seen: records and descriptions of running operations, counted and compared with what was done.

mod common;

use std::{
    collections::{HashMap, HashSet},
    sync::Barrier,
};

use common::{
    Call, group, host, ok, on_ranks,
    processes::run_processes,
    send_around,
    watch::{Watch, count, description, graphs_settle, of, turn},
};

use ringsight_comm::observe;

use ringsight_records::{Flags, Function, Kind, Record, State};

#[test]
fn a_lone_collective_tells_its_life() {
    let _turn = turn();
    let watch = Watch::begin();
    const COUNT: usize = 200_000;
    on_ranks(2, |rank| {
        for _ in 0..3 {
            Call::new(Function::AllReduce, COUNT).check(&rank, false);
        }
    });
    let records = watch.end();
    assert_eq!(count(&records, Kind::CommInit, State::STOP), 2);
    assert_eq!(count(&records, Kind::CommDestroy, State::STOP), 2);
    for kind in [
        Kind::CollApi,
        Kind::Coll,
        Kind::KernelLaunch,
        Kind::GroupApi,
        Kind::Group,
    ] {
        assert_eq!(
            (
                count(&records, kind, State::START),
                count(&records, kind, State::STOP)
            ),
            (6, 6),
            "{kind}"
        );
    }
    assert_eq!(count(&records, Kind::OpLaunched, State::START), 6);
    assert_eq!(count(&records, Kind::OpCompleted, State::STOP), 6);
    assert_eq!(
        of(&records, Kind::P2pApi).chain(of(&records, Kind::P2p)).count(),
        0
    );
    assert_eq!(
        of(&records, Kind::ProxyOp)
            .chain(of(&records, Kind::ProxyCompleted))
            .count(),
        0,
        "one node"
    );

    let comm = of(&records, Kind::CommInit).next().unwrap().comm;
    let mut seen = HashSet::new();
    for launched in of(&records, Kind::OpLaunched) {
        let op = launched.op;
        assert!(
            seen.insert((launched.rank, launched.seq)),
            "one operation, one sequence"
        );
        assert!(launched.seq < 3 && launched.rank < 2 && launched.replay == 0);
        assert_eq!(
            (launched.comm, launched.peer, launched.bytes),
            (comm, -1, 4 * COUNT as u64)
        );
        let about = description(op);
        assert_eq!(
            (about.comm, about.seq, about.rank, about.ranks),
            (comm, launched.seq, launched.rank, 2)
        );
        assert_eq!((about.count, about.bytes), (COUNT as u64, 4 * COUNT as u64));
        assert_eq!(about.channels, 2, "800 kB take both channels");
        // Every channel starts and stops once, between the operation's device times.
        let channels: Vec<&Record> = of(&records, Kind::KernelCh)
            .filter(|record| record.op == op)
            .collect();
        assert_eq!(channels.len(), 4);
        for channel in 0..2 {
            let of_channel: Vec<_> = channels
                .iter()
                .filter(|record| record.channel == channel)
                .collect();
            assert_eq!(
                (of_channel[0].state, of_channel[1].state),
                (State::START, State::STOP)
            );
            assert!(
                of_channel
                    .iter()
                    .all(|record| record.value > 0 && record.seq == launched.seq)
            );
        }
        let completed = of(&records, Kind::OpCompleted)
            .find(|record| record.op == op)
            .unwrap();
        assert_eq!(
            (completed.value, completed.time_ns),
            (about.device_start_ns, about.device_end_ns)
        );
        let times = [
            about.api_start_ns,
            about.launch_start_ns,
            about.device_start_ns,
            about.device_end_ns,
        ];
        assert!(times[0] > 0 && times.is_sorted(), "{times:?}");
        assert!(about.launch_start_ns <= about.launch_end_ns && about.launch_end_ns <= about.api_end_ns);
        assert!(
            about.api_end_ns <= launched.time_ns,
            "complete before it is announced"
        );
        assert_eq!(about.group_depth, 1, "implicit");
        let api = of(&records, Kind::GroupApi)
            .find(|record| record.op == about.group)
            .unwrap();
        assert_eq!(api.value, 1);
        let launch = of(&records, Kind::KernelLaunch)
            .find(|record| record.op == about.plan)
            .unwrap();
        assert_eq!((launch.value, launch.comm), (about.stream, comm));
    }
}

#[test]
fn who_reads_descriptions_is_told_of_a_lone_call_once_and_of_groups_as_ever() {
    let _turn = turn();
    let watch = Watch::begin_for(Kind::EVERY & !Kind::DESCRIBED);
    on_ranks(2, |rank| {
        Call::new(Function::AllReduce, 1000).check(&rank, false);
        send_around(&rank);
    });
    let records = watch.end();
    let told = |kind| count(&records, kind, State::START);
    // Of either rank: a lone call, and a group of two.
    assert_eq!(told(Kind::OpLaunched), 2 * (1 + 2));
    assert_eq!((told(Kind::GroupApi), told(Kind::Group)), (2, 2));
    assert!(of(&records, Kind::GroupApi).all(|record| record.value == 2));
    let described = |record: &&Record| {
        record
            .kind()
            .is_some_and(|kind| kind.bit() & Kind::DESCRIBED != 0)
    };
    assert_eq!(records.iter().find(described), None);
}

#[test]
fn a_group_is_one_event_with_its_operations_under_it() {
    let _turn = turn();
    let watch = Watch::begin();
    on_ranks(2, |rank| {
        let data = vec![1f32; 100];
        let mut results = vec![vec![0f32; 100]; 4];
        let other = 1 - rank.rank;
        group(|| {
            for result in &mut results[..3] {
                ok(rank.call(
                    &Call::new(Function::AllReduce, 100),
                    data.as_ptr().cast(),
                    result.as_mut_ptr().cast(),
                ));
            }
            let send = Call::peer(Function::Send, 100, other);
            ok(rank.call(&send, data.as_ptr().cast(), std::ptr::null_mut()));
            let recv = Call::peer(Function::Recv, 100, other);
            ok(rank.call(&recv, std::ptr::null(), results[3].as_mut_ptr().cast()));
        });
        rank.synchronize();
    });
    let records = watch.end();
    for (kind, state, expected) in [
        (Kind::GroupApi, State::START, 2),
        (Kind::GroupApi, State::GROUP_START_API_STOP, 2),
        (Kind::GroupApi, State::GROUP_END_API_START, 2),
        (Kind::GroupApi, State::STOP, 2),
        (Kind::Group, State::START, 2),
        (Kind::CollApi, State::START, 6),
        (Kind::P2pApi, State::STOP, 4),
        (Kind::Coll, State::STOP, 6),
        (Kind::P2p, State::START, 4),
        (Kind::KernelLaunch, State::START, 2),
        (Kind::OpLaunched, State::START, 10),
        (Kind::OpCompleted, State::STOP, 10),
    ] {
        assert_eq!(
            count(&records, kind, state),
            expected,
            "{kind} {:?}",
            state.name()
        );
    }
    for launched in of(&records, Kind::OpLaunched) {
        let about = description(launched.op);
        assert_eq!(about.group_depth, 2);
        assert!(of(&records, Kind::GroupApi).any(|record| record.op == about.group && record.value == 2));
        let p2p = launched.flags().contains(Flags::P2P);
        assert_eq!(
            p2p,
            matches!(
                Function::from_code(about.function),
                Some(Function::Send | Function::Recv)
            )
        );
        if p2p {
            assert_eq!(
                (launched.peer, launched.seq),
                (1 - launched.rank as i32, 0),
                "first of its pair"
            );
            assert_eq!((about.peer, about.root), (launched.peer, -1));
        }
    }
    // The two plans hold all operations of their rank.
    let plans: HashSet<u32> = of(&records, Kind::OpLaunched)
        .map(|record| description(record.op).plan)
        .collect();
    assert_eq!(plans.len(), 2);
}

#[test]
fn replays_are_numbered_and_their_graph_is_seen() {
    let _turn = turn();
    let watch = Watch::begin();
    let graphs_before = observe::emitted(Kind::Graph);
    on_ranks(2, |rank| {
        let device = host();
        let (data, mut sum) = (vec![1f32; 1000], vec![0f32; 1000]);
        for _ in 0..2 {
            device.capture_begin(rank.stream).unwrap();
            for _ in 0..2 {
                let call = Call::new(Function::AllReduce, 1000);
                ok(rank.call(&call, data.as_ptr().cast(), sum.as_mut_ptr().cast()));
            }
            let graph = device.capture_end(rank.stream).unwrap();
            let exec = device.graph_instantiate(graph).unwrap();
            device.graph_destroy(graph).unwrap();
            for _ in 0..5 {
                device.graph_launch(exec, rank.stream).unwrap();
            }
            rank.synchronize();
            device.graph_exec_destroy(exec).unwrap();
        }
        Call::new(Function::AllReduce, 10).check(&rank, false);
    });
    graphs_settle(graphs_before, 8);
    let records = watch.end();
    assert_eq!(count(&records, Kind::OpLaunched, State::START), 2 * (2 * 2 + 1));
    let mut replays: HashMap<(u32, u64), Vec<u32>> = HashMap::new();
    for completed in of(&records, Kind::OpCompleted) {
        assert!(completed.value > 0 && completed.value <= completed.time_ns);
        assert_eq!(completed.flags().contains(Flags::GRAPH), completed.replay > 0);
        replays
            .entry((completed.rank, completed.seq))
            .or_default()
            .push(completed.replay);
    }
    for rank in 0..2 {
        assert_eq!(
            replays.remove(&(rank, 0)),
            Some(vec![0]),
            "the eager operation counts for itself"
        );
        for (graph, node) in [(1, 0), (1, 1), (2, 0), (2, 1)] {
            assert_eq!(
                replays.remove(&(rank, graph << 32 | node)),
                Some(vec![1, 2, 3, 4, 5])
            );
        }
    }
    assert!(replays.is_empty());
    let graphs = |state| {
        of(&records, Kind::Graph)
            .filter(|record| record.state == state)
            .map(|record| (record.rank, record.op))
            .collect::<HashSet<_>>()
    };
    assert_eq!(
        (
            graphs(State::START).len(),
            count(&records, Kind::Graph, State::START)
        ),
        (4, 4)
    );
    assert_eq!(graphs(State::START), graphs(State::STOP));
}

/// As on a GPU, where a graph's kernels count in the graph's memory.
#[test]
fn instances_of_one_graph_number_their_replays_together() {
    let _turn = turn();
    let watch = Watch::begin();
    let graphs_before = observe::emitted(Kind::Graph);
    on_ranks(2, |rank| {
        let device = host();
        let (data, mut sum) = (vec![1f32; 1000], vec![0f32; 1000]);
        device.capture_begin(rank.stream).unwrap();
        let call = Call::new(Function::AllReduce, 1000);
        ok(rank.call(&call, data.as_ptr().cast(), sum.as_mut_ptr().cast()));
        let graph = device.capture_end(rank.stream).unwrap();
        let instances = [(); 2].map(|()| device.graph_instantiate(graph).unwrap());
        device.graph_destroy(graph).unwrap();
        for turn in [0, 1, 1, 0, 1] {
            device.graph_launch(instances[turn], rank.stream).unwrap();
        }
        rank.synchronize();
        for exec in instances {
            device.graph_exec_destroy(exec).unwrap();
        }
    });
    graphs_settle(graphs_before, 4);
    let records = watch.end();
    for rank in 0..2 {
        let of_rank = of(&records, Kind::OpCompleted).filter(|record| record.rank == rank);
        let replays: Vec<u32> = of_rank.map(|record| record.replay).collect();
        assert_eq!(replays, [1, 2, 3, 4, 5]);
    }
}

#[test]
fn work_beyond_the_budget_is_cut_alike_on_all_ranks() {
    let _turn = turn();
    const OPS: usize = 3000;
    let watch = Watch::begin();
    // One rank after the other describes its operations: the table has room for less than all, and what is described later stays.
    let turns = Barrier::new(2);
    on_ranks(2, |rank| {
        let data = [1f32; 4];
        let mut sums = vec![[0f32; 4]; OPS];
        let other = 1 - rank.rank;
        // Rank 1 sends nothing: its plans end elsewhere, its collectives must not.
        let mut got = [0f32; 4];
        if rank.rank == 1 {
            turns.wait();
        }
        group(|| {
            if rank.rank == 0 {
                let send = Call::peer(Function::Send, 4, other);
                ok(rank.call(&send, data.as_ptr().cast(), std::ptr::null_mut()));
            } else {
                let recv = Call::peer(Function::Recv, 4, other);
                ok(rank.call(&recv, std::ptr::null(), got.as_mut_ptr().cast()));
            }
            for sum in &mut sums {
                let call = Call::new(Function::AllReduce, 4);
                ok(rank.call(&call, data.as_ptr().cast(), sum.as_mut_ptr().cast()));
            }
        });
        if rank.rank == 0 {
            turns.wait();
        }
        rank.synchronize();
        assert!(sums.iter().all(|sum| *sum == [2.0; 4]));
    });
    let records = watch.end();
    // By rank: on which channel each collective ran, and whether it was in the first plan, as far as still described.
    let mut channels = [HashMap::new(), HashMap::new()];
    for record in of(&records, Kind::KernelCh).filter(|record| !record.flags().contains(Flags::P2P)) {
        channels[record.rank as usize].insert(record.seq, record.channel);
    }
    assert_eq!(channels[0].len(), OPS);
    assert!(channels[0] == channels[1], "channels are chosen alike");
    let mut cuts = [HashMap::new(), HashMap::new()];
    for launched in of(&records, Kind::OpLaunched).filter(|record| !record.flags().contains(Flags::P2P)) {
        let Some(about) = observe::pages().unwrap().description(launched.op) else {
            continue;
        };
        let first = of(&records, Kind::KernelLaunch)
            .find(|record| record.rank == about.rank)
            .unwrap()
            .op;
        cuts[launched.rank as usize].insert(launched.seq, about.plan == first);
    }
    let both: Vec<u64> = cuts[0]
        .keys()
        .filter(|seq| cuts[1].contains_key(seq))
        .copied()
        .collect();
    let described = |rank: usize| {
        let seqs = || cuts[rank].keys();
        (seqs().len(), seqs().min().copied(), seqs().max().copied())
    };
    assert!(
        both.iter().any(|seq| cuts[0][seq]) && both.iter().any(|seq| !cuts[0][seq]),
        "both plans are described: {:?}, {:?}; {} of both",
        described(0),
        described(1),
        both.len()
    );
    assert!(
        both.iter().all(|seq| cuts[0][seq] == cuts[1][seq]),
        "plans are cut alike"
    );
    assert_eq!(
        count(&records, Kind::KernelLaunch, State::START),
        4,
        "two plans of at most 2048 elements a rank"
    );
}

#[test]
fn network_work_is_seen_on_two_nodes() {
    run_processes("records::network", 2, 2);
}

/// The body has a row for every field of NCCL's profiler interface.
#[test]
fn every_field_of_the_profiler_interface_is_found() {
    run_processes("fields::found", 2, 2);
}
