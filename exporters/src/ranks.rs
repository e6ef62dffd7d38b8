//! Sets of ranks as people write them: `0-3,7`.

use std::fmt;

/// Ranks, in order, each once. Neighbours are one range: what a set takes does not grow with its ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Ranks(Vec<(u32, u32)>);

impl Ranks {
    /// Those of a communicator of `ranks` ranks that are not `seen`, which are in order.
    #[must_use]
    pub fn all_but(ranks: u32, seen: impl Iterator<Item = u32>) -> Self {
        let (mut ranges, mut next) = (Vec::new(), 0);
        for seen in seen.filter(|seen| *seen < ranks) {
            if next < seen {
                ranges.push((next, seen - 1));
            }
            next = next.max(seen + 1);
        }
        if next < ranks {
            ranges.push((next, ranks - 1));
        }
        Self(ranges)
    }

    /// Whether there are none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// How many there are.
    #[must_use]
    pub fn len(&self) -> u64 {
        self.0
            .iter()
            .map(|(first, last)| u64::from(last - first) + 1)
            .sum()
    }
}

impl FromIterator<u32> for Ranks {
    /// Of ranks in order.
    fn from_iter<T: IntoIterator<Item = u32>>(ranks: T) -> Self {
        let mut ranges: Vec<(u32, u32)> = Vec::new();
        for rank in ranks {
            match ranges.last_mut() {
                Some((_, last)) if last.checked_add(1) == Some(rank) => *last = rank,
                _ => ranges.push((rank, rank)),
            }
        }
        Self(ranges)
    }
}

impl fmt::Display for Ranks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, (first, last)) in self.0.iter().enumerate() {
            let comma = if at == 0 { "" } else { "," };
            if first == last {
                write!(f, "{comma}{first}")?;
            } else {
                write!(f, "{comma}{first}-{last}")?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_one_range() {
        let ranks: Ranks = [0, 1, 2, 3, 7, 9, 10, u32::MAX].into_iter().collect();
        assert_eq!(
            (ranks.to_string().as_str(), ranks.len()),
            ("0-3,7,9-10,4294967295", 8)
        );
        let rest = Ranks::all_but(12, [0, 1, 2, 3, 7, 9, 10, 12, 13].into_iter());
        assert_eq!((rest.to_string().as_str(), rest.len()), ("4-6,8,11", 5));
        assert_eq!(
            Ranks::all_but(u32::MAX, [].into_iter()).to_string(),
            "0-4294967294"
        );
        assert!(Ranks::all_but(2, 0..2).is_empty() && Ranks::default().to_string().is_empty());
    }
}
