//! Memory that devices access: protection domains and memory regions.

use std::{
    collections::HashMap,
    os::fd::{AsRawFd, OwnedFd, RawFd},
    sync::{Arc, Mutex, PoisonError, Weak},
};

use crate::{
    device::Context,
    error::{Error, Result},
    sys::{self, Lib},
};

/// A protection domain: its queue pairs may use the memory that is registered in it.
pub struct Pd {
    context: Arc<Context>,
    raw: *mut sys::Pd,
    /// Registered memory.
    registered: Mutex<HashMap<Registration, Weak<Mr>>>,
}

// SAFETY: as `Context`.
unsafe impl Send for Pd {}
// SAFETY: as `Context`.
unsafe impl Sync for Pd {}

/// Access rights of registered memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// The device reads it for its own queue pairs.
    Local,
    /// Peers write to it.
    RemoteWrite,
    /// Peers write to it with relaxed ordering (`NCCL_IB_PCI_RELAXED_ORDERING`), if the library supports that: writes may reach memory in any
    /// order before their completion.
    RemoteWriteRelaxed,
}

impl Access {
    fn bits(self, lib: &Lib) -> u32 {
        let relaxed = match lib.reg_mr_iova2 {
            Some(_) => sys::ACCESS_RELAXED_ORDERING,
            None => 0,
        };
        match self {
            Self::Local => 0,
            Self::RemoteWrite => sys::ACCESS_LOCAL_WRITE | sys::ACCESS_REMOTE_WRITE,
            Self::RemoteWriteRelaxed => sys::ACCESS_LOCAL_WRITE | sys::ACCESS_REMOTE_WRITE | relaxed,
        }
    }
}

/// Identity of a region.
#[derive(PartialEq, Eq, Hash)]
struct Registration {
    base: usize,
    bytes: usize,
    dma_buf: Option<RawFd>,
    rights: u32,
}

/// Memory that can be registered: its range, and the owner that keeps it.
#[derive(Clone)]
pub struct Memory {
    base: usize,
    bytes: usize,
    /// For another device's memory: its dma-buf and the offset in it.
    dma_buf: Option<(Arc<OwnedFd>, u64)>,
    keep: Arc<dyn Send + Sync>,
}

impl Memory {
    /// `bytes` bytes at `base`.
    ///
    /// # Safety
    /// The bytes must stay mapped, readable and writable, while `keep` lives, and nothing may hold references into them: devices and peers
    /// read and write them at any time.
    #[must_use]
    pub unsafe fn new(base: *mut u8, bytes: usize, keep: Arc<dyn Send + Sync>) -> Self {
        Self {
            base: base.expose_provenance(),
            bytes,
            dma_buf: None,
            keep,
        }
    }

    /// `bytes` bytes of another device's memory, `offset` bytes into its dma-buf. The device and the peers use `address` for them. This
    /// process need not map them. The device keeps them until `keep` is dropped.
    #[must_use]
    pub fn of_device(
        address: u64,
        bytes: usize,
        (dma_buf, offset): (Arc<OwnedFd>, u64),
        keep: Arc<dyn Send + Sync>,
    ) -> Self {
        Self {
            base: address as usize,
            bytes,
            dma_buf: Some((dma_buf, offset)),
            keep,
        }
    }

    /// Its address.
    #[must_use]
    pub fn address(&self) -> u64 {
        self.base as u64
    }

    /// Its length, bytes.
    #[must_use]
    pub fn bytes(&self) -> usize {
        self.bytes
    }
}

impl Pd {
    /// A protection domain of this device.
    ///
    /// # Errors
    /// A call of the device failed.
    pub fn new(context: Arc<Context>) -> Result<Arc<Self>> {
        // SAFETY: an open device.
        let raw = unsafe { (context.lib().alloc_pd)(context.raw()) };
        if raw.is_null() {
            return Err(Error::last(format!(
                "making a protection domain of {}",
                context.name()
            )));
        }
        Ok(Arc::new(Self {
            context,
            raw,
            registered: Mutex::default(),
        }))
    }

    /// The device.
    #[must_use]
    pub fn context(&self) -> &Arc<Context> {
        &self.context
    }

    pub(crate) fn raw(&self) -> *mut sys::Pd {
        self.raw
    }

    /// Registers memory, or returns its region if it is registered already. A region lives as long as it is held.
    ///
    /// # Errors
    /// A call of the device failed; the error names the limit on locked memory if that is the reason.
    pub fn register(self: &Arc<Self>, memory: &Memory, access: Access) -> Result<Arc<Mr>> {
        let lib = self.context.lib();
        let bits = access.bits(lib);
        let key = Registration {
            base: memory.base,
            bytes: memory.bytes,
            dma_buf: memory.dma_buf.as_ref().map(|(fd, _)| fd.as_raw_fd()),
            rights: bits,
        };
        let mut registered = self.registered.lock().unwrap_or_else(PoisonError::into_inner);
        // A region that is still held keeps its memory, so no other memory can have its address.
        if let Some(mr) = registered.get(&key).and_then(Weak::upgrade) {
            return Ok(mr);
        }
        let raw = match &memory.dma_buf {
            None => self.register_mapped(memory, bits),
            Some((dma_buf, offset)) => self.register_dma_buf(memory, dma_buf, *offset, bits),
        }?;
        let mr = Arc::new(Mr {
            raw,
            memory: memory.clone(),
            pd: Arc::clone(self),
        });
        registered.retain(|_, mr| mr.strong_count() > 0);
        registered.insert(key, Arc::downgrade(&mr));
        Ok(mr)
    }

    fn register_mapped(&self, memory: &Memory, bits: u32) -> Result<*mut sys::Mr> {
        let lib = self.context.lib();
        let base = std::ptr::with_exposed_provenance_mut(memory.base);
        // SAFETY: mapped while `keep` lives, which the region holds.
        let raw = unsafe {
            match lib.reg_mr_iova2 {
                Some(register) => register(self.raw, base, memory.bytes, memory.base as u64, bits),
                None => (lib.reg_mr)(self.raw, base, memory.bytes, bits.cast_signed()),
            }
        };
        if raw.is_null() {
            let what = format!("registering {} bytes with {}", memory.bytes, self.context.name());
            return Err(Error::last(what).of_locking(memory.bytes));
        }
        Ok(raw)
    }

    /// Registers by the descriptor: the kernel asks the exporter for the addresses that this device can access.
    fn register_dma_buf(
        &self,
        memory: &Memory,
        dma_buf: &OwnedFd,
        offset: u64,
        bits: u32,
    ) -> Result<*mut sys::Mr> {
        let what = format!(
            "registering {} bytes of a dma-buf with {}",
            memory.bytes,
            self.context.name()
        );
        let Some(register) = self.context.lib().reg_dmabuf_mr else {
            let text = "libibverbs has no ibv_reg_dmabuf_mr: it is older than rdma-core 34";
            return Err(Error::new(what, std::io::Error::other(text)));
        };
        // SAFETY: an open descriptor, which the region holds. The kernel refuses other files, and ranges beyond the end.
        let raw = unsafe {
            register(
                self.raw,
                offset,
                memory.bytes,
                memory.base as u64,
                dma_buf.as_raw_fd(),
                bits.cast_signed(),
            )
        };
        if raw.is_null() {
            return Err(Error::last(what));
        }
        Ok(raw)
    }
}

impl Drop for Pd {
    fn drop(&mut self) {
        // SAFETY: its regions and queue pairs are gone, because they hold it.
        unsafe { (self.context.lib().dealloc_pd)(self.raw) };
    }
}

/// Registered memory.
pub struct Mr {
    raw: *mut sys::Mr,
    memory: Memory,
    pd: Arc<Pd>,
}

// SAFETY: as `Context`.
unsafe impl Send for Mr {}
// SAFETY: as `Context`.
unsafe impl Sync for Mr {}

impl Mr {
    /// The memory.
    #[must_use]
    pub fn memory(&self) -> &Memory {
        &self.memory
    }

    /// Its key for queue pairs of its domain.
    #[must_use]
    pub fn local_key(&self) -> u32 {
        // SAFETY: a region that is registered.
        unsafe { (*self.raw).lkey }
    }

    /// Its key for peers.
    #[must_use]
    pub fn remote_key(&self) -> u32 {
        // SAFETY: as above.
        unsafe { (*self.raw).rkey }
    }

    /// Whether it belongs to this domain.
    #[must_use]
    pub fn is_of(&self, pd: &Pd) -> bool {
        std::ptr::eq(&raw const *self.pd, pd)
    }
}

impl Drop for Mr {
    fn drop(&mut self) {
        // SAFETY: registered, once.
        unsafe { (self.pd.context.lib().dereg_mr)(self.raw) };
        let _keep = &self.memory.keep; // until here
    }
}
