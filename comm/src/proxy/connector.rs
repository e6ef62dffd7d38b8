//! Making the connections of one rank, through the proxies of both ends.
//!
//! The receiver's proxy makes a connection at the first request for it, whichever end asks. No call here waits for the peer's own call, so
//! any number of pairs can connect in any order without a deadlock.

use std::{
    collections::HashMap,
    io,
    sync::{Arc, Mutex},
    time::Duration,
};

use ringsight_comm_base::{log, sync::lock};
use ringsight_kernels::{AbortWord, Fifo};

use super::{
    Error, Proxy, ProxyAddress, Result,
    client::ProxyClient,
    message::{Reply, Request},
};
use crate::{
    op::{ConnectionId, Endpoint, Transport},
    topology::Topology,
    transport::{
        NET_SOCKET, NET_VERBS, P2P, RecvConnection, RingConnections, SHM, SendConnection, arena, fifo_memory,
    },
};

/// How long this rank's proxy may take to free connections.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(1);

/// Makes the connections of one rank.
pub struct Connector {
    topology: Arc<Topology>,
    proxy: Arc<Proxy>,
    /// [`Endpoint::comm`] of its connections.
    comm: u64,
    /// By rank: the rank as the proxies count ranks. `None`: they are the same.
    proxy_ranks: Option<Arc<[u32]>>,
    /// FIFOs in the memory of this node's GPUs.
    arena: Option<Arc<arena::Arena>>,
    abort: Arc<AbortWord>,
    timeout: Duration,
    /// By rank: the client of its proxy.
    clients: Mutex<HashMap<u32, Arc<ProxyClient>>>,
    /// Ends that are made, so that each is mapped once.
    ends: Mutex<HashMap<Endpoint, End>>,
}

/// One end of a connection.
#[derive(Clone)]
struct End {
    fifo: Arc<Fifo>,
    proxy: Option<ConnectionId>,
    transport: &'static str,
    /// The connection's number in this rank's proxy, if that proxy keeps it.
    kept: Option<u32>,
    /// Index of the RDMA port, if it uses RDMA.
    port: Option<u8>,
}

impl Connector {
    /// A connector for the ranks of `topology`, through this rank's proxy. A proxy may take `timeout` to answer a request.
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

    /// As given, for communicator `comm`, whose ranks use the proxies of another communicator, in which they are `proxy_ranks`.
    #[must_use]
    pub fn over_shared_proxies(mut self, comm: u64, proxy_ranks: Arc<[u32]>) -> Self {
        (self.comm, self.proxy_ranks) = (comm, Some(proxy_ranks));
        self
    }

    /// As given, with FIFOs in the memory of GPUs if both ends can access it.
    #[must_use]
    pub fn with_arena(mut self, arena: Option<Arc<arena::Arena>>) -> Self {
        self.arena = arena;
        self
    }

    /// Has this rank's proxy free the connections that it keeps, for a communicator that ends while others still use the proxy. The memory of a
    /// connection lives as long as it is mapped.
    pub fn release(&self) {
        let ends = std::mem::take(&mut *lock(&self.ends));
        let rank = self.topology.rank();
        if ends.is_empty() {
            return;
        }
        // A client without the abort word, which may be set already.
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
            // A connection that cannot be freed now is freed with the proxy.
            let _ = client.call_blocking(&Request::Destroy { connection });
        }
        self.proxy.settle(RELEASE_TIMEOUT);
    }

    /// A rank, as the proxies count ranks.
    fn proxy_rank(&self, rank: u32) -> u32 {
        self.proxy_ranks
            .as_ref()
            .map_or(rank, |ranks| ranks[rank as usize])
    }

    /// Asks a proxy for the number of an endpoint's connection. This is the first request of every client, and presents the secret.
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
        // Held while connecting, so that each end is made once. Nothing below waits for a peer's own call.
        let mut ends = lock(&self.ends);
        if let Some(end) = ends.get(&endpoint) {
            return Ok(end.clone());
        }
        let near = self
            .arena
            .as_ref()
            .filter(|_| same_node)
            .and_then(|arena| arena.fifo(peer, channel, p2p, is_send));
        let end = match (near, transport) {
            // Each end computes its place by itself.
            (Some(fifo), _) => End {
                fifo,
                proxy: None,
                transport: P2P,
                kept: None,
                port: None,
            },
            // The receiver's proxy owns the memory; a sender asks for it there.
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
        // A receiver's slots are elsewhere only once its sender uses RDMA.
        let is_direct = if is_send {
            end.fifo.are_slots_elsewhere()
        } else {
            end.fifo.has_indirect_slots()
        };
        log_connection(&self.topology, &endpoint, end.transport, (end.port, is_direct));
        ends.insert(endpoint, end.clone());
        Ok(end)
    }

    /// Makes an end by the requests of a proxy, for an endpoint as that proxy sees it.
    fn make(&self, proxy_rank: u32, endpoint: Endpoint) -> Result<End> {
        let own = proxy_rank == self.topology.rank();
        self.make_at(proxy_rank, endpoint).map_err(|error| match error {
            // A refusal by this rank's own proxy is no failure of a peer.
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
        // Network connections are always in this rank's own proxy.
        let direct = is_net.then(|| self.proxy.direct_slots(connection)).flatten();
        let fifo =
            fifo_memory::map_for_kernels(&fd, config.slot_bytes, direct).map_err(|error| Error::System {
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
        let mut clients = lock(&self.clients);
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
