//! Prints the module graph of each crate: `cargo run -p ringsight-layers [PACKAGE [FROM TO]]`.
//!
//! Without arguments a line a crate; with a package its arrows at the root, its circles and the arrows of each circle;
//! with `FROM` and `TO` every place behind one arrow. Both are children of one module, at the root or deeper (`plan::table`).

use std::path::Path;

use anyhow::Result;
use ringsight_layers::{Graph, Module, crates};

fn main() -> Result<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for one in crates(&workspace)? {
        let graph = Graph::of_crate(&one.root)?;
        match arguments.as_slice() {
            [] => println!(
                "{}: {} modules, {} arrows, largest circle {}",
                one.name,
                graph.modules.len(),
                graph.arrows.len(),
                graph.largest_circle()
            ),
            [package] if *package == one.name => {
                for ((from, to), places) in graph.siblings(&[]) {
                    println!("{from} -> {to} ({})", places.len());
                }
                for circle in graph.circles() {
                    println!("{circle}");
                    let in_circle = |name: &str| circle.members.contains(name);
                    for ((from, to), places) in graph.siblings(&circle.parent) {
                        if in_circle(from) && in_circle(to) {
                            println!("    {from} -> {to} ({})", places.len());
                        }
                    }
                }
            }
            [package, from, to] if *package == one.name => {
                let (from, to): (Module, Module) = (path(from), path(to));
                for arrow in &graph.arrows {
                    if arrow.from.starts_with(&from) && arrow.to.starts_with(&to) {
                        println!("{arrow}");
                    }
                }
            }
            _ => {}
        }
    }
    Ok(())
}

fn path(written: &str) -> Module {
    written.split("::").map(str::to_owned).collect()
}
