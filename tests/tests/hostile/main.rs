//! Targets that attack the collector, which is root: each test names a case that an unprivileged process plays, and what the
//! collector must do all the same.
//!
//! A case is a name in `tests/src/bin/hostile_target`, its test stands in the module of what is attacked:
//!
//! | module | what the target controls |
//! |---|---|
//! | `ending` | everything that the end of a watch could wait for |
//! | `explain` | the code of its library |
//! | `files` | its library, its texts in `/proc`, files in its root |
//! | `limits` | how much it has, and writes |
//! | `memory` | locks of its memory, for which the kernel waits in the collector's place |
//! | `outputs` | the folder and the pipes that the collector writes to, and names in what it writes |
//! | `pages` | its shared pages and the records in them |
//! | `random` | everything, at random |
//!
//! [`Target::start`] runs a case as user 65534. [`target::ringsight`] is the collector, built as the tests are: with debug assertions,
//! so that an overflow that a target provokes is found.

mod ending;
mod explain;
mod files;
mod limits;
mod memory;
mod outputs;
mod pages;
mod random;
mod target;

use target::{Collected, Target};
