//! Whether the buffers of an operation are memory that the device can use, and its stream one of the device: a kernel that uses other memory breaks the device for
//! good, and says nothing of whose it was; of a stream that is another device's the driver says that some handle is invalid, once the other ranks wait.

use std::sync::atomic::{AtomicUsize, Ordering};

use ringsight_comm_base::error::{Error, Result};

use crate::{
    device::{Device, DeviceError, Stream},
    op::Request,
};

/// Addresses that are remembered: a training step's buckets and parameters.
const KNOWN: usize = 256;

/// When buffers are looked at, and which were found right.
#[derive(Debug)]
pub(crate) struct Buffers {
    when: When,
    known: Known,
    streams: Known,
}

/// The address, or handle, found right last, by its hash; 0 = none.
#[derive(Debug)]
struct Known(Box<[AtomicUsize]>);

impl Known {
    fn new(entries: usize) -> Self {
        Self((0..entries).map(|_| AtomicUsize::new(0)).collect())
    }

    /// Whether it was found right; else asks.
    fn check(&self, address: usize, ask: impl FnOnce() -> Result<()>) -> Result<()> {
        // Relaxed: a number that says all of itself; an old one costs a question to the driver.
        let entry = self.0.get(slot(address));
        if entry.is_some_and(|entry| entry.load(Ordering::Relaxed) == address) {
            return Ok(());
        }
        ask()?;
        if let Some(entry) = entry {
            entry.store(address, Ordering::Relaxed);
        }
        Ok(())
    }
}

/// `NCCL_CHECK_POINTERS`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum When {
    /// 0.
    Never,
    /// Not set: an address of an eager operation when it is new. In a capture memory may be the graph's own, which the
    /// driver tells nothing of before a replay: there only what it knows to be another GPU's is refused.
    New,
    /// Any other number, as in NCCL: with every call.
    Always,
}

impl When {
    fn parse(value: Option<&str>) -> Result<Self> {
        let Some(value) = value else { return Ok(Self::New) };
        match ringsight_comm_base::env::parse::<i64>("NCCL_CHECK_POINTERS", value) {
            Some(0) => Ok(Self::Never),
            Some(_) => Ok(Self::Always),
            None => Err(Error::argument(format!(
                "NCCL_CHECK_POINTERS={value} is no number"
            ))),
        }
    }
}

impl Buffers {
    /// As the environment says.
    pub(crate) fn read() -> Result<Self> {
        When::parse(ringsight_comm_base::env::text("NCCL_CHECK_POINTERS").as_deref()).map(Self::new)
    }

    fn new(when: When) -> Self {
        let entries = if when == When::New { KNOWN } else { 0 };
        Self {
            when,
            known: Known::new(entries),
            streams: Known::new(KNOWN),
        }
    }

    /// Looks at the buffers of an operation on device number `number`.
    ///
    /// # Errors
    /// Names the argument, the address and the device.
    pub(crate) fn check(
        &self,
        device: &dyn Device,
        number: i32,
        request: &Request,
        captured: bool,
    ) -> Result<()> {
        if self.when == When::Never {
            return Ok(());
        }
        let unknown = captured && self.when == When::New;
        for (name, address) in [
            ("sendbuff", request.send),
            ("recvbuff", request.recv),
            ("scalar", request.scalar.address()),
        ] {
            if address == 0 {
                continue;
            }
            let ask = || ask(device, number, (name, address), unknown);
            // What may be there is not known to be.
            if unknown {
                ask()?;
            } else {
                self.known.check(address, ask)?;
            }
        }
        Ok(())
    }

    /// Looks at a buffer that is registered with a communicator on device number `number`. It may be for later, so that of what the driver
    /// knows nothing of nothing is said before an operation uses it, unless all is to be looked at.
    ///
    /// # Errors
    /// As those of [`Buffers::check`].
    pub(crate) fn check_registered(&self, device: &dyn Device, number: i32, address: usize) -> Result<()> {
        match self.when {
            When::Never => Ok(()),
            when => ask(device, number, ("buff", address), when == When::New),
        }
    }

    /// Looks whether kernels of device number `number` can be launched in a stream. A handle that was given to another stream since is not asked about again.
    ///
    /// # Errors
    /// Names the stream and the device.
    pub(crate) fn check_stream(&self, device: &dyn Device, number: i32, stream: Stream) -> Result<()> {
        let ask = || {
            device
                .check_stream(stream, number)
                .map_err(|error| Error::from(error).within("stream"))
        };
        self.streams.check(stream.0, ask)
    }
}

/// Asks the device for an argument's buffer.
fn ask(device: &dyn Device, number: i32, (name, address): (&str, usize), unknown: bool) -> Result<()> {
    let answer = device.check_buffer(address, number, unknown);
    answer.map_err(|error| match error {
        DeviceError::InvalidHandle(text) => Error::argument(format!("{name}: {text}")),
        error => Error::from(error),
    })
}

/// Where an address is remembered: by the bits in which buffers differ, folded.
fn slot(address: usize) -> usize {
    (address >> 9 ^ address >> 17 ^ address >> 25) % KNOWN
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_variable_is_a_number() {
        assert_eq!(When::parse(None).unwrap(), When::New);
        assert_eq!(When::parse(Some("0")).unwrap(), When::Never);
        assert_eq!(When::parse(Some("1")).unwrap(), When::Always);
        let error = When::parse(Some("yes")).unwrap_err();
        assert!(error.text.contains("NCCL_CHECK_POINTERS=yes"), "{}", error.text);
    }

    #[test]
    fn neighbours_are_remembered_side_by_side() {
        // 256 buffers of a page each, and of 2 MiB each.
        for step in [512, 2 << 20] {
            let base = 0x7f12_3400_0000;
            let slots: std::collections::HashSet<_> =
                (0..64).map(|index| slot(base + index * step)).collect();
            assert!(slots.len() >= 48, "{step}: {}", slots.len());
        }
    }
}
