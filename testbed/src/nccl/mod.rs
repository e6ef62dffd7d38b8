//! The library as a training framework sees it: `libnccl.so.2`, loaded at run time and called through its C ABI.
//!
//! [`Nccl`] is the loaded library, [`Communicator`] a communicator with a stream of its own, [`Buffer`] memory that operations work on.
//! Streams, graphs and memory belong to a device: the library's host device (`ringsight.h`) or CUDA's driver.
//!
//! Calls only enqueue. A buffer may be read or dropped once [`Communicator::synchronise`] has returned.
#![expect(non_snake_case, reason = "fields are named as in the C ABI")]

use std::{
    ffi::{CStr, c_char, c_int, c_void},
    ops::Range,
    path::Path,
    ptr,
    sync::Arc,
};

use anyhow::{Context, Result, bail};
use libloading::Library;

mod buffer;
mod cuda;
mod device;
mod faulty;
mod graph;
mod host;

pub(crate) use buffer::Buffer;
pub(crate) use device::Kind as DeviceKind;
pub(crate) use graph::Graph;

use device::{Device, HostFunction, Stream};

/// `ncclUniqueId`: opaque bytes that rank 0 makes and hands to the others.
#[derive(Clone, Copy)]
#[repr(C)]
pub(crate) struct UniqueId(pub(crate) [u8; 128]);

type Comm = *mut c_void;

/// `ncclInProgress`.
const IN_PROGRESS: c_int = 7;
/// `NCCL_SPLIT_NOCOLOR`.
const NO_COLOR: c_int = -1;
/// `ncclFloat32`.
const FLOAT32: c_int = 7;

/// `ncclRedOp_t`: what the demo reduces with.
#[derive(Clone, Copy, Debug)]
#[repr(i32)]
pub(crate) enum Reduce {
    /// `ncclSum`.
    Sum = 0,
    /// `ncclAvg`.
    Avg = 4,
}

/// A table of a library's functions that return a number, resolved once.
macro_rules! functions {
    ($($name:ident: fn($($type:ty),*);)+) => {
        /// Entry points, resolved once.
        struct Functions {
            $($name: unsafe extern "C" fn($($type),*) -> std::ffi::c_int,)+
        }

        impl Functions {
            /// # Safety
            /// The library's functions have these signatures, and it outlives the result.
            unsafe fn resolve(library: &libloading::Library) -> anyhow::Result<Self> {
                use anyhow::Context as _;
                $(
                    // SAFETY: as the caller says.
                    let $name: libloading::Symbol<'_, unsafe extern "C" fn($($type),*) -> std::ffi::c_int> = unsafe {
                        library.get(concat!(stringify!($name), "\0").as_bytes())
                    }.context(concat!("the library has no ", stringify!($name)))?;
                )+
                Ok(Self { $($name: *$name,)+ })
            }
        }
    };
}
use functions;

/// `ncclGetLastError`.
#[derive(Clone, Copy)]
struct LastError(unsafe extern "C" fn(Comm) -> *const c_char);

impl LastError {
    /// # Safety
    /// `library` is an implementation of NCCL's ABI, and outlives the result.
    unsafe fn resolve(library: &Library) -> Result<Self> {
        // SAFETY: the signature is the one in nccl.h; the caller answers for the library.
        unsafe { library.get(b"ncclGetLastError\0") }
            .map(|symbol| Self(*symbol))
            .context("the library has no ncclGetLastError")
    }

    /// What the library says of the last failure; null asks for that of the thread.
    fn text(self, comm: Comm) -> String {
        // SAFETY: a live communicator or null; the text lives until the next call.
        let text = unsafe { (self.0)(comm) };
        if text.is_null() {
            return String::new();
        }
        // SAFETY: NCCL's error texts are zero-terminated.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

functions! {
    ncclGetUniqueId: fn(*mut UniqueId);
    ncclCommInitRank: fn(*mut Comm, c_int, UniqueId, c_int);
    ncclCommSplit: fn(Comm, c_int, c_int, *mut Comm, *mut c_void);
    ncclCommDestroy: fn(Comm);
    ncclCommAbort: fn(Comm);
    ncclCommGetAsyncError: fn(Comm, *mut c_int);
    ncclSimulateKernelTimeout: fn(Comm);
    ncclGroupStart: fn();
    ncclGroupEnd: fn();
    ncclAllReduce: fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream);
    ncclBroadcast: fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream);
    ncclReduceScatter: fn(*const c_void, *mut c_void, usize, c_int, c_int, Comm, Stream);
    ncclAllGather: fn(*const c_void, *mut c_void, usize, c_int, Comm, Stream);
    ncclSend: fn(*const c_void, usize, c_int, c_int, Comm, Stream);
    ncclRecv: fn(*mut c_void, usize, c_int, c_int, Comm, Stream);
}

/// The opened library.
pub(crate) struct Nccl {
    functions: Functions,
    last_error: LastError,
    device: Arc<dyn Device>,
    // Dropped after the functions that point into it.
    _library: Library,
}

impl Nccl {
    /// Opens the library `file`: a path, or a name that the loader looks up. Operations are to run on devices of `kind`, which
    /// the library itself is told by `RINGSIGHT_DEVICE`.
    pub(crate) fn open(file: &Path, kind: DeviceKind) -> Result<Self> {
        // SAFETY: the file is the library under test; its initialisers are the Rust runtime's.
        let library = unsafe { Library::new(file) }.with_context(|| format!("opening {}", file.display()))?;
        // SAFETY: it is an implementation of NCCL's ABI, and is kept beside the functions.
        let (functions, last_error) =
            unsafe { (Functions::resolve(&library)?, LastError::resolve(&library)?) };
        let device: Arc<dyn Device> = match kind {
            // SAFETY: as above; the loader gives the same library again.
            DeviceKind::Host => Arc::new(unsafe { host::HostDevice::resolve(file) }?),
            DeviceKind::Cuda => Arc::new(cuda::CudaDevice::load()?),
        };
        Ok(Self {
            functions,
            last_error,
            device,
            _library: library,
        })
    }

    /// Sets the calling thread's device.
    pub(crate) fn set_device(&self, number: u32) -> Result<()> {
        self.device.choose(number)
    }

    /// `elements` zeros that operations can work on.
    pub(crate) fn buffer(&self, elements: usize) -> Result<Buffer> {
        Buffer::new(&self.device, elements)
    }

    fn check(&self, name: &str, result: c_int, comm: Comm) -> Result<()> {
        if result == 0 {
            return Ok(());
        }
        bail!("{name} returned {result}: {}", self.last_error.text(comm))
    }

    /// `ncclGetUniqueId`.
    pub(crate) fn unique_id(&self) -> Result<UniqueId> {
        let mut id = UniqueId([0; 128]);
        // SAFETY: the pointer is valid for the call.
        let result = unsafe { (self.functions.ncclGetUniqueId)(&raw mut id) };
        self.check("ncclGetUniqueId", result, ptr::null_mut())?;
        Ok(id)
    }

    /// `ncclCommInitRank`, with a stream of its own.
    pub(crate) fn communicator(&self, ranks: u32, id: UniqueId, rank: u32) -> Result<Communicator<'_>> {
        let mut comm = ptr::null_mut();
        // SAFETY: the pointer is valid for the call; the id is passed by value, as the ABI says.
        let result =
            unsafe { (self.functions.ncclCommInitRank)(&raw mut comm, ranks as c_int, id, rank as c_int) };
        self.check("ncclCommInitRank", result, ptr::null_mut())?;
        Ok(Communicator {
            nccl: self,
            comm,
            stream: self.device.stream()?,
        })
    }
}

/// A communicator and the stream that its operations run on.
pub(crate) struct Communicator<'a> {
    nccl: &'a Nccl,
    comm: Comm,
    stream: Stream,
}

impl Communicator<'_> {
    fn check(&self, name: &str, result: c_int) -> Result<()> {
        self.nccl.check(name, result, self.comm)
    }

    /// `elements` zeros that its operations can work on.
    pub(crate) fn buffer(&self, elements: usize) -> Result<Buffer> {
        self.nccl.buffer(elements)
    }

    /// `ncclCommSplit` with the parent's configuration, and a stream of its own: those of `members`, in their order, get a
    /// communicator, the others none. All ranks call it.
    pub(crate) fn split(&self, members: &[u32], rank: u32) -> Result<Option<Self>> {
        let key = members.iter().position(|member| *member == rank);
        let (color, key) = key.map_or((NO_COLOR, 0), |key| (0, key as c_int));
        let mut comm = ptr::null_mut();
        let comm_split = self.nccl.functions.ncclCommSplit;
        // SAFETY: a live communicator and a valid place; no configuration is the parent's.
        let result = unsafe { comm_split(self.comm, color, key, &raw mut comm, ptr::null_mut()) };
        self.check("ncclCommSplit", result)?;
        if comm.is_null() {
            return Ok(None);
        }
        Ok(Some(Self {
            nccl: self.nccl,
            comm,
            stream: self.nccl.device.stream()?,
        }))
    }

    /// `ncclAllReduce` in place.
    pub(crate) fn all_reduce(&self, buffer: &Buffer, reduce: Reduce) -> Result<()> {
        let (data, count) = (buffer.pointer().cast(), buffer.len());
        let all_reduce = self.nccl.functions.ncclAllReduce;
        // SAFETY: the buffer has `count` elements and outlives the operation (the worker synchronises before it ends).
        let result = unsafe {
            all_reduce(
                data,
                data,
                count,
                FLOAT32,
                reduce as c_int,
                self.comm,
                self.stream,
            )
        };
        self.check("ncclAllReduce", result)
    }

    /// `ncclBroadcast` in place from rank `root`.
    pub(crate) fn broadcast(&self, buffer: &Buffer, root: u32) -> Result<()> {
        let (data, count) = (buffer.pointer().cast(), buffer.len());
        let broadcast = self.nccl.functions.ncclBroadcast;
        // SAFETY: as in `all_reduce`.
        let result = unsafe { broadcast(data, data, count, FLOAT32, root as c_int, self.comm, self.stream) };
        self.check("ncclBroadcast", result)
    }

    /// `ncclReduceScatter` with sum: `send` holds the ranks' parts one after the other.
    pub(crate) fn reduce_scatter(&self, send: &Buffer, receive: &Buffer) -> Result<()> {
        let (from, to, count) = (send.pointer().cast(), receive.pointer().cast(), receive.len());
        let reduce_scatter = self.nccl.functions.ncclReduceScatter;
        // SAFETY: as in `all_reduce`; `send` has ranks * count elements.
        let result = unsafe {
            reduce_scatter(
                from,
                to,
                count,
                FLOAT32,
                Reduce::Sum as c_int,
                self.comm,
                self.stream,
            )
        };
        self.check("ncclReduceScatter", result)
    }

    /// `ncclAllGather`: `receive` gets the ranks' parts one after the other.
    pub(crate) fn all_gather(&self, send: &Buffer, receive: &Buffer) -> Result<()> {
        let (from, to, count) = (send.pointer().cast(), receive.pointer().cast(), send.len());
        let all_gather = self.nccl.functions.ncclAllGather;
        // SAFETY: as in `all_reduce`; `receive` has ranks * count elements.
        let result = unsafe { all_gather(from, to, count, FLOAT32, self.comm, self.stream) };
        self.check("ncclAllGather", result)
    }

    /// Calls in one group.
    pub(crate) fn group(&self, calls: impl FnOnce() -> Result<()>) -> Result<()> {
        let f = &self.nccl.functions;
        // SAFETY: no arguments.
        let result = unsafe { (f.ncclGroupStart)() };
        self.check("ncclGroupStart", result)?;
        let called = calls();
        // SAFETY: no arguments.
        let result = unsafe { (f.ncclGroupEnd)() };
        called?;
        self.check("ncclGroupEnd", result)
    }

    /// `ncclSend` to rank `to` and `ncclRecv` from rank `from` in one group.
    pub(crate) fn exchange(&self, send: &Buffer, to: u32, receive: &Buffer, from: u32) -> Result<()> {
        self.group(|| {
            self.send(send, to)?;
            self.receive(receive, from)
        })
    }

    /// `ncclRecv` from rank `from`.
    pub(crate) fn receive(&self, receive: &Buffer, from: u32) -> Result<()> {
        self.receive_part(receive, 0..receive.len(), from)
    }

    /// The same into some elements of a buffer.
    ///
    /// # Panics
    /// Where the buffer has no such elements.
    pub(crate) fn receive_part(&self, receive: &Buffer, part: Range<usize>, from: u32) -> Result<()> {
        let recv = self.nccl.functions.ncclRecv;
        // SAFETY: as in `all_reduce`.
        let result = unsafe {
            recv(
                receive.part(&part).cast(),
                part.len(),
                FLOAT32,
                from as c_int,
                self.comm,
                self.stream,
            )
        };
        self.check("ncclRecv", result)
    }

    /// `ncclSend` to rank `to`.
    pub(crate) fn send(&self, send: &Buffer, to: u32) -> Result<()> {
        self.send_part(send, 0..send.len(), to)
    }

    /// The same of some elements of a buffer.
    ///
    /// # Panics
    /// Where the buffer has no such elements.
    pub(crate) fn send_part(&self, send: &Buffer, part: Range<usize>, to: u32) -> Result<()> {
        let send_to = self.nccl.functions.ncclSend;
        // SAFETY: as in `all_reduce`.
        let result = unsafe {
            send_to(
                send.part(&part).cast(),
                part.len(),
                FLOAT32,
                to as c_int,
                self.comm,
                self.stream,
            )
        };
        self.check("ncclSend", result)
    }

    /// Has the stream run `function(argument)` when it gets there.
    ///
    /// # Safety
    /// `argument` must be good for `function` until the stream has been synchronised.
    pub(crate) unsafe fn host_function(&self, function: HostFunction, argument: *mut c_void) -> Result<()> {
        // SAFETY: the caller's promise.
        unsafe { self.nccl.device.call(self.stream, function, argument) }
    }

    /// Waits for everything on the stream.
    pub(crate) fn synchronise(&self) -> Result<()> {
        self.nccl.device.synchronise(self.stream)
    }

    /// Destroys the communicator and its stream.
    pub(crate) fn destroy(self) -> Result<()> {
        // SAFETY: live, and used no more.
        let result = unsafe { (self.nccl.functions.ncclCommDestroy)(self.comm) };
        self.nccl.check("ncclCommDestroy", result, ptr::null_mut())?;
        self.nccl.device.end(self.stream)
    }
}
