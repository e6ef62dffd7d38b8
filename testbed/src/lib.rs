//! What ringsight is tried on: jobs whose truth is known, faults for them, guests to run them in, and what measures them.
//!
//! It talks to the library through its C ABI and to the collector through its command line, as any user does, so it depends on neither.
//!
//! Modules use those above them only: `process` · `random` · `stats` · `workspace` · `machine` · `backend` · `nccl` · `ranks` · `vm` · `demo` · `faults` · `bench` · `gpu`.

pub mod backend;
pub mod bench;
pub mod demo;
pub mod faults;
pub mod gpu;
pub mod machine;
pub mod nccl;
pub mod process;
pub mod random;
pub mod ranks;
pub mod stats;
pub mod vm;
pub mod workspace;
