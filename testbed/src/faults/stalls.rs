//! Times in which a process that was to run was not run.

use std::time::Duration;

use super::cases::{PROMISED, STALLED};

/// What any machine has, and what a verdict's time has room for, however often it comes.
pub(super) const SHORT: Duration = Duration::from_millis(10);

/// Whether those of a process, (end in nanoseconds, milliseconds) in the order of time, are [`STALLED`] or more within [`PROMISED`]: where the machine
/// runs something else for 30 ms again and again, a verdict is as late as where it does so once for long.
pub(super) fn are_long(stalls: &[(u64, u64)]) -> bool {
    (0..stalls.len()).any(|first| {
        let from = stalls[first].0;
        let near = |stall: &&(u64, u64)| Duration::from_nanos(stall.0 - from) < PROMISED;
        let together: u64 = stalls[first..].iter().take_while(near).map(|stall| stall.1).sum();
        Duration::from_millis(together) >= STALLED
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn many_short_ones_are_a_long_one() {
        let are_long = |stalls: &[(u64, u64)]| {
            let at = |(ms, stall): &(u64, u64)| (ms * 1_000_000, *stall);
            are_long(&stalls.iter().map(at).collect::<Vec<_>>())
        };
        assert!(!are_long(&[]) && !are_long(&[(0, 149)]) && are_long(&[(0, 150)]));
        let short = [(0, 30), (250, 30), (500, 30), (750, 30)];
        assert!(!are_long(&short));
        assert!(are_long(&[&short[..], &[(999, 30)]].concat()));
        assert!(
            !are_long(&[&short[..], &[(1000, 30), (1200, 29)]].concat()),
            "not within a second"
        );
        assert!(are_long(&[&short[..], &[(1000, 30), (1200, 30)]].concat()));
    }
}
