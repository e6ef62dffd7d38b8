//! What every layer of `ringsight-comm` stands on. Nothing here knows of ranks, devices or operations.
//!
//! | module | owns |
//! |---|---|
//! | [`error`] | a failed call: NCCL's result code and its text |
//! | [`mod@env`] | reading variables of the environment and of NCCL's configuration files |
//! | [`names`] | lists of names of interfaces or devices |
//! | [`log`] | log lines as NCCL writes them |
//! | [`sync`] | locks that survive a panic, and once-only work that survives a fork |
//! | [`fork`] | state that a forked child must not take over |
//! | [`hash`] | hashes that are the same on every rank |
//! | [`threads`] | the calling thread's identity, and threads that serve members |
//! | [`process`] | other processes and the host, as `/proc` shows them |
//! | [`sys`] | system calls that the standard library does not have |
//!
//! The crate is internal to `ringsight-comm`: its interface changes whenever that needs it to.

pub mod env;
pub mod error;
pub mod fork;
pub mod hash;
pub mod log;
pub mod names;
pub mod process;
pub mod release;
pub mod sync;
pub mod sys;
pub mod threads;
mod variables;
