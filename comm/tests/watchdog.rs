//! What the watchdog does besides telling verdicts: errors, and the abort that they lead to. The verdicts are held against
//! `docs/src/watchdog.md` by `cargo xtask faults`.

mod common;
#[path = "../../tests/src/skip.rs"]
mod skip;

mod watchdog {
    use std::{
        process::Child,
        thread,
        time::{Duration, Instant},
    };

    mod calls;
    mod detector;
    mod dumps;
    mod ended;
    mod late;
    mod several;
    mod stuck;

    const FAULT: &str = "RINGSIGHT_TEST_FAULT";
    /// Where ranks tell each other how far they are.
    const FOLDER: &str = "RINGSIGHT_TEST_FOLDER";
    /// Of the watchdog.
    const THRESHOLD: Duration = Duration::from_millis(300);
    /// From the end of the threshold to the verdict.
    const PROMISED: Duration = Duration::from_secs(1);
    const ELEMENTS: usize = 4096;

    #[track_caller]
    fn until(is: &dyn Fn() -> bool) {
        let end = Instant::now() + 20 * PROMISED;
        while !is() {
            assert!(Instant::now() < end, "it does not come");
            thread::sleep(Duration::from_millis(1));
        }
    }

    /// What ranks wrote, all of which must come to their ends; `what` says of which test.
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
}
