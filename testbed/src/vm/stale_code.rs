//! Guests whose kernel QEMU breaks by running code that the kernel has replaced.
//!
//! Linux changes its own code (static keys, tracepoints, probes): it puts a breakpoint over an instruction, has all processors serialise,
//! and puts the new instruction there (`text_poke_bp_batch`, arch/x86/kernel/alternative.c). QEMU translates code ahead. Before version 8.1
//! (Debian 12 has 7.2) QEMU did not lock a page that it translates against stores of other processors. So one processor may keep a
//! translation of a breakpoint that is gone. The kernel then dies of an unknown breakpoint, or goes back to it for ever
//! (`kprobe_int3_handler`). Real processors and later QEMUs do neither. `perf_event_open` and probes make the kernel change code, and tests
//! use both often.

/// A guest whose kernel hit a breakpoint that was not there any more, or waited for a processor that does; the end of its console.
#[derive(Debug, thiserror::Error)]
#[error(
    "the emulator ran code that the guest's kernel had replaced, which broke the kernel; its console ends with\n{0}"
)]
pub(crate) struct StaleCode(pub(super) String);

impl StaleCode {
    /// Whether a console shows it: a breakpoint that nobody had set; a processor that does not get past an instruction of the kinds
    /// that are put in place of one another, jumps and no-ops; or the one that puts them there, which waits for another that takes no
    /// interrupts, since it does not get past such an instruction in one.
    pub(super) fn broke(console: &str) -> bool {
        if console.contains("int3: 0000 [#1]") {
            return true;
        }
        let Some((_, stuck)) = console.split_once("softlockup: hung tasks") else {
            return false;
        };
        let task = stuck.split("</TASK>").next().unwrap_or_default();
        if task.contains("RIP: 0010:smp_call_function_many_cond") && task.contains("text_poke_bp_batch") {
            return true;
        }
        let at = |line: &str| {
            let (_, code) = line.split_once("Code: ")?;
            let (_, at) = code.split_once('<')?;
            Some(at.replace('>', ""))
        };
        const PATCHED: [&str; 4] = ["eb ", "e9 ", "0f 1f ", "66 90"];
        stuck
            .lines()
            .find_map(at)
            .is_some_and(|code| PATCHED.iter().any(|bytes| code.starts_with(bytes)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_breakpoint_that_is_gone_is_told_from_what_is_wrong_with_the_kernel() {
        let died = "[    7.535583] Oops: int3: 0000 [#1] PREEMPT SMP NOPTI\n[    7.536621] RIP: 0010:__schedule+0x407/0xbf0\n";
        let died_before_6_7 = "[    7.5] int3: 0000 [#1] PREEMPT SMP NOPTI\n";
        let stuck = |code: &str| {
            format!(
                "[   84.4] watchdog: BUG: soft lockup - CPU#0 stuck for 78s! [links_fail:156]\n\
                 [   84.5] Kernel panic - not syncing: softlockup: hung tasks\n\
                 [   84.5] RIP: 0010:syscall_trace_enter.constprop.0+0xe9/0x1a0\n\
                 [   84.5] Code: ff ff ff e9 64 ff ff ff {code} ff ff 49 8b 55 6\n[   84.6] RSP: 0018:ffffc900004fbe10\n"
            )
        };
        let waits = |caller: &str| {
            // What else the console shows is of no account.
            format!(
                "[   96.6] watchdog: BUG: soft lockup - CPU#1 stuck for 89s! [sh:113]\n\
                 [   96.6] Kernel panic - not syncing: softlockup: hung tasks\n\
                 [   96.6] RIP: 0010:smp_call_function_many_cond+0xf1/0x330\n\
                 [   96.6] Code: 8b 56 08 83 e2 01 74 0a f3 90 <8b> 4e 08 83 e1 01 75 f6\n\
                 [   96.6]  on_each_cpu_cond_mask+0x20/0x40\n[   96.6]  {caller}+0xb7/0x300\n\
                 [   96.7]  </TASK>\n[   96.7]  text_poke_bp_batch+0xb7/0x300\n"
            )
        };
        for console in [
            died,
            &waits("text_poke_bp_batch"),
            died_before_6_7,
            &stuck("<eb> 63 e9"),
            &stuck("<0f> 1f 44"),
            &stuck("<66> 90 e9"),
        ] {
            assert!(StaleCode::broke(console), "{console}");
        }
        let bug = "[    7.5] Oops: 0002 [#1] PREEMPT SMP NOPTI\n[    7.5] Code: 48 <eb> 63\n";
        for console in [
            "",
            bug,
            "Kernel panic - not syncing: softlockup: hung tasks",
            &stuck("<f3> 90 eb"),
            &waits("flush_tlb_mm_range"),
            &stuck("<66> 8b 00"),
        ] {
            assert!(!StaleCode::broke(console), "{console}");
        }
    }
}
