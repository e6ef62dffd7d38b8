//! Cache lines that are asked for before they are needed.

/// Bytes of a cache line.
const LINE: usize = 64;

/// Asks for the cache lines of a value that this thread will soon write, and that another core may have: nobody waits for them. A hint, and
/// nothing on processors other than x86-64.
#[inline]
pub fn ask_for<T: ?Sized>(value: &T) {
    ask_for_bytes(core::ptr::from_ref(value).cast(), size_of_val(value));
}

/// The same of so many bytes, whatever is there.
#[inline]
pub fn ask_for_bytes(first: *const u8, bytes: usize) {
    #[cfg(target_arch = "x86_64")]
    {
        let mut at = 0;
        while at < bytes {
            ask_for_line(first.wrapping_add(at));
            at += LINE;
        }
        // Where it begins within a line it may end in one more.
        if bytes > 0 {
            ask_for_line(first.wrapping_add(bytes - 1));
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (first, bytes);
}

/// The line of this byte, for writing: by its instruction, for the intrinsic (`_MM_HINT_ET0`) asks for reading where the compiler is not told that
/// the processor has another, and whoever writes a line that was read waits for it once more.
#[cfg(target_arch = "x86_64")]
#[inline]
fn ask_for_line(byte: *const u8) {
    // SAFETY: it faults at no address and changes nothing. Processors that do not know it take it for no operation.
    unsafe { core::arch::asm!("prefetchw [{}]", in(reg) byte, options(readonly, nostack, preserves_flags)) };
}
