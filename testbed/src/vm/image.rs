//! What guests are made of, in the cache: tools, a kernel, and the part of the first file system that all guests share.

use std::{
    io::BufWriter,
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Context, Result, bail};
use fs_err::{self as fs, File};

use super::{
    cpio::{Archive, MERGED},
    kernel::{self, Series},
    packages::{self, Tree},
};
use crate::{machine, workspace};

/// Packages of what runs a guest, and of what runs in one.
const PACKAGES: [&str; 21] = [
    "qemu-system-x86",
    "gzip",
    "kmod",
    "xz-utils",
    "zstd",
    "bash",
    "bpftool",
    "busybox-static",
    "coreutils",
    "dash",
    "findutils",
    "ibverbs-providers",
    "ibverbs-utils",
    "infiniband-diags",
    "iproute2",
    "libibverbs1",
    "librdmacm1",
    "perftest",
    "rdma-core",
    "strace",
    "util-linux",
];

/// Modules for guests, beside what these need.
const MODULES: [&str; 15] = [
    "ib_core",
    "ib_uverbs",
    "ib_umad",
    "rdma_cm",
    "rdma_ucm",
    "rdma_rxe",
    // Soft-RoCE asks for its checksum by name only.
    "crc32_generic",
    "crc32_pclmul",
    "mlx5_core",
    "mlx5_ib",
    "veth",
    "dummy",
    "bridge",
    "8021q",
    "sch_netem",
];

/// Programs for guests, beside busybox's.
const PROGRAMS: [&str; 23] = [
    "bash",
    "bpftool",
    "dash",
    "env",
    "ibstat",
    "ibv_asyncwatch",
    "ibv_devices",
    "ibv_devinfo",
    "ibv_rc_pingpong",
    "ibv_ud_pingpong",
    "ib_read_bw",
    "ib_send_bw",
    "ib_write_bw",
    "ib_write_lat",
    "ip",
    "kmod",
    "nohup",
    "rdma",
    "setsid",
    "strace",
    "tc",
    "timeout",
    "xargs",
];

/// Names under which kmod's one program is called.
const KMOD: [&str; 6] = ["depmod", "insmod", "lsmod", "modinfo", "modprobe", "rmmod"];

/// Drivers of libibverbs for guests, which it loads by name. (An RDMA driver over TCP, siw, is in no Debian kernel.)
const VERBS_DRIVERS: [&str; 2] = ["mlx5", "rxe"];

/// Raised where the way in which the cached files are made changes.
const RECIPE: u32 = 1;

/// What is in the cache for one kernel.
#[derive(Clone, Debug)]
pub(super) struct Image {
    /// The tree of Debian's packages, QEMU among them.
    pub(super) tools: Tree,
    /// The kernel, an ELF file.
    pub(super) kernel: PathBuf,
    /// The first file system of all guests with this kernel, to which a guest's own files are added.
    pub(super) base: PathBuf,
    /// Version of the kernel, as in its packages' names.
    pub(super) version: String,
    series: Series,
    folder: PathBuf,
}

/// The folder of the cache that holds what guests are made of.
///
/// # Errors
/// If there is no cache.
pub fn folder() -> Result<PathBuf> {
    Ok(machine::cache()?.join("vm"))
}

/// Why no guest with this kernel can be made here, if none can.
#[must_use]
pub fn unavailable(series: Series) -> Option<String> {
    Image::get(series).err().map(|error| format!("{error:#}"))
}

/// Held while something in the cache is made: two commands at a time would make it twice, into one place.
struct Lock {
    _file: std::fs::File,
}

impl Lock {
    fn take(folder: &Path) -> Result<Self> {
        fs::create_dir_all(folder)?;
        let path = folder.join("lock");
        let file = File::create(&path)?.into_file();
        file.lock().context("locking the cache of guests")?;
        Ok(Self { _file: file })
    }
}

impl Image {
    /// What a guest with this kernel is made of; fetched and made at the first call (200 MB to download).
    ///
    /// # Errors
    /// Says what is missing: callers skip what needs a guest.
    pub(super) fn get(series: Series) -> Result<Self> {
        if !cfg!(target_arch = "x86_64") {
            bail!("guests are made for x86-64 only");
        }
        let whole = folder()?;
        let _lock = Lock::take(&whole)?;
        let tools = tools(&whole)?;
        let folder = whole.join(format!("linux-{series}"));
        let recipe = format!("{RECIPE} {MODULES:?} {PROGRAMS:?} {VERBS_DRIVERS:?}");
        let stamp = folder.join("stamp");
        let made = fs::read_to_string(&stamp).unwrap_or_default();
        let version = match made.split_once('\n') {
            Some((version, made_by)) if made_by == recipe => version.to_owned(),
            _ => {
                let version = make(series, &folder, &tools)?;
                fs::write(&stamp, format!("{version}\n{recipe}"))?;
                version
            }
        };
        Ok(Self {
            tools,
            kernel: folder.join("vmlinux"),
            base: folder.join("base.cpio"),
            version,
            series,
            folder,
        })
    }

    /// A module of this repository, compiled for this kernel when its source has changed.
    pub(super) fn module(&self, name: &str) -> Result<PathBuf> {
        let source = workspace::root().join("vm").join(name);
        let mut text = self.version.clone();
        let mut files: Vec<_> = fs::read_dir(&source)?
            .map(|entry| Ok(entry?.path()))
            .collect::<Result<_>>()?;
        files.sort();
        for file in &files {
            text += &fs::read_to_string(file)?;
        }
        let _lock = Lock::take(&folder()?)?;
        let module = self.folder.join(format!("{name}.ko"));
        let made_of = self.folder.join(format!("{name}.source"));
        if module.is_file() && fs::read_to_string(&made_of).is_ok_and(|made_of| made_of == text) {
            return Ok(module);
        }
        machine::c_toolchain()?;
        let headers = self.folder.join("headers");
        if !headers.is_dir() {
            let packages = kernel::header_packages(&self.version)?;
            let packages: Vec<_> = packages.iter().map(String::as_str).collect();
            machine::say(&format!("headers of Linux {}", self.version));
            machine::make_whole(&headers, |part| packages::unpack(&packages, false, part))?;
        }
        let build = kernel::build_folder(&headers, &self.version)?;
        let work = self.folder.join(format!("{name}-build"));
        let built = kernel::build_module(&build, &source, &work, name)
            .with_context(|| format!("for Linux {} ({})", self.version, self.series))?;
        fs::copy(&built, &module)?;
        fs::write(&made_of, text)?;
        let _ = fs::remove_dir_all(&work);
        Ok(module)
    }
}

/// Debian's packages in a tree of their own.
fn tools(whole: &Path) -> Result<Tree> {
    let tree = whole.join("debian");
    let stamp = whole.join("debian.stamp");
    let recipe = format!("{RECIPE} {PACKAGES:?}");
    if fs::read_to_string(&stamp).is_ok_and(|made| made == recipe) {
        return Ok(Tree::new(&tree));
    }
    packages::offered("qemu-system-x86")?;
    machine::say("QEMU and what runs in guests (70 MB to download, unpacked into the cache)");
    let _ = fs::remove_dir_all(&tree);
    packages::unpack(&PACKAGES, true, &tree)?;
    fs::write(&stamp, recipe)?;
    Ok(Tree::new(&tree))
}

/// Makes kernel and base file system in `folder`; returns the kernel's version.
fn make(series: Series, folder: &Path, tools: &Tree) -> Result<String> {
    let start = Instant::now();
    let version = kernel::newest(series)?;
    let _ = fs::remove_dir_all(folder);
    fs::create_dir_all(folder)?;
    machine::say(&format!("Linux {version} for guests (about 100 MB to download)"));
    let packages = folder.join("image");
    packages::unpack(&[&format!("linux-image-{version}-amd64")], false, &packages)?;
    let image = packages.join(format!("boot/vmlinuz-{version}-amd64"));
    let image = fs::read(&image)?;
    fs::write(folder.join("vmlinux"), kernel::elf_of(&image, tools)?)?;
    let modules = folder.join("modules");
    kernel::copy_modules(&packages, &version, &MODULES, tools, &modules)?;
    let base = folder.join("base.cpio");
    let mut out = BufWriter::new(File::create(&base)?);
    archive(tools, &modules)?.write(&mut out)?;
    out.into_inner().context("writing the base file system")?;
    // Half a gigabyte of modules of which a few are in the base now.
    fs::remove_dir_all(&packages)?;
    fs::remove_dir_all(&modules)?;
    machine::say(&format!(
        "Linux {version} is ready after {:.0} s",
        start.elapsed().as_secs_f64()
    ));
    Ok(version)
}

/// The base file system.
fn archive(tools: &Tree, modules: &Path) -> Result<Archive> {
    let mut archive = Archive::default();
    for name in MERGED {
        archive.link(name, &format!("usr/{name}"));
    }
    for name in [
        "dev", "etc", "mnt", "proc", "root", "run", "sys", "tmp", "var/run",
    ] {
        archive.directory(name);
    }
    let mut program = |path: &str, file: &Path| -> Result<()> {
        archive.copy(path, file);
        for (library, inside) in tools.libraries(file)? {
            archive.copy(&inside, &library);
        }
        Ok(())
    };
    for name in PROGRAMS {
        program(&format!("/bin/{name}"), &tools.program(name)?)?;
    }
    for name in VERBS_DRIVERS {
        let (file, path) = verbs_driver(tools, name)?;
        program(&path, &file)?;
    }
    for library in ["libibverbs.so.1", "librdmacm.so.1", "libmlx5.so.1"] {
        let path = format!("/usr/lib/x86_64-linux-gnu/{library}");
        let file = tools
            .path(&path)
            .with_context(|| format!("the packages brought no {library}"))?;
        program(&path, &file)?;
    }
    // Linked statically, as Debian's package is called: it needs no libraries.
    let busybox = tools.program("busybox")?;
    archive.copy("/bin/busybox", &busybox);
    for name in VERBS_DRIVERS {
        archive.bytes(
            &format!("/etc/libibverbs.d/{name}.driver"),
            format!("driver {name}\n"),
        );
    }
    // The kernel runs /sbin/modprobe where it wants a module itself.
    for name in KMOD {
        archive.link(&format!("/bin/{name}"), "kmod");
        archive.link(&format!("/sbin/{name}"), "../bin/kmod");
    }
    archive.link("/bin/sh", "dash");
    for name in applets(&busybox)? {
        let path = format!("/bin/{name}");
        // Its own versions of programs that stand above can less; its shell would prefer them all the same, so it is left out.
        if !archive.contains(&path) && !["ash", "hush"].contains(&name.as_str()) {
            archive.link(&path, "busybox");
        }
    }
    archive.tree("/lib/modules", &modules.join("lib/modules"))?;
    archive.bytes("/etc/passwd", "root:x:0:0:root:/root:/bin/sh\n");
    archive.bytes("/etc/group", "root:x:0:\n");
    archive.bytes("/etc/hosts", "127.0.0.1 localhost\n");
    Ok(archive)
}

/// Names of busybox's programs.
fn applets(busybox: &Path) -> Result<Vec<String>> {
    let list = crate::process::output(std::process::Command::new(busybox).arg("--list"))?;
    Ok(list.lines().map(str::to_owned).collect())
}

/// A driver of libibverbs: the file, and its path in a guest. The name ends with the version of libibverbs' interface to drivers.
fn verbs_driver(tools: &Tree, name: &str) -> Result<(PathBuf, String)> {
    let inside = "/usr/lib/x86_64-linux-gnu/libibverbs";
    let folder = tools
        .path(inside)
        .context("the packages brought no drivers of libibverbs")?;
    let prefix = format!("lib{name}-rdmav");
    for entry in fs::read_dir(&folder)? {
        let file = entry?.file_name().to_string_lossy().into_owned();
        if file.starts_with(&prefix) {
            let path = format!("{inside}/{file}");
            let target = tools
                .path(&path)
                .with_context(|| format!("{path} leads nowhere"))?;
            return Ok((target, path));
        }
    }
    bail!("libibverbs has no driver {name}")
}
