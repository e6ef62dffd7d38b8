//! NCCL's configuration files, which set the variables that the environment does not.
//!
//! | file | when it is read |
//! |---|---|
//! | the one that `NCCL_CONF_FILE` names | first |
//! | `.nccl.conf` in the user's home | first, if `NCCL_CONF_FILE` names none |
//! | `/etc/nccl.conf` | last |
//!
//! The first value of a variable counts. A line is `NAME=VALUE`, without spaces around the name. A line that begins with `#` and a line
//! without `=` say nothing. The home is that of the password file, where NCCL looks up to 2.29, and then `HOME`, where it looks from 2.30 on.
//!
//! NCCL puts what it reads into the environment of the process. Here only the library sees it: a process with threads cannot change
//! its environment safely.

use std::{
    collections::HashMap,
    ffi::{CStr, OsStr, OsString},
    fs::{self, File, OpenOptions},
    io::{self, Read as _},
    os::unix::{ffi::OsStrExt as _, fs::OpenOptionsExt as _},
    path::{Path, PathBuf},
};

use crate::sys;

/// How much of a file is read, in bytes.
const MAX_BYTES: u64 = 1 << 20;
/// The longest entry of the password file that is read, in bytes.
const MAX_ENTRY: usize = 1 << 20;

/// What the files say.
pub(super) struct ConfFiles {
    /// Paths of the files that were read.
    paths: Vec<String>,
    /// By name: the value, and the index of its file.
    variables: HashMap<String, (String, usize)>,
    complaints: Vec<String>,
}

/// The files of this process.
impl Default for ConfFiles {
    fn default() -> Self {
        let named = std::env::var_os("NCCL_CONF_FILE").filter(|path| !path.is_empty());
        Self::read(named, homes(), Path::new("/etc/nccl.conf"))
    }
}

impl ConfFiles {
    /// Reads the file `named`, or those in `homes`; then that of the `system`.
    fn read(named: Option<OsString>, homes: Vec<PathBuf>, system: &Path) -> Self {
        let mut files = Self {
            paths: Vec::new(),
            variables: HashMap::new(),
            complaints: Vec::new(),
        };
        match named {
            Some(path) => files.add(Path::new(&path), true),
            None => {
                for home in homes {
                    files.add(&home.join(".nccl.conf"), false);
                }
            }
        }
        files.add(system, false);
        files
    }

    /// Adds what one file says, which may be missing unless it is `wanted`.
    fn add(&mut self, path: &Path, wanted: bool) {
        let bytes = match read(path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound && !wanted => return,
            Err(error) => {
                let complaint = format!("{}: its variables are not set: {error}", path.display());
                return self.complaints.push(complaint);
            }
        };
        if bytes.len() as u64 > MAX_BYTES {
            let complaint = format!(
                "{}: what is behind the first {MAX_BYTES} bytes is ignored",
                path.display()
            );
            self.complaints.push(complaint);
        }
        let file = self.paths.len();
        self.paths.push(path.display().to_string());
        for (name, value) in variables(&String::from_utf8_lossy(&bytes)) {
            self.variables
                .entry(name.to_owned())
                .or_insert_with(|| (value.to_owned(), file));
        }
    }

    /// The value of a variable, and the path of the file that sets it.
    pub(super) fn value(&self, name: &str) -> Option<(&str, &str)> {
        let (value, file) = self.variables.get(name)?;
        Some((value, &self.paths[*file]))
    }

    /// What could not be read, a sentence each.
    pub(super) fn complaints(&self) -> &[String] {
        &self.complaints
    }
}

/// Up to a byte more than [`MAX_BYTES`] of a regular file. Of a FIFO that nobody writes, the call that reads a variable would not return.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    let file: File = sys::above_standard(|| {
        OpenOptions::new()
            .read(true)
            .custom_flags(libc::O_NONBLOCK | libc::O_NOCTTY)
            .open(path)
    })?;
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            "it is no regular file",
        ));
    }
    let mut bytes = Vec::new();
    file.take(MAX_BYTES + 1).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Names and values in the order of the lines.
fn variables(text: &str) -> impl Iterator<Item = (&str, &str)> {
    text.lines()
        .filter(|line| !line.starts_with('#'))
        .filter_map(|line| line.split_once('='))
        // No variable can have such a name, or such a value.
        .filter(|(name, value)| !name.is_empty() && !name.contains('\0') && !value.contains('\0'))
}

/// Where the user is at home.
fn homes() -> Vec<PathBuf> {
    let mut homes: Vec<PathBuf> = home_in_password_file().into_iter().collect();
    let own = std::env::var_os("HOME").filter(|home| !home.is_empty());
    homes.extend(own.map(PathBuf::from));
    let same = |homes: &[PathBuf]| {
        let [first, second] = homes else { return false };
        first == second
            || fs::canonicalize(first)
                .is_ok_and(|first| fs::canonicalize(second).is_ok_and(|second| first == second))
    };
    if same(&homes) {
        homes.truncate(1);
    }
    homes
}

fn home_in_password_file() -> Option<PathBuf> {
    let mut buffer = vec![0_u8; 4096];
    // It reads files, or asks over a socket.
    let _standard = sys::StandardTaken::new();
    loop {
        let mut found = std::ptr::null_mut();
        // SAFETY: all-zero bytes are a valid `passwd` to write to.
        let mut entry: libc::passwd = unsafe { std::mem::zeroed() };
        // SAFETY: `entry` and `found` are writable, and `buffer` for its length.
        let result = unsafe {
            libc::getpwuid_r(
                libc::getuid(),
                &raw mut entry,
                buffer.as_mut_ptr().cast(),
                buffer.len(),
                &raw mut found,
            )
        };
        match result {
            0 if found.is_null() || entry.pw_dir.is_null() => return None,
            0 => {
                // SAFETY: the entry was found, and its strings lie in `buffer` and end in zero.
                let home = unsafe { CStr::from_ptr(entry.pw_dir) };
                return Some(PathBuf::from(OsStr::from_bytes(home.to_bytes())))
                    .filter(|home| home.is_absolute());
            }
            libc::EINTR => {}
            libc::ERANGE if buffer.len() < MAX_ENTRY => buffer.resize(buffer.len() * 4, 0),
            _ => return None,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    fn folder() -> tempfile::TempDir {
        tempfile::tempdir().unwrap()
    }

    fn write(folder: &tempfile::TempDir, name: &str, text: &str) -> PathBuf {
        let path = folder.path().join(name);
        fs::write(&path, text).unwrap();
        path
    }

    #[test]
    fn the_named_file_stands_for_those_at_home_and_the_systems_comes_last() {
        let (own, passwd, named) = (folder(), folder(), folder());
        let system = write(&named, "system", "NCCL_A=system\nNCCL_B=system\nNCCL_C=system\n");
        write(&passwd, ".nccl.conf", "NCCL_A=passwd\n");
        write(&own, ".nccl.conf", "NCCL_A=home\nNCCL_B=home\n");
        let homes = || vec![passwd.path().to_owned(), own.path().to_owned()];
        let value = |files: &ConfFiles, name| files.value(name).map(|(value, _)| value.to_owned());
        let read = |named| {
            let files = ConfFiles::read(named, homes(), &system);
            assert_eq!(files.complaints(), [""; 0]);
            ["NCCL_A", "NCCL_B", "NCCL_C", "NCCL_D"].map(|name| value(&files, name))
        };
        let some = |text: &str| Some(text.to_owned());
        assert_eq!(read(None), [some("passwd"), some("home"), some("system"), None]);
        let path = write(&named, "named", "NCCL_B=named\nNCCL_D=named\n");
        let expected = [some("system"), some("named"), some("system"), some("named")];
        assert_eq!(read(Some(path.into())), expected);
    }

    #[test]
    fn lines_are_read_as_nccl_reads_them() {
        let text = "# NCCL_A=1\n #NCCL_B=1\nNCCL_C=one two\r\nNCCL_D\n=1\nNCCL_E=a=b\n NCCL_F=1\nNCCL_G =1\nNCCL_C=3\nNCCL_H=";
        let folder = folder();
        let files = ConfFiles::read(
            Some(write(&folder, "conf", text).into()),
            Vec::new(),
            &folder.path().join("none"),
        );
        let value = |name| files.value(name).map(|(value, _)| value);
        assert_eq!(value("NCCL_C"), Some("one two"));
        assert_eq!(value("NCCL_E"), Some("a=b"));
        assert_eq!(value("NCCL_H"), Some(""));
        for name in ["NCCL_A", "NCCL_B", "NCCL_D", "NCCL_F", "NCCL_G", ""] {
            assert_eq!(value(name), None, "{name}");
        }
        let path = folder.path().join("conf").display().to_string();
        assert_eq!(files.value("NCCL_E"), Some(("a=b", &*path)));
    }

    #[test]
    fn a_file_that_cannot_be_read_is_a_complaint_and_nobody_waits_for_it() {
        let folder = folder();
        let none = folder.path().join("none");
        let complaint = |path: &Path| {
            let files = ConfFiles::read(Some(path.into()), Vec::new(), &none);
            files.complaints().join("; ")
        };
        assert!(complaint(&none).contains("No such file"), "{}", complaint(&none));
        assert!(complaint(folder.path()).contains("no regular file"));
        let fifo = folder.path().join("fifo");
        assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
        assert!(complaint(&fifo).contains("no regular file"));
        let long = write(
            &folder,
            "long",
            &format!("NCCL_A=1\n#{}\n", "x".repeat(MAX_BYTES as usize)),
        );
        assert!(complaint(&long).contains("1048576 bytes"), "{}", complaint(&long));
        // Files that nobody named need not be there.
        assert_eq!(
            ConfFiles::read(None, vec![none.clone()], &none).complaints(),
            [""; 0]
        );
    }

    #[test]
    fn this_user_is_at_home_somewhere() {
        let uid = String::from_utf8(Command::new("id").arg("-u").output().unwrap().stdout).unwrap();
        let entry = Command::new("getent")
            .args(["passwd", uid.trim()])
            .output()
            .unwrap();
        let entry = String::from_utf8(entry.stdout).unwrap();
        let home = entry.trim().split(':').nth(5).map(PathBuf::from);
        assert_eq!(home_in_password_file(), home);
    }
}
