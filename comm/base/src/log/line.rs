//! How a line looks: `host:pid:tid [device] NCCL INFO text`.

use std::{
    ffi::CString,
    fmt::{self, Write as _},
    time::{Duration, SystemTime, UNIX_EPOCH},
};

use tracing::{
    Event,
    field::{Field, Visit},
};

use super::settings::{DEFAULT_STAMP, Level, Settings};

/// The line of an event, with its line end.
pub(super) fn of(event: &Event<'_>, settings: &Settings) -> String {
    let mut text = Text::default();
    event.record(&mut text);
    let level = Level::of(*event.metadata().level());
    let device = super::current_device();
    let line = format(
        level,
        device,
        format_args!("{}{}", text.message, text.fields),
        settings,
    );
    // NCCL sets warnings off by an empty line.
    if level == Level::Warn {
        format!("\n{line}")
    } else {
        line
    }
}

/// A warning of a thread that must not ask the device which it is on.
pub(super) fn alarm(text: &str, device: i32, settings: &Settings) -> String {
    format(Level::Warn, device, format_args!("{text}"), settings)
}

fn format(level: Level, device: i32, text: fmt::Arguments<'_>, settings: &Settings) -> String {
    let mut line = String::with_capacity(160);
    if settings.stamped & 1 << level as u32 != 0 {
        line.push_str(&stamp(&settings.stamp, SystemTime::now()));
    }
    // SAFETY: gettid cannot fail.
    let tid = unsafe { libc::gettid() };
    let _ = writeln!(
        line,
        "{}:{}:{tid} [{device}] NCCL {} {text}",
        settings.host,
        std::process::id(),
        level.name(),
    );
    line
}

#[derive(Default)]
struct Text {
    message: String,
    fields: String,
}

impl Visit for Text {
    fn record_str(&mut self, field: &Field, value: &str) {
        self.record_debug(field, &format_args!("{value}"));
    }

    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        let _ = if field.name() == "message" {
            write!(self.message, "{value:?}")
        } else {
            write!(self.fields, " {} {value:?}", field.name())
        };
    }
}

/// `format` for the local time, by strftime; `%1f` to `%9f` are that many digits of the second's fraction. In place of one that is too
/// long the default is used.
fn stamp(format: &str, time: SystemTime) -> String {
    match formatted(format, time) {
        stamp if stamp.is_empty() && !format.is_empty() => formatted(DEFAULT_STAMP, time),
        stamp => stamp,
    }
}

/// Nothing for an unusable format.
fn formatted(format: &str, time: SystemTime) -> String {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or(Duration::ZERO);
    let format = with_fraction(format, since.subsec_nanos());
    let Ok(format) = CString::new(format) else {
        return String::new();
    };
    let seconds = since.as_secs() as libc::time_t;
    let mut buffer = [0_u8; 256];
    // SAFETY: `tm` is plain data, filled by localtime_r; strftime writes at most the buffer's length and says how much.
    let length = unsafe {
        let mut parts: libc::tm = std::mem::zeroed();
        if libc::localtime_r(&raw const seconds, &raw mut parts).is_null() {
            return String::new();
        }
        libc::strftime(
            buffer.as_mut_ptr().cast(),
            buffer.len(),
            format.as_ptr(),
            &raw const parts,
        )
    };
    String::from_utf8_lossy(&buffer[..length]).into_owned()
}

fn with_fraction(format: &str, nanoseconds: u32) -> String {
    let mut result = String::new();
    let mut rest = format;
    while let Some(at) = rest.find('%') {
        let (before, directive) = rest.split_at(at);
        result.push_str(before);
        match directive.as_bytes() {
            [b'%', digit @ b'1'..=b'9', b'f', ..] => {
                let digits = usize::from(digit - b'0');
                result.push_str(&format!("{nanoseconds:09}")[..digits]);
                rest = &directive[3..];
            }
            // A directive of strftime, "%%" among them: over both its characters.
            _ => {
                let length = directive.chars().take(2).map(char::len_utf8).sum();
                result.push_str(&directive[..length]);
                rest = &directive[length..];
            }
        }
    }
    result + rest
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stamps_follow_the_format() {
        let time = UNIX_EPOCH + Duration::new(86_400 * 365, 123_456_789);
        assert_eq!(stamp("[%s.%3f] ", time), "[31536000.123] ");
        assert_eq!(stamp("%%3f %9f", time), "%3f 123456789");
        assert_eq!(stamp("", time), "");
        assert_eq!(stamp("%", time).len(), 1);
        assert_eq!(stamp("é%1f", time), "é1");
        // Longer than any line begins.
        assert_eq!(stamp(&"x".repeat(300), time), stamp("[%F %T] ", time));
        let whole = stamp("[%F %T] ", time);
        assert!(whole.starts_with("[197") && whole.len() == 22, "{whole}");
    }
}
