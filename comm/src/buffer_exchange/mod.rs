//! Callers' memory that ranks of other processes map, so that operations go straight between callers' buffers there, too.
//!
//! When a caller registers memory, its rank shows the allocation to those of other processes: a control message says what opens it. A thread of each of these maps it in its own time, enters where in the memory that kernels look at
//! ([`peers::Mappings`]), and then enters with the rank that has shown it that this is done. No call waits for any of this: until all
//! have mapped it, kernels find that they have not and go in steps. What captured operations use is shown likewise (`NCCL_GRAPH_REGISTER=0`:
//! it is not), since it must stay as long as the graph, and with `RINGSIGHT_MAP_BUFFERS=1` all memory that operations which may go straight
//! use, when the first one does. To open memory the driver waits for no kernel (measured: 0.3 ms while one runs), but to
//! close it it does, and calls of other threads may wait with it: where kernels of several communicators wait for launches of this
//! process, it must not be closed among them. Who registers memory knows when it goes; of other memory the caller says that it may be so.
//!
//! What a rank has shown it takes back when the allocation is gone: the driver numbers allocations, and never twice, so that one at
//! the address of another is told from it. It looks before it shows another one, and every [`SWEEP`]. Until then the others
//! keep the memory that was freed, as other libraries that map what they were not given do (UCX); no kernel goes there,
//! since operations that used it had ended before it was freed, on all ranks (`Meeting::leave`), and none that comes names its generation.
//! Mappings live as long as launches that may use them: with the memory among peers.
//!
//! Memory that a caller has mapped by pieces (`cuMemMap`, as `expandable_segments` do) is shown when it is registered, and only then: the caller may
//! map other memory there at any time, also below a graph. The others fetch a descriptor of each piece ([`offer`]). An operation asks the driver
//! whether each piece that it uses is still the one that was shown. It is taken back when it is no longer registered, since no operation may
//! use it then, or when nothing of it is left. Not when some of it is: to unmap it waits for no kernel, and one may use the rest.

mod inbox;
mod mapped;
mod message;
mod offer;
mod shown;

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

use ringsight_kernels::{
    ExportedBuffer, PeerMemory,
    cuda::peer_memory::{MAX_EXPORTS, imported_by_offset, imported_offset},
};

use self::{
    inbox::Event,
    mapped::MappedMemory,
    message::{Message, Way},
    offer::{Fetch, Offers, Ticket},
    shown::{Entry, Own},
};
pub(crate) use self::{
    inbox::{Inbox, Letters},
    mapped::Mapped,
};
use crate::{
    checks::Post,
    device::{self, Device, Piece, Reached},
    error::{Error, Result, ResultCode},
    log,
};
use ringsight_comm_base::sync::lock;

/// How often a rank looks whether what it has shown is still there, and tries again to map what it could not.
const SWEEP: Duration = Duration::from_secs(1);
/// How often it tries: what was at an allocation's address before may still be open.
const TRIES: u32 = 30;

/// What the caller's threads and the one that maps share.
struct Table {
    device: i32,
    rank: u32,
    bases: Vec<u64>,
    /// By bit.
    foreign: u8,
    /// Devices of the other ranks of this process.
    near: Vec<i32>,
    /// As long as there are launches.
    mapped: Weak<Mapped>,
    post: Post,
    /// What operations use that are captured is shown, whether it is registered or not.
    of_captured: bool,
    /// And what all others use.
    of_all: bool,
    own: Mutex<Own>,
    /// Why what others have shown could not be mapped, when it was tried last: by rank and number, with the generation.
    failures: Mutex<HashMap<(u32, u32), (u32, String)>>,
    events: Sender<Event>,
    /// The communicator ends.
    ending: AtomicBool,
}

/// What another rank has shown.
struct Offer {
    from: u32,
    number: u32,
    generation: u32,
    way: Way,
    tries: u32,
}

/// What one rank shows and maps. [`Maps::stop`] ends it.
pub(crate) struct Maps {
    table: Arc<Table>,
    /// From when there is memory that is mapped by pieces.
    offers: Mutex<Option<Offers>>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Table {
    fn others(&self) -> impl Iterator<Item = u32> {
        let foreign = self.foreign;
        (0..8).filter(move |rank| foreign >> rank & 1 == 1)
    }

    /// What a buffer is in, shown to all who are to map it; `None` if it cannot be, or there are too many, or it has not been and is not to
    /// be.
    fn show(
        &self,
        device: &dyn Device,
        address: usize,
        bytes: usize,
        may_be_new: bool,
    ) -> Option<ExportedBuffer> {
        let Some(allocation) = device.allocation(address, bytes, self.device) else {
            return self.shown_pieces(device, &lock(&self.own), address, bytes);
        };
        let mut own = lock(&self.own);
        if let Some(number) = own.by_id.get(&allocation.id) {
            return own.shown(*number as usize);
        }
        if !may_be_new {
            return None;
        }
        self.sweep(device, &mut own);
        let start = allocation.start;
        let number = own.place(start)?;
        let handle = device
            .export(start)
            .inspect_err(|error| stays_closed(start, error))
            .ok()?;
        own.by_id.insert(allocation.id, number as u32);
        let id = allocation.id;
        self.enter(&mut own, number, Entry::Whole { id, start }, Way::Whole(handle))
    }

    /// What a buffer is in of what was shown by pieces.
    fn shown_pieces(
        &self,
        device: &dyn Device,
        own: &Own,
        address: usize,
        bytes: usize,
    ) -> Option<ExportedBuffer> {
        let holds = |entry: &Option<Entry>| {
            entry
                .as_ref()
                .is_some_and(|entry| entry.holds(device, self.device, address, bytes))
        };
        own.shown(own.entries.iter().position(holds)?)
    }

    /// Shows the pieces that a buffer is in. Who is to map them asks for them with `ticket`.
    fn show_pieces(
        &self,
        device: &dyn Device,
        (address, bytes): (usize, usize),
        ticket: impl FnOnce() -> io::Result<Ticket>,
    ) {
        let Some(pieces) = device.pieces(address, bytes, self.device, &self.near) else {
            // As a whole it cannot be shown either, or it has been.
            if device.allocation(address, bytes, self.device).is_none() {
                stays_closed(
                    address,
                    &"it is no allocation, and not mapped in pieces that descriptors can be had of",
                );
            }
            return;
        };
        let start = pieces[0].start;
        // If one can be exported, so can the others: the driver has said of each that it may be.
        let handle = device
            .export_piece(&pieces[0])
            .and_then(|_| device.export_pieces(start));
        let handle = handle.inspect_err(|error| stays_closed(start, error));
        let ticket = ticket().inspect_err(|error| stays_closed(start, error));
        let (Ok(handle), Ok(ticket)) = (handle, ticket) else {
            return;
        };
        let mut own = lock(&self.own);
        if self.shown_pieces(device, &own, address, bytes).is_some() {
            return;
        }
        self.sweep(device, &mut own);
        let Some(number) = own.place(start) else { return };
        let way = Way::Pieces {
            handle,
            sizes: pieces.iter().map(|piece| piece.bytes as u64).collect(),
            ticket,
        };
        self.enter(&mut own, number, Entry::Pieces(pieces.into()), way);
    }

    /// The pieces that were shown under a number, if they are still the same.
    fn pieces(&self, number: u32, generation: u32) -> Option<Arc<[Piece]>> {
        let own = lock(&self.own);
        let number = number as usize;
        match own.entries.get(number)? {
            Some(Entry::Pieces(pieces)) if own.generations[number] == generation => Some(pieces.clone()),
            _ => None,
        }
    }

    /// Enters it under a number that is free, and tells the others.
    fn enter(&self, own: &mut Own, number: usize, entry: Entry, way: Way) -> Option<ExportedBuffer> {
        own.entries[number] = Some(entry);
        // Never 0, which says that nothing was shown.
        own.generations[number] = own.generations[number].wrapping_add(1).max(1);
        let shown = own.shown(number)?;
        // Under the lock: what is shown under a number and what is taken back arrive in this order.
        self.tell(&Message::show(&shown, way));
        // Nobody is there in the end.
        let _ = self.events.send(Event::Shown);
        Some(shown)
    }

    fn tell(&self, message: &Message) {
        let bytes = message.encode();
        for rank in self.others() {
            // Who is gone maps nothing: operations with it fail, and not for this.
            (self.post)(Some(rank), &bytes);
        }
    }

    /// Takes back what is gone.
    fn sweep(&self, device: &dyn Device, own: &mut Own) {
        for number in 0..own.entries.len() {
            let gone = |entry: &mut Entry| !entry.is_here(device, self.device);
            let Some(entry) = own.entries[number].take_if(gone) else {
                continue;
            };
            if let Entry::Whole { id, .. } = entry {
                own.by_id.remove(&id);
            }
            self.take_back(own, number);
        }
    }

    /// The others let go of what was shown under a number.
    fn take_back(&self, own: &Own, number: usize) {
        self.tell(&Message::TakeBack {
            number: number as u32,
            generation: own.generations[number],
        });
    }

    /// Takes back what was shown by pieces and is not registered any more.
    fn take_back_pieces(&self, is_registered: impl Fn(Range<usize>) -> bool) {
        let mut own = lock(&self.own);
        for number in 0..own.entries.len() {
            let over = |entry: &mut Entry| entry.range().is_some_and(|range| !is_registered(range));
            if own.entries[number].take_if(over).is_some() {
                self.take_back(&own, number);
            }
        }
    }

    /// Where it stands with another rank which generation of what that has shown this one has mapped.
    fn mapped_at(&self, from: u32, number: u32) -> u64 {
        let offset = imported_by_offset(self.bases.len(), self.rank, number);
        self.bases[from as usize] + offset as u64
    }

    /// Maps what another rank has shown, and says so where its kernels look.
    fn map(&self, device: &dyn Device, offer: &Offer) -> Result<()> {
        let (from, number, generation) = (offer.from, offer.number, offer.generation);
        let Some(mapped) = self.mapped.upgrade() else {
            return Ok(());
        };
        let ranks = self.bases.len();
        let Reached { base, memory, .. } = match &offer.way {
            Way::Whole(handle) => device.reach_share(handle)?,
            Way::Pieces {
                handle,
                sizes,
                ticket,
            } => {
                let mut fetch = Fetch::begin(ticket, number, generation, &self.ending)?;
                device.reach_pieces(handle, sizes, &mut || fetch.next())?
            }
        };
        let mut bytes = base.to_le_bytes().to_vec();
        bytes.extend(u64::from(generation).to_le_bytes());
        // Where it is before that it is: each call returns when that is done.
        device.write_share(
            self.bases[self.rank as usize] + imported_offset(ranks, from, number) as u64,
            &bytes,
        )?;
        let memory = MappedMemory::new(generation, base, memory);
        lock(&mapped).insert((from, number), Arc::new(memory));
        device.write_share(self.mapped_at(from, number), &generation.to_le_bytes())?;
        tracing::info!(target: log::INIT, "Mapped memory {number} (generation {generation}) of rank {from}");
        Ok(())
    }

    /// Maps it, or keeps it for later.
    fn try_to_map(&self, device: &dyn Device, mut offer: Offer, pending: &mut Vec<Offer>) {
        let Err(error) = self.map(device, &offer) else {
            return;
        };
        lock(&self.failures).insert((offer.from, offer.number), (offer.generation, error.text.clone()));
        offer.tries += 1;
        if offer.tries == 1 || offer.tries == TRIES {
            tracing::info!(target: log::INIT, "Memory of rank {} cannot be mapped: {}", offer.from, error.text);
        }
        if offer.tries < TRIES {
            pending.push(offer);
        }
    }

    fn handle(&self, device: &dyn Device, from: u32, message: Message, pending: &mut Vec<Offer>) {
        if !self.others().any(|other| other == from) || from as usize >= self.bases.len() {
            return;
        }
        match message {
            Message::Show {
                number,
                generation,
                way,
            } => {
                let offer = Offer {
                    from,
                    number,
                    generation,
                    way,
                    tries: 0,
                };
                self.try_to_map(device, offer, pending);
            }
            Message::TakeBack { number, .. } => {
                pending.retain(|offer| (offer.from, offer.number) != (from, number));
                if let Some(mapped) = self.mapped.upgrade() {
                    // From here on nobody is told that it is mapped, by replays of graphs neither. Who has been told is waited for where it is
                    // closed. If the device fails, nothing runs any more.
                    let _ = device.write_share(self.mapped_at(from, number), &0u32.to_le_bytes());
                    lock(&mapped).remove(&(from, number));
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
                Ok(Event::Message(from, message)) => self.handle(&**device, from, message, &mut pending),
                Ok(Event::Shown) => {}
                Err(RecvTimeoutError::Timeout) => {
                    self.sweep(&**device, &mut lock(&self.own));
                    for offer in std::mem::take(&mut pending) {
                        self.try_to_map(&**device, offer, &mut pending);
                    }
                }
                Ok(Event::End) | Err(RecvTimeoutError::Disconnected) => return,
            }
        }
    }
}

/// Why others do not map what they could be shown.
fn stays_closed(start: usize, why: &dyn std::fmt::Display) {
    tracing::info!(target: log::INIT, "Memory at {start:#x} stays closed to other processes: {why}");
}

impl Maps {
    /// Of a communicator with ranks of other processes; `near` are the devices of the other ranks of this one.
    ///
    /// # Errors
    /// No thread could be had.
    pub(super) fn new(
        device: i32,
        peers: &PeerMemory,
        near: Vec<i32>,
        mapped: &Arc<Mapped>,
        post: Post,
        inbox: Inbox,
    ) -> Result<Self> {
        let table = Arc::new(Table {
            device,
            rank: peers.rank,
            bases: peers.bases.clone(),
            foreign: peers.foreign,
            near,
            mapped: Arc::downgrade(mapped),
            post,
            of_captured: crate::env::switch("NCCL_GRAPH_REGISTER", true),
            of_all: crate::env::switch("RINGSIGHT_MAP_BUFFERS", false),
            own: Mutex::new(Own {
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
            let table = table.clone();
            move || table.run(&receiver)
        });
        let thread = started.map_err(|error| {
            Error::new(
                ResultCode::SystemError,
                format!("no thread to map other processes' memory: {error}"),
            )
        })?;
        Ok(Self {
            table,
            offers: Mutex::default(),
            thread: Mutex::new(Some(thread)),
        })
    }

    /// What a buffer of an operation is in, shown to all ranks of other processes; `None` if it is not.
    pub(crate) fn of_operation(
        &self,
        device: &dyn Device,
        (address, bytes): (usize, usize),
        captured: bool,
    ) -> Option<ExportedBuffer> {
        let may_be_new = self.table.of_all || captured && self.table.of_captured;
        self.table.show(device, address, bytes, may_be_new)
    }

    /// Shows what a buffer is in that the caller has registered, if that can be.
    pub(super) fn register(&self, device: &dyn Device, address: usize, bytes: usize) {
        if self.table.show(device, address, bytes, true).is_none() {
            self.table.show_pieces(device, (address, bytes), || self.ticket());
        }
    }

    /// Something is not registered any more; `is_registered` tells whether anything still is in a range of addresses.
    pub(super) fn deregister(&self, is_registered: impl Fn(Range<usize>) -> bool) {
        self.table.take_back_pieces(is_registered);
    }

    /// What others ask for pieces with.
    fn ticket(&self) -> io::Result<Ticket> {
        let mut offers = lock(&self.offers);
        let offers = match &mut *offers {
            Some(offers) => offers,
            none => {
                let table = Arc::downgrade(&self.table);
                let find = move |number, generation| table.upgrade()?.pieces(number, generation);
                none.insert(Offers::new(self.table.device, self.table.rank, Box::new(find))?)
            }
        };
        Ok(offers.ticket().clone())
    }

    /// The communicator ends: nothing is mapped any more.
    pub(super) fn stop(&self) {
        // Relaxed: a request to end, which orders nothing.
        self.table.ending.store(true, Ordering::Relaxed);
        // Not under the lock: its thread is waited for.
        let offers = lock(&self.offers).take();
        drop(offers);
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread {
            // It is over already where there is no device.
            let _ = self.table.events.send(Event::End);
            // A panic has been told of already.
            let _ = thread.join();
        }
    }
}
