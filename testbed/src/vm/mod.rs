//! Guests: virtual machines with a Debian kernel, soft-RoCE links and mlx5 devices, in which a program of this machine runs.
//!
//! QEMU emulates the processor, so neither KVM nor rights are needed; what the guest consists of is fetched from Debian once and
//! unpacked into the cache. A boot takes about three seconds. What runs in the guest itself is in `vm/`.

mod beats;
mod console;
mod cpio;
mod drive;
pub mod failover;
pub mod guest;
mod image;
mod kernel;
mod packages;
mod stale;

pub use console::Ended;
pub use guest::Guest;
pub use image::{folder, unavailable};
pub use kernel::Series;
pub use packages::verbs_headers;
