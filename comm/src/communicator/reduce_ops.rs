//! Reductions that callers made with `ncclRedOpCreatePreMulSum`.

use std::{
    collections::HashMap,
    ffi::c_int,
    sync::{
        Mutex,
        atomic::{AtomicU32, Ordering},
    },
};

use ringsight_comm_base::{
    error::{Error, Result},
    sync::lock,
};
use ringsight_kernels::Scalar;
use ringsight_records::{DataType, ReduceOp};

/// `ncclNumOps`: smaller numbers are the built-in reductions.
const BUILT_IN: u32 = 5;
/// `ncclMaxRedOp`: larger than the number of any reduction.
const END: u32 = i32::MAX as u32;

/// The reductions of one communicator, by their `ncclRedOp_t`.
///
/// All communicators of the process take numbers from one counter, so a number is reused only after all others. The number of a destroyed
/// reduction, or of another communicator's, is therefore an error and never another reduction.
#[derive(Debug, Default)]
pub(crate) struct ReduceOps(Mutex<HashMap<u32, (DataType, Scalar)>>);

impl ReduceOps {
    /// Makes a PreMulSum. Returns its number.
    ///
    /// # Errors
    /// All numbers are in use.
    pub(crate) fn create(&self, data_type: DataType, scalar: Scalar) -> Result<c_int> {
        static NEXT: AtomicU32 = AtomicU32::new(0);
        let mut made = lock(&self.0);
        let span = END - BUILT_IN;
        if made.len() >= span as usize {
            return Err(Error::internal(
                "no reduction number is left: destroy some with ncclRedOpDestroy",
            ));
        }
        loop {
            // Relaxed: the counter orders no other memory. 2^32 is no multiple of the span, so some numbers come again early when the counter
            // wraps. They are skipped if they are taken.
            let number = BUILT_IN + NEXT.fetch_add(1, Ordering::Relaxed) % span;
            if let std::collections::hash_map::Entry::Vacant(free) = made.entry(number) {
                free.insert((data_type, scalar));
                return Ok(number as c_int);
            }
        }
    }

    /// Destroys a reduction. Operations that were called with it are not affected.
    ///
    /// # Errors
    /// It is built in, or this communicator does not have it.
    pub(crate) fn destroy(&self, number: c_int) -> Result<()> {
        if built_in(number).is_some() {
            return Err(Error::argument(format!(
                "op ({number}) is built in: only what ncclRedOpCreatePreMulSum made can be destroyed"
            )));
        }
        u32::try_from(number)
            .ok()
            .and_then(|number| lock(&self.0).remove(&number))
            .map(drop)
            .ok_or_else(|| unknown(number))
    }

    /// The reduction and factor of an operation on `data_type` with reduction `number`.
    ///
    /// # Errors
    /// This communicator does not have it, or it is for another type.
    pub(crate) fn resolve(&self, number: c_int, data_type: DataType) -> Result<(ReduceOp, Scalar)> {
        if let Some(op) = built_in(number) {
            return Ok((op, Scalar::None));
        }
        let found = u32::try_from(number)
            .ok()
            .and_then(|number| lock(&self.0).get(&number).copied());
        match found {
            None => Err(unknown(number)),
            Some((made_for, _)) if made_for != data_type => Err(Error::argument(format!(
                "op ({number}) was made for {made_for}, the operation is on {data_type}"
            ))),
            Some((_, scalar)) => Ok((ReduceOp::PreMulSum, scalar)),
        }
    }
}

fn built_in(number: c_int) -> Option<ReduceOp> {
    u8::try_from(number)
        .ok()
        .and_then(ReduceOp::from_code)
        .filter(|op| u32::from(op.code()) < BUILT_IN)
}

fn unknown(number: c_int) -> Error {
    Error::argument(format!(
        "op ({number}) is not a reduction of this communicator: 0 (sum) to 4 (avg) are, and what \
         ncclRedOpCreatePreMulSum made for it until ncclRedOpDestroy"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ringsight_comm_base::error::ResultCode;

    #[test]
    fn numbers_belong_to_one_communicator_until_destroyed() {
        let (ours, theirs) = (ReduceOps::default(), ReduceOps::default());
        let one = ours.create(DataType::Float32, Scalar::Immediate(1)).unwrap();
        let two = ours.create(DataType::Int8, Scalar::Device(64)).unwrap();
        assert!(one >= 5 && two >= 5 && one != two);
        assert_eq!(
            ours.resolve(one, DataType::Float32),
            Ok((ReduceOp::PreMulSum, Scalar::Immediate(1)))
        );
        assert_eq!(ours.resolve(4, DataType::Int8), Ok((ReduceOp::Avg, Scalar::None)));
        for failed in [
            ours.resolve(one, DataType::Float64).map(drop),
            theirs.resolve(one, DataType::Float32).map(drop),
            theirs.destroy(one),
            ours.destroy(4),
            ours.destroy(-1),
            ours.resolve(-1, DataType::Int8).map(drop),
            ours.resolve(i32::MAX, DataType::Int8).map(drop),
        ] {
            assert_eq!(failed.unwrap_err().code, ResultCode::InvalidArgument);
        }
        ours.destroy(one).unwrap();
        assert!(ours.destroy(one).is_err() && ours.resolve(one, DataType::Float32).is_err());
        let three = ours.create(DataType::Float32, Scalar::Immediate(1)).unwrap();
        assert_ne!(one, three, "not given out again at once");
        assert_eq!(ours.resolve(two, DataType::Int8).unwrap().1, Scalar::Device(64));
    }
}
