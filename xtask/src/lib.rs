//! Every developer and operator chore of ringsight: `cargo xtask <command>`.
//!
//! This crate depends on no crate that needs the eBPF toolchain, because it is what installs that toolchain. It talks
//! to the library through its C ABI and to the collector through its command line, as any user does.

pub mod backend;
pub mod bench;
pub mod demo;
pub mod dist;
pub mod faults;
pub mod fuzz;
pub mod gpu;
pub mod nccl;
pub mod process;
pub mod setup;
pub mod test;
pub mod vm;
pub mod workspace;
