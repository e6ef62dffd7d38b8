//! tests/abi.c, which drives every function of the ABI: against the shipped headers and against NVIDIA's own.

mod native;
#[path = "../../tests/src/skip.rs"]
mod skip;

use std::{
    env, fs,
    path::{Path, PathBuf},
    process::Command,
};

use native::{exports, include, library, listed, run};

/// Folder of NVIDIA's headers, with the CUDA headers that they need; `cargo xtask test` sets it.
const NVIDIA: &str = "RINGSIGHT_NCCL_INCLUDE";

fn source() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/abi.c")
}

/// Compiles the program and runs it; it says how many cases it checked.
#[track_caller]
fn drive(compiler: &str, arguments: &[&str]) -> u32 {
    let folder = tempfile::tempdir().unwrap();
    let (program, linked) = (folder.path().join("abi"), folder.path().join("libnccl.so.2"));
    fs::copy(library(), &linked).unwrap();
    run(Command::new(compiler)
        .args(arguments)
        .arg("-I")
        .arg(include())
        .arg(source())
        .args(["-x", "none", "-o"])
        .arg(&program)
        .arg(&linked));
    let said = run(Command::new(program)
        .env("LD_LIBRARY_PATH", folder.path())
        .env("RINGSIGHT_DEVICE", "host")
        .env("NCCL_SOCKET_IFNAME", "lo")
        .env_remove("NCCL_DEBUG"));
    let summary = said.lines().last().unwrap_or_default();
    let cases = summary
        .strip_suffix(" cases, 0 failures")
        .unwrap_or_else(|| panic!("{said}"));
    cases.parse().unwrap()
}

#[test]
fn every_function_is_driven() {
    let program = fs::read_to_string(source()).unwrap();
    let mut functions = 0;
    for name in listed() {
        // No header declares the internal one, and the other is of ringsight.h.
        if name.starts_with("nccl")
            && !["ncclResetDebugInitInternal", "ncclSimulateKernelTimeout"].contains(&&name[..])
        {
            assert!(program.contains(&format!("{name}(")), "{name}");
            functions += 1;
        }
    }
    assert_eq!(functions, 83 + 14 - 1);
}

#[test]
fn by_the_shipped_headers() {
    let strict = ["-Wall", "-Wextra", "-Werror"];
    let c = drive("gcc", &[&["-std=gnu11"], &strict[..]].concat());
    let cpp = drive("g++", &[&["-std=c++14", "-x", "c++"], &strict[..]].concat());
    assert!(c > 300 && c == cpp, "{c} {cpp}");
}

#[test]
fn by_the_profiling_names() {
    let folder = tempfile::tempdir().unwrap();
    let header = folder.path().join("twins.h");
    let names = listed();
    let twins: String = names
        .iter()
        .filter(|name| names.contains(&format!("p{name}")))
        .map(|name| format!("#define {name} p{name}\n"))
        .collect();
    fs::write(&header, twins).unwrap();
    let define = format!("-DTWINS_HEADER=\"{}\"", header.display());
    assert!(drive("gcc", &["-std=gnu11", &define]) > 300);
}

#[test]
fn by_nvidias_headers() {
    let Some(headers) = env::var_os(NVIDIA).filter(|folder| !folder.is_empty()) else {
        skip::skip(
            "by_nvidias_headers",
            "RINGSIGHT_NCCL_INCLUDE names no folder of NVIDIA's headers",
        );
        return;
    };
    let system = format!("-I{}", headers.display());
    // NVIDIA's header of the device API is C++ only.
    let cases = drive(
        "g++",
        &["-std=c++14", "-x", "c++", "-w", &system, "-include", "nccl.h"],
    );
    assert!(cases > 300);
    // What was compiled is theirs.
    let defines =
        run(Command::new("gcc").args(["-E", "-dM", "-include", "nccl.h", &system, "-x", "c", "/dev/null"]));
    assert!(
        defines.contains("NCCL_SUFFIX") && !defines.contains("RINGSIGHT_"),
        "not NVIDIA's nccl.h"
    );
}

fn names(list: &str) -> Vec<String> {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("abi").join(list);
    let text = fs::read_to_string(path).unwrap();
    let names = text.lines().filter(|line| !line.starts_with('#'));
    names.map(str::to_owned).collect()
}

#[test]
fn all_that_nccl_exports_is_exported() {
    let ours = exports();
    for (list, count) in [("nccl-2.30.7.txt", 165), ("nccl-2.32.3.txt", 193)] {
        let theirs = names(list);
        assert_eq!(theirs.len(), count);
        let missing: Vec<_> = theirs.iter().filter(|name| !ours.contains(name)).collect();
        assert!(missing.is_empty(), "{list}: {missing:?}");
    }
}

/// A program linked with a library of NCCL's name, as a framework is, runs with ours preloaded.
struct Preloaded {
    folder: tempfile::TempDir,
    program: PathBuf,
}

impl Preloaded {
    /// The other library has the functions `stock`, each of which aborts. The program runs `main`, C statements.
    fn new(stock: &[String], main: &str) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let functions: String = stock
            .iter()
            .map(|name| format!("int {name}(void) {{ abort(); }}\n"))
            .collect();
        let at = |name: &str| folder.path().join(name);
        fs::create_dir(at("stock")).unwrap();
        fs::create_dir(at("ours")).unwrap();
        fs::copy(library(), at("ours/libnccl.so.2")).unwrap();
        fs::write(at("stock.c"), format!("#include <stdlib.h>\n{functions}")).unwrap();
        run(Command::new("gcc")
            .args(["-w", "-shared", "-fPIC", "-Wl,-soname,libnccl.so.2", "-o"])
            .arg(at("stock/libnccl.so.2"))
            .arg(at("stock.c")));
        let source = format!(
            "#define _GNU_SOURCE\n#include <dlfcn.h>\n#include <stdio.h>\n#include <string.h>\n#include <nccl.h>\n\
             int main(int count, char** names) {{\nif (!dlopen(\"{}\", RTLD_NOW | RTLD_GLOBAL)) return 9;\n{main}\nreturn 0;\n}}\n",
            at("stock/libnccl.so.2").display()
        );
        fs::write(at("main.c"), source).unwrap();
        let program = at("program");
        // As PyTorch does, the program needs a library of this name, and loads the other one by its path.
        run(Command::new("gcc")
            .args(["-w", "-Wl,--no-as-needed", "-o"])
            .arg(&program)
            .arg("-I")
            .arg(include())
            .arg(at("main.c"))
            .arg(at("stock/libnccl.so.2"))
            .arg(format!("-Wl,-rpath,{}", at("stock").display()))
            .arg("-ldl"));
        Self { folder, program }
    }

    fn command(&self) -> Command {
        let mut command = Command::new(&self.program);
        command
            .env("LD_PRELOAD", self.folder.path().join("ours/libnccl.so.2"))
            .env("RINGSIGHT_DEVICE", "host")
            .env("NCCL_SOCKET_IFNAME", "lo")
            .env_remove("NCCL_DEBUG");
        command
    }
}

#[test]
fn all_that_pytorch_calls_is_ours_though_another_nccl_is_mapped() {
    let stock: Vec<String> = names("nccl-2.32.3.txt");
    let imports = names("pytorch-2.15.0.txt");
    assert_eq!(imports.len(), 51);
    let calls = r#"
        for (int i = 1; i < count; i++) {
          Dl_info found;
          void* function = dlsym(RTLD_DEFAULT, names[i]);
          if (!function || !dladdr(function, &found)) return printf("%s is nowhere\n", names[i]), 1;
          if (!strstr(found.dli_fname, "/ours/")) return printf("%s is of %s\n", names[i], found.dli_fname), 1;
        }
        int version;
        ncclUniqueId id;
        ncclComm_t comm;
        if (ncclGetVersion(&version) || ncclGetUniqueId(&id) || ncclCommInitRank(&comm, 1, id, 0)) return 2;
        if (ncclCommDestroy(comm)) return 3;
        printf("version %d, %d functions\n", version, count - 1);"#;
    let preloaded = Preloaded::new(&stock, calls);
    let said = run(preloaded.command().args(&imports));
    assert_eq!(said, "version 23007, 51 functions\n");
}

/// Makes a communicator, with a config of 96 bytes whose 81st byte on is wrong.
const MAKES: &str = r#"
    int version;
    ncclUniqueId id;
    ncclComm_t comm;
    ncclConfig_t config = NCCL_CONFIG_INITIALIZER;
    config.graphUsageMode = 77;
    if (ncclGetVersion(&version) || ncclGetUniqueId(&id)) return 2;
    printf("version %d, init %d\n", version, ncclCommInitRankConfig(&comm, 1, id, 0, &config));"#;

#[test]
fn another_nccl_is_named_with_what_it_has_besides() {
    let mut stock = names("nccl-2.32.3.txt");
    stock.extend(["ncclNewThing", "pncclNewThing", "other"].map(str::to_owned));
    let preloaded = Preloaded::new(&stock, MAKES);
    let said = run(preloaded.command().env("NCCL_DEBUG", "WARN"));
    let path = preloaded.folder.path().join("stock/libnccl.so.2");
    let path = fs::canonicalize(path).unwrap();
    let warning = said.lines().find(|line| line.contains("Another NCCL is mapped"));
    let warning = warning.unwrap_or_else(|| panic!("{said}"));
    assert!(warning.contains(&path.display().to_string()), "{warning}");
    assert!(warning.ends_with("handles: ncclNewThing"), "{warning}");
}

#[test]
fn the_library_says_that_it_is_the_release_that_it_is_told_to_be() {
    let preloaded = Preloaded::new(&names("nccl-2.30.7.txt"), MAKES);
    let mut command = preloaded.command();
    assert_eq!(run(&mut command), "version 23007, init 4\n");
    assert_eq!(
        run(command.env("RINGSIGHT_NCCL_VERSION", "2.28.9")),
        "version 22809, init 0\n"
    );
    // An unknown one is passed over.
    assert_eq!(
        run(command.env("RINGSIGHT_NCCL_VERSION", "2.99")),
        "version 23007, init 4\n"
    );
}
