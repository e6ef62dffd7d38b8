//! `fixture_target LIBRARY`: loads a library and calls its functions, one line of standard input a call: a name and integer
//! arguments. Answers each with a line: what the function returned. `mark NAME` answers with the address of a symbol.
//! Ends at the end of its input. For tests and benches only.

use std::{
    ffi::{CString, c_void},
    io::{BufRead as _, Write as _},
};

type Function = extern "C" fn(u64, u64, u64, u64, u64, u64, u64, u64) -> u64;

fn symbol(library: *mut c_void, name: &str) -> *mut c_void {
    let name = CString::new(name).expect("no zero byte in a line of text");
    // SAFETY: a handle of dlopen and a string.
    let symbol = unsafe { libc::dlsym(library, name.as_ptr()) };
    assert!(!symbol.is_null(), "no symbol {name:?}");
    symbol
}

fn main() {
    let path = std::env::args().nth(1).expect("usage: fixture_target LIBRARY");
    let path = CString::new(path).expect("no zero byte in an argument");
    // SAFETY: loads a library of the tests.
    let library = unsafe { libc::dlopen(path.as_ptr(), libc::RTLD_NOW) };
    // SAFETY: dlerror after a failure is a valid string.
    assert!(!library.is_null(), "{:?}", unsafe {
        std::ffi::CStr::from_ptr(libc::dlerror())
    });

    let mut output = std::io::stdout().lock();
    writeln!(output, "ready").expect("a reader");
    for line in std::io::stdin().lock().lines() {
        let line = line.expect("text");
        let mut words = line.split_whitespace();
        let Some(name) = words.next() else { continue };
        if name == "mark" {
            writeln!(
                output,
                "{}",
                symbol(library, words.next().expect("a name")) as u64
            )
            .expect("a reader");
            continue;
        }
        let mut a = [0u64; 8];
        for (argument, word) in a.iter_mut().zip(words) {
            *argument = word.parse().expect("an integer");
        }
        // SAFETY: by the System V convention a function finds its arguments whatever follows them, and a narrower result
        // is the low half of the register.
        let function: Function = unsafe { std::mem::transmute(symbol(library, name)) };
        let result = function(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7]);
        writeln!(output, "{result}").expect("a reader");
    }
}
