//! OpenTelemetry's exponential histogram for non-negative values.

use ringsight_exporters::model::MetricData;

/// Buckets kept; on overflow pairs of buckets are merged and the scale goes down by one.
const BUCKETS: usize = 160;
/// Scale at first: buckets 1.1 % wide.
const SCALE: i32 = 6;

/// Counts values in buckets `(base^i, base^(i+1)]` with `base = 2^(2^-scale)`.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Histogram {
    count: u64,
    sum: f64,
    min: f64,
    max: f64,
    zero_count: u64,
    /// How often the scale has been lowered from [`SCALE`].
    lowered: i32,
    offset: i32,
    buckets: Vec<u64>,
}

impl Histogram {
    /// Adds a value. Negative and non-finite values are no measurements and are ignored.
    pub fn add(&mut self, value: f64) {
        if !value.is_finite() || value < 0.0 {
            return;
        }
        (self.min, self.max) = if self.count == 0 {
            (value, value)
        } else {
            (self.min.min(value), self.max.max(value))
        };
        self.count += 1;
        self.sum += value;
        if value < f64::MIN_POSITIVE {
            self.zero_count += 1;
            return;
        }
        let mut index = self.index(value);
        if self.buckets.is_empty() {
            self.offset = index;
            self.buckets.push(0);
        }
        loop {
            let first = self.offset.min(index);
            let last = (self.offset + self.buckets.len() as i32 - 1).max(index);
            if (last - first) < BUCKETS as i32 {
                break;
            }
            self.lower();
            index >>= 1;
        }
        while index < self.offset {
            // At most BUCKETS insertions in the life of a histogram and scale.
            self.buckets.insert(0, 0);
            self.offset -= 1;
        }
        let at = (index - self.offset) as usize;
        if at >= self.buckets.len() {
            self.buckets.resize(at + 1, 0);
        }
        self.buckets[at] += 1;
    }

    fn scale(&self) -> i32 {
        SCALE - self.lowered
    }

    /// The bucket `i` with `base^i < value <= base^(i+1)`.
    fn index(&self, value: f64) -> i32 {
        (value.log2() * f64::from(self.scale()).exp2()).ceil() as i32 - 1
    }

    /// Merges buckets 2i and 2i+1 of this scale into bucket i of the next lower one.
    fn lower(&mut self) {
        let offset = self.offset >> 1;
        let mut merged = vec![0; self.buckets.len() / 2 + 1];
        for (index, count) in (self.offset..).zip(&self.buckets) {
            merged[((index >> 1) - offset) as usize] += count;
        }
        self.offset = offset;
        self.buckets = merged;
        self.lowered += 1;
    }

    /// Values added.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.count
    }

    /// As exporters take it.
    #[must_use]
    pub fn data(&self) -> MetricData {
        MetricData::Histogram {
            scale: self.scale(),
            count: self.count,
            sum: self.sum,
            min: self.min,
            max: self.max,
            zero_count: self.zero_count,
            offset: self.offset,
            buckets: self.buckets.clone(),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn bounds_are_the_specifications() {
        let mut histogram = Histogram::default();
        for value in [1.0, 2.0, 4.0] {
            histogram.add(value);
        }
        // 1 is in (2^-1/64, 1], the bucket below index 0; 2 and 4 close buckets 63 and 127.
        assert_eq!((histogram.offset, histogram.buckets.len()), (-1, 129));
        assert_eq!([0, 64, 128].map(|at| histogram.buckets[at]), [1, 1, 1]);
    }

    #[test]
    fn what_is_no_measurement_is_ignored() {
        let mut histogram = Histogram::default();
        for value in [f64::NAN, f64::INFINITY, -1.0, 0.0] {
            histogram.add(value);
        }
        assert_eq!(
            (histogram.count, histogram.zero_count, histogram.buckets.len()),
            (1, 1, 0)
        );
    }

    proptest! {
        #[test]
        fn every_value_is_in_a_bucket_that_holds_it(values in prop::collection::vec(1e-9f64..1e12, 1..200)) {
            let mut histogram = Histogram::default();
            values.iter().for_each(|value| histogram.add(*value));
            prop_assert!(histogram.buckets.len() <= BUCKETS);
            prop_assert_eq!(histogram.buckets.iter().sum::<u64>(), values.len() as u64);
            let base = f64::from(-histogram.scale()).exp2().exp2();
            for (index, count) in (histogram.offset..).zip(&histogram.buckets) {
                // The logarithm's last bit decides at a boundary; the bounds are taken with that much slack.
                let (low, high) = (base.powi(index) * (1.0 - 1e-12), base.powi(index + 1) * (1.0 + 1e-12));
                let strictly = (base.powi(index) * (1.0 + 1e-12), base.powi(index + 1) * (1.0 - 1e-12));
                let most = values.iter().filter(|value| **value > low && **value <= high).count() as u64;
                let least = values.iter().filter(|value| **value > strictly.0 && **value <= strictly.1).count() as u64;
                prop_assert!((least..=most).contains(count));
            }
        }
    }
}
