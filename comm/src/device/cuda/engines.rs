//! Copies by copy engines, between the two kernels of a launch ([`ringsight_kernels::cuda::copy_engine`]).
//!
//! Those to other GPUs come one after another: one alone fills a GPU's link, and three side by side among four GPUs had 60 % of it
//! (docs/decisions/0005-copy-engines.md). What stays on this GPU goes over no link, and is queued beside them. An eager copy of that is forked
//! from the caller's stream into a stream of the communicator's own and joined again. That is no other communicator's:
//! in a stream that two share, a copy would wait for the kernel before another one's copies, which may wait for a rank whose next
//! operation waits for this one. A captured one is a node beside the others, with no other stream: one that has joined a capture stays in it
//! until that ends.
//!
//! Of a reduction the kernels that reduce are in the caller's stream, and copies to other GPUs beside them ([`ringsight_kernels::cuda::tiles`]).
//!
//! All is queued by the call that launches the kernels, in sequence. Between them nobody else need call the driver.

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
    release,
};
use crate::device::{DeviceError, Result, Stream};

/// What the copies of one communicator are queued with. Its operations run one after another, so each has it alone.
pub(super) struct Engines(Option<Lane>);

struct Lane {
    beside: CUstream,
    /// Those of [`Rows::mark`].
    reached: [CUevent; 3],
}

// SAFETY: handles, which belong to no thread.
unsafe impl Send for Lane {}
// SAFETY: as above; calls with them are the driver's to order, and the communicator's operations are launched one after another.
unsafe impl Sync for Lane {}

impl Drop for Lane {
    fn drop(&mut self) {
        // SAFETY: made in `Engines::new`, as far as they are there, and given back once. What is in the stream goes on; to destroy it waits for
        // nothing.
        unsafe {
            if !self.beside.is_null() {
                let _ = sys::cuStreamDestroy_v2(self.beside);
            }
            for event in self.reached {
                if !event.is_null() {
                    let _ = sys::cuEventDestroy_v2(event);
                }
            }
        }
    }
}

impl Drop for Engines {
    fn drop(&mut self) {
        // Not on whatever thread lets go of a launch.
        if let Some(lane) = self.0.take() {
            release::later(lane);
        }
    }
}

impl Engines {
    /// For the GPU whose context is current.
    pub(super) fn new() -> Result<Self> {
        let _outside = OutsideCapture::enter()?;
        let mut lane = Lane {
            beside: new_stream()?,
            reached: [std::ptr::null_mut(); 3],
        };
        for event in &mut lane.reached {
            *event = new_order_event()?;
        }
        Ok(Self(Some(lane)))
    }
}

/// Queues copies, one after another.
///
/// # Safety
/// They are of memory that is there until the stream has come behind them.
unsafe fn copy(stream: CUstream, copies: &[Transfer]) -> Result<()> {
    let mut copies = copies.iter().filter(|copy| copy.bytes > 0);
    // SAFETY: the caller's. Addresses say which memory they are of, also of other GPUs and processes.
    copies
        .try_for_each(|copy| unsafe { call!(cuMemcpyAsync(copy.to, copy.from, copy.bytes as usize, stream)) })
}

/// Two rows of work behind what is in a stream: one in that stream, and one beside it.
struct Rows<'a> {
    stream: CUstream,
    way: Way<'a>,
}

enum Way<'a> {
    /// In two streams; and how many marks there were beside.
    Eager(&'a Lane, usize),
    /// In one: by row, the nodes that its next one comes after.
    Captured([Vec<CUgraphNode>; 2]),
}

/// Which of them.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Row {
    Stream,
    Beside,
}

/// As far as a row has come. Of each row there are no more at a time than it has events: one in the stream, two beside it.
enum Mark {
    Event(CUevent),
    Nodes(Vec<CUgraphNode>),
}

impl<'a> Rows<'a> {
    fn new(engines: &'a Engines, stream: CUstream, captured: bool) -> Result<Self> {
        let way = match &engines.0 {
            Some(lane) if !captured => Way::Eager(lane, 0),
            _ => {
                let (_, before) = captures::dependencies(Stream(stream as usize))?;
                Way::Captured([before.clone(), before])
            }
        };
        let mut rows = Self { stream, way };
        let begun = rows.mark(Row::Stream)?;
        rows.wait(Row::Beside, begun)?;
        Ok(rows)
    }

    /// Does something in a row: by the stream that it is given.
    fn queue(&mut self, row: Row, what: impl FnOnce(CUstream) -> Result<()>) -> Result<()> {
        match &mut self.way {
            Way::Eager(lane, _) if row == Row::Beside => what(lane.beside),
            Way::Eager(..) => what(self.stream),
            Way::Captured(nodes) => {
                let stream = Stream(self.stream as usize);
                captures::set_dependencies(stream, &nodes[row as usize])?;
                let done = what(self.stream);
                // What has been captured is waited for, whatever has become of the rest.
                nodes[row as usize] = captures::dependencies(stream)?.1;
                done
            }
        }
    }

    fn copy(&mut self, row: Row, copies: &[Transfer]) -> Result<()> {
        // SAFETY: buffers of the caller's operation, and of the other ranks' in the window, and memory beside it that the launch holds: they stay until
        // the operation has ended on all ranks; of what is captured the caller keeps them.
        self.queue(row, |stream| unsafe { copy(stream, copies) })
    }

    fn mark(&mut self, row: Row) -> Result<Mark> {
        let (event, stream) = match &mut self.way {
            Way::Captured(nodes) => return Ok(Mark::Nodes(nodes[row as usize].clone())),
            Way::Eager(lane, _) if row == Row::Stream => (lane.reached[0], self.stream),
            Way::Eager(lane, marks) => {
                *marks += 1;
                (lane.reached[1 + *marks % 2], lane.beside)
            }
        };
        // SAFETY: an event and a stream of this communicator's device. Who waits for what it recorded before has been told to.
        unsafe { call!(cuEventRecord(event, stream)) }?;
        Ok(Mark::Event(event))
    }

    /// What comes in a row from here on waits until the other one has come to a mark.
    fn wait(&mut self, row: Row, mark: Mark) -> Result<()> {
        match (&mut self.way, mark) {
            (Way::Eager(lane, _), Mark::Event(event)) => {
                let stream = if row == Row::Beside {
                    lane.beside
                } else {
                    self.stream
                };
                // SAFETY: as in `mark`.
                unsafe { call!(cuStreamWaitEvent(stream, event, 0)) }
            }
            (Way::Captured(nodes), Mark::Nodes(more)) => {
                let nodes = &mut nodes[row as usize];
                let new: Vec<_> = more.into_iter().filter(|node| !nodes.contains(node)).collect();
                nodes.extend(new);
                Ok(())
            }
            _ => Err(DeviceError::InvalidUsage("a mark of other rows".into())),
        }
    }

    /// What comes in the stream from here on comes after both.
    fn join(mut self) -> Result<()> {
        let done = self.mark(Row::Beside)?;
        self.wait(Row::Stream, done)?;
        match &self.way {
            Way::Eager(..) => Ok(()),
            Way::Captured([nodes, _]) => captures::set_dependencies(Stream(self.stream as usize), nodes),
        }
    }
}

impl Gpu {
    /// Queues what comes behind the first kernel of a launch, which has been launched, and its second one.
    pub(super) fn launch_copies(
        &self,
        stream: CUstream,
        launch: &mut PeerLaunch,
        head: Head,
        copy_phase: &CopyPhase,
        engines: &Engines,
        captured: bool,
    ) -> Result<()> {
        let done = match copy_phase {
            // All in the stream: what is beside it would take calls of the driver, and the GPU's time.
            // SAFETY: as in `Rows::copy`.
            CopyPhase::Copies(copies) if copies.own.is_none() => unsafe { copy(stream, copies.others()) },
            _ => Rows::new(engines, stream, captured).and_then(|mut rows| {
                let done = match copy_phase {
                    CopyPhase::Copies(copies) => rows
                        .copy(Row::Beside, copies.own.as_slice())
                        .and_then(|()| rows.copy(Row::Stream, copies.others())),
                    CopyPhase::Tiles(tiles) => self.reduce(&mut rows, tiles, head),
                };
                // What has been queued is waited for, whatever has become of the rest.
                let joined = rows.join();
                done.and(joined)
            }),
        };
        if done.is_err() {
            // The first kernel runs: the second one has to end what that has begun. The other ranks wait for this one, which has failed.
            launch.arguments.set_copies_failed();
        }
        let end = Kernel {
            function: self.peer_kernels[launch.kernel + 1],
            ..self.peer_kernel(launch)
        };
        // SAFETY: the kernel's argument, the same as that of the first one. Where it cannot be launched, the launch is never over, and what
        // it has stays its own.
        let ended = unsafe { end.launch(stream, &mut [launch.arguments.as_mut_ptr()]) };
        done.and(ended)
    }

    /// Queues the copies of a reduction and the kernels that reduce, in the order of [`ringsight_kernels::cuda::tiles`].
    fn reduce(&self, rows: &mut Rows, tiles: &Tiles, head: Head) -> Result<()> {
        let run = |rows: &mut Rows, row, mut launch: PeerLaunch| {
            launch.arguments.report_to(head);
            let kernel = self.peer_kernel(&launch);
            // SAFETY: the kernel's argument, which is copied by the call; what it refers to lives until the launch is over, or the caller keeps it.
            rows.queue(row, |stream| unsafe {
                kernel.launch(stream, &mut [launch.arguments.as_mut_ptr()])
            })
        };
        let push = |rows: &mut Rows, number| {
            rows.copy(Row::Beside, tiles.pushes(number).others())?;
            rows.mark(Row::Beside)
        };
        let mut pushed = [Some(push(rows, 0)?), Some(push(rows, 1)?)];
        for number in 0..tiles.count() {
            let here = pushed[number % 2].take();
            let here = here.ok_or_else(|| DeviceError::InvalidUsage("a piece that is not copied".into()))?;
            rows.wait(Row::Stream, here)?;
            run(rows, Row::Stream, tiles.arrival(number))?;
            let copies_more = number > 0 && number + 1 < tiles.count();
            if copies_more {
                // One meeting comes after the other.
                let arrived = rows.mark(Row::Stream)?;
                rows.wait(Row::Beside, arrived)?;
            }
            run(rows, Row::Stream, tiles.reduce(number))?;
            rows.copy(Row::Stream, tiles.result_copy(number).as_slice())?;
            let reduced = rows.mark(Row::Stream)?;
            if copies_more {
                run(rows, Row::Beside, tiles.room(number + 1))?;
                pushed[(number + 1) % 2] = Some(push(rows, number + 1)?);
            }
            rows.wait(Row::Beside, reduced)?;
            rows.copy(Row::Beside, tiles.gathers(number).others())?;
        }
        Ok(())
    }
}

/// What the copies of a launch are queued with.
pub(super) fn of(launch: &Launch) -> Result<Arc<Engines>> {
    let mut works = launch.channels.iter().flat_map(|channel| &channel.work);
    let found = works.find_map(|work| match &work.connections {
        Connections::CopyEngine { window, .. } => window.copy_engine.clone().downcast().ok(),
        _ => None,
    });
    found.ok_or_else(|| {
        DeviceError::InvalidUsage("a window that is not for this device's copy engines".into())
    })
}
