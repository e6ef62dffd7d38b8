//! What the GPU host has.

use std::{
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use crate::process;

/// A machine, and the bundle on it.
#[derive(Debug)]
pub(super) struct Host {
    pub(super) bundle: PathBuf,
    /// One line for each GPU: name and driver.
    pub(super) gpus: Vec<String>,
    /// Why there is none, if there is none.
    no_gpu: String,
    python: Option<PathBuf>,
    /// PyTorch's version, or why there is none; asked once, since importing it takes seconds.
    torch: OnceLock<Result<String, String>>,
    stock: Option<PathBuf>,
}

impl Host {
    /// Looks around.
    pub(super) fn look(bundle: PathBuf, stock: Option<PathBuf>) -> Self {
        let python = process::find("python3");
        let (gpus, no_gpu) = match gpus() {
            Ok(gpus) => (gpus, String::new()),
            Err(reason) => (Vec::new(), reason),
        };
        let stock = stock.or_else(|| installed_nccl(python.as_deref()));
        Self {
            bundle,
            gpus,
            no_gpu,
            python,
            torch: OnceLock::new(),
            stock,
        }
    }

    /// Our library.
    pub(super) fn library(&self) -> PathBuf {
        self.bundle.join("lib/libnccl.so.2")
    }

    /// NVIDIA's library, or why there is none.
    pub(super) fn stock(&self) -> Result<&Path, String> {
        self.stock
            .as_deref()
            .filter(|file| file.is_file())
            .ok_or_else(|| "no NCCL was found to compare with: name it with --stock".to_owned())
    }

    /// A program of the bundle.
    pub(super) fn program(&self, name: &str) -> PathBuf {
        self.bundle.join("bin").join(name)
    }

    /// Why fewer than `count` GPUs are too few; `None` if there are as many.
    pub(super) fn lacks_gpus(&self, count: usize) -> Option<String> {
        match self.gpus.len() {
            0 => Some(self.no_gpu.clone()),
            here if here < count => Some(format!("it needs {count} GPUs, here are {here}")),
            _ => None,
        }
    }

    /// Python that has PyTorch with CUDA, or why there is none.
    pub(super) fn python_with_torch(&self) -> Result<&Path, String> {
        self.torch().map_err(str::to_owned)?;
        self.python.as_deref().ok_or_else(|| "no python3".to_owned())
    }

    /// PyTorch's version.
    pub(super) fn torch(&self) -> Result<&str, &str> {
        let found = self.torch.get_or_init(|| {
            let python = self.python.as_ref().ok_or("there is no python3")?;
            const ASK: &str = "import torch; assert torch.cuda.is_available(), 'PyTorch sees no GPU'; print(torch.__version__)";
            process::output(Command::new(python).args(["-c", ASK]))
                .map_err(|error| format!("no PyTorch with CUDA: {error:#}"))
        });
        found.as_deref().map_err(String::as_str)
    }

    /// Where PyTorch keeps its libraries.
    pub(super) fn torch_libraries(&self) -> Result<PathBuf, String> {
        const ASK: &str = "import torch, os; print(os.path.join(os.path.dirname(torch.__file__), 'lib'))";
        let python = self.python_with_torch()?;
        process::output(Command::new(python).args(["-c", ASK]))
            .map(PathBuf::from)
            .map_err(|error| format!("{error:#}"))
    }

    /// The folder of nccl-tests' programs, or why there is none.
    pub(super) fn nccl_tests(&self) -> Result<PathBuf, String> {
        let folder = self.bundle.join("nccl-tests");
        if folder.is_dir() {
            Ok(folder)
        } else {
            Err("the bundle was made without --nccl-tests".to_owned())
        }
    }

    /// compute-sanitizer of the bundle, else of this machine.
    pub(super) fn sanitizer(&self) -> Result<PathBuf, String> {
        let bundled = self.bundle.join("sanitizer/compute-sanitizer");
        let installed = PathBuf::from("/usr/local/cuda/bin/compute-sanitizer");
        [bundled, installed]
            .into_iter()
            .find(|program| process::is_program(program))
            .or_else(|| process::find("compute-sanitizer"))
            .ok_or_else(|| {
                "no compute-sanitizer here, and the bundle was made without --sanitizer".to_owned()
            })
    }
}

/// One line for each GPU.
fn gpus() -> Result<Vec<String>, String> {
    let ask = ["--query-gpu=name,driver_version", "--format=csv,noheader"];
    let program = process::find("nvidia-smi").ok_or("no GPU: nvidia-smi is not here")?;
    let told =
        process::output(Command::new(program).args(ask)).map_err(|error| format!("no GPU: {error:#}"))?;
    let gpus: Vec<_> = told
        .lines()
        .filter(|line| !line.trim().is_empty())
        .map(str::to_owned)
        .collect();
    if gpus.is_empty() {
        return Err("no GPU: nvidia-smi names none".to_owned());
    }
    Ok(gpus)
}

/// NVIDIA's library where Python's packages or the system's have it.
fn installed_nccl(python: Option<&Path>) -> Option<PathBuf> {
    const FOLDERS: &str = "import site, sysconfig; print('\\n'.join([sysconfig.get_paths()['purelib'], *site.getsitepackages(), site.getusersitepackages()]))";
    let packages = python
        .and_then(|python| process::output(Command::new(python).args(["-c", FOLDERS])).ok())
        .unwrap_or_default();
    packages
        .lines()
        .map(|folder| Path::new(folder).join("nvidia/nccl/lib"))
        .chain(
            [
                "/usr/lib/x86_64-linux-gnu",
                "/usr/local/lib",
                "/usr/local/cuda/lib64",
                "/usr/lib64",
            ]
            .map(PathBuf::from),
        )
        .map(|folder| folder.join("libnccl.so.2"))
        .find(|file| file.is_file())
}
