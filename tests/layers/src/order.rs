//! The order of layers that `layers.toml` states.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use anyhow::{Context as _, Result, bail};
use serde::Deserialize;

use crate::{Crate, Graph};

/// `layers.toml`: the order of the workspace's crates, and of modules within crates.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Orders {
    /// Crates, lowest first.
    pub crates: Order,
    /// By package name: its top-level modules, lowest first.
    #[serde(default)]
    pub modules: BTreeMap<String, Order>,
}

/// Layers, lowest first. Names of one layer may not import each other.
#[derive(Clone, Debug, Default, Deserialize)]
#[serde(transparent)]
pub struct Order(pub Vec<Vec<String>>);

impl Order {
    fn layer(&self, name: &str) -> Option<usize> {
        let has = |layer: &Vec<String>| layer.iter().any(|one| one == name);
        self.0.iter().position(has)
    }

    fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().flatten().map(String::as_str)
    }

    /// Says of each arrow that does not lead downward, and of names that are in one list only.
    fn problems<'a>(
        &self,
        nodes: &BTreeSet<&'a str>,
        arrows: impl Iterator<Item = (&'a str, &'a str, String)>,
    ) -> Vec<String> {
        let missing = |name: &str| self.layer(name).is_none();
        let mut problems: Vec<_> = nodes
            .iter()
            .filter(|name| missing(name))
            .map(|name| format!("layers.toml does not list {name}"))
            .collect();
        let gone = self.names().filter(|name| !nodes.contains(name));
        problems.extend(gone.map(|name| format!("layers.toml lists {name}, which does not exist")));
        for (from, to, place) in arrows {
            if let (Some(above), Some(below)) = (self.layer(from), self.layer(to))
                && above <= below
            {
                problems.push(format!("{from} may not import {to}: {place}"));
            }
        }
        problems
    }
}

impl Orders {
    /// Reads the file.
    ///
    /// # Errors
    /// If it cannot be read, or is not as described here.
    pub fn read(file: &Path) -> Result<Self> {
        let text = fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
        let orders: Self = toml::from_str(&text).with_context(|| file.display().to_string())?;
        for order in orders.modules.values().chain([&orders.crates]) {
            let mut names: Vec<_> = order.names().collect();
            names.sort_unstable();
            if let Some(twice) = names.windows(2).find(|pair| pair[0] == pair[1]) {
                bail!("{}: {} stands there twice", file.display(), twice[0]);
            }
        }
        Ok(orders)
    }

    /// What crates depend on against the order.
    #[must_use]
    pub fn problems_of_crates(&self, crates: &[Crate]) -> Vec<String> {
        let arrows = crates.iter().flat_map(|one| {
            let place = format!("{} depends on it", one.root.display());
            let to = one.dependencies.iter();
            to.map(move |to| (one.name.as_str(), to.as_str(), place.clone()))
        });
        let names = crates.iter().map(|one| one.name.as_str()).collect();
        self.crates.problems(&names, arrows)
    }

    /// Arrows of a crate that do not lead downward; none for a crate whose modules have no order.
    #[must_use]
    pub fn problems_of_modules(&self, name: &str, graph: &Graph) -> Vec<String> {
        let Some(order) = self.modules.get(name) else {
            return Vec::new();
        };
        let top = graph.modules.iter().filter(|module| module.len() == 1);
        let siblings = graph.siblings(&[]);
        let arrows = siblings
            .iter()
            .flat_map(|(&(from, to), arrows)| arrows.iter().map(move |arrow| (from, to, arrow.to_string())));
        order.problems(&top.map(|module| module[0].as_str()).collect(), arrows)
    }
}
