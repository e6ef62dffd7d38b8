//! One call of the API, checked and numbered: what was called, and what its records say.

use ringsight_kernels::Scalar;
use ringsight_records::{DataType, Flags, Function, Kind, Record, ReduceOp, State};

use super::Exchange;
use crate::{checks::Call, communicator::Found, device::Stream, observe};

/// One call of the API, checked, numbered, and not yet planned.
#[derive(Clone, Debug)]
pub struct Task {
    /// What was called.
    pub request: Request,
    /// What its records say.
    pub info: OpInfo,
    /// Number among the communicator's operations in the graph.
    pub node: u32,
    /// Graph number if captured, else 0.
    pub graph: u32,
    /// When the call began.
    pub api_start_ns: u64,
    /// When it returned; 0 for a lone call, which has not.
    pub api_end_ns: u64,
    /// Group depth of the call; 1 is implicit.
    pub group_depth: u32,
    /// Thread that made it.
    pub tid: u32,
}

/// The arguments of a communication function.
#[derive(Clone, Debug)]
pub struct Request {
    /// Which function.
    pub function: Function,
    /// Send buffer, 0 if it has none.
    pub send: usize,
    /// Receive buffer, 0 if it has none.
    pub recv: usize,
    /// Elements.
    pub count: usize,
    /// Their type.
    pub data_type: DataType,
    /// Reduction.
    pub reduce_op: ReduceOp,
    /// What a PreMulSum multiplies with.
    pub scalar: Scalar,
    /// Root of a rooted collective, peer of a send or receive.
    pub peer: Option<u32>,
    /// The stream given.
    pub stream: Stream,
    /// The window that one of its buffers is in, where copy engines could do it.
    pub(crate) window: Option<Found>,
}

impl Request {
    /// An all_reduce of two floats.
    #[cfg(test)]
    pub(crate) fn example() -> Self {
        Self {
            function: Function::AllReduce,
            send: 0x1000,
            recv: 0x2000,
            count: 2,
            data_type: DataType::Float32,
            reduce_op: ReduceOp::Sum,
            scalar: Scalar::None,
            peer: None,
            stream: Stream(1),
            window: None,
        }
    }

    /// What the ranks must agree on.
    #[must_use]
    pub fn call(&self) -> Call {
        Call {
            function: self.function,
            count: self.count,
            data_type: self.data_type,
            reduce_op: self.reduce_op,
            peer: self.peer,
            place: self.window.as_ref().and_then(|found| found.place(self)),
        }
    }

    /// Bytes of [`Request::count`] elements.
    pub(crate) fn bytes_of_one(&self) -> u64 {
        (self.count * self.data_type.size()) as u64
    }

    /// Message bytes by nccl-tests' definition.
    #[must_use]
    pub fn bytes(&self, ranks: u32) -> u64 {
        let one = self.bytes_of_one();
        match self.function {
            Function::AllGather
            | Function::ReduceScatter
            | Function::AlltoAll
            | Function::Gather
            | Function::Scatter => one * u64::from(ranks),
            _ => one,
        }
    }

    /// Its (send, receive) buffers: address, 0 if it has none, and bytes.
    pub(crate) fn buffers(&self, ranks: u32) -> [(usize, usize); 2] {
        let one = self.count * self.data_type.size();
        let all = one * ranks as usize;
        let (send, recv) = match self.function {
            Function::AllGather | Function::Gather => (one, all),
            Function::ReduceScatter | Function::Scatter => (all, one),
            Function::AlltoAll => (all, all),
            _ => (one, one),
        };
        [(self.send, send), (self.recv, recv)]
    }

    /// The same, where this rank's part of the operation uses them.
    pub(crate) fn used_buffers(&self, rank: u32, ranks: u32) -> [(usize, usize); 2] {
        let is_root = self.peer == Some(rank);
        let [send, recv] = self.buffers(ranks);
        match self.function {
            Function::Broadcast | Function::Scatter if !is_root => [(0, 0), recv],
            Function::Reduce | Function::Gather if !is_root => [send, (0, 0)],
            _ => [send, recv],
        }
    }

    /// Bytes by which its algorithm is chosen: those of one message where it is made of several.
    pub(crate) fn bytes_of_choice(&self, ranks: u32) -> u64 {
        if Exchange::serves(self.function) {
            self.bytes_of_one()
        } else {
            self.bytes(ranks)
        }
    }
}

/// What all records of an operation say.
#[derive(Clone, Copy, Debug)]
pub struct OpInfo {
    /// Operation number.
    pub op: u32,
    /// Communicator id.
    pub comm: u64,
    /// Sequence.
    pub seq: u64,
    /// Message bytes.
    pub bytes: u64,
    /// This rank.
    pub rank: u32,
    /// Peer or root, -1 if neither.
    pub peer: i32,
    /// Flags.
    pub flags: Flags,
}

impl OpInfo {
    /// A record about this operation.
    #[must_use]
    pub fn record(&self, kind: Kind, state: State, time_ns: u64, replay: u32) -> Record {
        Record {
            comm: self.comm,
            seq: self.seq,
            bytes: self.bytes,
            op: self.op,
            replay,
            rank: self.rank,
            peer: self.peer,
            pid: observe::pid(),
            ..Record::new(kind, state, time_ns)
        }
        .with_flags(self.flags)
    }

    /// Emits a dense record about this operation if somebody wants it.
    pub fn emit(&self, kind: Kind, state: State, time_ns: u64) {
        if observe::wants(kind) {
            observe::emit(&self.record(kind, state, time_ns, 0));
        }
    }

    /// The same of what happens now.
    pub(crate) fn emit_now(&self, kind: Kind, state: State) {
        if observe::wants(kind) {
            observe::emit(&self.record(kind, state, observe::now_ns(), 0));
        }
    }

    /// [`Kind::P2p`] or [`Kind::Coll`].
    #[must_use]
    pub fn kind(&self) -> Kind {
        if self.flags.contains(Flags::P2P) {
            Kind::P2p
        } else {
            Kind::Coll
        }
    }

    /// [`Kind::P2pApi`] or [`Kind::CollApi`].
    #[must_use]
    pub fn api_kind(&self) -> Kind {
        if self.flags.contains(Flags::P2P) {
            Kind::P2pApi
        } else {
            Kind::CollApi
        }
    }
}
