//! `ringsight list`: what would be probed in a process, and what it would cost, without touching it.

use ringsight_collector::resource;
use ringsight_probes::{
    Look,
    site::{self, Site},
    target::{self, Flavour, Library},
};
use ringsight_records::pages::Communicator;
use serde_json::{Value, json};

use super::{Exit, print};

/// Runs the command.
pub(crate) fn run(pid: u32, json: bool) -> Exit {
    let library = match target::find(pid) {
        Ok(library) => library,
        Err(error) => {
            eprintln!("ringsight: {error}");
            return Exit::Error;
        }
    };
    let kernel = site::kernel_version();
    let sites = site::plan(&library, kernel);
    let Look {
        library_version,
        communicators,
        ..
    } = match library.flavour {
        Flavour::Instrumented => match ringsight_probes::look(pid) {
            Ok(look) => look,
            Err(error) => {
                eprintln!("ringsight: {error}");
                return Exit::Error;
            }
        },
        Flavour::Stock => Look::default(),
    };
    // What the running library says of itself goes before what its file looks like.
    let version = resource::version(match library_version {
        0 => library.version,
        told => told,
    });
    if json {
        let value = to_json(pid, &library, &version, &sites, &communicators);
        return print(&format!("{value:#}\n"));
    }
    print(&to_text(pid, &library, &version, kernel, &sites, &communicators))
}

fn flavour(library: &Library) -> &'static str {
    match library.flavour {
        Flavour::Instrumented => "instrumented",
        Flavour::Stock => "stock",
    }
}

fn to_json(
    pid: u32,
    library: &Library,
    version: &str,
    sites: &[Site],
    communicators: &[Communicator],
) -> Value {
    let sites = sites.iter().map(|site| {
        json!({
            "symbol": site.symbol,
            "file_offset": site.offset,
            "offset": site.within,
            "kind": site.kind.name(),
            "returns": site.returns,
            "predicted_ns": site.predicted_ns(),
        })
    });
    let communicators = communicators.iter().map(|communicator| {
        json!({
            "id": format!("{:016x}", communicator.id),
            "parent": (communicator.parent != 0).then(|| format!("{:016x}", communicator.parent)),
            "name": communicator.name(),
            "rank": communicator.rank,
            "ranks": communicator.ranks,
            "node": communicator.node,
            "nodes": communicator.nodes,
            "device": communicator.device,
            "channels": communicator.channels,
        })
    });
    json!({
        "version": 1,
        "pid": pid,
        "library": library.path,
        "library_version": version,
        "build_id": library.build_id,
        "flavour": flavour(library),
        "sites": sites.collect::<Vec<_>>(),
        "communicators": communicators.collect::<Vec<_>>(),
    })
}

fn to_text(
    pid: u32,
    library: &Library,
    version: &str,
    (major, minor): (u32, u32),
    sites: &[Site],
    communicators: &[Communicator],
) -> String {
    use std::fmt::Write;
    let mut text = String::new();
    // Writing to a string does not fail, here and below.
    let _ = writeln!(
        text,
        "process {pid}: {} ({})",
        library.path.display(),
        flavour(library)
    );
    let _ = writeln!(
        text,
        "version {}, build id {}, kernel {major}.{minor}",
        if version.is_empty() { "unknown" } else { version },
        if library.build_id.is_empty() {
            "none"
        } else {
            &library.build_id
        },
    );
    let width = sites
        .iter()
        .map(|site| site.symbol.len())
        .max()
        .unwrap_or(0)
        .max("symbol".len());
    let _ = writeln!(
        text,
        "\n{:<width$}  {:>6}  {:<14}  {:>13}",
        "symbol", "offset", "site", "predicted ns"
    );
    for site in sites {
        let returns = if site.returns { " and return" } else { "" };
        let _ = writeln!(
            text,
            "{:<width$}  {:>6}  {:<14}  {:>13}{returns}",
            site.symbol,
            format!("+{}", site.within),
            site.kind.name(),
            site.predicted_ns()
        );
    }
    if library.flavour == Flavour::Stock {
        text.push_str("\nThis library has no probe functions of ours: its calls are timed from outside.\n");
        return text;
    }
    let _ = writeln!(
        text,
        "\n{:<16}  {:>5}  {:>5}  {:>5}  {:>6}  name",
        "communicator", "rank", "ranks", "nodes", "device"
    );
    for communicator in communicators {
        let line = format!(
            "{:016x}  {:>5}  {:>5}  {:>5}  {:>6}  {}",
            communicator.id,
            communicator.rank,
            communicator.ranks,
            communicator.nodes,
            communicator.device,
            communicator.name()
        );
        let _ = writeln!(text, "{}", line.trim_end());
    }
    text
}
