//! Places of this process in the tables of its shared pages.

use std::sync::atomic::Ordering;

use ringsight_comm_base::fork;
use ringsight_records::{
    connection::{Connection, ConnectionSlot},
    pages::Communicator,
    proxies::{ProxySlot, ProxyState},
};

use super::pages;

/// A place in the communicator table, freed when dropped.
#[derive(Debug)]
pub struct TableEntry {
    slot: usize,
    fork: u32,
}

impl TableEntry {
    /// Enters a communicator. `None` if the table is full, which is counted, or there are no pages.
    #[must_use]
    pub fn claim(communicator: &Communicator) -> Option<Self> {
        let pages = pages()?;
        let slot = pages
            .communicators()
            .iter()
            .position(|slot| !slot.is_live() && slot.claim(communicator));
        if slot.is_none() {
            pages.header().comm_overflow.fetch_add(1, Ordering::Relaxed);
        }
        slot.map(|slot| Self {
            slot,
            fork: fork::generation(),
        })
    }

    /// Its index in the table.
    #[must_use]
    pub fn slot(&self) -> usize {
        self.slot
    }
}

impl Drop for TableEntry {
    fn drop(&mut self) {
        // In a forked child the pages are the parent's, or others: the slot is not ours.
        if self.fork == fork::generation()
            && let Some(pages) = pages()
        {
            pages.communicators()[self.slot].free();
        }
    }
}

/// A place in the connection table, freed when dropped.
#[derive(Debug)]
pub(crate) struct ConnectionEntry {
    slot: &'static ConnectionSlot,
    fork: u32,
}

impl ConnectionEntry {
    /// Takes one. `None` if the table is full, which is counted, or there are no pages.
    pub(crate) fn claim() -> Option<Self> {
        let pages = pages()?;
        let slot = pages.connections().iter().find(|slot| slot.claim());
        if slot.is_none() {
            pages.header().connection_overflow.fetch_add(1, Ordering::Relaxed);
        }
        slot.map(|slot| Self {
            slot,
            fork: fork::generation(),
        })
    }

    /// Replaces what is told of the connection.
    pub(crate) fn write(&self, connection: &Connection) {
        if self.fork == fork::generation() {
            self.slot.write(connection);
        }
    }
}

impl Drop for ConnectionEntry {
    fn drop(&mut self) {
        // In a forked child the slot is the parent's.
        if self.fork == fork::generation() {
            self.slot.free();
        }
    }
}

/// A place in the proxy table, freed when dropped.
#[derive(Debug)]
pub(crate) struct ProxyEntry {
    slot: &'static ProxySlot,
    fork: u32,
}

impl ProxyEntry {
    /// Takes one. `None` if the table is full, which is counted, or there are no pages.
    pub(crate) fn claim() -> Option<Self> {
        let pages = pages()?;
        let slot = pages.proxies().iter().find(|slot| slot.claim());
        if slot.is_none() {
            pages.header().proxy_overflow.fetch_add(1, Ordering::Relaxed);
        }
        slot.map(|slot| Self {
            slot,
            fork: fork::generation(),
        })
    }

    /// The slot, unless it is the parent's of this process.
    fn own(&self) -> Option<&'static ProxySlot> {
        (self.fork == fork::generation()).then_some(self.slot)
    }

    /// An operation's turn has come.
    pub(crate) fn begin(&self, proxy: &ProxyState) {
        self.own().into_iter().for_each(|slot| slot.begin(proxy));
    }

    /// It has come to this step.
    pub(crate) fn move_to(&self, op: u32, step: u32) {
        self.own().into_iter().for_each(|slot| slot.move_to(op, step));
    }

    /// Nothing is under way.
    pub(crate) fn rest(&self) {
        self.own().into_iter().for_each(ProxySlot::rest);
    }
}

impl Drop for ProxyEntry {
    fn drop(&mut self) {
        self.own().into_iter().for_each(ProxySlot::free);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_communicator_table_is_reused() {
        let _turn = super::super::tests::turn();
        // SAFETY: `Communicator` is plain data; zero is valid for every field.
        let communicator = Communicator {
            id: 42,
            ..unsafe { std::mem::zeroed() }
        };
        let entry = TableEntry::claim(&communicator).unwrap();
        let slot = &pages().unwrap().communicators()[entry.slot()];
        assert!(slot.is_live());
        assert_eq!(slot.read().unwrap().id, 42);
        drop(entry);
        assert!(!slot.is_live());
    }

    #[test]
    fn connections_are_in_the_pages_as_long_as_they_live() {
        let _turn = super::super::tests::turn();
        let told = || -> Vec<u64> {
            let slots = pages().unwrap().connections().iter();
            slots
                .filter_map(|slot| Some(slot.read()?.comm))
                .filter(|comm| *comm >> 8 == 0xc0)
                .collect()
        };
        let entries = [0xc001, 0xc002].map(|comm| {
            let entry = ConnectionEntry::claim().unwrap();
            entry.write(&Connection {
                comm,
                ..Connection::default()
            });
            entry
        });
        assert_eq!(told(), [0xc001, 0xc002]);
        let [first, _second] = entries;
        drop(first);
        assert_eq!(told(), [0xc002]);
    }
}
