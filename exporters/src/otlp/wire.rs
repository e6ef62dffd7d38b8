//! The little of the protobuf wire format that writing OTLP, and splitting what was written, needs.
//!
//! Everything is written in field order and in its shortest form, so the output is the one that `prost` produces.

/// Wire type of variable-length integers.
const VARINT: u8 = 0;
/// Wire type of eight-byte little-endian values.
const FIXED64: u8 = 1;
/// Wire type of length-delimited bytes.
const LEN: u8 = 2;

/// Bytes kept free for the length of a message that may reach megabytes.
pub(super) const WIDE: usize = 4;
/// Bytes kept free for the length of a message of the size of a span.
pub(super) const NARROW: usize = 2;

/// A message whose length is not known yet.
#[must_use = "a message that is opened must be closed"]
pub(super) struct Open {
    /// Where its length belongs.
    at: usize,
    /// Bytes kept free there.
    reserved: usize,
}

/// Bytes that `value` takes as a varint: 1 to 10.
#[inline]
pub(super) const fn varint_len(value: u64) -> usize {
    // 9/64 is 1/7 rounded so that it is exact for every bit length from 1 to 64.
    ((64 - (value | 1).leading_zeros() as usize) * 9 + 64) / 64
}

/// Bytes of a length-delimited field with `len` bytes of content, for a field number below 16.
#[inline]
pub(super) const fn field_len(len: usize) -> usize {
    1 + varint_len(len as u64) + len
}

/// `value` as sint32 wants it: small magnitudes are short.
#[inline]
const fn zigzag(value: i32) -> u64 {
    ((value << 1) ^ (value >> 31)) as u32 as u64
}

/// Appends a varint.
#[inline]
pub(super) fn varint(out: &mut Vec<u8>, mut value: u64) {
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

#[inline]
fn tag(out: &mut Vec<u8>, field: u8, wire_type: u8) {
    debug_assert!((1..16).contains(&field), "a tag of one byte");
    out.push(field << 3 | wire_type);
}

/// A varint field, also when zero.
#[inline]
pub(super) fn uint_always(out: &mut Vec<u8>, field: u8, value: u64) {
    tag(out, field, VARINT);
    varint(out, value);
}

/// A varint field, left out when zero.
#[inline]
pub(super) fn uint(out: &mut Vec<u8>, field: u8, value: u64) {
    if value != 0 {
        uint_always(out, field, value);
    }
}

/// A sint32 field, left out when zero.
#[inline]
pub(super) fn sint32(out: &mut Vec<u8>, field: u8, value: i32) {
    uint(out, field, zigzag(value));
}

/// A fixed64, sfixed64 or double field given by its bits, also when zero.
#[inline]
pub(super) fn fixed64_always(out: &mut Vec<u8>, field: u8, bits: u64) {
    let [a, b, c, d, e, f, g, h] = bits.to_le_bytes();
    // One append, hence one capacity check.
    out.extend_from_slice(&[field << 3 | FIXED64, a, b, c, d, e, f, g, h]);
}

/// A fixed64 field, left out when zero.
#[inline]
pub(super) fn fixed64(out: &mut Vec<u8>, field: u8, bits: u64) {
    if bits != 0 {
        fixed64_always(out, field, bits);
    }
}

/// The head of a length-delimited field whose content of `len` bytes follows.
#[inline]
pub(super) fn head(out: &mut Vec<u8>, field: u8, len: usize) {
    tag(out, field, LEN);
    varint(out, len as u64);
}

/// A bytes or string field, also when empty.
#[inline]
pub(super) fn bytes_always(out: &mut Vec<u8>, field: u8, bytes: &[u8]) {
    head(out, field, bytes.len());
    out.extend_from_slice(bytes);
}

/// A bytes or string field, left out when empty.
#[inline]
pub(super) fn bytes(out: &mut Vec<u8>, field: u8, bytes: &[u8]) {
    if !bytes.is_empty() {
        bytes_always(out, field, bytes);
    }
}

/// Begins a message field; `reserved` is the usual number of bytes of its length.
#[inline]
pub(super) fn open(out: &mut Vec<u8>, field: u8, reserved: usize) -> Open {
    tag(out, field, LEN);
    let at = out.len();
    out.extend_from_slice(&[0; WIDE][..reserved]);
    Open { at, reserved }
}

/// Ends a message field: writes its length, moving its content if the length is not as long as was reserved.
#[inline]
pub(super) fn close(out: &mut Vec<u8>, message: &Open) {
    let content = message.at + message.reserved;
    let len = (out.len() - content) as u64;
    let needed = varint_len(len);
    if needed < message.reserved {
        out.copy_within(content.., message.at + needed);
        out.truncate(out.len() - (message.reserved - needed));
    } else if needed > message.reserved {
        let end = out.len();
        out.resize(end + needed - message.reserved, 0);
        out.copy_within(content..end, message.at + needed);
    }
    let mut rest = len;
    for byte in &mut out[message.at..message.at + needed] {
        *byte = rest as u8 | 0x80;
        rest >>= 7;
    }
    out[message.at + needed - 1] &= 0x7f;
}

/// A field of an encoded message.
pub(super) struct Field<'a> {
    pub(super) number: u64,
    /// Its bytes, from the tag to its end.
    pub(super) whole: &'a [u8],
    /// The content of a length-delimited field, else nothing.
    pub(super) content: &'a [u8],
}

/// The fields of an encoded message in their order; `None` where it cannot be read, and then no more.
pub(super) struct Fields<'a> {
    rest: &'a [u8],
}

impl<'a> Fields<'a> {
    pub(super) fn of(message: &'a [u8]) -> Self {
        Self { rest: message }
    }

    fn read(&mut self) -> Option<Field<'a>> {
        let begin = self.rest;
        let tag = read_varint(&mut self.rest)?;
        let mut content: &[u8] = &[];
        match tag as u8 & 7 {
            VARINT => {
                read_varint(&mut self.rest)?;
            }
            FIXED64 => self.rest = self.rest.get(8..)?,
            LEN => {
                let len = usize::try_from(read_varint(&mut self.rest)?).ok()?;
                (content, self.rest) = self.rest.split_at_checked(len)?;
            }
            _ => return None,
        }
        Some(Field {
            number: tag >> 3,
            whole: &begin[..begin.len() - self.rest.len()],
            content,
        })
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Option<Field<'a>>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.rest.is_empty() {
            return None;
        }
        let field = self.read();
        if field.is_none() {
            self.rest = &[];
        }
        Some(field)
    }
}

fn read_varint(rest: &mut &[u8]) -> Option<u64> {
    let mut value = 0;
    for shift in (0..64).step_by(7) {
        let (&byte, tail) = rest.split_first()?;
        *rest = tail;
        value |= u64::from(byte & 0x7f) << shift;
        if byte < 0x80 {
            return Some(value);
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn varints_are_prosts(value in prop_oneof![any::<u64>(), 0..1u64 << 20, (0u32..64).prop_map(|b| 1 << b)]) {
            let (mut ours, mut theirs) = (Vec::new(), Vec::new());
            varint(&mut ours, value);
            prost::encoding::encode_varint(value, &mut theirs);
            prop_assert_eq!(varint_len(value), theirs.len());
            prop_assert_eq!(ours, theirs);
        }

        #[test]
        fn sint32_is_prosts(value: i32) {
            let (mut ours, mut theirs) = (Vec::new(), Vec::new());
            sint32(&mut ours, 6, value);
            if value != 0 {
                prost::encoding::sint32::encode(6, &value, &mut theirs);
            }
            prop_assert_eq!(ours, theirs);
        }
    }

    #[test]
    fn a_length_of_any_size_is_patched_in() {
        for reserved in [NARROW, WIDE] {
            for len in [0, 1, 127, 128, 16_383, 16_384, (1 << 21) - 1, 1 << 21] {
                let content: Vec<u8> = (0..len).map(|i| (i % 251) as u8).collect();
                let mut ours = b"before".to_vec();
                let message = open(&mut ours, 2, reserved);
                ours.extend_from_slice(&content);
                close(&mut ours, &message);
                let mut theirs = b"before".to_vec();
                prost::encoding::bytes::encode(2, &content, &mut theirs);
                assert!(ours == theirs, "{len} bytes with {reserved} reserved");
            }
        }
    }
}
