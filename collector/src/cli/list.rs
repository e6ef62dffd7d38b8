//! `ringsight list`: what would be probed in a process, and what it would cost, without touching it.

use ringsight_collector::resource;
use ringsight_output::Printable;
use ringsight_probes::{
    LeftOut, Look, kernel,
    site::{self, Site},
    target::{self, Flavour, Library},
};
use ringsight_records::{DeviceClock, pages::Communicator};
use serde_json::{Value, json};
use tracing::{error, warn};

use super::{Exit, print, print_json};

/// Runs the command.
pub(crate) fn run(pid: u32, json: bool) -> Exit {
    let mut left_out = LeftOut::default();
    let library = match target::find_counting(pid, &mut left_out) {
        Ok(library) => library,
        Err(error) => {
            error!(pid, "{error}");
            return Exit::Error;
        }
    };
    for (limit, _) in left_out.limits() {
        warn!(pid, "not everything was looked at: {limit}");
    }
    let kernel = kernel::version();
    let sites = site::plan(&library, kernel);
    let Look {
        library_version,
        communicators,
        clocks,
        ..
    } = match library.flavour {
        Flavour::Instrumented => match ringsight_probes::look(pid) {
            Ok(look) => look,
            Err(error) => {
                error!(pid, "{error}");
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
        let value = to_json(pid, &library, &version, &sites, &communicators, &clocks);
        return print_json(&value);
    }
    let mut text = to_text(pid, &library, &version, kernel, &sites, &communicators);
    clocks_to_text(&clocks, &mut text);
    print(&text)
}

fn flavour(library: &Library) -> &'static str {
    match library.flavour {
        Flavour::Instrumented => "instrumented",
        Flavour::Stock => "stock",
    }
}

/// What hits a probe. The shared ring takes the records of a library of ours, and a probe those that the ring has no room for.
fn hit_by(library: &Library) -> &'static str {
    match library.flavour {
        Flavour::Instrumented => "record_without_room",
        Flavour::Stock => "call",
    }
}

fn to_json(
    pid: u32,
    library: &Library,
    version: &str,
    sites: &[Site],
    communicators: &[Communicator],
    clocks: &[(i32, DeviceClock)],
) -> Value {
    let sites = sites.iter().map(|site| {
        json!({
            "symbol": site.symbol,
            "file_offset": site.offset,
            "offset": site.within,
            "kind": site.kind.name(),
            "returns": site.returns,
            "predicted_ns": site.predicted_ns(),
            "hit_by": hit_by(library),
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
            "apart": Some(communicator.apart()).filter(|apart| !apart.is_empty()),
        })
    });
    let clocks = clocks.iter().map(|(device, clock)| {
        json!({
            "device": device,
            "timer_ns": clock.timer_ns,
            "monotonic_ns": clock.host_ns,
            "uncertainty_ns": clock.uncertainty_ns,
            "drift_ppm": ppm(clock.drift as f64),
            "drift_uncertainty_ppm": ppm(clock.drift_uncertainty as f64),
            "step_ns": clock.resolution_ns,
            "samples": clock.samples,
            "breaks": clock.breaks,
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
        "clocks": clocks.collect::<Vec<_>>(),
    })
}

/// Of [`DeviceClock::drift`]'s unit.
fn ppm(drift: f64) -> f64 {
    drift / 1e6
}

/// Clocks that are not the host's.
fn clocks_to_text(clocks: &[(i32, DeviceClock)], text: &mut String) {
    use std::fmt::Write;
    for (device, clock) in clocks.iter().filter(|(_, clock)| clock.samples > 0) {
        // Writing to a string does not fail.
        let _ = writeln!(
            text,
            "\ndevice {device}: its timer goes in steps of {} ns, {:.3} ± {:.3} ppm slower than the host's clock; times are off by \
             {} ns at most ({} samples, {} breaks)",
            clock.resolution_ns,
            ppm(clock.drift as f64),
            ppm(clock.drift_uncertainty as f64),
            clock.uncertainty_ns,
            clock.samples,
            clock.breaks
        );
    }
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
        Printable::path(&library.path),
        flavour(library)
    );
    let _ = writeln!(
        text,
        "version {}, build id {}, kernel {major}.{minor}",
        Printable::from(if version.is_empty() { "unknown" } else { version }),
        Printable::from(if library.build_id.is_empty() {
            "none"
        } else {
            &library.build_id
        }),
    );
    let width = sites
        .iter()
        .map(|site| site.symbol.len())
        .max()
        .unwrap_or(0)
        .max("symbol".len());
    let _ = writeln!(
        text,
        "\n{:<width$}  {:>6}  {:<14}  {:>15}",
        "symbol", "offset", "site", "ns if it is hit"
    );
    for site in sites {
        let returns = if site.returns { " and return" } else { "" };
        let _ = writeln!(
            text,
            "{:<width$}  {:>6}  {:<14}  {:>15}{returns}",
            Printable::from(&*site.symbol),
            format!("+{}", site.within),
            site.kind.name(),
            site.predicted_ns()
        );
    }
    if library.flavour == Flavour::Stock {
        text.push_str(
            "\nThis library has no probe functions of ours: its calls are timed from outside. Every call hits its probe.\n",
        );
        return text;
    }
    text.push_str(
        "\nThe shared ring takes the records, and then no probe is hit. A probe is hit only by a record that the ring has no room for.\n",
    );
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
            Printable::from(communicator.name())
        );
        let _ = writeln!(text, "{}", line.trim_end());
        if !communicator.apart().is_empty() {
            let _ = writeln!(
                text,
                "    ranks do not reach each other's memory: {}",
                Printable::from(communicator.apart())
            );
        }
    }
    text
}
