//! Every import leads downward in `layers.toml`, and no crate has a circle.

use std::path::Path;

use ringsight_layers::{Graph, Orders, crates};

#[test]
fn imports_lead_downward_and_in_no_circle() {
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
    let mut modules = 0;
    for one in &crates {
        let graph = Graph::of_crate(&one.root).unwrap();
        modules += graph.modules.len();
        problems.extend(orders.problems_of_modules(&one.name, &graph));
        let circles = graph.circles();
        problems.extend(circles.iter().map(|circle| format!("{}: {circle}", one.name)));
    }
    println!("{} crates, {modules} modules", crates.len());
    // A reader that found nothing would find no circle, either.
    assert!(modules > 100, "only {modules} modules were read");
    assert!(problems.is_empty(), "\n{}", problems.join("\n"));
}
