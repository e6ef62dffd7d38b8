//! Debian's packages, unpacked into the cache instead of installed: this needs no rights and leaves the system as it is.

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result, bail};
use fs_err as fs;

use crate::{
    machine::{self, apt},
    process,
};

/// Where Debian's packages have programs.
const PROGRAM_FOLDERS: [&str; 4] = ["usr/bin", "bin", "usr/sbin", "sbin"];
/// Where they have libraries that every program finds.
const LIBRARY_FOLDERS: [&str; 2] = ["lib/x86_64-linux-gnu", "usr/lib/x86_64-linux-gnu"];

/// Fetches packages into `folder`, with all that they need (`closure`) or alone.
fn fetch(packages: &[&str], closure: bool, folder: &Path) -> Result<()> {
    let mut command = Command::new("apt-get");
    command.args(["-q", "-q", "-y", "-o", "APT::Sandbox::User="]);
    if closure {
        // As if nothing were installed: what the host happens to have would be missing from the tree.
        let status = folder.join("status");
        fs::write(&status, "")?;
        fs::create_dir_all(folder.join("partial"))?;
        command
            .args(["install", "--download-only", "--no-install-recommends"])
            .args(["-o", "Debug::NoLocking=1", "-o"])
            .arg(format!("Dir::State::status={}", status.display()))
            .arg("-o")
            .arg(format!("Dir::Cache::archives={}", folder.display()));
    } else {
        command.arg("download").current_dir(folder);
    }
    command.args(packages);
    process::output(&mut command).map(drop)
}

/// Fetches packages and unpacks them into `tree`.
pub(super) fn unpack(packages: &[&str], closure: bool, tree: &Path) -> Result<()> {
    let folder = tree.with_extension("debs");
    let _ = fs::remove_dir_all(&folder);
    fs::create_dir_all(&folder)?;
    // Lists that are there may be of an older state than the archive: fetched anew after a failure, not before.
    fetch(packages, closure, &folder).or_else(|_| {
        apt::update();
        fetch(packages, closure, &folder)
    })?;
    fs::create_dir_all(tree)?;
    for entry in fs::read_dir(&folder)? {
        let package = entry?.path();
        if package.extension().is_some_and(|extension| extension == "deb") {
            process::output(Command::new("dpkg-deb").arg("--extract").arg(package).arg(tree))?;
        }
    }
    let _ = fs::remove_dir_all(&folder);
    Ok(())
}

/// Folder of libibverbs' headers: those of this system, or, unpacked once, those of Debian's package.
///
/// # Errors
/// If apt is not here, or cannot fetch it.
pub fn verbs_headers() -> Result<PathBuf> {
    const HEADER: &str = "infiniband/verbs.h";
    let cached = machine::cache()?.join("libibverbs-dev");
    let folders = [PathBuf::from("/usr/include"), cached.join("usr/include")];
    if let Some(folder) = folders.iter().find(|folder| folder.join(HEADER).is_file()) {
        return Ok(folder.clone());
    }
    machine::make_whole(&cached, |part| unpack(&["libibverbs-dev"], false, part))?;
    let [_, folder] = folders;
    if !folder.join(HEADER).is_file() {
        bail!("the package libibverbs-dev has no {HEADER}");
    }
    Ok(folder)
}

/// Names of packages that apt offers and that begin with `prefix`.
pub(super) fn offered(prefix: &str) -> Result<Vec<String>> {
    if process::find("apt-get").is_none() || process::find("dpkg-deb").is_none() {
        bail!("the guest is made of Debian packages, and this system has no apt-get");
    }
    let names = || {
        process::output(Command::new("apt-cache").args(["pkgnames", prefix]))
            .map(|text| text.lines().map(str::to_owned).collect::<Vec<_>>())
    };
    let known = names()?;
    if !known.is_empty() {
        return Ok(known);
    }
    apt::update();
    names()
}

/// Packages that `package` depends on.
pub(super) fn needed_by(package: &str) -> Result<Vec<String>> {
    let text = process::output(Command::new("apt-cache").args(["depends", package]))?;
    Ok(text
        .lines()
        .filter_map(|line| line.trim().strip_prefix("Depends: "))
        .map(str::to_owned)
        .collect())
}

/// A system in a folder, whose programs run with its own libraries.
#[derive(Clone, Debug)]
pub(super) struct Tree {
    root: PathBuf,
}

impl Tree {
    pub(super) fn new(root: &Path) -> Self {
        Self {
            root: root.to_owned(),
        }
    }

    /// The file or folder that is at `path` in this system: links are followed inside it, also absolute ones.
    pub(super) fn path(&self, path: &str) -> Option<PathBuf> {
        let mut path = PathBuf::from(path.trim_start_matches('/'));
        // As many links as the kernel follows.
        for _ in 0..40 {
            let whole = self.root.join(&path);
            let Ok(target) = fs::read_link(&whole) else {
                return whole.exists().then_some(whole);
            };
            path = match target.strip_prefix("/") {
                Ok(inside) => inside.to_owned(),
                Err(_) => path.parent()?.join(target),
            };
        }
        None
    }

    /// A program of this system.
    pub(super) fn program(&self, name: &str) -> Result<PathBuf> {
        PROGRAM_FOLDERS
            .iter()
            .find_map(|folder| self.path(&format!("{folder}/{name}")))
            .with_context(|| format!("the packages brought no program {name}"))
    }

    fn loader(&self) -> Command {
        let mut command = Command::new(self.root.join("lib64/ld-linux-x86-64.so.2"));
        let folders = LIBRARY_FOLDERS.map(|folder| self.root.join(folder).display().to_string());
        command.arg("--library-path").arg(folders.join(":"));
        command
    }

    /// A command that runs a program of this system.
    pub(super) fn command(&self, name: &str) -> Result<Command> {
        let program = self.program(name)?;
        let mut command = self.loader();
        // Some programs (kmod) are several, by the name that they were called.
        command.args(["--argv0", name]).arg(program);
        Ok(command)
    }

    /// Shared libraries that `file` of this system, linked dynamically, needs: where they are here, and where in this system.
    pub(super) fn libraries(&self, file: &Path) -> Result<BTreeSet<(PathBuf, String)>> {
        let text = process::output(self.loader().arg("--list").arg(file))?;
        let root = self.root.to_string_lossy();
        Ok(listed(&text)
            .filter_map(|path| {
                let inside = path.strip_prefix(root.as_ref())?;
                Some((PathBuf::from(path), inside.to_owned()))
            })
            .collect())
    }
}

/// Shared libraries of the host that a program of the host needs, the dynamic linker among them.
pub(super) fn host_libraries(file: &Path) -> BTreeSet<PathBuf> {
    // Fails for what is no dynamic program: scripts, static programs.
    process::output(Command::new("ldd").arg(file)).map_or_else(
        |_| BTreeSet::new(),
        |text| listed(&text).map(PathBuf::from).collect(),
    )
}

/// Paths in the dynamic linker's list: `libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x…)`, `/lib64/ld-linux-x86-64.so.2 (0x…)`.
fn listed(text: &str) -> impl Iterator<Item = &str> {
    text.lines().filter_map(|line| {
        let path = line.rsplit("=> ").next()?.trim();
        let path = path.split(" (0x").next()?;
        path.starts_with('/').then_some(path)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_linkers_list_gives_paths() {
        let text = "\tlinux-vdso.so.1 (0x00007f05)\n\tlibc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x00007f)\n\
                    \tlibmissing.so => not found\n\t/lib64/ld-linux-x86-64.so.2 (0x00007f)\n\
                    \t/lib64/ld-linux-x86-64.so.2 => /tree/lib64/ld-linux-x86-64.so.2 (0x1)";
        assert_eq!(
            listed(text).collect::<Vec<_>>(),
            [
                "/lib/x86_64-linux-gnu/libc.so.6",
                "/lib64/ld-linux-x86-64.so.2",
                "/tree/lib64/ld-linux-x86-64.so.2"
            ]
        );
    }

    #[test]
    fn links_stay_inside_the_tree() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        fs::create_dir_all(root.join("sbin")).unwrap();
        fs::create_dir_all(root.join("bin")).unwrap();
        fs::write(root.join("bin/kmod"), "").unwrap();
        std::os::unix::fs::symlink("/bin/kmod", root.join("sbin/depmod")).unwrap();
        std::os::unix::fs::symlink("depmod", root.join("sbin/other")).unwrap();
        std::os::unix::fs::symlink("loop", root.join("sbin/loop")).unwrap();
        let tree = Tree::new(root);
        assert_eq!(tree.path("/sbin/other"), Some(root.join("bin/kmod")));
        assert_eq!(tree.program("other").unwrap(), root.join("bin/kmod"));
        assert_eq!(tree.path("/sbin/loop"), None);
        assert!(tree.program("none").unwrap_err().to_string().contains("none"));
    }
}
