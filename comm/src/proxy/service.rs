//! The service thread (`rs-proxy`): answers requests, and makes and accepts the TCP streams between proxies.
//!
//! It never blocks: clients, streams that are being made, and hellos that have not arrived whole are all polled. A response that its client
//! does not read is queued; a client with too many of them is dropped.

mod peers;
mod rdma;

use std::{
    collections::{HashMap, VecDeque},
    fs::File,
    io,
    net::{SocketAddr, TcpListener},
    os::fd::{AsFd, OwnedFd},
    sync::{
        Arc, OnceLock,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use ringsight_comm_base::{
    fork::ParentOnly,
    log::PROXY,
    sys::{self, Wake},
};
use ringsight_kernels::Fifo;

use peers::{Early, Outgoing};

use super::{
    Ports, ProxyConfig, engine,
    message::{EVERY_REQUEST, Refusal, Reply, Request, encode_response, refuse},
    progress::{Command, Progress},
};
use crate::{
    bootstrap::{id::on_link_of, pending::Undecided, unix},
    op::{ConnectionId, Endpoint, Transport},
    transport::{fifo_memory, gpu_direct::Slots, wire::Hello},
};

/// Maximum number of channels of a communicator (`MAXCHANNELS`).
const MAX_CHANNELS: u8 = 64;
/// Responses that a client may leave unread before it is dropped.
const MAX_UNREAD: usize = 1024;
/// How many clients are accepted, and how many requests of one are answered, before the others have their turn.
const TURN: usize = 64;
/// Pause of the listeners when the process has no descriptor left.
const STARVED_PAUSE: Duration = Duration::from_millis(20);
/// Streams that may have said hello before the ports are known. Each is of a rank that knows the communicator's secret.
const MAX_EARLY: usize = 512;

/// A client of the service.
struct Client {
    socket: unix::Socket,
    /// The rank that it asks for, once it has presented the secret.
    rank: Option<u32>,
    /// It belongs to this process.
    own: bool,
    /// Responses that the socket has not accepted yet, with the handle of the descriptor that goes along.
    unsent: VecDeque<(Vec<u8>, Option<u64>)>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Stage {
    /// Made by Init.
    Initialised,
    /// SharedInit is done.
    Shared,
    /// Setup is done: it has its FIFO.
    SetUp,
    /// A network sender waits for the peer's proxy.
    Connecting,
    /// Ready.
    Connected,
}

struct Connection {
    endpoint: Endpoint,
    stage: Stage,
    /// Handle of the FIFO's descriptor, once it is set up.
    handle: Option<u64>,
    /// A network receiver: the sender's stream has come.
    attached: bool,
    /// A network connection: its FIFO once it is set up, and its slots in the memory of the GPU, if any.
    fifo: Option<Arc<Fifo>>,
    direct: Option<Arc<Slots>>,
    /// A network sender that is connected: index of the RDMA port, if it uses RDMA.
    rdma: Option<u8>,
}

/// The service of one proxy.
pub(super) struct Service {
    pub(super) config: ProxyConfig,
    pub(super) unix: unix::Socket,
    pub(super) tcp: ParentOnly<TcpListener>,
    pub(super) wake: Arc<Wake>,
    pub(super) ending: Arc<AtomicBool>,
    pub(super) progress: Arc<Progress>,
    clients: HashMap<u64, Client>,
    next_client: u64,
    /// Given up to accept a client when the process has no other descriptor: somebody has to tell the client. `None` while another thread has
    /// taken its number.
    reserve: Option<OwnedFd>,
    connections: HashMap<u32, Connection>,
    by_endpoint: HashMap<Endpoint, u32>,
    next_connection: u32,
    fds: HashMap<u64, OwnedFd>,
    outgoing: Vec<Outgoing>,
    early: Early,
    ports: Arc<OnceLock<Ports>>,
    /// Stop requests that wait for the progress thread.
    stopping: Vec<(u64, u64)>,
}

impl Service {
    pub(super) fn new(
        (config, ports): (ProxyConfig, Arc<OnceLock<Ports>>),
        (unix, tcp): (unix::Socket, ParentOnly<TcpListener>),
        (wake, ending): (Arc<Wake>, Arc<AtomicBool>),
        progress: Arc<Progress>,
    ) -> Self {
        Self {
            config,
            unix,
            tcp,
            wake,
            ending,
            progress,
            clients: HashMap::new(),
            next_client: 0,
            reserve: reserve(),
            connections: HashMap::new(),
            by_endpoint: HashMap::new(),
            next_connection: 1,
            fds: HashMap::new(),
            outgoing: Vec::new(),
            early: Early::new(MAX_EARLY),
            ports,
            stopping: Vec::new(),
        }
    }

    pub(super) fn run(mut self) {
        let mut undecided = Undecided::new(Hello::missing);
        let mut starved = false;
        // Acquire: pairs with the release in the proxy's drop, which orders nothing else.
        while !self.ending.load(Ordering::Acquire) {
            let listen = if starved { 0 } else { libc::POLLIN };
            let mut fds = vec![
                sys::interest(&*self.wake, libc::POLLIN),
                sys::interest(&*self.unix, listen),
                sys::interest(&*self.tcp, listen),
            ];
            let ids: Vec<u64> = self.clients.keys().copied().collect();
            fds.extend(ids.iter().map(|id| {
                let client = &self.clients[id];
                let events = if client.unsent.is_empty() {
                    libc::POLLIN
                } else {
                    libc::POLLIN | libc::POLLOUT
                };
                sys::interest(&*client.socket, events)
            }));
            let first_outgoing = fds.len();
            fds.extend(self.outgoing.iter().map(|outgoing| {
                sys::interest(
                    &*outgoing.stream,
                    if outgoing.greeted {
                        libc::POLLIN
                    } else {
                        libc::POLLOUT
                    },
                )
            }));
            undecided.interests(&mut fds);
            let timeout = match (starved, self.stopping.is_empty(), undecided.is_empty()) {
                (true, ..) => Some(STARVED_PAUSE),
                (false, false, _) => Some(Duration::from_millis(2)),
                (false, true, false) => Some(Duration::from_secs(1)),
                (false, true, true) => None,
            };
            if sys::poll(&mut fds, timeout).is_err() {
                return; // no memory: clients see their connections close
            }
            if sys::is_ready(&fds[0]) {
                self.wake.drain();
            }
            let ready_outgoing: Vec<bool> = fds[first_outgoing..][..self.outgoing.len()]
                .iter()
                .map(sys::is_ready)
                .collect();
            for (id, fd) in ids.iter().zip(&fds[3..]) {
                if sys::is_ready(fd) && !self.serve_client(*id) {
                    self.clients.remove(id);
                }
            }
            self.advance_outgoing(&ready_outgoing);
            starved = !undecided.accept(&self.tcp);
            let early = if self.knows_ports() {
                self.early.take()
            } else {
                Vec::new()
            };
            for (stream, bytes) in early.into_iter().chain(undecided.decided()) {
                // Each call may take the kernel a second, to resolve an address that does not answer.
                // Acquire: as above.
                if self.ending.load(Ordering::Acquire) || self.progress.abort.is_set() {
                    break;
                }
                self.welcome(stream, bytes);
            }
            starved |= !self.accept_clients();
            if self.progress.is_drained() {
                for asked in std::mem::take(&mut self.stopping) {
                    self.log("Stop", Some(&Ok(Reply::Stop)));
                    self.respond(asked, &Ok(Reply::Stop), None);
                }
            }
        }
    }

    /// Accepts clients. Returns false if the process has no descriptor left; then clients are told so.
    fn accept_clients(&mut self) -> bool {
        self.reserve = self.reserve.take().or_else(reserve);
        for _ in 0..TURN {
            match unix::accept(&self.unix) {
                Ok(socket) => {
                    if let Some(pid) = unix::friend(&socket) {
                        let own = pid.cast_unsigned() == std::process::id();
                        self.next_client += 1;
                        let client = Client {
                            socket,
                            rank: None,
                            own,
                            unsent: VecDeque::new(),
                        };
                        self.clients.insert(self.next_client, client);
                    }
                }
                Err(error) => match error.raw_os_error() {
                    Some(libc::EINTR | libc::ECONNABORTED) => {}
                    _ if sys::is_starved(&error) => {
                        self.turn_clients_away(&error);
                        return false;
                    }
                    _ => return true,
                },
            }
        }
        true
    }

    /// Tells clients that there is no descriptor for them. They would wait for as long as ranks wait for each other.
    fn turn_clients_away(&mut self, starved: &io::Error) {
        let refusal = Refusal::system("accepting a client", starved);
        let refused = encode_response(EVERY_REQUEST, &Err(refusal));
        for _ in 0..TURN {
            // Closes it, which makes its number free.
            if self.reserve.take().is_none() {
                return;
            }
            let accepted = unix::accept(&self.unix);
            if let Ok(client) = &accepted
                && unix::friend(client).is_some()
            {
                // One that is gone needs no answer.
                let _ = unix::send(client, &refused, None);
            }
            let is_over = accepted.is_err();
            drop(accepted);
            self.reserve = reserve();
            if is_over {
                return;
            }
        }
    }

    /// Reads and answers a client's requests. Returns false if the client is gone or breaks the protocol.
    fn serve_client(&mut self, id: u64) -> bool {
        for _ in 0..TURN {
            let Some(client) = self.clients.get_mut(&id) else {
                return false;
            };
            if !flush(client, &self.fds) || client.unsent.len() > MAX_UNREAD {
                return false;
            }
            let bytes = match unix::receive(&client.socket) {
                Ok((bytes, _)) if bytes.is_empty() => return false,
                Ok((bytes, _)) => bytes,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
            };
            let Some((request_id, request)) = Request::parse(&bytes) else {
                return false;
            };
            let asked = (id, request_id);
            let response = self.answer(asked, request);
            self.log(request.name(), response.as_ref());
            // Some responses come later.
            if let Some(response) = response {
                let fd = match (&response, request) {
                    (Ok(Reply::GetFd), Request::GetFd { handle }) => Some(handle),
                    _ => None,
                };
                self.respond(asked, &response, fd);
            }
        }
        true
    }

    /// Logs the outcome of a request; `None`: it is under way.
    fn log(&self, operation: &str, response: Option<&Result<Reply, Refusal>>) {
        let rank = self.config.rank;
        match response {
            Some(Ok(_)) => tracing::info!(target: PROXY, "Proxy of rank {rank} : operation={operation} done"),
            Some(Err(Refusal { text, .. })) => {
                tracing::info!(target: PROXY, "Proxy of rank {rank} : operation={operation} refused: {text}");
            }
            None => tracing::info!(target: PROXY, "Proxy of rank {rank} : operation={operation} begun"),
        }
    }

    fn respond(&mut self, (client, request): (u64, u64), response: &Result<Reply, Refusal>, fd: Option<u64>) {
        if let Some(client) = self.clients.get_mut(&client) {
            client.unsent.push_back((encode_response(request, response), fd));
            flush(client, &self.fds); // polling finds a broken client
        }
    }

    /// The response to a request; `None` if it comes later.
    fn answer(&mut self, asked: (u64, u64), request: Request) -> Option<Result<Reply, Refusal>> {
        if let Err(text) = self.check_right(asked.0, request) {
            return Some(Err(text.into()));
        }
        Some(match request {
            Request::Init { rank, endpoint, .. } => {
                if let Some(client) = self.clients.get_mut(&asked.0) {
                    client.rank = Some(rank);
                }
                self.init(rank, endpoint)
                    .map(|connection| Reply::Init { connection })
            }
            Request::SharedInit {
                connection,
                slot_bytes,
            } => self
                .shared_init(connection, slot_bytes)
                .map(|()| Reply::SharedInit),
            Request::Setup { connection } => self.set_up(connection).map(|handle| Reply::Setup {
                handle,
                slot_bytes: self.config.slot_bytes as u32,
            }),
            Request::Connect { connection, address } => return self.connect(asked, connection, address),
            Request::GetFd { handle } if self.fds.contains_key(&handle) => Ok(Reply::GetFd),
            Request::GetFd { handle } => Err(format!("no descriptor has handle {handle:#x}").into()),
            Request::Stop => {
                self.stopping.push(asked);
                return None;
            }
            Request::Destroy { connection } => self.destroy(connection).map(|()| Reply::Destroy),
        })
    }

    /// Whether a client may ask this. The proxy's own process may ask everything; another rank's only for what its rank sends in shared memory.
    fn check_right(&self, client: u64, request: Request) -> Result<(), String> {
        let own = self.config.rank;
        let Client {
            rank: known,
            own: is_own,
            ..
        } = self.clients[&client];
        let connection = match request {
            Request::Init { cookie, .. } if cookie != self.config.cookie => {
                return Err("wrong secret: this proxy serves another communicator".into());
            }
            Request::Init { .. } if is_own => return Ok(()),
            Request::Init { rank, .. } if rank == own => {
                return Err(format!("only the proxy's own process asks as rank {rank}"));
            }
            Request::Init { rank, .. } if known.is_some_and(|known| known != rank) => {
                return Err(format!("rank {rank} asks over another rank's connection"));
            }
            Request::Init { .. } => return Ok(()),
            _ if known.is_none() => return Err("no Init with the communicator's secret yet".into()),
            Request::Stop | Request::Destroy { .. } if !is_own => {
                return Err("only the proxy's own process may stop it".into());
            }
            // The handle is a secret, too.
            Request::Stop | Request::Destroy { .. } | Request::GetFd { .. } => return Ok(()),
            Request::SharedInit { connection, .. }
            | Request::Setup { connection }
            | Request::Connect { connection, .. } => connection,
        };
        let is_theirs = |connection: &Connection| {
            let Endpoint {
                peer,
                is_send,
                transport,
                ..
            } = connection.endpoint;
            Some(peer) == known && !is_send && transport == Transport::Shm
        };
        match self.connections.get(&connection) {
            Some(connection) if !is_own && !is_theirs(connection) => {
                Err("the connection is none of the rank that asks".into())
            }
            // That there is none is said where it is used.
            _ => Ok(()),
        }
    }

    /// Finds or makes the connection of an endpoint.
    fn init(&mut self, rank: u32, endpoint: Endpoint) -> Result<u32, Refusal> {
        let Endpoint {
            peer,
            channel,
            is_send,
            transport,
            ..
        } = endpoint;
        let ProxyConfig { rank: own, ranks, .. } = self.config;
        if peer >= ranks || peer == own || channel >= MAX_CHANNELS {
            let text = format!("no connection between rank {own} and rank {peer} on channel {channel}");
            return Err(text.into());
        }
        if rank != own && (rank != peer || is_send || transport != Transport::Shm) {
            let text =
                format!("rank {rank} may ask for what it sends to rank {own} in shared memory, no more");
            return Err(text.into());
        }
        if let Some(id) = self.by_endpoint.get(&endpoint) {
            return Ok(*id);
        }
        let id = self.next_connection;
        self.next_connection += 1;
        self.by_endpoint.insert(endpoint, id);
        let direction = if is_send { "send" } else { "recv" };
        tracing::info!(
            target: PROXY,
            "New proxy {direction} connection {id} of rank {own} with rank {peer}, channel {channel}, transport {transport:?}"
        );
        let connection = Connection {
            endpoint,
            stage: Stage::Initialised,
            handle: None,
            attached: false,
            fifo: None,
            direct: None,
            rdma: None,
        };
        self.connections.insert(id, connection);
        Ok(id)
    }

    fn connection(&mut self, id: u32) -> Result<&mut Connection, String> {
        self.connections
            .get_mut(&id)
            .ok_or_else(|| format!("there is no connection {id}"))
    }

    fn shared_init(&mut self, id: u32, slot_bytes: u32) -> Result<(), Refusal> {
        let own = self.config.slot_bytes;
        let progress = Arc::clone(&self.progress);
        let connection = self.connection(id)?;
        if slot_bytes as usize != own {
            let text = format!(
                "slots of {slot_bytes} bytes, its own have {own}: NCCL_BUFFSIZE differs between ranks"
            );
            return Err(text.into());
        }
        if connection.endpoint.transport == Transport::NetSocket {
            engine::ensure_started(&progress)
                .map_err(|error| Refusal::system("starting the progress thread", &error))?;
        }
        if connection.stage == Stage::Initialised {
            connection.stage = Stage::Shared;
        }
        Ok(())
    }

    fn set_up(&mut self, id: u32) -> Result<u64, Refusal> {
        let slot_bytes = self.config.slot_bytes;
        let connection = self.connection(id)?;
        if let Some(handle) = connection.handle {
            return Ok(handle);
        }
        if connection.stage != Stage::Shared {
            return Err(format!("Setup of connection {id} before SharedInit").into());
        }
        let what = format!("allocating a FIFO of {slot_bytes}-byte slots");
        let failed = |error: io::Error| Refusal::system(&what, &error);
        let fd = fifo_memory::create(Fifo::memory_bytes(slot_bytes)).map_err(failed)?;
        // Unguessable, so that a handle grants access to its descriptor.
        let handle = sys::random_u64().map_err(failed)?;
        connection.handle = Some(handle);
        connection.stage = Stage::SetUp;
        let endpoint = connection.endpoint;
        if endpoint.transport == Transport::NetSocket {
            let fifo = fifo_memory::map(&fd, slot_bytes).map_err(failed)?;
            connection.fifo = Some(Arc::clone(&fifo));
            let direct = self.direct_slots(id, &endpoint);
            self.connection(id)?.direct = direct;
            self.progress.send(Command::Add(ConnectionId(id), endpoint, fifo));
        }
        self.fds.insert(handle, fd);
        Ok(handle)
    }

    fn connect(
        &mut self,
        asked: (u64, u64),
        id: u32,
        address: Option<SocketAddr>,
    ) -> Option<Result<Reply, Refusal>> {
        let connection = match self.connection(id) {
            Ok(connection) => connection,
            Err(text) => return Some(Err(text.into())),
        };
        match connection.stage {
            Stage::Connected => {
                return Some(Ok(Reply::Connect {
                    rdma: connection.rdma,
                }));
            }
            Stage::SetUp => {}
            Stage::Connecting => {
                return Some(Err(format!("connection {id} is being connected already").into()));
            }
            Stage::Initialised | Stage::Shared => {
                return Some(Err(format!("Connect of connection {id} before Setup").into()));
            }
        }
        if connection.endpoint.transport == Transport::Shm || !connection.endpoint.is_send {
            // Shared memory needs nothing more. A network receiver is found by its sender.
            connection.stage = Stage::Connected;
            let Endpoint {
                channel, transport, ..
            } = connection.endpoint;
            let rdma = (transport == Transport::NetSocket)
                .then(|| self.port(channel))
                .flatten();
            return Some(Ok(Reply::Connect {
                rdma: rdma.map(|port| port as u8),
            }));
        }
        let Some(address) = address else {
            let text = format!("Connect of connection {id} without the peer's address");
            return Some(Err(text.into()));
        };
        let prepared = match self.prepare(id, None) {
            Ok(prepared) => prepared,
            Err(text) => return Some(Err(text.into())),
        };
        let address = on_link_of(&self.config.listen, address);
        match sys::connect_start(&address) {
            Ok(stream) => {
                let connection = match self.connection(id) {
                    Ok(connection) => connection,
                    Err(text) => return Some(Err(text.into())),
                };
                connection.stage = Stage::Connecting;
                self.outgoing.push(Outgoing {
                    connection: id,
                    asked,
                    address,
                    stream: ParentOnly::new(stream),
                    greeted: false,
                    answer: Vec::new(),
                    prepared,
                });
                None
            }
            Err(error) => Some(Err(Refusal::system(&format!("connecting to {address}"), &error))),
        }
    }

    fn destroy(&mut self, id: u32) -> Result<(), Refusal> {
        let connection = self
            .connections
            .remove(&id)
            .ok_or_else(|| format!("there is no connection {id}"))?;
        self.by_endpoint.remove(&connection.endpoint);
        if let Some(handle) = connection.handle {
            self.fds.remove(&handle);
        }
        self.outgoing.retain(|outgoing| outgoing.connection != id);
        self.progress.send(Command::Remove(ConnectionId(id)));
        Ok(())
    }
}

/// A descriptor of nothing; `None` if there is none left.
fn reserve() -> Option<OwnedFd> {
    sys::above_standard(|| File::open("/dev/null").map(OwnedFd::from)).ok()
}

/// Sends queued responses, as far as the socket accepts them. Returns false if the client is gone.
fn flush(client: &mut Client, fds: &HashMap<u64, OwnedFd>) -> bool {
    while let Some((bytes, handle)) = client.unsent.front() {
        let fd = handle.and_then(|handle| fds.get(&handle));
        match unix::send(&client.socket, bytes, fd.map(AsFd::as_fd)) {
            Ok(()) => drop(client.unsent.pop_front()),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            // As many descriptors of this user are on their way as a process may have open.
            Err(error) if error.raw_os_error() == Some(libc::ETOOMANYREFS) && handle.is_some() => {
                let refusal = Refusal {
                    text: format!("sending a descriptor: {error}"),
                    is_starved: true,
                };
                let bytes = refuse(bytes, refusal);
                client.unsent[0] = (bytes, None);
            }
            Err(error) => return error.kind() == io::ErrorKind::WouldBlock,
        }
    }
    true
}
