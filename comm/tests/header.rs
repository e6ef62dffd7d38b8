//! The shipped headers and the shared library, as a C program sees them.

mod native;

use std::{
    collections::BTreeSet,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use native::{exports, include, library, listed, run, undeclared};

/// Compiles tests/NAME.c into a program in `directory`, linked with the library there by the name that NCCL's users link
/// with.
fn compiled(name: &str, directory: &Path) -> PathBuf {
    let program = directory.join(name);
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/{name}.c"));
    let linked = directory.join("libnccl.so.2");
    std::fs::copy(library(), &linked).unwrap();
    run(Command::new("gcc")
        .args(["-std=gnu11", "-Wall", "-Wextra", "-Werror", "-pthread", "-I"])
        .arg(include())
        .arg(source)
        .arg(&linked)
        .arg("-o")
        .arg(&program));
    program
}

#[test]
fn calls_work_when_the_threads_variables_are_destroyed() {
    let directory = tempfile::tempdir().unwrap();
    let text = run(Command::new(compiled("late", directory.path()))
        .env("LD_LIBRARY_PATH", directory.path())
        .env("RINGSIGHT_DEVICE", "host")
        .env("NCCL_SOCKET_IFNAME", "lo"));
    assert_eq!(text, "thread ok after 3 turns\nexit ok\n");
}

#[test]
fn a_c_program_runs_on_two_processes() {
    let directory = tempfile::tempdir().unwrap();
    let program = compiled("header", directory.path());
    let id = directory.path().join("id");
    let ranks: Vec<_> = (0..2)
        .map(|rank: u32| {
            Command::new(&program)
                .args([&rank.to_string(), "2"])
                .arg(&id)
                .env("LD_LIBRARY_PATH", directory.path())
                .env("RINGSIGHT_DEVICE", "host")
                .env("NCCL_SOCKET_IFNAME", "lo")
                .stdout(Stdio::piped())
                .stderr(Stdio::piped())
                .spawn()
                .unwrap()
        })
        .collect();
    for (rank, child) in ranks.into_iter().enumerate() {
        let output = child.wait_with_output().unwrap();
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(
            output.status.success(),
            "{text}{}",
            String::from_utf8_lossy(&output.stderr)
        );
        assert_eq!(text, format!("rank {rank} ok\n"));
    }
}

#[test]
fn headers_compile_as_c_and_cpp_without_cuda() {
    let directory = tempfile::tempdir().unwrap();
    for (compiler, standard, name) in [("gcc", "-std=c99", "h.c"), ("g++", "-std=c++11", "h.cc")] {
        let source = directory.path().join(name);
        std::fs::write(
            &source,
            "#include \"ringsight.h\"\n#include \"nccl.h\"\n#include \"nccl_device.h\"\nint main() { ncclConfig_t c = NCCL_CONFIG_INITIALIZER; \
             ncclSimInfo_t s = NCCL_SIM_INFO_INITIALIZER; return (int)(c.magic + s.magic); }\n",
        )
        .unwrap();
        run(Command::new(compiler)
            .args([
                standard,
                "-Wall",
                "-Wextra",
                "-pedantic",
                "-Werror",
                "-fsyntax-only",
                "-I",
            ])
            .arg(include())
            .arg(source));
    }
}

#[test]
fn the_library_exports_what_the_list_says_and_nothing_else() {
    let listed = BTreeSet::from_iter(listed());
    let exported = BTreeSet::from_iter(exports());
    let missing: Vec<_> = listed.difference(&exported).collect();
    let unlisted: Vec<_> = exported.difference(&listed).collect();
    assert!(
        missing.is_empty() && unlisted.is_empty(),
        "missing {missing:?}, not in the list {unlisted:?}"
    );
    for probe in ringsight_records::PROBE_SYMBOLS {
        assert!(exported.contains(probe), "{probe}");
    }
}

#[test]
fn the_headers_declare_what_the_list_says() {
    let mut declared = Vec::new();
    for header in ["nccl.h", "nccl_device.h"] {
        let text = std::fs::read_to_string(include().join(header)).unwrap();
        for line in text
            .lines()
            .filter(|line| line.starts_with("RINGSIGHT_NCCL_API("))
        {
            let name = line.split([',', '(']).nth(2).unwrap().trim();
            declared.extend([name.to_owned(), format!("p{name}")]);
        }
    }
    assert_eq!(declared.len(), 2 * 82);
    let own = std::fs::read_to_string(include().join("ringsight.h")).unwrap();
    for line in own.lines().filter(|line| line.starts_with("ncclResult_t ")) {
        declared.push(
            line["ncclResult_t ".len()..]
                .split('(')
                .next()
                .unwrap()
                .to_owned(),
        );
    }
    declared.sort();
    // What no program calls: the probes' symbols, and a name that only NCCL's own parts use. And what NCCL 2.32.3 has besides.
    let undeclared = undeclared();
    let listed: Vec<String> = listed()
        .into_iter()
        .filter(|name| !name.starts_with("ringsight_probe_") && name != "ncclResetDebugInitInternal")
        .filter(|name| !undeclared.contains(name.strip_prefix('p').unwrap_or(name)))
        .collect();
    assert_eq!(declared, listed);
}

#[test]
fn the_library_has_the_soname_of_nccl() {
    let dynamic = run(Command::new("readelf").arg("-d").arg(library()));
    assert!(dynamic.contains("Library soname: [libnccl.so.2]"), "{dynamic}");
}
