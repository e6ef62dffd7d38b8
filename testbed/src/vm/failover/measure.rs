//! Measurements of failover (`cargo xtask vm failover --measure`).
//!
//! A run is a case with a number (`run=N`). All times are those of an emulated machine, and the report says so.

use std::collections::BTreeMap;

use clap::ValueEnum;
use serde_json::{Value, json};

use crate::stats::{mean, mean_ratio, quantile};

/// Time-out of the runs in which nothing tells of the failure, in milliseconds.
const TIMEOUT: u32 = 300;
/// Pairs of runs whose costs and rates are compared: so many that what is between two of them by chance does not hide 3 %.
const PAIRS: usize = 200;
/// How far two sides may be apart that cost the same: how many packets have acknowledgements of their own is chance.
const SAME: f64 = 0.001;
/// The same of the rate after a switch. These are longer, for it is a rate that is asked for, and not what comes once after a switch.
const LONG_PAIRS: usize = 30;
/// Runs of a failback.
const FAILBACKS: usize = 20;
/// The same after a minute of flapping: of the sender's port, the receiver's, and both.
const FLAPPINGS: usize = 3;

/// What can be measured by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub(super) enum Part {
    /// What it costs when nothing fails.
    Cost,
    /// The way back after a minute of flapping.
    Flapping,
    /// The way back after one failure.
    Failback,
    /// The rate after a switch.
    Rate,
    /// The time to the first step on the backup, by time-out alone.
    Timeout,
    /// The same by event.
    Event,
}

/// What a run is of; its case without its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Group {
    /// A port goes down, and says so.
    Event,
    /// Packets are lost, and nothing says so.
    Silence,
    /// A long transfer whose primary fails at its beginning, for good.
    Switched,
    /// The same over the backup from the beginning.
    Alone,
    /// The port is up again, while the transfer goes on.
    Failback,
    /// The port goes down and up for a minute.
    Flapping,
    /// Nothing fails, with failover.
    On,
    /// And without.
    Off,
}

display_by_name!(Group);

impl Group {
    fn case(self, run: usize) -> String {
        let side = ["sender", "receiver", "both"][run % 3];
        // What tells of one of the first steps.
        let boundary = 2 * (1 + run % 16) + 1;
        let case = match self {
            Self::Event => format!("sendrecv primary {side} {boundary} steps=32"),
            Self::Silence => format!("sendrecv silent both {boundary} steps=32 TIMEOUT_MS={TIMEOUT}"),
            Self::Switched => "sendrecv primary both 33 steps=8192 lean=1 FAILBACK=0".into(),
            Self::Alone => "sendrecv none both 0 steps=8192 lean=1 alone=1".into(),
            // Four seconds of steps.
            Self::Failback => format!("sendrecv flap {side} 17 down-ms=300 steps=200 pace-us=20000"),
            // A minute of flapping and 40 s in peace: the longest back-off and some.
            Self::Flapping => {
                format!("sendrecv flap {side} 17 flaps=300 down-ms=100 steps=2000 pace-us=50000")
            }
            Self::On => "sendrecv none both 0 steps=1024 lean=1".into(),
            Self::Off => "sendrecv none both 0 steps=1024 lean=1 FAILOVER=0".into(),
        };
        format!("{case} of={self} run={run}")
    }
}

/// What a guest runs first, and nobody looks at: its emulator translates code when it is first run, which a machine does not.
pub(super) fn warm_up() -> String {
    Group::Silence.case(0).replace("run=0", "run=first")
}

/// The runs of some parts, or of all; those that are compared stand side by side.
pub(super) fn cases(runs: usize, parts: &[Part]) -> Vec<String> {
    let mut cases = Vec::new();
    for part in Part::value_variants()
        .iter()
        .filter(|part| is_wanted(parts, **part))
    {
        let (groups, most): (&[Group], usize) = match part {
            Part::Cost => (&[Group::On, Group::Off], PAIRS),
            Part::Flapping => (&[Group::Flapping], FLAPPINGS),
            Part::Failback => (&[Group::Failback], FAILBACKS),
            Part::Rate => (&[Group::Switched, Group::Alone], LONG_PAIRS),
            Part::Timeout => (&[Group::Silence], runs),
            Part::Event => (&[Group::Event], runs),
        };
        for run in 0..runs.min(most) {
            let from = cases.len();
            cases.extend(groups.iter().map(|group| group.case(run)));
            // Whoever is first in a pair is so in every other one.
            if run % 2 == 1 {
                cases[from..].reverse();
            }
        }
    }
    cases
}

/// Whether a part is one of those that were asked for; none stands for all.
fn is_wanted(parts: &[Part], part: Part) -> bool {
    parts.is_empty() || parts.contains(&part)
}

/// Number, median, 99th percentile and greatest of some values.
pub(super) fn spread(mut values: Vec<f64>) -> Value {
    values.sort_by(f64::total_cmp);
    json!({
        "runs": values.len(),
        "p50": quantile(&values, 0.5),
        "p99": quantile(&values, 0.99),
        "max": values.last(),
    })
}

/// Results by group.
struct Runs<'a>(&'a BTreeMap<String, Value>);

impl Runs<'_> {
    fn of(&self, group: Group) -> impl Iterator<Item = &Value> {
        let word = format!("of={group}");
        self.0
            .iter()
            .filter(move |(case, _)| case.split_whitespace().any(|own| own == word))
            .map(|(_, outcome)| outcome)
    }

    fn values(&self, group: Group, key: &str) -> Vec<f64> {
        self.of(group)
            .filter_map(|outcome| outcome[key].as_f64())
            .collect()
    }

    /// Of runs side by side, what the first have over what the others have.
    fn ratios(&self, groups: [Group; 2], key: &str) -> Vec<f64> {
        let of = |group: Group, run: usize| {
            self.0
                .get(&group.case(run))
                .and_then(|outcome| outcome[key].as_f64())
        };
        let pair = |run| Some((of(groups[0], run)?, of(groups[1], run)?));
        (0..PAIRS)
            .filter_map(pair)
            .map(|(first, second)| first / second)
            .collect()
    }
}

/// A figure, what it should be, and whether it is.
fn against(value: Option<f64>, goal: f64, is_met: impl Fn(f64, f64) -> bool) -> Value {
    json!({ "is": value, "goal": goal, "met": value.is_some_and(|value| is_met(value, goal)) })
}

/// The table, on standard output, and its figures in one line of JSON; whether all runs are right and all goals are met.
pub(super) fn report(results: &BTreeMap<String, Value>, parts: &[Part]) -> (Value, bool) {
    let runs = Runs(results);
    let wrong: Vec<&String> = results
        .iter()
        .filter(|(_, outcome)| {
            let has = |key: &str| outcome[key].as_array().is_some_and(|list| !list.is_empty());
            let is_odd = has("lost") || has("kernel_warnings");
            outcome["ok"] != true || outcome["counts"] != true || is_odd
        })
        .map(|(case, _)| case)
        .collect();
    // The first byte is there when the first step is known to be: a switch that is told of has moved none yet.
    let event = spread(runs.values(Group::Event, "recovered_ms"));
    let silence = spread(runs.values(Group::Silence, "recovered_ms"));
    let event_switch = spread(runs.values(Group::Event, "switch_ms"));
    let silence_switch = spread(runs.values(Group::Silence, "switch_ms"));
    let failback = spread(runs.values(Group::Failback, "back_ms"));
    let flapping = spread(runs.values(Group::Flapping, "back_ms"));
    let (switched, switched_error) = mean_ratio(&runs.ratios([Group::Switched, Group::Alone], "mib_per_s"));
    let (cost, cost_error) = mean_ratio(&runs.ratios([Group::On, Group::Off], "mib_per_s"));
    println!(
        "{:<24} {:>6} {:>9} {:>9} {:>9}",
        "", "runs", "p50 ms", "p99 ms", "max ms"
    );
    for (name, times) in [
        ("by event", &event),
        ("by event, switched", &event_switch),
        ("by time-out", &silence),
        ("by time-out, switched", &silence_switch),
        ("failback", &failback),
        ("flapping", &flapping),
    ] {
        let number = |key: &str| {
            times[key]
                .as_f64()
                .map_or("-".to_owned(), |time| format!("{time:.1}"))
        };
        println!(
            "{name:<24} {:>6} {:>9} {:>9} {:>9}",
            times["runs"],
            number("p50"),
            number("p99"),
            number("max")
        );
    }
    println!(
        "rate after the switch over the backup's alone: {switched:.3} (standard error {switched_error:.3})"
    );
    println!("rate with failover over without, nothing failing: {cost:.3} (standard error {cost_error:.3})");
    // How many credits there are depends on how far the receiver is ahead: each is a request, two completions and a call.
    let mut costs = serde_json::Map::new();
    let mut per_mib_of = BTreeMap::new();
    for (key, of_credit) in [
        ("step_requests", 0.0),
        ("other_requests", 0.0),
        ("completions", 2.0),
        ("calls", 1.0),
        ("own_calls", 1.0),
        ("credits", 0.0),
        ("wire_bytes", 0.0),
    ] {
        let per_mib = |group: Group| {
            let costs = runs.of(group).filter_map(|outcome| {
                Some(outcome[key].as_f64()? - of_credit * outcome["credits"].as_f64()?)
            });
            // A run moves 1024 steps of 16 KiB.
            mean(&costs.collect::<Vec<_>>()).0 / 16.0
        };
        let (on, off) = (per_mib(Group::On), per_mib(Group::Off));
        per_mib_of.insert(key, (on, off));
        let beside = if of_credit > 0.0 { " beside credits" } else { "" };
        println!(
            "{:<30} per MiB: on {on:.2}, off {off:.2}",
            format!("{key}{beside}")
        );
        costs.insert(
            format!("{key}{}", beside.replace(' ', "_")),
            json!({ "on": on, "off": off }),
        );
    }
    let most = |value, goal| against(value, goal, |value, goal| value <= goal);
    let least = |value, goal| against(value, goal, |value, goal| value >= goal);
    // What costs the same with failover and without; how far apart the two are, and may be.
    let apart = |key: &str, most_apart: f64| {
        let apart = per_mib_of.get(key).map(|(on, off)| match on == off {
            true => 0.0,
            false => (on / off - 1.0).abs(),
        });
        most(apart.filter(|apart| apart.is_finite()), most_apart)
    };
    let calls = per_mib_of.get("calls").map(|(on, off)| on / off);
    let goals: BTreeMap<&str, Value> = [
        (Part::Event, "by_event_p99_ms", most(event["p99"].as_f64(), 200.0)),
        (
            Part::Timeout,
            "by_timeout_p99_ms",
            most(silence["p99"].as_f64(), f64::from(TIMEOUT) * 1.1 + 25.0),
        ),
        (Part::Rate, "rate_after_switch", least(Some(switched), 0.95)),
        (
            Part::Failback,
            "failback_max_ms",
            most(failback["max"].as_f64(), 2000.0),
        ),
        // The longest back-off.
        (
            Part::Flapping,
            "after_flapping_ms",
            most(flapping["max"].as_f64(), 30_000.0),
        ),
        // Also where chance has it as low as in one of forty such measurements.
        (
            Part::Cost,
            "rate_on_over_off_at_least",
            least(Some(cost * (-1.96 * cost_error).exp()), 0.97),
        ),
        (Part::Cost, "step_requests_apart", apart("step_requests", 0.0)),
        (Part::Cost, "other_requests_apart", apart("other_requests", 0.0)),
        (Part::Cost, "completions_apart", apart("completions", SAME)),
        (Part::Cost, "own_calls_apart", apart("own_calls", SAME)),
        // Of all threads; those without have more, as each begins and ends a thread that waits for events.
        (Part::Cost, "calls_on_over_off", most(calls, 1.0 + SAME)),
        (Part::Cost, "wire_bytes_apart", apart("wire_bytes", SAME)),
    ]
    .into_iter()
    .filter(|(part, ..)| is_wanted(parts, *part))
    .map(|(_, name, goal)| (name, goal))
    .collect();
    let met = goals.values().all(|goal| goal["met"] == true);
    let lists: BTreeMap<String, Vec<f64>> = Group::value_variants()
        .iter()
        .map(|&group| {
            let key = match group {
                Group::Event | Group::Silence => "recovered_ms",
                Group::Failback | Group::Flapping => "back_ms",
                _ => "mib_per_s",
            };
            let round = |value: &f64| (value * 1000.0).round() / 1000.0;
            (
                group.to_string(),
                runs.values(group, key).iter().map(round).collect(),
            )
        })
        .collect();
    let ok = wrong.is_empty() && met;
    let report = json!({
        "ok": ok,
        "runs": results.len(),
        "wrong": wrong,
        "goals": goals,
        "first_byte_on_backup_ms": { "by_event": event, "by_timeout": silence, "timeout": TIMEOUT },
        "switch_ms": { "by_event": event_switch, "by_timeout": silence_switch },
        "failback_ms": { "once": failback, "after_flapping": flapping },
        "ratios": {
            "after_switch": { "mean": switched, "error": switched_error },
            "on_over_off": { "mean": cost, "error": cost_error },
        },
        "per_mib": costs,
        "values": lists,
        "emulated": true,
    });
    (report, ok)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn runs_differ_and_pairs_stand_side_by_side() {
        let cases = cases(200, &[]);
        let different: BTreeSet<&String> = cases.iter().collect();
        assert_eq!(different.len(), cases.len());
        assert_eq!(
            cases.len(),
            2 * (PAIRS + LONG_PAIRS) + 400 + FAILBACKS + FLAPPINGS
        );
        assert!(cases[0].contains("of=on run=0") && cases[1].contains("of=off run=0"));
    }

    /// Runs of all groups that meet their goals.
    fn good(parts: &[Part]) -> BTreeMap<String, Value> {
        let outcome = json!({
            "ok": true, "counts": true, "switch_ms": 20.0, "recovered_ms": 25.0, "back_ms": 300.0, "mib_per_s": 5.0,
            "step_requests": 2048, "other_requests": 0, "credits": 1000, "completions": 4048, "calls": 2100, "own_calls": 2068,
            "wire_bytes": 17_000_000,
        });
        let cases = cases(3, parts).into_iter();
        cases.map(|case| (case, outcome.clone())).collect()
    }

    #[test]
    fn what_is_missing_or_slow_is_not_ok() {
        let mut results = good(&[]);
        let is_ok = |results: &BTreeMap<String, Value>| report(results, &[]).1;
        assert!(is_ok(&results));
        let slow = Group::Event.case(1);
        // Of a switch that comes in time and moves nothing for long.
        results.get_mut(&slow).unwrap()["recovered_ms"] = json!(900.0);
        assert!(!is_ok(&results));
        results.remove(&slow);
        assert!(is_ok(&results));
        results.get_mut(&Group::On.case(1)).unwrap()["lost"] = json!(["the guest died"]);
        assert!(!is_ok(&results));
        results.remove(&Group::On.case(1));
        assert!(is_ok(&results));
        for run in 0..FLAPPINGS {
            assert!(is_ok(&results));
            results.remove(&Group::Flapping.case(run));
        }
        assert!(!is_ok(&results));
    }

    #[test]
    fn failover_that_costs_anything_is_not_ok() {
        let parts = [Part::Cost];
        assert!(report(&good(&parts), &parts).1);
        assert!(!report(&good(&parts), &[]).1, "the other parts are missing");
        for (key, value) in [
            ("step_requests", json!(2049)),
            ("other_requests", json!(1)),
            ("completions", json!(4070)),
            ("own_calls", json!(2080)),
            ("calls", json!(2200)),
            ("wire_bytes", json!(17_100_000)),
            ("mib_per_s", json!(4.5)),
        ] {
            let mut results = good(&parts);
            for run in 0..3 {
                results.get_mut(&Group::On.case(run)).unwrap()[key] = value.clone();
            }
            assert!(!report(&results, &parts).1, "{key}");
        }
    }
}
