//! What `ncclGetLastError` and `ncclGetErrorString` say.

use std::{
    cell::RefCell,
    ffi::{CStr, CString, c_char, c_int},
};

use crate::{
    communicator::{self, Handle},
    error::ResultCode,
};

thread_local! {
    /// The last failed call of this thread.
    static LAST: RefCell<CString> = RefCell::default();
    /// What `ncclGetLastError` last returned to this thread for a communicator's own failure.
    static RETURNED: RefCell<CString> = RefCell::default();
}

/// Keeps `text` for this thread's `ncclGetLastError`.
pub(crate) fn set(text: &str) {
    // A zero byte would end the text there anyway.
    let text = CString::new(text.replace('\0', " ")).unwrap_or_default();
    // Nobody can ask while the thread's variables are being destroyed.
    let _ = LAST.try_with(|last| last.replace(text));
}

fn last_error(comm: Handle) -> *const c_char {
    std::panic::catch_unwind(|| {
        let failure = communicator::state(comm).ok().and_then(|(_, failure)| failure);
        match failure {
            Some(error) => RETURNED.with(|returned| {
                *returned.borrow_mut() = CString::new(error.text.replace('\0', " ")).unwrap_or_default();
                returned.borrow().as_ptr()
            }),
            None => LAST.with(|last| last.borrow().as_ptr()),
        }
    })
    .unwrap_or(c"".as_ptr())
}

fn error_string(code: c_int) -> *const c_char {
    let text: &'static CStr = usize::try_from(code)
        .ok()
        .and_then(|code| ResultCode::ALL.get(code))
        .map_or(c"unknown result code", |code| code.text());
    text.as_ptr()
}

/// Why a call failed: what happened behind the caller's back on `comm` if anything did, else the last failed call of
/// this thread. Valid until this thread's next failing call.
#[unsafe(no_mangle)]
pub extern "C" fn ncclGetLastError(comm: Handle) -> *const c_char {
    last_error(comm)
}

/// [`ncclGetLastError`] under its profiling name.
#[unsafe(no_mangle)]
pub extern "C" fn pncclGetLastError(comm: Handle) -> *const c_char {
    last_error(comm)
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
