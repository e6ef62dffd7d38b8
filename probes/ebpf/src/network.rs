//! Sites in the kernel's RDMA stack. What a site's record holds is in its plan: see [`ringsight_records::network`].

use aya_ebpf::{
    EbpfContext,
    bindings::{BPF_ANY, BPF_RB_NO_WAKEUP},
    helpers::{
        bpf_get_attach_cookie, bpf_get_current_pid_tgid, bpf_ktime_get_ns, bpf_probe_read_kernel,
        bpf_probe_read_kernel_str_bytes,
    },
    macros::{kprobe, kretprobe, map, raw_tracepoint},
    maps::{Array, LruHashMap, PerCpuArray},
    programs::{ProbeContext, RawTracePointContext, RetProbeContext},
};
use ringsight_records::{
    network::{
        ARGUMENTS, COMMAND_SITE, Chain, NAME, NetworkRecord, NetworkTally, PENDING, PendingKey, PendingSite,
        RESULT, SITES, STEPS, SitePlan, UPPER, VALUES, flags,
    },
    probed,
};

use crate::{EVENTS, add, process};

/// What to read at each site.
#[map]
static NETWORK_PLANS: Array<SitePlan> = Array::with_max_entries(SITES as u32, 0);

/// Whether the events of every process are recorded (not 0), or those of watched ones.
#[map]
static NETWORK_SCOPE: Array<u32> = Array::with_max_entries(1, 0);

/// Calls that have been entered and have not returned.
#[map]
static NETWORK_PENDING: LruHashMap<PendingKey, PendingSite> = LruHashMap::with_max_entries(PENDING, 0);

/// Counts, by CPU.
#[map]
static NETWORK_TALLY: PerCpuArray<NetworkTally> = PerCpuArray::with_max_entries(1, 0);

/// Whose event this is: `None` if it is not to be recorded, 0 where it is nobody's.
#[inline(always)]
fn owner(plan: &SitePlan) -> Option<u64> {
    if plan.flags & flags::PROCESS == 0 {
        return Some(0);
    }
    if let Some(watched) = process() {
        return Some(watched.process);
    }
    (*NETWORK_SCOPE.get(0)? != 0).then(|| probed::process_key(0, (bpf_get_current_pid_tgid() >> 32) as u32))
}

/// The argument that a chain begins at. Constant indices only: the verifier knows no array of registers.
#[inline(always)]
fn source(arguments: &[u64; ARGUMENTS], result: u64, source: u8) -> u64 {
    match source {
        0 => arguments[0],
        1 => arguments[1],
        2 => arguments[2],
        3 => arguments[3],
        4 => arguments[4],
        5 => arguments[5],
        RESULT => result,
        _ => 0,
    }
}

/// Follows a chain up to the address that it ends at; 0 if a pointer on the way could not be read.
#[inline(always)]
fn follow(chain: &Chain, start: u64) -> u64 {
    let mut address = start;
    for step in 0..STEPS {
        if step < chain.steps as usize {
            address = address.wrapping_add_signed(i64::from(chain.offsets[step]));
            if step + 1 < chain.steps as usize {
                // SAFETY: the helper checks the address.
                address = unsafe { bpf_probe_read_kernel(address as *const u64) }.unwrap_or(0);
                if address == 0 {
                    return 0;
                }
            }
        }
    }
    address
}

#[inline(always)]
fn number(chain: &Chain, arguments: &[u64; ARGUMENTS], result: u64) -> u32 {
    let start = source(arguments, result, chain.source);
    if chain.steps == 0 {
        return match chain.size {
            1 => start as u8 as u32,
            2 => start as u16 as u32,
            UPPER => (start >> 32) as u32,
            _ => start as u32,
        };
    }
    let address = follow(chain, start);
    // SAFETY: the helper checks the address.
    unsafe {
        match chain.size {
            1 => bpf_probe_read_kernel(address as *const u8).unwrap_or(0) as u32,
            2 => bpf_probe_read_kernel(address as *const u16).unwrap_or(0) as u32,
            _ => bpf_probe_read_kernel(address as *const u32).unwrap_or(0),
        }
    }
}

/// The error in a pointer (`ERR_PTR`), else what an `int` function returned. A pointer that is none says 0: kernel pointers have
/// their upper half set, errors all of it down to the last 12 bits.
#[inline(always)]
fn error_of(result: u64) -> i32 {
    let upper = (result >> 32) as u32;
    if upper == 0 || upper == u32::MAX && result as i32 >= -4095 && (result as i32) < 0 {
        result as i32
    } else {
        0
    }
}

/// Records an event, or counts that there was no room.
#[inline(always)]
fn emit(site: u64, plan: &SitePlan, call: &PendingSite, result: u64, duration_ns: u64) {
    let Some(tally) = NETWORK_TALLY.get_ptr_mut(0) else {
        return;
    };
    let index = site as usize & (SITES - 1);
    // SAFETY: `tally` is a valid map value and the index below its arrays' length; only addresses are formed.
    let (hits, lost) = unsafe {
        (
            (&raw mut (*tally).hits).cast::<u64>().add(index),
            (&raw mut (*tally).lost).cast::<u64>().add(index),
        )
    };
    add(hits, 1);
    let Some(mut entry) = EVENTS.reserve::<NetworkRecord>(0) else {
        add(lost, 1);
        return;
    };
    let mut values = [0; VALUES];
    for (value, chain) in values.iter_mut().zip(&plan.values) {
        *value = number(chain, &call.arguments, result);
    }
    let mut device = [0; NAME];
    let start = source(&call.arguments, result, plan.device.source);
    let name = follow(&plan.device, start);
    if name != 0 {
        // SAFETY: the helper checks the address. What it cannot read leaves no name.
        let _ = unsafe { bpf_probe_read_kernel_str_bytes(name as *const u8, &mut device) };
    }
    entry.write(NetworkRecord {
        time_ns: call.start_ns,
        process: call.process,
        duration_ns: duration_ns.min(u64::from(u32::MAX)) as u32,
        result: error_of(result),
        site: site as u16,
        reserved: 0,
        values,
        device,
    });
    entry.submit(u64::from(BPF_RB_NO_WAKEUP));
}

/// The site that was hit, its plan, and the call, if it is to be recorded.
#[inline(always)]
fn entered(ctx: &ProbeContext) -> Option<(u64, &'static SitePlan, PendingSite)> {
    // SAFETY: the helper reads the cookie of the site that was hit.
    let site = unsafe { bpf_get_attach_cookie(ctx.as_ptr()) };
    let plan = NETWORK_PLANS.get(site as u32)?;
    let mut call = PendingSite {
        // SAFETY: no precondition.
        start_ns: unsafe { bpf_ktime_get_ns() },
        process: owner(plan)?,
        arguments: [0; ARGUMENTS],
    };
    for (index, argument) in call.arguments.iter_mut().enumerate() {
        *argument = ctx.arg(index).unwrap_or(0);
    }
    Some((site, plan, call))
}

/// A site of which the entry says all.
#[kprobe]
pub fn network_event(ctx: ProbeContext) -> u32 {
    if let Some((site, plan, call)) = entered(&ctx) {
        emit(site, plan, &call, 0, 0);
    }
    0
}

/// A site whose result is waited for.
#[kprobe]
pub fn network_entry(ctx: ProbeContext) -> u32 {
    if let Some((site, _, call)) = entered(&ctx) {
        let id = bpf_get_current_pid_tgid();
        let _ = NETWORK_PENDING.insert(&PendingKey { id, site }, &call, u64::from(BPF_ANY));
    }
    0
}

/// It returned.
#[kretprobe]
pub fn network_return(ctx: RetProbeContext) -> u32 {
    // SAFETY: the helper reads the cookie of the site that was hit.
    let site = unsafe { bpf_get_attach_cookie(ctx.as_ptr()) };
    let key = PendingKey {
        id: bpf_get_current_pid_tgid(),
        site,
    };
    // SAFETY: only this thread writes this key, and it is here.
    let Some(call) = (unsafe { NETWORK_PENDING.get(&key) }) else {
        return 0;
    };
    if let Some(plan) = NETWORK_PLANS.get(site as u32) {
        // SAFETY: no precondition.
        let duration = unsafe { bpf_ktime_get_ns() }.saturating_sub(call.start_ns);
        emit(site, plan, call, ctx.ret::<u64>(), duration);
    }
    let _ = NETWORK_PENDING.remove(&key);
    0
}

/// `mlx5:mlx5_cmd`: a command that a ConnectX's firmware refused. Its arguments are (text, opcode, modifier, text, status, syndrome,
/// error), the same since Linux 5.18, which has it first.
#[raw_tracepoint(tracepoint = "mlx5_cmd")]
pub fn network_command(ctx: RawTracePointContext) -> u32 {
    let Some(plan) = NETWORK_PLANS.get(COMMAND_SITE as u32) else {
        return 0;
    };
    // SAFETY: no precondition.
    let start_ns = unsafe { bpf_ktime_get_ns() };
    let arguments: [u64; ARGUMENTS] = [
        ctx.arg::<u64>(1),
        ctx.arg::<u64>(2),
        ctx.arg::<u64>(4),
        ctx.arg::<u64>(5),
        ctx.arg::<u64>(6),
        0,
    ];
    // The firmware's answer is read by whoever gave the command, but for commands that nobody waits for.
    let process = process().map_or(0, |watched| watched.process);
    let call = PendingSite {
        start_ns,
        process,
        arguments,
    };
    emit(COMMAND_SITE, plan, &call, 0, 0);
    0
}
