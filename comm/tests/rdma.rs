//! Ranks on two nodes over RDMA, where there are two devices that reach each other: in a guest (`cargo xtask vm test rdma`), soft-RoCE's
//! at the ends of a virtual wire or mlx5 devices on a stand-in for their hardware. And what is said where there is no RDMA, or where it cannot be.

mod common;
#[path = "../../tests/src/fabric.rs"]
#[allow(dead_code, reason = "each program uses a part of it")]
mod fabric;

mod rdma {
    mod begin;
    mod broken;
    mod data;
    mod ends;
    mod failover;
    mod fallback;
    mod held;
    mod interface;
    mod layers;
    #[allow(dead_code, reason = "shared with `rank-worker`")]
    mod links;
    mod nodes;
    mod parting;
    mod queues;
    mod replays;
    mod setup;
    mod shared;
    mod single;
    mod stalls;
    mod verdicts;
}
