//! What the watchdog does besides telling verdicts: errors, and the abort that they lead to. The verdicts are held against
//! `docs/src/watchdog.md` by `cargo xtask faults`.

mod common;
#[path = "../../tests/src/skip.rs"]
mod skip;

mod watchdog {
    use std::{
        thread,
        time::{Duration, Instant},
    };

    mod calls;
    mod detector;
    mod dumps;
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
}
