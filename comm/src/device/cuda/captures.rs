//! What streams are being captured into, and the order that graphs leave behind.

use std::collections::HashMap;

use cudarc::driver::sys::{
    CUevent, CUgraph, CUgraphNode, CUstreamCaptureStatus, CUstreamUpdateCaptureDependencies_flags,
};

use super::{
    super::{DeviceError, Event, Result, Stream},
    driver::{call, stream as handle},
};

/// Captures that operations were captured in: the driver's number, and ours, which records carry.
#[derive(Default)]
pub(super) struct Captures {
    /// By the driver's number.
    known: HashMap<u64, Known>,
    last: u32,
}

/// A capture: our number and the graph in the making.
struct Known {
    number: u32,
    graph: usize,
    /// By event: the node of its last record.
    records: HashMap<Event, LastRecord>,
}

/// A record at what was the end of a stream, which may move on with it.
struct LastRecord {
    node: usize,
    /// What it comes after.
    after: Vec<usize>,
}

impl LastRecord {
    /// Makes it come after other nodes. The driver allows edges of a graph that is being captured to be removed, not nodes.
    fn move_on(&mut self, graph: CUgraph, after: &[CUgraphNode]) -> Result<()> {
        let node = self.node as CUgraphNode;
        let old: Vec<CUgraphNode> = self.after.drain(..).map(|node| node as CUgraphNode).collect();
        let (to_old, to_new) = (vec![node; old.len()], vec![node; after.len()]);
        // SAFETY: nodes and edges of this graph: the node was added to it with these; the arrays are as long as the calls say.
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
    /// Our number of a capture, by the driver's.
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

    /// The graph in the making of a capture, by our number.
    pub(super) fn graph(&self, number: u32) -> Result<CUgraph> {
        self.known
            .values()
            .find(|known| known.number == number)
            .map(|known| known.graph as CUgraph)
            .ok_or_else(|| DeviceError::InvalidHandle(format!("capture {number} is not known")))
    }

    /// The graph of a capture is gone.
    pub(super) fn forget(&mut self, number: u32) {
        self.known.retain(|_, known| known.number != number);
    }

    /// An event is gone.
    pub(super) fn forget_event(&mut self, event: Event) {
        for known in self.known.values_mut() {
            known.records.remove(&event);
        }
    }

    /// See [`Device::event_record_external_last`](crate::device::Device::event_record_external_last).
    pub(super) fn record_last(&mut self, event: Event, stream: Stream) -> Result<()> {
        let (capture, after) = dependencies(stream)?;
        self.number(capture.id, capture.graph)?;
        let known = self.known.get_mut(&capture.id);
        let known = known.ok_or_else(|| DeviceError::InvalidUsage("a capture that is not known".into()))?;
        if let Some(record) = known.records.get_mut(&event) {
            return record.move_on(capture.graph, &after);
        }
        let mut node = std::ptr::null_mut();
        // SAFETY: the caller's event; nodes of the graph that is being captured; written to the local. The stream's next node
        // does not come after this one: it is a leaf.
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

/// The graph that the stream is being captured into, with the driver's number of the capture.
pub(super) fn capturing(stream: Stream) -> Result<Option<(u64, CUgraph)>> {
    let capture = captured(stream)?;
    Ok(capture.map(|capture| (capture.id, capture.graph)))
}

/// The capture that the stream is in, and the nodes that what is captured next in the stream will wait for.
pub(super) fn dependencies(stream: Stream) -> Result<(Captured, Vec<CUgraphNode>)> {
    let capture = captured(stream)?
        .ok_or_else(|| DeviceError::InvalidUsage(format!("stream {:#x} is not being captured", stream.0)))?;
    if capture.count == 0 {
        return Ok((capture, Vec::new()));
    }
    // SAFETY: so many nodes; the array is the driver's and stays as it is until the stream's next call, which is ours.
    let nodes = unsafe { std::slice::from_raw_parts(capture.dependencies, capture.count) }.to_vec();
    Ok((capture, nodes))
}

/// What is captured next in the stream will wait for these nodes, and for no others.
pub(super) fn set_dependencies(stream: Stream, nodes: &[CUgraphNode]) -> Result<()> {
    let set = CUstreamUpdateCaptureDependencies_flags::CU_STREAM_SET_CAPTURE_DEPENDENCIES as u32;
    // SAFETY: nodes of the graph in the making, which `dependencies` has given; the array is as long as the call says.
    unsafe {
        call!(cuStreamUpdateCaptureDependencies(
            handle(stream),
            nodes.as_ptr().cast_mut(),
            nodes.len(),
            set
        ))
    }
}

/// What a stream takes part in.
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
