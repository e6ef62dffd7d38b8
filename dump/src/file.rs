//! Files of dumps.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use crate::Value;

/// What a file holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Form {
    /// As PyTorch's analyzer reads it.
    Pickle,
    /// The same for everybody else.
    Json,
}

/// Writes the dump of a rank to `<prefix><rank>`, whose folder is made if need be; a file of before is replaced as a whole.
///
/// # Errors
/// The system's.
pub fn write(prefix: &Path, rank: u32, form: Form, dump: &Value) -> io::Result<PathBuf> {
    let mut path = prefix.as_os_str().to_owned();
    path.push(rank.to_string());
    let path = PathBuf::from(path);
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    // The analyzer takes every file of the folder that has the prefix in its name.
    let fresh = folder.join(format!(".ringsight-dump-{}-{rank}", std::process::id()));
    let bytes = match form {
        Form::Pickle => dump.pickle(),
        Form::Json => dump.json().into_bytes(),
    };
    fs::write(&fresh, bytes)
        .and_then(|()| fs::rename(&fresh, &path))
        .inspect_err(|_| {
            let _ = fs::remove_file(&fresh);
        })?;
    Ok(path)
}
