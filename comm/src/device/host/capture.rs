//! Stream capture: what a captured stream collects and the rules that keep it whole.

use std::{
    collections::HashMap,
    sync::{Arc, atomic::AtomicU32},
};

use super::{
    graph::{Destructor, GraphBody, Node, Retained, Step, closure},
    worker::Worker,
};
use crate::device::{DeviceError, Result};

/// A capture from its begin to its end.
pub(super) struct Capturing {
    id: u32,
    /// The stream it began on.
    pub(super) origin: usize,
    /// The thread that began it and must end it, by its [`crate::threads::number`].
    pub(super) thread: u64,
    nodes: Vec<Node>,
    retained: Retained,
    /// Streams in the capture, each with the nodes that its next node follows.
    tips: HashMap<usize, Vec<usize>>,
    /// Why it cannot become a graph any more.
    invalid: Option<String>,
}

impl Capturing {
    pub(super) fn new(id: u32, origin: usize, thread: u64, reclaim: Arc<Worker>) -> Self {
        Self {
            id,
            origin,
            thread,
            nodes: Vec::new(),
            retained: Retained::new(reclaim),
            tips: HashMap::from([(origin, Vec::new())]),
            invalid: None,
        }
    }

    /// Marks it as broken; the first reason stays.
    pub(super) fn invalidate(&mut self, why: &str) {
        self.invalid.get_or_insert_with(|| why.to_owned());
    }

    /// An error if it was invalidated.
    pub(super) fn check(&self) -> Result<()> {
        match &self.invalid {
            Some(why) => Err(DeviceError::InvalidUsage(format!(
                "capture {} was invalidated: {why}",
                self.id
            ))),
            None => Ok(()),
        }
    }

    /// Streams that take part.
    pub(super) fn streams(&self) -> impl Iterator<Item = usize> {
        self.tips.keys().copied()
    }

    /// Appends a node to a stream.
    pub(super) fn add(&mut self, stream: usize, step: Step) {
        let node = self.nodes.len();
        let after = self.tips.insert(stream, vec![node]).unwrap_or_default();
        self.nodes.push(Node { step, after });
    }

    /// What an event recorded in `stream` now stands for.
    pub(super) fn tip(&self, stream: usize) -> Vec<usize> {
        self.tips.get(&stream).cloned().unwrap_or_default()
    }

    /// Makes the next node of `stream` follow `tip`; the stream joins if it is not in the capture.
    pub(super) fn follow(&mut self, stream: usize, tip: &[usize]) {
        let mine = self.tips.entry(stream).or_default();
        mine.extend_from_slice(tip);
        mine.sort_unstable();
        mine.dedup();
    }

    /// Keeps a destructor for the graph.
    pub(super) fn retain(&mut self, destructor: Destructor) {
        self.retained.push(destructor);
    }

    /// The graph, if every stream that joined was joined back to the origin.
    pub(super) fn finish(self) -> Result<GraphBody> {
        self.check()?;
        let reached = closure(&self.nodes, &self.tips[&self.origin]);
        let open = self
            .tips
            .iter()
            .filter(|(_, tip)| tip.iter().any(|&node| !reached.contains(node)))
            .count();
        if open > 0 {
            return Err(DeviceError::InvalidUsage(format!(
                "capture {}: {open} stream(s) that joined it were not joined back: record an event on each and let \
                 the origin stream wait for it before the end",
                self.id
            )));
        }
        Ok(GraphBody {
            nodes: self.nodes,
            replays: AtomicU32::new(0),
            _retained: self.retained,
        })
    }
}
