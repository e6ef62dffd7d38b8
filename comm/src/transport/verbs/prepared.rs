//! An end of a connection until both are connected: what it is made of, what the peer is told, and over which paths they begin.

use std::{ptr, sync::Arc};

use ringsight_kernels::{
    Fifo,
    fifo::{SLOTS, SLOTS_OFFSET},
};
use ringsight_verbs::{
    endpoint::{Control, Failover, Path, Peer, Slots},
    memory::Memory,
    wire::{Offer, PathOffer},
};

use super::{Rdma, backup_of};
use crate::{bootstrap::sys, log, transport::direct};

/// An end that is made and not connected.
pub(crate) struct Prepared {
    paths: Vec<Path>,
    control: Control,
    /// What the peer is told.
    pub(crate) offer: Offer,
    failover: Failover,
    direct: Option<Arc<direct::Slots>>,
    /// Number of the port among those of the process.
    pub(crate) port: u8,
}

/// An end that is connected.
pub(crate) struct Connected {
    pub(super) paths: Vec<Path>,
    pub(super) control: Control,
    pub(super) failover: Failover,
    /// Its slots in the memory of the GPU, where they are there.
    pub(crate) direct: Option<Arc<direct::Slots>>,
    /// Number of the port among those of the process.
    pub(crate) port: u8,
    /// Its one path is that of its backup.
    pub(super) is_backup_alone: bool,
}

impl Connected {
    /// Whether it survives a path, and so finds out by itself whether its peer answers.
    pub(crate) fn survives(&self) -> bool {
        self.failover.settings.enabled
    }
}

/// The slots of a FIFO, as devices write them. What is before them is for this machine alone.
pub(super) fn slots_of(fifo: &Arc<Fifo>) -> (Memory, Slots) {
    let base = ptr::with_exposed_provenance_mut(fifo.halves().consumer as usize + SLOTS_OFFSET);
    let slot_bytes = fifo.slot_bytes();
    // SAFETY: the FIFO keeps its memory mapped, and is kept; slots are only ever read and written through pointers.
    let memory = unsafe { Memory::new(base, SLOTS * slot_bytes, Arc::clone(fifo) as _) };
    let slots = Slots {
        offset: 0,
        bytes: slot_bytes,
    };
    (memory, slots)
}

/// Makes an end for a connection over port number `port`, and its backup: queue pairs on another port, where all the memory is
/// registered, too. That there is none is no error, nor that there is nothing else. Its slots are those of the FIFO, or `direct`, where the
/// devices take them.
///
/// # Errors
/// What stands in the way on either: the port is down, has no GID as wished for, memory cannot be locked, ….
pub(crate) fn prepare(
    rdma: &Rdma,
    port: usize,
    (fifo, direct): (&Arc<Fifo>, Option<&Arc<direct::Slots>>),
    is_receiver: bool,
) -> Result<Prepared, String> {
    let direct = direct.and_then(|slots| Some((slots, slots.register(&rdma.net, port, is_receiver)?)));
    let memory = match &direct {
        Some((_, (memory, _))) => memory.clone(),
        None => slots_of(fifo).0,
    };
    let control = Control::new().map_err(|error| format!("making a control page: {error}"))?;
    // The first packet number is no secret: it keeps packets of an earlier pair of queue pairs out.
    let draw = || sys::random_u64().unwrap_or(0) as u32;
    let backup = backup_of(&rdma.net, port);
    let make = |index: usize, port: usize| -> Result<Path, String> {
        // Of two ports one need not be up yet: it joins when it is.
        let port = match backup {
            None => rdma.net.open(port),
            Some(_) => rdma.net.standby(port),
        };
        let port = port.map_err(|error| error.to_string())?;
        Path::new(
            index,
            port,
            (&memory, is_receiver),
            &control,
            &rdma.port_health,
            draw,
        )
        .map(|path| path.with_class(rdma.class))
        .map_err(|error| error.to_string())
    };
    let (mut paths, mut ports) = (Vec::new(), Vec::new());
    let mut missing = None;
    for (index, port) in [Some(port), backup].into_iter().flatten().enumerate() {
        match (make(paths.len(), port), &missing) {
            (Ok(path), _) => {
                paths.push(path);
                ports.push(port);
            }
            (Err(why), None) if index == 0 => missing = Some(why),
            (Err(why), Some(first)) => return Err(format!("{first}; its backup: {why}")),
            (Err(why), None) => {
                tracing::info!(target: log::NET, "NET/IB : no backup of port {}: {why}", ports[0]);
            }
        }
    }
    let is_alone = missing.is_some();
    match missing {
        Some(why) if paths.is_empty() => return Err(why),
        Some(why) => {
            tracing::warn!(target: log::NET, "NET/IB : a connection has its backup alone, not port {port}: {why}");
        }
        None => {}
    }
    let in_use = ports[0] as u8;
    let failover = Failover::new(&rdma.port_health, Some(&rdma.net), ports);
    let failover = match rdma.net.config().failover {
        true => failover,
        false => failover.disabled(),
    };
    let offer = Offer {
        failover: rdma.net.config().failover,
        number: port as u8,
        first: u8::from(is_alone),
        slots: if is_receiver { memory.address() } else { 0 },
        control: control.memory().address(),
        paths: paths.iter().map(Path::offer).collect(),
    };
    Ok(Prepared {
        paths,
        control,
        offer,
        failover,
        direct: direct.map(|(slots, _)| Arc::clone(slots)),
        port: in_use,
    })
}

/// Why a path cannot be used: which of its ports is down.
fn down(own: &PathOffer, other: &PathOffer) -> String {
    match own.up {
        false => format!("port {}:{} is down", own.device, own.port),
        true => format!(
            "the peer's port {}:{} is down, or could not be connected",
            other.device, other.port
        ),
    }
}

impl Prepared {
    /// The receiver's end: connects it to the sender's. What the sender is told then: a path that could not be connected is as one
    /// whose port is down, and both begin on the first that could.
    ///
    /// # Errors
    /// The two do not fit, or the peer cannot be reached over any path.
    pub(crate) fn accept(mut self, peer: &Offer) -> Result<(Connected, Offer), String> {
        let peer = &self.align(peer)?;
        let results = self.connect_paths(peer);
        for (offer, result) in self.offer.paths.iter_mut().zip(&results) {
            offer.up &= result.is_ok();
        }
        let Some(first) = results.iter().position(Result::is_ok) else {
            return Err(first_error(results));
        };
        tell_missing(first, results);
        let offer = self.offer.clone();
        Ok((self.finish(peer), offer))
    }

    /// The sender's end: connects it to the receiver's, which is connected. Of a path that the receiver has connected and that cannot be
    /// here the ends agree afterwards, over another one: that it failed, so that the receiver makes its end anew.
    ///
    /// # Errors
    /// The two do not fit, or the peer cannot be reached over any path.
    pub(crate) fn connect(mut self, peer: &Offer) -> Result<Connected, String> {
        let peer = &self.align(peer)?;
        let first = (0..self.paths.len().min(peer.paths.len()))
            .find(|index| self.is_up(peer, *index))
            .ok_or_else(|| down(&self.offer.paths[0], &peer.paths[0]))?;
        let results = self.connect_paths(peer);
        let survives = self.offer.failover && peer.failover;
        if results[first].is_err() && (!survives || results.iter().all(Result::is_err)) {
            return Err(first_error(results));
        }
        for (index, result) in results.iter().enumerate() {
            if result.is_err() && self.is_up(peer, index) {
                self.paths[index].presume_failed();
            }
        }
        let begins = results.iter().position(Result::is_ok);
        tell_missing(begins.unwrap_or(first), results);
        Ok(self.finish(peer))
    }

    /// Has the first of its paths be that which goes with the peer's first: where one end has its backup alone, so has the other. The
    /// peer's offer, from the same path on.
    fn align(&mut self, peer: &Offer) -> Result<Offer, String> {
        let first = self.offer.first.max(peer.first);
        let [own, others] = [self.offer.first, peer.first].map(|from| usize::from(first - from));
        if own >= self.paths.len() || others >= peer.paths.len() {
            return Err("one end has its backup alone, and the other has none".to_owned());
        }
        let mut peer = peer.clone();
        peer.paths.drain(..others);
        if own > 0 {
            tracing::warn!(target: log::NET, "NET/IB : a connection has its backup alone: the peer cannot use its port");
            self.paths.drain(..own);
            self.offer.paths.drain(..own);
            self.failover.ports.drain(..own);
            self.port = self.failover.ports[0] as u8;
            for (index, path) in self.paths.iter_mut().enumerate() {
                path.renumber(index).map_err(|error| error.to_string())?;
            }
        }
        self.offer.first = first;
        Ok(peer)
    }

    /// Whether both ends have told that a path's ports are up: by that, so that they begin on the same one.
    fn is_up(&self, peer: &Offer, index: usize) -> bool {
        self.offer.paths[index].up && peer.paths[index].up
    }

    /// Connects the paths that both ends have and whose ports are up; by path, why not.
    fn connect_paths(&mut self, peer: &Offer) -> Vec<Result<(), String>> {
        let both = self.paths.len().min(peer.paths.len());
        let up: Vec<bool> = (0..both).map(|index| self.is_up(peer, index)).collect();
        let mut results = Vec::with_capacity(both);
        for (index, (path, other)) in self.paths.iter_mut().zip(&peer.paths).enumerate() {
            if path.port().mtu() != other.mtu {
                tracing::info!(
                    target: log::NET,
                    "NET/IB : {} has an MTU of {} bytes, the peer's {} one of {}: the smaller is used",
                    path.port().device(), path.port().mtu().bytes(), other.device, other.mtu.bytes()
                );
            }
            let end = Peer {
                slots: peer.slots,
                control: peer.control,
                path: other.clone(),
            };
            results.push(match up[index] {
                true => path.connect(end).map_err(|error| error.to_string()),
                false => path
                    .set_peer(end)
                    .map_err(|error| error.to_string())
                    .and_then(|()| Err(down(&self.offer.paths[index], other))),
            });
        }
        results
    }

    /// The end, connected.
    fn finish(self, peer: &Offer) -> Connected {
        let Self {
            mut paths,
            control,
            mut failover,
            direct,
            port,
            offer,
        } = self;
        if !peer.failover {
            failover = failover.disabled();
        }
        paths.truncate(peer.paths.len());
        failover.ports.truncate(paths.len());
        Connected {
            paths,
            control,
            failover,
            direct,
            port,
            is_backup_alone: offer.first > 0,
        }
    }
}

/// Why no path could be connected: what was wrong with the first.
fn first_error(results: Vec<Result<(), String>>) -> String {
    let mut errors = results.into_iter().filter_map(Result::err);
    errors.next().unwrap_or_else(|| "there is no path".to_owned())
}

/// Tells which paths are missing of a connection that begins on path number `first`.
fn tell_missing(first: usize, results: Vec<Result<(), String>>) {
    for (index, result) in results.into_iter().enumerate() {
        let Err(why) = result else { continue };
        if index < first {
            tracing::warn!(target: log::NET, "NET/IB : a connection begins on its backup: {why}");
        } else {
            tracing::warn!(target: log::NET, "NET/IB : a connection has no backup yet: {why}");
        }
    }
}
