//! What runs in the kernel when an observed process passes a probe site: copy the record (or the call's arguments) into
//! the ring buffer, count, nothing else. Everything that needs thought happens in the reader.
//!
//! The programs are loaded twice by the same object: as `uprobe_multi` programs where the kernel has that link (>= 6.6),
//! as ordinary perf-event uprobes elsewhere.
#![no_std]
#![no_main]
// The BPF target of `core` has no read-modify-write atomics; see `add`.
#![feature(asm_experimental_arch)]

/// Logs to the loader where the programs are built with the feature `log`, and is nothing where they are not. Of a process that
/// is not watched nothing is logged: every process that passes a site runs these programs.
#[cfg(feature = "log")]
macro_rules! trace {
    ($ctx:expr, $($argument:tt)*) => {
        aya_log_ebpf::info!($ctx, $($argument)*)
    };
}
#[cfg(not(feature = "log"))]
macro_rules! trace {
    ($ctx:expr, $($argument:tt)*) => {};
}

mod network;

use core::arch::asm;

use aya_ebpf::{
    EbpfContext,
    bindings::{BPF_ANY, BPF_F_NO_PREALLOC, BPF_RB_NO_WAKEUP},
    helpers::{
        bpf_get_attach_cookie, bpf_get_current_pid_tgid, bpf_get_ns_current_pid_tgid, bpf_ktime_get_ns,
        bpf_probe_read_user, bpf_probe_read_user_buf,
    },
    macros::{map, uprobe, uretprobe},
    maps::{Array, LruHashMap, PerCpuHashMap, RingBuf},
    programs::{ProbeContext, RetProbeContext},
};
use ringsight_records::{
    Kind, ProbedRecord, Record,
    probed::{self, CallKey, PendingCall, PidNamespace, ProbedCall, Tally},
};

/// Records and calls, told apart by their length. 16 MiB: 170 000 records, a reader that is held up for 100 ms at
/// more than 1 M records/s loses none.
#[map]
static EVENTS: RingBuf = RingBuf::with_byte_size(probed::RING_BYTES, 0);

/// Watched processes, and what was seen of each, by [`probed::process_key`]. Per CPU: no shared
/// cache line among probes; not preallocated: on hosts of hundreds of CPUs a full table would take 100 MB.
#[map]
static PROCESSES: PerCpuHashMap<u64, Tally> =
    PerCpuHashMap::with_max_entries(probed::PROCESSES, BPF_F_NO_PREALLOC);

/// Pid namespaces to look up a process in; an entry with inode 0 ends the list. The list is empty when the loader lives
/// in the initial namespace, whose pids need no translation.
#[map]
static NAMESPACES: Array<PidNamespace> = Array::with_max_entries(probed::NAMESPACES, 0);

/// Calls of stock libraries that have been entered and have not returned. Least recently used ones go first: a thread that
/// dies in a call, or longjmps out of it, leaves nothing behind that lasts.
#[map]
static PENDING: LruHashMap<CallKey, PendingCall> = LruHashMap::with_max_entries(probed::PENDING_CALLS, 0);

/// The current thread's process as the reader knows it.
struct Watched {
    /// Its key among [`PROCESSES`], which is what the reader tells it by.
    process: u64,
    /// Thread id, in the namespace that the key names.
    tid: u32,
    /// `tgid << 32 | tid` in the initial namespace.
    id: u64,
    tally: *mut Tally,
}

/// `None` if the current process is not watched through this site's library.
#[inline(always)]
fn watched(cookie: u64) -> Option<Watched> {
    let watched = process()?;
    // SAFETY: `tally` is a valid map value.
    (unsafe { (*watched.tally).library } == probed::library_of(cookie)).then_some(watched)
}

#[inline(always)]
fn process() -> Option<Watched> {
    let id = bpf_get_current_pid_tgid();
    let process = probed::process_key(0, (id >> 32) as u32);
    if let Some(tally) = PROCESSES.get_ptr_mut(&process) {
        return Some(Watched {
            process,
            tid: id as u32,
            id,
            tally,
        });
    }
    for index in 0..probed::NAMESPACES {
        let namespace = NAMESPACES.get(index)?;
        if namespace.inode == 0 {
            return None;
        }
        let mut info = aya_ebpf::bindings::bpf_pidns_info { pid: 0, tgid: 0 };
        // SAFETY: `info` is writable and its size is given; the helper fails if the current task is in another namespace.
        let failed = unsafe {
            bpf_get_ns_current_pid_tgid(
                namespace.device,
                namespace.inode,
                &raw mut info,
                size_of_val(&info) as u32,
            )
        };
        if failed == 0 {
            let process = probed::process_key(index + 1, info.tgid);
            let tally = PROCESSES.get_ptr_mut(&process)?;
            return Some(Watched {
                process,
                tid: info.pid,
                id,
                tally,
            });
        }
    }
    None
}

/// Adds to a counter of this CPU. Atomic all the same: where the kernel is preemptible, another thread's probe may run
/// on this CPU between a load and a store.
#[inline(always)]
fn add(counter: *mut u64, count: u64) {
    // SAFETY: `counter` points into a map value, 8-byte aligned, which lives as long as the program runs.
    unsafe { asm!("lock *(u64 *)({0} + 0) += {1}", in(reg) counter, in(reg) count) };
}

/// The per-kind counter; the mask tells the verifier what the layout says: 32 kinds.
#[inline(always)]
fn of_kind(counters: *mut [u64; Kind::LIMIT], kind: u8) -> *mut u64 {
    // SAFETY: the index is below 32.
    unsafe { counters.cast::<u64>().add(kind as usize & (Kind::LIMIT - 1)) }
}

/// A probe function of the library was called: its argument is a `*const Record`.
#[uprobe]
pub fn on_record(ctx: ProbeContext) -> u32 {
    // SAFETY: the helper reads the cookie of the site that was hit.
    let cookie = unsafe { bpf_get_attach_cookie(ctx.as_ptr()) };
    let Some(Watched {
        process, tid, tally, ..
    }) = watched(cookie)
    else {
        return 0;
    };
    let Some(pointer) = ctx.arg::<*const Record>(0) else {
        return 0;
    };
    // SAFETY: `tally` is a valid map value; only addresses are formed here.
    let (hits, lost, faults) = unsafe {
        (
            &raw mut (*tally).hits,
            &raw mut (*tally).lost,
            &raw mut (*tally).faults,
        )
    };

    let Some(mut entry) = EVENTS.reserve::<ProbedRecord>(0) else {
        // Full: what is lost is at least counted under its kind.
        // SAFETY: the helper checks the address.
        let kind =
            unsafe { bpf_probe_read_user(pointer.cast::<u8>().add(core::mem::offset_of!(Record, kind))) };
        match kind {
            Ok(kind) => {
                trace!(
                    &ctx,
                    "thread {}: the ring is full, a record of kind {} is lost", tid, kind
                );
                add(of_kind(hits, kind), 1);
                add(of_kind(lost, kind), 1);
            }
            Err(_) => add(faults, 1),
        }
        return 0;
    };
    let out = entry.as_mut_ptr();
    // SAFETY: `out` is 88 reserved bytes; the slice covers exactly the record in it.
    let (read, kind) = unsafe {
        (&raw mut (*out).process).write(process);
        (&raw mut (*out).cookie).write(cookie);
        (&raw mut (*out).tid).write(tid);
        (&raw mut (*out).reserved).write(0);
        let record = &raw mut (*out).record;
        let bytes = core::slice::from_raw_parts_mut(record.cast::<u8>(), size_of::<Record>());
        (bpf_probe_read_user_buf(pointer.cast::<u8>(), bytes), record)
    };
    if read.is_err() {
        trace!(
            &ctx,
            "thread {}: the record at {:x} cannot be read", tid, pointer as u64
        );
        entry.discard(u64::from(BPF_RB_NO_WAKEUP));
        add(faults, 1);
        return 0;
    }
    // SAFETY: the record was just read into the reserved bytes.
    add(of_kind(hits, unsafe { (*kind).kind }), 1);
    // The reader drains on a timer: no wake-up, whose interrupt work would cost the target more than the copy.
    entry.submit(u64::from(BPF_RB_NO_WAKEUP));
    0
}

/// The seventh and eighth integer argument: on x86-64 they lie above the return address.
#[cfg(bpf_target_arch = "x86_64")]
#[inline(always)]
fn further_arguments(ctx: &ProbeContext) -> (u64, u64) {
    // SAFETY: `ctx.regs` are the registers at the site; the helper checks the addresses.
    unsafe {
        let stack = (*ctx.regs).rsp as *const u64;
        (
            bpf_probe_read_user(stack.add(1)).unwrap_or(0),
            bpf_probe_read_user(stack.add(2)).unwrap_or(0),
        )
    }
}

/// The seventh and eighth integer argument: in registers like the others.
#[cfg(not(bpf_target_arch = "x86_64"))]
#[inline(always)]
fn further_arguments(ctx: &ProbeContext) -> (u64, u64) {
    (ctx.arg(6).unwrap_or(0), ctx.arg(7).unwrap_or(0))
}

/// An exported function of a library without our probe functions was entered.
#[uprobe]
pub fn on_entry(ctx: ProbeContext) -> u32 {
    // SAFETY: as in `on_record`.
    let cookie = unsafe { bpf_get_attach_cookie(ctx.as_ptr()) };
    let Some(Watched { id, .. }) = watched(cookie) else {
        return 0;
    };
    let mut call = PendingCall {
        // SAFETY: no precondition.
        start_ns: unsafe { bpf_ktime_get_ns() },
        arguments: [0; probed::ARGUMENTS],
    };
    for index in 0..6 {
        call.arguments[index] = ctx.arg(index).unwrap_or(0);
    }
    if cookie & probed::STACK_ARGUMENTS != 0 {
        let further = further_arguments(&ctx);
        (call.arguments[6], call.arguments[7]) = further;
    }
    let _ = PENDING.insert(&CallKey { id, cookie }, &call, u64::from(BPF_ANY));
    trace!(&ctx, "thread {}: site {:x} entered", id as u32, cookie);
    0
}

/// It returned.
#[uretprobe]
pub fn on_return(ctx: RetProbeContext) -> u32 {
    // SAFETY: as in `on_record`.
    let cookie = unsafe { bpf_get_attach_cookie(ctx.as_ptr()) };
    let Some(Watched {
        process,
        tid,
        id,
        tally,
    }) = watched(cookie)
    else {
        return 0;
    };
    // SAFETY: no precondition.
    let end_ns = unsafe { bpf_ktime_get_ns() };
    let key = CallKey { id, cookie };
    // SAFETY: only this thread writes this key, and it is here; an eviction at this moment leaves stale bytes, no fault.
    let Some(call) = (unsafe { PENDING.get(&key) }) else {
        return 0;
    };
    // SAFETY: `tally` is a valid map value; only addresses are formed here.
    let (calls, lost) = unsafe { (&raw mut (*tally).calls, &raw mut (*tally).calls_lost) };
    add(calls, 1);
    trace!(
        &ctx,
        "thread {}: site {:x} returned after {} ns",
        tid,
        cookie,
        end_ns - call.start_ns
    );
    if let Some(mut entry) = EVENTS.reserve::<ProbedCall>(0) {
        entry.write(ProbedCall {
            process,
            cookie,
            start_ns: call.start_ns,
            end_ns,
            result: ctx.ret::<u64>() as i32,
            tid,
            arguments: call.arguments,
        });
        entry.submit(u64::from(BPF_RB_NO_WAKEUP));
    } else {
        add(lost, 1);
    }
    let _ = PENDING.remove(&key);
    0
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}

// `bpf_probe_read_user` and the tracing helpers are for GPL-compatible programs alone. Of this crate's two licences this is
// the one that the kernel knows a word for (`LICENSE-GPL2`).
#[unsafe(link_section = "license")]
#[unsafe(no_mangle)]
static LICENSE: [u8; 4] = *b"GPL\0";
