//! Queue pairs.

use std::{ops::Range, ptr, sync::Arc};

use crate::{
    completion::Cq,
    device::{Mtu, check},
    error::{Error, Result},
    memory::{Mr, Pd},
    sys,
};

/// A reliable connection's queue pair.
pub struct Qp {
    raw: *mut sys::Qp,
    /// Maximum number of inline bytes of a work request.
    inline_bytes: u32,
    pd: Arc<Pd>,
    _cq: Arc<Cq>,
}

// SAFETY: as `Cq`; posting takes the queue's own lock.
unsafe impl Send for Qp {}
// SAFETY: as above.
unsafe impl Sync for Qp {}

/// Capacity of a queue pair.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Work requests.
    pub sends: u32,
    /// Receive requests.
    pub receives: u32,
    /// Minimum number of inline bytes of a work request.
    pub inline_bytes: u32,
}

/// The peer of a queue pair, and the route to it.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    /// The peer's queue pair.
    pub qp: u32,
    /// First packet number that it sends.
    pub psn: u32,
    /// The smaller MTU of both ends.
    pub mtu: Mtu,
    /// Its LID, in an InfiniBand subnet.
    pub lid: u16,
    /// Its GID, and the index of the local GID: for RoCE, or another subnet.
    pub gid: Option<([u8; 16], u8)>,
    /// Service level.
    pub service_level: u8,
    /// Traffic class.
    pub traffic_class: u8,
}

/// How often and how long a queue pair retries.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RetryPolicy {
    /// `NCCL_IB_TIMEOUT`: an answer may take 4.096 µs × 2^`timeout`.
    pub timeout: u8,
    /// `NCCL_IB_RETRY_CNT`: attempts after the first; at most 7, which soft-RoCE treats as unlimited.
    pub retries: u8,
}

/// Source of the bytes of a write.
#[derive(Clone)]
pub enum Source<'a> {
    /// Inline in the request.
    Inline(&'a [u8]),
    /// A range of registered memory.
    Registered(&'a Mr, Range<usize>),
}

/// A write into a peer's memory.
#[derive(Clone)]
pub struct Write<'a> {
    /// Number that the completion returns.
    pub id: u64,
    /// The bytes to write.
    pub source: Source<'a>,
    /// Address at the peer.
    pub address: u64,
    /// Remote key of the peer's memory.
    pub key: u32,
    /// Consumes a receive request of the peer, whose completion returns this value.
    pub immediate: Option<u32>,
    /// Whether success yields a completion; an error always does.
    pub signaled: bool,
}

/// Writes of one call at most.
pub const CHAIN: usize = 4;

impl Qp {
    /// A queue pair whose completions go to `cq`.
    ///
    /// # Errors
    /// A call of the device failed.
    pub fn new(pd: &Arc<Pd>, cq: &Arc<Cq>, size: Size) -> Result<Self> {
        let lib = pd.context().lib();
        let mut attributes = sys::QpInitAttr {
            qp_context: ptr::null_mut(),
            send_cq: cq.raw,
            recv_cq: cq.raw,
            srq: ptr::null_mut(),
            cap: sys::QpCap {
                max_send_wr: size.sends,
                max_recv_wr: size.receives,
                max_send_sge: 1,
                max_recv_sge: 1,
                max_inline_data: size.inline_bytes,
            },
            qp_type: sys::QPT_RC,
            sq_sig_all: 0,
        };
        // SAFETY: a domain and a queue of an open device; the attributes are writable.
        let raw = unsafe { (lib.create_qp)(pd.raw(), &raw mut attributes) };
        if raw.is_null() {
            let what = format!("making a queue pair of {} ({size:?})", pd.context().name());
            return Err(Error::last(what).of_locking(size.sends as usize * 256));
        }
        Ok(Self {
            raw,
            inline_bytes: attributes.cap.max_inline_data,
            pd: Arc::clone(pd),
            _cq: Arc::clone(cq),
        })
    }

    /// Its number.
    #[must_use]
    pub fn number(&self) -> u32 {
        // SAFETY: a queue pair that lives as long as this.
        unsafe { (*self.raw).qp_num }
    }

    fn modify(&self, mut attributes: sys::QpAttr, mask: i32, to: &str) -> Result<()> {
        // SAFETY: a queue pair of an open device; the attributes are writable.
        let code = unsafe { (self.pd.context().lib().modify_qp)(self.raw, &raw mut attributes, mask) };
        check(code, || {
            format!(
                "bringing queue pair {} of {} to {to}",
                self.number(),
                self.pd.context().name()
            )
        })
    }

    /// Moves it to RESET. Posted requests yield no completion any more.
    ///
    /// # Errors
    /// A call of the device failed.
    pub fn reset(&self) -> Result<()> {
        let attributes = sys::QpAttr {
            qp_state: sys::QPS_RESET,
            ..Default::default()
        };
        self.modify(attributes, sys::qp_attr::STATE, "RESET")
    }

    /// Moves it to the error state: posted requests are flushed.
    ///
    /// # Errors
    /// A call of the device failed.
    pub fn fail(&self) -> Result<()> {
        let attributes = sys::QpAttr {
            qp_state: sys::QPS_ERR,
            ..Default::default()
        };
        self.modify(attributes, sys::qp_attr::STATE, "ERROR")
    }

    /// From RESET to INIT: it belongs to `port`, and accepts receive requests.
    ///
    /// # Errors
    /// A call of the device failed.
    pub fn init(&self, port: u8, pkey_index: u16) -> Result<()> {
        use sys::qp_attr::{ACCESS_FLAGS, PKEY_INDEX, PORT, STATE};
        let attributes = sys::QpAttr {
            qp_state: sys::QPS_INIT,
            pkey_index,
            port_num: port,
            qp_access_flags: sys::ACCESS_REMOTE_WRITE,
            ..Default::default()
        };
        self.modify(attributes, STATE | PKEY_INDEX | PORT | ACCESS_FLAGS, "INIT")
    }

    /// From INIT to RTR: it receives from its peer. May take a second if the peer's address has to be resolved.
    ///
    /// # Errors
    /// A call of the device failed: the peer cannot be reached from this port.
    pub fn receive_from(&self, port: u8, route: &Route) -> Result<()> {
        use sys::qp_attr::{AV, DEST_QPN, MAX_DEST_RD_ATOMIC, MIN_RNR_TIMER, PATH_MTU, RQ_PSN, STATE};
        let mut address = sys::AhAttr {
            dlid: route.lid,
            sl: route.service_level,
            port_num: port,
            ..Default::default()
        };
        if let Some((dgid, sgid_index)) = route.gid {
            address.is_global = 1;
            address.grh = sys::GlobalRoute {
                dgid,
                sgid_index,
                hop_limit: 255,
                traffic_class: route.traffic_class,
                ..Default::default()
            };
        }
        let attributes = sys::QpAttr {
            qp_state: sys::QPS_RTR,
            path_mtu: route.mtu.code().into(),
            dest_qp_num: route.qp,
            rq_psn: route.psn,
            max_dest_rd_atomic: 1,
            // 0.64 ms; a receiver here always has receive requests for what it granted.
            min_rnr_timer: 12,
            ah_attr: address,
            ..Default::default()
        };
        let mask = STATE | AV | PATH_MTU | DEST_QPN | RQ_PSN | MAX_DEST_RD_ATOMIC | MIN_RNR_TIMER;
        self.modify(attributes, mask, "RTR")
    }

    /// From RTR to RTS: it sends, with packet numbers from `psn`.
    ///
    /// # Errors
    /// A call of the device failed.
    pub fn send_from(&self, psn: u32, retry: RetryPolicy) -> Result<()> {
        use sys::qp_attr::{MAX_QP_RD_ATOMIC, RETRY_CNT, RNR_RETRY, SQ_PSN, STATE, TIMEOUT};
        let attributes = sys::QpAttr {
            qp_state: sys::QPS_RTS,
            sq_psn: psn,
            timeout: retry.timeout,
            retry_cnt: retry.retries,
            rnr_retry: 7,
            max_rd_atomic: 1,
            ..Default::default()
        };
        let mask = STATE | TIMEOUT | RETRY_CNT | RNR_RETRY | SQ_PSN | MAX_QP_RD_ATOMIC;
        self.modify(attributes, mask, "RTS")
    }

    /// Its present state: one of the `QPS_` numbers of [`sys`].
    ///
    /// # Errors
    /// A call of the device failed.
    pub fn state(&self) -> Result<u32> {
        let mut attributes = sys::QpAttr::default();
        // SAFETY: all-zero bytes are valid attributes.
        let mut init: sys::QpInitAttr = unsafe { std::mem::zeroed() };
        // SAFETY: a queue pair of an open device; both are writable.
        let code = unsafe {
            (self.pd.context().lib().query_qp)(
                self.raw,
                &raw mut attributes,
                sys::qp_attr::STATE,
                &raw mut init,
            )
        };
        check(code, || {
            format!("asking queue pair {} for its state", self.number())
        })?;
        Ok(attributes.qp_state)
    }

    /// Posts writes, in this order.
    ///
    /// # Errors
    /// A call of the device failed. Writes before the failed one stay posted.
    ///
    /// # Panics
    /// For more than [`CHAIN`] writes, too many inline bytes, or memory of another domain or outside its region.
    pub fn post(&self, writes: &[Write<'_>]) -> Result<()> {
        assert!(writes.len() <= CHAIN, "{} writes at once", writes.len());
        let mut pieces = [sys::Sge::default(); CHAIN];
        let mut requests = [sys::SendWr::new(); CHAIN];
        for ((write, piece), request) in writes.iter().zip(&mut pieces).zip(&mut requests) {
            let mut flags = 0;
            match &write.source {
                Source::Inline(bytes) => {
                    assert!(
                        bytes.len() <= self.inline_bytes as usize,
                        "{} bytes inline",
                        bytes.len()
                    );
                    piece.addr = bytes.as_ptr().expose_provenance() as u64;
                    piece.length = bytes.len() as u32;
                    flags |= sys::SEND_INLINE;
                }
                Source::Registered(mr, range) => {
                    assert!(mr.is_of(&self.pd), "memory of another domain");
                    assert!(range.start <= range.end && range.end <= mr.memory().bytes());
                    piece.addr = mr.memory().address() + range.start as u64;
                    piece.length = u32::try_from(range.len()).expect("a message of less than 4 GiB");
                    piece.lkey = mr.local_key();
                }
            }
            if write.signaled {
                flags |= sys::SEND_SIGNALED;
            }
            *request = sys::SendWr {
                wr_id: write.id,
                num_sge: (piece.length > 0).into(),
                opcode: match write.immediate {
                    Some(_) => sys::WR_RDMA_WRITE_WITH_IMM,
                    None => sys::WR_RDMA_WRITE,
                },
                send_flags: flags,
                imm_data: write.immediate.unwrap_or(0).to_be(),
                remote_addr: write.address,
                rkey: write.key,
                ..sys::SendWr::new()
            };
        }
        let piece = pieces.as_mut_ptr();
        let first = requests.as_mut_ptr();
        for i in 0..writes.len() {
            // SAFETY: within the arrays, of which no references are left.
            unsafe {
                (*first.add(i)).sg_list = piece.add(i);
                if i + 1 < writes.len() {
                    (*first.add(i)).next = first.add(i + 1);
                }
            }
        }
        if writes.is_empty() {
            return Ok(());
        }
        let mut bad = ptr::null_mut();
        // SAFETY: a queue pair of an open device; the chain and its pieces live until the call returns, and the driver keeps no pointer to
        // them. It copies inline bytes; a region holds registered memory.
        let code = unsafe {
            let post = (*self.pd.context().raw()).ops.post_send;
            post(self.raw, first, &raw mut bad)
        };
        check(code, || format!("posting to queue pair {}", self.number()))
    }

    /// Posts a send with inline bytes.
    ///
    /// # Errors
    /// A call of the device failed.
    ///
    /// # Panics
    /// For too many inline bytes.
    pub fn send(&self, id: u64, bytes: &[u8]) -> Result<()> {
        assert!(
            bytes.len() <= self.inline_bytes as usize,
            "{} bytes inline",
            bytes.len()
        );
        let mut piece = sys::Sge {
            addr: bytes.as_ptr().expose_provenance() as u64,
            length: bytes.len() as u32,
            lkey: 0,
        };
        let mut request = sys::SendWr {
            wr_id: id,
            sg_list: &raw mut piece,
            num_sge: 1,
            opcode: sys::WR_SEND,
            send_flags: sys::SEND_INLINE | sys::SEND_SIGNALED,
            ..sys::SendWr::new()
        };
        let mut bad = ptr::null_mut();
        // SAFETY: a queue pair of an open device; the request and its bytes live until the call returns, which copies them.
        let code = unsafe {
            let post = (*self.pd.context().raw()).ops.post_send;
            post(self.raw, &raw mut request, &raw mut bad)
        };
        check(code, || format!("sending on queue pair {}", self.number()))
    }

    /// Posts a receive request for a send, into `range` of a region.
    ///
    /// # Errors
    /// A call of the device failed.
    ///
    /// # Panics
    /// For memory of another domain or outside its region.
    pub fn post_receive_into(&self, id: u64, mr: &Mr, range: Range<usize>) -> Result<()> {
        assert!(mr.is_of(&self.pd), "memory of another domain");
        assert!(range.start <= range.end && range.end <= mr.memory().bytes());
        let mut piece = sys::Sge {
            addr: mr.memory().address() + range.start as u64,
            length: range.len() as u32,
            lkey: mr.local_key(),
        };
        let mut request = sys::RecvWr {
            wr_id: id,
            next: ptr::null_mut(),
            sg_list: &raw mut piece,
            num_sge: 1,
        };
        let mut bad = ptr::null_mut();
        // SAFETY: a queue pair of an open device; the request lives until the call returns, the memory as long as its region, which
        // whoever posts keeps longer than the queue pair.
        let code = unsafe {
            let post = (*self.pd.context().raw()).ops.post_recv;
            post(self.raw, &raw mut request, &raw mut bad)
        };
        check(code, || {
            format!("posting a receive request to queue pair {}", self.number())
        })
    }

    /// Posts receive requests without memory, for writes with immediate: `count` of them with this id.
    ///
    /// # Errors
    /// A call of the device failed.
    pub fn post_receives(&self, id: u64, count: u32) -> Result<()> {
        for _ in 0..count {
            let mut request = sys::RecvWr {
                wr_id: id,
                next: ptr::null_mut(),
                sg_list: ptr::null_mut(),
                num_sge: 0,
            };
            let mut bad = ptr::null_mut();
            // SAFETY: a queue pair of an open device; the request lives until the call returns.
            let code = unsafe {
                let post = (*self.pd.context().raw()).ops.post_recv;
                post(self.raw, &raw mut request, &raw mut bad)
            };
            check(code, || {
                format!("posting a receive request to queue pair {}", self.number())
            })?;
        }
        Ok(())
    }
}

impl Drop for Qp {
    fn drop(&mut self) {
        // SAFETY: made once and destroyed once, before its completion queue and domain.
        unsafe { (self.pd.context().lib().destroy_qp)(self.raw) };
    }
}
