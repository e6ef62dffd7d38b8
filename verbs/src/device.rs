//! Opened devices: their ports and asynchronous events.

use std::{
    ffi::{CStr, c_int},
    fmt,
    os::fd::{AsRawFd, RawFd},
    sync::Arc,
};

use crate::{
    error::{Error, Result},
    sys::{self, Lib},
};

/// An opened device. Every object that is made from it keeps it open.
pub struct Context {
    lib: &'static Lib,
    raw: *mut sys::Context,
    name: String,
}

// SAFETY: the library's calls on a device may be made from any thread at any time.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

/// Attributes of a port at one moment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortAttributes {
    /// The port is up.
    pub active: bool,
    /// The port is RoCE, and addressed by GID.
    pub ethernet: bool,
    /// Address in its InfiniBand subnet.
    pub lid: u16,
    /// MTU in use.
    pub mtu: Mtu,
    /// Entries of its table of GIDs.
    pub gids: u32,
    /// Entries of its table of P_Keys.
    pub pkeys: u16,
}

/// An MTU of InfiniBand, as a code: 1 for 256 bytes to 5 for 4096.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Mtu(u8);

impl Mtu {
    /// The MTU of a code.
    #[must_use]
    pub fn from_code(code: u32) -> Option<Self> {
        (1..=5).contains(&code).then_some(Self(code as u8))
    }

    /// Its code.
    #[must_use]
    pub fn code(self) -> u8 {
        self.0
    }

    /// In bytes.
    #[must_use]
    pub fn bytes(self) -> u32 {
        128 << self.0
    }
}

impl Context {
    /// Opens the device of this name.
    ///
    /// # Errors
    /// There is no such device, or the process may not use it.
    pub fn open(lib: &'static Lib, name: &str) -> Result<Arc<Self>> {
        let mut count = 0;
        // SAFETY: `count` is writable.
        let list = unsafe { (lib.get_device_list)(&raw mut count) };
        if list.is_null() {
            return Err(Error::last("listing RDMA devices"));
        }
        // SAFETY: as many devices as it says.
        let devices = unsafe { std::slice::from_raw_parts(list, count.max(0) as usize) };
        let mut raw = std::ptr::null_mut();
        let found = devices.iter().copied().find(|device| {
            // SAFETY: a device of the list, whose name is a C string of its own.
            unsafe { CStr::from_ptr((lib.get_device_name)(*device)) }.to_bytes() == name.as_bytes()
        });
        if let Some(device) = found {
            // SAFETY: a device of the list.
            raw = unsafe { (lib.open_device)(device) };
        }
        let error = Error::last(format!("opening {name}"));
        // SAFETY: the list from above; an opened device does not need it.
        unsafe { (lib.free_device_list)(list) };
        if found.is_none() {
            let text = "libibverbs does not know it: is its provider (ibverbs-providers) installed, /dev/infiniband there?";
            return Err(Error::new(format!("opening {name}"), std::io::Error::other(text)));
        }
        if raw.is_null() {
            return Err(error);
        }
        let context = Self {
            lib,
            raw,
            name: name.to_owned(),
        };
        // The thread that reads events must not block on them.
        // SAFETY: the descriptor of an open device.
        set_nonblocking(unsafe { (*raw).async_fd })
            .map_err(|error| Error::new(format!("reading events of {name}"), error))?;
        Ok(Arc::new(context))
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    pub(crate) fn lib(&self) -> &'static Lib {
        self.lib
    }

    pub(crate) fn raw(&self) -> *mut sys::Context {
        self.raw
    }

    /// Work requests that a queue may have.
    ///
    /// # Errors
    /// As the device says.
    pub fn max_work_requests(&self) -> Result<u32> {
        // SAFETY: all-zero bytes are valid attributes, and writable.
        let (code, attributes) = unsafe {
            let mut attributes: sys::DeviceAttr = std::mem::zeroed();
            ((self.lib.query_device)(self.raw, &raw mut attributes), attributes)
        };
        check(code, || format!("asking {} what it can do", self.name))?;
        Ok(attributes.max_qp_wr.max(0).cast_unsigned())
    }

    /// Queries a port.
    ///
    /// # Errors
    /// As the device says: there is no such port.
    pub fn port(&self, port: u8) -> Result<PortAttributes> {
        // SAFETY: all-zero bytes are valid attributes, and writable; the struct has more room than any version needs.
        let (code, attributes) = unsafe {
            let mut attributes: sys::PortAttr = std::mem::zeroed();
            (
                (self.lib.query_port)(self.raw, port, &raw mut attributes),
                attributes,
            )
        };
        check(code, || format!("asking {} about port {port}", self.name))?;
        Ok(PortAttributes {
            active: attributes.state == sys::PORT_ACTIVE,
            ethernet: attributes.link_layer == sys::LINK_LAYER_ETHERNET,
            lid: attributes.lid,
            // A port that is down may have none: the smallest, until it is up.
            mtu: Mtu::from_code(attributes.active_mtu).unwrap_or(Mtu(1)),
            gids: attributes.gid_tbl_len.max(0).cast_unsigned(),
            pkeys: attributes.pkey_tbl_len,
        })
    }

    /// The GID at an index of a port's table, as it is now.
    ///
    /// # Errors
    /// When there is none.
    pub fn gid(&self, port: u8, index: u8) -> Result<[u8; 16]> {
        let mut gid = [0; 16];
        // SAFETY: `gid` is writable.
        let code = unsafe { (self.lib.query_gid)(self.raw, port, index.into(), &raw mut gid) };
        if code != 0 || gid == [0; 16] {
            return Err(Error::new(
                format!("GID index {index} of {} port {port}", self.name),
                std::io::Error::other("there is no GID there: see NCCL_IB_GID_INDEX"),
            ));
        }
        Ok(gid)
    }

    /// Whether a port's table has a P_Key at this index.
    #[must_use]
    pub fn has_pkey(&self, port: u8, index: u16) -> bool {
        let mut pkey = 0;
        // SAFETY: `pkey` is writable.
        let code = unsafe { (self.lib.query_pkey)(self.raw, port, index.into(), &raw mut pkey) };
        code == 0 && pkey != 0
    }

    /// The next asynchronous event, if there is one; never blocks. Only one thread of the process may read a device's events.
    #[must_use]
    pub fn event(&self) -> Option<Event> {
        let mut event = sys::AsyncEvent {
            element: std::ptr::null_mut(),
            event_type: 0,
        };
        // SAFETY: `event` is writable; the descriptor does not block.
        if unsafe { (self.lib.get_async_event)(self.raw, &raw mut event) } != 0 {
            return None;
        }
        let kind = EventKind::from_code(event.event_type);
        let (port, queue) = match kind {
            EventKind::PortActive | EventKind::PortError | EventKind::PortChanged => {
                // The union's `int port_num`; little-endian, so it is the low half.
                (u8::try_from(event.element.addr() & 0xffff_ffff).ok(), None)
            }
            EventKind::QpError => {
                // SAFETY: an event of a queue pair names it, and it is not destroyed before the event is acknowledged.
                let number = unsafe { (*event.element.cast::<sys::Qp>()).qp_num };
                (None, Some(Queue::Pair(number)))
            }
            EventKind::CqError => (None, Some(Queue::Completions(event.element.addr()))),
            EventKind::DeviceFatal => (None, Some(Queue::All)),
            EventKind::Other => (None, None),
        };
        // SAFETY: a C string of the library's own.
        let name = unsafe { CStr::from_ptr((self.lib.event_type_str)(event.event_type)) };
        // SAFETY: the event from above, once.
        unsafe { (self.lib.ack_async_event)(&raw mut event) };
        Some(Event {
            kind,
            port,
            queue,
            name: name.to_str().unwrap_or("unknown event"),
        })
    }
}

impl AsRawFd for Context {
    /// Readable while [`Context::event`] has one.
    fn as_raw_fd(&self) -> RawFd {
        // SAFETY: an open device.
        unsafe { (*self.raw).async_fd }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: open, and no object that was made from it is left: each of them holds this.
        unsafe { (self.lib.close_device)(self.raw) };
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Context").field(&self.name).finish()
    }
}

/// Kind of an asynchronous event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EventKind {
    /// A port came up.
    PortActive,
    /// A port went down.
    PortError,
    /// A port's LID, P_Keys, GIDs or subnet manager changed.
    PortChanged,
    /// A queue pair cannot go on.
    QpError,
    /// A completion queue cannot go on: it overran, or its memory cannot be written.
    CqError,
    /// The device cannot go on.
    DeviceFatal,
    /// Anything else.
    Other,
}

impl EventKind {
    fn from_code(code: u32) -> Self {
        match code {
            0 => Self::CqError,
            1..=3 => Self::QpError,
            8 => Self::DeviceFatal,
            9 => Self::PortActive,
            10 => Self::PortError,
            11..=13 | 17 | 18 => Self::PortChanged,
            _ => Self::Other,
        }
    }
}

/// The queue that an event concerns.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Queue {
    /// A queue pair, by its number.
    Pair(u32),
    /// A completion queue, by its address in libibverbs.
    Completions(usize),
    /// Every queue of the device.
    All,
}

/// Something that happened to a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Event {
    /// Its kind.
    pub kind: EventKind,
    /// The port that it concerns, if any.
    pub port: Option<u8>,
    /// The queue that it concerns, if any.
    pub queue: Option<Queue>,
    /// Its name in libibverbs.
    pub name: &'static str,
}

pub(crate) fn check(code: c_int, what: impl FnOnce() -> String) -> Result<()> {
    match code {
        0 => Ok(()),
        // Most calls return the error number, some leave it in `errno`.
        -1 => Err(Error::last(what())),
        code => Err(Error::code(what(), code.abs())),
    }
}

pub(crate) fn set_nonblocking(fd: RawFd) -> std::io::Result<()> {
    // SAFETY: no pointers.
    let flags = unsafe { libc::fcntl(fd, libc::F_GETFL) };
    // SAFETY: no pointers.
    if flags < 0 || unsafe { libc::fcntl(fd, libc::F_SETFL, flags | libc::O_NONBLOCK) } < 0 {
        return Err(std::io::Error::last_os_error());
    }
    Ok(())
}
