//! What the fuzzers run (`cargo xtask fuzz`), and what the test over their kept corpora runs again: each function feeds
//! bytes from outside to the parsers that would meet them, and checks what holds for whatever they accept.

use std::{alloc::Layout, ffi::CString, mem::offset_of};

use ringsight_records::{
    Record,
    description::DescriptionSlot,
    pages::{CommSlot, Pages, text},
    ring,
};

use crate::{
    abi::{NcclConfig, read_config},
    bootstrap, checks, communicator, proxy, topology, transport, watchdog,
};

/// A fuzz target.
pub type Target = fn(&[u8]);

/// Every target by name.
pub const TARGETS: [(&str, Target); 7] = [
    ("bootstrap", bootstrap),
    ("config", config),
    ("control", control),
    ("failover", failover),
    ("proxy", proxy),
    ("records", records),
    ("verbs", verbs),
];

/// Bytes of the largest config struct that any version accepts.
const CONFIG_BYTES: usize = 4096;

/// A caller's `ncclConfig_t`, of any version and with any values, but with strings that are strings.
pub fn config(data: &[u8]) {
    #[repr(align(8))]
    struct Place([u8; CONFIG_BYTES]);

    let mut place = Place([0; CONFIG_BYTES]);
    let (fields, name) = data.split_at(data.len().min(size_of::<NcclConfig>()));
    place.0[..fields.len()].copy_from_slice(fields);
    let name = CString::new(name.split(|byte| *byte == 0).next().unwrap_or_default()).unwrap_or_default();
    for offset in [
        offset_of!(NcclConfig, net_name),
        offset_of!(NcclConfig, comm_name),
    ] {
        let pointer = &mut place.0[offset..offset + 8];
        let value = if pointer[0] & 1 == 0 {
            0
        } else {
            name.as_ptr() as usize
        };
        pointer.copy_from_slice(&value.to_ne_bytes());
    }
    // SAFETY: as many bytes as any size that is accepted says; the strings are null or live until the end.
    if let Ok(config) = unsafe { read_config(place.0.as_ptr().cast()) }
        && let (Some(min), Some(max)) = (config.min_channels, config.max_channels)
    {
        assert!((1..=max).contains(&min));
    }
}

/// What a connection to the bootstrap or a carried unique id may say.
pub fn bootstrap(data: &[u8]) {
    bootstrap::fuzzing::messages(data);
    topology::RankInfo::fuzz(data);
}

/// What ranks that are connected tell each other: their terms, and what they called where calls differ, and where they are.
pub fn control(data: &[u8]) {
    communicator::fuzz(data);
    checks::message::fuzz(data);
    watchdog::fuzz(data);
}

/// What the ends of a connection over RDMA say to each other when a path fails, and what then happens to them.
pub fn failover(data: &[u8]) {
    ringsight_verbs::failover::fuzzing::ends(data);
}

/// Requests to a proxy, its responses, and what two proxies say to each other.
pub fn proxy(data: &[u8]) {
    if let Some((id, request)) = proxy::message::Request::parse(data) {
        assert_eq!(
            proxy::message::Request::parse(&request.encode(id)),
            Some((id, request))
        );
    }
    if let Some((id, response)) = proxy::message::parse_response(data) {
        let (again, _) = proxy::message::parse_response(&proxy::message::encode_response(id, &response))
            .expect("what was read can be written and read");
        assert_eq!(again, id);
    }
    transport::wire::fuzz(data);
}

/// What two ends of RDMA tell each other: before their connection stands, and with each step.
pub fn verbs(data: &[u8]) {
    ringsight_verbs::wire::Offer::fuzz(data);
    ringsight_verbs::endpoint::fuzz(data);
}

/// Records, description and communicator slots, and whole pages, as a collector finds them in another process.
pub fn records(data: &[u8]) {
    for bytes in data.as_chunks::<64>().0 {
        let record = Record::from_bytes(bytes);
        assert_eq!(record.to_bytes(), *bytes);
        let _ = (
            record.kind(),
            record.version(),
            record.flags(),
            record.state.name(),
            record.proxy_op_shape(),
            format!("{record:?}"),
        );
    }
    pages(data);
}

/// Bytes of the pages that are built from a fuzzer's.
const PAGES_BYTES: usize = 1 << 14;

/// Reads pages whose header and content are `data`.
fn pages(data: &[u8]) {
    struct Memory(*mut u8);
    const LAYOUT: Layout = match Layout::from_size_align(PAGES_BYTES, 4096) {
        Ok(layout) => layout,
        Err(_) => panic!("a page's alignment is a power of two"),
    };
    impl Drop for Memory {
        fn drop(&mut self) {
            // SAFETY: allocated below with this layout.
            unsafe { std::alloc::dealloc(self.0, LAYOUT) };
        }
    }
    // SAFETY: the layout has a size.
    let memory = Memory(unsafe { std::alloc::alloc_zeroed(LAYOUT) });
    assert!(!memory.0.is_null());
    let length = data.len().min(PAGES_BYTES);
    // SAFETY: as many bytes as both have.
    unsafe { std::ptr::copy_nonoverlapping(data.as_ptr(), memory.0, length) };
    // SAFETY: aligned, readable and writable, and nobody else's, for as long as `memory` lives.
    let Ok(pages) = (unsafe { Pages::new(memory.0, PAGES_BYTES) }) else {
        return;
    };
    let _ = text(&pages.header().host()).len();
    let live = pages.communicators().iter().filter_map(CommSlot::read);
    for communicator in live {
        let _ = (communicator.name().len(), format!("{communicator:?}"));
    }
    for op in [0, 1, 7, u32::MAX, ringsight_records::pages::CAPTURED] {
        let _ = pages
            .description(op)
            .map(|description| format!("{description:?}"));
        let _ = DescriptionSlot::op(pages.slot(op));
    }
    let (cursor, slots) = (&pages.header().cursor, pages.ring());
    // As a collector does once the writers are dead: everything is read or skipped, and that ends.
    for _ in 0..2 * slots.len() {
        if ring::pop(cursor, slots).is_none() {
            if !ring::is_held_up(cursor, slots) {
                break;
            }
            ring::skip(cursor, slots);
        }
    }
}
