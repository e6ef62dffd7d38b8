//! Setting up an end: its paths, its offer to the peer, and the path on which the connection begins.

use std::{io, ptr, sync::Arc};

use ringsight_kernels::{
    Fifo,
    fifo::{SLOTS, SLOTS_OFFSET},
};
use ringsight_verbs::{
    endpoint::{Control, Failover, Path, Peer, Slots},
    error::{ConnectError, Error, PortError},
    memory::Memory,
    wire::{Offer, PathOffer},
};

use ringsight_comm_base::{log, sys};

use crate::transport::{
    gpu_direct,
    rdma::{Rdma, backup_of},
};

/// Why an end cannot use RDMA.
#[derive(Debug, thiserror::Error)]
pub(crate) enum SetupError {
    /// No memory for the control page.
    #[error("making a control page: {0}")]
    Control(io::Error),
    /// The port cannot be used.
    #[error(transparent)]
    Port(#[from] PortError),
    /// A call of the device failed.
    #[error(transparent)]
    Device(Error),
    /// Neither the port nor its backup can be used.
    #[error("{primary}; its backup: {backup}")]
    BothPorts {
        primary: Box<SetupError>,
        backup: Box<SetupError>,
    },
    /// This end's port is down.
    #[error("port {port} is down")]
    PortDown { port: String },
    /// The peer's port is down.
    #[error("the peer's port {port} is down, or could not be connected")]
    PeerPortDown { port: String },
    /// One end has only its backup path, the other only its primary.
    #[error("one end has its backup alone, and the other has none")]
    NoCommonPath,
    /// The ends of a path cannot be connected.
    #[error(transparent)]
    Connect(ConnectError),
    /// The connection has no path.
    #[error("there is no path")]
    NoPath,
}

/// An end that is made and not connected.
pub(crate) struct PreparedEnd {
    paths: Vec<Path>,
    control: Control,
    /// The offer to the peer.
    pub(crate) offer: Offer,
    failover: Failover,
    direct: Option<Arc<gpu_direct::Slots>>,
    /// Index of its port in the process.
    pub(crate) port: u8,
}

/// An end that is connected.
pub(crate) struct ConnectedEnd {
    pub(super) paths: Vec<Path>,
    pub(super) control: Control,
    pub(super) failover: Failover,
    /// Its slots in the memory of the GPU, if they are there.
    pub(crate) direct: Option<Arc<gpu_direct::Slots>>,
    /// Index of its port in the process.
    pub(crate) port: u8,
    /// Its only path uses the backup port.
    pub(super) is_backup_alone: bool,
}

impl ConnectedEnd {
    /// Whether the connection survives a failed path, and therefore detects by itself whether its peer answers.
    pub(crate) fn survives(&self) -> bool {
        self.failover.settings.enabled
    }
}

/// The slots of a FIFO as memory for devices. The part before the slots is not accessible to them.
pub(super) fn slots_of(fifo: &Arc<Fifo>) -> (Memory, Slots) {
    let base = ptr::with_exposed_provenance_mut(fifo.halves().consumer as usize + SLOTS_OFFSET);
    let slot_bytes = fifo.slot_bytes();
    // SAFETY: the FIFO, which is kept, keeps its memory mapped; slots are accessed only through pointers.
    let memory = unsafe { Memory::new(base, SLOTS * slot_bytes, Arc::clone(fifo) as _) };
    let slots = Slots {
        offset: 0,
        bytes: slot_bytes,
    };
    (memory, slots)
}

/// Makes an end of a connection: a path over port `port`, and one over its backup. One of the two is enough. Its slots are `direct`, if
/// the devices can access them, else those of the FIFO.
///
/// # Errors
/// Neither port can be used: it is down, has no suitable GID, memory cannot be locked, ….
pub(crate) fn prepare(
    rdma: &Rdma,
    port: usize,
    (fifo, direct): (&Arc<Fifo>, Option<&Arc<gpu_direct::Slots>>),
    is_receiver: bool,
) -> Result<PreparedEnd, SetupError> {
    let direct = direct.and_then(|slots| Some((slots, slots.register(&rdma.net, port, is_receiver)?)));
    let memory = match &direct {
        Some((_, (memory, _))) => memory.clone(),
        None => slots_of(fifo).0,
    };
    let control = Control::new().map_err(SetupError::Control)?;
    // The first packet number is no secret: it only distinguishes packets of an earlier pair of queue pairs.
    let draw = || sys::random_u64().unwrap_or(0) as u32;
    let backup = backup_of(&rdma.net, port);
    let make = |index: usize, port: usize| -> Result<Path, SetupError> {
        // With a backup a port may be down: its path joins when it is up.
        let port = match backup {
            None => rdma.net.open(port)?,
            Some(_) => rdma.net.standby(port)?,
        };
        Path::new(
            index,
            port,
            (&memory, is_receiver),
            &control,
            &rdma.port_health,
            draw,
        )
        .map(|path| path.with_class(rdma.class))
        .map_err(SetupError::Device)
    };
    let (mut paths, mut ports) = (Vec::new(), Vec::new());
    let mut missing = None;
    for (index, port) in [Some(port), backup].into_iter().flatten().enumerate() {
        match (make(paths.len(), port), missing.take()) {
            (Ok(path), primary) => {
                paths.push(path);
                ports.push(port);
                missing = primary;
            }
            (Err(why), None) if index == 0 => missing = Some(why),
            (Err(why), Some(primary)) => {
                return Err(SetupError::BothPorts {
                    primary: Box::new(primary),
                    backup: Box::new(why),
                });
            }
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
    Ok(PreparedEnd {
        paths,
        control,
        offer,
        failover,
        direct: direct.map(|(slots, _)| Arc::clone(slots)),
        port: in_use,
    })
}

/// The error of a path of which one port is down.
fn port_down(own: &PathOffer, other: &PathOffer) -> SetupError {
    let name = |path: &PathOffer| format!("{}:{}", path.device, path.port);
    match own.up {
        false => SetupError::PortDown { port: name(own) },
        true => SetupError::PeerPortDown { port: name(other) },
    }
}

impl PreparedEnd {
    /// Connects the receiver's end to the sender's offer. Returns the end and the offer for the sender. In that offer the port of a path that
    /// could not be connected is down, so both ends begin on the first path that could.
    ///
    /// # Errors
    /// The two ends do not match, or the peer cannot be reached over any path.
    pub(crate) fn accept(mut self, peer: &Offer) -> Result<(ConnectedEnd, Offer), SetupError> {
        let peer = &self.align(peer)?;
        let results = self.connect_paths(peer);
        for (offer, result) in self.offer.paths.iter_mut().zip(&results) {
            offer.up &= result.is_ok();
        }
        let Some(first) = results.iter().position(Result::is_ok) else {
            return Err(first_error(results));
        };
        log_missing(first, results);
        let offer = self.offer.clone();
        Ok((self.finish(peer), offer))
    }

    /// Connects the sender's end to the receiver's offer, whose paths are connected. If a path cannot be connected here, the ends agree over
    /// another path that it has failed, and the receiver rebuilds its end.
    ///
    /// # Errors
    /// The two ends do not match, or the peer cannot be reached over any path.
    pub(crate) fn connect(mut self, peer: &Offer) -> Result<ConnectedEnd, SetupError> {
        let peer = &self.align(peer)?;
        let first = (0..self.paths.len().min(peer.paths.len()))
            .find(|index| self.is_up(peer, *index))
            .ok_or_else(|| port_down(&self.offer.paths[0], &peer.paths[0]))?;
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
        log_missing(begins.unwrap_or(first), results);
        Ok(self.finish(peer))
    }

    /// Drops the primary path if the peer has only its backup. Returns the peer's offer without its primary path if this end has only its
    /// backup.
    fn align(&mut self, peer: &Offer) -> Result<Offer, SetupError> {
        let first = self.offer.first.max(peer.first);
        let [own, others] = [self.offer.first, peer.first].map(|from| usize::from(first - from));
        if own >= self.paths.len() || others >= peer.paths.len() {
            return Err(SetupError::NoCommonPath);
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
                path.renumber(index).map_err(SetupError::Device)?;
            }
        }
        self.offer.first = first;
        Ok(peer)
    }

    /// Whether both offers say that a path's ports are up. The offers decide, so that both ends begin on the same path.
    fn is_up(&self, peer: &Offer, index: usize) -> bool {
        self.offer.paths[index].up && peer.paths[index].up
    }

    /// Connects the paths that both ends have and whose ports are up. Returns the result of each path.
    fn connect_paths(&mut self, peer: &Offer) -> Vec<Result<(), SetupError>> {
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
                true => path.connect(end).map_err(SetupError::Connect),
                false => path
                    .set_peer(end)
                    .map_err(SetupError::Connect)
                    .and_then(|()| Err(port_down(&self.offer.paths[index], other))),
            });
        }
        results
    }

    /// The connected end.
    fn finish(self, peer: &Offer) -> ConnectedEnd {
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
        ConnectedEnd {
            paths,
            control,
            failover,
            direct,
            port,
            is_backup_alone: offer.first > 0,
        }
    }
}

/// The error of the first path.
fn first_error(results: Vec<Result<(), SetupError>>) -> SetupError {
    let mut errors = results.into_iter().filter_map(Result::err);
    errors.next().unwrap_or(SetupError::NoPath)
}

/// Logs which paths are missing of a connection that begins on path `first`.
fn log_missing(first: usize, results: Vec<Result<(), SetupError>>) {
    for (index, result) in results.into_iter().enumerate() {
        let Err(why) = result else { continue };
        if index < first {
            tracing::warn!(target: log::NET, "NET/IB : a connection begins on its backup: {why}");
        } else {
            tracing::warn!(target: log::NET, "NET/IB : a connection has no backup yet: {why}");
        }
    }
}
