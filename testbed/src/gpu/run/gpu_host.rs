//! What a GPU host has.

use std::{
    env,
    path::{Path, PathBuf},
    process::Command,
    sync::OnceLock,
};

use crate::{gpu::bundle::WITHOUT_RECORDS, process};

/// A machine, and the bundle on it.
#[derive(Debug)]
pub(super) struct GpuHost {
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

impl GpuHost {
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

    /// Ours, but for records and kernels' events.
    pub(super) fn library_without_records(&self) -> PathBuf {
        self.bundle.join(WITHOUT_RECORDS)
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

/// One line for each GPU that programs started here see.
fn gpus() -> Result<Vec<String>, String> {
    let ask = ["--query-gpu=name,driver_version", "--format=csv,noheader"];
    let program = process::find("nvidia-smi").ok_or("no GPU: nvidia-smi is not here")?;
    let told =
        process::output(Command::new(program).args(ask)).map_err(|error| format!("no GPU: {error:#}"))?;
    let gpus = visible(&told, env::var("CUDA_VISIBLE_DEVICES").ok().as_deref());
    if gpus.is_empty() {
        return Err("no GPU: nvidia-smi and CUDA_VISIBLE_DEVICES name none".to_owned());
    }
    Ok(gpus)
}

/// Those of nvidia-smi's lines that `CUDA_VISIBLE_DEVICES` leaves: so two runs can share a machine, each with GPUs of its own. Only
/// their number matters here; CUDA ends the list at the first entry that is no device.
fn visible(told: &str, only: Option<&str>) -> Vec<String> {
    let all: Vec<_> = told.lines().filter(|line| !line.trim().is_empty()).collect();
    let is_there = |entry: &str| match entry.trim().parse::<usize>() {
        Ok(index) => index < all.len(),
        Err(_) => entry.trim().starts_with("GPU-"),
    };
    let count = only.map_or(all.len(), |list| {
        list.split(',').take_while(|entry| is_there(entry)).count()
    });
    all.into_iter().take(count).map(str::to_owned).collect()
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

#[cfg(test)]
mod tests {
    use super::visible;

    #[test]
    fn gpus_may_be_hidden() {
        let told = "NVIDIA H200, 580.1\nNVIDIA H200, 580.1\nNVIDIA H200, 580.1\n";
        assert_eq!(visible(told, None).len(), 3);
        assert_eq!(visible(told, Some("2,0")).len(), 2);
        assert_eq!(visible(told, Some("GPU-8932f937")).len(), 1);
        // Behind an entry that is no device CUDA sees none.
        assert_eq!(visible(told, Some("1,7,0")).len(), 1);
        assert_eq!(visible(told, Some("-1")).len(), 0);
        assert_eq!(visible(told, Some("")).len(), 0);
    }
}
