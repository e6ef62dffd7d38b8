//! A growing trace file that is complete after every write.

use std::{fs::File, io, os::unix::fs::FileExt as _};

/// Opens the object and its array. Tools like HTA take the object form alone.
const HEAD: &str = "{\"displayTimeUnit\":\"ns\",\"traceEvents\":[\n";
/// Closes both; the next append overwrites it.
const TAIL: &[u8] = b"\n]}\n";

/// What an [`TraceFile`] needs of a file.
pub(super) trait Medium {
    /// Writes all of `bytes` at `offset`, bytes from the start. On failure any part may have been written.
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()>;
    /// Cuts the file to `length` bytes.
    fn set_len(&mut self, length: u64) -> io::Result<()>;
}

impl Medium for File {
    fn write_at(&mut self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.write_all_at(bytes, offset)
    }

    fn set_len(&mut self, length: u64) -> io::Result<()> {
        Self::set_len(self, length)
    }
}

/// A JSON object with an array of at least one event.
///
/// Between appends the file is valid JSON. A process killed in the middle of one leaves an array without its end, which
/// the viewers accept; a full disk leaves the array as it was before that append.
pub(super) struct TraceFile<M> {
    medium: M,
    /// Bytes up to the end of the last element.
    length: u64,
}

impl<M: Medium> TraceFile<M> {
    /// Starts the array with one element, so that every later one begins with a comma.
    pub(super) fn create(mut medium: M, first: &str) -> io::Result<Self> {
        let mut bytes = format!("{HEAD}{first}").into_bytes();
        let length = bytes.len() as u64;
        bytes.extend_from_slice(TAIL);
        medium.write_at(0, &bytes)?;
        Ok(Self { medium, length })
    }

    /// Appends the elements in `buffer`, each beginning with `,`, and empties it.
    ///
    /// # Errors
    /// Nothing was appended, the array ends as before.
    pub(super) fn append(&mut self, buffer: &mut Vec<u8>) -> io::Result<()> {
        let end = self.length + buffer.len() as u64;
        // One write over the present tail with the next tail in it: no moment between two writes to be killed in.
        buffer.extend_from_slice(TAIL);
        let result = self.medium.write_at(self.length, buffer);
        buffer.clear();
        match result {
            Ok(()) => self.length = end,
            Err(_) => self.restore(),
        }
        result
    }

    /// Puts the tail back. Its bytes lie in a block that the file owned already, so this needs no room on the disk; if
    /// it fails all the same, an array without its end remains, which the viewers accept.
    fn restore(&mut self) {
        let _ = self.medium.write_at(self.length, TAIL);
        let _ = self.medium.set_len(self.length + TAIL.len() as u64);
    }
}
