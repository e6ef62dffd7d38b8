//! Looking at a process without watching it.

use ringsight_records::pages::{CommSlot, Communicator, Pages};

use crate::{error::AttachError, pages::Mapped};

/// The live communicators of `pid`, which may be watched by somebody else meanwhile; none if the library has made none.
///
/// # Errors
/// No such process, no right to look, or pages that cannot be read.
pub fn communicators(pid: u32) -> Result<Vec<Communicator>, AttachError> {
    let mapped = Mapped::find(pid)?;
    let pages = mapped.as_ref().and_then(Mapped::view);
    let slots = pages.iter().flat_map(Pages::communicators);
    Ok(slots
        .filter(|slot| slot.is_live())
        .filter_map(CommSlot::read)
        .collect())
}
