//! Gives the cdylib the soname that programs linked against NCCL ask for.
//!
//! With `RINGSIGHT_NO_RECORDS` in its environment it makes a library that writes no records, to measure what they cost.

/// Variable that leaves records out.
const NO_RECORDS: &str = "RINGSIGHT_NO_RECORDS";

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnccl.so.2");
    println!("cargo::rustc-check-cfg=cfg(ringsight_no_records)");
    if std::env::var_os(NO_RECORDS).is_some_and(|value| !value.is_empty() && value != "0") {
        println!("cargo::rustc-cfg=ringsight_no_records");
    }
    println!("cargo::rerun-if-env-changed={NO_RECORDS}");
    println!("cargo::rerun-if-changed=build.rs");
}
