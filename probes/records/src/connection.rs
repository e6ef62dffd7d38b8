//! Connections between nodes: what the process whose end it is last said of one's paths, for readers of its pages.

use core::sync::atomic::{AtomicU64, Ordering};

use crate::{sequence::SequenceLock, text::text};

/// Most paths of a connection.
pub const PATHS: usize = 4;
/// Bytes of a device's name that are kept.
pub const DEVICE_NAME_BYTES: usize = 24;

/// Codes with names, in the order of the codes, from 0.
macro_rules! coded {
    ($(#[$doc:meta])* $name:ident { $($(#[$variant_doc:meta])* $variant:ident = $text:literal,)* }) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[repr(u8)]
        pub enum $name { $($(#[$variant_doc])* $variant,)* }

        impl $name {
            /// Every one, in the order of the codes.
            pub const ALL: &'static [Self] = &[$(Self::$variant,)*];

            /// The one with this code, if there is one.
            #[must_use]
            pub fn from_code(code: u8) -> Option<Self> {
                Self::ALL.get(usize::from(code)).copied()
            }

            /// Name, as it is told.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self { $(Self::$variant => $text,)* }
            }
        }
    };
}

coded! {
    /// What one end's queue pair on a path is in.
    LinkStage {
        /// Connected, and believed to work.
        Ready = "ready",
        /// Given up; what it still has is on its way out.
        Fencing = "fencing",
        /// Given up, and nothing of it is left.
        Fenced = "fenced",
        /// The next one is being made.
        Building = "building",
        /// Made, and offered to the peer.
        Offered = "offered",
        /// Being connected.
        Connecting = "connecting",
        /// Connected; it is being probed.
        Probation = "probation",
    }
}

coded! {
    /// What all connections of the process together know of a path.
    PathCondition {
        /// Nothing failed since it last worked.
        Good = "good",
        /// It failed for some connection.
        Suspect = "suspect",
        /// Too many connections failed, or a port of it is down.
        Down = "down",
        /// It works again, for less than the recovery window.
        Recovering = "recovering",
    }
}

/// One path of a connection, as one end sees it; 96 bytes. Times are `CLOCK_MONOTONIC` nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct ConnectionPath {
    /// Name of this end's device, zero-padded.
    pub device: [u8; DEVICE_NAME_BYTES],
    /// GID of its port that this end uses; zeros where it needs none.
    pub gid: [u8; 16],
    /// When a connection of the process last switched away from it; 0: never.
    pub last_switch_ns: u64,
    /// When its failures will be forgotten, if it goes on working; 0 where there is nothing to forget, or it does not work.
    pub recovered_ns: u64,
    /// When this end next tries to make it anew; 0 if no time is set: it works, is being made, or the peer decides.
    pub next_attempt_ns: u64,
    /// Failures in all, of all connections of the process.
    pub failures: u64,
    /// Failures since it was last good.
    pub consecutive_failures: u32,
    /// How often its queue pairs have been made.
    pub generation: u32,
    /// Number of this end's first queue pair.
    pub queue_pair: u32,
    /// Port of the device, from 1.
    pub port: u8,
    /// Whether that port is up.
    pub port_up: u8,
    /// [`LinkStage`].
    pub stage: u8,
    /// [`PathCondition`].
    pub condition: u8,
    /// [`crate::PathCause`] of the last failure; 0: none.
    pub cause: u8,
    /// `enum ibv_wc_status` of the completion that told of it; 0 if none did.
    pub status: u8,
    /// The port's number among those that the process may use, as in records ([`crate::Carrier::port`]).
    pub index: u8,
    /// Zero.
    pub reserved: [u8; 5],
}

impl ConnectionPath {
    /// The device's name; empty if it is not UTF-8.
    #[must_use]
    pub fn device(&self) -> &str {
        text(&self.device)
    }
}

/// One end of a connection; 432 bytes. Times are `CLOCK_MONOTONIC` nanoseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[repr(C)]
pub struct Connection {
    /// Communicator whose operation went over it last.
    pub comm: u64,
    /// When this was written.
    pub updated_ns: u64,
    /// When the path in use last changed; 0: never.
    pub last_switch_ns: u64,
    /// This rank in the communicator.
    pub rank: u32,
    /// The rank at the other end.
    pub peer: u32,
    /// Number of the switch that the path in use came with; 0: the first path.
    pub epoch: u32,
    /// Changes of the path in use.
    pub switches: u32,
    /// Channel.
    pub channel: u8,
    /// [`Connection::SENDS`] and the like.
    pub flags: u8,
    /// Zero.
    pub reserved: u8,
    /// Paths that it has.
    pub paths: u8,
    /// The path in use, or that was in use last.
    pub active: u8,
    /// [`Connection::FLOWS`] and the like.
    pub phase: u8,
    /// [`crate::PathCause`] for which a path was left last; 0: none was.
    pub cause: u8,
    /// `enum ibv_wc_status` of the completion that told of it; 0 if none did.
    pub status: u8,
    /// The first path is the primary one, unless [`Connection::BACKUP_ALONE`]. Those from [`Connection::paths`] on are zero.
    pub path: [ConnectionPath; PATHS],
}

impl Connection {
    /// This end sends; a bit of [`Connection::flags`].
    pub const SENDS: u8 = 1;
    /// It is of messages, not of collectives.
    pub const MESSAGES: u8 = 2;
    /// It survives a path.
    pub const SURVIVES: u8 = 4;
    /// It has its backup path alone: its primary port could not be used when it was made.
    pub const BACKUP_ALONE: u8 = 8;
    /// Steps go over the path in use; a value of [`Connection::phase`].
    pub const FLOWS: u8 = 0;
    /// It is between two paths.
    pub const RECOVERS: u8 = 1;
    /// It has failed.
    pub const FAILED: u8 = 2;

    /// Its paths. Of a damaged one no more than there is room for.
    pub fn paths(&self) -> impl Iterator<Item = &ConnectionPath> {
        self.path.iter().take(self.paths.into())
    }
}

const WORDS: usize = size_of::<Connection>() / 8;
const _: () = assert!(size_of::<ConnectionPath>() == 96 && size_of::<Connection>() == 432);

/// A slot of the connection table: whether it is taken, and a sequence lock over the words of one [`Connection`]. There is one
/// writer, the thread that moves the connection.
#[derive(Debug)]
#[repr(C)]
pub struct ConnectionSlot {
    /// 0 free, 1 taken and not written yet, 2 live.
    state: AtomicU64,
    words: SequenceLock<WORDS>,
}

// What loom has instead of atomics is larger.
#[cfg(not(loom))]
const _: () = assert!(size_of::<ConnectionSlot>() == 448);

impl ConnectionSlot {
    /// Takes a free slot; `false` if it is another's.
    #[must_use]
    pub fn claim(&self) -> bool {
        // Acquire: what its owner before wrote happened before.
        self.state
            .compare_exchange(0, 1, Ordering::Acquire, Ordering::Relaxed)
            .is_ok()
    }

    /// Replaces what is in the slot, which is the caller's.
    pub fn write(&self, connection: &Connection) {
        // SAFETY: `Connection` is `repr(C)`, a multiple of 8 bytes, without padding, and plain data.
        let words = unsafe { &*core::ptr::from_ref(connection).cast::<[u64; WORDS]>() };
        self.words.write(words, || {});
        // Release: who sees it live sees these words or later ones, not those of the owner before.
        self.state.store(2, Ordering::Release);
    }

    /// Gives the slot back.
    pub fn free(&self) {
        self.state.store(0, Ordering::Release);
    }

    /// What is in the slot; `None` if nothing is, or it is being rewritten without end.
    #[must_use]
    pub fn read(&self) -> Option<Connection> {
        // Acquire: pairs with `write`.
        if self.state.load(Ordering::Acquire) != 2 {
            return None;
        }
        let words = self.words.read(|_| {})?;
        // SAFETY: `Connection` is plain data of exactly `WORDS` words; every bit pattern is valid.
        Some(unsafe { core::mem::transmute::<[u64; WORDS], Connection>(words) })
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;
    use crate::text::put_text;

    #[test]
    fn codes_have_their_names() {
        for (code, stage) in (0..).zip(LinkStage::ALL) {
            assert_eq!((LinkStage::from_code(code), *stage as u8), (Some(*stage), code));
        }
        assert_eq!(LinkStage::from_code(LinkStage::ALL.len() as u8), None);
        assert_eq!(
            PathCondition::from_code(3).map(PathCondition::name),
            Some("recovering")
        );
        assert_eq!(PathCondition::from_code(4), None);
    }

    #[test]
    fn a_slot_holds_what_its_owner_wrote_last() {
        // SAFETY: atomics; zero is a value of each.
        let slot: ConnectionSlot = unsafe { core::mem::zeroed() };
        assert_eq!(slot.read(), None);
        let mut connection = Connection {
            comm: 7,
            paths: 9,
            ..Connection::default()
        };
        put_text(&mut connection.path[1].device, "a_device_with_a_longer_name");
        assert_eq!(connection.paths().count(), PATHS);
        for epoch in 1..3 {
            assert!(slot.claim() && !slot.claim());
            // Not what the owner before left.
            assert_eq!(slot.read(), None);
            connection.epoch = epoch;
            slot.write(&connection);
            let read = slot.read().unwrap();
            assert_eq!(
                (read, read.path[1].device()),
                (connection, "a_device_with_a_longer_n")
            );
            slot.free();
            assert_eq!(slot.read(), None);
        }
    }
}
