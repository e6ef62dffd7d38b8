//! The functions of libibverbs, which is loaded at the first call.

use std::{
    ffi::{CStr, c_char, c_int, c_uint, c_void},
    ptr::null_mut,
    sync::atomic::{AtomicPtr, Ordering},
};

use super::{
    AsyncEvent, CompChannel, Context, Cq, Device, DeviceAttr, Mr, Pd, PortAttr, Qp, QpAttr, QpInitAttr,
};
use crate::error::LibraryError;

/// `ibv_reg_mr_iova2`: domain, address, bytes, address as peers say it, rights.
pub type RegMrIova2 = unsafe extern "C" fn(*mut Pd, *mut c_void, usize, u64, c_uint) -> *mut Mr;
/// `ibv_reg_dmabuf_mr`: domain, offset in the dma-buf, bytes, address as peers say it, descriptor, rights.
pub type RegDmabufMr = unsafe extern "C" fn(*mut Pd, u64, usize, u64, c_int, c_int) -> *mut Mr;

macro_rules! library {
    ($($(#[$doc:meta])* $field:ident = $symbol:literal: fn($($argument:ty),*) $(-> $result:ty)?;)*) => {
        /// The library's functions.
        pub struct Lib {
            $($(#[$doc])* pub $field: unsafe extern "C" fn($($argument),*) $(-> $result)?,)*
            /// Registers memory with rights that older libraries do not know; `None` there.
            pub reg_mr_iova2: Option<RegMrIova2>,
            /// Registers memory of another device by its dma-buf; `None` in libraries before rdma-core 34.
            pub reg_dmabuf_mr: Option<RegDmabufMr>,
        }

        impl Lib {
            fn find(library: *mut c_void) -> Result<Self, LibraryError> {
                Ok(Self {
                    $($field: {
                        let symbol = symbol(library, $symbol)
                            .ok_or_else(|| LibraryError(format!("{LIBRARY} has no {}", $symbol.to_string_lossy())))?;
                        // SAFETY: a function of this name, with the signature of the header.
                        unsafe { std::mem::transmute::<*mut c_void, unsafe extern "C" fn($($argument),*) $(-> $result)?>(symbol) }
                    },)*
                    reg_mr_iova2: symbol(library, c"ibv_reg_mr_iova2").map(|symbol| {
                        // SAFETY: as above.
                        unsafe { std::mem::transmute::<*mut c_void, RegMrIova2>(symbol) }
                    }),
                    reg_dmabuf_mr: symbol(library, c"ibv_reg_dmabuf_mr").map(|symbol| {
                        // SAFETY: as above.
                        unsafe { std::mem::transmute::<*mut c_void, RegDmabufMr>(symbol) }
                    }),
                })
            }
        }
    };
}

library! {
    /// Makes a process that has registered memory able to fork.
    fork_init = c"ibv_fork_init": fn() -> c_int;
    /// Devices, ended by null.
    get_device_list = c"ibv_get_device_list": fn(*mut c_int) -> *mut *mut Device;
    /// Frees the list.
    free_device_list = c"ibv_free_device_list": fn(*mut *mut Device);
    /// A device's name.
    get_device_name = c"ibv_get_device_name": fn(*mut Device) -> *const c_char;
    /// Opens a device.
    open_device = c"ibv_open_device": fn(*mut Device) -> *mut Context;
    /// Closes it.
    close_device = c"ibv_close_device": fn(*mut Context) -> c_int;
    /// Asks what it can do.
    query_device = c"ibv_query_device": fn(*mut Context, *mut DeviceAttr) -> c_int;
    /// Asks about a port.
    query_port = c"ibv_query_port": fn(*mut Context, u8, *mut PortAttr) -> c_int;
    /// Asks for a GID.
    query_gid = c"ibv_query_gid": fn(*mut Context, u8, c_int, *mut [u8; 16]) -> c_int;
    /// Asks for a P_Key, in network order.
    query_pkey = c"ibv_query_pkey": fn(*mut Context, u8, c_int, *mut u16) -> c_int;
    /// Makes a protection domain.
    alloc_pd = c"ibv_alloc_pd": fn(*mut Context) -> *mut Pd;
    /// Frees it.
    dealloc_pd = c"ibv_dealloc_pd": fn(*mut Pd) -> c_int;
    /// Registers memory.
    reg_mr = c"ibv_reg_mr": fn(*mut Pd, *mut c_void, usize, c_int) -> *mut Mr;
    /// Forgets it.
    dereg_mr = c"ibv_dereg_mr": fn(*mut Mr) -> c_int;
    /// Makes a channel for completion events.
    create_comp_channel = c"ibv_create_comp_channel": fn(*mut Context) -> *mut CompChannel;
    /// Frees it.
    destroy_comp_channel = c"ibv_destroy_comp_channel": fn(*mut CompChannel) -> c_int;
    /// Makes a completion queue.
    create_cq = c"ibv_create_cq": fn(*mut Context, c_int, *mut c_void, *mut CompChannel, c_int) -> *mut Cq;
    /// Frees it.
    destroy_cq = c"ibv_destroy_cq": fn(*mut Cq) -> c_int;
    /// Takes a completion event.
    get_cq_event = c"ibv_get_cq_event": fn(*mut CompChannel, *mut *mut Cq, *mut *mut c_void) -> c_int;
    /// Says that completion events were taken.
    ack_cq_events = c"ibv_ack_cq_events": fn(*mut Cq, c_uint);
    /// Makes a queue pair.
    create_qp = c"ibv_create_qp": fn(*mut Pd, *mut QpInitAttr) -> *mut Qp;
    /// Changes it.
    modify_qp = c"ibv_modify_qp": fn(*mut Qp, *mut QpAttr, c_int) -> c_int;
    /// Asks about it.
    query_qp = c"ibv_query_qp": fn(*mut Qp, *mut QpAttr, c_int, *mut QpInitAttr) -> c_int;
    /// Frees it.
    destroy_qp = c"ibv_destroy_qp": fn(*mut Qp) -> c_int;
    /// Takes an asynchronous event.
    get_async_event = c"ibv_get_async_event": fn(*mut Context, *mut AsyncEvent) -> c_int;
    /// Says that it was taken.
    ack_async_event = c"ibv_ack_async_event": fn(*mut AsyncEvent);
    /// Name of an event.
    event_type_str = c"ibv_event_type_str": fn(c_uint) -> *const c_char;
    /// What a completion's status means.
    wc_status_str = c"ibv_wc_status_str": fn(c_uint) -> *const c_char;
}

/// The library's file.
pub const LIBRARY: &str = "libibverbs.so.1";

fn symbol(library: *mut c_void, name: &CStr) -> Option<*mut c_void> {
    // SAFETY: an open library and a C string. Of symbols with versions this finds the default one, which is the newest.
    let symbol = unsafe { libc::dlsym(library, name.as_ptr()) };
    (!symbol.is_null()).then_some(symbol)
}

/// The library. The first call loads it; it is never unloaded.
///
/// # Errors
/// What is missing; the same at every call.
pub fn lib() -> Result<&'static Lib, &'static LibraryError> {
    /// An atomic instead of a lock: a child would wait for ever for a lock that a thread of its parent held at the fork.
    static LIB: AtomicPtr<Result<Lib, LibraryError>> = AtomicPtr::new(null_mut());
    // Acquire: pairs with the exchange below; what it points to is there.
    let mut known = LIB.load(Ordering::Acquire);
    if known.is_null() {
        let fresh = Box::into_raw(Box::new(load()));
        // Release and acquire: as above, of this one or of who came first.
        match LIB.compare_exchange(null_mut(), fresh, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => known = fresh,
            Err(first) => {
                // SAFETY: made above, and nobody has seen it.
                drop(unsafe { Box::from_raw(fresh) });
                known = first;
            }
        }
    }
    // SAFETY: not null, and never freed.
    unsafe { &*known }.as_ref()
}

fn load() -> Result<Lib, LibraryError> {
    // SAFETY: a C string. The library's initialisation is its own.
    let library = unsafe { libc::dlopen(c"libibverbs.so.1".as_ptr(), libc::RTLD_NOW | libc::RTLD_LOCAL) };
    if library.is_null() {
        // SAFETY: the error of the call above, of this thread, null or a C string.
        let text = unsafe {
            let text = libc::dlerror();
            (!text.is_null()).then(|| CStr::from_ptr(text).to_string_lossy().into_owned())
        };
        let text = text.unwrap_or_else(|| format!("{LIBRARY} cannot be loaded"));
        return Err(LibraryError(text));
    }
    let lib = Lib::find(library)?;
    // As NCCL does. Otherwise the device would write to a child's copies of registered pages. Kernels from 5.12 on need no call; a failure
    // affects only processes that fork.
    // SAFETY: no arguments.
    unsafe { (lib.fork_init)() };
    Ok(lib)
}
