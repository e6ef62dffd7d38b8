//! How groups become plans: the same cuts and channels on every rank, one operation over several plans, and nothing held
//! once it is done.

mod common;

use std::{
    collections::{BTreeMap, HashSet},
    sync::{
        Mutex, Once,
        atomic::{AtomicUsize, Ordering},
    },
    time::{Duration, Instant},
};

use common::{
    Call, Rank, host, ok, on_ranks,
    processes::run_processes_with,
    watch::{Watch, graphs_settle, turn},
};

use ringsight_comm::{abi, communicator, observe};

use ringsight_records::{Function, Kind, Record, State};

/// Pseudo-random numbers, the same in every run.
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % limit
    }
}

/// Four channels for the pickers to choose from.
fn channels() {
    static SET: Once = Once::new();
    host();
    SET.call_once(|| {
        // SAFETY: every test of this file begins here, before it makes a communicator.
        unsafe { std::env::set_var("NCCL_MIN_CTAS", "4") };
    });
}

const RANKS: usize = 3;

/// Operations that each rank of the large group calls, more or less.
const TASKS: usize = 10_000;

/// Messages from one rank to another: as different as can be, so that the ranks' plans end at different places.
const MESSAGES: [[usize; RANKS]; RANKS] = [[0, 2500, 3], [40, 0, 700], [1, 0, 0]];

/// One call of the large group.
#[derive(Clone, Copy)]
enum Step {
    Collective(Call),
    Send(usize),
    Recv(usize),
}

/// What rank `rank` calls: the same collectives as all, and its own messages anywhere between them.
fn steps(rank: usize) -> Vec<Step> {
    let mut random = Random(42);
    let collectives = TASKS - MESSAGES.as_flattened().iter().sum::<usize>() / 2;
    let mut steps: Vec<Step> = (0..collectives)
        .map(|_| {
            let function = [
                Function::AllReduce,
                Function::Broadcast,
                Function::ReduceScatter,
                Function::AllGather,
                Function::Reduce,
            ][random.below(5)];
            // Most take one channel, some two or more.
            let count = match random.below(400) {
                0 => 70_000 + random.below(100_000),
                other => 1 + other % 9,
            };
            Step::Collective(Call {
                root: random.below(RANKS),
                ..Call::new(function, count)
            })
        })
        .collect();
    // What goes from one rank to another keeps its order, so what is made of messages comes after those.
    let messages_before = steps.len() - 500;
    for _ in 0..20 {
        let at = messages_before + random.below(500);
        steps.insert(at, Step::Collective(Call::new(Function::AlltoAll, 5)));
    }
    let mut random = Random(rank as u64);
    for (other, theirs) in MESSAGES.iter().enumerate() {
        for (messages, step) in [
            (MESSAGES[rank][other], Step::Send(other)),
            (theirs[rank], Step::Recv(other)),
        ] {
            for _ in 0..messages {
                let at = random.below(messages_before);
                steps.insert(at, step);
            }
        }
    }
    steps
}

/// What is seen of one rank: by sequence of a collective its plan, counted from the rank's first, and its channels; the
/// order of collectives on each channel; the number of plans.
#[derive(Default)]
struct Seen {
    plans: BTreeMap<u64, usize>,
    channels: BTreeMap<u64, Vec<u8>>,
    orders: BTreeMap<u8, Vec<u64>>,
    launches: usize,
}

fn seen(records: &[Record], rank: usize, exchanged: &HashSet<u64>) -> Seen {
    let mut seen = Seen::default();
    let mut planned = Vec::new();
    for record in records.iter().filter(|record| record.rank as usize == rank) {
        match (record.kind(), record.state) {
            // A plan's operations stop being enqueued just before its launch is told.
            (Some(Kind::Coll), State::STOP) => planned.push(record.seq),
            (Some(Kind::KernelLaunch), State::START) => {
                seen.plans
                    .extend(planned.drain(..).map(|seq| (seq, seen.launches)));
                seen.launches += 1;
            }
            (Some(Kind::KernelCh), State::START)
                if !record.flags().contains(ringsight_records::Flags::P2P)
                    && !exchanged.contains(&record.seq) =>
            {
                seen.channels.entry(record.seq).or_default().push(record.channel);
                seen.orders.entry(record.channel).or_default().push(record.seq);
            }
            _ => {}
        }
    }
    for channels in seen.channels.values_mut() {
        channels.sort_unstable();
    }
    seen.plans.retain(|seq, _| !exchanged.contains(seq));
    seen
}

#[test]
fn a_large_mixed_group_is_cut_alike_on_all_ranks() {
    let _turn = turn();
    channels();
    let kinds = [Kind::Coll, Kind::KernelLaunch, Kind::KernelCh];
    let watch = Watch::begin_for(kinds.iter().fold(0, |all, kind| all | kind.bit()));
    let input: Vec<f32> = vec![1.0; 3 * 170_000];
    // One group end after another: each may fill a good part of the ring.
    let next = AtomicUsize::new(0);
    let tasks = Mutex::new([0; RANKS]);
    on_ranks(RANKS, |rank| {
        let steps = steps(rank.rank);
        tasks.lock().unwrap()[rank.rank] = steps.len();
        // What comes is where the task says; large results share a place, since nobody looks at them.
        let mut small = vec![0f32; steps.len() * 27];
        let mut large = vec![0f32; 3 * 170_000];
        let from = input.as_ptr().cast();
        // SAFETY: no arguments.
        ok(unsafe { abi::ncclGroupStart() });
        for (step, small) in steps.iter().zip(small.chunks_mut(27)) {
            let (call, to) = match step {
                Step::Collective(call) if call.count > 9 => (*call, large.as_mut_ptr()),
                Step::Collective(call) => (*call, small.as_mut_ptr()),
                Step::Send(to) => (Call::peer(Function::Send, 2, *to), small.as_mut_ptr()),
                Step::Recv(from) => (Call::peer(Function::Recv, 2, *from), small.as_mut_ptr()),
            };
            ok(rank.call(&call, from, to.cast()));
        }
        while next.load(Ordering::Acquire) != rank.rank {
            std::thread::yield_now();
        }
        // SAFETY: no arguments.
        ok(unsafe { abi::ncclGroupEnd() });
        next.fetch_add(1, Ordering::Release);
        rank.synchronize();
        for (step, got) in steps.iter().zip(small.chunks(27)) {
            let (elements, value) = match step {
                Step::Collective(call) if call.count > 9 => (0, 0.0),
                Step::Collective(call) => {
                    let has = call.function != Function::Reduce || rank.rank == call.root;
                    let reduces = call.function.reduces();
                    let (_, received) = call.elements(RANKS);
                    (if has { received } else { 0 }, if reduces { 3.0 } else { 1.0 })
                }
                Step::Send(_) => (0, 0.0),
                Step::Recv(_) => (2, 1.0),
            };
            assert!(got[..elements].iter().all(|got| *got == value));
            assert!(got[elements..].iter().all(|got| *got == 0.0));
        }
    });
    let records = watch.end();

    let tasks = tasks.into_inner().unwrap();
    assert!(tasks.iter().max() >= Some(&TASKS) && tasks.iter().collect::<HashSet<_>>().len() == RANKS);
    let mut exchanged = HashSet::new();
    let (mut seq, mut collectives) = (0, 0);
    for step in steps(0) {
        if let Step::Collective(call) = step {
            if call.function == Function::AlltoAll {
                exchanged.insert(seq);
            } else {
                collectives += 1;
            }
            seq += 1;
        }
    }
    let all: Vec<Seen> = (0..RANKS).map(|rank| seen(&records, rank, &exchanged)).collect();
    assert_eq!(
        (all[0].plans.len(), all[0].channels.len()),
        (collectives, collectives)
    );
    let cuts = all[0].plans.values().collect::<HashSet<_>>().len();
    assert!(cuts >= 3, "{cuts} plans hold collectives");
    assert_eq!(all[0].orders.len(), 4, "all channels are used");
    assert!(all[0].channels.values().any(|channels| channels.len() > 1));
    for (rank, other) in all.iter().enumerate().skip(1) {
        assert!(
            other.plans == all[0].plans,
            "rank {rank} cuts elsewhere than rank 0"
        );
        assert!(
            other.channels == all[0].channels,
            "rank {rank} takes other channels than rank 0"
        );
        assert!(
            other.orders == all[0].orders,
            "rank {rank} has another order on a channel than rank 0"
        );
    }
    let launches: HashSet<usize> = all.iter().map(|seen| seen.launches).collect();
    assert!(
        launches.len() > 1,
        "the ranks' messages took as many plans everywhere"
    );
}

/// Plans of at most four work elements.
#[test]
fn an_operation_over_several_plans_is_one_operation() {
    run_processes_with("plans::split", 4, 2, &[("RINGSIGHT_WORK_FIFO_DEPTH", "8")]);
    run_processes_with("plans::split", 3, 1, &[("RINGSIGHT_WORK_FIFO_DEPTH", "2")]);
}

/// Plans that a rank holds.
fn held(rank: &Rank) -> (usize, usize) {
    communicator::lookup(rank.comm)
        .expect("a live communicator")
        .held_plans()
}

/// Waits until a rank holds as many plans: notes come from threads of the device.
fn settles(rank: &Rank, plans: (usize, usize)) {
    let end = Instant::now() + Duration::from_secs(20);
    while held(rank) != plans {
        assert!(
            Instant::now() < end,
            "{:?} plans are held, not {plans:?}",
            held(rank)
        );
        std::thread::yield_now();
    }
}

#[test]
fn plans_that_ran_are_given_back_whatever_thread_they_ran_on() {
    let _turn = turn();
    channels();
    on_ranks(2, |rank| {
        let device = host();
        let streams: Vec<Rank> = (0..4)
            .map(|_| Rank {
                stream: device.stream_create().unwrap(),
                ..rank
            })
            .collect();
        let mut data = vec![1f32; 64];
        let at = data.as_mut_ptr();
        for step in 0..200 {
            let call = Call::new(Function::Broadcast, 64);
            ok(streams[step % 4].call(&call, at.cast(), at.cast()));
        }
        for on in &streams {
            on.synchronize();
            device.stream_destroy(on.stream).unwrap();
        }
        settles(&rank, (0, 0));
    });
}

#[test]
fn the_plans_of_a_graph_live_as_long_as_the_graph_and_its_instances() {
    let _turn = turn();
    channels();
    on_ranks(2, |rank| {
        let device = host();
        let mut data = vec![1f32; 64];
        let at = data.as_mut_ptr();
        let call = Call::new(Function::Broadcast, 64);
        device.capture_begin(rank.stream).unwrap();
        for _ in 0..3 {
            ok(rank.call(&call, at.cast(), at.cast()));
        }
        let graph = device.capture_end(rank.stream).unwrap();
        assert_eq!(held(&rank), (0, 3));
        let execs = [(); 2].map(|()| device.graph_instantiate(graph).unwrap());
        device.graph_destroy(graph).unwrap();
        for exec in execs {
            device.graph_launch(exec, rank.stream).unwrap();
            rank.synchronize();
            assert_eq!(held(&rank), (0, 3), "an instance is left");
            device.graph_exec_destroy(exec).unwrap();
        }
        settles(&rank, (0, 0));
        // A capture that is given up leaves nothing either.
        let gone = observe::emitted(Kind::Graph);
        device.capture_begin(rank.stream).unwrap();
        ok(rank.call(&call, at.cast(), at.cast()));
        let graph = device.capture_end(rank.stream).unwrap();
        device.graph_destroy(graph).unwrap();
        graphs_settle(gone, 1);
        settles(&rank, (0, 0));
    });
}
