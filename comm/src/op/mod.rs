//! Operations as data: what was called, what names it, and how it is done. No I/O but the records of an operation.
//!
//! | type | is made | says |
//! |---|---|---|
//! | [`Request`] | by the C entry point | the arguments of one call |
//! | [`Task`] | by the group | a request with its numbers ([`OpInfo`]) and its [`Method`] |
//! | [`Call`] | of a request | what the ranks of an operation must agree on, and the tag that shows it |
//! | `Identity` | of numbers | which operation it is, the same on all of its ranks |
//! | [`ProxyOp`] | by the launch | what a proxy moves for an operation over one connection |
//!
//! [`DataPath`] is the one value that says how data moves. `crate::plan` chooses it when the operation is called; the planner, the launch, the
//! device and the records read it from the task.

mod call;
mod info;
mod path;
mod proxy;
mod request;

pub(crate) use call::is_made_of_messages;
pub use call::{Call, WindowPlace, api_name};
pub use info::OpInfo;
pub(crate) use info::{Identity, SIMULATED, is_simulated};
pub use path::{DataPath, Method};
pub use proxy::{ConnectionId, Endpoint, ProxyOp, Transport};
pub(crate) use request::WindowBuffer;
pub use request::{Request, Stream};

/// Work elements (one channel's part of one operation) that fit into a communicator's work FIFO. A plan that runs once
/// fills at most half of it, so that the next can be prepared meanwhile; a captured plan brings memory of its own.
pub const WORK_FIFO_DEPTH: usize = 4096;

/// One call of the API, checked, numbered, and not yet planned.
#[derive(Clone, Debug)]
pub struct Task {
    /// What was called.
    pub request: Request,
    /// What its records say.
    pub info: OpInfo,
    /// How it is done.
    pub method: Method,
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

impl Task {
    /// [`Request::example`] in one shot through LL lines.
    #[cfg(test)]
    pub(crate) fn example() -> Self {
        let request = Request::example();
        Self {
            info: OpInfo {
                op: 7,
                comm: 1,
                seq: 0,
                bytes: request.bytes(2),
                rank: 0,
                peer: -1,
                flags: ringsight_records::Flags(0),
            },
            request,
            method: Method {
                algorithm: ringsight_records::Algorithm::OneShot,
                path: DataPath::Ll,
                channels: 1,
            },
            node: 0,
            graph: 0,
            api_start_ns: 0,
            api_end_ns: 0,
            group_depth: 1,
            tid: 0,
        }
    }
}
