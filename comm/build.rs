//! Gives the cdylib the soname that programs linked against NCCL ask for.

fn main() {
    println!("cargo::rustc-cdylib-link-arg=-Wl,-soname,libnccl.so.2");
    println!("cargo::rerun-if-changed=build.rs");
}
