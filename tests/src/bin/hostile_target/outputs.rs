//! What the collector writes for people, and what it is asked to explain.

use std::{io, path::Path};

use anyhow::{Result, ensure};
use ringsight_records::{
    Algorithm, Cause, DataType, Description, Function, Protocol, ReduceOp, connection::DEVICE_NAME_BYTES,
    verdicts::GivenVerdict,
};

use super::{Act, map_library, pages};

/// Text that a terminal would obey, or show in another order: an escape sequence, line ends, C1, a change of direction, and bytes that are
/// no UTF-8.
const NAME: &[u8] = b"\x1b]0;own\x07\x1b[2J\r\nroot#\t\xc2\x9b31m\xe2\x80\xae\xe2\x80\xa8\x7f";

/// An honest target that describes an operation.
pub(crate) fn described(library: &Path) -> Result<Act> {
    map_library(library)?;
    let pages = pages::Own::make()?;
    pages.communicator("described");
    pages.view().slot(1).write(&description());
    Ok(Box::new(move |name| {
        pages.communicator(name);
        Ok("done".to_owned())
    }))
}

/// A target whose every name is [`NAME`].
pub(crate) fn names(library: &Path) -> Result<Act> {
    // SAFETY: a string that lives across the call, which cuts it at 15 bytes.
    let named = unsafe { libc::prctl(libc::PR_SET_NAME, c"\x1b[31mr\n\xc2\x9b\xff".as_ptr()) };
    ensure!(named == 0, "PR_SET_NAME: {}", io::Error::last_os_error());
    map_library(library)?;
    let pages = pages::Own::make()?;
    pages.change_communicator(|communicator| {
        fill(&mut communicator.name);
        fill(&mut communicator.apart);
    });
    // And one that is no UTF-8.
    pages.change_communicator(|communicator| {
        communicator.id = 8;
        communicator.name[..4].copy_from_slice(b"\xff\x1b[m");
    });
    pages.view().slot(1).write(&description());
    let mut device = [0; DEVICE_NAME_BYTES];
    fill(&mut device);
    // SAFETY: plain integers; zero is a value of each.
    let nothing: GivenVerdict = unsafe { std::mem::zeroed() };
    pages.view().keep_verdict(&GivenVerdict {
        time_ns: 1,
        comm: 7,
        seq: 1,
        op: 1,
        peer: -1,
        culprit: 1,
        cause: Cause::StuckNic as u8,
        is_hang: 1,
        queue_pair: 17,
        port: 1,
        device,
        ..nothing
    });
    Ok(Box::new(move |_| {
        let _ = &pages;
        Ok("done".to_owned())
    }))
}

/// As much of [`NAME`] as there is room for.
fn fill(field: &mut [u8]) {
    let length = NAME.len().min(field.len() - 1);
    field[..length].copy_from_slice(&NAME[..length]);
}

fn description() -> Description {
    Description {
        comm: 7,
        seq: 1,
        op: 1,
        bytes: 4096,
        count: 1024,
        ranks: 2,
        function: Function::AllReduce.code(),
        data_type: DataType::Float32.code(),
        reduce_op: ReduceOp::Sum.code(),
        algorithm: Algorithm::Ring.code(),
        protocol: Protocol::Simple.code(),
        channels: 2,
        ..Description::default()
    }
}
