//! Waiting for a condition, in one process and between processes.
//!
//! A test never sleeps for a fixed time before an assertion: on a busy machine the time is too short, and on an idle one it
//! is lost. A test names what it waits for and asks until it is so:
//!
//! ```ignore
//! eventually("the communicator fails", || state(comm) != ResultCode::Success);
//! let line = eventually_some("a report", || log.lines().find(|line| line.contains("Verdict: ")).map(str::to_owned));
//! ```
//!
//! If the condition does not hold within [`PATIENCE`], the test panics with `never: the communicator fails` at the caller's
//! line. The limit is far beyond what a machine with much else to do needs, so that it never decides a test that would
//! pass. For the same reason no test asserts that something took less than a limit.
//!
//! That something does *not* happen cannot be waited for. Such a test waits for an event after which it cannot happen any
//! more (the operation completed, the process ended, another rank was named), and then looks. A statement about time itself
//! ("not before 2 s") is tested by a virtual clock, where the code takes the time as an argument.
//!
//! Processes of one test tell each other how far they are by [`Marks`].

use std::{
    env,
    fs::{self, File},
    path::{Path, PathBuf},
    thread,
    time::{Duration, Instant},
};

/// No condition takes so long on a machine that runs at all.
pub const PATIENCE: Duration = Duration::from_secs(60);

/// `NCCL_KERNEL_TIMEOUT_MS` for tests in which only the rank at fault may be named: a busy machine holds up other ranks for
/// 300 ms, too.
pub const PATIENT_MS: &str = "1000";

/// For so long a condition is asked for without a pause: most conditions are about to hold.
const SPINNING: Duration = Duration::from_millis(2);
/// The pause after each question from then on.
const PAUSE: Duration = Duration::from_millis(1);

/// Waits until the condition holds. `what` names it: `never: {what}` is what a failed test says.
#[track_caller]
pub fn eventually(what: &str, mut condition: impl FnMut() -> bool) {
    eventually_some(what, || condition().then_some(()));
}

/// Waits until `find` finds something, and returns that.
#[track_caller]
pub fn eventually_some<T>(what: &str, mut find: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(found) = find() {
            return found;
        }
        let waited = start.elapsed();
        assert!(waited < PATIENCE, "never: {what}");
        if waited < SPINNING {
            thread::yield_now();
        } else {
            thread::sleep(PAUSE);
        }
    }
}

/// Files in a folder by which the processes of a test tell each other how far they are. A mark is set once and stays.
///
/// The test makes the folder, and gives it to its processes as the variable [`Marks::FOLDER`].
pub struct Marks(PathBuf);

impl Marks {
    /// The variable with the folder.
    pub const FOLDER: &'static str = "RINGSIGHT_TEST_FOLDER";

    /// Marks in a folder of the caller.
    pub fn in_folder(folder: &Path) -> Self {
        Self(folder.to_owned())
    }

    /// The marks that this process was started with.
    pub fn of_process() -> Self {
        Self(PathBuf::from(
            env::var(Self::FOLDER).expect("started by its test"),
        ))
    }

    /// Sets a mark.
    pub fn set(&self, name: &str) {
        File::create(self.0.join(name)).expect("a folder of ours");
    }

    /// Whether a mark is set.
    pub fn is_set(&self, name: &str) -> bool {
        fs::exists(self.0.join(name)).expect("a folder of ours")
    }

    /// Waits until a mark is set.
    #[track_caller]
    pub fn wait(&self, name: &str) {
        eventually(name, || self.is_set(name));
    }
}
