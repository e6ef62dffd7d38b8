//! Reading what callers pass: each check names the argument and says what is wrong with it.

use std::ffi::{CStr, c_char, c_int};

use ringsight_records::{DataType, ReduceOp};

use super::types::{CONFIG_MAGIC, CONFIG_UNDEF_INT, NcclConfig};
use crate::{
    communicator::{Communicator, Config},
    error::{Error, Result},
};

/// The place that `pointer` points to.
///
/// # Safety
/// Null, or valid for writes.
pub(super) unsafe fn out<'a, T>(name: &str, pointer: *mut T) -> Result<&'a mut T> {
    // SAFETY: the caller's promise.
    unsafe { pointer.as_mut() }.ok_or_else(|| Error::argument(format!("{name} is NULL")))
}

pub(super) fn data_type(code: c_int) -> Result<DataType> {
    u8::try_from(code)
        .ok()
        .and_then(DataType::from_code)
        .ok_or_else(|| {
            Error::argument(format!(
                "datatype ({code}) is not one of the {} types",
                DataType::ALL.len()
            ))
        })
}

pub(super) fn reduce_op(code: c_int) -> Result<ReduceOp> {
    u8::try_from(code)
        .ok()
        .and_then(ReduceOp::from_code)
        .filter(|op| !matches!(op, ReduceOp::None | ReduceOp::PreMulSum))
        .ok_or_else(|| Error::argument(format!("op ({code}) is not a reduction: 0 (sum) to 4 (avg) are")))
}

/// A rank of `comm`.
pub(super) fn rank(name: &str, value: c_int, comm: &Communicator) -> Result<u32> {
    u32::try_from(value)
        .ok()
        .filter(|rank| *rank < comm.ranks)
        .ok_or_else(|| {
            Error::argument(format!(
                "{name} ({value}) is not a rank: the communicator has {}",
                comm.ranks
            ))
        })
}

/// The address of a buffer of `count` elements.
pub(super) fn buffer<T>(name: &str, pointer: *const T, count: usize) -> Result<usize> {
    if pointer.is_null() && count > 0 {
        return Err(Error::argument(format!("{name} is NULL, but count is {count}")));
    }
    Ok(pointer as usize)
}

/// `count` elements of `data_type` from each of `ranks` ranks must have a size.
pub(super) fn count(count: usize, data_type: DataType, ranks: u32) -> Result<usize> {
    count
        .checked_mul(data_type.size())
        .and_then(|bytes| bytes.checked_mul(ranks as usize))
        .filter(|bytes| isize::try_from(*bytes).is_ok())
        .map(|_| count)
        .ok_or_else(|| Error::argument(format!("count ({count}) is more than an address space holds")))
}

/// Reads a config by NCCL's rule: as many bytes as both sides know, and of those the fields that existed in the version
/// that the caller was built against.
///
/// # Safety
/// Null, or points to a struct that begins with its size.
pub(super) unsafe fn config(pointer: *const NcclConfig) -> Result<Config> {
    if pointer.is_null() {
        return Ok(Config::default());
    }
    // SAFETY: every version begins with these fields.
    let (size, magic, version) = unsafe { ((*pointer).size, (*pointer).magic, (*pointer).version) };
    if magic != CONFIG_MAGIC {
        return Err(Error::argument(format!(
            "config.magic is {magic:#x}: initialise the struct with NCCL_CONFIG_INITIALIZER"
        )));
    }
    // 2.14 to 2.16 ended after `blocking`, at 24 bytes with its padding.
    if !(24..=4096).contains(&size) {
        return Err(Error::argument(format!(
            "config.size ({size}) is not the size of any version's ncclConfig_t"
        )));
    }
    let mut config = NcclConfig {
        size,
        magic,
        version,
        blocking: CONFIG_UNDEF_INT,
        cga_cluster_size: CONFIG_UNDEF_INT,
        min_ctas: CONFIG_UNDEF_INT,
        max_ctas: CONFIG_UNDEF_INT,
        net_name: std::ptr::null(),
        split_share: CONFIG_UNDEF_INT,
        traffic_class: CONFIG_UNDEF_INT,
        comm_name: std::ptr::null(),
        collnet_enable: CONFIG_UNDEF_INT,
        cta_policy: CONFIG_UNDEF_INT,
        shrink_share: CONFIG_UNDEF_INT,
        nvls_ctas: CONFIG_UNDEF_INT,
        n_channels_per_net_peer: CONFIG_UNDEF_INT,
        nvlink_centric_sched: CONFIG_UNDEF_INT,
    };
    let known = size.min(size_of::<NcclConfig>());
    // SAFETY: the caller's struct has `size` bytes, ours has `size_of` bytes, and both are plain data.
    unsafe { std::ptr::copy_nonoverlapping(pointer.cast::<u8>(), (&raw mut config).cast(), known) };
    let since = |at: u32| version >= at;
    if since(21400) && config.blocking == 0 {
        return Err(Error::usage(
            "config.blocking is 0: communicators of this version are blocking only",
        ));
    }
    if !matches!(config.blocking, 0 | 1 | CONFIG_UNDEF_INT) && since(21400) {
        return Err(Error::argument(format!(
            "config.blocking ({}) is neither 0 nor 1",
            config.blocking
        )));
    }
    let channels = |name: &str, value: c_int| {
        if !since(21700) || value == CONFIG_UNDEF_INT {
            return Ok(None);
        }
        match u32::try_from(value) {
            Ok(value) if value > 0 => Ok(Some(value)),
            _ => Err(Error::argument(format!(
                "config.{name} ({value}) is not a positive number"
            ))),
        }
    };
    let (min_channels, max_channels) = (
        channels("minCTAs", config.min_ctas)?,
        channels("maxCTAs", config.max_ctas)?,
    );
    if let (Some(min), Some(max)) = (min_channels, max_channels)
        && min > max
    {
        return Err(Error::argument(format!(
            "config.minCTAs ({min}) is more than config.maxCTAs ({max})"
        )));
    }
    let name = if since(22700) && !config.comm_name.is_null() {
        // SAFETY: a C string, says NCCL's documentation.
        unsafe { CStr::from_ptr(config.comm_name.cast::<c_char>()) }
            .to_string_lossy()
            .into_owned()
    } else {
        String::new()
    };
    Ok(Config {
        min_channels,
        max_channels,
        name,
    })
}
