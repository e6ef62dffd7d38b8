//! Captures: the streams that take part, and the order of nodes in the graph.

use std::collections::HashMap;

use cudarc::driver::sys::{
    self, CUevent, CUgraph, CUgraphNode, CUstreamCaptureStatus, CUstreamUpdateCaptureDependencies_flags,
};
use ringsight_comm_base::sync::lock;

use super::{
    CudaDevice, counters,
    driver::{call, stream as handle},
    reclaim,
};
use crate::device::{Capture, Contexts, Counter, DeviceError, Event, Graphs, Journal, Result, Stream};

/// The captures that operations were captured in, with the driver's numbers and the numbers that records carry.
#[derive(Default)]
pub(super) struct Captures {
    /// By the driver's number.
    known: HashMap<u64, Known>,
    last: u32,
}

/// One capture.
struct Known {
    number: u32,
    graph: usize,
    /// By event: the node of its last record.
    records: HashMap<Event, LastRecord>,
}

/// A record at what was the end of a stream when it was captured. It may move to a later end.
struct LastRecord {
    node: usize,
    /// The nodes that it follows.
    after: Vec<usize>,
}

impl LastRecord {
    /// Makes it follow other nodes. During a capture the driver allows edges to be removed, but not nodes.
    fn move_to(&mut self, graph: CUgraph, after: &[CUgraphNode]) -> Result<()> {
        let node = self.node as CUgraphNode;
        let old: Vec<CUgraphNode> = self.after.drain(..).map(|node| node as CUgraphNode).collect();
        let (to_old, to_new) = (vec![node; old.len()], vec![node; after.len()]);
        // SAFETY: nodes and edges of this graph: the node was added with these edges; the arrays are as long as the calls say.
        unsafe {
            call!(cuGraphRemoveDependencies(
                graph,
                old.as_ptr(),
                to_old.as_ptr(),
                old.len()
            ))?;
            call!(cuGraphAddDependencies(
                graph,
                after.as_ptr(),
                to_new.as_ptr(),
                after.len()
            ))?;
        }
        self.after = after.iter().map(|node| *node as usize).collect();
        Ok(())
    }
}

impl Captures {
    /// The number of a capture in records.
    pub(super) fn number(&mut self, id: u64, graph: CUgraph) -> Result<u32> {
        if let Some(known) = self.known.get(&id) {
            return Ok(known.number);
        }
        self.last = self
            .last
            .checked_add(1)
            .ok_or_else(|| DeviceError::Resource("no capture number is left".into()))?;
        self.known.insert(
            id,
            Known {
                number: self.last,
                graph: graph as usize,
                records: HashMap::new(),
            },
        );
        Ok(self.last)
    }

    /// The graph of a capture, by its number in records.
    pub(super) fn graph(&self, number: u32) -> Result<CUgraph> {
        self.known
            .values()
            .find(|known| known.number == number)
            .map(|known| known.graph as CUgraph)
            .ok_or_else(|| DeviceError::InvalidHandle(format!("capture {number} is not known")))
    }

    /// Forgets a capture whose graph is gone.
    pub(super) fn forget(&mut self, number: u32) {
        self.known.retain(|_, known| known.number != number);
    }

    /// Forgets a destroyed event.
    pub(super) fn forget_event(&mut self, event: Event) {
        for known in self.known.values_mut() {
            known.records.remove(&event);
        }
    }

    /// The body of [`Graphs::event_record_external_last`].
    pub(super) fn record_last(&mut self, event: Event, stream: Stream) -> Result<()> {
        let (capture, after) = dependencies(stream)?;
        self.number(capture.id, capture.graph)?;
        let known = self.known.get_mut(&capture.id);
        let known = known.ok_or_else(|| DeviceError::InvalidUsage("a capture that is not known".into()))?;
        if let Some(record) = known.records.get_mut(&event) {
            return record.move_to(capture.graph, &after);
        }
        let mut node = std::ptr::null_mut();
        // SAFETY: the caller's event; nodes of the graph that is being captured; written to the local. The node is a leaf: the stream's next
        // node does not follow it.
        unsafe {
            call!(cuGraphAddEventRecordNode(
                &raw mut node,
                capture.graph,
                after.as_ptr(),
                after.len(),
                event.0 as CUevent
            ))
        }?;
        let after = after.into_iter().map(|node| node as usize).collect();
        known.records.insert(
            event,
            LastRecord {
                node: node as usize,
                after,
            },
        );
        Ok(())
    }
}

impl Graphs for CudaDevice {
    fn capture_of(&self, stream: Stream) -> Result<Option<Capture>> {
        capturing(stream)?
            .map(|(id, graph)| lock(&self.captures).number(id, graph).map(|id| Capture { id }))
            .transpose()
    }

    fn capture_retain(&self, capture: Capture, destructor: Box<dyn FnOnce() + Send>) -> Result<()> {
        // The capture still goes on: the call that this is part of captures operations into it.
        let graph = lock(&self.captures).graph(capture.id)?;
        let captures = self.captures.clone();
        reclaim::when_gone(
            graph,
            Box::new(move || {
                lock(&captures).forget(capture.id);
                destructor();
            }),
        )
    }

    fn event_record_external(&self, event: Event, stream: Stream) -> Result<()> {
        let (_, before) = dependencies(stream)?;
        let external = sys::CUevent_record_flags::CU_EVENT_RECORD_EXTERNAL as u32;
        // SAFETY: the caller's handles; refused outside captures.
        unsafe {
            call!(cuEventRecordWithFlags(
                event.0 as CUevent,
                handle(stream),
                external
            ))
        }?;
        // Later work in the stream does not wait for the record: it is a leaf of the graph.
        set_dependencies(stream, &before)
    }

    fn event_record_external_last(&self, event: Event, stream: Stream) -> Result<()> {
        lock(&self.captures).record_last(event, stream)
    }

    fn stream_wait_event_external(&self, stream: Stream, event: Event) -> Result<()> {
        let external = sys::CUevent_wait_flags::CU_EVENT_WAIT_EXTERNAL as u32;
        // SAFETY: the caller's handles; refused outside captures.
        unsafe { call!(cuStreamWaitEvent(handle(stream), event.0 as CUevent, external)) }
    }

    fn new_counter(&self) -> Result<Counter> {
        self.entered()?.counters.counter()
    }

    fn increment(&self, stream: Stream, counter: &Counter) -> Result<()> {
        self.gpu(self.current()?)?
            .counters
            .increment(handle(stream), counter)
    }

    fn new_journal(&self) -> Result<Journal> {
        self.entered()?;
        counters::journal()
    }

    fn append(&self, stream: Stream, journal: &Journal, word: u64) -> Result<()> {
        let gpu = self.gpu(self.current()?)?;
        counters::append(gpu.append, handle(stream), journal, word)
    }
}

/// The graph that the stream is being captured into, with the driver's number of the capture; `None` outside captures.
pub(super) fn capturing(stream: Stream) -> Result<Option<(u64, CUgraph)>> {
    let capture = captured(stream)?;
    Ok(capture.map(|capture| (capture.id, capture.graph)))
}

/// The capture that the stream is in, and the nodes that its next node will follow.
pub(super) fn dependencies(stream: Stream) -> Result<(Captured, Vec<CUgraphNode>)> {
    let capture = captured(stream)?
        .ok_or_else(|| DeviceError::InvalidUsage(format!("stream {:#x} is not being captured", stream.0)))?;
    if capture.count == 0 {
        return Ok((capture, Vec::new()));
    }
    // SAFETY: `count` nodes; the driver's array stays valid until the stream's next call, which this module makes.
    let nodes = unsafe { std::slice::from_raw_parts(capture.dependencies, capture.count) }.to_vec();
    Ok((capture, nodes))
}

/// Makes the stream's next node follow these nodes only.
pub(super) fn set_dependencies(stream: Stream, nodes: &[CUgraphNode]) -> Result<()> {
    let set = CUstreamUpdateCaptureDependencies_flags::CU_STREAM_SET_CAPTURE_DEPENDENCIES as u32;
    // SAFETY: nodes of the captured graph, from `dependencies`; the array is as long as the call says.
    unsafe {
        call!(cuStreamUpdateCaptureDependencies(
            handle(stream),
            nodes.as_ptr().cast_mut(),
            nodes.len(),
            set
        ))
    }
}

/// The capture that a stream is in.
pub(super) struct Captured {
    id: u64,
    graph: CUgraph,
    dependencies: *const CUgraphNode,
    count: usize,
}

fn captured(stream: Stream) -> Result<Option<Captured>> {
    let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
    let mut captured = Captured {
        id: 0,
        graph: std::ptr::null_mut(),
        dependencies: std::ptr::dangling(),
        count: 0,
    };
    // SAFETY: written to the locals.
    unsafe {
        call!(cuStreamGetCaptureInfo_v2(
            handle(stream),
            &raw mut status,
            &raw mut captured.id,
            &raw mut captured.graph,
            &raw mut captured.dependencies,
            &raw mut captured.count
        ))
    }?;
    match status {
        CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => Ok(None),
        CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_ACTIVE => Ok(Some(captured)),
        CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_INVALIDATED => Err(invalidated(stream)),
    }
}

fn invalidated(stream: Stream) -> DeviceError {
    DeviceError::InvalidUsage(format!(
        "the capture that stream {:#x} takes part in has been invalidated by an earlier error",
        stream.0
    ))
}
