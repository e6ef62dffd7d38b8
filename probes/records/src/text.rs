//! Texts in fields of fixed size: UTF-8, padded with zero bytes.

/// The UTF-8 text in a zero-padded field; empty if it is not UTF-8.
#[must_use]
pub fn text(bytes: &[u8]) -> &str {
    let end = bytes.iter().position(|b| *b == 0).unwrap_or(bytes.len());
    core::str::from_utf8(&bytes[..end]).unwrap_or_default()
}

/// Copies `text` into a zero-padded field, cut at a character boundary.
pub fn put_text(field: &mut [u8], text: &str) {
    field.fill(0);
    let mut end = text.len().min(field.len());
    while !text.is_char_boundary(end) {
        end -= 1;
    }
    field[..end].copy_from_slice(&text.as_bytes()[..end]);
}
