//! Where the loader would find a library by its name. The loader itself would run its code.

use std::{
    env, fs,
    path::{Path, PathBuf},
};

/// Folders that the loader knows without being told.
const FOLDERS: [&str; 6] = [
    "/lib/x86_64-linux-gnu",
    "/usr/lib/x86_64-linux-gnu",
    "/lib64",
    "/usr/lib64",
    "/lib",
    "/usr/lib",
];
/// How deep files of the loader's configuration may include others.
const DEPTH: usize = 8;

/// The file of a library: `name` if it is a path, else the first of its name in the loader's folders.
pub(super) fn library(name: &Path) -> Option<PathBuf> {
    if name.components().count() > 1 {
        return Some(name.to_owned());
    }
    let own = env::var_os("LD_LIBRARY_PATH").unwrap_or_default();
    let folders = env::split_paths(&own)
        .filter(|folder| !folder.as_os_str().is_empty())
        .chain(configured(Path::new("/etc/ld.so.conf"), DEPTH))
        .chain(FOLDERS.map(PathBuf::from));
    folders
        .map(|folder| folder.join(name))
        .find(|path| path.is_file())
}

/// The folders that a file of the loader's configuration names.
fn configured(file: &Path, depth: usize) -> Vec<PathBuf> {
    let Some(depth) = depth.checked_sub(1) else {
        return Vec::new();
    };
    let mut folders = Vec::new();
    for line in fs::read_to_string(file).unwrap_or_default().lines() {
        let line = line.split('#').next().unwrap_or_default().trim();
        match line.strip_prefix("include ") {
            Some(pattern) => {
                let mut files = matching(Path::new(pattern.trim()));
                files.sort();
                folders.extend(files.iter().flat_map(|file| configured(file, depth)));
            }
            None if line.starts_with('/') => folders.push(line.into()),
            None => {}
        }
    }
    folders
}

/// Files whose path is as a pattern says, which has at most one `*`, in its last part.
fn matching(pattern: &Path) -> Vec<PathBuf> {
    let name = pattern.file_name().and_then(|name| name.to_str());
    let (Some(folder), Some((start, end))) = (pattern.parent(), name.and_then(|name| name.split_once('*')))
    else {
        return vec![pattern.to_owned()];
    };
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .map(|entry| entry.path())
        .filter(|path| {
            let name = path.file_name().and_then(|name| name.to_str());
            name.is_some_and(|name| {
                name.len() >= start.len() + end.len() && name.starts_with(start) && name.ends_with(end)
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_is_found_as_the_loader_finds_it() {
        assert_eq!(
            library(Path::new("./some/file")).unwrap(),
            Path::new("./some/file")
        );
        assert!(library(Path::new("libc.so.6")).is_some_and(|path| path.is_file()));
        assert_eq!(library(Path::new("libno-such-library.so.1")), None);
    }

    #[test]
    fn configured_folders_are_read_with_what_is_included() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::create_dir(path("more")).unwrap();
        fs::write(path("more/a.conf"), "/a # of a\n").unwrap();
        fs::write(
            path("more/b.conf"),
            format!("/b\ninclude {}\n", path("main").display()),
        )
        .unwrap();
        fs::write(path("more/other"), "/other\n").unwrap();
        let include = format!("# folders\n/first\ninclude {}\n", path("more/*.conf").display());
        fs::write(path("main"), include).unwrap();
        let found = configured(&path("main"), 2);
        assert_eq!(found, ["/first", "/a", "/b"].map(PathBuf::from));
    }
}
