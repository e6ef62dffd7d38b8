//! Pieces of control messages.

use crate::op::Identity;

/// Kind u8 | from u32 | to u32 | number u64.
pub(crate) fn put_identity(bytes: &mut Vec<u8>, identity: Identity) {
    let (kind, from, to, seq) = match identity {
        Identity::Collective { seq } => (0, 0, 0, seq),
        Identity::Message { from, to, seq } => (1, from, to, seq),
    };
    bytes.push(kind);
    bytes.extend(from.to_le_bytes());
    bytes.extend(to.to_le_bytes());
    bytes.extend(seq.to_le_bytes());
}

/// The kind and the rest of a message that begins with `magic`.
pub(crate) fn open(magic: u32, bytes: &[u8]) -> Option<(u8, Rest<'_>)> {
    let mut rest = Rest(bytes);
    if rest.u32()? != magic {
        return None;
    }
    let [kind] = *rest.take()?;
    Some((kind, rest))
}

/// Bytes that are taken from the front.
pub(crate) struct Rest<'a>(pub(crate) &'a [u8]);

impl<'a> Rest<'a> {
    /// `None` if there are fewer.
    pub(crate) fn take<const N: usize>(&mut self) -> Option<&'a [u8; N]> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(head)
    }

    pub(crate) fn u32(&mut self) -> Option<u32> {
        self.take().map(|bytes| u32::from_le_bytes(*bytes))
    }

    pub(crate) fn u64(&mut self) -> Option<u64> {
        self.take().map(|bytes| u64::from_le_bytes(*bytes))
    }

    /// What [`put_identity`] wrote.
    pub(crate) fn identity(&mut self) -> Option<Identity> {
        let [kind] = *self.take()?;
        let (from, to, seq) = (self.u32()?, self.u32()?, self.u64()?);
        match (kind, from, to) {
            (0, 0, 0) => Some(Identity::Collective { seq }),
            (1, ..) => Some(Identity::Message { from, to, seq }),
            _ => None,
        }
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
