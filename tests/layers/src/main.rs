//! Prints the module graph of each crate: `cargo run -p ringsight-layers [PACKAGE [FROM TO]]`.
//!
//! Without arguments a line a crate, with one its arrows, with three every place behind one arrow.

use std::path::Path;

use anyhow::Result;
use ringsight_layers::{Graph, crates};

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
            [package, rest @ ..] if *package == one.name => {
                for ((from, to), places) in graph.siblings(&[]) {
                    match rest {
                        [first, second] if (first.as_str(), second.as_str()) != (from, to) => {}
                        [_, _] => places.iter().for_each(|place| println!("{place}")),
                        _ => println!("{from} -> {to} ({})", places.len()),
                    }
                }
                for circle in graph.circles() {
                    println!("{circle}");
                }
            }
            _ => {}
        }
    }
    Ok(())
}
