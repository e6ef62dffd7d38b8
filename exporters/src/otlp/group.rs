//! Sorting a batch into the groups that OTLP is nested by.

use std::collections::HashMap;
use std::sync::Arc;

use crate::model::{LogRecord, Metric, MetricData, Resource, Span};

/// Something that has a resource.
pub(crate) trait HasResource {
    /// Whose it is.
    fn resource(&self) -> &Arc<Resource>;
}

impl HasResource for Span {
    fn resource(&self) -> &Arc<Resource> {
        &self.resource
    }
}

impl HasResource for Metric {
    fn resource(&self) -> &Arc<Resource> {
        &self.resource
    }
}

impl HasResource for LogRecord {
    fn resource(&self) -> &Arc<Resource> {
        &self.resource
    }
}

/// Items by resource (by `Arc` identity), both in the order in which they first appear.
pub(crate) fn by_resource<T: HasResource>(items: &[T]) -> Vec<(&Resource, Vec<&T>)> {
    let mut groups: Vec<(&Resource, Vec<&T>)> = Vec::new();
    let mut index: HashMap<*const Resource, usize> = HashMap::new();
    let mut last = (std::ptr::null(), 0);
    for item in items {
        let resource = item.resource();
        let key = Arc::as_ptr(resource);
        // Neighbours mostly come from the same process.
        if key != last.0 {
            let group = *index.entry(key).or_insert_with(|| {
                groups.push((resource, Vec::new()));
                groups.len() - 1
            });
            last = (key, group);
        }
        groups[last.1].1.push(item);
    }
    groups
}

/// Points of one resource that are one metric to OTLP: same name, unit, description and kind (whole and fractional sums are
/// one kind).
pub(crate) fn by_metric<'a>(points: &[&'a Metric]) -> Vec<Vec<&'a Metric>> {
    let mut groups: Vec<Vec<&Metric>> = Vec::new();
    for point in points {
        let same = |group: &&mut Vec<&Metric>| is_same_metric(group[0], point);
        match groups.iter_mut().find(same) {
            Some(group) => group.push(point),
            None => groups.push(vec![point]),
        }
    }
    groups
}

fn is_same_metric(a: &Metric, b: &Metric) -> bool {
    let kind = |data: &MetricData| match data {
        MetricData::Gauge(_) => 0,
        MetricData::Counter(_) | MetricData::Total(_) => 1,
        MetricData::UpDown(_) => 2,
        MetricData::Histogram { .. } => 3,
    };
    a.name == b.name && kind(&a.data) == kind(&b.data) && a.unit == b.unit && a.description == b.description
}
