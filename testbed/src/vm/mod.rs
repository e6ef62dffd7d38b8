//! Guests: virtual machines with a Debian kernel, soft-RoCE links and mlx5 devices. A guest runs one program of this machine.
//!
//! QEMU emulates the processor, so a guest needs neither KVM nor rights. Debian's packages bring QEMU, kernels and tools; they are fetched
//! once and unpacked into the cache. A boot takes about three seconds. What runs in the guest itself is in `vm/` of the workspace.
//!
//! | file | owns |
//! |---|---|
//! | `packages`, `kernel`, `image` | the cached parts: packages, kernel and modules, base file system |
//! | `cpio` | the archive format of the first file system |
//! | `guest` | one guest: its files, its script, QEMU's arguments, its end |
//! | `supervisor` | a run of QEMU: repeated boots, limits, silence |
//! | `console`, `heartbeat`, `stale_code` | how a guest ended, and whether the emulator broke it |
//! | `failover` | ports that fail during transfers |
//!
//! A guest is *booting* until its first process has spoken, then *running*, then *ended*. A boot that fails is repeated; a guest that the
//! emulator broke is run again by [`Guest::output`]; nothing else is.

mod console;
mod cpio;
pub mod failover;
pub mod guest;
mod heartbeat;
mod image;
mod kernel;
mod packages;
mod stale_code;
mod supervisor;

pub use console::Ended;
pub use guest::Guest;
pub use image::{folder, unavailable};
pub use kernel::Series;
pub use packages::verbs_headers;
