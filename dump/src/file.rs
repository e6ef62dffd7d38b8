//! The files of dumps.

use std::{
    fs, io,
    path::{Path, PathBuf},
    sync::atomic::{AtomicU64, Ordering},
};

use crate::Value;

/// The format of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// As PyTorch's analyzer reads it.
    Pickle,
    /// The same content for other readers.
    Json,
}

/// Writes the dump of a rank to `<prefix><rank>`, and makes the folder. An older file is replaced as a whole.
///
/// # Errors
/// The system's.
pub fn write(prefix: &Path, rank: u32, format: Format, dump: &Value) -> io::Result<PathBuf> {
    let mut path = prefix.as_os_str().to_owned();
    path.push(rank.to_string());
    let path = PathBuf::from(path);
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty())
        .unwrap_or(Path::new("."));
    fs::create_dir_all(folder)?;
    // The analyzer reads every file of the folder that has the prefix in its name, so the fresh file has another name. Threads of
    // the process may write at the same time.
    static WRITTEN: AtomicU64 = AtomicU64::new(0);
    let number = WRITTEN.fetch_add(1, Ordering::Relaxed);
    let fresh = folder.join(format!(".ringsight-dump-{}-{rank}-{number}", std::process::id()));
    let bytes = match format {
        Format::Pickle => dump.pickle(),
        Format::Json => dump.json().into_bytes(),
    };
    fs::write(&fresh, bytes)
        .and_then(|()| fs::rename(&fresh, &path))
        .inspect_err(|_| {
            let _ = fs::remove_file(&fresh);
        })?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    #[test]
    fn threads_that_write_at_once_leave_whole_files() {
        let folder = std::env::temp_dir().join(format!("ringsight-dump-{}", std::process::id()));
        let long = "x".repeat(1 << 20);
        let dump = Value::from(long.as_str());
        thread::scope(|scope| {
            for (format, name) in [(Format::Pickle, "pickle_"), (Format::Json, "json_")].repeat(4) {
                let (dump, prefix) = (&dump, folder.join(name));
                scope.spawn(move || {
                    for _ in 0..20 {
                        write(&prefix, 0, format, dump).unwrap();
                    }
                });
            }
        });
        let read = |name| fs::read(folder.join(name)).unwrap();
        assert!(read("pickle_0") == dump.pickle() && read("json_0") == dump.json().into_bytes());
        assert_eq!(fs::read_dir(&folder).unwrap().count(), 2, "nothing else is left");
        fs::remove_dir_all(&folder).unwrap();
    }
}
