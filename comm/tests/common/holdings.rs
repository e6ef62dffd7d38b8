//! What a process holds, and whether it holds more after a test.

use std::{
    collections::BTreeMap,
    env, fs, thread,
    time::{Duration, Instant},
};

/// Bytes that the process's own memory may grow by: some pages for each ten of a thousand, as its heaps fray.
const GROWTH: usize = 2 << 20;

/// Set where a leak checker looks for what nobody has a pointer to any more when a process ends: its allocator keeps freed memory for a while,
/// so what the process has grown by says nothing.
const CHECKER: &str = "RINGSIGHT_TEST_LEAK_CHECKER";

/// Whether a leak checker looks at this process.
pub fn is_checked() -> bool {
    env::var_os(CHECKER).is_some()
}

/// xorshift64*: the same numbers each time.
pub struct Random(pub u64);

impl Random {
    pub fn below(&mut self, limit: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        (self.0.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 33) as usize % limit
    }

    pub fn one_in(&mut self, chances: usize) -> bool {
        self.below(chances) == 0
    }
}

/// What the process holds, by name, with how many of each.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Holdings(pub BTreeMap<String, usize>);

impl Holdings {
    pub fn now() -> Self {
        let mut holdings = Self::default();
        let names = |path: &str| {
            let entries = fs::read_dir(path).unwrap();
            entries.filter_map(Result::ok).map(|entry| entry.path())
        };
        for task in names("/proc/self/task") {
            if let Ok(name) = fs::read_to_string(task.join("comm")) {
                holdings.add(format!("thread {}", name.trim()));
            }
        }
        for fd in names("/proc/self/fd") {
            // The descriptor of this listing is gone by now.
            if let Ok(target) = fs::read_link(fd) {
                // Of sockets and pipes the number is not always the same.
                let target = target.display().to_string();
                let kind = target.split(['[', ' ']).next().unwrap_or_default();
                holdings.add(format!("descriptor of {kind}"));
            }
        }
        for line in fs::read_to_string("/proc/self/maps").unwrap().lines() {
            // Files only: the allocator keeps anonymous memory as it likes.
            if let Some((_, name)) = line.split_once('/') {
                holdings.add(format!("mapping of /{name}"));
            }
        }
        let temporary = env::temp_dir();
        for path in ["/dev/shm", temporary.to_str().unwrap()] {
            for file in names(path) {
                holdings.add(format!("file {}", file.display()));
            }
        }
        holdings
    }

    fn add(&mut self, name: String) {
        *self.0.entry(name).or_default() += 1;
    }

    /// What there is more of than in `before`.
    pub fn beyond(&self, before: &Self) -> BTreeMap<&str, usize> {
        let more = |name: &String, count: &usize| count.saturating_sub(*before.0.get(name).unwrap_or(&0));
        self.0
            .iter()
            .map(|(name, count)| (name.as_str(), more(name, count)))
            .filter(|(_, more)| *more > 0)
            .collect()
    }
}

/// Bytes of this process's own memory, in no file, once the allocator has given back what it can.
fn memory() -> usize {
    // SAFETY: gives free memory back to the system, and touches no other.
    unsafe { libc::malloc_trim(0) };
    let text = fs::read_to_string("/proc/self/smaps_rollup").unwrap();
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("Anonymous:"))
        .unwrap();
    let kib: usize = line.trim().trim_end_matches(" kB").parse().unwrap();
    kib << 10
}

/// What the process holds once nothing ends any more: threads that have been told to end need a moment.
fn steady() -> Holdings {
    let mut last = (Holdings::now(), Instant::now());
    while last.1.elapsed() < Duration::from_secs(1) {
        let now = Holdings::now();
        if now != last.0 {
            last = (now, Instant::now());
        }
        thread::yield_now();
    }
    last.0
}

/// Runs `thousand` so often; at the end the process holds what it held before.
pub fn leaves_nothing(times: usize, mut thousand: impl FnMut()) {
    let before = steady();
    let bytes = memory();
    let begin = Instant::now();
    (0..times).for_each(|_| thousand());
    // Threads that have been told to end may need a moment to do it.
    let end = Instant::now() + Duration::from_secs(10);
    loop {
        let now = Holdings::now();
        let beyond = now.beyond(&before);
        if beyond.is_empty() {
            break;
        }
        assert!(Instant::now() < end, "left behind: {beyond:#?}");
        thread::yield_now();
    }
    // Heaps fray in the beginning: more of the same adds less. What the threads that look after graphs have on their lists goes at
    // their next look.
    let most = if is_checked() {
        usize::MAX
    } else {
        times.min(2) * GROWTH
    };
    let grown = loop {
        let grown = memory().saturating_sub(bytes);
        if grown <= most {
            break grown;
        }
        assert!(Instant::now() < end, "{grown} bytes more than the {bytes} before");
        thread::sleep(Duration::from_millis(100));
    };
    println!(
        "nothing left of {times} thousand after {:.1} s, {grown} bytes grown",
        begin.elapsed().as_secs_f64()
    );
}
