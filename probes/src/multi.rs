//! The `uprobe_multi` link (Linux >= 6.6): all sites of a file through one link. `aya` 0.14 has no such link, so the two system
//! calls are made here, with programs out of the same object and maps that `aya` made.
//!
//! What it is for is detaching (two-core virtual machine, Linux 6.18): the four probe functions take 27 ms through this link and
//! 430 ms through perf-event links (105 ms each, one after another, whatever the number of threads); six entries and six returns
//! of a stock library 74 ms and 1.1 s.

use std::{
    collections::HashSet,
    ffi::CStr,
    io,
    os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd, RawFd},
};

use aya_obj::{
    Object,
    generated::{
        BPF_F_UPROBE_MULTI_RETURN, bpf_attach_type::BPF_TRACE_UPROBE_MULTI, bpf_attr, bpf_cmd,
        bpf_prog_type::BPF_PROG_TYPE_KPROBE,
    },
};

/// The object's programs with map descriptors filled in, ready to be loaded.
pub(crate) struct Programs(Object);

impl Programs {
    /// Parses the object and points its map references to `maps` (name, descriptor).
    pub(crate) fn new(object: &[u8], maps: &[(&str, RawFd)]) -> Result<Self, String> {
        let mut object = Object::parse(object).map_err(|error| error.to_string())?;
        // BTF serves introspection only, and the copy that would be needed here is aya's.
        let text: HashSet<usize> = object.functions.keys().map(|(section, _)| *section).collect();
        let definitions = object.maps.clone();
        let known = maps
            .iter()
            .filter_map(|(name, fd)| Some((*name, *fd, definitions.get(*name)?)));
        object
            .relocate_maps(known, &text)
            .map_err(|error| error.to_string())?;
        object.relocate_calls(&text).map_err(|error| error.to_string())?;
        Ok(Self(object))
    }

    /// Loads a program for `uprobe_multi` links.
    pub(crate) fn load(&self, name: &str) -> io::Result<OwnedFd> {
        let missing = || {
            io::Error::new(
                io::ErrorKind::NotFound,
                format!("no program {name} in the object"),
            )
        };
        let program = self.0.programs.get(name).ok_or_else(missing)?;
        let function = self
            .0
            .functions
            .get(&program.function_key())
            .ok_or_else(missing)?;
        // SAFETY: `bpf_attr` is a union of plain integers; zero is its documented "not given".
        let mut attributes: bpf_attr = unsafe { std::mem::zeroed() };
        // SAFETY: all bytes of the union are initialised.
        let load = unsafe { &mut attributes.__bindgen_anon_3 };
        load.prog_type = BPF_PROG_TYPE_KPROBE as u32;
        load.expected_attach_type = BPF_TRACE_UPROBE_MULTI as u32;
        load.insns = function.instructions.as_ptr() as u64;
        load.insn_cnt = function.instructions.len() as u32;
        load.license = program.license.as_ptr() as u64;
        for (slot, byte) in load.prog_name.iter_mut().zip(name.bytes().take(15)) {
            *slot = byte as _;
        }
        bpf(bpf_cmd::BPF_PROG_LOAD, &mut attributes)
    }
}

/// Attaches a program to all `sites` (file offset, cookie) of the file at `path`, in every process that maps it.
pub(crate) fn link(
    program: BorrowedFd<'_>,
    path: &CStr,
    sites: &[(u64, u64)],
    returns: bool,
) -> io::Result<OwnedFd> {
    let (offsets, cookies): (Vec<u64>, Vec<u64>) = sites.iter().copied().unzip();
    // SAFETY: as in `Programs::load`.
    let mut attributes: bpf_attr = unsafe { std::mem::zeroed() };
    attributes.link_create.__bindgen_anon_1.prog_fd = program.as_raw_fd() as u32;
    attributes.link_create.attach_type = BPF_TRACE_UPROBE_MULTI as u32;
    // SAFETY: all bytes of the union are initialised; `link_create` is the member that BPF_LINK_CREATE reads.
    let multi = unsafe { &mut attributes.link_create.__bindgen_anon_3.uprobe_multi };
    multi.path = path.as_ptr() as u64;
    multi.offsets = offsets.as_ptr() as u64;
    multi.cookies = cookies.as_ptr() as u64;
    multi.cnt = sites.len() as u32;
    multi.flags = if returns { BPF_F_UPROBE_MULTI_RETURN } else { 0 };
    bpf(bpf_cmd::BPF_LINK_CREATE, &mut attributes)
}

fn bpf(command: bpf_cmd, attributes: &mut bpf_attr) -> io::Result<OwnedFd> {
    // SAFETY: `attributes` is a whole `bpf_attr` of the size given, and what it points to lives in the callers.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            command,
            &raw mut *attributes,
            size_of::<bpf_attr>(),
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just returned this descriptor (close-on-exec) and nobody else has it.
    Ok(unsafe { OwnedFd::from_raw_fd(fd as RawFd) })
}
