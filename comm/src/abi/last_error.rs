//! What `ncclGetLastError` and `ncclGetErrorString` say.
//!
//! A text that was returned is never freed: another thread may still read it when the one that asked has ended, or
//! failed again (PyTorch's watchdog does). Each thread that fails takes a [`Slot`] from a pool that only grows with the
//! number of threads that fail at the same time; within a slot, a text is overwritten by the thread's next failing call
//! but one.

use std::{
    cell::Cell,
    collections::VecDeque,
    ffi::{CStr, c_char, c_int},
    ptr,
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicPtr, AtomicU8, AtomicUsize, Ordering},
    },
};

use ringsight_comm_base::error::ResultCode;

use crate::communicator::{self, Handle};

/// Bytes of a text with its end.
const TEXT_BYTES: usize = 2048;
/// Free slots that are not used again: so many threads may fail and end before a text of the first is overwritten.
const RESTING: usize = 64;

/// A C string that can be overwritten while somebody reads it: its last byte is 0 for ever.
struct Text([AtomicU8; TEXT_BYTES]);

impl Text {
    const fn new() -> Self {
        Self([const { AtomicU8::new(0) }; TEXT_BYTES])
    }

    /// `text`, cut to what fits; a zero byte within becomes a space.
    fn write(&self, text: &str) {
        let length = text.floor_char_boundary(TEXT_BYTES - 1);
        // Relaxed: who is handed the pointer by this thread sees the text, by whatever it was handed through; who read
        // an older text here sees old and new bytes mixed, each of them whole, and an end.
        for (place, byte) in self.0.iter().zip(text[..length].bytes()) {
            place.store(if byte == 0 { b' ' } else { byte }, Ordering::Relaxed);
        }
        self.0[length].store(0, Ordering::Relaxed);
    }

    fn holds(&self, text: &str) -> bool {
        let length = text.floor_char_boundary(TEXT_BYTES - 1);
        let same = self.0.iter().zip(text[..length].bytes()).all(|(place, byte)| {
            let byte = if byte == 0 { b' ' } else { byte };
            place.load(Ordering::Relaxed) == byte
        });
        same && self.0[length].load(Ordering::Relaxed) == 0
    }

    fn as_ptr(&'static self) -> *const c_char {
        self.0.as_ptr().cast()
    }
}

/// The texts of one thread.
struct Slot {
    /// Of its failed calls, in turn.
    failed: [Text; 2],
    /// Of communicators that it asked about, in turn.
    asked: [Text; 2],
}

/// Slots of threads that have ended, oldest first.
static FREE: Mutex<VecDeque<&'static Slot>> = Mutex::new(VecDeque::new());
/// What failed last on any thread; null if nothing ever did.
static LATEST: AtomicPtr<Text> = AtomicPtr::new(ptr::null_mut());

/// A thread's hold of its slot.
struct Own {
    slot: &'static Slot,
    failed: Cell<Option<&'static Text>>,
    asked: Cell<Option<&'static Text>>,
}

impl Own {
    fn new() -> Self {
        let mut free = FREE.lock().unwrap_or_else(PoisonError::into_inner);
        let slot = if free.len() > RESTING {
            free.pop_front()
        } else {
            None
        };
        drop(free);
        Self {
            slot: slot.unwrap_or_else(|| {
                Box::leak(Box::new(Slot {
                    failed: [const { Text::new() }; 2],
                    asked: [const { Text::new() }; 2],
                }))
            }),
            failed: Cell::new(None),
            asked: Cell::new(None),
        }
    }

    /// Puts `text` into the place of the two that is not `current`.
    fn put(places: &'static [Text; 2], current: &Cell<Option<&'static Text>>, text: &str) -> &'static Text {
        let [first, second] = places;
        let place = match current.get() {
            Some(place) if ptr::eq(place, first) => second,
            _ => first,
        };
        place.write(text);
        current.set(Some(place));
        place
    }
}

impl Drop for Own {
    fn drop(&mut self) {
        FREE.lock()
            .unwrap_or_else(PoisonError::into_inner)
            .push_back(self.slot);
    }
}

thread_local! {
    static OWN: Own = Own::new();
}

/// The texts of threads whose variables are destroyed already while they still call: in destructors of static objects and
/// of other variables.
static LAST: [Text; LAST_TEXTS] = [const { Text::new() }; LAST_TEXTS];
/// So many calls of such threads may fail before a text is overwritten.
const LAST_TEXTS: usize = 16;

/// Puts `text` into the next place of [`LAST`].
fn put_last(text: &str) -> &'static Text {
    static TURN: AtomicUsize = AtomicUsize::new(0);
    // Relaxed: turns need to differ, they order nothing.
    let place = &LAST[TURN.fetch_add(1, Ordering::Relaxed) % LAST_TEXTS];
    place.write(text);
    place
}

/// Keeps `text` for this thread's `ncclGetLastError`, and says it in the log.
pub(crate) fn set(text: &str) {
    let place = OWN
        .try_with(|own| Own::put(&own.slot.failed, &own.failed, text))
        .unwrap_or_else(|_| put_last(text));
    // Release: whoever finds this text as the latest reads all of it.
    LATEST.store(ptr::from_ref(place).cast_mut(), Ordering::Release);
    tracing::warn!(target: ringsight_comm_base::log::CALL, "{text}");
}

fn last_error(comm: Handle) -> *const c_char {
    let failure = communicator::state(comm).ok().and_then(|(_, failure)| failure);
    let text = OWN.try_with(|own| match &failure {
        Some(error) => Some(match own.asked.get() {
            // The same pointer as long as the answer is the same.
            Some(asked) if asked.holds(&error.text) => asked,
            _ => Own::put(&own.slot.asked, &own.asked, &error.text),
        }),
        None => own.failed.get(),
    });
    // A thread that ends has no texts of its own any more.
    let text = text.unwrap_or_else(|_| failure.map(|error| put_last(&error.text)));
    match text {
        Some(text) => text.as_ptr(),
        // A thread of which nothing failed is told what failed elsewhere, as by NCCL.
        _ => {
            // Acquire: pairs with the release store of the text.
            let latest = LATEST.load(Ordering::Acquire);
            // SAFETY: null, or a text of a slot, which is never freed.
            unsafe { latest.as_ref() }.map_or(c"".as_ptr(), Text::as_ptr)
        }
    }
}

fn error_string(code: c_int) -> *const c_char {
    let text: &'static CStr = usize::try_from(code)
        .ok()
        .and_then(|code| ResultCode::ALL.get(code))
        .map_or(c"unknown result code", |code| code.text());
    text.as_ptr()
}

fn guarded(comm: Handle) -> *const c_char {
    std::panic::catch_unwind(|| last_error(comm)).unwrap_or(c"".as_ptr())
}

/// Why a call failed: what happened behind the caller's back on `comm` if anything did, else the last failed call of
/// this thread, else of any thread; "" if there was none. The text stays until this thread's next failing call; the
/// memory for ever.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(comm: Handle) -> *const c_char {
    guarded(comm)
}

/// [`ncclGetLastError`] under its profiling name.
#[unsafe(no_mangle)]
pub extern "C" fn pncclGetLastError(comm: Handle) -> *const c_char {
    guarded(comm)
}

/// A result code in words.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetErrorString(code: c_int) -> *const c_char {
    error_string(code)
}

/// [`ncclGetErrorString`] under its profiling name.
#[unsafe(no_mangle)]
pub extern "C" fn pncclGetErrorString(code: c_int) -> *const c_char {
    error_string(code)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    fn last() -> &'static CStr {
        // SAFETY: texts end, and are never freed.
        unsafe { CStr::from_ptr(ncclGetLastError(Handle(0))) }
    }

    #[test]
    fn a_text_outlives_its_thread_and_the_next_failure() {
        let before = thread::spawn(|| {
            set("the first");
            let first = last();
            assert_eq!(last().as_ptr(), first.as_ptr(), "asking changes nothing");
            first
        })
        .join()
        .unwrap();
        // Other tests' threads may come to as many again.
        for _ in 0..RESTING / 2 {
            thread::spawn(|| set("another")).join().unwrap();
        }
        assert_eq!(before, c"the first");
        set("a");
        let a = last();
        set("b");
        assert_eq!((a, last()), (c"a", c"b"));
        // A thread of which nothing failed.
        assert!(!thread::spawn(last).join().unwrap().is_empty());
    }

    #[test]
    fn texts_are_cut_at_a_character_and_hold_no_zero() {
        set(&"é".repeat(TEXT_BYTES));
        assert_eq!(last().to_str().unwrap(), "é".repeat(TEXT_BYTES / 2 - 1));
        set("a\0b");
        assert_eq!(last(), c"a b");
        set("");
        assert_eq!(last(), c"");
    }

    #[test]
    fn texts_that_are_read_while_they_change_have_an_end() {
        static TEXT: Text = Text::new();
        thread::scope(|scope| {
            scope.spawn(|| {
                for turn in 0..1000 {
                    TEXT.write(&"xy".repeat(turn % TEXT_BYTES));
                }
            });
            for _ in 0..1000 {
                // SAFETY: its last byte is 0 for ever; bytes are written whole.
                let length = unsafe { CStr::from_ptr(TEXT.as_ptr()) }.count_bytes();
                assert!(length < TEXT_BYTES);
            }
        });
    }
}
