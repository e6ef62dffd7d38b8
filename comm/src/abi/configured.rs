//! Collectives with a configuration for the call (NCCL 2.32), and encryption.
//!
//! A call is the plain one: what its configuration chooses is checked and has no effect, unless the library is told to
//! refuse what it cannot do (`forceAlgSelection` with an `algSelection`).

#![expect(non_snake_case, reason = "NCCL's names")]
#![expect(clippy::too_many_arguments, reason = "NCCL's signatures")]

use std::ffi::{CStr, c_char, c_int, c_void};

use ringsight_comm_base::error::{Error, Result, ResultCode};
use ringsight_records::Function;

use super::{
    communicators::in_group,
    entry,
    operations::operation,
    types::{CONFIG_MAGIC, CONFIG_UNDEF_INT},
};
use crate::{communicator::Handle, device::Stream};

/// `ncclCollConfig_t` of 2.31. The only field of 2.32 is an event, `launchCompletionEvent`, behind these.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct CollConfig {
    /// Bytes of the caller's struct.
    pub size: usize,
    /// `NCCL_API_MAGIC`.
    pub magic: u32,
    /// The version that the caller was built against.
    pub version: u32,
    /// Options of other vendors' libraries.
    pub extensions: *const c_void,
    /// Fewest channels.
    pub min_ctas: c_int,
    /// Most channels.
    pub max_ctas: c_int,
    /// Channels of NVLink SHARP.
    pub nvls_ctas: c_int,
    /// Clusters of blocks.
    pub cga_cluster_size: c_int,
    /// Algorithms that the call may use; null or empty for any.
    pub alg_selection: *const c_char,
    /// Whether a selection that cannot be had is an error.
    pub force_alg_selection: c_int,
    /// Policy for channels.
    pub cta_policy: c_int,
    /// For profiler plugins.
    pub user_profiler_tag: u64,
}

const _: () = assert!(size_of::<CollConfig>() == 64);
const _: () = assert!(std::mem::offset_of!(CollConfig, alg_selection) == 40);
const _: () = assert!(std::mem::offset_of!(CollConfig, cta_policy) == 52);

/// Checks a call's configuration.
///
/// # Safety
/// `config` is null or points to a struct that begins with its size; the text in it is a C string.
unsafe fn check(config: *const CollConfig) -> Result<()> {
    if config.is_null() {
        return Ok(());
    }
    // SAFETY: every version begins with its size.
    let size = unsafe { (&raw const (*config).size).read_unaligned() };
    if size < size_of::<CollConfig>() {
        return Err(Error::argument(format!(
            "config.size ({size}) is not the size of any version's ncclCollConfig_t: initialise the struct with \
             NCCL_COLLCONFIG_INITIALIZER"
        )));
    }
    // SAFETY: the caller's struct has at least these bytes, all plain data.
    let given = unsafe { config.read_unaligned() };
    if given.magic != CONFIG_MAGIC {
        return Err(Error::argument(format!(
            "config.magic is {:#x}: initialise the struct with NCCL_COLLCONFIG_INITIALIZER",
            given.magic
        )));
    }
    let fields = [
        ("minCTAs", given.min_ctas, 1, c_int::MAX),
        ("maxCTAs", given.max_ctas, 1, c_int::MAX),
        ("nvlsCTAs", given.nvls_ctas, 1, c_int::MAX),
        ("cgaClusterSize", given.cga_cluster_size, 0, c_int::MAX),
        ("forceAlgSelection", given.force_alg_selection, 0, 1),
        ("CTAPolicy", given.cta_policy, 0, 3),
    ];
    for (name, value, least, most) in fields {
        if value != CONFIG_UNDEF_INT && !(least..=most).contains(&value) {
            return Err(Error::argument(format!(
                "config.{name} ({value}) is not between {least} and {most}"
            )));
        }
    }
    if given.min_ctas > given.max_ctas && given.max_ctas != CONFIG_UNDEF_INT {
        return Err(Error::argument(format!(
            "config.minCTAs ({}) is more than config.maxCTAs ({})",
            given.min_ctas, given.max_ctas
        )));
    }
    if given.force_alg_selection == 1 && !given.alg_selection.is_null() {
        // SAFETY: not null, so a C string, says NCCL's documentation.
        let selection = unsafe { CStr::from_ptr(given.alg_selection) };
        if !selection.is_empty() {
            return Err(Error::usage(format!(
                "config.algSelection ({selection:?}) cannot be had: this library chooses the algorithm \
                 (RINGSIGHT_ALGO); set config.forceAlgSelection to 0"
            )));
        }
    }
    Ok(())
}

/// The plain call, if its configuration is right.
///
/// # Safety
/// As of [`check`].
unsafe fn configured(
    config: *const CollConfig,
    function: Function,
    buffers: (*const c_void, *mut c_void),
    count: usize,
    type_code: c_int,
    op: Option<c_int>,
    root: Option<c_int>,
    comm: Handle,
    stream: Stream,
) -> Result<()> {
    // SAFETY: the caller's promise.
    in_group(unsafe { check(config) })?;
    operation(
        function,
        buffers,
        count,
        type_code,
        op,
        root.map(|root| ("root", root)),
        comm,
        stream,
    )
}

/// Defines `ncclXConfig` for collectives that reduce, and have a root, or not.
macro_rules! configured_entries {
    ($($name:ident, $twin:ident: $function:ident($($extra:ident),*), $op:expr, $root:expr;)+) => {$(
        entry! {
            #[doc = concat!("The plain collective with a checked configuration (", stringify!($function), ").")]
            $name, $twin(
                sendbuff: *const c_void, recvbuff: *mut c_void, count: usize, datatype: c_int, $($extra: c_int,)*
                comm: Handle, stream: Stream, config: *const CollConfig,
            ) {
                let buffers = (sendbuff, recvbuff);
                // SAFETY: null or valid, says the entry point's contract.
                unsafe {
                    configured(config, Function::$function, buffers, count, datatype, $op, $root, comm, stream)
                }
            }
        }
    )+};
}

configured_entries! {
    ncclAllReduceConfig, pncclAllReduceConfig: AllReduce(op), Some(op), None;
    ncclReduceScatterConfig, pncclReduceScatterConfig: ReduceScatter(op), Some(op), None;
    ncclReduceConfig, pncclReduceConfig: Reduce(op, root), Some(op), Some(root);
    ncclBroadcastConfig, pncclBroadcastConfig: Broadcast(root), None, Some(root);
    ncclAllGatherConfig, pncclAllGatherConfig: AllGather(), None, None;
    ncclAlltoAllConfig, pncclAlltoAllConfig: AlltoAll(), None, None;
    ncclGatherConfig, pncclGatherConfig: Gather(root), None, Some(root);
    ncclScatterConfig, pncclScatterConfig: Scatter(root), None, Some(root);
}

entry! {
    /// Fails with `ncclInvalidUsage` unless it asks for no encryption. `config` is an `ncclEncryptionConfig_t`: size, magic,
    /// version, mode (0 for none).
    ncclSetEncryption, pncclSetEncryption(config: *const c_void) {
        if config.is_null() {
            return Err(Error::argument("config is NULL"));
        }
        // SAFETY: not null, so a struct that begins so, says the entry point's contract.
        let (magic, mode) = unsafe {
            let words = config.cast::<u32>();
            (words.add(2).read_unaligned(), words.add(4).read_unaligned())
        };
        if magic != CONFIG_MAGIC {
            return Err(Error::argument("config.magic is wrong: use NCCL_ENCRYPTION_CONFIG_INITIALIZER"));
        }
        if mode != 0 {
            return Err(Error::usage(format!("config.mode ({mode}): connections are not encrypted by this library")));
        }
        Ok(())
    }
}
