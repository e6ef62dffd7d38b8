//! Connections between ranks: memory of their GPUs or shared memory within a node, sockets between nodes.

pub mod arena;
pub mod direct;
pub(crate) mod socket;
pub mod verbs;

use std::{
    collections::HashMap,
    io,
    sync::{Arc, Mutex, PoisonError},
    time::Duration,
};

use ringsight_kernels::{AbortWord, Fifo};

use crate::{
    log,
    proxy::{
        ConnectionId, Error, Proxy, ProxyAddress, Result,
        client::ProxyClient,
        memory,
        message::{Endpoint, Reply, Request, Transport},
    },
    topology::Topology,
};

/// Name of the transport within a node whose GPUs reach each other's memory.
pub const P2P: &str = "p2p";
/// Name of the transport within a node over host memory.
pub const SHM: &str = "shm";
/// Name of the transport between nodes over sockets.
pub const NET_SOCKET: &str = "net/socket";
/// Name of the transport between nodes over RDMA.
pub const NET_VERBS: &str = "net/verbs";

/// The sending end of a connection.
#[derive(Clone)]
pub struct SendConnection {
    /// What the kernel fills.
    pub fifo: Arc<Fifo>,
    /// The proxy's connection, where the proxy has work to do.
    pub proxy: Option<ConnectionId>,
    /// [`P2P`], [`SHM`], [`NET_SOCKET`] or [`NET_VERBS`].
    pub transport: &'static str,
}

/// The receiving end of a connection.
#[derive(Clone)]
pub struct RecvConnection {
    /// What the kernel drains.
    pub fifo: Arc<Fifo>,
    /// The proxy's connection, where the proxy has work to do.
    pub proxy: Option<ConnectionId>,
    /// [`P2P`], [`SHM`], [`NET_SOCKET`] or [`NET_VERBS`].
    pub transport: &'static str,
}

/// A rank's two connections in one channel's ring.
#[derive(Clone)]
pub struct RingConnections {
    /// From the previous rank.
    pub prev: RecvConnection,
    /// To the next rank.
    pub next: SendConnection,
}

/// How long a proxy of one's own may take to free connections.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(1);

/// Makes the connections of one rank.
///
/// The receiver's proxy makes a connection when it is first asked for, whoever asks first: no call here waits for the
/// peer's own call, so any number of pairs can connect in any order without a deadlock.
pub struct Connector {
    topology: Arc<Topology>,
    proxy: Arc<Proxy>,
    /// [`Endpoint::comm`] of its connections.
    comm: u64,
    /// By rank, as the proxies count ranks; `None` where they are the same.
    proxy_ranks: Option<Arc<[u32]>>,
    /// Memory of this node's GPUs.
    arena: Option<Arc<arena::Arena>>,
    abort: Arc<AbortWord>,
    timeout: Duration,
    /// Clients of the proxies that we have asked, by rank.
    clients: Mutex<HashMap<u32, Arc<ProxyClient>>>,
    /// Ends that stand, so that each is mapped once.
    ends: Mutex<HashMap<Endpoint, End>>,
}

/// One end of a connection.
#[derive(Clone)]
struct End {
    fifo: Arc<Fifo>,
    proxy: Option<ConnectionId>,
    transport: &'static str,
    /// The connection of this rank's proxy, if it keeps it.
    kept: Option<u32>,
    /// The port that RDMA goes over.
    port: Option<u8>,
}

impl Connector {
    /// A connector for the ranks of `topology`, through this rank's proxy, which waits for others' answers for `timeout`.
    #[must_use]
    pub fn new(topology: Arc<Topology>, proxy: Arc<Proxy>, abort: Arc<AbortWord>, timeout: Duration) -> Self {
        Self {
            topology,
            proxy,
            comm: 0,
            proxy_ranks: None,
            arena: None,
            abort,
            timeout,
            clients: Mutex::default(),
            ends: Mutex::default(),
        }
    }

    /// The same for communicator `comm`, whose ranks use proxies that were made for another one, in which they are
    /// `proxy_ranks`.
    #[must_use]
    pub fn over_shared_proxies(mut self, comm: u64, proxy_ranks: Arc<[u32]>) -> Self {
        (self.comm, self.proxy_ranks) = (comm, Some(proxy_ranks));
        self
    }

    /// The same with FIFOs in the memory of GPUs, where both ends reach it.
    #[must_use]
    pub fn with_arena(mut self, arena: Option<Arc<arena::Arena>>) -> Self {
        self.arena = arena;
        self
    }

    /// Has this rank's proxy free the connections that it keeps: for a communicator that ends while others still use the
    /// proxy. Whoever still has one mapped keeps the memory.
    pub fn release(&self) {
        let ends = std::mem::take(&mut *self.ends.lock().unwrap_or_else(PoisonError::into_inner));
        let rank = self.topology.rank();
        if ends.is_empty() {
            return;
        }
        // A client of its own: the others no longer wait once the abort word is set.
        let client = self
            .address_of(rank)
            .and_then(|address| ProxyClient::connect(&address.unix, rank, Arc::default(), RELEASE_TIMEOUT));
        let Ok(client) = client else { return };
        let endpoint = ends.iter().find(|(_, end)| end.kept.is_some());
        // The first request of a client presents the secret.
        let Some((endpoint, _)) = endpoint else { return };
        if self.introduce(&client, *endpoint).is_err() {
            return;
        }
        for connection in ends.values().filter_map(|end| end.kept) {
            // What cannot be freed now is freed with the proxy.
            let _ = client.call_blocking(&Request::Destroy { connection });
        }
        self.proxy.settle(RELEASE_TIMEOUT);
    }

    /// A rank, as the proxies count.
    fn proxy_rank(&self, rank: u32) -> u32 {
        self.proxy_ranks
            .as_ref()
            .map_or(rank, |ranks| ranks[rank as usize])
    }

    /// The first request about an endpoint: which connection it is.
    fn introduce(&self, client: &ProxyClient, endpoint: Endpoint) -> Result<u32> {
        let request = Request::Init {
            cookie: self.proxy.config().cookie,
            rank: self.proxy_rank(self.topology.rank()),
            endpoint: Endpoint {
                peer: self.proxy_rank(endpoint.peer),
                ..endpoint
            },
        };
        match client.call_blocking(&request)? {
            Reply::Init { connection } => Ok(connection),
            _ => Err(unexpected(self.topology.rank())),
        }
    }

    /// The connections of this rank in the ring of `channel` ([`Topology::ring`]). There must be at least two ranks.
    ///
    /// # Errors
    /// When a peer's proxy is gone or refuses, or on abort.
    pub fn connect_ring(&self, channel: u8) -> Result<RingConnections> {
        let ring = self.topology.ring(channel);
        let (Some(next), Some(prev)) = (ring.get(1), ring.last()) else {
            return Err(Error::Refused("a communicator of one rank has no ring".into()));
        };
        let prev = self.receive_end(*prev, channel, false)?;
        Ok(RingConnections {
            prev,
            next: self.send_end(*next, channel, false)?,
        })
    }

    /// The point-to-point connection to `peer` on `channel`; the same one each time.
    ///
    /// # Errors
    /// When the peer's proxy is gone or refuses, or on abort.
    pub fn connect_send(&self, peer: u32, channel: u8) -> Result<SendConnection> {
        self.send_end(peer, channel, true)
    }

    /// The point-to-point connection from `peer` on `channel`; the same one each time.
    ///
    /// # Errors
    /// When this rank's proxy cannot make it, or on abort.
    pub fn connect_recv(&self, peer: u32, channel: u8) -> Result<RecvConnection> {
        self.receive_end(peer, channel, true)
    }

    fn send_end(&self, peer: u32, channel: u8, p2p: bool) -> Result<SendConnection> {
        let End {
            fifo,
            proxy,
            transport,
            ..
        } = self.end(peer, channel, p2p, true)?;
        Ok(SendConnection {
            fifo,
            proxy,
            transport,
        })
    }

    fn receive_end(&self, peer: u32, channel: u8, p2p: bool) -> Result<RecvConnection> {
        let End {
            fifo,
            proxy,
            transport,
            ..
        } = self.end(peer, channel, p2p, false)?;
        Ok(RecvConnection {
            fifo,
            proxy,
            transport,
        })
    }

    fn end(&self, peer: u32, channel: u8, p2p: bool, is_send: bool) -> Result<End> {
        let rank = self.topology.rank();
        if peer >= self.topology.ranks() || peer == rank {
            return Err(Error::Refused(format!(
                "rank {rank} has no connection to rank {peer}"
            )));
        }
        let same_node = self.topology.node_of(peer) == self.topology.node_of(rank);
        let transport = if same_node {
            Transport::Shm
        } else {
            Transport::NetSocket
        };
        let endpoint = Endpoint {
            comm: self.comm,
            peer,
            channel,
            p2p,
            is_send,
            transport,
        };
        // Held while connecting: one end is made once, and nothing below waits for a peer's own call.
        let mut ends = self.ends.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(end) = ends.get(&endpoint) {
            return Ok(end.clone());
        }
        let near = self
            .arena
            .as_ref()
            .filter(|_| same_node)
            .and_then(|arena| arena.fifo(peer, channel, p2p, is_send));
        let end = match (near, transport) {
            // Each end finds it by itself.
            (Some(fifo), _) => End {
                fifo,
                proxy: None,
                transport: P2P,
                kept: None,
                port: None,
            },
            // The memory is the receiver's; a sender asks the receiver's proxy for it.
            (None, Transport::Shm) if is_send => self.make(
                peer,
                Endpoint {
                    peer: rank,
                    is_send: false,
                    ..endpoint
                },
            )?,
            (None, Transport::Shm | Transport::NetSocket) => self.make(rank, endpoint)?,
        };
        // A receiver's are there if its sender comes over RDMA.
        let is_direct = if is_send {
            end.fifo.are_slots_elsewhere()
        } else {
            end.fifo.has_indirect_slots()
        };
        log_connection(&self.topology, &endpoint, end.transport, (end.port, is_direct));
        ends.insert(endpoint, end.clone());
        Ok(end)
    }

    /// Goes through a proxy's requests for an endpoint, as that proxy sees it.
    fn make(&self, proxy_rank: u32, endpoint: Endpoint) -> Result<End> {
        let own = proxy_rank == self.topology.rank();
        self.make_at(proxy_rank, endpoint).map_err(|error| match error {
            // What one's own proxy cannot do is no peer's failure.
            Error::Refused(text) if own && endpoint.transport == Transport::Shm => Error::System {
                what: "connecting".into(),
                source: Arc::new(io::Error::other(text)),
            },
            other => other,
        })
    }

    fn make_at(&self, proxy_rank: u32, endpoint: Endpoint) -> Result<End> {
        let client = self.client(proxy_rank)?;
        let config = self.proxy.config();
        let connection = self.introduce(&client, endpoint)?;
        let slot_bytes = config.slot_bytes as u32;
        client.call_blocking(&Request::SharedInit {
            connection,
            slot_bytes,
        })?;
        let Reply::Setup { handle, .. } = client.call_blocking(&Request::Setup { connection })? else {
            return Err(unexpected(proxy_rank));
        };
        let fd = client.get_fd(handle)?;
        let is_net = endpoint.transport == Transport::NetSocket;
        // Of this rank's own proxy, as all connections of the network are.
        let direct = is_net.then(|| self.proxy.direct_slots(connection)).flatten();
        let fifo =
            memory::map_for_kernels(&fd, config.slot_bytes, direct).map_err(|error| Error::System {
                what: format!("mapping the FIFO of rank {proxy_rank}"),
                source: Arc::new(error),
            })?;
        let address = match is_net && endpoint.is_send {
            true => Some(self.address_of(endpoint.peer)?.tcp),
            false => None,
        };
        let reply = client.call_blocking(&Request::Connect { connection, address })?;
        let Reply::Connect { rdma: port } = reply else {
            return Err(unexpected(proxy_rank));
        };
        let transport = match (is_net, port) {
            (false, _) => SHM,
            (true, None) => NET_SOCKET,
            (true, Some(_)) => NET_VERBS,
        };
        Ok(End {
            fifo,
            proxy: is_net.then_some(ConnectionId(connection)),
            transport,
            kept: (proxy_rank == self.topology.rank()).then_some(connection),
            port,
        })
    }

    fn address_of(&self, rank: u32) -> Result<ProxyAddress> {
        self.topology.info(rank).proxy_address.parse()
    }

    fn client(&self, rank: u32) -> Result<Arc<ProxyClient>> {
        let mut clients = self.clients.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(client) = clients.get(&rank) {
            return Ok(Arc::clone(client));
        }
        let name = self.address_of(rank)?.unix;
        let client = Arc::new(ProxyClient::connect(
            &name,
            rank,
            Arc::clone(&self.abort),
            self.timeout,
        )?);
        clients.insert(rank, Arc::clone(&client));
        Ok(client)
    }
}

fn unexpected(rank: u32) -> Error {
    Error::Protocol(format!("the proxy of rank {rank} answers another question"))
}

/// Logs a connection as this rank sees it. `port` is the RDMA device's port; `is_direct` says that its slots are in the memory of a GPU.
fn log_connection(
    topology: &Topology,
    endpoint: &Endpoint,
    transport: &str,
    (port, is_direct): (Option<u8>, bool),
) {
    let Endpoint {
        peer,
        channel,
        p2p,
        is_send,
        ..
    } = *endpoint;
    let name = match transport {
        P2P => "P2P".into(),
        SHM => "SHM".into(),
        _ => match port {
            Some(port) if is_direct => format!("NET/IB/{port}/GDRDMA"),
            Some(port) => format!("NET/IB/{port}"),
            None => "NET/Socket".into(),
        },
    };
    let rank = topology.rank();
    let (from, to) = if is_send { (rank, peer) } else { (peer, rank) };
    let (from_device, to_device) = (topology.info(from).device, topology.info(to).device);
    let line = format_args!(
        "Channel {channel:02}/{} : {from}[{from_device}] -> {to}[{to_device}] [{}] via {name}",
        u8::from(p2p),
        if is_send { "send" } else { "receive" },
    );
    match transport {
        P2P => tracing::info!(target: log::P2P, "{line}"),
        SHM if p2p => tracing::info!(target: log::P2P, "{line}"),
        SHM => tracing::info!(target: log::SHM, "{line}"),
        _ => tracing::info!(target: log::NET, "{line}"),
    }
}
