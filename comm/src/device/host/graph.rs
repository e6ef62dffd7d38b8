//! Work as data, and graphs of it: what a capture collects, an instance arranges and a replay runs.

use std::{
    collections::HashSet,
    mem,
    sync::{
        Arc, Mutex,
        atomic::{AtomicU32, Ordering},
    },
};

use ringsight_comm_base::sync::lock;
use ringsight_kernels::host;

use super::worker::{Outcome, Point, Worker, callback, contained};
use crate::device::{Counter, HostFunction, Journal, Result};

/// One operation in a stream or one node of a graph.
#[derive(Clone)]
pub(super) enum Action {
    Memcpy {
        destination: usize,
        source: usize,
        bytes: usize,
    },
    Memset {
        destination: usize,
        value: u8,
        bytes: usize,
    },
    Host(HostFunction),
    Kernel(Arc<host::Kernel>),
    Count(Counter),
    Append(Journal, u64),
}

impl Action {
    /// Runs it; `replay` is 0 for eager work.
    pub(super) fn run(&self, replay: u32) -> Outcome {
        contained(|| {
            match self {
                Self::Memcpy {
                    destination,
                    source,
                    bytes,
                } => {
                    // SAFETY: valid addresses of that many bytes are the caller's contract, as for cudaMemcpyAsync;
                    // `copy` allows them to overlap.
                    unsafe { (*destination as *mut u8).copy_from(*source as *const u8, *bytes) };
                }
                Self::Memset {
                    destination,
                    value,
                    bytes,
                } => {
                    // SAFETY: as above.
                    unsafe { (*destination as *mut u8).write_bytes(*value, *bytes) };
                }
                Self::Host(function) => callback(|| function(replay)),
                // The observer is told from inside and must not call the device either.
                Self::Kernel(kernel) => callback(|| kernel.run(replay)),
                // Release: whoever sees the count sees what the stream did before.
                Self::Count(counter) => {
                    counter.word().fetch_add(1, Ordering::Release);
                }
                Self::Append(journal, word) => journal.append(*word),
            }
            Ok(())
        })
    }
}

/// What a graph has to do with an event (a handle) that is not of its capture.
#[derive(Clone, Copy)]
pub(super) enum External {
    /// Waits for what it had recorded when the graph was launched.
    Wait(usize),
    /// Is recorded by it.
    Record(usize),
}

/// What a node does.
pub(super) enum Step {
    Action(Action),
    External(External),
}

/// A node: what it does, and the nodes (by index, all smaller than its own) that must be done before.
pub(super) struct Node {
    pub(super) step: Step,
    pub(super) after: Vec<usize>,
}

/// A destructor of [`crate::device::Graphs::capture_retain`].
pub(super) type Destructor = Box<dyn FnOnce() + Send>;

/// Destructors that run when this is dropped, on the device's own thread.
pub(super) struct Retained {
    /// Behind a lock only because a graph is shared between threads; destructors need not be `Sync`.
    destructors: Mutex<Vec<Destructor>>,
    reclaim: Arc<Worker>,
}

impl Retained {
    pub(super) fn new(reclaim: Arc<Worker>) -> Self {
        Self {
            destructors: Mutex::default(),
            reclaim,
        }
    }

    pub(super) fn push(&self, destructor: Destructor) {
        lock(&self.destructors).push(destructor);
    }
}

impl Drop for Retained {
    fn drop(&mut self) {
        for destructor in mem::take(&mut *lock(&self.destructors)) {
            self.reclaim.push(Box::new(|| {
                callback(destructor);
                Ok(())
            }));
        }
    }
}

/// A captured graph. Fields are dropped in this order: destructors run after the nodes they serve are gone.
pub(super) struct GraphBody {
    pub(super) nodes: Vec<Node>,
    /// Launches of all its instances.
    pub(super) replays: AtomicU32,
    pub(super) _retained: Retained,
}

/// An executable instance.
pub(super) struct Instance {
    program: Arc<Program>,
    /// The nodes that have to do with events outside, by index.
    externals: Vec<(usize, External)>,
    /// One per lane but the first, which the launching stream runs.
    workers: Vec<Worker>,
    /// The end of its last launch.
    last: Mutex<Option<Arc<Point>>>,
}

/// A graph covered by chains ("lanes") in which each node depends on the one before. Every lane has a thread of its
/// own, so nodes that do not depend on each other can always run side by side: a kernel that waits for a peer never
/// keeps another from running.
struct Program {
    lanes: Vec<Vec<Turn>>,
    graph: Arc<GraphBody>,
}

/// A node in its lane. What is before it in the lane is done when its turn comes, so only lanes wait for each other.
struct Turn {
    node: usize,
    /// Nodes of other lanes that must be done before.
    waits: Vec<usize>,
    /// A node of another lane waits for it.
    tells: bool,
}

/// The nodes that have to do with events outside, by index. A launch is one moment to who looks at an event from outside: of
/// the records of one event the last one is seen, and the others only where the graph itself waits for them.
fn externals(nodes: &[Node]) -> Vec<(usize, External)> {
    let mut recorded_later = HashSet::new();
    let mut externals: Vec<_> = nodes
        .iter()
        .enumerate()
        .rev()
        .filter_map(|(index, node)| match node.step {
            Step::External(External::Record(event)) if !recorded_later.insert(event) => None,
            Step::External(external) => {
                if let External::Wait(event) = external {
                    recorded_later.remove(&event);
                }
                Some((index, external))
            }
            Step::Action(_) => None,
        })
        .collect();
    externals.reverse();
    externals
}

/// The turns of each lane.
fn turns(nodes: &[Node], lanes: &[Vec<usize>], externals: &[(usize, External)]) -> Vec<Vec<Turn>> {
    let mut lane_of = vec![0; nodes.len()];
    for (lane, members) in lanes.iter().enumerate() {
        members.iter().for_each(|&node| lane_of[node] = lane);
    }
    let elsewhere = |node: usize| {
        let lanes = &lane_of;
        let after = nodes[node].after.iter().copied();
        after.filter(move |&before| lanes[before] != lanes[node])
    };
    let mut tells = vec![false; nodes.len()];
    (0..nodes.len())
        .flat_map(elsewhere)
        .for_each(|before| tells[before] = true);
    let turn = |&node: &usize| Turn {
        node,
        waits: elsewhere(node).collect(),
        tells: tells[node],
    };
    let does_something = |turn: &Turn| {
        !turn.waits.is_empty()
            || turn.tells
            || matches!(nodes[turn.node].step, Step::Action(_))
            || externals
                .binary_search_by_key(&turn.node, |(node, _)| *node)
                .is_ok()
    };
    lanes
        .iter()
        .map(|members| members.iter().map(turn).filter(does_something).collect())
        .collect()
}

/// Covers the graph with chains of nodes that depend on each other, directly or not.
fn lanes(nodes: &[Node]) -> Vec<Vec<usize>> {
    let mut lanes: Vec<Vec<usize>> = Vec::new();
    let mut ancestors: Vec<NodeSet> = Vec::with_capacity(nodes.len());
    for (index, node) in nodes.iter().enumerate() {
        let mut mine = NodeSet::default();
        for &before in &node.after {
            mine.union(&ancestors[before]);
            mine.insert(before);
        }
        match lanes
            .iter_mut()
            .find(|lane| lane.last().is_some_and(|&last| mine.contains(last)))
        {
            Some(lane) => lane.push(index),
            None => lanes.push(vec![index]),
        }
        ancestors.push(mine);
    }
    lanes
}

/// Nodes that must be done before the nodes of `ends`, these included.
pub(super) fn closure(nodes: &[Node], ends: &[usize]) -> NodeSet {
    let mut set = NodeSet::default();
    let mut open = ends.to_vec();
    while let Some(index) = open.pop() {
        if !set.contains(index) {
            set.insert(index);
            open.extend(&nodes[index].after);
        }
    }
    set
}

/// A set of node indices.
#[derive(Default)]
pub(super) struct NodeSet(Vec<u64>);

impl NodeSet {
    fn insert(&mut self, index: usize) {
        if self.0.len() <= index / 64 {
            self.0.resize(index / 64 + 1, 0);
        }
        self.0[index / 64] |= 1 << (index % 64);
    }

    fn union(&mut self, other: &Self) {
        self.0.resize(self.0.len().max(other.0.len()), 0);
        self.0
            .iter_mut()
            .zip(&other.0)
            .for_each(|(word, other)| *word |= other);
    }

    pub(super) fn contains(&self, index: usize) -> bool {
        self.0
            .get(index / 64)
            .is_some_and(|word| word >> (index % 64) & 1 == 1)
    }
}

impl Instance {
    /// An instance whose threads are named after `number`.
    pub(super) fn new(graph: Arc<GraphBody>, number: usize) -> Result<Self> {
        let lanes = lanes(&graph.nodes);
        let workers = (1..lanes.len())
            .map(|_| Worker::spawn(&format!("rs-graph-{number}")))
            .collect::<Result<_>>()?;
        let externals = externals(&graph.nodes);
        Ok(Self {
            program: Arc::new(Program {
                lanes: turns(&graph.nodes, &lanes, &externals),
                graph,
            }),
            externals,
            workers,
            last: Mutex::default(),
        })
    }

    /// The nodes that have to do with events outside, by index.
    pub(super) fn externals(&self) -> &[(usize, External)] {
        &self.externals
    }

    /// The next launch, in which nodes wait for or pass these points outside, by index. Numbers count from 1 per graph, as those of a
    /// device do that counts in the graph's memory: instances of one graph go on where the others are, and ranks that replay alike number
    /// alike.
    pub(super) fn next(self: &Arc<Self>, outside: Vec<(usize, Arc<Point>)>) -> Replay {
        let done = Arc::new(Point::default());
        let previous = lock(&self.last).replace(done.clone());
        // Relaxed: the caller holds a lock while it launches. 0 stands for eager work.
        let replays = &self.program.graph.replays;
        let number = replays.load(Ordering::Relaxed).checked_add(1).unwrap_or(1);
        replays.store(number, Ordering::Relaxed);
        Replay {
            instance: self.clone(),
            number,
            outside: outside.into(),
            previous,
            done,
        }
    }
}

impl Program {
    fn run_lane(
        &self,
        lane: usize,
        replay: u32,
        (passed, outside): (&[Point], &[(usize, Arc<Point>)]),
    ) -> Outcome {
        let mut outcome = Ok(());
        for turn in &self.lanes[lane] {
            turn.waits.iter().for_each(|&before| passed[before].wait());
            // After a fault the rest still runs, as far as it can: peers wait for it.
            outcome = outcome.and(match &self.graph.nodes[turn.node].step {
                Step::Action(action) => action.run(replay),
                Step::External(external) => {
                    if let Ok(at) = outside.binary_search_by_key(&turn.node, |(node, _)| *node) {
                        match external {
                            External::Wait(_) => outside[at].1.wait(),
                            External::Record(_) => outside[at].1.pass(),
                        }
                    }
                    Ok(())
                }
            });
            if turn.tells {
                passed[turn.node].pass();
            }
        }
        outcome
    }
}

/// One launch of an instance, numbered and ordered behind the launches before it.
pub(super) struct Replay {
    instance: Arc<Instance>,
    number: u32,
    outside: Arc<[(usize, Arc<Point>)]>,
    previous: Option<Arc<Point>>,
    done: Arc<Point>,
}

impl Replay {
    /// Runs the whole graph and returns when all of it is done.
    pub(super) fn run(self) -> Outcome {
        if let Some(previous) = &self.previous {
            previous.wait();
        }
        let (program, number) = (&self.instance.program, self.number);
        let passed: Arc<[Point]> = program.graph.nodes.iter().map(|_| Point::default()).collect();
        let branches: Vec<Arc<Branch>> = self.instance.workers.iter().map(|_| Arc::default()).collect();
        for (at, worker) in self.instance.workers.iter().enumerate() {
            let (program, passed, branch) = (program.clone(), passed.clone(), branches[at].clone());
            let outside = self.outside.clone();
            worker.push(Box::new(move || {
                *lock(&branch.outcome) = program.run_lane(at + 1, number, (&passed, &outside));
                // Before the launching stream goes on: once it is done, no replay keeps the graph alive.
                drop(program);
                branch.done.pass();
                Ok(())
            }));
        }
        let mut outcome = if program.lanes.is_empty() {
            Ok(())
        } else {
            program.run_lane(0, number, (&passed, &self.outside))
        };
        for branch in branches {
            branch.done.wait();
            outcome = outcome.and(mem::replace(&mut *lock(&branch.outcome), Ok(())));
        }
        self.done.pass();
        outcome
    }
}

/// What a lane that runs on a thread of the instance reports back.
struct Branch {
    done: Point,
    outcome: Mutex<Outcome>,
}

impl Default for Branch {
    fn default() -> Self {
        Self {
            done: Point::default(),
            outcome: Mutex::new(Ok(())),
        }
    }
}
