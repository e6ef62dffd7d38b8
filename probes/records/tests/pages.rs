//! The shared pages belong to another process, which may be broken: no content may lead a reader outside the mapping, into a
//! panic, or to an entry that nobody wrote.

use std::{
    alloc::{Layout, alloc_zeroed, dealloc},
    sync::atomic::{AtomicBool, AtomicU32, Ordering},
};

use proptest::prelude::*;
use ringsight_records::{
    Description, DescriptionSlot, Kind, Record, State, VERSION,
    description::Time,
    pages::{CAPTURED, CommSlot, Communicator, Geometry, Header, MAGIC, Pages, PagesError, VERDICT_ENTRIES},
    proxies::ProxySlot,
    ring,
    verdicts::GivenVerdict,
};

/// Zeroed, page-aligned memory of exactly this many bytes.
struct Memory {
    base: *mut u8,
    layout: Layout,
}

impl Memory {
    fn new(bytes: usize) -> Self {
        let layout = Layout::from_size_align(bytes, 4096).unwrap();
        // SAFETY: `bytes` is not zero in any test.
        let base = unsafe { alloc_zeroed(layout) };
        assert!(!base.is_null());
        Self { base, layout }
    }

    fn standard() -> Self {
        let geometry = Geometry::standard();
        let memory = Self::new(geometry.file_bytes);
        memory.header().initialise(&geometry, 1, 2, 22809, "host");
        memory
    }

    #[expect(
        clippy::mut_from_ref,
        reason = "tests write the header before anybody views the pages"
    )]
    fn header(&self) -> &mut Header {
        assert!(self.layout.size() >= size_of::<Header>());
        // SAFETY: zeroed memory is a header; it is large and aligned enough.
        unsafe { &mut *self.base.cast() }
    }

    fn pages(&self) -> Result<Pages<'_>, PagesError> {
        // SAFETY: the memory is of this size and lives as long as `self`.
        unsafe { Pages::new(self.base, self.layout.size()) }
    }

    fn contains<T>(&self, table: &[T]) -> bool {
        let range = table.as_ptr_range();
        let base = self.base as usize;
        range.start as usize >= base + size_of::<Header>() && range.end as usize <= base + self.layout.size()
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout in `new`.
        unsafe { dealloc(self.base, self.layout) };
    }
}

/// Writes fields of a header.
fn put<const N: usize>(fields: [&mut AtomicU32; N], values: [u32; N]) {
    for (field, value) in fields.into_iter().zip(values) {
        *field.get_mut() = value;
    }
}

/// Numbers of which many nearly fit.
fn offset() -> impl Strategy<Value = u32> {
    prop_oneof![
        any::<u32>(),
        (0u32..1024).prop_map(|lines| lines * 64),
        Just(u32::MAX - 63),
        Just(u32::MAX),
        Just(4096),
    ]
}

fn entries() -> impl Strategy<Value = u32> {
    prop_oneof![any::<u32>(), (0u32..32).prop_map(|bits| 1 << bits), 0u32..1024]
}

proptest! {
    #[test]
    fn no_header_leads_outside_the_mapping(
        bytes in 1usize..(1 << 18),
        tables in prop::array::uniform7((offset(), entries())),
        version in prop_oneof![Just(u32::from(VERSION)), any::<u32>()],
        magic in prop_oneof![9 => Just(MAGIC), 1 => any::<u64>()],
        comm_bytes in prop_oneof![9 => Just(size_of::<CommSlot>() as u32), 1 => any::<u32>()],
        op in any::<u32>(),
    ) {
        let memory = Memory::new(bytes);
        if bytes >= size_of::<Header>() {
            let header = memory.header();
            let [comm, eager, captured, ring, connections, proxies, verdicts] = tables;
            put([&mut header.comm_offset, &mut header.comm_entries], comm.into());
            put([&mut header.eager_offset, &mut header.eager_entries], eager.into());
            put([&mut header.captured_offset, &mut header.captured_entries], captured.into());
            put([&mut header.ring_offset, &mut header.ring_slots], ring.into());
            put([&mut header.connection_offset, &mut header.connection_entries], connections.into());
            put([&mut header.proxy_offset, &mut header.proxy_entries], proxies.into());
            put([&mut header.verdict_offset, &mut header.verdict_entries], verdicts.into());
            put([&mut header.version, &mut header.comm_bytes], [version, comm_bytes]);
            header.magic.store(magic, Ordering::Release);
        }
        if let Ok(pages) = memory.pages() {
            prop_assert!(memory.contains(pages.communicators()));
            prop_assert!(memory.contains(pages.ring()));
            prop_assert!(pages.connections().is_empty() || memory.contains(pages.connections()));
            prop_assert!(pages.proxies().is_empty() || memory.contains(pages.proxies()));
            let _ = pages.verdicts().count() + pages.proxies().iter().filter_map(ProxySlot::read).count();
            prop_assert!(memory.contains(std::slice::from_ref(pages.slot(op & !CAPTURED))));
            prop_assert!(memory.contains(std::slice::from_ref(pages.slot(op | CAPTURED))));
            // And what lies there is nothing.
            let _ = pages.communicators().iter().filter_map(CommSlot::read).count();
            let _ = pages.description(op);
            let _ = ring::pop(&pages.header().cursor, pages.ring());
        }
    }

    #[test]
    fn a_ring_with_rubbish_in_it_ends(positions in any::<[u64; 2]>(), rubbish in any::<u8>()) {
        let memory = Memory::standard();
        let pages = memory.pages().unwrap();
        let slots = &pages.ring()[..256];
        // SAFETY: inside the memory; all bytes are atomics' or plain data's.
        unsafe { slots.as_ptr().cast::<u8>().cast_mut().write_bytes(rubbish, size_of_val(slots)) };
        pages.header().cursor.head.store(positions[0], Ordering::Relaxed);
        pages.header().cursor.tail.store(positions[1], Ordering::Relaxed);
        let taken = (0..=2 * slots.len()).take_while(|_| ring::pop(&pages.header().cursor, slots).is_some()).count();
        prop_assert!(taken <= slots.len(), "{taken}");
        let _ = ring::push(&pages.header().cursor, slots, &Record::new(Kind::Coll, State::START, 1));
    }

    #[test]
    fn any_64_bytes_are_a_record_and_back(bytes in prop::collection::vec(any::<u8>(), 64)) {
        let bytes: [u8; 64] = bytes.try_into().unwrap();
        let record = Record::from_bytes(&bytes);
        prop_assert_eq!(record.to_bytes(), bytes);
        let _ = (record.kind(), record.state.name(), record.flags(), record.version(), record.proxy_op_shape());
        // Every value is a carrier's.
        prop_assert_eq!(record.carrier().to_value(), record.value);
    }
}

#[test]
fn the_standard_geometry_is_its_own() {
    let memory = Memory::standard();
    let geometry = memory.header().geometry(memory.layout.size()).unwrap();
    assert_eq!(geometry, Geometry::standard());
    assert_eq!(
        memory.header().geometry(geometry.ring.0),
        Err(PagesError::Bounds("ring"))
    );
    assert_eq!(
        memory.header().geometry(memory.layout.size() - 4096),
        Err(PagesError::Bounds("verdict table"))
    );
}

#[test]
fn pages_of_a_library_without_the_later_tables_are_read() {
    let memory = Memory::standard();
    let header = memory.header();
    let entries = [
        &mut header.connection_entries,
        &mut header.proxy_entries,
        &mut header.verdict_entries,
    ];
    put(entries, [0; 3]);
    let pages = memory.pages().unwrap();
    assert!(pages.connections().is_empty() && pages.proxies().is_empty());
    pages.keep_verdict(&verdict(1));
    assert_eq!(pages.verdicts().count(), 0);
}

fn verdict(culprit: u32) -> GivenVerdict {
    GivenVerdict {
        culprit,
        // SAFETY: plain data; zero is valid for every field.
        ..unsafe { std::mem::zeroed() }
    }
}

#[test]
fn the_last_verdicts_are_kept_in_their_order() {
    let memory = Memory::standard();
    let pages = memory.pages().unwrap();
    let kept = || -> Vec<(u64, u32)> {
        let verdicts = pages.verdicts();
        verdicts.map(|kept| (kept.number, kept.culprit)).collect()
    };
    assert_eq!(kept(), []);
    for culprit in 100..103 {
        pages.keep_verdict(&verdict(culprit));
    }
    assert_eq!(kept(), [(1, 100), (2, 101), (3, 102)]);
    let entries = VERDICT_ENTRIES as u32;
    for culprit in 103..100 + 2 * entries + 5 {
        pages.keep_verdict(&verdict(culprit));
    }
    let first = entries + 5;
    let expected = (first..first + entries).map(|at| (u64::from(at) + 1, at + 100));
    assert_eq!(kept(), expected.collect::<Vec<_>>());
}

#[test]
fn a_count_of_verdicts_that_somebody_changed_ends_nobody() {
    let memory = Memory::standard();
    let pages = memory.pages().unwrap();
    memory.header().verdicts.store(u64::MAX, Ordering::Relaxed);
    pages.keep_verdict(&verdict(1));
    pages.keep_verdict(&verdict(2));
    assert_eq!(pages.verdicts().count(), 2);
}

/// Every field the same number: a description that mixes two writes shows.
fn uniform(n: u32) -> Description {
    let wide = u64::from(n);
    Description {
        comm: wide,
        seq: wide,
        count: wide,
        bytes: wide,
        stream: wide,
        device_end_ns: wide,
        op: 1,
        group: n,
        tid: n,
        waits: wide,
        waits_ns: wide,
        reserved: [wide; 3],
        ..Description::default()
    }
}

#[test]
fn a_description_is_never_read_torn() {
    let memory = Memory::standard();
    let pages = memory.pages().unwrap();
    let slot: &DescriptionSlot = pages.slot(1);
    let (done, mut seen) = (AtomicBool::new(false), 0u32);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for n in 1..=200_000 {
                slot.write(&uniform(n));
            }
            done.store(true, Ordering::Release);
        });
        let mut last = 0;
        while !done.load(Ordering::Acquire) {
            if let Some(description) = slot.read(1) {
                let n = description.group;
                assert_eq!(description, uniform(n), "torn");
                assert!(n >= last, "went back");
                last = n;
                seen += 1;
            }
        }
    });
    assert_eq!(slot.read(1), Some(uniform(200_000)));
    assert_eq!(slot.read(2), None, "another operation's");
    slot.set_times(1, [(Time::DeviceStart, 5)]);
    slot.set_times(2, [(Time::DeviceStart, 6)]);
    assert_eq!(
        slot.read(1).map(|description| description.device_start_ns),
        Some(5)
    );
    println!("{seen} whole reads");
}

#[test]
fn a_communicators_slot_is_claimed_once_and_reused() {
    let memory = Memory::standard();
    let pages = memory.pages().unwrap();
    let slot = &pages.communicators()[3];
    // SAFETY: plain integers; zero is a value of each.
    let mut communicator: Communicator = unsafe { std::mem::zeroed() };
    assert_eq!(slot.read(), None);
    communicator.id = 1;
    assert!(slot.claim(&communicator));
    communicator.id = 2;
    assert!(!slot.claim(&communicator));
    slot.free();
    assert_eq!(
        (slot.is_live(), slot.read().map(|read| read.id)),
        (false, Some(1))
    );
    assert!(slot.claim(&communicator));
    assert_eq!(slot.read().map(|read| read.id), Some(2));
}
