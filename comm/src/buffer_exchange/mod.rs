//! Buffer exchange: ranks of other processes import callers' buffers, so that operations can be zero-copy between processes too.
//!
//! An exported buffer goes through these states:
//!
//! | state | entered when | by |
//! |---|---|---|
//! | exported | the caller registers its memory, or an operation uses it (below) | the calling thread |
//! | imported | another rank has opened the handle that a control message brought | that rank's thread `rs-maps` |
//! | in use | kernels see in peer memory that all ranks have imported this generation | kernels |
//! | withdrawn | the allocation is gone, or its chunks are no longer registered | the thread `rs-maps`, every [`SWEEP`] |
//!
//! No call waits for an import: until all ranks have imported a buffer, kernels fall back to LL128.
//!
//! Memory is exported when it is registered. Memory that captured operations use is exported too, unless `NCCL_GRAPH_REGISTER=0`, since it stays as
//! long as its graph. With `RINGSIGHT_MAP_BUFFERS=1` all memory is exported that an operation which may be zero-copy uses. Closing an import makes the
//! driver wait for kernels, and other threads' calls may wait with it. So memory must not go while kernels of several communicators wait for launches of
//! this process: whoever registers memory knows when it goes, and of other memory the caller says by the variable that it may be imported. (Opening
//! waits for no kernel: 0.3 ms were measured while one ran.)
//!
//! Invariants:
//! - The driver numbers allocations and never reuses a number, so a new allocation at an old address is told from the old one.
//! - Until a withdrawn buffer is closed, the other ranks keep the freed memory open, as UCX does with memory that it was not given. No kernel uses
//!   it: operations that used it ended on all ranks before it was freed, and no later one names its generation.
//! - Imports live as long as launches that may use them: with the peer memory.
//!
//! VMM chunks (memory that a caller has mapped with `cuMemMap`, as `expandable_segments` do) are exported only when it is registered: the caller may map other
//! memory there at any time, also below a graph. The other ranks fetch a descriptor of each chunk ([`vmm_chunks`]). An operation asks the driver whether each
//! chunk that it uses is still the one that was exported. Chunks are withdrawn when they are no longer registered, or when none of them is left. They are
//! not withdrawn when some are left: unmapping waits for no kernel, and one may use the rest.

mod exports;
mod imports;
mod inbox;
mod message;
mod vmm_chunks;

use std::{
    collections::HashMap,
    io,
    ops::Range,
    sync::{
        Arc, Mutex, Weak,
        atomic::{AtomicBool, Ordering},
        mpsc::{Receiver, RecvTimeoutError, Sender},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use ringsight_comm_base::{
    error::{Error, Result, ResultCode},
    log,
    sync::lock,
};
use ringsight_kernels::{
    ExportedBuffer, PeerMemory,
    cuda::peer_memory::{MAX_EXPORTS, imported_by_offset, imported_offset},
};

use self::{
    exports::{Export, Exports},
    imports::ImportedBuffer,
    inbox::{Event, Kept},
    message::{ExportHandle, Message},
    vmm_chunks::{ChunkServer, Fetch, Ticket},
};
pub(crate) use self::{
    imports::ImportedBuffers,
    inbox::{Inbox, InboxSender},
};
use crate::{
    checks::Post,
    device::{self, Device, ImportedMemory, VmmChunk},
};

/// How often a rank looks whether its exported buffers still exist, and tries failed imports again.
const SWEEP: Duration = Duration::from_secs(1);
/// Tries of an import: the allocation that was at its address before may still be open.
const TRIES: u32 = 30;

/// State that the caller's threads share with the thread that imports.
struct Shared {
    device: i32,
    rank: u32,
    bases: Vec<u64>,
    /// Ranks of other processes, one bit each.
    foreign: u8,
    /// Devices of the other ranks of this process.
    near: Vec<i32>,
    /// As long as there are launches.
    imported: Weak<ImportedBuffers>,
    post: Post,
    /// Buffers of captured operations are exported, registered or not.
    of_captured: bool,
    /// Buffers of all other operations are, too.
    of_all: bool,
    own: Mutex<Exports>,
    /// Why an import failed when it was tried last: by rank and number, with the generation.
    failures: Mutex<HashMap<(u32, u32), (u32, String)>>,
    events: Sender<Event>,
    /// The communicator ends.
    ending: AtomicBool,
}

/// A buffer of another rank that is to be imported.
struct Import {
    from: u32,
    number: u32,
    generation: u32,
    access: ExportHandle,
    tries: u32,
    /// Counts its message for as long as the import is tried.
    _kept: Kept,
}

/// The buffer exchange of one rank of a communicator. [`BufferExchange::stop`] ends it.
pub(crate) struct BufferExchange {
    shared: Arc<Shared>,
    /// Set once VMM chunks are exported.
    chunk_server: Mutex<Option<ChunkServer>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Shared {
    fn others(&self) -> impl Iterator<Item = u32> {
        let foreign = self.foreign;
        (0..8).filter(move |rank| foreign >> rank & 1 == 1)
    }

    /// The exported allocation that a buffer is in. Exports it first if `may_be_new`. `None` if it is not exported and cannot be, or there are too
    /// many.
    fn export(
        &self,
        device: &dyn Device,
        address: usize,
        bytes: usize,
        may_be_new: bool,
    ) -> Option<ExportedBuffer> {
        let Some(allocation) = device.allocation(address, bytes, self.device) else {
            return self.find_chunks(device, &lock(&self.own), address, bytes);
        };
        let mut own = lock(&self.own);
        if let Some(number) = own.by_id.get(&allocation.id) {
            return own.exported(*number as usize);
        }
        if !may_be_new {
            return None;
        }
        self.sweep(device, &mut own);
        let start = allocation.start;
        let number = own.place(start)?;
        let handle = device
            .export_allocation(start)
            .inspect_err(|error| log_not_exported(start, error))
            .ok()?;
        own.by_id.insert(allocation.id, number as u32);
        let id = allocation.id;
        self.enter(
            &mut own,
            number,
            Export::Whole { id, start },
            ExportHandle::Whole(handle),
        )
    }

    /// The exported chunks that a buffer is in.
    fn find_chunks(
        &self,
        device: &dyn Device,
        own: &Exports,
        address: usize,
        bytes: usize,
    ) -> Option<ExportedBuffer> {
        let holds = |entry: &Option<Export>| {
            entry
                .as_ref()
                .is_some_and(|entry| entry.holds(device, self.device, address, bytes))
        };
        own.exported(own.entries.iter().position(holds)?)
    }

    /// Exports the chunks that a buffer is in. The other ranks fetch them with `ticket`.
    fn export_chunks(
        &self,
        device: &dyn Device,
        (address, bytes): (usize, usize),
        ticket: impl FnOnce() -> io::Result<Ticket>,
    ) {
        let Some(chunks) = device.vmm_chunks(address, bytes, self.device, &self.near) else {
            // It cannot be exported as a whole either, or it has been.
            if device.allocation(address, bytes, self.device).is_none() {
                log_not_exported(
                    address,
                    &"it is no allocation, and its VMM chunks cannot be exported",
                );
            }
            return;
        };
        let start = chunks[0].start;
        // If one can be exported, so can the others: the driver has said of each that it may be.
        let handle = device
            .export_vmm_chunk(&chunks[0])
            .and_then(|_| device.export_vmm_range(start));
        let handle = handle.inspect_err(|error| log_not_exported(start, error));
        let ticket = ticket().inspect_err(|error| log_not_exported(start, error));
        let (Ok(handle), Ok(ticket)) = (handle, ticket) else {
            return;
        };
        let mut own = lock(&self.own);
        if self.find_chunks(device, &own, address, bytes).is_some() {
            return;
        }
        self.sweep(device, &mut own);
        let Some(number) = own.place(start) else { return };
        let access = ExportHandle::Chunks {
            handle,
            sizes: chunks.iter().map(|chunk| chunk.bytes as u64).collect(),
            ticket,
        };
        self.enter(&mut own, number, Export::Chunks(chunks.into()), access);
    }

    /// The chunks that were exported under a number, if they are still the same.
    fn chunks(&self, number: u32, generation: u32) -> Option<Arc<[VmmChunk]>> {
        let own = lock(&self.own);
        let number = number as usize;
        match own.entries.get(number)? {
            Some(Export::Chunks(chunks)) if own.generations[number] == generation => Some(chunks.clone()),
            _ => None,
        }
    }

    /// Enters an export under a free number, and sends it to the other ranks.
    fn enter(
        &self,
        own: &mut Exports,
        number: usize,
        entry: Export,
        access: ExportHandle,
    ) -> Option<ExportedBuffer> {
        own.entries[number] = Some(entry);
        // Never 0, which says that nothing was exported.
        own.generations[number] = own.generations[number].wrapping_add(1).max(1);
        let exported = own.exported(number)?;
        // Under the lock: an export under a number and its withdrawal arrive in this order.
        self.send(&Message::export(&exported, access));
        // Nobody is there in the end.
        let _ = self.events.send(Event::Exported);
        Some(exported)
    }

    fn send(&self, message: &Message) {
        let bytes = message.encode();
        for rank in self.others() {
            // A rank that is gone imports nothing: operations with it fail anyway.
            (self.post)(Some(rank), &bytes);
        }
    }

    /// Withdraws what is gone.
    fn sweep(&self, device: &dyn Device, own: &mut Exports) {
        for number in 0..own.entries.len() {
            let gone = |entry: &mut Export| !entry.is_here(device, self.device);
            let Some(entry) = own.entries[number].take_if(gone) else {
                continue;
            };
            if let Export::Whole { id, .. } = entry {
                own.by_id.remove(&id);
            }
            self.withdraw(own, number);
        }
    }

    /// Has the other ranks close what was exported under a number.
    fn withdraw(&self, own: &Exports, number: usize) {
        self.send(&Message::Withdraw {
            number: number as u32,
            generation: own.generations[number],
        });
    }

    /// Withdraws chunks that are no longer registered.
    fn withdraw_chunks(&self, is_registered: impl Fn(Range<usize>) -> bool) {
        let mut own = lock(&self.own);
        for number in 0..own.entries.len() {
            let over = |entry: &mut Export| entry.range().is_some_and(|range| !is_registered(range));
            if own.entries[number].take_if(over).is_some() {
                self.withdraw(&own, number);
            }
        }
    }

    /// The address, in another rank's peer memory, of the generation that this rank has imported from it.
    fn imported_at(&self, from: u32, number: u32) -> u64 {
        let offset = imported_by_offset(self.bases.len(), self.rank, number);
        self.bases[from as usize] + offset as u64
    }

    /// Imports a buffer of another rank, and writes that to where kernels look.
    fn import(&self, device: &dyn Device, import: &Import) -> Result<()> {
        let (from, number, generation) = (import.from, import.number, import.generation);
        let Some(imported) = self.imported.upgrade() else {
            return Ok(());
        };
        let ranks = self.bases.len();
        let ImportedMemory {
            base,
            bytes: mapped,
            memory,
            ..
        } = match &import.access {
            ExportHandle::Whole(handle) => device.import_shared(handle)?,
            ExportHandle::Chunks {
                handle,
                sizes,
                ticket,
            } => {
                let mut fetch = Fetch::begin(ticket, number, generation, &self.ending)?;
                device.import_vmm_chunks(handle, sizes, &mut || fetch.next())?
            }
        };
        let mut bytes = base.to_le_bytes().to_vec();
        bytes.extend(u64::from(generation).to_le_bytes());
        // Where it is before that it is: each call returns when that is done.
        device.write_shared(
            self.bases[self.rank as usize] + imported_offset(ranks, from, number) as u64,
            &bytes,
        )?;
        let memory = ImportedBuffer::new(generation, (base, mapped), memory);
        lock(&imported).insert((from, number), Arc::new(memory));
        device.write_shared(self.imported_at(from, number), &generation.to_le_bytes())?;
        tracing::info!(target: log::INIT, "Mapped memory {number} (generation {generation}) of rank {from}");
        Ok(())
    }

    /// Imports a buffer, or keeps it for later.
    fn try_import(&self, device: &dyn Device, mut import: Import, pending: &mut Vec<Import>) {
        let Err(error) = self.import(device, &import) else {
            return;
        };
        lock(&self.failures).insert(
            (import.from, import.number),
            (import.generation, error.text.clone()),
        );
        import.tries += 1;
        if import.tries == 1 || import.tries == TRIES {
            tracing::info!(target: log::INIT, "Memory of rank {} cannot be mapped: {}", import.from, error.text);
        }
        if import.tries < TRIES {
            pending.push(import);
        }
    }

    fn handle(
        &self,
        device: &dyn Device,
        from: u32,
        (message, kept): (Message, Kept),
        pending: &mut Vec<Import>,
    ) {
        if !self.others().any(|other| other == from) || from as usize >= self.bases.len() {
            return;
        }
        match message {
            Message::Export {
                number,
                generation,
                access,
            } => {
                // A rank has one export under a number, however often it says so.
                pending.retain(|import| (import.from, import.number) != (from, number));
                let import = Import {
                    from,
                    number,
                    generation,
                    access,
                    tries: 0,
                    _kept: kept,
                };
                self.try_import(device, import, pending);
            }
            Message::Withdraw { number, .. } => {
                pending.retain(|import| (import.from, import.number) != (from, number));
                if let Some(imported) = self.imported.upgrade() {
                    // From here on nobody is told that it is mapped, by replays of graphs neither. Who has been told is waited for where it is
                    // closed. If the device fails, nothing runs any more.
                    let _ = device.write_shared(self.imported_at(from, number), &0u32.to_le_bytes());
                    lock(&imported).remove(&(from, number));
                }
            }
        }
    }

    fn run(&self, inbox: &Receiver<Event>) {
        let Ok(device) = device::device() else { return };
        if device.set_current(self.device).is_err() {
            return;
        }
        let mut pending = Vec::new();
        loop {
            let event = if pending.is_empty() && lock(&self.own).is_empty() {
                inbox.recv().map_err(|_| RecvTimeoutError::Disconnected)
            } else {
                inbox.recv_timeout(SWEEP)
            };
            match event {
                Ok(Event::Message(from, message, kept)) => {
                    self.handle(&**device, from, (message, kept), &mut pending);
                }
                Ok(Event::Exported) => {}
                Err(RecvTimeoutError::Timeout) => {
                    self.sweep(&**device, &mut lock(&self.own));
                    for import in std::mem::take(&mut pending) {
                        self.try_import(&**device, import, &mut pending);
                    }
                }
                Ok(Event::End) | Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }
}

/// Logs why a buffer is not exported.
fn log_not_exported(start: usize, why: &dyn std::fmt::Display) {
    tracing::info!(target: log::INIT, "Memory at {start:#x} stays closed to other processes: {why}");
}

impl BufferExchange {
    /// Of a communicator with ranks of other processes; `near` are the devices of the other ranks of this one.
    ///
    /// # Errors
    /// No thread could be had.
    pub(super) fn new(
        device: i32,
        peers: &PeerMemory,
        near: Vec<i32>,
        imported: &Arc<ImportedBuffers>,
        post: Post,
        inbox: Inbox,
    ) -> Result<Self> {
        let shared = Arc::new(Shared {
            device,
            rank: peers.rank,
            bases: peers.bases.clone(),
            foreign: peers.foreign,
            near,
            imported: Arc::downgrade(imported),
            post,
            of_captured: ringsight_comm_base::env::switch("NCCL_GRAPH_REGISTER", true),
            of_all: ringsight_comm_base::env::switch("RINGSIGHT_MAP_BUFFERS", false),
            own: Mutex::new(Exports {
                entries: vec![None; MAX_EXPORTS],
                generations: vec![0; MAX_EXPORTS],
                by_id: HashMap::new(),
                was_full: false,
            }),
            failures: Mutex::default(),
            events: inbox.sender,
            ending: AtomicBool::new(false),
        });
        let receiver = inbox.receiver;
        let started = thread::Builder::new().name("rs-maps".into()).spawn({
            let shared = shared.clone();
            move || shared.run(&receiver)
        });
        let thread = started.map_err(|error| {
            Error::new(
                ResultCode::SystemError,
                format!("no thread to map other processes' memory: {error}"),
            )
        })?;
        Ok(Self {
            shared,
            chunk_server: Mutex::default(),
            thread: Mutex::new(Some(thread)),
        })
    }

    /// The exported allocation that a buffer of an operation is in; `None` if it is not exported.
    pub(crate) fn export_for_operation(
        &self,
        device: &dyn Device,
        (address, bytes): (usize, usize),
        captured: bool,
    ) -> Option<ExportedBuffer> {
        let may_be_new = self.shared.of_all || captured && self.shared.of_captured;
        self.shared.export(device, address, bytes, may_be_new)
    }

    /// Exports the memory of a buffer that the caller has registered, if that is possible.
    pub(super) fn register(&self, device: &dyn Device, address: usize, bytes: usize) {
        if self.shared.export(device, address, bytes, true).is_none() {
            self.shared
                .export_chunks(device, (address, bytes), || self.ticket());
        }
    }

    /// Withdraws what is no longer registered; `is_registered` says whether a range of addresses still has something that is.
    pub(super) fn deregister(&self, is_registered: impl Fn(Range<usize>) -> bool) {
        self.shared.withdraw_chunks(is_registered);
    }

    /// The ticket with which other ranks fetch chunks.
    fn ticket(&self) -> io::Result<Ticket> {
        let mut chunk_server = lock(&self.chunk_server);
        let chunk_server = match &mut *chunk_server {
            Some(chunk_server) => chunk_server,
            none => {
                let shared = Arc::downgrade(&self.shared);
                let find = move |number, generation| shared.upgrade()?.chunks(number, generation);
                none.insert(ChunkServer::new(
                    self.shared.device,
                    self.shared.rank,
                    Box::new(find),
                )?)
            }
        };
        Ok(chunk_server.ticket().clone())
    }

    /// The communicator ends: nothing is imported any more.
    pub(super) fn stop(&self) {
        // Relaxed: a request to end, which orders nothing.
        self.shared.ending.store(true, Ordering::Relaxed);
        // Not under the lock: its thread is waited for.
        let chunk_server = lock(&self.chunk_server).take();
        drop(chunk_server);
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread {
            // It is over already where there is no device.
            let _ = self.shared.events.send(Event::End);
            // A panic has been told of already.
            let _ = thread.join();
        }
    }
}
