//! Deterministic ids: every collector that sees a part of an operation gives its spans the same ids, with no message
//! between them. The formula is part of the interface; `docs/src/data-model.md` states it.

use ringsight_exporters::model::{SpanId, TraceId};
use xxhash_rust::xxh3::{xxh3_64, xxh3_128};

/// Stands for "no such field" in a span's identity.
pub const NONE: u32 = u32::MAX;

/// What kind of thing a trace is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum TraceKind {
    /// A collective of a communicator.
    Collective = 0,
    /// A message of an ordered pair of ranks.
    PointToPoint = 1,
    /// A group of one process; `comm` is the process's identity, `seq` the group's number.
    Group = 2,
    /// A call into a library without probe functions; `comm` is the process's identity, `seq` the call's start in
    /// monotonic nanoseconds, `replay` its thread.
    HostCall = 3,
    /// An operation that was still running when its collector let go; `comm` is the process's identity, `seq` the
    /// operation's number.
    Unfinished = 4,
    /// Something of the network; `comm` is the process's identity, or the device's, `seq` when it began in monotonic nanoseconds,
    /// `replay` the number of the queue pair or port.
    Network = 5,
}

/// What a span is to its trace.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Role {
    /// The trace's root.
    Root = 0,
    /// One rank's part.
    Rank = 1,
    /// The API call on a rank.
    Enqueue = 2,
    /// The device launch on a rank.
    Launch = 3,
    /// One channel of the kernel on a rank.
    KernelChannel = 4,
    /// One proxy operation on a rank.
    Proxy = 5,
    /// A group.
    Group = 6,
    /// A host-timed call.
    HostCall = 7,
    /// An operation that did not finish in time.
    Unfinished = 8,
    /// The life of a queue pair.
    QueuePair = 9,
    /// Something of the network that failed.
    NetworkError = 10,
    /// A time in which a port was down.
    PortDown = 11,
    /// A connection that left a path.
    Failover = 12,
    /// What carries a step between nodes.
    Carrier = 13,
    /// That a rank's part hangs.
    Hang = 14,
    /// The way back of a connection whose failover was sent before.
    Failback = 15,
    /// The failure of a port, over the connections that left it.
    PortFailover = 16,
}

impl Role {
    /// How many there are.
    pub const COUNT: usize = 17;
}

/// Which way data go; tells a send from a recv where a rank does both with one peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum Direction {
    /// Neither.
    None = 0,
    /// Away from the rank.
    Send = 1,
    /// To the rank.
    Recv = 2,
}

impl Direction {
    /// That of the other rank.
    #[must_use]
    pub const fn opposite(self) -> Self {
        match self {
            Self::None => Self::None,
            Self::Send => Self::Recv,
            Self::Recv => Self::Send,
        }
    }
}

/// One instance of an operation across the ranks that take part in it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct InstanceKey {
    /// Communicator id.
    pub comm: u64,
    /// Sequence in the communicator, or in the ordered pair.
    pub seq: u64,
    /// Size of the communicator.
    pub ranks: u32,
    /// 0 for an eager operation, n for the n-th replay.
    pub replay: u32,
    /// What it is.
    pub kind: TraceKind,
    /// (source rank, destination rank) of a message.
    pub pair: Option<(u32, u32)>,
}

impl InstanceKey {
    /// The part that stands for the whole: rank 0's, or a message's sender's.
    #[must_use]
    pub fn root(&self) -> (u32, Direction) {
        self.pair
            .map_or((0, Direction::None), |(source, _)| (source, Direction::Send))
    }

    /// `xxh3_128("ccl.trace.v1" ‖ scope ‖ comm u64 ‖ ranks u32 ‖ kind u8 ‖ seq u64 ‖ replay u32 [‖ src u32 ‖ dst u32])`,
    /// integers little-endian, the hash written big-endian.
    #[must_use]
    pub fn trace_id(&self, scope: &Scope) -> TraceId {
        let mut bytes = Bytes::new(&scope.prefix);
        bytes.put(&self.comm.to_le_bytes());
        bytes.put(&self.ranks.to_le_bytes());
        bytes.put(&[self.kind as u8]);
        bytes.put(&self.seq.to_le_bytes());
        bytes.put(&self.replay.to_le_bytes());
        if let Some((source, destination)) = self.pair {
            bytes.put(&source.to_le_bytes());
            bytes.put(&destination.to_le_bytes());
        }
        // Zero is not an id; one in 2^128 traces gets its neighbour's.
        xxh3_128(bytes.get()).max(1).to_be_bytes()
    }
}

/// What a span is within its trace; fields that do not apply are [`NONE`], [`Direction::None`] and 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct SpanKey {
    /// What it is.
    pub role: Role,
    /// Rank.
    pub rank: u32,
    /// Channel.
    pub channel: u32,
    /// Peer rank.
    pub peer: u32,
    /// Direction.
    pub direction: Direction,
    /// Tells apart what is equal in all else.
    pub index: u32,
}

impl SpanKey {
    /// A span of which there is one in the trace.
    #[must_use]
    pub const fn of(role: Role) -> Self {
        Self {
            role,
            rank: NONE,
            channel: NONE,
            peer: NONE,
            direction: Direction::None,
            index: 0,
        }
    }

    /// A span of which there is one for each rank and direction.
    #[must_use]
    pub const fn rank(role: Role, rank: u32, direction: Direction) -> Self {
        Self {
            rank,
            direction,
            ..Self::of(role)
        }
    }

    /// `xxh3_64("ccl.span.v1" ‖ trace_id ‖ role u8 ‖ rank u32 ‖ channel u32 ‖ peer u32 ‖ direction u8 ‖ index u32)`,
    /// integers little-endian, the hash written big-endian.
    #[must_use]
    pub fn span_id(&self, trace: &TraceId) -> SpanId {
        let mut bytes = Bytes::new(b"ccl.span.v1");
        bytes.put(trace);
        bytes.put(&[self.role as u8]);
        bytes.put(&self.rank.to_le_bytes());
        bytes.put(&self.channel.to_le_bytes());
        bytes.put(&self.peer.to_le_bytes());
        bytes.put(&[self.direction as u8]);
        bytes.put(&self.index.to_le_bytes());
        xxh3_64(bytes.get()).max(1).to_be_bytes()
    }
}

/// Identity of a process among all hosts: `xxh3_64("ccl.process.v1" ‖ host.id ‖ pid u32 ‖ start_time u64)`.
#[must_use]
pub fn process_identity(host_id: &str, pid: u32, start_time: u64) -> u64 {
    let mut bytes = b"ccl.process.v1".to_vec();
    bytes.extend_from_slice(host_id.as_bytes());
    bytes.extend_from_slice(&pid.to_le_bytes());
    bytes.extend_from_slice(&start_time.to_le_bytes());
    xxh3_64(&bytes)
}

/// What a communicator is called whose id is already that of another owner's: `xxh3_64("ccl.owner.v1" ‖ comm u64 ‖ user u32 ‖ cgroup)`,
/// without the control group where these are not told apart.
#[must_use]
pub fn foreign_communicator(comm: u64, user: u32, cgroup: &str) -> u64 {
    let mut bytes = b"ccl.owner.v1".to_vec();
    bytes.extend_from_slice(&comm.to_le_bytes());
    bytes.extend_from_slice(&user.to_le_bytes());
    bytes.extend_from_slice(cgroup.as_bytes());
    xxh3_64(&bytes)
}

/// A text that all collectors of a job agree on and other jobs do not have, for clusters where communicator ids might
/// meet; empty by default.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Scope {
    /// "ccl.trace.v1" and the text.
    prefix: Vec<u8>,
}

impl Scope {
    /// Longest scope, in bytes.
    pub const LIMIT: usize = 64;

    /// A scope.
    ///
    /// # Errors
    /// If the text is longer than [`Scope::LIMIT`].
    pub fn new(text: &str) -> Result<Self, String> {
        if text.len() > Self::LIMIT {
            return Err(format!(
                "scope has {} bytes, {} are allowed: choose a shorter one",
                text.len(),
                Self::LIMIT
            ));
        }
        Ok(Self {
            prefix: [b"ccl.trace.v1", text.as_bytes()].concat(),
        })
    }
}

impl Default for Scope {
    fn default() -> Self {
        Self {
            prefix: b"ccl.trace.v1".to_vec(),
        }
    }
}

/// What is hashed, gathered without allocation.
struct Bytes {
    bytes: [u8; 128],
    len: usize,
}

impl Bytes {
    fn new(prefix: &[u8]) -> Self {
        let mut new = Self {
            bytes: [0; 128],
            len: 0,
        };
        new.put(prefix);
        new
    }

    fn put(&mut self, part: &[u8]) {
        self.bytes[self.len..self.len + part.len()].copy_from_slice(part);
        self.len += part.len();
    }

    fn get(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hex(bytes: &[u8]) -> String {
        bytes.iter().map(|byte| format!("{byte:02x}")).collect()
    }

    fn key(
        comm: u64,
        ranks: u32,
        kind: TraceKind,
        seq: u64,
        replay: u32,
        pair: Option<(u32, u32)>,
    ) -> InstanceKey {
        InstanceKey {
            comm,
            seq,
            ranks,
            replay,
            kind,
            pair,
        }
    }

    /// Expected values come from Python's `xxhash` 3 over `struct.pack` of the documented layout.
    #[test]
    fn known_answers() {
        let comm = 0x1122_3344_5566_7788;
        let plain = Scope::default();
        let cases = [
            (
                plain.clone(),
                key(comm, 4, TraceKind::Collective, 7, 0, None),
                "423d318e59f6aa3f8b4be32496f257e5",
                "811d52628d64b13c",
                "10cb2843777d3875",
                "bf0380c5d7c56945",
                "0bd1f47abd2e0ba0",
            ),
            (
                Scope::new("job-42").unwrap(),
                key(comm, 4, TraceKind::Collective, 7, 0, None),
                "e6a02da842c1fad5974c4bf7b2ff3519",
                "fe38c9e36099325d",
                "f7c63f2fa617b0df",
                "eff1e44e8f233522",
                "239165ef9afce7ac",
            ),
            (
                plain.clone(),
                key(0xdead_beef, 8, TraceKind::Collective, 3 << 32 | 2, 5, None),
                "018a0cd62e038a896819d8054b363336",
                "7f5acdbcb09fc58b",
                "f174f742af69f5c4",
                "500c6394479c6563",
                "ec2c3bf397792132",
            ),
            (
                plain.clone(),
                key(comm, 4, TraceKind::PointToPoint, 9, 0, Some((1, 3))),
                "fee8ff8a48aacd5fec2efdeadfd33e5a",
                "5a18252f3f195c85",
                "918ba13c77a6daf1",
                "a0d9e64c4a28954a",
                "dfe800e1d78c2bc8",
            ),
            (
                plain,
                key(0x9ebb_58b5_a6bd_6d3b, 0, TraceKind::Group, 12, 0, None),
                "36a05a866e76fd914ae28e0b4e19ed96",
                "cd05f6b116b4629e",
                "06bb4c5b9d92c0bd",
                "94ff2376b5602349",
                "1b6d41bccb5af002",
            ),
        ];
        for (scope, key, trace_id, root, rank, channel, proxy) in cases {
            let trace = key.trace_id(&scope);
            assert_eq!(hex(&trace), trace_id);
            let span = |span: SpanKey| hex(&span.span_id(&trace));
            assert_eq!(span(SpanKey::of(Role::Root)), root);
            let of_rank = |role| SpanKey::rank(role, 2, Direction::None);
            assert_eq!(span(of_rank(Role::Rank)), rank);
            assert_eq!(
                span(SpanKey {
                    channel: 1,
                    ..of_rank(Role::KernelChannel)
                }),
                channel
            );
            let send = SpanKey {
                channel: 1,
                peer: 3,
                direction: Direction::Send,
                ..of_rank(Role::Proxy)
            };
            assert_eq!(span(send), proxy);
        }
        assert_eq!(
            process_identity("node-a", 4242, 123_456_789),
            0x2796_331d_1505_53ca
        );
    }

    #[test]
    fn the_longest_scope_fits_and_a_longer_one_is_refused() {
        let scope = Scope::new(&"x".repeat(Scope::LIMIT)).unwrap();
        let id = key(
            u64::MAX,
            u32::MAX,
            TraceKind::PointToPoint,
            u64::MAX,
            u32::MAX,
            Some((0, 1)),
        )
        .trace_id(&scope);
        assert_ne!(id, [0; 16]);
        assert!(
            Scope::new(&"x".repeat(Scope::LIMIT + 1))
                .unwrap_err()
                .contains("65 bytes")
        );
    }

    proptest::proptest! {
        #[test]
        fn every_field_of_a_key_counts(seq: u64, replay: u32, comm: u64, ranks: u32, bit in 0u32..32) {
            let scope = Scope::default();
            let base = key(comm, ranks, TraceKind::Collective, seq, replay, None);
            let flip = 1 << bit;
            let others = [
                InstanceKey { seq: seq ^ u64::from(flip), ..base },
                InstanceKey { replay: replay ^ flip, ..base },
                InstanceKey { comm: comm ^ u64::from(flip), ..base },
                InstanceKey { ranks: ranks ^ flip, ..base },
                InstanceKey { kind: TraceKind::PointToPoint, ..base },
            ];
            for other in others {
                proptest::prop_assert_ne!(base.trace_id(&scope), other.trace_id(&scope));
            }
        }
    }
}
