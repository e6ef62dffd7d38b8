//! Findings on the terminal: a line when one comes or changes, and the open ones again at the end.

use ringsight_exporters::model::Finding;
use ringsight_output::Printable;

use super::log;

/// Findings that are printed at a time: a process can make more than somebody can read. The rest are in the summary.
const MOST: usize = 64;

/// `06:28:43 HANG  rank 3 (pid 7553, host b) has not launched all_reduce 750; ranks 0-2 have waited 2.1 s`. Times are UTC.
fn line(finding: &Finding) -> String {
    let seconds = finding.unix_ns / 1_000_000_000 % 86_400;
    let (hour, minute, second) = (seconds / 3600, seconds / 60 % 60, seconds % 60);
    let name = match &*finding.communicator_name {
        "" => String::new(),
        name => format!(" [{}]", Printable::from(name)),
    };
    format!(
        "{hour:02}:{minute:02}:{second:02} {:<5} {}{name}",
        finding.state(),
        Printable::from(&*finding.text)
    )
}

/// Prints findings that are new or have changed. `status`: a status line is drawn, which each line replaces.
pub(super) fn print_news(findings: &[Finding], status: bool) {
    let text = lines(findings.iter());
    if status {
        log::clear_status();
    }
    log::say(&text);
}

/// The first [`MOST`] findings, and how many more there are.
fn lines<'a>(findings: impl Iterator<Item = &'a Finding>) -> String {
    let mut text = String::new();
    let mut more = 0;
    for (at, finding) in findings.enumerate() {
        if at < MOST {
            write(&mut text, finding);
        } else {
            more += 1;
        }
    }
    if more > 0 {
        text += &format!("and {more} more: --summary lists them\n");
    }
    text
}

/// A finding, and what to do next as long as ranks wait.
fn write(text: &mut String, finding: &Finding) {
    *text += &line(finding);
    if !finding.ended {
        *text += "\n         next: ";
        *text += &Printable::from(&*finding.next_step).to_string();
    }
    text.push('\n');
}

/// Prints what is still wrong when the observation ends.
pub(super) fn print_open(findings: &[Finding]) {
    let text = lines(findings.iter().filter(|finding| !finding.ended));
    if !text.is_empty() {
        log::say(&format!("still waiting at the end:\n{text}"));
    }
}

#[cfg(test)]
mod tests {
    use ringsight_exporters::model::Place;

    use super::*;

    fn example() -> Finding {
        Finding {
            trace_id: [1; 16],
            operation: "all_reduce",
            communicator: 7,
            communicator_name: "dp".into(),
            ranks: 4,
            sequence: 750,
            replay: 0,
            pair: None,
            cause: "NOT_LAUNCHED",
            hang: true,
            culprit: 3,
            culprit_place: Some(Place {
                pid: 7553,
                host: "b".into(),
            }),
            waiting: vec![0, 1, 2],
            waited_ns: 2_100_000_000,
            first_unix_ns: 0,
            unix_ns: (6 * 3600 + 28 * 60 + 43) * 1_000_000_000,
            ended: false,
            text: "rank 3 (pid 7553, host b) has not launched all_reduce 750; ranks 0-2 have waited 2.1 s"
                .into(),
            next_step: String::new(),
        }
    }

    #[test]
    fn a_line_says_when_who_and_what() {
        let finding = example();
        assert_eq!(
            line(&finding),
            "06:28:43 HANG  rank 3 (pid 7553, host b) has not launched all_reduce 750; ranks 0-2 have waited 2.1 s [dp]"
        );
    }

    #[test]
    fn more_than_somebody_can_read_are_counted() {
        let finding = Finding {
            ended: true,
            ..example()
        };
        let of = |count| lines(std::iter::repeat_n(&finding, count));
        assert_eq!(of(MOST).lines().count(), MOST);
        let text = of(MOST + 3);
        assert_eq!(text.lines().count(), MOST + 1);
        assert!(text.ends_with("and 3 more: --summary lists them\n"), "{text}");
        assert_eq!(of(0), "");
    }
}
