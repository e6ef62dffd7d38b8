//! Copy-engine collectives: copies between the entry and the exit kernel of a launch ([`ringsight_kernels::cuda::copy_engine`]).
//!
//! The launching call queues everything, in sequence. Between the kernels nobody else has to call the driver.
//!
//! Work is queued in two branches behind the entry kernel: the *caller* branch is the caller's stream, and the *side* branch runs beside it. The exit
//! kernel waits for both. An eager side branch is a stream of the communicator's own. If two communicators shared that stream, a copy would wait for
//! another one's earlier barrier kernel, which may wait for a rank whose next operation waits for this one. A captured side branch needs no
//! stream: it is a branch of graph nodes. A stream that joins a capture would stay in it until the end.
//!
//! Copies to other GPUs run one after another: one alone fills a GPU's link, and three side by side among four GPUs had 60 % of it
//! (docs/decisions/0005-copy-engines.md). This rank's copy to itself uses no link and runs in the side branch. In a reduction
//! ([`ringsight_kernels::cuda::tiles`]) the kernels are in the caller branch and the copies to other GPUs in the side branch.

use std::sync::Arc;

use cudarc::driver::sys::{self, CUevent, CUgraphNode, CUstream};
use ringsight_kernels::{
    Connections, Launch,
    cuda::{Head, PeerLaunch, copy_engine::Transfer, peer_operation::CopyPhase, tiles::Tiles},
};

use super::{
    captures,
    driver::{Kernel, OutsideCapture, call, new_order_event, new_stream},
    gpu::Gpu,
    reclaim,
};
use crate::device::{DeviceError, Result, Stream};

/// The side stream of one communicator's copies. Its operations run one after another, so each has it alone.
pub(super) struct CopyEngine(Option<SideStream>);

struct SideStream {
    stream: CUstream,
    /// Events for [`Branches::point`]: one of the caller branch, two of the side branch.
    events: [CUevent; 3],
}

// SAFETY: handles, which belong to no thread.
unsafe impl Send for SideStream {}
// SAFETY: as above; the driver orders the calls, and the communicator's operations are launched one after another.
unsafe impl Sync for SideStream {}

impl Drop for SideStream {
    fn drop(&mut self) {
        // SAFETY: made in `CopyEngine::new`, as far as they are there, and destroyed once. Work in the stream goes on; destroying it waits for
        // nothing.
        unsafe {
            if !self.stream.is_null() {
                let _ = sys::cuStreamDestroy_v2(self.stream);
            }
            for event in self.events {
                if !event.is_null() {
                    let _ = sys::cuEventDestroy_v2(event);
                }
            }
        }
    }
}

impl Drop for CopyEngine {
    fn drop(&mut self) {
        // Not on the thread that drops a launch.
        if let Some(side) = self.0.take() {
            reclaim::drop_later(side);
        }
    }
}

impl CopyEngine {
    /// A side stream on the GPU whose context is current.
    pub(super) fn new() -> Result<Self> {
        let _outside = OutsideCapture::enter()?;
        let mut side = SideStream {
            stream: new_stream()?,
            events: [std::ptr::null_mut(); 3],
        };
        for event in &mut side.events {
            *event = new_order_event()?;
        }
        Ok(Self(Some(side)))
    }
}

/// Queues copies, one after another.
///
/// # Safety
/// Their memory stays until the stream has done them.
unsafe fn copy(stream: CUstream, copies: &[Transfer]) -> Result<()> {
    let mut copies = copies.iter().filter(|copy| copy.bytes > 0);
    // SAFETY: the caller's. An address says which memory it belongs to, also of other GPUs and processes.
    copies
        .try_for_each(|copy| unsafe { call!(cuMemcpyAsync(copy.to, copy.from, copy.bytes as usize, stream)) })
}

/// Two branches of work behind what is in a stream: the stream itself, and a side branch.
struct Branches<'a> {
    stream: CUstream,
    queue: Queue<'a>,
}

enum Queue<'a> {
    /// Two streams, and the number of points of the side branch so far.
    Eager(&'a SideStream, usize),
    /// One captured stream: by branch, the nodes that its next node follows.
    Captured([Vec<CUgraphNode>; 2]),
}

/// One of the branches.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Branch {
    Caller,
    Side,
}

/// How far a branch has come. At one time a branch has no more points than it has events: one of the caller branch, two of the side branch.
enum Point {
    Event(CUevent),
    Nodes(Vec<CUgraphNode>),
}

impl<'a> Branches<'a> {
    fn new(copy_engine: &'a CopyEngine, stream: CUstream, captured: bool) -> Result<Self> {
        let queue = match &copy_engine.0 {
            Some(side) if !captured => Queue::Eager(side, 0),
            _ => {
                let (_, before) = captures::dependencies(Stream(stream as usize))?;
                Queue::Captured([before.clone(), before])
            }
        };
        let mut branches = Self { stream, queue };
        let begun = branches.point(Branch::Caller)?;
        branches.wait(Branch::Side, begun)?;
        Ok(branches)
    }

    /// Queues something in a branch, by the stream that `what` gets.
    fn queue(&mut self, branch: Branch, what: impl FnOnce(CUstream) -> Result<()>) -> Result<()> {
        match &mut self.queue {
            Queue::Eager(side, _) if branch == Branch::Side => what(side.stream),
            Queue::Eager(..) => what(self.stream),
            Queue::Captured(nodes) => {
                let stream = Stream(self.stream as usize);
                captures::set_dependencies(stream, &nodes[branch as usize])?;
                let done = what(self.stream);
                // Keep what was captured in order, even if `what` failed.
                nodes[branch as usize] = captures::dependencies(stream)?.1;
                done
            }
        }
    }

    fn copy(&mut self, branch: Branch, copies: &[Transfer]) -> Result<()> {
        // SAFETY: buffers of the caller's operation, the other ranks' buffers in the window, and scratch memory that the launch holds. They stay until the
        // operation has ended on all ranks. The caller keeps captured ones.
        self.queue(branch, |stream| unsafe { copy(stream, copies) })
    }

    fn point(&mut self, branch: Branch) -> Result<Point> {
        let (event, stream) = match &mut self.queue {
            Queue::Captured(nodes) => return Ok(Point::Nodes(nodes[branch as usize].clone())),
            Queue::Eager(side, _) if branch == Branch::Caller => (side.events[0], self.stream),
            Queue::Eager(side, points) => {
                *points += 1;
                (side.events[1 + *points % 2], side.stream)
            }
        };
        // SAFETY: an event and a stream of this communicator's device. Streams that wait for the event's last record already do so.
        unsafe { call!(cuEventRecord(event, stream)) }?;
        Ok(Point::Event(event))
    }

    /// Makes later work of a branch wait for a point of the other one.
    fn wait(&mut self, branch: Branch, point: Point) -> Result<()> {
        match (&mut self.queue, point) {
            (Queue::Eager(side, _), Point::Event(event)) => {
                let stream = if branch == Branch::Side {
                    side.stream
                } else {
                    self.stream
                };
                // SAFETY: as in `point`.
                unsafe { call!(cuStreamWaitEvent(stream, event, 0)) }
            }
            (Queue::Captured(nodes), Point::Nodes(more)) => {
                let nodes = &mut nodes[branch as usize];
                let new: Vec<_> = more.into_iter().filter(|node| !nodes.contains(node)).collect();
                nodes.extend(new);
                Ok(())
            }
            _ => Err(DeviceError::InvalidUsage("a point of other branches".into())),
        }
    }

    /// Makes later work of the stream wait for both branches.
    fn join(mut self) -> Result<()> {
        let done = self.point(Branch::Side)?;
        self.wait(Branch::Caller, done)?;
        match &self.queue {
            Queue::Eager(..) => Ok(()),
            Queue::Captured([nodes, _]) => captures::set_dependencies(Stream(self.stream as usize), nodes),
        }
    }
}

impl Gpu {
    /// Queues what follows the entry kernel, which has been launched, and the exit kernel.
    pub(super) fn launch_copies(
        &self,
        stream: CUstream,
        launch: &mut PeerLaunch,
        head: Head,
        copy_phase: &CopyPhase,
        copy_engine: &CopyEngine,
        captured: bool,
    ) -> Result<()> {
        let done = match copy_phase {
            // Everything in the caller's stream: a side branch would take driver calls and GPU time.
            // SAFETY: as in `Branches::copy`.
            CopyPhase::Copies(copies) if copies.own.is_none() => unsafe { copy(stream, copies.others()) },
            _ => Branches::new(copy_engine, stream, captured).and_then(|mut branches| {
                let done = match copy_phase {
                    CopyPhase::Copies(copies) => branches
                        .copy(Branch::Side, copies.own.as_slice())
                        .and_then(|()| branches.copy(Branch::Caller, copies.others())),
                    CopyPhase::Tiles(tiles) => self.reduce(&mut branches, tiles, head),
                };
                // Join even if queuing failed: what was queued must be waited for.
                let joined = branches.join();
                done.and(joined)
            }),
        };
        if done.is_err() {
            // The entry kernel runs, so the exit kernel has to end the operation. The other ranks wait for this rank, which has failed.
            launch.arguments.set_copies_failed();
        }
        let end = Kernel {
            function: self.peer_kernels[launch.kernel + 1],
            ..self.peer_kernel(launch)
        };
        // SAFETY: the kernel's argument, shared with the entry kernel. If the driver refuses it, the launch never ends and keeps its memory.
        let ended = unsafe { end.launch(stream, &mut [launch.arguments.as_mut_ptr()]) };
        done.and(ended)
    }

    /// Queues the copies and kernels of a reduction, in the order of [`ringsight_kernels::cuda::tiles`].
    fn reduce(&self, branches: &mut Branches, tiles: &Tiles, head: Head) -> Result<()> {
        let run = |branches: &mut Branches, branch, mut launch: PeerLaunch| {
            launch.arguments.report_to(head);
            let kernel = self.peer_kernel(&launch);
            // SAFETY: the kernel's argument, which the call copies. What it refers to lives until the launch is over, or the caller keeps it.
            branches.queue(branch, |stream| unsafe {
                kernel.launch(stream, &mut [launch.arguments.as_mut_ptr()])
            })
        };
        let push = |branches: &mut Branches, number| {
            branches.copy(Branch::Side, tiles.pushes(number).others())?;
            branches.point(Branch::Side)
        };
        let mut pushed = [Some(push(branches, 0)?), Some(push(branches, 1)?)];
        for number in 0..tiles.count() {
            let here = pushed[number % 2].take();
            let here = here.ok_or_else(|| DeviceError::InvalidUsage("a tile that is not copied".into()))?;
            branches.wait(Branch::Caller, here)?;
            run(branches, Branch::Caller, tiles.arrival(number))?;
            let copies_more = number > 0 && number + 1 < tiles.count();
            if copies_more {
                // Barriers run one after another.
                let arrived = branches.point(Branch::Caller)?;
                branches.wait(Branch::Side, arrived)?;
            }
            run(branches, Branch::Caller, tiles.reduce(number))?;
            branches.copy(Branch::Caller, tiles.result_copy(number).as_slice())?;
            let reduced = branches.point(Branch::Caller)?;
            if copies_more {
                run(branches, Branch::Side, tiles.room(number + 1))?;
                pushed[(number + 1) % 2] = Some(push(branches, number + 1)?);
            }
            branches.wait(Branch::Side, reduced)?;
            branches.copy(Branch::Side, tiles.gathers(number).others())?;
        }
        Ok(())
    }
}

/// The side stream for a launch.
pub(super) fn of_launch(launch: &Launch) -> Result<Arc<CopyEngine>> {
    let mut works = launch.channels.iter().flat_map(|channel| &channel.work);
    let found = works.find_map(|work| match &work.connections {
        Connections::CopyEngine { window, .. } => window.copy_engine.clone().downcast().ok(),
        _ => None,
    });
    found.ok_or_else(|| {
        DeviceError::InvalidUsage("a window that is not for this device's copy engines".into())
    })
}
