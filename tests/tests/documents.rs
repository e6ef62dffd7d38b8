//! Links of the project's documents: every file and heading that one names is there.

use std::{
    collections::BTreeSet,
    fs,
    path::{Path, PathBuf},
};

/// Links to this repository from pages of the book, which cannot name files outside it by a relative path.
const REPOSITORY: [&str; 2] = [
    "https://github.com/ringsight/ringsight/blob/main/",
    "https://github.com/ringsight/ringsight/tree/main/",
];

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// Markdown files below `folder`, without those of builds and tools.
fn documents(folder: &Path, found: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(folder).unwrap().flatten() {
        let (path, name) = (entry.path(), entry.file_name());
        let name = name.to_string_lossy();
        if path.is_dir() {
            if !name.starts_with('.') && !["target", "book", "node_modules"].contains(&&*name) {
                documents(&path, found);
            }
        } else if name.ends_with(".md") {
            found.push(path);
        }
    }
}

/// The lines of a document that are not in a block of code.
fn prose(text: &str) -> impl Iterator<Item = &str> {
    let mut is_code = false;
    text.lines().filter(move |line| {
        let is_fence = line.trim_start().starts_with("```");
        is_code ^= is_fence;
        !is_code && !is_fence
    })
}

/// The part of a heading's link behind `#`, as GitHub and mdBook make it.
fn anchor(heading: &str) -> String {
    let mut parts = heading.split("](");
    // Of a link in a heading its text counts.
    let mut text = parts.next().unwrap_or_default().to_owned();
    text.extend(parts.filter_map(|part| Some(part.split_once(')')?.1)));
    let kept = text.trim().chars();
    let kept = kept.filter(|c| c.is_alphanumeric() || " -_".contains(*c));
    kept.map(|c| if c == ' ' { '-' } else { c.to_ascii_lowercase() })
        .collect()
}

fn anchors(text: &str) -> BTreeSet<String> {
    let headings = prose(text).filter_map(|line| {
        line.trim_start_matches('#')
            .strip_prefix(' ')
            .filter(|_| line.starts_with('#'))
    });
    headings.map(anchor).collect()
}

/// What a document links to.
fn links(text: &str) -> Vec<&str> {
    let parts = prose(text).flat_map(|line| line.split("](").skip(1));
    parts.filter_map(|part| part.split(')').next()).collect()
}

/// Why a link from `document` is dead; `None` if it is not.
fn is_dead(document: &Path, link: &str) -> Option<String> {
    let (base, link) = REPOSITORY
        .iter()
        .find_map(|repository| link.strip_prefix(repository))
        .map_or((document.parent()?.to_owned(), link), |link| (root(), link));
    if link.contains("://") {
        return None;
    }
    let (file, heading) = link.split_once('#').unwrap_or((link, ""));
    let target = if file.is_empty() {
        document.to_owned()
    } else {
        base.join(file)
    };
    let is_missing = !target.exists()
        || !heading.is_empty()
            && target.extension().is_some_and(|extension| extension == "md")
            && !anchors(&fs::read_to_string(&target).unwrap()).contains(heading);
    is_missing.then(|| format!("{}: {link}", document.display()))
}

#[test]
fn no_link_of_a_document_is_dead() {
    let mut found = Vec::new();
    documents(&root(), &mut found);
    assert!(found.len() > 30, "only {} documents found", found.len());
    let mut seen = 0;
    let mut dead = Vec::new();
    for document in found {
        let text = fs::read_to_string(&document).unwrap();
        for link in links(&text) {
            seen += 1;
            dead.extend(is_dead(&document, link));
        }
    }
    assert!(seen > 200, "only {seen} links found");
    assert!(dead.is_empty(), "{dead:#?}");
}

/// Files and folders between back quotes in a document: what has a slash, and is no command, option or name of several files.
fn paths(text: &str) -> impl Iterator<Item = &str> {
    let quoted = prose(text).flat_map(|line| line.split('`').skip(1).step_by(2));
    quoted.filter(|word| word.contains('/') && !word.contains([' ', '*', '{', '<', '$', '~', ':']))
}

#[test]
fn files_that_the_architecture_names_are_there() {
    let text = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let named: Vec<_> = paths(&text).collect();
    assert!(named.len() > 20, "{named:?}");
    let absent: Vec<_> = named
        .into_iter()
        .filter(|path| !root().join(path).exists())
        .collect();
    assert!(absent.is_empty(), "{absent:?}");
}

#[test]
fn dead_links_are_found() {
    let book = root().join("docs/src/cli.md");
    for link in [
        "absent.md",
        "cli.md#absent",
        "#absent",
        "https://github.com/ringsight/ringsight/blob/main/absent.md",
    ] {
        assert!(is_dead(&book, link).is_some(), "{link}");
    }
    for link in [
        "cli.md#exit-codes",
        "#ringsight-attach-pid",
        "https://example.org",
        "https://github.com/ringsight/ringsight/tree/main/vm",
    ] {
        assert_eq!(is_dead(&book, link), None);
    }
}

#[test]
fn anchors_are_those_of_the_renderers() {
    assert_eq!(
        anchor("`ringsight snapshot PID… [--json]`"),
        "ringsight-snapshot-pid---json"
    );
    assert_eq!(
        anchor("Why (in short), [as measured](performance.md) here"),
        "why-in-short-as-measured-here"
    );
}

#[test]
fn every_page_is_in_the_summary() {
    let folder = root().join("docs/src");
    let summary = fs::read_to_string(folder.join("SUMMARY.md")).unwrap();
    let named: BTreeSet<_> = links(&summary).into_iter().collect();
    let mut found = Vec::new();
    documents(&folder, &mut found);
    for page in found {
        let name = page.file_name().unwrap().to_str().unwrap();
        assert!(name == "SUMMARY.md" || named.contains(name), "{name}");
    }
}
