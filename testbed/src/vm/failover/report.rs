//! Outcomes of cases, in words and in figures.

use std::collections::BTreeMap;

use serde_json::{Value, json};

use super::measure;

/// A case and its outcome, for people.
pub(super) fn line(case: &str, outcome: &Value) -> String {
    let word = match (outcome["ok"] == true, outcome["counts"] == true) {
        (true, true) => "ok",
        (true, false) => "MISSED",
        (false, _) => "FAILED",
    };
    let mut text = format!(
        "{case}: {word}, {} outstanding, {} replayed",
        outcome["outstanding"], outcome["replayed"]
    );
    if let Some(time) = outcome["switch_ms"].as_f64() {
        text.push_str(&format!(", switched after {time} ms"));
    }
    if let Some(time) = outcome["recovered_ms"].as_f64() {
        text.push_str(&format!(", a step over the other path after {time} ms"));
    }
    if let Some(time) = outcome["back_ms"].as_f64() {
        text.push_str(&format!(", back {time} ms after it was up"));
    }
    if let Some(error) = outcome["error"].as_str() {
        text.push_str(&format!(", ended with {error:?}"));
    }
    if let Some(why) = outcome["text"].as_str() {
        text.push_str(&format!(": {why}"));
    }
    let list = |key: &str| outcome[key].as_array().into_iter().flatten();
    for why in list("missed") {
        text.push_str(&format!("; an earlier try did not count: {why}"));
    }
    for why in list("lost") {
        text.push_str(&format!("; a GUEST WAS LOST in it: {why}"));
    }
    for warning in list("kernel_warnings") {
        text.push_str(&format!("; the kernel warned: {warning}"));
    }
    text
}

/// Everything in one line of JSON, and whether all is well.
pub(super) fn report(results: &BTreeMap<String, Value>) -> (Value, bool) {
    let is = |outcome: &Value, key: &str| outcome[key] == true;
    let failed: Vec<&String> = results
        .iter()
        .filter(|(_, outcome)| !is(outcome, "ok"))
        .map(|(case, _)| case)
        .collect();
    let missed: Vec<&String> = results
        .iter()
        .filter(|(_, outcome)| is(outcome, "ok") && !is(outcome, "counts"))
        .map(|(case, _)| case)
        .collect();
    let times = |key: &str| {
        let times = results.values().filter_map(|outcome| outcome[key].as_f64());
        measure::spread(times.collect())
    };
    let longest = |key: &str| {
        let values = results.values().filter_map(|outcome| outcome[key].as_f64());
        values.max_by(f64::total_cmp)
    };
    let ended_with_errors = results
        .values()
        .filter(|outcome| outcome["error"].is_string())
        .count();
    // That a guest died in it, or said nothing more, is a finding, whatever came of a later try.
    let has = |outcome: &Value, key: &str| outcome[key].as_array().is_some_and(|list| !list.is_empty());
    let with = |key: &str| -> Vec<&String> {
        let those = results.iter().filter(|(_, outcome)| has(outcome, key));
        those.map(|(case, _)| case).collect()
    };
    let lost = with("lost");
    // By what they say from the function on: before it are processor and process.
    let mut warnings: BTreeMap<&str, usize> = BTreeMap::new();
    for warning in results
        .values()
        .filter_map(|outcome| outcome["kernel_warnings"].as_array())
        .flatten()
        .filter_map(Value::as_str)
    {
        let text = warning.split_once(" at ").map_or(warning, |(_, place)| place);
        *warnings.entry(text).or_default() += 1;
    }
    let is_quiet = lost.is_empty() && warnings.is_empty();
    let ok = failed.is_empty() && missed.is_empty() && is_quiet && !results.is_empty();
    let report = json!({
        "ok": ok,
        "cases": results.len(),
        "failed": failed,
        "missed": missed,
        "guest_lost": lost,
        "tried_again": with("missed").len(),
        "kernel_warnings": warnings,
        "outstanding": times("outstanding"),
        "first_byte_on_backup_ms": times("recovered_ms"),
        "switch_ms": times("switch_ms"),
        "ended_with_errors": ended_with_errors,
        "longest_transfer_ms": longest("ran_ms"),
        "emulated": true,
    });
    (report, ok)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_failed_or_never_counted_is_no_success() {
        let outcome = |ok: bool, counts: bool| json!({ "ok": ok, "counts": counts, "switch_ms": 3.0 });
        let of = |outcomes: &[Value]| {
            let results = outcomes
                .iter()
                .enumerate()
                .map(|(index, outcome)| (index.to_string(), outcome.clone()));
            report(&results.collect()).1
        };
        assert!(of(&[outcome(true, true)]));
        assert!(!of(&[]));
        assert!(!of(&[outcome(true, true), outcome(true, false)]));
        assert!(!of(&[outcome(true, true), outcome(false, true)]));
        let mut lost = outcome(true, true);
        lost["lost"] = json!(["the guest died"]);
        assert!(!of(&[outcome(true, true), lost]));
        let mut warned = outcome(true, true);
        warned["kernel_warnings"] = json!(["WARNING: CPU: 0 PID: 1 at x"]);
        assert!(!of(&[outcome(true, true), warned]));
    }
}
