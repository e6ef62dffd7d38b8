//! Random programs of groups: several communicators, nested groups, collectives and messages of any size on any stream,
//! eager and captured, every result compared with what it must be.

mod common;

use std::{
    ptr::{null, null_mut},
    sync::{Mutex, mpsc},
    thread,
    time::Duration,
};

use common::{COLLECTIVES, Call, Rank, encode, host, last_error, unique_id};
use proptest::{prelude::*, sample::select, test_runner::Config};
use ringsight_comm::{
    abi::{self, UniqueIdBytes},
    communicator::Handle,
    device::{Graph, Stream},
    error::ResultCode,
};
use ringsight_records::{DataType, Function};

const STREAMS: usize = 3;
const UNTOUCHED: u8 = 0xa5;

/// What every rank does.
#[derive(Clone, Debug)]
struct Program {
    ranks: usize,
    comms: usize,
    steps: Vec<Step>,
}

/// Calls that are waited for together.
#[derive(Clone, Debug)]
struct Step {
    /// Levels of groups; 0: every call for itself.
    depth: usize,
    /// Captured and replayed, instead of run at once.
    captured: bool,
    /// Odd ranks call their messages before the collectives.
    messages_first: bool,
    ops: Vec<Op>,
}

#[derive(Clone, Debug)]
struct Op {
    comm: usize,
    stream: usize,
    what: What,
}

#[derive(Clone, Debug)]
enum What {
    Collective(Call),
    Message { from: usize, to: usize, bytes: usize },
}

/// Nothing, little, odd, and more than the slots of two channels.
fn counts() -> impl Strategy<Value = usize> {
    prop_oneof![
        1 => Just(0usize),
        4 => 1usize..200,
        4 => 1usize..5000,
        1 => 130_000usize..150_000,
    ]
}

fn ops(ranks: usize, comms: usize) -> impl Strategy<Value = Op> {
    const TYPES: [DataType; 3] = [DataType::Uint8, DataType::Int32, DataType::Float64];
    let collective = (select(&COLLECTIVES[..]), select(&TYPES[..]), counts(), 0..ranks).prop_map(
        |(function, data_type, count, root)| {
            What::Collective(Call {
                data_type,
                root,
                ..Call::new(function, count)
            })
        },
    );
    let message =
        (0..ranks, 0..ranks, counts()).prop_map(|(from, to, bytes)| What::Message { from, to, bytes });
    (0..comms, 0..STREAMS, prop_oneof![collective, message]).prop_map(|(comm, stream, what)| Op {
        comm,
        stream,
        what,
    })
}

fn programs() -> impl Strategy<Value = Program> {
    (1usize..5, 1usize..4).prop_flat_map(|(ranks, comms)| {
        let step = (
            0usize..4,
            any::<bool>(),
            any::<bool>(),
            prop::collection::vec(ops(ranks, comms), 1..12),
        )
            .prop_map(|(depth, captured, messages_first, ops)| Step {
                depth,
                captured,
                messages_first,
                ops,
            });
        prop::collection::vec(step, 1..5).prop_map(move |steps| Program { ranks, comms, steps })
    })
}

fn done(code: ResultCode) -> Result<(), String> {
    (code == ResultCode::Success)
        .then_some(())
        .ok_or_else(|| format!("{code:?}: {}", last_error()))
}

/// One operation's buffers on one rank.
struct Buffers {
    send: Vec<u8>,
    recv: Vec<u8>,
}

impl Op {
    fn is_message(&self) -> bool {
        matches!(self.what, What::Message { .. })
    }

    /// Whether it is a collective made of messages, whose order among both is the same on all ranks.
    fn is_exchange(&self) -> bool {
        matches!(
            self.what,
            What::Collective(Call {
                function: Function::AlltoAll | Function::Gather | Function::Scatter,
                ..
            })
        )
    }

    fn buffers(&self, rank: usize, ranks: usize) -> Buffers {
        match &self.what {
            What::Collective(call) => {
                let (sent, received) = call.elements(ranks);
                Buffers {
                    send: (0..sent)
                        .flat_map(|index| encode(call.data_type, call.input(rank, index)))
                        .collect(),
                    recv: vec![UNTOUCHED; received * call.data_type.size()],
                }
            }
            What::Message { from, to, bytes } => {
                let (sends, receives) = (*from == rank, *to == rank);
                Buffers {
                    send: (0..if sends { *bytes } else { 0 })
                        .map(|i| message_byte(*from, *to, i))
                        .collect(),
                    recv: vec![UNTOUCHED; if receives { *bytes } else { 0 }],
                }
            }
        }
    }

    fn call(
        &self,
        comms: &[Handle],
        streams: &[Stream],
        rank: usize,
        buffers: &mut Buffers,
    ) -> Result<(), String> {
        let on = Rank {
            comm: comms[self.comm],
            rank,
            ranks: 0,
            stream: streams[self.stream],
        };
        let (send, recv) = (buffers.send.as_ptr(), buffers.recv.as_mut_ptr());
        match &self.what {
            What::Collective(call) => done(on.call(call, send, recv)),
            What::Message { from, to, bytes } => {
                let message = |function, peer| Call {
                    data_type: DataType::Uint8,
                    ..Call::peer(function, *bytes, peer)
                };
                let to_self = from == to && *from == rank;
                if to_self {
                    // The two must be in one group.
                    group_start()?;
                }
                if *from == rank {
                    done(on.call(&message(Function::Send, *to), send, null_mut()))?;
                }
                if *to == rank {
                    done(on.call(&message(Function::Recv, *from), null(), recv))?;
                }
                if to_self { group_end() } else { Ok(()) }
            }
        }
    }

    /// Compares what came with what must come.
    fn check(&self, rank: usize, ranks: usize, buffers: &Buffers) -> Result<(), String> {
        let expected = |at: usize| match &self.what {
            What::Message { from, to, .. } => message_byte(*from, *to, at),
            What::Collective(call) => {
                let size = call.data_type.size();
                call.expected(rank, ranks, at / size)
                    .map_or(UNTOUCHED, |value| encode(call.data_type, value)[at % size])
            }
        };
        match buffers
            .recv
            .iter()
            .enumerate()
            .find(|(at, got)| **got != expected(*at))
        {
            None => Ok(()),
            Some((at, got)) => Err(format!("{self:?}: byte {at} is {got}, not {}", expected(at))),
        }
    }
}

fn message_byte(from: usize, to: usize, at: usize) -> u8 {
    (from * 31 + to * 7 + at % 241) as u8
}

fn group_start() -> Result<(), String> {
    // SAFETY: no arguments.
    done(unsafe { abi::ncclGroupStart() })
}

fn group_end() -> Result<(), String> {
    // SAFETY: no arguments.
    done(unsafe { abi::ncclGroupEnd() })
}

/// One rank's run of a program.
struct Run<'a> {
    program: &'a Program,
    rank: usize,
    comms: Vec<Handle>,
    streams: Vec<Stream>,
}

impl Run<'_> {
    fn run(&self) -> Result<(), String> {
        for step in &self.program.steps {
            let (rank, ranks) = (self.rank, self.program.ranks);
            let mut buffers: Vec<Buffers> = step.ops.iter().map(|op| op.buffers(rank, ranks)).collect();
            if step.captured {
                let graph = self.capture(step, &mut buffers)?;
                let device = host();
                let exec = device
                    .graph_instantiate(graph)
                    .map_err(|error| error.to_string())?;
                device.graph_destroy(graph).map_err(|error| error.to_string())?;
                for _ in 0..2 {
                    buffers
                        .iter_mut()
                        .for_each(|buffers| buffers.recv.fill(UNTOUCHED));
                    device
                        .graph_launch(exec, self.streams[0])
                        .map_err(|error| error.to_string())?;
                    self.finish(step, &buffers)?;
                }
                device
                    .graph_exec_destroy(exec)
                    .map_err(|error| error.to_string())?;
            } else {
                self.calls(step, &mut buffers)?;
                self.finish(step, &buffers)?;
            }
        }
        Ok(())
    }

    fn calls(&self, step: &Step, buffers: &mut [Buffers]) -> Result<(), String> {
        let mut order: Vec<usize> = (0..step.ops.len()).collect();
        let free = step.depth > 0 && !step.ops.iter().any(Op::is_exchange);
        if step.messages_first && free && self.rank % 2 == 1 {
            order.sort_by_key(|index| !step.ops[*index].is_message());
        }
        let last = order.len() - 1;
        for _ in 0..step.depth.min(1) {
            group_start()?;
        }
        for (at, index) in order.into_iter().enumerate() {
            // Inner levels open and close around some of the calls.
            let inner = if at % 3 == 1 {
                step.depth.saturating_sub(1)
            } else {
                0
            };
            (0..inner).try_for_each(|_| group_start())?;
            step.ops[index].call(&self.comms, &self.streams, self.rank, &mut buffers[index])?;
            (0..inner).try_for_each(|_| group_end())?;
            if at == last && step.depth > 0 {
                group_end()?;
            }
        }
        Ok(())
    }

    /// Captures the calls on all streams, forked from the first and joined to it.
    fn capture(&self, step: &Step, buffers: &mut [Buffers]) -> Result<Graph, String> {
        let device = host();
        let origin = self.streams[0];
        let capture = || {
            let event = device.event_create()?;
            device.capture_begin(origin)?;
            device.event_record(event, origin)?;
            for other in &self.streams[1..] {
                device.stream_wait_event(*other, event)?;
            }
            device.event_destroy(event)
        };
        capture().map_err(|error| error.to_string())?;
        self.calls(step, buffers)?;
        let join = || {
            for other in &self.streams[1..] {
                let event = device.event_create()?;
                device.event_record(event, *other)?;
                device.stream_wait_event(origin, event)?;
                device.event_destroy(event)?;
            }
            device.capture_end(origin)
        };
        join().map_err(|error| error.to_string())
    }

    fn finish(&self, step: &Step, buffers: &[Buffers]) -> Result<(), String> {
        for stream in &self.streams {
            host()
                .stream_synchronize(*stream)
                .map_err(|error| error.to_string())?;
        }
        step.ops
            .iter()
            .zip(buffers)
            .try_for_each(|(op, buffers)| op.check(self.rank, self.program.ranks, buffers))
    }
}

/// Longer than any program takes.
const LIMIT: Duration = Duration::from_secs(60);

/// Runs a program with a thread for each rank. A rank that fails, or a time that is over, aborts all communicators.
fn run(program: &Program) -> Result<(), String> {
    host();
    let ids: Vec<UniqueIdBytes> = (0..program.comms).map(|_| unique_id()).collect();
    let live = Mutex::new(Vec::new());
    let (ends, ended) = mpsc::channel();
    thread::scope(|scope| {
        for rank in 0..program.ranks {
            let (ids, live, ends) = (&ids, &live, ends.clone());
            scope.spawn(move || {
                let joined: Vec<Rank> = ids
                    .iter()
                    .map(|id| Rank::join(*id, rank, program.ranks))
                    .collect();
                let comms: Vec<Handle> = joined.iter().map(|joined| joined.comm).collect();
                live.lock().unwrap().extend_from_slice(&comms);
                let device = host();
                let streams: Vec<Stream> = (0..STREAMS).map(|_| device.stream_create().unwrap()).collect();
                let run = Run {
                    program,
                    rank,
                    comms,
                    streams,
                };
                let result = run.run();
                let failed = result.is_err();
                let _ = ends.send(result.map_err(|why| format!("rank {rank}: {why}")));
                for stream in run.streams {
                    device.stream_destroy(stream).unwrap();
                }
                for joined in joined {
                    device.stream_destroy(joined.stream).unwrap();
                    if !failed {
                        // SAFETY: a handle of a communicator, aborted meanwhile if another rank failed.
                        let _ = unsafe { abi::ncclCommDestroy(joined.comm) };
                    }
                }
            });
        }
        let mut first = Ok(());
        for _ in 0..program.ranks {
            let result = match ended.recv_timeout(LIMIT) {
                Ok(result) => result,
                Err(_) if first.is_ok() => Err(format!("not done after {LIMIT:?}")),
                Err(_) => break,
            };
            if first.is_ok() && result.is_err() {
                for comm in live.lock().unwrap().iter() {
                    // SAFETY: a handle of a communicator.
                    let _ = unsafe { abi::ncclCommAbort(*comm) };
                }
                first = result;
            }
        }
        first
    })
}

proptest! {
    #![proptest_config(Config {
        cases: if std::env::var_os("RINGSIGHT_TEST_FULL").is_some() { 200 } else { 24 },
        max_shrink_iters: 100,
        failure_persistence: None,
        ..Config::default()
    })]

    #[test]
    fn every_program_comes_to_its_results(program in programs()) {
        if let Err(why) = run(&program) {
            prop_assert!(false, "{why}");
        }
    }
}

/// Ranks that use two communicators on one stream in opposite orders, each with more messages than a plan holds, cut
/// differently.
#[test]
fn communicators_that_share_a_stream_do_not_wait_for_each_other_crosswise() {
    let message = |comm, from, to| Op {
        comm,
        stream: 0,
        what: What::Message { from, to, bytes: 5 },
    };
    let mut ops = Vec::new();
    for _ in 0..3000 {
        ops.push(message(0, 0, 1));
        ops.push(message(1, 1, 2));
        ops.push(message(0, 2, 0));
    }
    for comm in [1, 0] {
        ops.push(Op {
            comm,
            stream: 0,
            what: What::Collective(Call::new(Function::AllReduce, 100)),
        });
    }
    let program = Program {
        ranks: 3,
        comms: 2,
        steps: vec![Step {
            depth: 1,
            captured: false,
            messages_first: true,
            ops,
        }],
    };
    run(&program).unwrap_or_else(|why| panic!("{why}"));
}
