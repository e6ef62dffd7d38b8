//! The watchdog in real processes: what needs real pages, real kernels, control messages and threads.
//!
//! Its rules (thresholds, late or hang, deadlocks, several verdicts, doubts, the order of questions) are tested by a virtual
//! clock in `src/watchdog/rules/tests`. `cargo xtask faults` holds its verdicts against `docs/src/watchdog.md`.
//!
//! # Tests of real time
//! These wait for at least one threshold (0.3 or 1 s), and for conditions from then on. A busy machine makes them slower.
//!
//! | test | what only a real process shows |
//! |---|---|
//! | [`calls::ranks_that_wait_for_each_other_fail_with_who_waits_for_whom`] | answers about real launches, and the communicator's failure |
//! | [`calls::a_call_that_could_not_be_launched_has_not_been_made`] | a withdrawn launch |
//! | [`ended::a_rank_that_aborts_after_it_completed_is_not_the_culprit`] | what an abort leaves in memory |
//! | [`ended::a_rank_whose_communicator_failed_is_the_culprit`] | what a failure leaves in memory |
//! | [`late::an_error_stays_and_later_calls_are_refused`] | the asynchronous error, eager and in graphs |
//! | [`late::a_report_has_every_line`] | the report |
//! | [`off::a_rank_whose_watchdog_is_off_answers`] | the passive responder |
//! | [`off::ranks_that_share_a_device_are_told_apart`] | ranks that are threads |
//! | [`stuck::a_kernel_that_stops_is_named`] | what a kernel says that it waits for |
//! | [`stuck::a_stuck_kernel_is_a_hang_and_can_be_aborted`] | an abort behind a kernel that never ends |
//! | [`thread::the_thread_goes_with_the_last_communicator_and_comes_with_the_next`] | the thread |
//! | [`thread::a_forked_child_has_a_thread_of_its_own`] | the thread after a fork |
//! | [`dumps::a_hang_is_dumped_by_every_rank`] | files that PyTorch's analyzer reads |
//!
//! The tests of calls that differ wait for no threshold.

mod common;
#[path = "../../tests/src/skip.rs"]
mod skip;

mod watchdog {
    use std::process::Child;

    mod calls;
    mod dumps;
    mod ended;
    mod late;
    mod off;
    mod stuck;
    mod thread;

    /// The variable with the case of a test.
    const CASE: &str = "RINGSIGHT_TEST_FAULT";
    const ELEMENTS: usize = 4096;

    /// What ranks wrote, all of which must come to their ends; `what` names the case.
    #[track_caller]
    fn texts(what: &str, ranks: Vec<Child>) -> Vec<String> {
        let mut texts = Vec::new();
        for output in crate::common::outputs(ranks) {
            let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
            assert!(
                output.status.success() && text.contains("rank done"),
                "{what}: {text}"
            );
            texts.push(text.into_owned());
        }
        texts
    }

    /// The verdicts in a text, without what comes before them.
    fn verdicts(text: &str) -> Vec<&str> {
        text.lines()
            .filter_map(|line| line.split_once("Verdict: "))
            .map(|(_, verdict)| verdict)
            .collect()
    }

    /// Whether this process has given a verdict.
    fn has_reported() -> bool {
        ringsight_comm::observe::emitted(ringsight_records::Kind::Verdict) > 0
    }

    /// Whether the device has begun an operation of this process.
    fn has_begun() -> bool {
        let pages = ringsight_comm::observe::pages().expect("a communicator has pages");
        pages
            .descriptions()
            .any(|operation| operation.device_start_ns != 0)
    }
}
