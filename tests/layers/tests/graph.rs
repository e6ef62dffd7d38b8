//! What counts as an arrow and as a circle, on small crates written for it.

use std::fs;

use ringsight_layers::{Graph, Orders};

/// The graph of a crate with these files below `src`.
fn graph(files: &[(&str, &str)]) -> Graph {
    let folder = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let file = folder.path().join(name);
        fs::create_dir_all(file.parent().unwrap()).unwrap();
        fs::write(file, text).unwrap();
    }
    Graph::of_crate(&folder.path().join("lib.rs")).unwrap()
}

fn arrows(graph: &Graph) -> Vec<String> {
    let mut all: Vec<_> = graph
        .arrows
        .iter()
        .map(|arrow| format!("{} -> {}", arrow.from.join("::"), arrow.to.join("::")))
        .collect();
    all.dedup();
    all
}

#[test]
fn use_trees_qualified_paths_and_macros_are_arrows() {
    let graph = graph(&[
        ("lib.rs", "mod a; mod b; mod c; mod d; mod e;"),
        ("a.rs", "use crate::{b::{self, B as Other}, c};"),
        ("b.rs", "pub struct B; fn f() -> super::c::C { crate::d::make() }"),
        ("c.rs", "pub struct C; fn f() { println!(\"{}\", crate::d::X); }"),
        ("d/mod.rs", "mod inner; pub const X: u8 = 1;"),
        ("d/inner.rs", "use super::super::e::*;"),
        ("e.rs", ""),
    ]);
    assert_eq!(
        arrows(&graph),
        ["a -> b", "a -> c", "b -> c", "b -> d", "c -> d", "d::inner -> e"]
    );
    assert_eq!(graph.largest_circle(), 0);
}

#[test]
fn a_reexport_at_the_root_stands_for_its_module() {
    let graph = graph(&[
        ("lib.rs", "mod a; mod b; pub use b::deep::Thing as Renamed;"),
        ("a.rs", "use crate::Renamed;"),
        (
            "b.rs",
            "pub mod deep { pub struct Thing; } fn f() { crate::a::g() }",
        ),
    ]);
    assert_eq!(arrows(&graph), ["a -> b::deep", "b -> a"]);
    let circles: Vec<_> = graph.circles().iter().map(ToString::to_string).collect();
    assert_eq!(circles, ["2 modules below the root import each other: a, b"]);
}

#[test]
fn what_is_for_tests_alone_does_not_count() {
    let graph = graph(&[
        ("lib.rs", "mod a; mod b; #[cfg(all(test, unix))] mod only;"),
        (
            "a.rs",
            "use crate::b; #[cfg(test)] use crate::only; #[cfg(not(test))] fn g() {} #[cfg(test)] mod tests { use crate::b; }",
        ),
        ("b.rs", "#[cfg(test)] fn f() { crate::a::g() }"),
    ]);
    assert_eq!(arrows(&graph), ["a -> b"]);
}

#[test]
fn circles_are_found_at_every_depth_and_parents_are_free() {
    let graph = graph(&[
        ("lib.rs", "mod a;"),
        ("a/mod.rs", "mod x; mod y; mod z; use x::X; pub struct A;"),
        ("a/x.rs", "use super::{A, y::Y}; pub struct X;"),
        ("a/y.rs", "pub struct Y; use crate::a::z;"),
        ("a/z.rs", "fn f(_: super::x::X) {}"),
    ]);
    let circles: Vec<_> = graph.circles().iter().map(ToString::to_string).collect();
    assert_eq!(circles, ["3 modules below a import each other: x, y, z"]);
    assert_eq!(graph.largest_circle(), 3);
}

#[test]
fn an_arrow_up_or_within_a_layer_is_named_with_its_place() {
    let graph = graph(&[
        ("lib.rs", "mod low; mod left; mod right;"),
        ("low.rs", "use crate::left::L;"),
        ("left.rs", "pub struct L; use crate::right;"),
        ("right.rs", "use crate::low;"),
    ]);
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("layers.toml");
    fs::write(
        &file,
        "crates = []\n[modules]\nx = [['low'], ['left', 'right', 'gone']]\n",
    )
    .unwrap();
    let problems = Orders::read(&file).unwrap().problems_of_modules("x", &graph);
    assert_eq!(problems.len(), 3, "{problems:#?}");
    assert_eq!(problems[0], "layers.toml lists gone, which does not exist");
    assert!(problems[1].starts_with("left may not import right: left -> right:"));
    assert!(problems[1].ends_with("left.rs names `crate::right`"));
    assert!(problems[2].starts_with("low may not import left"));
}

#[test]
fn a_module_without_a_file_is_an_error_that_names_it() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("lib.rs"), "mod gone;").unwrap();
    let error = Graph::of_crate(&folder.path().join("lib.rs")).unwrap_err();
    assert!(error.to_string().contains("mod gone has no file"), "{error}");
}
