//! What ringsight is tried on: jobs whose truth is known, faults for them, guests to run them in, and what measures them.
//!
//! This crate depends on no crate that needs the eBPF toolchain, because `cargo xtask`, which installs it, is built on it. It talks to the
//! library through its C ABI and to the collector through its command line, as any user does.
//!
//! Modules use those above them only: `process` · `random` · `stats` · `workspace` · `host` · `backend` · `nccl` · `ranks` · `vm` · `demo` · `faults` · `bench` · `gpu`.

pub mod backend;
pub mod bench;
pub mod demo;
pub mod faults;
pub mod gpu;
pub mod host;
pub mod nccl;
pub mod process;
pub mod random;
pub mod ranks;
pub mod stats;
pub mod vm;
pub mod workspace;
