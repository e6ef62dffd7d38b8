//! Every import leads downward in `layers.toml`, and no crate has a circle that is not known there.

use std::path::Path;

use ringsight_layers::{Graph, Orders, crates};

#[test]
fn imports_lead_downward_and_circles_are_known() {
    let workspace = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let orders = Orders::read(&workspace.join("layers.toml")).unwrap();
    let crates = crates(&workspace).unwrap();
    let mut problems = orders.problems_of_crates(&crates);
    let known = |name: &String| crates.iter().any(|one| one.name == *name);
    problems.extend(
        orders
            .modules
            .keys()
            .filter(|name| !known(name))
            .map(|name| format!("layers.toml orders the modules of {name}, which does not exist")),
    );
    let (mut modules, mut largest) = (0, 0);
    for one in &crates {
        let graph = Graph::of_crate(&one.root).unwrap();
        modules += graph.modules.len();
        largest = largest.max(graph.largest_circle());
        problems.extend(orders.problems_of_modules(&one.name, &graph));
        problems.extend(orders.problems_of_circles(&one.name, &graph));
    }
    println!(
        "{} crates, {modules} modules, largest circle {largest}",
        crates.len()
    );
    // A reader that found nothing would find no circle, either.
    assert!(modules > 100, "only {modules} modules were read");
    assert!(problems.is_empty(), "\n{}", problems.join("\n"));
}
