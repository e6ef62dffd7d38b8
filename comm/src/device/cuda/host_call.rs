//! Functions of the host in streams.

use std::{
    ffi::c_void,
    sync::atomic::{AtomicU32, Ordering},
};

use super::{
    super::{HostFunction, Result, Stream},
    captures,
    driver::{call, stream as handle},
    release,
};

/// A host function in a stream.
struct HostNode {
    function: HostFunction,
    /// Calls so far, of a function in a graph.
    calls: Option<AtomicU32>,
}

/// Called by the driver in stream order.
unsafe extern "C" fn call_host(data: *mut c_void) {
    // SAFETY: the box of `launch`; in a graph it lives as long as the graph, else until here.
    let node = unsafe { &*data.cast::<HostNode>() };
    // Relaxed: replays of one graph run one after another.
    let replay = node
        .calls
        .as_ref()
        .map_or(0, |calls| calls.fetch_add(1, Ordering::Relaxed) + 1);
    // Nothing may unwind into the driver.
    let _ = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| (node.function)(replay)));
    if node.calls.is_none() {
        // SAFETY: made by `launch` for this one call. Dropped elsewhere: its end may call the driver.
        release::later(unsafe { Box::from_raw(data.cast::<HostNode>()) });
    }
}

/// Calls the function in stream order, as often as a graph that it is captured into is replayed.
///
/// # Errors
/// The driver's.
pub(super) fn launch(stream: Stream, function: HostFunction) -> Result<()> {
    let capturing = captures::capturing(stream)?;
    let node = Box::into_raw(Box::new(HostNode {
        function,
        calls: capturing.is_some().then(AtomicU32::default),
    }));
    // SAFETY: `call_host` takes such a box.
    let launched = unsafe { call!(cuLaunchHostFunc(handle(stream), Some(call_host), node.cast())) };
    // SAFETY: made above. An eager node is gone with its call; one in a graph, or nowhere, is still ours.
    let ours = |node| unsafe { Box::from_raw(node) };
    match (launched, capturing) {
        (Err(error), _) => {
            drop(ours(node));
            Err(error)
        }
        (Ok(()), None) => Ok(()),
        (Ok(()), Some((_, graph))) => {
            let node = ours(node);
            release::when_gone(graph, Box::new(move || release::later(node)))
        }
    }
}
