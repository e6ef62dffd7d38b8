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

use std::{
    any::Any,
    collections::HashMap,
    sync::{
        Arc, Mutex, Weak,
        mpsc::{Receiver, RecvTimeoutError, Sender, channel},
    },
    thread::{self, JoinHandle},
    time::Duration,
};

use ringsight_kernels::{
    cuda::{
        layout::Shown,
        peers::{SHOWN, mapped_offset, mapping_offset},
    },
    launch::Peers,
};

use super::lock;
use crate::{
    checks::{Post, wire},
    device::{self, Device, Reached},
    error::{Error, Result, ResultCode},
    log,
};

/// How often a rank looks whether what it has shown is still there, and tries again to map what it could not.
const SWEEP: Duration = Duration::from_secs(1);
/// How often it tries: what was at an allocation's address before may still be open.
const TRIES: u32 = 30;
/// What messages begin with.
const MAGIC: u32 = 0x5250_414d;

/// What a rank tells one of another process.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Message {
    /// An allocation, by number and generation, and what opens it.
    Show {
        number: u32,
        generation: u32,
        handle: Vec<u8>,
    },
    /// It is gone.
    TakeBack { number: u32, generation: u32 },
}

impl Message {
    fn encode(&self) -> Vec<u8> {
        let (kind, number, generation, handle): (u8, _, _, &[u8]) = match self {
            Self::Show {
                number,
                generation,
                handle,
            } => (0, number, generation, handle),
            Self::TakeBack { number, generation } => (1, number, generation, &[]),
        };
        let mut bytes = MAGIC.to_le_bytes().to_vec();
        bytes.push(kind);
        bytes.extend(number.to_le_bytes());
        bytes.extend(generation.to_le_bytes());
        bytes.extend(handle);
        bytes
    }

    /// `None` for what [`Message::encode`] did not write.
    fn parse(bytes: &[u8]) -> Option<Self> {
        let (kind, mut rest) = wire::open(MAGIC, bytes)?;
        let (number, generation) = (rest.u32()?, rest.u32()?);
        if number as usize >= SHOWN || generation == 0 {
            return None;
        }
        match kind {
            0 => Some(Self::Show {
                number,
                generation,
                handle: rest.0.to_vec(),
            }),
            1 if rest.is_empty() => Some(Self::TakeBack { number, generation }),
            _ => None,
        }
    }
}

/// What the thread that maps hears of.
enum Event {
    /// A rank's message.
    Message(u32, Message),
    /// This rank has shown something, which is to be looked after.
    Shown,
    /// The communicator ends.
    End,
}

/// Where control messages wait for [`Maps`], whether there will be one or not: others may be ready before this rank is.
pub(super) struct Inbox {
    sender: Sender<Event>,
    receiver: Receiver<Event>,
}

/// The end of it that messages go in at.
#[derive(Clone)]
pub(super) struct Letters(Sender<Event>);

impl Inbox {
    pub(super) fn new() -> Self {
        let (sender, receiver) = channel();
        Self { sender, receiver }
    }

    pub(super) fn letters(&self) -> Letters {
        Letters(self.sender.clone())
    }
}

impl Letters {
    /// A control message has come.
    pub(super) fn control(&self, from: u32, bytes: &[u8]) {
        if let Some(message) = Message::parse(bytes) {
            // Nobody is there where all ranks are of one process, or in the end.
            let _ = self.0.send(Event::Message(from, message));
        }
    }
}

/// What has been mapped, by rank and number.
pub(super) type Mapped = Mutex<HashMap<(u32, u32), Box<dyn Any + Send + Sync>>>;

/// An allocation that was shown.
#[derive(Clone, Copy, Debug)]
struct Entry {
    /// As the driver numbers it.
    id: u64,
    start: usize,
}

/// What this rank has shown.
struct Own {
    /// By number; `None` where there is room.
    entries: Vec<Option<Entry>>,
    /// Of the present entry, or the last one.
    generations: Vec<u32>,
    by_id: HashMap<u64, u32>,
}

/// What the caller's threads and the one that maps share.
struct Table {
    device: i32,
    rank: u32,
    bases: Vec<u64>,
    /// By bit.
    foreign: u8,
    /// As long as there are launches.
    mapped: Weak<Mapped>,
    post: Post,
    /// What operations use that are captured is shown, whether it is registered or not.
    of_captured: bool,
    /// And what all others use.
    of_all: bool,
    own: Mutex<Own>,
    events: Sender<Event>,
}

/// What another rank has shown.
struct Offer {
    from: u32,
    number: u32,
    generation: u32,
    handle: Vec<u8>,
    tries: u32,
}

/// What one rank shows and maps. [`Maps::stop`] ends it.
pub(crate) struct Maps {
    table: Arc<Table>,
    thread: Mutex<Option<JoinHandle<()>>>,
}

impl Table {
    fn others(&self) -> impl Iterator<Item = u32> {
        let foreign = self.foreign;
        (0..8).filter(move |rank| foreign >> rank & 1 == 1)
    }

    /// What a buffer is in, shown to all who are to map it; `None` if it cannot be, or there are too many, or it has not been and is not to
    /// be.
    fn show(&self, device: &dyn Device, address: usize, bytes: usize, may_be_new: bool) -> Option<Shown> {
        let allocation = device.allocation(address, bytes, self.device)?;
        let mut own = lock(&self.own);
        if let Some(number) = own.by_id.get(&allocation.id) {
            return Some(Shown {
                start: allocation.start as u64,
                generation: own.generations[*number as usize],
                number: *number,
            });
        }
        if !may_be_new {
            return None;
        }
        self.sweep(device, &mut own);
        let number = own.entries.iter().position(Option::is_none)?;
        let handle = match device.export(allocation.start) {
            Ok(handle) => handle,
            Err(error) => {
                tracing::info!(target: log::INIT, "Memory at {:#x} stays closed to other processes: {error}", allocation.start);
                return None;
            }
        };
        own.entries[number] = Some(Entry {
            id: allocation.id,
            start: allocation.start,
        });
        own.by_id.insert(allocation.id, number as u32);
        // Never 0, which says that nothing was shown.
        own.generations[number] = own.generations[number].wrapping_add(1).max(1);
        let shown = Shown {
            start: allocation.start as u64,
            generation: own.generations[number],
            number: number as u32,
        };
        let message = Message::Show {
            number: shown.number,
            generation: shown.generation,
            handle,
        };
        // Under the lock: what is shown under a number and what is taken back arrive in this order.
        self.tell(&message);
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
            let Some(entry) = own.entries[number] else {
                continue;
            };
            let here = device.allocation(entry.start, 1, self.device);
            if here.is_some_and(|here| here.id == entry.id) {
                continue;
            }
            own.entries[number] = None;
            own.by_id.remove(&entry.id);
            self.tell(&Message::TakeBack {
                number: number as u32,
                generation: own.generations[number],
            });
        }
    }

    /// Maps what another rank has shown, and says so where its kernels look.
    fn map(&self, device: &dyn Device, offer: &Offer) -> Result<()> {
        let (from, number, generation) = (offer.from, offer.number, offer.generation);
        let Some(mapped) = self.mapped.upgrade() else {
            return Ok(());
        };
        let ranks = self.bases.len();
        let Reached { base, memory, .. } = device.reach_share(&offer.handle)?;
        let mut bytes = base.to_le_bytes().to_vec();
        bytes.extend(u64::from(generation).to_le_bytes());
        // Where it is before that it is: each call returns when that is done.
        device.write_share(
            self.bases[self.rank as usize] + mapping_offset(ranks, from, number) as u64,
            &bytes,
        )?;
        lock(&mapped).insert((from, number), memory);
        device.write_share(
            self.bases[from as usize] + mapped_offset(ranks, self.rank, number) as u64,
            &generation.to_le_bytes(),
        )?;
        tracing::info!(target: log::INIT, "Mapped memory {number} (generation {generation}) of rank {from}");
        Ok(())
    }

    /// Maps it, or keeps it for later.
    fn try_to_map(&self, device: &dyn Device, mut offer: Offer, pending: &mut Vec<Offer>) {
        let Err(error) = self.map(device, &offer) else {
            return;
        };
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
                handle,
            } => {
                let offer = Offer {
                    from,
                    number,
                    generation,
                    handle,
                    tries: 0,
                };
                self.try_to_map(device, offer, pending);
            }
            Message::TakeBack { number, .. } => {
                pending.retain(|offer| (offer.from, offer.number) != (from, number));
                if let Some(mapped) = self.mapped.upgrade() {
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
            let event = if pending.is_empty() && lock(&self.own).by_id.is_empty() {
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

impl Maps {
    /// Of a communicator with ranks of other processes.
    ///
    /// # Errors
    /// No thread could be had.
    pub(super) fn new(
        device: i32,
        peers: &Peers,
        mapped: &Arc<Mapped>,
        post: Post,
        inbox: Inbox,
    ) -> Result<Self> {
        let table = Arc::new(Table {
            device,
            rank: peers.rank,
            bases: peers.bases.clone(),
            foreign: peers.foreign,
            mapped: Arc::downgrade(mapped),
            post,
            of_captured: crate::env::text("NCCL_GRAPH_REGISTER").is_none_or(|value| value != "0"),
            of_all: crate::env::text("RINGSIGHT_MAP_BUFFERS").is_some_and(|value| value != "0"),
            own: Mutex::new(Own {
                entries: vec![None; SHOWN],
                generations: vec![0; SHOWN],
                by_id: HashMap::new(),
            }),
            events: inbox.sender,
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
            thread: Mutex::new(Some(thread)),
        })
    }

    /// What a buffer of an operation is in, shown to all ranks of other processes; `None` if it is not.
    pub(crate) fn of_operation(
        &self,
        device: &dyn Device,
        (address, bytes): (usize, usize),
        captured: bool,
    ) -> Option<Shown> {
        let may_be_new = self.table.of_all || captured && self.table.of_captured;
        self.table.show(device, address, bytes, may_be_new)
    }

    /// Shows what a buffer is in that the caller has registered, if that can be.
    pub(super) fn register(&self, device: &dyn Device, address: usize, bytes: usize) {
        self.table.show(device, address, bytes, true);
    }

    /// The communicator ends: nothing is mapped any more.
    pub(super) fn stop(&self) {
        let thread = lock(&self.thread).take();
        if let Some(thread) = thread {
            // It is over already where there is no device.
            let _ = self.table.events.send(Event::End);
            // A panic has been told of already.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_survive_the_way_and_rubbish_is_none() {
        let show = Message::Show {
            number: 7,
            generation: 3,
            handle: vec![1, 2, 3],
        };
        let back = Message::TakeBack {
            number: 255,
            generation: u32::MAX,
        };
        for message in [show, back.clone()] {
            assert_eq!(Message::parse(&message.encode()), Some(message));
        }
        let bytes = back.encode();
        assert_eq!(Message::parse(&bytes[..bytes.len() - 1]), None);
        assert_eq!(Message::parse(&[&bytes[..], &[0]].concat()), None);
        let beyond = Message::TakeBack {
            number: SHOWN as u32,
            generation: 1,
        };
        assert_eq!(Message::parse(&beyond.encode()), None);
        let never = Message::TakeBack {
            number: 0,
            generation: 0,
        };
        assert_eq!(Message::parse(&never.encode()), None);
    }
}
