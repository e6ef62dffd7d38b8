//! The four exported probe functions: the sites that a collector's uprobes attach to.
//!
//! Each takes the address of a [`Record`] and does nothing. On x86-64 the body is a 1-byte nop at offset 0 and a 5-byte
//! nop at offset [`ringsight_records::PROBE_NOP5_OFFSET`]: kernels since 6.18 turn the latter into a call, which costs
//! a tenth of a trap; older ones emulate the former without single-stepping. The tails differ so that no linker folds
//! two functions into one. The padding after `ret` raises the alignment of the function's section, so that no nop
//! straddles a cache line or a page (which the kernel would refuse to turn into a call).

use ringsight_records::Record;

macro_rules! probe {
    ($name:ident, $number:literal, $what:literal) => {
        #[doc = concat!("Probe site: ", $what)]
        ///
        /// # Safety
        /// Always safe to call; `record` is read by attached probes alone, which tolerate any address.
        #[cfg(target_arch = "x86_64")]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name(record: *const Record) {
            core::arch::naked_asm!(
                "nop",
                ".byte 0x0f, 0x1f, 0x44, 0x00, 0x00",
                concat!("mov eax, ", $number),
                "ret",
                ".p2align 5, 0xcc",
            )
        }

        #[doc = concat!("Probe site: ", $what)]
        ///
        /// # Safety
        /// Always safe to call; `record` is read by attached probes alone, which tolerate any address.
        #[cfg(target_arch = "aarch64")]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub unsafe extern "C" fn $name(record: *const Record) {
            core::arch::naked_asm!(
                "nop",
                "nop",
                concat!("mov w0, #", $number),
                "ret",
                ".p2align 5"
            )
        }
    };
}

probe!(
    ringsight_probe_launch,
    "1",
    "an operation was handed to the device."
);
probe!(
    ringsight_probe_proxy,
    "2",
    "every proxy operation of an operation has finished."
);
probe!(
    ringsight_probe_event,
    "3",
    "an operation has finished on the device."
);
probe!(
    ringsight_probe_lifecycle,
    "4",
    "a communicator or graph came or went."
);

/// The probe functions in the order of [`ringsight_records::PROBE_SYMBOLS`].
pub const PROBES: [unsafe extern "C" fn(*const Record); 4] = [
    ringsight_probe_launch,
    ringsight_probe_proxy,
    ringsight_probe_event,
    ringsight_probe_lifecycle,
];

/// Calls the probe function number `probe`. Direct calls, not through [`PROBES`]: an indirect branch costs more than
/// the function.
#[inline]
pub(super) fn call(probe: usize, record: &Record) {
    let record: *const Record = record;
    // SAFETY: the functions read nothing and touch only a scratch register.
    unsafe {
        match probe {
            0 => ringsight_probe_launch(record),
            1 => ringsight_probe_proxy(record),
            2 => ringsight_probe_event(record),
            _ => ringsight_probe_lifecycle(record),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[cfg(target_arch = "x86_64")]
    fn bodies_are_distinct_and_begin_with_the_nops() {
        let mut bodies = Vec::new();
        for probe in PROBES {
            let address = probe as usize;
            assert_eq!(address % 32, 0, "a probe function is not aligned");
            // SAFETY: 12 bytes of code: nop, nop5, mov eax imm32, ret.
            let body = unsafe { std::slice::from_raw_parts(address as *const u8, 12) };
            assert_eq!(body[..6], [0x90, 0x0f, 0x1f, 0x44, 0, 0]);
            assert_eq!(body[11], 0xc3);
            bodies.push(body);
        }
        bodies.sort_unstable();
        bodies.dedup();
        assert_eq!(bodies.len(), 4);
    }
}
