//! Environment variables: read here and nowhere else (but for logging's own), named in errors, told in the log.
//! docs/src/environment.md lists them all.

/// The value of a variable; `None` if it is unset or blank.
pub(crate) fn text(name: &str) -> Option<String> {
    let value = std::env::var_os(name)?.to_string_lossy().trim().to_owned();
    if value.is_empty() {
        return None;
    }
    crate::log::set_by_environment(name, &value);
    Some(value)
}
