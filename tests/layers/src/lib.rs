//! The module graph of a crate, computed from its source, and the rules that `layers.toml` sets for it.
//!
//! An *arrow* leads from a module to a module that it names: in a `use` tree, in a qualified path (`crate::`, `super::`, `self::`),
//! inside a macro call, or through a re-export at the crate's root. Code under `#[cfg(test)]` is left out: a test may look anywhere.
//!
//! Two rules hold for every crate:
//! - **No circle.** Among the modules below one parent, at each depth, no path of arrows returns to its start.
//!   An arrow between two deep modules counts between their ancestors below the first parent that both have.
//! - **Downward only.** Where `layers.toml` lists a crate's modules, lowest first, a module names only modules of earlier lines.
//!
//! Arrows between a module and its own parent are free: a parent is made of its children.

use std::{
    collections::{BTreeMap, BTreeSet},
    fmt, fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result, bail};

mod order;
mod read;

pub use order::{Order, Orders};

/// A module's path below its crate's root; the root itself is empty.
pub type Module = Vec<String>;

/// One place that names another module.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Arrow {
    /// The module that names.
    pub from: Module,
    /// The module that is named.
    pub to: Module,
    /// The file with the place.
    pub file: PathBuf,
    /// The path as it is written there.
    pub written: String,
}

impl fmt::Display for Arrow {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} -> {}: {} names `{}`",
            self.from.join("::"),
            self.to.join("::"),
            self.file.display(),
            self.written
        )
    }
}

/// Modules of one crate and the arrows between them.
#[derive(Clone, Debug, Default)]
pub struct Graph {
    /// Every module but the root.
    pub modules: BTreeSet<Module>,
    /// Every arrow between two of them.
    pub arrows: BTreeSet<Arrow>,
}

/// A circle among the children of one module.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Circle {
    /// The parent of all of them; empty for the crate's root.
    pub parent: Module,
    /// Names of the children that reach each other.
    pub members: BTreeSet<String>,
}

impl fmt::Display for Circle {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let members: Vec<_> = self.members.iter().map(String::as_str).collect();
        let parent = if self.parent.is_empty() {
            "the root".to_owned()
        } else {
            self.parent.join("::")
        };
        write!(
            f,
            "{} modules below {parent} import each other: {}",
            members.len(),
            members.join(", ")
        )
    }
}

/// Arrows from child to child of one module, with the places behind each.
pub type Siblings<'a> = BTreeMap<(&'a str, &'a str), Vec<&'a Arrow>>;

impl Graph {
    /// Reads a crate from the file of its root module (`src/lib.rs`, `src/main.rs`).
    ///
    /// # Errors
    /// If a file cannot be read or is not Rust, or a `mod` line has no file.
    pub fn of_crate(root: &Path) -> Result<Self> {
        read::graph(root)
    }

    /// Arrows between the children of `parent`.
    #[must_use]
    pub fn siblings(&self, parent: &[String]) -> Siblings<'_> {
        let mut all = Siblings::new();
        for arrow in &self.arrows {
            let (Some(from), Some(to)) = (child(parent, &arrow.from), child(parent, &arrow.to)) else {
                continue;
            };
            if from != to {
                all.entry((from, to)).or_default().push(arrow);
            }
        }
        all
    }

    /// Every circle, at every depth.
    #[must_use]
    pub fn circles(&self) -> Vec<Circle> {
        let parents = self.modules.iter().map(|module| &module[..module.len() - 1]);
        let parents: BTreeSet<&[String]> = parents.collect();
        let mut circles = Vec::new();
        for parent in parents {
            let arrows: BTreeSet<_> = self.siblings(parent).into_keys().collect();
            for members in strongly_connected(&arrows) {
                circles.push(Circle {
                    parent: parent.to_vec(),
                    members: members.into_iter().map(str::to_owned).collect(),
                });
            }
        }
        circles
    }

    /// Number of modules in the largest circle; 0 without one.
    #[must_use]
    pub fn largest_circle(&self) -> usize {
        let sizes = self.circles().into_iter().map(|circle| circle.members.len());
        sizes.max().unwrap_or(0)
    }
}

/// Name of the child of `parent` that `module` is or is below.
fn child<'a>(parent: &[String], module: &'a [String]) -> Option<&'a str> {
    module.strip_prefix(parent)?.first().map(String::as_str)
}

/// Sets of two and more nodes that reach each other, by what each node reaches: graphs here have some dozens of nodes.
fn strongly_connected<'a>(arrows: &BTreeSet<(&'a str, &'a str)>) -> Vec<BTreeSet<&'a str>> {
    let nodes: BTreeSet<_> = arrows.iter().flat_map(|&(from, to)| [from, to]).collect();
    let reached: BTreeMap<_, _> = nodes.iter().map(|&node| (node, reach(node, arrows))).collect();
    let mut circles: Vec<BTreeSet<_>> = Vec::new();
    for &node in &nodes {
        let mutual = |&other: &&str| reached[node].contains(other) && reached[other].contains(node);
        let members: BTreeSet<_> = nodes.iter().copied().filter(mutual).collect();
        if members.len() > 1 && !circles.contains(&members) {
            circles.push(members);
        }
    }
    circles
}

fn reach<'a>(start: &'a str, arrows: &BTreeSet<(&'a str, &'a str)>) -> BTreeSet<&'a str> {
    let mut reached = BTreeSet::new();
    let mut open = vec![start];
    while let Some(node) = open.pop() {
        for &(_, to) in arrows.iter().filter(|(from, _)| *from == node) {
            if reached.insert(to) {
                open.push(to);
            }
        }
    }
    reached
}

/// One crate of the workspace.
#[derive(Clone, Debug)]
pub struct Crate {
    /// Package name.
    pub name: String,
    /// Packages of the workspace that it depends on, tests' dependencies left out.
    pub dependencies: BTreeSet<String>,
    /// Its library's root file, or its program's.
    pub root: PathBuf,
}

/// The part of a manifest that counts here.
#[derive(serde::Deserialize)]
struct Manifest {
    package: Option<Package>,
    workspace: Option<Workspace>,
    #[serde(default)]
    dependencies: BTreeMap<String, toml::Value>,
}

#[derive(serde::Deserialize)]
struct Package {
    name: String,
}

#[derive(serde::Deserialize)]
struct Workspace {
    #[serde(default)]
    members: Vec<String>,
    #[serde(default)]
    exclude: Vec<String>,
}

fn manifest(folder: &Path) -> Result<Manifest> {
    let file = folder.join("Cargo.toml");
    let text = fs::read_to_string(&file).with_context(|| format!("reading {}", file.display()))?;
    toml::from_str(&text).with_context(|| file.display().to_string())
}

/// Every crate of the workspace in `folder`, those too that the workspace excludes because another toolchain builds them.
///
/// # Errors
/// If a manifest cannot be read, or a crate has no root file.
pub fn crates(folder: &Path) -> Result<Vec<Crate>> {
    let Some(workspace) = manifest(folder)?.workspace else {
        bail!("{} is no workspace", folder.join("Cargo.toml").display());
    };
    let mut crates = Vec::new();
    let excluded = workspace.exclude.iter();
    let excluded = excluded.filter(|member| folder.join(member).join("Cargo.toml").is_file());
    for member in workspace.members.iter().chain(excluded) {
        let manifest = manifest(&folder.join(member))?;
        let package = manifest
            .package
            .with_context(|| format!("{member} has no package"))?;
        let roots = ["src/lib.rs", "src/main.rs"].map(|file| folder.join(member).join(file));
        let Some(root) = roots.into_iter().find(|file| file.is_file()) else {
            // Fuzz targets are programs of one file each, named in the manifest.
            continue;
        };
        crates.push(Crate {
            name: package.name,
            dependencies: manifest.dependencies.into_keys().collect(),
            root,
        });
    }
    let names: BTreeSet<_> = crates.iter().map(|one| one.name.clone()).collect();
    for one in &mut crates {
        one.dependencies.retain(|dependency| names.contains(dependency));
    }
    Ok(crates)
}
