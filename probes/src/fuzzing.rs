//! What the fuzzers run (`cargo xtask fuzz`), and what the test over their kept corpora runs again: each function feeds bytes of a target to
//! what reads them, and checks what holds for whatever they are.

use std::{fs::File, time::Duration};

use ringsight_records::{
    DescriptionSlot, PROBE_SYMBOLS,
    connection::ConnectionSlot,
    pages::{CommSlot, Geometry, Header, Reader},
    proxies::ProxySlot,
    ring::Slot,
    verdicts::VerdictSlot,
};
use rustix::fs::MemfdFlags;

use crate::{
    elf::{Blocks, HEAD_BYTES, Image},
    limits::{BUILD_ID_BYTES, CpuBudget, VARIABLE_BYTES},
    look::Look,
    pages::{Mapped, Search},
    procfs::{Environment, Read, parse_stat, read_mappings, status_field},
    sample::Sample,
    signature, version,
    watch::Watched,
};

/// A fuzz target.
pub type Target = fn(&[u8]);

/// Every target by name.
pub const TARGETS: [(&str, Target); 3] = [("elf", elf), ("pages", pages), ("procfs", procfs)];

/// A time that a fuzzer's small inputs never take.
fn soon() -> CpuBudget {
    CpuBudget::of(Duration::from_secs(5))
}

/// A library file.
pub fn elf(data: &[u8]) {
    let mut blocks = Blocks::default();
    let Ok(mut image) = Image::open(data, &mut blocks, soon()) else {
        return;
    };
    for names in [&PROBE_SYMBOLS[..], &signature::NAMES] {
        for found in [image.exports(names), image.linked_in(names)] {
            for symbol in found.into_iter().flatten() {
                assert!(names.contains(&&*symbol.name));
                // Where a probe would be placed is in the file, and begins as it says.
                let at = usize::try_from(symbol.offset).unwrap_or(usize::MAX);
                let there = &data[at..data.len().min(at + HEAD_BYTES)];
                assert!(!there.is_empty() && symbol.head.starts_with(there));
            }
        }
    }
    let _ = image.has_symbols();
    if let Ok(id) = image.build_id() {
        assert!(id.len() <= BUILD_ID_BYTES);
    }
    let _ = version::of(&mut image);
}

/// Texts of `/proc/PID`.
pub fn procfs(data: &[u8]) {
    /// Hands a text out in pieces, as the kernel does.
    struct Pieces<'a>(&'a [u8], usize);

    impl std::io::Read for Pieces<'_> {
        fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
            let limit = buffer.len().min(self.1);
            std::io::Read::read(&mut self.0, &mut buffer[..limit])
        }
    }

    let (piece, data) = data.split_first().unwrap_or((&0, &[]));
    let text = String::from_utf8_lossy(data);
    let _ = parse_stat(&text);
    for name in ["Tgid:", "NSpid:", "Uid:"] {
        let _ = status_field(&text, name).map(|field| field.split_whitespace().count());
    }
    // However it comes, it says the same.
    let list = |piece: usize| {
        let mut files = Vec::new();
        let end = read_mappings(Pieces(data, piece), soon(), |mapping| {
            files.extend(mapping.code());
            true
        });
        (files, end.ok())
    };
    assert_eq!(list(usize::MAX), list(usize::from(*piece) + 1));
    let environment = Environment::new(Read {
        bytes: data.to_vec(),
        is_cut: false,
    });
    for found in environment
        .variables(&["RANK", "NCCL_HOSTID", ""])
        .into_iter()
        .flatten()
    {
        assert!(found.value.len() <= VARIABLE_BYTES && !found.value.contains(&0));
    }
}

/// Bytes of one change of the pages: table, entry (two bytes), word in the entry, value (eight bytes).
const CHANGE: usize = 12;

/// Shared pages: those of a library, changed in places that the input names; then all that is done with pages of a live target, and of
/// a dead one.
pub fn pages(data: &[u8]) {
    let geometry = Geometry::standard();
    let Some(file) = changed(&geometry, data) else {
        return;
    };
    let Some(mut mapped) = Mapped::of_file(&file) else {
        return;
    };
    let look = Look::at(&mapped);
    for communicator in &look.communicators {
        let _ = (communicator.name().len(), communicator.apart().len());
    }
    let _ = mapped.identity().1.chars().count();
    let own = Reader::new(1, 2, 3);
    let Ok(base) = mapped.lease(&own, u64::MAX) else {
        return;
    };
    let mut watched = Watched::new(1, true, true, (Some((mapped, base)), Search::default()), 0);
    let mut samples = Vec::new();
    for (dead, now) in [(false, 1), (true, u64::MAX / 2)] {
        watched.communicators(&mut samples);
        watched.drain(usize::MAX, now, dead, &mut samples);
        watched.communicators_if_due(now, &mut samples);
        watched.lost(&mut samples);
        watched.publish();
    }
    watched.close(&mut samples);
    let _ = watched.counters();
    let records = samples
        .iter()
        .filter(|sample| matches!(sample, Sample::Record { .. }));
    // Each position of the ring is read once.
    assert!(records.count() <= 2 * geometry.file_bytes / size_of::<Slot>());
}

/// A file of pages with changes.
fn changed(geometry: &Geometry, data: &[u8]) -> Option<File> {
    use std::os::unix::fs::FileExt as _;

    let file = File::from(rustix::fs::memfd_create(c"fuzz", MemfdFlags::CLOEXEC).ok()?);
    file.set_len(geometry.file_bytes as u64).ok()?;
    let header = initialised(geometry);
    file.write_all_at(&header, 0).ok()?;
    let tables = [
        ((0, 1), size_of::<Header>()),
        (geometry.comms, size_of::<CommSlot>()),
        (geometry.eager, size_of::<DescriptionSlot>()),
        (geometry.captured, size_of::<DescriptionSlot>()),
        (geometry.ring, size_of::<Slot>()),
        (geometry.connections, size_of::<ConnectionSlot>()),
        (geometry.proxies, size_of::<ProxySlot>()),
        (geometry.verdicts, size_of::<VerdictSlot>()),
    ];
    for change in data.as_chunks::<CHANGE>().0 {
        let [table, low, high, word, value @ ..] = change;
        let ((offset, entries), bytes) = tables[usize::from(*table) % tables.len()];
        let entry = usize::from(u16::from_le_bytes([*low, *high])) % entries;
        // A header has more words than a byte counts; the upper bits of the table's number say which.
        let word = usize::from(*word) | usize::from(table / 8) << 8;
        let at = offset + entry * bytes + 8 * (word % (bytes / 8));
        file.write_all_at(value, at as u64).ok()?;
    }
    Some(file)
}

/// A header as the library writes it.
fn initialised(geometry: &Geometry) -> Vec<u8> {
    let mut place = std::mem::MaybeUninit::<Header>::zeroed();
    // SAFETY: a header is atomics and arrays of them; zero is a value of each.
    unsafe { place.assume_init_mut() }.initialise(geometry, 1, 2, 22809, "host");
    // SAFETY: all bytes of it were zeroed where they are.
    unsafe { std::slice::from_raw_parts(place.as_ptr().cast::<u8>(), size_of::<Header>()) }.to_vec()
}
