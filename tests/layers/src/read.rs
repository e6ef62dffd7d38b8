//! Reads a crate's modules, and the paths that each of them names.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Context as _, Result};
use proc_macro2::{TokenStream, TokenTree};
use syn::{
    Attribute, File, Item, ItemMod, ItemUse, Meta, UseTree,
    visit::{self, Visit},
};

use crate::{Arrow, Graph, Module};

/// A path as it is written in a module.
struct Named {
    from: Module,
    file: PathBuf,
    segments: Vec<String>,
}

#[derive(Default)]
struct Reader {
    modules: BTreeSet<Module>,
    named: Vec<Named>,
    /// What `use` lines at the root make available there: name → path from the root.
    at_root: BTreeMap<String, Vec<String>>,
}

pub(crate) fn graph(root: &Path) -> Result<Graph> {
    let mut reader = Reader::default();
    let folder = root.parent().context("a root file has a folder")?;
    reader.file(root, folder, &Vec::new())?;
    let mut graph = Graph::default();
    for named in &reader.named {
        let Some(to) = reader.resolve(named) else { continue };
        if to != named.from && !named.from.is_empty() {
            graph.arrows.insert(Arrow {
                from: named.from.clone(),
                to,
                file: named.file.clone(),
                written: named.segments.join("::"),
            });
        }
    }
    graph.modules = reader.modules;
    Ok(graph)
}

impl Reader {
    /// Reads the module `module` from `file`; files of its children are in `folder`.
    fn file(&mut self, file: &Path, folder: &Path, module: &Module) -> Result<()> {
        let text = fs::read_to_string(file).with_context(|| format!("reading {}", file.display()))?;
        let File { items, .. } = syn::parse_file(&text).with_context(|| file.display().to_string())?;
        self.items(&items, file, folder, module)
    }

    fn items(&mut self, items: &[Item], file: &Path, folder: &Path, module: &Module) -> Result<()> {
        for item in items {
            match item {
                Item::Mod(child) if !is_test(&child.attrs) => self.child(child, file, folder, module)?,
                Item::Mod(_) => {}
                item => self.item(item, file, module),
            }
        }
        Ok(())
    }

    fn child(&mut self, child: &ItemMod, file: &Path, folder: &Path, module: &Module) -> Result<()> {
        let name = plain(&child.ident);
        let mut path = module.clone();
        path.push(name.clone());
        self.modules.insert(path.clone());
        if let Some((_, items)) = &child.content {
            return self.items(items, file, &folder.join(&name), &path);
        }
        let given = child.attrs.iter().find_map(path_attribute);
        let files = match given {
            Some(given) => vec![file.parent().unwrap_or(folder).join(given)],
            None => vec![
                folder.join(format!("{name}.rs")),
                folder.join(&name).join("mod.rs"),
            ],
        };
        let found = files.iter().find(|file| file.is_file()).with_context(|| {
            format!(
                "{}: mod {name} has no file {}",
                file.display(),
                files[0].display()
            )
        })?;
        self.file(found, &folder.join(&name), &path)
    }

    fn item(&mut self, item: &Item, file: &Path, module: &Module) {
        if is_test(attributes(item)) {
            return;
        }
        if let Item::Use(one) = item
            && module.is_empty()
        {
            for path in leaves(&one.tree) {
                if let Some((name, path)) = path.available() {
                    self.at_root.insert(name, path);
                }
            }
        }
        let mut names = Names::default();
        names.visit_item(item);
        for segments in names.0 {
            self.named.push(Named {
                from: module.clone(),
                file: file.to_owned(),
                segments,
            });
        }
    }

    /// The module that a written path leads to; `None` for other crates and for names within the module.
    fn resolve(&self, named: &Named) -> Option<Module> {
        let mut segments = named.segments.as_slice();
        let mut at = match segments.first()?.as_str() {
            "crate" => Module::new(),
            "self" => named.from.clone(),
            "super" => named.from[..named.from.len().checked_sub(1)?].to_vec(),
            _ => {
                // A path of the 2018 edition may begin with a child of the module that it stands in.
                return self.below(named.from.clone(), segments, false);
            }
        };
        segments = &segments[1..];
        while segments.first().is_some_and(|segment| segment == "super") {
            at.pop()?;
            segments = &segments[1..];
        }
        self.below(at, segments, true)
    }

    /// The deepest module along `segments` from `at`.
    fn below(&self, mut at: Module, segments: &[String], may_stay: bool) -> Option<Module> {
        let start = at.len();
        for (index, segment) in segments.iter().enumerate() {
            at.push(segment.clone());
            if self.modules.contains(&at) {
                continue;
            }
            at.pop();
            if at.is_empty()
                && let Some(path) = self.at_root.get(segment)
            {
                // A re-export at the root stands for what it re-exports.
                let mut rest = path.clone();
                rest.extend_from_slice(&segments[index + 1..]);
                return if rest[0] == *segment {
                    None
                } else {
                    self.below(Module::new(), &rest, true)
                };
            }
            break;
        }
        (may_stay || at.len() > start).then_some(at)
    }
}

/// Every path that an item names.
#[derive(Default)]
struct Names(Vec<Vec<String>>);

impl Names {
    /// Paths in a macro's tokens: what begins with `crate`, `$crate`, `super` or `self`, followed by `::`.
    fn tokens(&mut self, tokens: TokenStream) {
        let tokens: Vec<_> = tokens.into_iter().collect();
        let mut index = 0;
        while index < tokens.len() {
            match &tokens[index] {
                TokenTree::Group(group) => self.tokens(group.stream()),
                TokenTree::Ident(first) if ["crate", "super", "self"].contains(&&*first.to_string()) => {
                    let mut segments = vec![first.to_string()];
                    while let [
                        TokenTree::Punct(a),
                        TokenTree::Punct(b),
                        TokenTree::Ident(next),
                        ..,
                    ] = &tokens[index + 1..]
                        && (a.as_char(), b.as_char()) == (':', ':')
                    {
                        segments.push(next.to_string());
                        index += 3;
                    }
                    if segments.len() > 1 {
                        self.0.push(segments);
                    }
                }
                _ => {}
            }
            index += 1;
        }
    }
}

impl<'ast> Visit<'ast> for Names {
    fn visit_item(&mut self, item: &'ast Item) {
        if !is_test(attributes(item)) {
            visit::visit_item(self, item);
        }
    }

    fn visit_item_use(&mut self, item: &'ast ItemUse) {
        for leaf in leaves(&item.tree) {
            self.0.push(leaf.segments);
        }
    }

    fn visit_path(&mut self, path: &'ast syn::Path) {
        let segments: Vec<_> = path.segments.iter().map(|one| plain(&one.ident)).collect();
        if segments.len() > 1 {
            self.0.push(segments);
        }
        visit::visit_path(self, path);
    }

    fn visit_macro(&mut self, called: &'ast syn::Macro) {
        self.tokens(called.tokens.clone());
        visit::visit_macro(self, called);
    }

    fn visit_vis_restricted(&mut self, _: &'ast syn::VisRestricted) {
        // `pub(in crate::a)` says who may look, and looks at nothing itself.
    }
}

/// One name that a `use` line brings in.
struct Leaf {
    segments: Vec<String>,
    renamed: Option<String>,
}

impl Leaf {
    /// Under which name it is to be had, and its path from the root, for a `use` line at the root.
    fn available(&self) -> Option<(String, Vec<String>)> {
        let skipped = usize::from(["crate", "self"].contains(&self.segments.first()?.as_str()));
        let path = self.segments[skipped..].to_vec();
        let name = self.renamed.clone().or_else(|| path.last().cloned())?;
        (path.len() > 1).then_some((name, path))
    }
}

fn leaves(tree: &UseTree) -> Vec<Leaf> {
    fn walk(tree: &UseTree, before: &[String], all: &mut Vec<Leaf>) {
        let mut leaf = |name: Option<String>, renamed| {
            let segments = before.iter().cloned().chain(name).collect();
            all.push(Leaf { segments, renamed });
        };
        match tree {
            UseTree::Path(path) => {
                let mut before = before.to_vec();
                before.push(plain(&path.ident));
                walk(&path.tree, &before, all);
            }
            UseTree::Name(name) if name.ident == "self" => leaf(None, None),
            UseTree::Name(name) => leaf(Some(plain(&name.ident)), None),
            UseTree::Rename(rename) if rename.ident == "self" => leaf(None, Some(plain(&rename.rename))),
            UseTree::Rename(rename) => leaf(Some(plain(&rename.ident)), Some(plain(&rename.rename))),
            UseTree::Glob(_) => leaf(None, None),
            UseTree::Group(group) => {
                for tree in &group.items {
                    walk(tree, before, all);
                }
            }
        }
    }
    let mut all = Vec::new();
    walk(tree, &[], &mut all);
    all
}

/// Name without `r#`.
fn plain(ident: &proc_macro2::Ident) -> String {
    ident.to_string().trim_start_matches("r#").to_owned()
}

/// Whether an item is there for tests alone.
fn is_test(attributes: &[Attribute]) -> bool {
    attributes.iter().any(|attribute| {
        let Meta::List(list) = &attribute.meta else {
            return attribute.path().is_ident("test");
        };
        list.path.is_ident("cfg") && needs_test(list.tokens.clone())
    })
}

/// `test`, or `all(…)` with it.
fn needs_test(tokens: TokenStream) -> bool {
    let tokens: Vec<_> = tokens.into_iter().collect();
    match tokens.as_slice() {
        [TokenTree::Ident(word)] => word == "test",
        [TokenTree::Ident(word), TokenTree::Group(group)] if word == "all" => {
            let parts: Vec<_> = group.stream().into_iter().collect();
            let is_comma = |token: &TokenTree| matches!(token, TokenTree::Punct(p) if p.as_char() == ',');
            parts
                .split(is_comma)
                .any(|part| needs_test(part.iter().cloned().collect()))
        }
        _ => false,
    }
}

fn path_attribute(attribute: &Attribute) -> Option<String> {
    let Meta::NameValue(pair) = &attribute.meta else {
        return None;
    };
    let syn::Expr::Lit(value) = &pair.value else {
        return None;
    };
    match &value.lit {
        syn::Lit::Str(text) if pair.path.is_ident("path") => Some(text.value()),
        _ => None,
    }
}

fn attributes(item: &Item) -> &[Attribute] {
    match item {
        Item::Const(item) => &item.attrs,
        Item::Enum(item) => &item.attrs,
        Item::Fn(item) => &item.attrs,
        Item::ForeignMod(item) => &item.attrs,
        Item::Impl(item) => &item.attrs,
        Item::Macro(item) => &item.attrs,
        Item::Mod(item) => &item.attrs,
        Item::Static(item) => &item.attrs,
        Item::Struct(item) => &item.attrs,
        Item::Trait(item) => &item.attrs,
        Item::Type(item) => &item.attrs,
        Item::Union(item) => &item.attrs,
        Item::Use(item) => &item.attrs,
        _ => &[],
    }
}
