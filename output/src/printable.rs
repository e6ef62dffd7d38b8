//! Text from outside, for a person's terminal.

use std::{
    borrow::Cow,
    ffi::OsStr,
    fmt::{self, Write as _},
    io,
    path::Path,
};

/// Text that names what others chose: processes, files, communicators, hosts, a server's words. It prints on one line, and nothing in
/// it controls a terminal or changes the order of what is read: such characters are written as `\u{1b}` or `\n`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Printable<'a>(Cow<'a, str>);

impl<'a> Printable<'a> {
    /// Of a file's name; bytes that are no UTF-8 become U+FFFD.
    #[must_use]
    pub fn path(path: &'a Path) -> Self {
        Self(path.as_os_str().to_string_lossy())
    }
}

impl<'a> From<&'a str> for Printable<'a> {
    fn from(text: &'a str) -> Self {
        Self(text.into())
    }
}

impl<'a> From<&'a OsStr> for Printable<'a> {
    fn from(text: &'a OsStr) -> Self {
        Self(text.to_string_lossy())
    }
}

impl fmt::Display for Printable<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.chars().any(is_control) {
            f.pad(&escaped(&self.0, |_| false, escape))
        } else {
            f.pad(&self.0)
        }
    }
}

/// Text of several lines for a terminal: every control character but the newline is escaped. The last guard of a sink, for text in
/// which somebody forgot [`Printable`].
#[must_use]
pub fn lines(text: &str) -> Cow<'_, str> {
    guarded(text, escape)
}

/// JSON for a terminal: what JSON need not escape, and a terminal would obey, is escaped as JSON does. The value stays the same.
#[must_use]
pub fn json(text: &str) -> Cow<'_, str> {
    guarded(text, |to, c| {
        for unit in c.encode_utf16(&mut [0; 2]) {
            // Writing to a string does not fail.
            let _ = write!(to, "\\u{unit:04x}");
        }
    })
}

/// As [`json`], for what `serde_json` writes to another writer.
#[derive(Debug)]
pub struct JsonWriter<W>(pub W);

impl<W: io::Write> io::Write for JsonWriter<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        match str::from_utf8(bytes) {
            Ok(text) => self.0.write_all(json(text).as_bytes())?,
            // A part of a character alone, which `serde_json` does not write.
            Err(_) => self.0.write_all(bytes)?,
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        self.0.flush()
    }
}

fn guarded(text: &str, escape: impl Fn(&mut String, char)) -> Cow<'_, str> {
    let is_line_end = |c| c == '\n';
    if text.chars().any(|c| is_control(c) && !is_line_end(c)) {
        escaped(text, is_line_end, escape).into()
    } else {
        text.into()
    }
}

fn escaped(text: &str, may_stay: impl Fn(char) -> bool, escape: impl Fn(&mut String, char)) -> String {
    let mut to = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_control(c) && !may_stay(c) {
            escape(&mut to, c);
        } else {
            to.push(c);
        }
    }
    to
}

fn escape(to: &mut String, c: char) {
    match c {
        '\n' | '\r' | '\t' => to.extend(c.escape_default()),
        _ => to.extend(c.escape_unicode()),
    }
}

/// Control characters of C0, DEL and C1; and what changes lines or the direction of text, or is not seen at all.
fn is_control(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{ad}'
                | '\u{61c}'
                | '\u{180e}'
                | '\u{200b}'..='\u{200f}'
                | '\u{2028}'..='\u{202e}'
                | '\u{2060}'..='\u{206f}'
                | '\u{feff}'
                | '\u{fff9}'..='\u{fffb}'
                | '\u{e0000}'..='\u{e007f}'
        )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn printable(text: &str) -> String {
        Printable::from(text).to_string()
    }

    #[test]
    fn what_a_terminal_would_obey_is_shown() {
        assert_eq!(printable("rank 0: µs, 排, é"), "rank 0: µs, 排, é");
        assert_eq!(
            printable("\u{1b}[2Ja\nb\r\t\0\u{7f}\u{9b}1m\u{202e}x"),
            "\\u{1b}[2Ja\\nb\\r\\t\\u{0}\\u{7f}\\u{9b}1m\\u{202e}x"
        );
        assert_eq!(lines("a\n\u{1b}b\n"), "a\n\\u{1b}b\n");
        assert_eq!(json("\"\u{9b}\u{e0001}\"\n"), "\"\\u009b\\udb40\\udc01\"\n");
        let name = <OsStr as std::os::unix::ffi::OsStrExt>::from_bytes(b"a\xff\x1b");
        assert_eq!(Printable::from(name).to_string(), "a\u{fffd}\\u{1b}");
        assert_eq!(Printable::path(Path::new(name)).to_string(), "a\u{fffd}\\u{1b}");
        assert_eq!(format!("{:>4}|", Printable::from("ab")), "  ab|");
    }

    proptest! {
        #[test]
        fn nothing_is_left_to_obey(text in any::<String>()) {
            prop_assert!(!printable(&text).chars().any(is_control));
            prop_assert!(!lines(&text).chars().any(|c| c != '\n' && is_control(c)));
            let quoted = format!("{:?}", text.chars().filter(|c| !c.is_ascii_control()).collect::<String>());
            prop_assert!(!json(&quoted).chars().any(is_control));
        }
    }
}
