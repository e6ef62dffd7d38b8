//! What the machine has, and whether the library has what PyTorch asks of it.

use std::{collections::BTreeSet, path::Path, process::Command};

use anyhow::Result;

use super::super::step::{StepResult, Steps};
use crate::process;

/// Functions named `nccl…` in what `nm` prints.
fn functions(printed: &str) -> BTreeSet<&str> {
    printed
        .lines()
        .filter_map(|line| line.split_whitespace().next_back())
        .map(|name| name.split('@').next().unwrap_or(name))
        .filter(|name| name.starts_with("nccl"))
        .collect()
}

/// Whether `library` has all that `user` takes from a library.
fn has_what_is_wanted(library: &Path, user: &Path) -> StepResult {
    let nm = |which, file: &Path| {
        process::output(Command::new("nm").args(["--dynamic", which]).arg(file))
            .map_err(|error| format!("{error:#}"))
    };
    let (here, there) = (nm("--defined-only", library)?, nm("--undefined-only", user)?);
    let (here, there) = (functions(&here), functions(&there));
    let missing: Vec<_> = there.difference(&here).copied().collect();
    if missing.is_empty() {
        Ok(format!(
            "all {} functions that it asks for are there",
            there.len()
        ))
    } else {
        Err(format!(
            "it asks for what the library has not: {}",
            missing.join(", ")
        ))
    }
}

pub(super) fn run(steps: &mut Steps<'_>) -> Result<()> {
    let host = steps.host;
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    let kernel = process::output(Command::new("uname").arg("-r")).unwrap_or_default();
    let mut text = format!("kernel {kernel}, {cores} cores");
    if let Some(first) = host.gpus.first() {
        text = format!("{} GPUs ({first}), {text}", host.gpus.len());
    }
    steps.enter("machine", Ok(text));
    match host.lacks_gpus(1) {
        Some(reason) => steps.skip("topology", &reason),
        None => {
            let mut command = Command::new("nvidia-smi");
            command.args(["topo", "-m"]);
            steps.run("topology", 20, command, |_| Ok("see its log".to_owned()));
        }
    }
    match host.stock() {
        Ok(file) => steps.enter("nccl", Ok(file.display().to_string())),
        Err(reason) => steps.skip("nccl", &reason),
    }
    // The library can be loaded, and says which NCCL it stands for.
    let library = host.library();
    // SAFETY: initialisers of our own library, which touch no device; the function takes a pointer to an integer that it sets.
    let version = unsafe {
        libloading::Library::new(&library)
            .and_then(|library| {
                let get = library.get::<unsafe extern "C" fn(*mut i32) -> i32>(b"ncclGetVersion\0")?;
                let mut version = 0;
                let result = get(&raw mut version);
                Ok((result, version))
            })
            .map_err(|error| error.to_string())
    };
    steps.enter(
        "library",
        version.and_then(|(result, version)| match result {
            0 => Ok(format!("{} stands for NCCL {version}", library.display())),
            code => Err(format!("ncclGetVersion returned {code}")),
        }),
    );
    let lacks_nm = process::find("nm").is_none().then(|| "no nm here".to_owned());
    match host.torch() {
        Ok(version) => steps.enter("torch", Ok(format!("PyTorch {version}"))),
        Err(reason) => steps.skip("torch", reason),
    }
    let torch = lacks_nm.clone().map_or_else(|| host.torch_libraries(), Err);
    match torch {
        Ok(folder) => {
            let verdict = has_what_is_wanted(&library, &folder.join("libtorch_cuda.so"));
            steps.enter("torch-functions", verdict);
        }
        Err(reason) => steps.skip("torch-functions", &reason),
    }
    match lacks_nm.map_or_else(|| host.nccl_tests(), Err) {
        Ok(folder) => {
            for operation in crate::gpu::nccl_tests::OPERATIONS {
                let program = folder.join(crate::gpu::nccl_tests::program(operation));
                let verdict = has_what_is_wanted(&library, &program);
                if verdict.is_err() {
                    steps.enter(&format!("{operation}-functions"), verdict);
                }
            }
        }
        Err(reason) => steps.skip("nccl-tests-functions", &reason),
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_read_without_their_versions() {
        let printed = "                 U cudaFree@libcudart.so.13\n                 U ncclAllReduce\n\
                       0000000000012340 T ncclSend@@VER\n                 w __gmon_start__\n\n";
        assert_eq!(
            functions(printed).into_iter().collect::<Vec<_>>(),
            ["ncclAllReduce", "ncclSend"]
        );
    }
}
