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
        use core::arch::x86_64::{_MM_HINT_ET0, _mm_prefetch};
        let mut at = 0;
        while at < bytes {
            // SAFETY: it faults at no address.
            unsafe { _mm_prefetch::<_MM_HINT_ET0>(first.wrapping_add(at).cast()) };
            at += LINE;
        }
        // Where it begins within a line it may end in one more.
        if bytes > 0 {
            // SAFETY: as above.
            unsafe { _mm_prefetch::<_MM_HINT_ET0>(first.wrapping_add(bytes - 1).cast()) };
        }
    }
    #[cfg(not(target_arch = "x86_64"))]
    let _ = (first, bytes);
}
