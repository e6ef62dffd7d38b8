//! Metrics of the kernel's RDMA stack, cumulative since the collector began.

use std::{collections::BTreeMap, sync::Arc};

use ringsight_exporters::model::{Attribute, Metric, MetricData, Resource, Value};

use super::Network;
use crate::correlate::communicators::Communicators;

/// Name, description and unit.
type Text = (&'static str, &'static str, &'static str);

const EVENTS: Text = ("rdma.events", "Events of the kernel's RDMA stack", "{event}");
const LOST: Text = (
    "rdma.events.lost",
    "Events of the kernel's RDMA stack that found the buffer full",
    "{event}",
);
const REFUSED: Text = (
    "rdma.mlx5.commands.refused",
    "Commands that the firmware of mlx5 devices refused",
    "{command}",
);
const DOWN: Text = ("rdma.ports.down", "Ports that are down", "{port}");
const QUEUE_PAIRS: Text = ("rdma.queue_pairs", "Queue pairs that are known", "{queue_pair}");
const REGISTERED: Text = (
    "rdma.memory.registered",
    "Bytes registered since the collector came",
    "By",
);

impl Network {
    /// Everything as of `unix_ns`.
    pub(crate) fn read(
        &self,
        start_unix_ns: u64,
        unix_ns: u64,
        communicators: &Communicators,
    ) -> Vec<Metric> {
        let mut metrics = Vec::new();
        let mut push = |resource: &Arc<Resource>, text: Text, attributes: Vec<Attribute>, data| {
            metrics.push(Metric {
                resource: Arc::clone(resource),
                name: text.0,
                description: text.1,
                unit: text.2,
                attributes,
                start_unix_ns,
                unix_ns,
                data,
            });
        };
        let device = |name: &Arc<str>| ("rdma.device.name", Value::Text(Arc::clone(name)));
        for ((name, event, port), count) in &self.events {
            let mut attributes = vec![device(name), ("rdma.event.name", Value::Static(event))];
            attributes.extend(port.map(|port| ("rdma.port.number", Value::Int(i64::from(port)))));
            push(&self.resource, EVENTS, attributes, MetricData::Counter(*count));
        }
        if self.lost > 0 {
            push(&self.resource, LOST, Vec::new(), MetricData::Counter(self.lost));
        }
        for ((opcode, status, syndrome), count) in &self.refused {
            let hexadecimal = |value: &u32| Value::Text(format!("{value:#x}").into());
            let attributes = vec![
                ("rdma.mlx5.opcode", hexadecimal(opcode)),
                ("rdma.mlx5.status", hexadecimal(status)),
                ("rdma.mlx5.syndrome", hexadecimal(syndrome)),
            ];
            push(&self.resource, REFUSED, attributes, MetricData::Counter(*count));
        }
        for (name, event, port) in self.events.keys() {
            // Told of each port that was ever down: a series that ends would stay at its last value.
            if let (&"port_err", Some(port)) = (event, port) {
                let down = self.ports.is_down(name, *port);
                let attributes = vec![device(name), ("rdma.port.number", Value::Int(i64::from(*port)))];
                push(
                    &self.resource,
                    DOWN,
                    attributes,
                    MetricData::UpDown(i64::from(down)),
                );
            }
        }
        let mut by_process: BTreeMap<(u32, Arc<str>), (i64, i64)> = BTreeMap::new();
        for known in self.queue_pairs.values() {
            by_process
                .entry((known.pid, Arc::clone(&known.device)))
                .or_default()
                .0 += 1;
        }
        for ((pid, name, _), bytes) in &self.registered {
            let sum = &mut by_process.entry((*pid, Arc::clone(name))).or_default().1;
            *sum = sum.saturating_add(i64::try_from(*bytes).unwrap_or(i64::MAX));
        }
        for ((pid, name), (queue_pairs, bytes)) in by_process {
            if let Some(watched) = communicators.process(pid) {
                push(
                    &watched.resource,
                    QUEUE_PAIRS,
                    vec![device(&name)],
                    MetricData::UpDown(queue_pairs),
                );
                push(
                    &watched.resource,
                    REGISTERED,
                    vec![device(&name)],
                    MetricData::UpDown(bytes),
                );
            }
        }
        self.read_failovers((start_unix_ns, unix_ns), communicators, &mut metrics);
        metrics
    }
}
