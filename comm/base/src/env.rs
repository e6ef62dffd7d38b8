//! Variables of the environment and of NCCL's configuration files, as everything but the log reads them: named in errors, and logged when they
//! are set. docs/src/environment.md lists them all.

use crate::{
    error::{Error, Result},
    variables,
};

/// The value of a variable without spaces around it; `None` if it is unset or blank.
#[must_use]
pub fn text(name: &str) -> Option<String> {
    let (value, source) = variables::find(name)?;
    let value = value.trim();
    if value.is_empty() {
        return None;
    }
    crate::log::variable_set(name, value, &source);
    Some(value.to_owned())
}

/// Whether a switch is on: any value but 0 turns it on. Returns `default` if the variable is unset.
#[must_use]
pub fn switch(name: &str, default: bool) -> bool {
    text(name).map_or(default, |value| parse(name, &value) != Some(0_i64))
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
    parse(name, &text).map(Some).ok_or_else(|| {
        Error::argument(format!(
            "environment variable {name}={text} is not a number in range"
        ))
    })
}

/// The number that a variable's value is: of NCCL's variables as NCCL reads them (`strtoll` with base 0), decimal, hexadecimal after `0x`
/// or octal after `0`; of ringsight's own decimal. Spaces around it do not count. `None` if it is no number or out of range, where NCCL
/// takes what there is before the first other character.
#[must_use]
pub fn parse<T: TryFrom<i128>>(name: &str, text: &str) -> Option<T> {
    let text = text.trim();
    let (is_negative, digits) = match text.strip_prefix('-') {
        Some(digits) => (true, digits),
        None => (false, text.strip_prefix('+').unwrap_or(text)),
    };
    let (base, digits) = match digits.as_bytes() {
        _ if !name.starts_with("NCCL_") => (10, digits),
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
    fn numbers_of_nccls_variables_have_its_bases() {
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
            assert_eq!(parse("NCCL_X", text), Some(number), "{text}");
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
            assert_eq!(parse::<i64>("NCCL_X", text), None, "{text}");
        }
        assert_eq!(parse("NCCL_X", "0xffffffffffffffff"), Some(u64::MAX));
        assert_eq!(parse::<u32>("NCCL_X", "-1"), None);
        assert_eq!(parse::<u8>("NCCL_X", "0x100"), None);
        for (text, number) in [("017", Some(17)), ("0x11", None), ("--1", None), ("-1", Some(-1))] {
            assert_eq!(parse::<i64>("RINGSIGHT_X", text), number, "{text}");
        }
    }

    #[test]
    fn the_first_name_that_is_set_counts_and_is_named() {
        let environment = |name: &str| match name {
            "BLANK" => Some(" ".to_owned()),
            "NCCL_HEX" => Some("0x10".to_owned()),
            "WRONG" => Some("many".to_owned()),
            _ => None,
        };
        let number = |names: &[&str]| number_in::<usize>(&environment, names);
        assert_eq!(number(&["UNSET", "BLANK", "NCCL_HEX", "WRONG"]), Ok(Some(16)));
        assert_eq!(number(&["UNSET", "BLANK"]), Ok(None));
        let error = number(&["BLANK", "WRONG", "NCCL_HEX"]).unwrap_err();
        assert_eq!(
            error.text,
            "environment variable WRONG=many is not a number in range"
        );
    }
}
