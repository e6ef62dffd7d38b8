//! What the kernel shows of the target.

use std::{fs, io, path::Path, ptr};

use anyhow::{Context as _, Result, ensure};

use crate::{Act, check, map_library};

/// H7: 1 GiB of memory passes for the environment.
pub(crate) fn environment(library: &Path) -> Result<Act> {
    const BYTES: usize = 1 << 30;
    map_library(library)?;
    // SAFETY: a fresh mapping; its pages are all the kernel's page of zeros until somebody writes them.
    let memory = unsafe {
        libc::mmap(
            ptr::null_mut(),
            BYTES,
            libc::PROT_READ | libc::PROT_WRITE,
            libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
            -1,
            0,
        )
    };
    ensure!(memory != libc::MAP_FAILED, "{}", io::Error::last_os_error());
    // SAFETY: the first bytes of the mapping above.
    unsafe { ptr::copy_nonoverlapping(c"RANK=7".as_ptr(), memory.cast(), 7) };
    let stat = String::from_utf8_lossy(&fs::read("/proc/self/stat")?).into_owned();
    let (_, fields) = stat.rsplit_once(')').context("a name in parentheses")?;
    let fields: Vec<u64> = fields
        .split_ascii_whitespace()
        .map(|field| field.parse().unwrap_or(0))
        .collect();
    // Fields are counted from 1; the first here is the third.
    let field = |number: usize| fields[number - 3];
    // SAFETY: asks for the end of the heap and changes nothing.
    let heap_end = unsafe { libc::sbrk(0) } as u64;
    let map = Map {
        start_code: field(26),
        end_code: field(27),
        start_data: field(45),
        end_data: field(46),
        start_brk: field(47),
        brk: heap_end,
        start_stack: field(28),
        arg_start: field(48),
        arg_end: field(49),
        env_start: memory as u64,
        env_end: memory as u64 + BYTES as u64,
        auxv: 0,
        auxv_size: 0,
        exe_fd: u32::MAX,
    };
    // SAFETY: `map` is what the kernel calls `struct prctl_mm_map`, and of the size that is given.
    let done = unsafe {
        libc::prctl(
            libc::PR_SET_MM,
            PR_SET_MM_MAP,
            &raw const map,
            size_of::<Map>(),
            0,
        )
    };
    check(done, "PR_SET_MM_MAP")?;
    Ok(Box::new(|_| Ok("done".to_owned())))
}

/// linux/prctl.h.
const PR_SET_MM_MAP: libc::c_ulong = 14;

/// `struct prctl_mm_map`: where the parts of a process's memory are.
#[repr(C)]
struct Map {
    start_code: u64,
    end_code: u64,
    start_data: u64,
    end_data: u64,
    start_brk: u64,
    brk: u64,
    start_stack: u64,
    arg_start: u64,
    arg_end: u64,
    env_start: u64,
    env_end: u64,
    auxv: u64,
    auxv_size: u32,
    exe_fd: u32,
}
