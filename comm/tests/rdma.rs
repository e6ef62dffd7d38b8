//! Ranks on two nodes over RDMA, where there are two devices that reach each other: in a guest (`cargo xtask vm test rdma`), `hca0`
//! and `peer0` at the ends of a virtual wire. And what is said where there is no RDMA, or where it cannot be.

mod common;

mod rdma {
    mod control;
    mod data;
    mod ends;
    mod failover;
    mod fallback;
    mod interface;
    mod links;
    mod nodes;
    mod replays;
}
