//! Tests of `compile`, which other crates include.

use std::{
    fs,
    path::Path,
    process::Command,
    time::{Duration, SystemTime},
};

use crate::compile::compile;

#[test]
fn what_has_not_changed_is_not_compiled_again() {
    let folder = tempfile::tempdir().unwrap();
    let (source, header) = (folder.path().join("a.c"), folder.path().join("a.h"));
    let object = folder.path().join("out/a.o");
    fs::write(&header, "enum { A = 1 };\n").unwrap();
    fs::write(&source, "#include \"a.h\"\nint a = A;\n").unwrap();
    let old = SystemTime::now() - Duration::from_secs(60);
    let date = |path: &Path, time| fs::File::open(path).unwrap().set_modified(time).unwrap();
    date(&source, old);
    date(&header, old);
    let run = |flags: &[&str]| {
        compile(Command::new("gcc").arg("-c").args(flags).arg(&source), &object);
        object.metadata().unwrap().modified().unwrap()
    };
    let first = run(&[]);
    assert_eq!(run(&[]), first);
    let by_others = run(&["-O1"]);
    assert!(by_others > first);
    assert_eq!(run(&["-O1"]), by_others);
    date(&header, SystemTime::now() + Duration::from_secs(1));
    assert!(run(&["-O1"]) > by_others);
}
