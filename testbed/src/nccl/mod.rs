//! The library as a training framework sees it: `libnccl.so.2`, loaded at run time and called through its C ABI.
//!
//! [`Nccl`] is the loaded library, [`Communicator`] a communicator with a stream of its own, [`Buffer`] memory that operations work on.
//! Streams, graphs and memory belong to a device: the library's host device (`ringsight.h`) or CUDA's driver.
//!
//! Calls only enqueue. A buffer may be read or dropped once [`Communicator::synchronise`] has returned.
#![expect(non_snake_case, reason = "fields are named as in the C ABI")]

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    path::Path,
    ptr,
    sync::Arc,
};

use anyhow::{Context, Result, bail};
use libloading::Library;

/// A table of a library's functions, resolved once.
macro_rules! functions {
    ($($name:ident: fn($($type:ty),*) -> $result:ty;)+) => {
        /// Entry points, resolved once.
        struct Functions {
            $($name: unsafe extern "C" fn($($type),*) -> $result,)+
        }

        impl Functions {
            /// # Safety
            /// The library's functions have these signatures, and it outlives the result.
            unsafe fn resolve(library: &libloading::Library) -> anyhow::Result<Self> {
                use anyhow::Context as _;
                $(
                    // SAFETY: as the caller says.
                    let $name: libloading::Symbol<'_, unsafe extern "C" fn($($type),*) -> $result> = unsafe {
                        library.get(concat!(stringify!($name), "\0").as_bytes())
                    }.context(concat!("the library has no ", stringify!($name)))?;
                )+
                Ok(Self { $($name: *$name,)+ })
            }
        }
    };
}

/// Calls a function of a table and names it if it fails.
macro_rules! call {
    ($on:ident.$name:ident($($argument:expr),*)) => {
        $on.check(stringify!($name), ($on.functions.$name)($($argument),*))
    };
}

mod buffer;
mod communicator;
mod cuda;
mod device;
mod host;

pub(crate) use buffer::Buffer;
pub(crate) use communicator::{Communicator, Graph};
pub(crate) use device::Kind as DeviceKind;

use device::{Device, Stream};

/// `ncclUniqueId`: opaque bytes that rank 0 makes and hands to the others.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct UniqueId(pub(crate) [u8; 128]);

type Comm = *mut c_void;
/// `ncclGetLastError`; null asks for the last failure of the thread.
type LastError = unsafe extern "C" fn(Comm) -> *const c_char;

/// `ncclRedOp_t`: what the demo reduces with.
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
pub(crate) enum Reduce {
    /// `ncclSum`.
    Sum = 0,
    /// `ncclAvg`.
    Avg = 4,
}

/// What the library says of the last failure.
fn last_error(function: LastError, comm: Comm) -> String {
    // SAFETY: a live communicator or null; the text lives until the next call.
    let text = unsafe { function(comm) };
    if text.is_null() {
        return String::new();
    }
    // SAFETY: NCCL's error texts are zero-terminated.
    unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
}

functions! {
    ncclGetLastError: fn(Comm) -> *const c_char;
    ncclGetUniqueId: fn(*mut UniqueId) -> c_int;
    ncclCommInitRank: fn(*mut Comm, c_int, UniqueId, c_int) -> c_int;
    ncclCommSplit: fn(Comm, c_int, c_int, *mut Comm, *mut c_void) -> c_int;
    ncclCommDestroy: fn(Comm) -> c_int;
    ncclCommAbort: fn(Comm) -> c_int;
    ncclCommGetAsyncError: fn(Comm, *mut c_int) -> c_int;
    ncclSimulateKernelTimeout: fn(Comm) -> c_int;
    ncclGroupStart: fn() -> c_int;
    ncclGroupEnd: fn() -> c_int;
    ncclAllReduce: fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream) -> c_int;
    ncclBroadcast: fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream) -> c_int;
    ncclReduceScatter: fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream) -> c_int;
    ncclAllGather: fn(*const c_void, *mut c_void, usize, c_int, Comm, Stream) -> c_int;
    ncclSend: fn(*const c_void, usize, c_int, c_int, Comm, Stream) -> c_int;
    ncclRecv: fn(*mut c_void, usize, c_int, c_int, Comm, Stream) -> c_int;
}

/// The opened library.
pub(crate) struct Nccl {
    functions: Functions,
    device: Arc<dyn Device>,
    // Dropped after the functions that point into it.
    _library: Arc<Library>,
}

impl Nccl {
    /// Opens the library `file`: a path, or a name that the loader looks up. Operations are to run on devices of `kind`, which
    /// the library itself is told by `RINGSIGHT_DEVICE`.
    pub(crate) fn open(file: &Path, kind: DeviceKind) -> Result<Self> {
        // SAFETY: the file is the library under test; its initialisers are the Rust runtime's.
        let library = unsafe { Library::new(file) }.with_context(|| format!("opening {}", file.display()))?;
        let library = Arc::new(library);
        // SAFETY: it is an implementation of NCCL's ABI, and is kept beside the functions.
        let functions = unsafe { Functions::resolve(&library) }?;
        let device: Arc<dyn Device> = match kind {
            // SAFETY: as above.
            DeviceKind::Host => Arc::new(unsafe { host::HostDevice::resolve(&library) }?),
            DeviceKind::Cuda => Arc::new(cuda::CudaDevice::load()?),
        };
        Ok(Self {
            functions,
            device,
            _library: library,
        })
    }

    fn check(&self, name: &str, result: c_int) -> Result<()> {
        self.check_with(name, result, ptr::null_mut())
    }

    fn check_with(&self, name: &str, result: c_int, comm: Comm) -> Result<()> {
        if result == 0 {
            return Ok(());
        }
        let text = last_error(self.functions.ncclGetLastError, comm);
        bail!("{name} returned {result}: {text}")
    }

    /// Sets the calling thread's device.
    pub(crate) fn set_device(&self, number: u32) -> Result<()> {
        self.device.choose(number)
    }

    /// `ncclGetUniqueId`.
    pub(crate) fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: the pointer is valid for the call.
        unsafe { call!(self.ncclGetUniqueId(&raw mut id)) }?;
        Ok(id)
    }

    /// `ncclCommInitRank`, with a stream of its own.
    pub(crate) fn communicator(&self, ranks: u32, id: UniqueId, rank: u32) -> Result<Communicator<'_>> {
        let mut comm = ptr::null_mut();
        // SAFETY: the pointer is valid for the call; the id is passed by value, as the ABI says.
        unsafe { call!(self.ncclCommInitRank(&raw mut comm, ranks as c_int, id, rank as c_int)) }?;
        Communicator::new(self, comm)
    }
}
