//! What an NVTX tool is told of the calls into the library: tests/nvtx.c is the tool, loaded as Nsight Systems' is.

mod native;

use std::{env, ffi::c_int, fs, path::Path, process::Command, ptr};

use native::run;
use ringsight_comm::{abi::*, error::ResultCode};

/// The process that makes the calls.
const CALLS: &str = "RINGSIGHT_TEST_CALLS";

fn calls() {
    let mut version: c_int = 0;
    // SAFETY: room for a number; nothing else takes a pointer that is not null.
    unsafe {
        assert_eq!(ncclGetVersion(&raw mut version), ResultCode::Success);
        assert_eq!(pncclGroupStart(), ResultCode::Success);
        // A call that fails has an end, too.
        assert_eq!(ncclGetVersion(ptr::null_mut()), ResultCode::InvalidArgument);
        assert_eq!(ncclGroupEnd(), ResultCode::Success);
    }
}

#[test]
fn a_tool_sees_a_range_for_every_call() {
    if env::var_os(CALLS).is_some() {
        return calls();
    }
    let folder = tempfile::tempdir().unwrap();
    let (tool, ranges) = (folder.path().join("tool.so"), folder.path().join("ranges"));
    run(Command::new("gcc")
        .args(["-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", "-o"])
        .arg(&tool)
        .arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/nvtx.c")));
    let child = |tool: &Path| {
        let mut child = Command::new(env::current_exe().unwrap());
        child
            .args(["--exact", "a_tool_sees_a_range_for_every_call", "--nocapture"])
            .env(CALLS, "1")
            .env("RINGSIGHT_TEST_RANGES", &ranges)
            .env("NVTX_INJECTION64_PATH", tool);
        run(&mut child);
    };
    child(&tool);
    let said = fs::read_to_string(&ranges).unwrap();
    let names = [
        "ncclGetVersion",
        "ncclGroupStart",
        "ncclGetVersion",
        "ncclGroupEnd",
    ];
    let expected: String = names.iter().map(|name| format!("0 {name}\n0 end\n")).collect();
    assert_eq!(said, expected);
    // A tool that cannot be loaded, and none, disturb nothing.
    child(&folder.path().join("missing.so"));
    child(Path::new(""));
}
