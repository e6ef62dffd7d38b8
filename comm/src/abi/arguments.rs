//! Reading what callers pass: each check names the argument and says what is wrong with it.

use std::ffi::c_int;

use ringsight_comm_base::error::{Error, Result};
use ringsight_records::DataType;

use crate::communicator::Communicator;

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
