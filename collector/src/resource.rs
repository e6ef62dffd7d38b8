//! Where spans come from, as OpenTelemetry resource attributes.

use std::{collections::BTreeSet, sync::Arc};

use ringsight_exporters::model::{Attribute, Resource, Value};
use ringsight_probes::{process::own_start_time, sample::Process};

use crate::{
    identity::process_identity,
    limits::{LeftOut, Limit, Limits},
};

/// Attribute names taken from all targets' `OTEL_RESOURCE_ATTRIBUTES` that are kept for the life of the collector.
const FOREIGN_NAMES: usize = 1024;
/// The longest of them, in bytes.
const NAME_BYTES: usize = 128;

/// Variables in which launchers tell a process its rank in the job.
const RANKS: [&str; 3] = ["RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK"];

/// Variables in which schedulers tell a process the name of its job.
const JOB_NAMES: [&str; 2] = ["SLURM_JOB_NAME", "JOB_NAME"];

/// Who names the service if not the target.
#[derive(Clone, Debug, Default)]
pub struct Service {
    /// Whatever the target says.
    pub always: Option<Arc<str>>,
    /// If the target says nothing.
    pub default: Option<Arc<str>>,
}

/// Resource of a process.
///
/// Later ones win: `service.default`, `OTEL_RESOURCE_ATTRIBUTES` of the target, what is known of the process,
/// `OTEL_SERVICE_NAME` of the target, `service.always`. Where none of them names the service, the job's name does, or else
/// the executable's. The instance is the process among all hosts; `ccl.job.rank`
/// is the rank that the launcher gave the process. `host.id` and `host.name` are always there: without them Jaeger takes each span for another host's.
#[must_use]
pub fn of_process(process: &Process, service: &Service, names: &mut Names) -> Resource {
    let environment = |name: &str| {
        let found = process
            .environment
            .iter()
            .find(|(key, value)| key == name && !value.is_empty());
        found.map(|(_, value)| value.as_str())
    };
    let mut attributes: Vec<Attribute> = Vec::new();
    match environment("OTEL_RESOURCE_ATTRIBUTES").map_or(Ok(Vec::new()), listed) {
        Ok(pairs) => {
            for (name, value) in pairs {
                if attributes.len() >= names.attributes {
                    names.left_out.count(Limit::ResourceAttributes);
                } else if let Some(name) = names.keep(&name) {
                    let value = names.cut(&value);
                    set(&mut attributes, name, value);
                }
            }
        }
        Err(problem) if names.is_new(problem) => tracing::warn!(
            pid = process.pid,
            "OTEL_RESOURCE_ATTRIBUTES of process {} is ignored: {problem}; other processes with this problem are not named",
            process.pid
        ),
        Err(_) => {}
    }
    let named = environment("OTEL_SERVICE_NAME").map(|name| names.cut(name));
    match service.always.clone().map(Value::Text).or(named) {
        Some(service) => set(&mut attributes, "service.name", service),
        None if attributes.iter().any(|(name, _)| *name == "service.name") => {}
        None if service.default.is_some() => {
            attributes.extend(service.default.clone().map(|s| ("service.name", Value::Text(s))));
        }
        None => {
            let job = JOB_NAMES.iter().find_map(|name| environment(name));
            let name = names.cut(job.unwrap_or(&process.name));
            set(&mut attributes, "service.name", name);
        }
    }
    set(&mut attributes, "service.instance.id", text(&instance(process)));
    let launched = RANKS
        .iter()
        .find_map(|name| environment(name)?.parse::<u32>().ok());
    if let Some(rank) = launched {
        set(&mut attributes, "ccl.job.rank", Value::Int(i64::from(rank)));
    }
    set(&mut attributes, "host.id", text(&process.host_id));
    set(&mut attributes, "host.name", text(&process.host_name));
    set(&mut attributes, "process.pid", Value::Int(i64::from(process.pid)));
    set(&mut attributes, "process.executable.name", text(&process.name));
    for (name, variable) in [
        ("slurm.job.id", "SLURM_JOB_ID"),
        ("torchelastic.run.id", "TORCHELASTIC_RUN_ID"),
    ] {
        if let Some(value) = environment(variable) {
            let value = names.cut(value);
            set(&mut attributes, name, value);
        }
    }
    Resource { attributes }
}

/// Resource of one rank in a process, which is an instance of its own. What the process brought is not read again.
#[must_use]
pub fn of_rank(of_process: &Resource, process: &Process, rank: u32) -> Resource {
    let mut attributes = of_process.attributes.clone();
    let instance = format!("{}/{rank}", instance(process));
    set(&mut attributes, "service.instance.id", text(&instance));
    set(&mut attributes, "ccl.job.rank", Value::Int(i64::from(rank)));
    Resource { attributes }
}

/// Name of a process by what every collector finds of it: unique, and the same after a collector's restart.
fn instance(process: &Process) -> String {
    let identity = process_identity(&process.host_id, process.pid, process.start_time);
    format!("{identity:016x}")
}

/// Resource of the collector itself.
#[must_use]
pub fn of_collector() -> Resource {
    let read = |path: &str| {
        std::fs::read_to_string(path)
            .map(|text| text.trim().to_owned())
            .unwrap_or_default()
    };
    let name = read("/proc/sys/kernel/hostname");
    let id = Some(read("/etc/machine-id"))
        .filter(|id| !id.is_empty())
        .unwrap_or_else(|| name.clone());
    Resource {
        attributes: vec![
            ("service.name", Value::Static("ringsight")),
            ("service.version", Value::Static(env!("CARGO_PKG_VERSION"))),
            (
                "service.instance.id",
                text(&format!(
                    "{:016x}",
                    process_identity(&id, std::process::id(), own_start_time())
                )),
            ),
            ("host.id", text(&id)),
            ("host.name", text(&name)),
            ("process.pid", Value::Int(i64::from(std::process::id()))),
        ],
    }
}

/// `ncclGetVersion`'s number as people write it; empty if it is 0.
#[must_use]
pub fn version(number: u32) -> String {
    match number {
        0 => String::new(),
        // NCCL's own change of scheme: 2.9 and later have five digits.
        n if n < 10_000 => format!("{}.{}.{}", n / 1000, n / 100 % 10, n % 100),
        n => format!("{}.{}.{}", n / 10_000, n / 100 % 100, n % 100),
    }
}

fn text(value: &str) -> Value {
    Value::Text(value.into())
}

fn set(attributes: &mut Vec<Attribute>, name: &'static str, value: Value) {
    match attributes.iter_mut().find(|(known, _)| *known == name) {
        Some((_, old)) => *old = value,
        None => attributes.push((name, value)),
    }
}

/// Attribute names that targets brought, what was wrong with lists of them, and how much more they may bring.
#[derive(Debug)]
pub struct Names {
    kept: BTreeSet<&'static str>,
    problems: BTreeSet<Malformed>,
    /// Of one process.
    attributes: usize,
    text_bytes: usize,
    left_out: LeftOut,
}

impl Default for Names {
    fn default() -> Self {
        Self::new(&Limits::default())
    }
}

impl Names {
    /// Knows none.
    #[must_use]
    pub fn new(limits: &Limits) -> Self {
        Self {
            kept: BTreeSet::new(),
            problems: BTreeSet::new(),
            attributes: limits.resource_attributes,
            text_bytes: limits.text_bytes,
            left_out: LeftOut::default(),
        }
    }

    /// What processes brought beyond their limits.
    #[must_use]
    pub fn left_out(&self) -> &LeftOut {
        &self.left_out
    }

    /// The one kept copy of a name; `None` for an unusable one or one too many.
    fn keep(&mut self, name: &str) -> Option<&'static str> {
        if name.is_empty() || name.len() > NAME_BYTES {
            return None;
        }
        if let Some(known) = self.kept.get(name) {
            return Some(known);
        }
        if self.kept.len() >= FOREIGN_NAMES {
            self.left_out.count(Limit::ResourceAttributes);
            return None;
        }
        // Exporters take static names only; how much is leaked is bounded above.
        let kept: &'static str = Box::leak(name.to_owned().into_boxed_str());
        self.kept.insert(kept);
        Some(kept)
    }

    /// A text that a process brought, cut at a character's end where it is too long.
    fn cut(&mut self, brought: &str) -> Value {
        let end = brought.floor_char_boundary(self.text_bytes);
        if end < brought.len() {
            self.left_out.count(Limit::TextBytes);
        }
        text(&brought[..end])
    }

    /// Whether `problem` was not met before; it is from now on.
    fn is_new(&mut self, problem: Malformed) -> bool {
        self.problems.insert(problem)
    }
}

/// What is wrong with a list of resource attributes. Its text is the target's, so no part of it is shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, thiserror::Error)]
enum Malformed {
    #[error("an entry is not NAME=VALUE")]
    NoPair,
    #[error("an entry has no name")]
    NoName,
    #[error("a % is not followed by two hexadecimal digits; write % itself as %25")]
    Escape,
    #[error("a percent-encoded text is not UTF-8")]
    Encoding,
}

/// The attributes that `OTEL_RESOURCE_ATTRIBUTES` lists, decoded. By OpenTelemetry's specification, a list with any error counts as a
/// whole for nothing. Entries without any text are none.
fn listed(list: &str) -> Result<Vec<(String, String)>, Malformed> {
    let entries = list.split(',').map(str::trim).filter(|entry| !entry.is_empty());
    let pair = |entry: &str| {
        let (name, value) = entry.split_once('=').ok_or(Malformed::NoPair)?;
        let name = percent_decoded(name.trim())?;
        if name.is_empty() {
            return Err(Malformed::NoName);
        }
        Ok((name, percent_decoded(value.trim())?))
    };
    entries.map(pair).collect()
}

/// Percent-decoding as in W3C Baggage.
fn percent_decoded(text: &str) -> Result<String, Malformed> {
    let mut decoded = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        if byte != b'%' {
            decoded.push(byte);
            rest = tail;
            continue;
        }
        let digit = |at: usize| {
            let digit = tail.get(at).and_then(|&digit| char::from(digit).to_digit(16));
            digit.ok_or(Malformed::Escape)
        };
        // Two digits make a byte.
        decoded.push((digit(0)? << 4 | digit(1)?) as u8);
        rest = &tail[2..];
    }
    String::from_utf8(decoded).map_err(|_| Malformed::Encoding)
}

#[cfg(test)]
mod tests {
    use ringsight_probes::sample::Owner;

    use super::*;

    fn process(environment: &[(&str, &str)]) -> Process {
        Process {
            pid: 42,
            start_time: 1,
            name: "train".into(),
            library: "/lib/libnccl.so.2".into(),
            library_version: 22_809,
            host_id: "h1".into(),
            host_name: "node-1".into(),
            owner: Owner::default(),
            instrumented: true,
            environment: environment
                .iter()
                .map(|(k, v)| ((*k).into(), (*v).into()))
                .collect(),
        }
    }

    /// Of a process, or of a rank in it.
    fn of(process: &Process, service: &Service, names: &mut Names, rank: Option<u32>) -> Resource {
        let resource = of_process(process, service, names);
        rank.map_or_else(|| resource.clone(), |rank| of_rank(&resource, process, rank))
    }

    fn value(resource: &Resource, name: &str) -> Option<Value> {
        resource
            .attributes
            .iter()
            .find(|(key, _)| *key == name)
            .map(|(_, value)| value.clone())
    }

    #[test]
    fn who_names_the_service() {
        let named = [
            ("OTEL_SERVICE_NAME", "a"),
            ("OTEL_RESOURCE_ATTRIBUTES", "service.name=b,team=x%20y"),
        ];
        let named_by = |environment: &[(&str, &str)], service: Option<&str>| {
            let service = Service {
                always: service.map(Arc::from),
                default: None,
            };
            value(
                &of(&process(environment), &service, &mut Names::default(), Some(3)),
                "service.name",
            )
        };
        assert_eq!(named_by(&named, Some("c")), Some(text("c")));
        assert_eq!(named_by(&named, None), Some(text("a")));
        assert_eq!(named_by(&named[1..], None), Some(text("b")));
        let job = [("JOB_NAME", "e"), ("SLURM_JOB_NAME", "d")];
        assert_eq!(named_by(&job, None), Some(text("d")));
        assert_eq!(named_by(&job[..1], None), Some(text("e")));
        assert_eq!(named_by(&[], None), Some(text("train")));
        let resource = of(
            &process(&named),
            &Service::default(),
            &mut Names::default(),
            Some(3),
        );
        assert_eq!(value(&resource, "team"), Some(text("x y")));
        assert_eq!(value(&resource, "host.name"), Some(text("node-1")));
    }

    #[test]
    fn an_instance_is_one_process_or_rank_among_all_and_stays_the_same() {
        let instance = |change: fn(&mut Process), rank| {
            let (service, mut names) = (Service::default(), Names::default());
            let mut process = process(&[("RANK", "5")]);
            change(&mut process);
            match value(&of(&process, &service, &mut names, rank), "service.instance.id") {
                Some(Value::Text(text)) => text.to_string(),
                other => panic!("{other:?}"),
            }
        };
        let same: fn(&mut Process) = |_| ();
        let all = [
            instance(same, Some(3)),
            instance(same, Some(4)),
            instance(same, None),
            // Another job's rank 3: elsewhere, beside it, after it.
            instance(|process| process.host_id = "h2".into(), Some(3)),
            instance(|process| process.pid = 43, Some(3)),
            instance(|process| process.start_time = 2, Some(3)),
        ];
        assert_eq!(all.iter().collect::<BTreeSet<_>>().len(), all.len(), "{all:?}");
        // A collector that comes later finds the same, whatever the process is called by then.
        assert_eq!(
            instance(|process| process.name = "renamed".into(), Some(3)),
            all[0]
        );
        assert_eq!(
            all[2],
            format!("{:016x}", process_identity("h1", 42, 1)),
            "the formula of the book"
        );
        assert_eq!(all[0], format!("{}/3", all[2]));
    }

    #[test]
    fn the_rank_is_the_communicators_then_the_launchers() {
        let rank_of = |environment: &[(&str, &str)], rank| {
            let (service, mut names) = (Service::default(), Names::default());
            value(
                &of(&process(environment), &service, &mut names, rank),
                "ccl.job.rank",
            )
        };
        let launched = [("PMIX_RANK", "6"), ("RANK", "5")];
        assert_eq!(rank_of(&launched, Some(3)), Some(Value::Int(3)));
        assert_eq!(rank_of(&launched, None), Some(Value::Int(5)));
        assert_eq!(rank_of(&launched[..1], None), Some(Value::Int(6)));
        assert_eq!(rank_of(&[("RANK", "")], None), None);
        assert_eq!(rank_of(&[("RANK", "first")], None), None);
    }

    #[test]
    fn no_two_attributes_have_one_name() {
        let bad = [("OTEL_RESOURCE_ATTRIBUTES", "host.id=evil,a=1, ,a=2,")];
        let resource = of(&process(&bad), &Service::default(), &mut Names::default(), None);
        let mut names: Vec<_> = resource.attributes.iter().map(|(name, _)| *name).collect();
        names.sort_unstable();
        let count = names.len();
        names.dedup();
        assert_eq!(names.len(), count);
        assert_eq!(value(&resource, "host.id"), Some(text("h1")));
    }

    #[test]
    fn a_malformed_list_counts_for_nothing_and_is_told_once() {
        let mut names = Names::default();
        for (list, problem) in [
            ("team=x,broken", Malformed::NoPair),
            ("team=x, =y", Malformed::NoName),
            ("team=x,load=100%", Malformed::Escape),
            ("team=x,load=%4", Malformed::Escape),
            ("team=x,load=%zz", Malformed::Escape),
            ("team=x,%C3=y", Malformed::Encoding),
        ] {
            assert_eq!(listed(list), Err(problem), "{list}");
            let environment = [("OTEL_RESOURCE_ATTRIBUTES", list)];
            let resource = of(&process(&environment), &Service::default(), &mut names, None);
            assert_eq!(value(&resource, "team"), None, "{list}");
            assert!(!names.is_new(problem), "{problem} was told");
        }
        let list = " team = x%20y , load=100%25,%C3%A4=b=c,, ";
        let pairs = [("team", "x y"), ("load", "100%"), ("ä", "b=c")];
        let pairs = pairs.map(|(name, value)| (name.to_owned(), value.to_owned()));
        assert_eq!(listed(list), Ok(pairs.to_vec()));
    }

    #[test]
    fn what_a_process_brings_is_bounded() {
        let many: Vec<String> = (0..200).map(|n| format!("name-{n}=x")).collect();
        let long = "ö".repeat(5000);
        let environment = [
            ("OTEL_RESOURCE_ATTRIBUTES", many.join(",")),
            ("OTEL_SERVICE_NAME", long),
        ];
        let mut process = process(&[]);
        process.environment = environment.map(|(name, value)| (name.into(), value)).into();
        let mut names = Names::default();
        let resource = of(&process, &Service::default(), &mut names, None);
        let limits = Limits::default();
        let brought = resource
            .attributes
            .iter()
            .filter(|(name, _)| name.starts_with("name-"));
        assert_eq!(brought.count(), limits.resource_attributes);
        let Some(Value::Text(service)) = value(&resource, "service.name") else {
            panic!("{resource:?}")
        };
        assert_eq!(service.len(), limits.text_bytes);
        let left_out: Vec<_> = names.left_out().iter().collect();
        let expected = (200 - limits.resource_attributes) as u64;
        assert_eq!(
            left_out,
            [(Limit::ResourceAttributes, expected), (Limit::TextBytes, 1)]
        );
    }

    #[test]
    fn versions_are_written_as_people_do() {
        assert_eq!(version(22_809), "2.28.9");
        assert_eq!(version(2_708), "2.7.8");
        assert_eq!(version(0), "");
    }

    proptest::proptest! {
        #[test]
        fn any_environment_is_survived(text in ".*") {
            let _ = of(&process(&[("OTEL_RESOURCE_ATTRIBUTES", &text)]), &Service::default(), &mut Names::default(), None);
        }
    }
}
