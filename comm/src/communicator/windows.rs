//! Windows: buffers that all ranks register together, so that copy engines can move collectives.
//!
//! When ranks register a window with `NCCL_WIN_COLL_SYMMETRIC`, they exchange the addresses of their parts. Each rank finds the address by which it
//! reaches every other part: the same address within its process, the address of an import ([`crate::buffer_exchange`]) for other processes. If all
//! ranks reach all parts, copy engines can do a collective whose receive buffer is in the window. The flag promises that the buffer is at the same
//! offset on all ranks. The offset is part of the operation's tag, so a rank that breaks the promise is found.
//!
//! A window keeps its imports while it is registered, and until launches that use it are over. Programs ask for the addresses of the parts, too
//! ([`WindowPointers`]).

use std::{
    any::Any,
    sync::{
        Arc, Mutex, OnceLock,
        atomic::{AtomicU32, AtomicUsize, Ordering},
    },
    time::Duration,
};

use ringsight_comm_base::{
    error::{Error, Result},
    log,
    sync::lock,
};
use ringsight_kernels::{
    ExportedBuffer,
    launch::{PeerMemory, Scratch, Window},
};
use ringsight_records::Function;

use super::{Communicator, peer_memory::devices_near};
use crate::{
    checks::wire::Rest,
    device::{self, Device},
    op::{Request, WindowBuffer},
};

/// How long a rank waits until it has imported another rank's part.
const PATIENCE: Duration = Duration::from_secs(5);

/// See [`crate::device::Sharing::copy_engine`].
type CopyEngine = Arc<dyn Any + Send + Sync>;

/// The windows of a communicator.
pub(crate) struct Windows {
    /// All ranks have agreed that copy engines may do operations.
    for_copy_engines: bool,
    /// Windows registered so far.
    joined: AtomicU32,
    /// The windows that are registered now, in the order of their numbers.
    all: Mutex<Vec<Joined>>,
    /// Symmetric ones of `all`, for threads that only ask whether there is any.
    count: AtomicUsize,
    /// Made with the first window that copy engines can use.
    copy_engine: OnceLock<CopyEngine>,
    /// Made with the first window that is long enough for reductions; `None` if some rank could not have the memory.
    pub(super) scratch: OnceLock<Option<Arc<Scratch>>>,
}

/// This rank's part of a window that is being registered.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Part {
    /// Handle of the window.
    pub(crate) handle: usize,
    /// Handle of the registration of its buffer, which several windows may share.
    pub(crate) registration: usize,
    /// Its address.
    pub(crate) address: usize,
    /// Its length.
    pub(crate) bytes: usize,
    /// The caller promises that operations use the same offset in it on all ranks.
    pub(crate) is_symmetric: bool,
}

/// The first handle of a window, and the distance of handles: as of communicators.
const FIRST: usize = 0x5255_0000_0000;
const STEP: usize = 0x10;
static GIVEN: AtomicUsize = AtomicUsize::new(0);

/// A window of this process.
struct Joined {
    part: Part,
    number: u32,
    /// The length of the shortest part of any rank.
    bytes: usize,
    /// Where this rank reaches all ranks' parts, or why not all ranks do.
    reached: std::result::Result<Reached, String>,
    /// For copy engines, if all ranks reach all parts and these are long enough.
    window: Option<Arc<Window>>,
}

/// The parts of all ranks, by rank.
#[derive(Clone)]
struct Reached {
    addresses: Arc<[u64]>,
    /// Keeps imports of other processes' memory.
    memory: Vec<Arc<dyn Any + Send + Sync>>,
}

/// What a program may ask of a window.
pub(crate) struct WindowPointers {
    /// What this rank registered.
    pub(crate) own: usize,
    /// Bytes of the shortest part of any rank.
    pub(crate) bytes: usize,
    /// The address of each rank's part for this rank, by rank; or why there are none.
    pub(crate) addresses: std::result::Result<Arc<[u64]>, String>,
}

/// Address, length and export of a rank's part, or why copy engines cannot use it.
type Offer = std::result::Result<(u64, u64, ExportedBuffer), String>;

/// 1 and the numbers, or 0 and the reason.
fn encode(offer: &Offer) -> Vec<u8> {
    let mut bytes = vec![u8::from(offer.is_ok())];
    match offer {
        Ok((address, length, export)) => {
            for number in [*address, *length, export.start] {
                bytes.extend(number.to_le_bytes());
            }
            bytes.extend(export.generation.to_le_bytes());
            bytes.extend(export.number.to_le_bytes());
        }
        Err(why) => bytes.extend(why.as_bytes()),
    }
    bytes
}

fn parse(bytes: &[u8]) -> Offer {
    let numbers = |bytes| {
        let mut rest = Rest(bytes);
        let (address, length, start) = (rest.u64()?, rest.u64()?, rest.u64()?);
        let (generation, number) = (rest.u32()?, rest.u32()?);
        let export = ExportedBuffer {
            start,
            generation,
            number,
        };
        // A part lies within its exported buffer.
        let is_within = generation == 0 || address >= start;
        (rest.is_empty() && is_within).then_some((address, length, export))
    };
    match bytes {
        [0, why @ ..] => {
            let why = String::from_utf8_lossy(why);
            Err(why.chars().filter(|char| !char.is_control()).take(300).collect())
        }
        [1, rest @ ..] => numbers(rest).ok_or_else(|| "an answer that cannot be read".to_owned()),
        _ => Err("an answer that cannot be read".to_owned()),
    }
}

/// Where a part lies within the exported buffer that it is in, of which `bytes` bytes were imported.
fn within_import(
    export: &ExportedBuffer,
    (address, length): (u64, u64),
    bytes: u64,
) -> std::result::Result<u64, String> {
    let offset = address.checked_sub(export.start);
    let end = offset.and_then(|offset| offset.checked_add(length));
    match (offset, end) {
        (Some(offset), Some(end)) if end <= bytes => Ok(offset),
        _ => Err(format!(
            "it does not lie within the {bytes} bytes that were mapped: {length} bytes at {address:#x}, which begin at {:#x}",
            export.start
        )),
    }
}

impl Windows {
    pub(super) fn new(for_copy_engines: bool) -> Self {
        Self {
            for_copy_engines,
            joined: AtomicU32::new(0),
            all: Mutex::default(),
            count: AtomicUsize::new(0),
            copy_engine: OnceLock::new(),
            scratch: OnceLock::new(),
        }
    }

    /// Number of the next window; the same on all ranks, since all register the same windows in the same order.
    fn next(&self) -> u32 {
        // Relaxed: calls on one communicator come one after another.
        self.joined.fetch_add(1, Ordering::Relaxed) & (u32::MAX >> 1)
    }

    fn add(&self, joined: Joined) {
        let mut all = lock(&self.all);
        all.push(joined);
        self.recount(&all);
    }

    fn recount(&self, all: &[Joined]) {
        let symmetric = all.iter().filter(|joined| joined.part.is_symmetric).count();
        // Relaxed: stored under the lock. A thread that reads it without the lock is not ordered with this one.
        self.count.store(symmetric, Ordering::Relaxed);
    }

    /// Removes a window. Returns the handle of its registration; `None` if there is no such window.
    fn remove(&self, handle: usize) -> Option<usize> {
        let mut all = lock(&self.all);
        let place = all.iter().position(|joined| joined.part.handle == handle)?;
        let gone = all.remove(place);
        self.recount(&all);
        drop(all);
        // `gone` is dropped without the lock: that may call the device.
        Some(gone.part.registration)
    }

    /// The first window that a buffer is in.
    fn find(&self, address: usize, bytes: usize) -> Option<WindowBuffer> {
        // Relaxed: see `add`.
        if self.count.load(Ordering::Relaxed) == 0 {
            return None;
        }
        let all = lock(&self.all);
        all.iter()
            .filter(|joined| joined.part.is_symmetric)
            .find_map(|joined| {
                let offset = address.checked_sub(joined.part.address)?;
                let is_within = offset.checked_add(bytes)? <= joined.bytes;
                is_within.then(|| WindowBuffer {
                    number: joined.number,
                    offset: offset as u64,
                    window: joined.window.clone(),
                })
            })
    }
}

impl Communicator {
    /// The window of an operation's receive buffer (of a reduce_scatter, of its send buffer), if copy engines could do the operation.
    pub(crate) fn window_of(&self, request: &Request) -> Option<WindowBuffer> {
        if !self.windows.for_copy_engines {
            return None;
        }
        let [(send, sent), (recv, received)] = request.buffers(self.ranks);
        if (sent.max(received) as u64)
            < self
                .launch
                .capabilities
                .limits
                .copy_engine_bytes_of(request.function, self.ranks)
        {
            return None;
        }
        let overlap = send < recv.saturating_add(received) && recv < send.saturating_add(sent);
        // In place, other ranks would overwrite data that this rank has not sent yet. In an all_gather in place each rank sends its own block, which
        // nobody overwrites; a reduction in place has sent its data before.
        if request.function == Function::AlltoAll && overlap {
            return None;
        }
        // The buffer that is at the same offset on all ranks. In a reduce_scatter in place the receive buffer is not.
        let (address, bytes) = if request.function == Function::ReduceScatter {
            (send, sent)
        } else {
            (recv, received)
        };
        self.windows.find(address, bytes)
    }

    /// Waits until every rank has registered its part of the next window, and finds out whether copy engines can use it. A rank whose part was
    /// refused takes part, too, with the reason, since the others wait for it.
    ///
    /// # Errors
    /// A rank that is gone or does not come, or an abort.
    pub(crate) fn join_window(&self, part: std::result::Result<Part, &str>) -> Result<()> {
        let number = self.windows.next();
        let offer = match &part {
            Ok(part) => self.offer(part),
            Err(why) => Err((*why).to_owned()),
        };
        let offers = self.meet_for_window(number, &encode(&offer))?;
        let offers: Vec<Offer> = offers.iter().map(|bytes| parse(bytes)).collect();
        let bytes = offers.iter().flatten().map(|(_, bytes, _)| *bytes).min();
        let bytes = bytes.unwrap_or(0);
        let least = self
            .launch
            .capabilities
            .limits
            .least_copy_engine_bytes(self.ranks);
        let reached = match self.first_of(offers.iter().map(|offer| offer.as_ref().err())) {
            Some(why) => Err(why),
            None => {
                let reached = self.reach(&offers);
                // No rank uses it before all ranks reach all parts. If one does not, none uses it.
                let answer = reached.as_ref().map(|_| &[][..]).map_err(String::as_str);
                self.agree_for_window(number, answer)?.and(reached)
            }
        };
        let for_copies = match &reached {
            Err(why) => Err(why.clone()),
            Ok(_) if !self.windows.for_copy_engines || self.launch.peers.is_none() => {
                Err("they are off".to_owned())
            }
            // No operation in it would be long enough.
            Ok(_) if bytes < least => Err(format!("it has {bytes} bytes, they are for at least {least}")),
            Ok(reached) => self.window_for_copies(number, bytes, reached)?,
        };
        match &for_copies {
            Ok(_) => {
                tracing::info!(target: log::INIT, "Window {number}: copy engines reach all ranks' parts");
            }
            Err(why) => {
                tracing::info!(target: log::INIT, "Window {number} is not for copy engines: {why}");
            }
        }
        if let Ok(part) = part {
            self.windows.add(Joined {
                part,
                number,
                bytes: usize::try_from(bytes).unwrap_or(usize::MAX),
                reached,
                window: for_copies.ok(),
            });
        }
        Ok(())
    }

    /// The window for copy engines; all ranks have one, or none.
    fn window_for_copies(
        &self,
        number: u32,
        bytes: u64,
        reached: &Reached,
    ) -> Result<std::result::Result<Arc<Window>, String>> {
        let copy_engine = self.copy_engine();
        let answer = copy_engine.as_ref().map(|_| &[][..]).map_err(String::as_str);
        let agreed = self.agree_for_window(number, answer)?;
        let copy_engine = match agreed.and(copy_engine) {
            Ok(copy_engine) => copy_engine,
            Err(why) => return Ok(Err(why)),
        };
        let peers = self.launch.peers.clone();
        let peers = peers.ok_or_else(|| Error::internal("parts are reached without peers"))?;
        Ok(Ok(Arc::new(Window {
            peers,
            addresses: reached.addresses.to_vec(),
            scratch: self.scratch(number, bytes)?,
            copy_engine,
            memory: reached.memory.clone(),
        })))
    }

    /// The first rank's reason, if any has one.
    fn first_of<'a>(&self, reasons: impl Iterator<Item = Option<&'a String>>) -> Option<String> {
        let mut ranks = reasons.enumerate();
        ranks.find_map(|(rank, why)| Some(format!("rank {rank}: {}", why?)))
    }

    /// Gathers bytes of every rank, once all have come.
    fn meet_for_window(&self, number: u32, mine: &[u8]) -> Result<Vec<Vec<u8>>> {
        /// Tells tags of windows from tags of splits.
        const WINDOW: u32 = 1 << 31;
        let everyone: Vec<u32> = (0..self.ranks).collect();
        let all = self.bootstrap.gather_among(&everyone, WINDOW | number, mine);
        all.map_err(|error| {
            Error::from(error).within("waiting for all ranks to register their part of the window")
        })
    }

    /// Gathers the result of a step from every rank. Returns all results, or the reason of the first rank that failed.
    ///
    /// # Errors
    /// A rank that is gone or does not come, or an abort.
    pub(super) fn agree_for_window(
        &self,
        number: u32,
        mine: std::result::Result<&[u8], &str>,
    ) -> Result<std::result::Result<Vec<Vec<u8>>, String>> {
        let said = match mine {
            Ok(bytes) => [&[1], bytes].concat(),
            Err(why) => encode(&Err(why.to_owned())),
        };
        let all = self.meet_for_window(number, &said)?;
        let all: Vec<_> = all
            .into_iter()
            .map(|mut said| match said.first() {
                Some(1) => Ok(said.split_off(1)),
                _ => Err(parse(&said).err().unwrap_or_default()),
            })
            .collect();
        let why = self.first_of(all.iter().map(|said| said.as_ref().err()));
        Ok(why.map_or_else(|| Ok(all.into_iter().flatten().collect()), Err))
    }

    /// This rank's offer for its part.
    fn offer(&self, part: &Part) -> Offer {
        if !part.is_symmetric {
            return Err("registered without NCCL_WIN_COLL_SYMMETRIC".into());
        }
        let Some(peers) = &self.launch.peers else {
            let is_open = device::opened().is_some_and(|device| device.shares_addresses());
            return is_open
                .then_some((part.address as u64, part.bytes as u64, ExportedBuffer::default()))
                .ok_or_else(|| "ranks do not reach each other's memory".into());
        };
        let export = self.on_device(|device| Ok(self.export(device, peers, part)));
        let export = export.map_err(|error| error.text).and_then(|export| {
            export.ok_or_else(|| format!("memory at {:#x} is closed to other ranks", part.address))
        });
        export.map(|export| (part.address as u64, part.bytes as u64, export))
    }

    /// The export of the buffer that this rank's part is in; `None` if some rank cannot reach it.
    fn export(&self, device: &dyn Device, peers: &PeerMemory, part: &Part) -> Option<ExportedBuffer> {
        let buffer = (part.address, part.bytes);
        if peers.foreign != 0 {
            return self
                .launch
                .buffer_exchange
                .as_ref()?
                .export_for_operation(device, buffer, false);
        }
        let near = devices_near(&self.topology, peers);
        let is_open = device.allocation(buffer.0, buffer.1, self.device).is_some()
            || device
                .vmm_chunks(buffer.0, buffer.1, self.device, &near)
                .is_some();
        is_open.then(ExportedBuffer::default)
    }

    /// Finds the addresses by which this rank reaches all parts.
    fn reach(&self, offers: &[Offer]) -> std::result::Result<Reached, String> {
        let none = || "ranks do not reach each other's memory".to_owned();
        let Some(peers) = &self.launch.peers else {
            return self.reach_within_process(offers);
        };
        let (mut addresses, mut memory) = (Vec::new(), Vec::new());
        for (rank, offer) in (0..).zip(offers) {
            let (address, length, export) = offer.clone()?;
            if !peers.is_foreign(rank) {
                addresses.push(address);
                continue;
            }
            let exchange = self.launch.buffer_exchange.as_ref().ok_or_else(none)?;
            let import = exchange
                .wait_for_import(rank, (export.number, export.generation), PATIENCE, || {
                    self.check_usable().is_err()
                })
                .map_err(|why| format!("the part of rank {rank}: {why}"))?;
            let within = within_import(&export, (address, length), import.bytes);
            addresses.push(import.base + within.map_err(|why| format!("the part of rank {rank}: {why}"))?);
            memory.push(import as Arc<dyn Any + Send + Sync>);
        }
        Ok(Reached {
            addresses: addresses.into(),
            memory,
        })
    }

    /// As [`Communicator::reach`], where only ranks of one process reach each other's memory.
    fn reach_within_process(&self, offers: &[Offer]) -> std::result::Result<Reached, String> {
        let process = |rank| {
            let info = self.topology.info(rank);
            (info.host_hash, info.pid, info.process_start_time)
        };
        let addresses = (0..).zip(offers).map(|(rank, offer)| {
            let (address, ..) = offer.clone()?;
            let is_here = process(rank) == process(self.rank);
            is_here
                .then_some(address)
                .ok_or_else(|| format!("rank {rank} is another process, and shares no memory"))
        });
        Ok(Reached {
            addresses: addresses.collect::<std::result::Result<_, _>>()?,
            memory: Vec::new(),
        })
    }

    /// What queues this communicator's copies beside callers' streams. Each communicator has its own, so that no copy waits behind another
    /// communicator's copies.
    fn copy_engine(&self) -> std::result::Result<CopyEngine, String> {
        if let Some(copy_engine) = self.windows.copy_engine.get() {
            return Ok(copy_engine.clone());
        }
        let made = self.on_device(|device| Ok(device.copy_engine()?));
        let made = made.map_err(|error| error.text)?;
        Ok(self.windows.copy_engine.get_or_init(|| made).clone())
    }

    /// A handle for a window that is to be registered.
    pub(crate) fn new_window_handle() -> usize {
        // Relaxed: handles need to differ, they order nothing.
        FIRST + STEP * GIVEN.fetch_add(1, Ordering::Relaxed)
    }

    /// What a program may ask of a window of this communicator, if it is one.
    pub(crate) fn window_pointers(&self, handle: usize) -> Option<WindowPointers> {
        let all = lock(&self.windows.all);
        let joined = all.iter().find(|joined| joined.part.handle == handle)?;
        let addresses = joined.reached.as_ref().map(|reached| reached.addresses.clone());
        Some(WindowPointers {
            own: joined.part.address,
            bytes: joined.bytes,
            addresses: addresses.map_err(Clone::clone),
        })
    }

    /// Deregisters a window.
    ///
    /// # Errors
    /// It is no window of this communicator.
    pub(crate) fn deregister_window(&self, handle: usize) -> Result<()> {
        let registration = self.windows.remove(handle).ok_or_else(|| {
            Error::usage(format!(
                "win ({handle:#x}) is not registered with this communicator, or no longer"
            ))
        })?;
        self.deregister("win", registration)?;
        // Retire finished launches, which would keep it: now, or with the next operation.
        if let Ok(mut planner) = self.planner.try_lock() {
            planner.queue.submitted.drain();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_rank_says_of_its_part_is_understood() {
        let export = ExportedBuffer {
            start: 4096,
            generation: 3,
            number: 7,
        };
        for offer in [Ok((8192, 1 << 40, export)), Err("closed".to_owned())] {
            assert_eq!(parse(&encode(&offer)), offer);
        }
        let bytes = encode(&Ok((8192, 1, export)));
        let before = encode(&Ok((0, 1, export)));
        for rubbish in [
            &bytes[..bytes.len() - 1],
            &[&bytes[..], &[0]].concat(),
            &before,
            &[],
            &[2],
        ] {
            assert!(parse(rubbish).is_err(), "{rubbish:?}");
        }
    }

    #[test]
    fn a_part_beyond_what_was_mapped_is_refused() {
        let export = ExportedBuffer {
            start: 4096,
            generation: 3,
            number: 7,
        };
        let within = |address, length| within_import(&export, (address, length), 0x1000);
        assert_eq!(within(4096, 0x1000), Ok(0));
        assert_eq!(within(4100, 0xffc), Ok(4));
        assert_eq!(within(8192, 0), Ok(0x1000));
        for (address, length) in [
            (4096, 0x1001),
            (8192, 1),
            (4095, 1),
            (4100, u64::MAX),
            (u64::MAX, 1),
            (1 << 40, 8),
        ] {
            let refused = within(address, length).unwrap_err();
            assert!(
                refused.contains("0x1000") || refused.contains("4096 bytes"),
                "{refused}"
            );
        }
    }

    #[test]
    fn a_buffer_is_found_in_the_first_window_that_holds_it() {
        let windows = Windows::new(true);
        assert!(windows.find(0x1000, 1).is_none());
        for (number, handle, address, bytes, is_symmetric) in [
            (0, 1, 0x1000, 0x1000, true),
            (1, 2, 0x1000, 0x3000, true),
            (2, 3, 0x8000, 8, true),
            (3, 4, 0x9000, 8, false),
        ] {
            windows.add(Joined {
                part: Part {
                    handle,
                    registration: 10 + handle,
                    address,
                    bytes,
                    is_symmetric,
                },
                number,
                bytes,
                reached: Err("a test".into()),
                window: None,
            });
        }
        let found = |address, bytes| {
            let found = windows.find(address, bytes);
            found.map(|found| (found.number, found.offset))
        };
        assert_eq!(found(0x1000, 0x1000), Some((0, 0)));
        assert_eq!(found(0x1008, 0x1000), Some((1, 8)));
        assert_eq!(found(0x3ff8, 8), Some((1, 0x2ff8)));
        assert_eq!(
            (found(0x3ff8, 9), found(0xff8, 16), found(0x1008, usize::MAX)),
            (None, None, None)
        );
        // Not reached: no place that ranks must agree on.
        assert_eq!(windows.find(0x1000, 8).unwrap().place(&Request::example()), None);
        assert_eq!(found(0x9000, 8), None, "not symmetric");
        assert_eq!(windows.remove(3), Some(13));
        assert_eq!((found(0x8000, 8), found(0x3ff8, 8)), (None, Some((1, 0x2ff8))));
        assert_eq!((windows.remove(2), windows.remove(2)), (Some(12), None));
        assert_eq!(found(0x3ff8, 8), None);
        assert_eq!(found(0x1000, 8), Some((0, 0)));
    }
}
