//! Which channels an operation runs on, and which part of it each one does.
//!
//! Both answers must come out the same on every rank, or a channel's rings would carry different operations: they
//! depend on nothing but the sequence of collectives in the plan and what all ranks know of them.

use std::ops::Range;

/// Loads of a plan's channels in bytes.
#[derive(Clone, Debug)]
pub(crate) struct Picker {
    channels: usize,
    /// By channel, from the first operation on.
    loads: Vec<u64>,
}

impl Picker {
    /// A picker for a plan over `channels` channels.
    #[must_use]
    pub(crate) fn new(channels: usize) -> Self {
        Self {
            channels,
            loads: Vec::new(),
        }
    }

    /// Takes the `wanted` least loaded channels, in channel order, and loads them with `bytes` together. Ties go to the
    /// lower channel.
    pub(crate) fn pick(&mut self, wanted: usize, bytes: u64) -> Vec<u8> {
        self.loads.resize(self.channels, 0);
        let mut order: Vec<usize> = (0..self.loads.len()).collect();
        order.sort_by_key(|channel| (self.loads[*channel], *channel));
        order.truncate(wanted.clamp(1, self.loads.len()));
        order.sort_unstable();
        let share = bytes.div_ceil(order.len() as u64);
        for channel in &order {
            // At least one byte, so that operations of no size spread too.
            self.loads[*channel] += share.max(1);
        }
        order.into_iter().map(|channel| channel as u8).collect()
    }
}

/// Cuts `0..count` elements of `size` bytes into `parts` contiguous parts whose starts are multiples of 64 bytes. Later
/// parts may be empty.
#[must_use]
pub(crate) fn split(count: usize, size: usize, parts: usize) -> Vec<Range<usize>> {
    let align = (64 / size).max(1);
    let each = count.div_ceil(parts).next_multiple_of(align);
    (0..parts)
        .map(|part| (part * each).min(count)..((part + 1) * each).min(count))
        .collect()
}

/// The channel of part `part` of messages from `source` to `destination`: both ends compute it alike.
#[must_use]
pub(crate) fn p2p_channel(source: u32, destination: u32, ranks: u32, part: usize, channels: usize) -> u8 {
    let delta = (destination + ranks - source) % ranks;
    ((delta as usize + part) % channels) as u8
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_least_loaded_channel_is_picked() {
        let mut picker = Picker::new(3);
        assert_eq!(picker.pick(1, 100), [0]);
        assert_eq!(picker.pick(1, 10), [1]);
        assert_eq!(picker.pick(2, 20), [1, 2]);
        assert_eq!(picker.pick(1, 0), [2]);
        assert_eq!(picker.pick(9, 1), [0, 1, 2]);
    }

    proptest! {
        #[test]
        fn parts_cover_the_count_without_overlap(count in 0usize..1_000_000, log_size in 0u32..4, parts in 1usize..32) {
            let size = 1 << log_size;
            let mut at = 0;
            for part in split(count, size, parts) {
                prop_assert_eq!(part.start, at);
                prop_assert!(part.start == count || part.start * size % 64 == 0);
                at = part.end;
            }
            prop_assert_eq!(at, count);
        }

        #[test]
        fn loads_stay_within_one_operation_of_each_other(sizes in prop::collection::vec(0u64..1 << 20, 1..200)) {
            let mut picker = Picker::new(4);
            for size in &sizes {
                picker.pick(1, *size);
            }
            let (least, most) = (picker.loads.iter().min().unwrap(), picker.loads.iter().max().unwrap());
            prop_assert!(most - least <= *sizes.iter().max().unwrap().max(&1));
        }
    }
}
