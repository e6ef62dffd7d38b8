//! Probes on functions of the kernel, as perf events with a cookie (Linux >= 5.15). `aya` 0.14 gives such probes none, and one program
//! serves all sites here, so the two system calls are made directly.

use std::{
    ffi::CString,
    io,
    os::fd::{AsRawFd as _, BorrowedFd, FromRawFd as _, OwnedFd},
};

use aya_obj::generated::{
    bpf_attach_type::BPF_PERF_EVENT, bpf_attr, bpf_cmd::BPF_LINK_CREATE, perf_event_attr,
};

use crate::host;

/// Where the kernel describes its source of such events.
const SOURCE: &str = "/sys/bus/event_source/devices/kprobe";
/// `PERF_FLAG_FD_CLOEXEC`.
const CLOSE_ON_EXEC: libc::c_ulong = 8;

fn number(name: &str) -> io::Result<String> {
    host::text(&format!("{SOURCE}/{name}")).map(|text| text.trim().to_owned())
}

/// Attaches `program` to a function, or to its return; the probe is gone with the descriptors.
pub(super) fn link(
    program: BorrowedFd<'_>,
    module: &str,
    function: &str,
    returns: bool,
    cookie: u64,
) -> io::Result<[OwnedFd; 2]> {
    // Two modules may have functions of one name.
    let name = CString::new(format!("{module}:{function}"))?;
    let malformed = || {
        io::Error::new(
            io::ErrorKind::InvalidData,
            "the kernel describes its probes in another way",
        )
    };
    // SAFETY: plain integers and unions of them; zero is "not given" for all.
    let mut event: perf_event_attr = unsafe { std::mem::zeroed() };
    event.type_ = number("type")?.parse().map_err(|_| malformed())?;
    event.size = size_of::<perf_event_attr>() as u32;
    event.__bindgen_anon_1.sample_period = 1;
    event.__bindgen_anon_3.kprobe_func = name.as_ptr() as u64;
    if returns {
        let format = number("format/retprobe")?;
        let bit: u32 = format
            .strip_prefix("config:")
            .and_then(|bit| bit.parse().ok())
            .filter(|bit| *bit < 64)
            .ok_or_else(malformed)?;
        event.config = 1 << bit;
    }
    // Every process, by way of the first processor: such an event counts on all.
    // SAFETY: `event` is whole and of the size that it says, its text lives until the call is over.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_perf_event_open,
            &raw const event,
            -1,
            0,
            -1,
            CLOSE_ON_EXEC,
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the kernel just returned this descriptor and nobody else has it.
    let event = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    // SAFETY: `bpf_attr` is a union of plain integers; zero is its documented "not given".
    let mut attributes: bpf_attr = unsafe { std::mem::zeroed() };
    attributes.link_create.__bindgen_anon_1.prog_fd = program.as_raw_fd() as u32;
    attributes.link_create.__bindgen_anon_2.target_fd = event.as_raw_fd() as u32;
    attributes.link_create.attach_type = BPF_PERF_EVENT as u32;
    attributes.link_create.__bindgen_anon_3.perf_event.bpf_cookie = cookie;
    // SAFETY: `attributes` is a whole `bpf_attr` of the size given.
    let fd = unsafe {
        libc::syscall(
            libc::SYS_bpf,
            BPF_LINK_CREATE,
            &raw mut attributes,
            size_of::<bpf_attr>(),
        )
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: as above.
    let link = unsafe { OwnedFd::from_raw_fd(fd as i32) };
    // The link goes first when they are dropped in order.
    Ok([link, event])
}
