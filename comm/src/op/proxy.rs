//! Network work: what a proxy moves for an operation, and over which connection.

/// A connection of one proxy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ConnectionId(pub u32);

/// Network work of one operation: one channel, one peer, one direction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ProxyOp {
    /// The network connection that it runs over.
    pub connection: ConnectionId,
    /// Operation number in this process.
    pub op: u32,
    /// 0 for an eager operation, n for the n-th replay.
    pub replay: u32,
    /// Communicator id.
    pub comm: u64,
    /// Sequence as in [`ringsight_records::Record::seq`].
    pub seq: u64,
    /// This rank.
    pub rank: u32,
    /// The rank at the other end.
    pub peer: u32,
    /// Channel.
    pub channel: u8,
    /// This rank sends.
    pub is_send: bool,
    /// The operation is a send or recv.
    pub p2p: bool,
    /// The operation was captured into a graph.
    pub graph: bool,
    /// Slots that the kernel posts (sender) or consumes (receiver) for it.
    pub steps: u32,
    /// Tag that its steps carry ([`ringsight_kernels::Work::tag`]).
    pub tag: u32,
    /// Its end is told ([`crate::proxy::ProxyConfig::on_completed`]).
    pub counted: bool,
    /// Bytes of a full step.
    pub chunk_bytes: u32,
    /// Process that made the operation.
    pub pid: u32,
}

/// Which transport serves a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(u8)]
pub enum Transport {
    /// Memory that both ends map.
    Shm = 1,
    /// A TCP connection between two proxies.
    NetSocket = 2,
}

/// What a connection is for, as the proxy that keeps it sees it. There is one connection for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Endpoint {
    /// 0 for the communicator that the proxy was made for; the id of another one that shares it. Their connections are
    /// apart.
    pub comm: u64,
    /// The rank at the other end, as the proxies count ranks.
    pub peer: u32,
    /// Channel.
    pub channel: u8,
    /// Point-to-point rather than ring.
    pub p2p: bool,
    /// The proxy's rank sends.
    pub is_send: bool,
    /// How the bytes go.
    pub transport: Transport,
}
