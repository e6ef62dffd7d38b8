//! Jobs whose truth is known, faults for them, guests to run them in, and what measures them.
//!
//! The testbed speaks to the library through its C ABI and to the collector through its command line, as any user does. It depends on
//! neither crate. `cargo xtask` and the end-to-end tests start what stands here.
//!
//! A module uses only modules above it in this table:
//!
//! | module | owns |
//! |---|---|
//! | [`process`] | child processes that end with their parent |
//! | [`random`] | seeded numbers |
//! | `stats` | medians, quantiles, means |
//! | [`workspace`] | paths of the workspace, and its builds |
//! | [`machine`] | the cache of tools, Debian's packages, rights |
//! | [`backend`] | Jaeger as a child, and HTTP to it |
//! | `nccl` | the library, loaded and called through its C ABI |
//! | `otlp` | lines of OTLP JSON |
//! | `ranks` | ranks as child processes that answer line by line |
//! | [`vm`] | guests: virtual machines that run a program |
//! | [`demo`] | a training job, its ground truth, and the judge of its traces |
//! | [`faults`] | fault injection, what is promised of each fault, and the score |
//! | [`mod@bench`] | measurements against goals |
//! | [`gpu`] | the bundle for GPU hosts, and its runner |

/// Displays values of enums by the names that clap knows them by.
macro_rules! display_by_name {
    ($($name:ty),+) => {
        $(impl std::fmt::Display for $name {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                let value = clap::ValueEnum::to_possible_value(self);
                f.write_str(value.as_ref().map_or("", |value| value.get_name()))
            }
        })+
    };
}

pub mod backend;
pub mod bench;
pub mod demo;
pub mod faults;
pub mod gpu;
pub mod machine;
mod nccl;
mod otlp;
pub mod process;
pub mod random;
mod ranks;
mod stats;
pub mod vm;
pub mod workspace;
