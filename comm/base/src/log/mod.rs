//! Log lines as NCCL writes them, chosen by `NCCL_DEBUG` and its companions.
//!
//! The library's events are `tracing` events whose target is one of the subsystems below. When `NCCL_DEBUG` asks for
//! lines, a subscriber that prints them becomes the global one of the `tracing` in this binary: the shared library has
//! its own, so an application's is never touched; in a Rust program that links this crate, whoever comes first is the
//! subscriber. When nothing asks for lines there is no subscriber, and an event costs one relaxed load.
//!
//! Levels: `warn!` is NCCL's WARN, `info!` INFO, `debug!` ABORT, `trace!` TRACE; the version has a level of its own, below
//! WARN ([`version`]). No call ever fails because a line cannot be written, or waits for long because nobody reads it
//! (`writer`).

mod line;
mod settings;
mod writer;

use std::{
    collections::BTreeSet,
    sync::{Arc, Mutex, Once, OnceLock, PoisonError, RwLock},
};

use tracing::{
    Event, Metadata, Subscriber,
    level_filters::LevelFilter,
    span::{Attributes, Id, Record},
    subscriber::Interest,
};

use crate::variables::{self, Source};
use settings::{Level, Settings};

macro_rules! subsystems {
    ($($(#[$meta:meta])* $name:ident = $bit:literal;)+) => {
        $($(#[$meta])* pub const $name: &str = concat!("nccl::", stringify!($name));)+

        /// Names and bits of the subsystems, as `NCCL_DEBUG_SUBSYS` lists them.
        const SUBSYSTEMS: &[(&str, u32)] = &[$((stringify!($name), 1 << $bit)),+];
    };
}

#[allow(
    dead_code,
    reason = "a subsystem that a user may name exists before its first line does"
)]
mod targets {
    subsystems! {
        /// Making and ending communicators.
        INIT = 0;
        /// Operations as they are called.
        COLL = 1;
        /// Connections within a process or between GPUs.
        P2P = 2;
        /// Connections through shared memory.
        SHM = 3;
        /// Connections through the network.
        NET = 4;
        /// Topology: rings and channels.
        GRAPH = 5;
        /// Chosen algorithms.
        TUNING = 6;
        /// Environment variables that are set.
        ENV = 7;
        /// Memory.
        ALLOC = 8;
        /// Every call.
        CALL = 9;
        /// The proxy.
        PROXY = 10;
        /// NVLink SHARP.
        NVLS = 11;
        /// How ranks find each other.
        BOOTSTRAP = 12;
        /// Registered buffers.
        REG = 13;
        /// Profilers.
        PROFILE = 14;
        /// Watching ranks.
        RAS = 15;
    }

    /// The bit of a subsystem by its name or its target.
    pub(super) fn bit(name: &str) -> Option<u32> {
        SUBSYSTEMS
            .iter()
            .find(|(known, _)| known.eq_ignore_ascii_case(name))
            .map(|(_, bit)| *bit)
    }
}
pub use targets::*;

/// What the environment asked for when it was last read.
static SETTINGS: RwLock<Option<Arc<Settings>>> = RwLock::new(None);
static STARTED: Once = Once::new();
/// Gives the device number that is current on the calling thread.
static CURRENT_DEVICE: OnceLock<fn() -> Option<i32>> = OnceLock::new();

/// Has lines show the device number that `current` gives, from now on; -1 stands for none. The first caller's function stays.
pub fn show_device(current: fn() -> Option<i32>) {
    let _ = CURRENT_DEVICE.set(current);
}

fn current_device() -> i32 {
    let current = CURRENT_DEVICE.get().and_then(|current| current());
    current.unwrap_or(-1)
}

fn settings() -> Option<Arc<Settings>> {
    SETTINGS.read().unwrap_or_else(PoisonError::into_inner).clone()
}

/// Reads the environment if that has not been done: at the first call into the library.
pub fn start() {
    // A panic of an application's subscriber, which is told of complaints, costs those.
    STARTED.call_once(|| {
        let _ = std::panic::catch_unwind(apply);
    });
}

/// Reads the environment again (`ncclResetDebugInit`).
pub fn reset() {
    // Whoever comes first reads it, and reading it twice in a row does no harm.
    STARTED.call_once(|| ());
    apply();
}

fn apply() {
    let before = settings();
    let settings = Settings::read(
        &|name| variables::find(name).map(|(value, _)| value),
        before.as_deref(),
    );
    let wants_lines = settings.level > Level::Version;
    let complaints = [variables::complaints(), &settings.complaints].concat();
    *SETTINGS.write().unwrap_or_else(PoisonError::into_inner) = Some(Arc::new(settings));
    if wants_lines && before.is_none_or(|before| before.level <= Level::Version) {
        // Fails if it has been set, by us earlier or by an application that links this crate: then theirs it is.
        let _ = tracing::subscriber::set_global_default(Printer);
    }
    tracing::callsite::rebuild_interest_cache();
    for complaint in complaints {
        tracing::warn!(target: ENV, "{complaint}");
    }
    for (name, why) in WITHOUT_EFFECT {
        if variables::find(name).is_some() {
            tracing::info!(target: ENV, "{name} has no effect: {why}");
        }
    }
}

/// Variables of NCCL that choose what there is no choice of here, or by another name.
const WITHOUT_EFFECT: [(&str, &str); 6] = [
    ("NCCL_ALGO", "RINGSIGHT_ALGO chooses"),
    ("NCCL_PROTO", "RINGSIGHT_PROTO chooses"),
    ("NCCL_NTHREADS", "each kernel has as many as it is made for"),
    (
        "NCCL_P2P_LEVEL",
        "the driver says which GPUs NVLink joins; NCCL_P2P_DISABLE keeps them apart",
    ),
    ("NCCL_NVLS_ENABLE", "nothing goes by multicast"),
    (
        "NCCL_CUMEM_ENABLE",
        "memory is shared as it was made, by cudaMalloc or mapped in pieces",
    ),
];

/// Writes the version line of a library with this number (`MAJOR * 10000 + MINOR * 100 + PATCH`). It is the only line that
/// `NCCL_DEBUG=VERSION` asks for; rank 0 of every communicator writes it.
pub fn version(number: u32) {
    let text = format!(
        "NCCL version {}+ringsight{}",
        dotted(number),
        env!("CARGO_PKG_VERSION")
    );
    match settings() {
        Some(settings) if matches!(settings.level, Level::Version | Level::Warn) => {
            writer::write(&settings.sink, format!("{text}\n"), false);
        }
        _ => tracing::info!(target: INIT, "{text}"),
    }
}

/// Says something whatever `NCCL_DEBUG` asks for, as warnings.
pub fn alarm(device: i32, texts: &[String]) {
    if let Some(settings) = settings() {
        let lines: String = texts
            .iter()
            .map(|text| line::alarm(text, device, &settings))
            .collect();
        writer::write(&settings.sink, format!("\n{lines}"), true);
    }
}

/// That so many lines could not be written.
fn lost(count: u64) -> String {
    let text = format!("nobody has read this for long, and what was said meanwhile is lost: {count} lines");
    match settings() {
        Some(settings) => line::alarm(&text, -1, &settings),
        None => format!("{text}\n"),
    }
}

fn dotted(version: u32) -> String {
    format!("{}.{}.{}", version / 10000, version / 100 % 100, version % 100)
}

/// Logs once in the life of the process that `source` has set a variable.
pub(crate) fn variable_set(name: &str, value: &str, source: &Source) {
    static SAID: Mutex<BTreeSet<String>> = Mutex::new(BTreeSet::new());
    if !tracing::enabled!(target: ENV, tracing::Level::INFO) {
        return;
    }
    let fresh = SAID
        .lock()
        .unwrap_or_else(PoisonError::into_inner)
        .insert(name.to_owned());
    if fresh {
        tracing::info!(target: ENV, "{name} set by {source} to {value}.");
    }
}

/// Prints events.
struct Printer;

fn wants(metadata: &Metadata<'_>) -> bool {
    let Some(name) = metadata.target().strip_prefix("nccl::") else {
        return false;
    };
    let level = Level::of(*metadata.level());
    settings().is_some_and(|settings| {
        // Whatever goes wrong is said, whichever subsystem it is of.
        level <= settings.level
            && (level == Level::Warn || bit(name).is_some_and(|bit| settings.mask & bit != 0))
    })
}

impl Subscriber for Printer {
    fn register_callsite(&self, metadata: &'static Metadata<'static>) -> Interest {
        // Asked again after each reading of the environment.
        if !metadata.is_span() && wants(metadata) {
            Interest::always()
        } else {
            Interest::never()
        }
    }

    fn enabled(&self, metadata: &Metadata<'_>) -> bool {
        !metadata.is_span() && wants(metadata)
    }

    fn max_level_hint(&self) -> Option<LevelFilter> {
        Some(settings().map_or(LevelFilter::OFF, |settings| settings.level.filter()))
    }

    fn new_span(&self, _: &Attributes<'_>) -> Id {
        // No span is ever enabled; ids are never 0.
        Id::from_u64(1)
    }

    fn record(&self, _: &Id, _: &Record<'_>) {}

    fn record_follows_from(&self, _: &Id, _: &Id) {}

    fn event(&self, event: &Event<'_>) {
        if let Some(settings) = settings() {
            let urgently = Level::of(*event.metadata().level()) == Level::Warn;
            writer::write(&settings.sink, line::of(event, &settings), urgently);
        }
    }

    fn enter(&self, _: &Id) {}

    fn exit(&self, _: &Id) {}
}
