//! The table of all steps, for people and for machines.

use std::{collections::BTreeMap, fmt::Write as _, time::Duration};

use serde::Serialize;
use serde_json::{Value, json};

/// What a step says about itself: a detail if it has passed, the reason if not.
pub(super) type StepResult = Result<String, String>;

/// How a step ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Outcome {
    Passed,
    Failed,
    Skipped,
}

/// One step, or a part that was skipped as a whole.
#[derive(Debug, Serialize)]
struct Row {
    part: &'static str,
    /// Empty for the part itself.
    step: String,
    result: Outcome,
    seconds: f64,
    /// One line; of a failure more.
    detail: String,
}

/// What has been run so far. Each step is also told when it is over: a run that is cut short has said all until then.
#[derive(Debug, Default)]
pub(super) struct Report {
    rows: Vec<Row>,
    notes: String,
    figures: BTreeMap<&'static str, Vec<Value>>,
}

impl Report {
    pub(super) fn enter(&mut self, part: &'static str, step: &str, took: Duration, verdict: StepResult) {
        let (result, detail) = match verdict {
            Ok(detail) => (Outcome::Passed, detail),
            Err(reason) => (Outcome::Failed, reason),
        };
        self.add(part, step, result, took, detail);
    }

    pub(super) fn skip(&mut self, part: &'static str, step: &str, reason: &str) {
        self.add(part, step, Outcome::Skipped, Duration::ZERO, reason.to_owned());
    }

    fn add(&mut self, part: &'static str, step: &str, result: Outcome, took: Duration, detail: String) {
        let row = Row {
            part,
            step: step.to_owned(),
            result,
            seconds: took.as_secs_f64(),
            detail,
        };
        eprint!("{}", line(&row));
        self.rows.push(row);
    }

    /// Lines to follow the table.
    pub(super) fn note(&mut self, text: &str) {
        self.notes.push_str(text);
    }

    /// What a part has measured.
    pub(super) fn figures(&mut self, part: &'static str, figures: Value) {
        self.figures.entry(part).or_default().push(figures);
    }

    /// Whether nothing has failed.
    pub(super) fn ok(&self) -> bool {
        self.count(Outcome::Failed) == 0
    }

    fn count(&self, result: Outcome) -> usize {
        self.rows.iter().filter(|row| row.result == result).count()
    }

    /// The table: a line a step, below it what parts have to say.
    pub(super) fn table(&self) -> String {
        let mut text = String::from("\n");
        for row in &self.rows {
            text.push_str(&line(row));
        }
        if !self.notes.is_empty() {
            let _ = write!(text, "\n{}", self.notes);
        }
        text
    }

    /// Everything.
    pub(super) fn json(&self) -> Value {
        let mut all = self.totals();
        all["rows"] = json!(self.rows);
        all["figures"] = json!(self.figures);
        all
    }

    /// What counts, in one line.
    pub(super) fn summary(&self) -> Value {
        let of = |result| -> Vec<String> {
            let rows = self.rows.iter().filter(|row| row.result == result);
            rows.map(|row| {
                format!("{}/{}", row.part, row.step)
                    .trim_end_matches('/')
                    .to_owned()
            })
            .collect()
        };
        let mut all = self.totals();
        all["failed_steps"] = json!(of(Outcome::Failed));
        all["skipped_steps"] = json!(of(Outcome::Skipped));
        all
    }

    fn totals(&self) -> Value {
        json!({
            "ok": self.ok(),
            "passed": self.count(Outcome::Passed),
            "failed": self.count(Outcome::Failed),
            "skipped": self.count(Outcome::Skipped),
        })
    }
}

/// A row of the table; the reason of a failure goes on below it.
fn line(row: &Row) -> String {
    let result = match row.result {
        Outcome::Passed => "ok",
        Outcome::Failed => "FAILED",
        Outcome::Skipped => "skipped",
    };
    let time = if row.seconds > 0.0 {
        format!("{:.1} s", row.seconds)
    } else {
        String::new()
    };
    let mut lines = row.detail.lines();
    let mut text = format!(
        "{:<12} {:<26} {result:<7} {time:>8}  {}",
        row.part,
        row.step,
        lines.next().unwrap_or("")
    );
    text.truncate(text.trim_end().len());
    text.push('\n');
    for more in lines {
        let _ = writeln!(text, "      {more}");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_every_step_and_the_summary_counts_them() {
        let mut report = Report::default();
        let passed = Ok("ok 407 cases a rank".to_owned());
        report.enter("check", "2t", Duration::from_millis(1500), passed);
        report.skip("torch", "", "no PyTorch");
        assert!(report.ok());
        let failed = Err("exit status 1\nFAILED element 7".to_owned());
        report.enter("graph", "2p", Duration::ZERO, failed);
        report.note("size ratio\n");
        report.figures("perf", json!({"ratio": 0.5}));
        let table = report.table();
        assert!(table.contains("1.5 s  ok 407 cases a rank\n"), "{table}");
        assert!(
            table.contains("exit status 1\n      FAILED element 7\n"),
            "{table}"
        );
        assert!(table.ends_with("\n\nsize ratio\n"), "{table}");
        let summary = report.summary();
        assert_eq!(summary["ok"], false);
        assert_eq!(
            (&summary["passed"], &summary["failed"], &summary["skipped"]),
            (&json!(1), &json!(1), &json!(1))
        );
        assert_eq!(summary["failed_steps"], json!(["graph/2p"]));
        assert_eq!(summary["skipped_steps"], json!(["torch"]));
        let all = report.json();
        assert_eq!(all["rows"].as_array().unwrap().len(), 3);
        assert_eq!(all["rows"][1]["result"], "skipped");
        assert_eq!(all["figures"]["perf"][0]["ratio"], 0.5);
        assert!(!summary.to_string().contains('\n'));
    }
}
