//! The files of dumps.

use std::{
    io::Write as _,
    path::{Path, PathBuf},
};

use ringsight_output::{Destination, Error};

use crate::Value;

/// The format of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Format {
    /// As PyTorch's analyzer reads it.
    Pickle,
    /// The same content for other readers.
    Json,
}

/// The path of a rank's dump: `<prefix><rank>`.
#[must_use]
pub fn path(prefix: &Path, rank: u32) -> PathBuf {
    let mut path = prefix.as_os_str().to_owned();
    path.push(rank.to_string());
    path.into()
}

/// Writes the dump of a rank to its [`path`], and makes the folder. An older file is replaced as a whole.
///
/// # Errors
/// The place is no file, a link of another user leads to it, or the system's error.
pub fn write(prefix: &Path, rank: u32, format: Format, dump: &Value) -> Result<PathBuf, Error> {
    let path = path(prefix, rank);
    let destination = Destination::resolve_and_make_folders(&path)?;
    if destination.is_stream() {
        // Writing to a pipe could end the process whose dump this is: its reader may be gone, and SIGPIPE belongs to the program.
        return Err(Error::NotRegular);
    }
    let bytes = match format {
        Format::Pickle => dump.pickle(),
        Format::Json => dump.json().into_bytes(),
    };
    destination.replace(|file| file.write_all(&bytes))?;
    Ok(path)
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::symlink, process::Command, thread};

    use super::*;

    #[test]
    fn threads_that_write_at_once_leave_whole_files() {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path().join("made");
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
    }

    #[test]
    fn links_at_names_that_could_be_guessed_lead_nowhere() {
        let folder = tempfile::tempdir().unwrap();
        let precious = folder.path().join("precious");
        fs::write(&precious, "precious").unwrap();
        for number in 0..100 {
            let name = format!(".ringsight-dump-{}-0-{number}", std::process::id());
            symlink(&precious, folder.path().join(name)).unwrap();
        }
        write(
            &folder.path().join("dump_"),
            0,
            Format::Json,
            &Value::from("text"),
        )
        .unwrap();
        assert_eq!(fs::read_to_string(precious).unwrap(), "precious");
    }

    #[test]
    fn a_pipe_is_no_file() {
        let folder = tempfile::tempdir().unwrap();
        let pipe = path(&folder.path().join("dump_"), 3);
        assert!(Command::new("mkfifo").arg(&pipe).status().unwrap().success());
        // Held open for both, lest it be refused for want of a reader.
        let _held = fs::OpenOptions::new().read(true).write(true).open(&pipe).unwrap();
        let error = write(
            &folder.path().join("dump_"),
            3,
            Format::Pickle,
            &Value::from("text"),
        );
        assert!(matches!(error, Err(Error::NotRegular)), "{error:?}");
    }
}
