//! Reductions that callers make.

#![expect(non_snake_case, reason = "NCCL's names")]

use std::ffi::{c_int, c_void};

use ringsight_comm_base::error::{Error, ResultCode};
use ringsight_kernels::Scalar;

use super::{
    arguments::{data_type, out},
    entry,
};
use crate::communicator::{self, Handle};

/// `ncclScalarDevice`.
const SCALAR_DEVICE: c_int = 0;
/// `ncclScalarHostImmediate`.
const SCALAR_HOST_IMMEDIATE: c_int = 1;

entry! {
    /// Makes a reduction that sums each rank's elements multiplied with that rank's `scalar`, for operations on
    /// `datatype`. The scalar is read now (`ncclScalarHostImmediate`), or by each operation when it runs
    /// (`ncclScalarDevice`).
    ncclRedOpCreatePreMulSum, pncclRedOpCreatePreMulSum(
        op: *mut c_int, scalar: *mut c_void, datatype: c_int, residence: c_int, comm: Handle,
    ) {
        let comm = communicator::lookup(comm)?;
        comm.check_usable()?;
        // SAFETY: the caller's promise.
        let op = unsafe { out("op", op) }?;
        // The code that NCCL gives here, unlike anywhere else.
        let data_type = data_type(datatype).map_err(|error| Error::internal(error.text))?;
        if scalar.is_null() {
            return Err(Error::argument("scalar is NULL"));
        }
        let scalar = match residence {
            SCALAR_DEVICE => Scalar::Device(scalar as usize),
            SCALAR_HOST_IMMEDIATE => {
                let mut bits = [0; 8];
                let element = &mut bits[..data_type.size()];
                // SAFETY: the caller's promise: an element of the type is there. Copied as bytes: aligned or not.
                unsafe {
                    std::ptr::copy_nonoverlapping(scalar.cast::<u8>(), element.as_mut_ptr(), element.len());
                }
                Scalar::Immediate(u64::from_le_bytes(bits))
            }
            _ => {
                return Err(Error::argument(format!(
                    "residence ({residence}) is neither ncclScalarDevice (0) nor ncclScalarHostImmediate (1)"
                )));
            }
        };
        *op = comm.reduce_ops.create(data_type, scalar)?;
        Ok(())
    }
}

entry! {
    /// Destroys a reduction; operations that were called with it are not affected, launched or not.
    ncclRedOpDestroy, pncclRedOpDestroy(op: c_int, comm: Handle) {
        communicator::lookup(comm)?.reduce_ops.destroy(op)
    }
}
