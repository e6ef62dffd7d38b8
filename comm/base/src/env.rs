//! Reading variables: every variable but those of the log is read here, named in errors, and logged when it is set.
//! docs/src/environment.md lists them all.

use crate::{
    error::{Error, Result},
    log, variables,
};

/// The value of a variable without spaces around it; `None` if it is unset or blank.
#[must_use]
pub fn text(name: &str) -> Option<String> {
    let (value, source) = variables::find(name)?;
    let value = value.trim();
    if value.is_empty() {
        return None;
    }
    log::variable_set(name, value, &source);
    Some(value.to_owned())
}

/// Whether a switch is on: any value but 0 turns it on. Returns `default` if the variable is unset.
#[must_use]
pub fn switch(name: &str, default: bool) -> bool {
    text(name).map_or(default, |value| parse_number(&value) != Some(0_i64))
}

/// The value of a variable as a number; `None` if it is unset or blank.
///
/// # Errors
/// [`InvalidArgument`](crate::error::ResultCode::InvalidArgument) if the value is not a number, or out of range.
pub fn number<T: TryFrom<i128>>(name: &str) -> Result<Option<T>> {
    number_in(&text, &[name])
}

/// The first of the variables `names` that `environment` has, as a number.
///
/// # Errors
/// As of [`number`].
pub fn number_in<T: TryFrom<i128>>(
    environment: &dyn Fn(&str) -> Option<String>,
    names: &[&str],
) -> Result<Option<T>> {
    let of = |name| environment(name).filter(|text| !text.trim().is_empty());
    let Some((name, text)) = names.iter().find_map(|name| Some((name, of(name)?))) else {
        return Ok(None);
    };
    parse_number(&text).map(Some).ok_or_else(|| {
        Error::argument(format!(
            "environment variable {name}={text} is not a number in range"
        ))
    })
}

/// Parses a number as NCCL parses its variables (`strtoll` with base 0): decimal, hexadecimal after `0x`, octal after `0`. Spaces
/// around it do not count. `None` if it is no number or out of range; NCCL takes the digits before the first other character.
#[must_use]
pub fn parse_number<T: TryFrom<i128>>(text: &str) -> Option<T> {
    let text = text.trim();
    let (is_negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let (base, digits) = match digits.as_bytes() {
        [b'0', b'x' | b'X', ..] => (16, &digits[2..]),
        [b'0', _, ..] => (8, &digits[1..]),
        _ => (10, digits),
    };
    // `from_str_radix` would accept a second sign.
    let is_number = digits.starts_with(|first: char| first.is_digit(base));
    let number = i128::from_str_radix(digits, base).ok().filter(|_| is_number)?;
    T::try_from(if is_negative { -number } else { number }).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_nccls_bases() {
        for (text, number) in [
            ("0", 0),
            (" 106 ", 106),
            ("-1", -1),
            ("+7", 7),
            ("0x6a", 106),
            ("0X6A", 106),
            ("-0x1", -1),
            ("017", 15),
            ("0x100000", 1 << 20),
            ("9223372036854775807", i64::MAX),
            ("-0x8000000000000000", i64::MIN),
        ] {
            assert_eq!(parse_number(text), Some(number), "{text}");
        }
        for text in [
            "",
            "-",
            "x",
            "0x",
            "08",
            "--1",
            "0x-1",
            "+-1",
            "1 2",
            "1s",
            "0x8000000000000000",
        ] {
            assert_eq!(parse_number::<i64>(text), None, "{text}");
        }
        assert_eq!(parse_number("0xffffffffffffffff"), Some(u64::MAX));
        assert_eq!(parse_number::<u32>("-1"), None);
        assert_eq!(parse_number::<u8>("0x100"), None);
    }

    #[test]
    fn the_first_name_that_is_set_counts_and_is_named() {
        let environment = |name: &str| match name {
            "BLANK" => Some(" ".to_owned()),
            "HEX" => Some("0x10".to_owned()),
            "WRONG" => Some("many".to_owned()),
            _ => None,
        };
        let number = |names: &[&str]| number_in::<usize>(&environment, names);
        assert_eq!(number(&["UNSET", "BLANK", "HEX", "WRONG"]), Ok(Some(16)));
        assert_eq!(number(&["UNSET", "BLANK"]), Ok(None));
        let error = number(&["BLANK", "WRONG", "HEX"]).unwrap_err();
        assert_eq!(
            error.text,
            "environment variable WRONG=many is not a number in range"
        );
    }
}
