//! What leaves a process of ringsight: its output files, and text from outside that a person reads.
//!
//! A collector runs as root and writes into folders that others own. The owner of a folder can put a symbolic link, a hard link or a
//! pipe at any name in it, at any moment. So every output file goes through a [`Destination`]: a name in a folder that is held open.
//!
//! | danger | answer |
//! |---|---|
//! | a link of somebody else on the way or at the name | [`Error::ForeignLink`]; links of the own user and of root are followed |
//! | a link that appears later | the folder is held by descriptor, and the name is opened with `O_NOFOLLOW` |
//! | a link at the name of a temporary file | the name is random, and `O_EXCL` makes the file |
//! | a hard link to another file, or a file that another user put there | [`Error::OtherNames`], [`Error::ForeignFile`] |
//! | a pipe without a reader | [`Error::NoReader`], without waiting |
//! | control characters in a name | [`Printable`] |
//!
//! A destination replaces its file as a whole ([`Destination::replace`]) or lets it grow ([`Destination::open`]). A pipe or a device is
//! opened once and written to. Writing may block: whoever must not wait writes from another thread.
//!
//! Only this crate opens, makes or renames output files. `clippy.toml` of each crate that writes any forbids `std`'s ways.
//!
//! The crate `tempfile` would not do: it names folders by path, and a path may lead elsewhere at the next call.

mod destination;
mod printable;

pub use destination::{Destination, Error};
pub use printable::{JsonWriter, Printable, json, lines};
