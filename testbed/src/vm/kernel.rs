//! Debian's kernels: the newest of a series, its image as an ELF file (which starts quickest), and modules for guests.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    io::Write as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};
use fs_err as fs;

use super::packages::{self, Tree};
use crate::process;

/// A series of kernels that guests run, displayed as its versions begin.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Series {
    /// Linux 6.1, Debian 12's own.
    #[value(name = "6.1")]
    V6_1,
    /// Linux 6.12, Debian 13's own and an update of Debian 12.
    #[value(name = "6.12")]
    V6_12,
}

impl Series {
    /// All of them.
    pub const ALL: [Self; 2] = [Self::V6_1, Self::V6_12];
}

display_by_name!(Series);

/// Newest version of the series that apt offers as a package `linux-image-<version>-amd64`, without the flavours for clouds and
/// for real time: `6.1.0-56`, `6.12.117+deb12`.
pub(super) fn newest(series: Series) -> Result<String> {
    let prefix = format!("linux-image-{series}.");
    let names = packages::offered(&prefix)?;
    choose(&names, series).with_context(|| {
        format!("apt offers no package {prefix}…-amd64: Debian 12 with its security updates has it")
    })
}

fn choose(names: &[String], series: Series) -> Option<String> {
    names
        .iter()
        .filter_map(|name| name.strip_prefix("linux-image-")?.strip_suffix("-amd64"))
        .filter(|version| {
            let rest = version
                .strip_prefix(&series.to_string())
                .and_then(|rest| rest.strip_prefix('.'));
            // `6.1.0-56-cloud`, `6.12.117+deb12-rt` are flavours; `6.1.0-0.deb11.60` is another release's.
            rest.is_some_and(|rest| {
                !rest.contains("cloud") && !rest.contains("rt") && !rest.contains("unsigned")
            })
        })
        .max_by_key(|version| numbers(version))
        .map(str::to_owned)
}

/// The numbers in a version, in order.
fn numbers(version: &str) -> Vec<u64> {
    version
        .split(|digit: char| !digit.is_ascii_digit())
        .filter_map(|number| number.parse().ok())
        .collect()
}

/// Packages with what modules for this kernel are compiled against.
pub(super) fn header_packages(version: &str) -> Result<Vec<String>> {
    let headers = format!("linux-headers-{version}-amd64");
    let mut packages: Vec<_> = packages::needed_by(&headers)?
        .into_iter()
        .filter(|name| name.starts_with("linux-kbuild-") || name.ends_with("-common"))
        .collect();
    packages.push(headers);
    Ok(packages)
}

/// The folder in which `make` builds modules, in unpacked header packages. Its makefile names the place at which the packages
/// would have been installed: it is made to name the one at which they are.
pub(super) fn build_folder(tree: &Path, version: &str) -> Result<PathBuf> {
    let source = tree.join("usr/src");
    let folder = source.join(format!("linux-headers-{version}-amd64"));
    let makefile = folder.join("Makefile");
    let text = fs::read_to_string(&makefile)?;
    let place = format!("include {}/", source.display());
    if !text.contains(&place) {
        fs::write(&makefile, text.replace("include /usr/src/", &place))?;
    }
    Ok(folder)
}

/// Compiles the module whose source is in `source`; `work` is a folder for what comes of it.
pub(super) fn build_module(build: &Path, source: &Path, work: &Path, name: &str) -> Result<PathBuf> {
    let _ = fs::remove_dir_all(work);
    fs::create_dir_all(work)?;
    for entry in fs::read_dir(source)? {
        let entry = entry?;
        fs::copy(entry.path(), work.join(entry.file_name()))?;
    }
    // By the kernel's rules, with none of this build's; without type information, for which another tool would be needed.
    let made = Command::new("make")
        .args(["--silent", "-C"])
        .arg(build)
        .arg(format!("M={}", work.display()))
        .args(["CONFIG_DEBUG_INFO_BTF_MODULES=", "modules"])
        .env_remove("MAKEFLAGS")
        .env_remove("CFLAGS")
        .output()
        .context("starting make")?;
    if !made.status.success() {
        bail!(
            "the module {name} cannot be compiled:\n{}",
            String::from_utf8_lossy(&made.stderr)
        );
    }
    Ok(work.join(format!("{name}.ko")))
}

/// How compressed parts of a kernel begin, and the program that unpacks them.
const COMPRESSIONS: [(&[u8], &str); 3] = [
    (b"\xfd7zXZ\0", "xz"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
    (b"\x1f\x8b", "gzip"),
];

/// Runs `bytes` through the program that unpacks them.
fn unpacked(tools: &Tree, bytes: &[u8]) -> Result<Vec<u8>> {
    let Some((_, tool)) = COMPRESSIONS.iter().find(|(magic, _)| bytes.starts_with(magic)) else {
        bail!(
            "compressed in an unknown way, beginning with {:02x?}",
            &bytes[..bytes.len().min(6)]
        );
    };
    let mut child = tools
        .command(tool)?
        .args(["--decompress", "--stdout"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()
        .with_context(|| format!("starting {tool}"))?;
    let mut input = child.stdin.take().context("the unpacker has no input")?;
    std::thread::scope(|scope| {
        // Both ends at a time: a pipe holds less than either.
        scope.spawn(move || input.write_all(bytes));
        // What follows the compressed part makes the tool fail in the end; what it unpacked is whole all the same, and
        // is looked at by whoever uses it.
        Ok(child.wait_with_output()?.stdout)
    })
}

/// The ELF file inside a compressed kernel image. QEMU starts it directly (by its PVH entry), which halves the time to
/// userspace where instructions are emulated: the unpacking is done here, once.
///
/// # Errors
/// If the image is not one of the boot protocol 2.08 or newer (Documentation/arch/x86/boot.rst).
pub(super) fn elf_of(image: &[u8], tools: &Tree) -> Result<Vec<u8>> {
    let payload = payload(image).context("this is no Linux image with a compressed kernel in it")?;
    let elf = unpacked(tools, payload)?;
    if !elf.starts_with(b"\x7fELF") {
        bail!("the kernel image holds no ELF file");
    }
    Ok(elf)
}

/// The compressed kernel in an image.
fn payload(image: &[u8]) -> Option<&[u8]> {
    let word = |at: usize| Some(u32::from_le_bytes(image.get(at..at + 4)?.try_into().ok()?) as usize);
    let version = u16::from_le_bytes(image.get(0x206..0x208)?.try_into().ok()?);
    if image.get(0x202..0x206)? != b"HdrS" || version < 0x0208 {
        return None;
    }
    // Sectors of set-up code after the first; 0 stands for 4.
    let sectors = match *image.get(0x1f1)? {
        0 => 4,
        sectors => usize::from(sectors),
    };
    let start = (sectors + 1) * 512 + word(0x248)?;
    image.get(start..start.checked_add(word(0x24c)?)?)
}

/// What `modules.dep` says: the module's own path and those of what it needs.
fn with_needed(index: &str, name: &str) -> Option<Vec<String>> {
    let wanted = name.replace('-', "_");
    index.lines().find_map(|line| {
        let (module, needed) = line.split_once(':')?;
        let file = module.rsplit('/').next()?;
        let stem = file.split(".ko").next()?.replace('-', "_");
        (stem == wanted).then(|| {
            std::iter::once(module)
                .chain(needed.split_whitespace())
                .map(str::to_owned)
                .collect()
        })
    })
}

/// Copies the modules of these names, and what they need, from an unpacked kernel to `root`, decompressed and indexed.
pub(super) fn copy_modules(
    kernel: &Path,
    version: &str,
    names: &[&str],
    tools: &Tree,
    root: &Path,
) -> Result<()> {
    let release = format!("{version}-amd64");
    let inside = PathBuf::from("lib/modules").join(&release);
    let depmod = |base: &Path| {
        process::output(tools.command("depmod")?.arg("-b").arg(base).arg(&release))
            .context("indexing kernel modules")
    };
    depmod(kernel)?;
    let source = kernel.join(&inside);
    let index = fs::read_to_string(source.join("modules.dep")).context("the index of kernel modules")?;
    let mut files = BTreeSet::new();
    for name in names {
        files.extend(
            with_needed(&index, name).with_context(|| format!("Linux {version} has no module {name}"))?,
        );
    }
    let target = root.join(&inside);
    for file in &files {
        let bytes = fs::read(source.join(file))?;
        let path = Path::new(file);
        let (path, bytes) = if path.extension() == Some(OsStr::new("ko")) {
            (path.to_owned(), bytes)
        } else {
            (path.with_extension(""), unpacked(tools, &bytes)?)
        };
        if !bytes.starts_with(b"\x7fELF") {
            bail!("{file} is no kernel module");
        }
        let place = target.join(path);
        fs::create_dir_all(place.parent().context("a module has no folder")?)?;
        fs::write(&place, bytes)?;
    }
    for name in ["modules.order", "modules.builtin", "modules.builtin.modinfo"] {
        fs::copy(source.join(name), target.join(name))?;
    }
    depmod(root)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_plain_kernel_is_chosen() {
        let names = [
            "linux-image-6.1.0-9-amd64",
            "linux-image-6.1.0-56-amd64",
            "linux-image-6.1.0-57-cloud-amd64",
            "linux-image-6.1.0-58-rt-amd64",
            "linux-image-6.1.0-59-amd64-dbg",
            "linux-image-6.12.9+deb12-amd64",
            "linux-image-6.12.117+deb12-amd64",
            "linux-image-6.12.118+deb12-amd64-unsigned",
        ]
        .map(str::to_owned);
        assert_eq!(choose(&names, Series::V6_1).as_deref(), Some("6.1.0-56"));
        assert_eq!(choose(&names, Series::V6_12).as_deref(), Some("6.12.117+deb12"));
        assert_eq!(choose(&names[..5], Series::V6_12), None);
    }

    #[test]
    fn a_module_is_found_by_either_spelling_of_its_name() {
        let index = "kernel/a/foo-bar.ko.xz: kernel/b/baz.ko.xz kernel/c/q.ko.xz\nkernel/b/baz.ko.xz:\n";
        assert_eq!(
            with_needed(index, "foo_bar").unwrap(),
            ["kernel/a/foo-bar.ko.xz", "kernel/b/baz.ko.xz", "kernel/c/q.ko.xz"]
        );
        assert_eq!(with_needed(index, "baz").unwrap().len(), 1);
        assert_eq!(with_needed(index, "foo"), None);
    }

    #[test]
    fn rubbish_holds_no_kernel() {
        assert_eq!(payload(b""), None);
        let mut image = vec![0; 4096];
        assert_eq!(payload(&image), None);
        image[0x202..0x206].copy_from_slice(b"HdrS");
        image[0x206..0x208].copy_from_slice(&[0x0f, 0x02]);
        image[0x1f1] = 1;
        image[0x248..0x24c].copy_from_slice(&16_u32.to_le_bytes());
        image[0x24c..0x250].copy_from_slice(&3_u32.to_le_bytes());
        image[1040..1043].copy_from_slice(b"abc");
        assert_eq!(payload(&image), Some(&b"abc"[..]));
        // Lengths that lead out of the file.
        image[0x24c..0x250].copy_from_slice(&u32::MAX.to_le_bytes());
        assert_eq!(payload(&image), None);
    }
}
