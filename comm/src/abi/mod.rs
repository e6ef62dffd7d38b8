//! C entry points: NCCL's names, structs and result codes.
//!
//! Every function exists twice, as `ncclX` and as `pncclX`, so that a profiler may interpose the first and call the
//! second: the twins share a body and never call each other. Nothing unwinds out of here; a failed call leaves its
//! reason for `ncclGetLastError`.

mod arguments;
mod children;
mod communicators;
mod config;
mod configured;
mod debug;
mod device_api;
mod explain;
mod last_error;
mod memory;
mod nvtx;
mod one_sided;
mod operations;
mod parameters;
mod reductions;
mod registration;
mod ringsight;
mod second_library;
mod simulation;
mod types;

use std::panic::{AssertUnwindSafe, catch_unwind};

pub use children::*;
pub use communicators::*;
pub(crate) use config::read as read_config;
pub use configured::*;
pub use debug::*;
pub use device_api::*;
pub use explain::*;
pub(crate) use last_error::set as set_last_error;
pub use last_error::{ncclGetErrorString, ncclGetLastError, pncclGetErrorString, pncclGetLastError};
pub use memory::*;
pub use one_sided::*;
pub use operations::*;
pub use parameters::*;
pub use reductions::*;
pub use registration::*;
pub use ringsight::*;
pub use simulation::*;
pub use types::*;

use ringsight_comm_base::error::{Error, Result, ResultCode};

/// Runs the body of an entry point: errors and panics become result codes and a text for `ncclGetLastError`.
pub(crate) fn call(function: &str, body: impl FnOnce() -> Result<()>) -> ResultCode {
    let body = || {
        ringsight_comm_base::log::start();
        let _range = nvtx::Range::enter(function);
        body()
    };
    // AssertUnwindSafe: what a panic may leave half done is behind locks that are written to stay consistent
    // (`ringsight_comm_base::sync::lock`), and the communicator reports the failure.
    let error = match catch_unwind(AssertUnwindSafe(body)) {
        Ok(Ok(())) => return ResultCode::Success,
        // Not a failure: there is nothing to say about it.
        Ok(Err(error)) if error.code == ResultCode::InProgress => return error.code,
        Ok(Err(error)) => error,
        Err(panic) => {
            let text = panic
                .downcast_ref::<&str>()
                .map(|text| (*text).to_owned())
                .or_else(|| panic.downcast_ref::<String>().cloned())
                .unwrap_or_default();
            Error::internal(format!("panicked: {text}"))
        }
    };
    // It also logs, and whoever has set the subscriber in a Rust program may panic there. The text is kept before that.
    let _ = catch_unwind(|| set_last_error(&format!("{function}: {}", error.text)));
    error.code
}

/// Defines `ncclX` and `pncclX` with one body, which is a `Result<()>`.
macro_rules! entry {
    ($(#[$meta:meta])* $name:ident, $twin:ident($($argument:ident: $type:ty),* $(,)?) $body:block) => {
        mod $name {
            #[allow(unused_imports, reason = "one import list serves every body")]
            use super::*;

            pub(super) fn body($($argument: $type),*) -> ResultCode {
                $crate::abi::call(stringify!($name), || $body)
            }
        }

        $(#[$meta])*
        ///
        /// # Safety
        /// Pointers are null or point to what NCCL's documentation says.
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $name($($argument: $type),*) -> ResultCode {
            $name::body($($argument),*)
        }

        #[doc = concat!("[`", stringify!($name), "`] under its profiling name.")]
        ///
        /// # Safety
        #[doc = concat!("As [`", stringify!($name), "`].")]
        #[unsafe(no_mangle)]
        pub unsafe extern "C" fn $twin($($argument: $type),*) -> ResultCode {
            $name::body($($argument),*)
        }
    };
}
pub(crate) use entry;
