//! Ranks on two nodes over RDMA, in a guest.

mod connections;
mod control;
#[path = "../rdma/links.rs"]
#[allow(dead_code, reason = "shared with the tests")]
mod links;
#[path = "../rdma/shared.rs"]
#[allow(dead_code, reason = "shared with the tests")]
mod shared;

pub(crate) mod begin;
pub(crate) mod data;
pub(crate) mod ends;
pub(crate) mod failover;
pub(crate) mod fallback;
pub(crate) mod held;
pub(crate) mod interface;
pub(crate) mod parting;
pub(crate) mod queues;
pub(crate) mod replays;
pub(crate) mod setup;
pub(crate) mod single;
pub(crate) mod stalls;
pub(crate) mod verdicts;
