//! Metrics of a synthetic job.

use ringsight_collector::{
    Collector, Options,
    clock::Clock,
    synthetic::{FIRST_PID, Job, Operation},
};
use ringsight_exporters::model::{ExportStats, Metric, MetricData, Signal, Value};
use ringsight_probes::sample::{Carrier, Sample};
use ringsight_records::Kind;

fn read(collector: &mut Collector) -> Vec<Metric> {
    collector.add_metrics(10_000_000_000, 1.5, Vec::new());
    collector.take_batch().metrics
}

fn of<'a>(metrics: &'a [Metric], name: &'a str) -> impl Iterator<Item = &'a Metric> {
    metrics.iter().filter(move |metric| metric.name == name)
}

fn histogram(metric: &Metric) -> (u64, f64, f64) {
    match metric.data {
        MetricData::Histogram { count, sum, max, .. } => (count, sum, max),
        _ => panic!("{metric:?}"),
    }
}

fn counter(metrics: &[Metric], name: &str, attribute: (&'static str, &'static str)) -> Option<u64> {
    let (key, value) = attribute;
    let found = of(metrics, name).find(|metric| metric.attributes == [(key, Value::Static(value))])?;
    match found.data {
        MetricData::Counter(count) => Some(count),
        _ => panic!("{found:?}"),
    }
}

#[test]
fn a_job_in_figures() {
    let job = Job::default();
    let mut operations: Vec<_> = (1..=9).map(Operation::all_reduce).collect();
    operations.push(Operation::all_reduce(10).with_late(3, 30_000_000));
    let mut collector = Collector::new(Options::default(), Clock::fixed(1_000), 0);
    let mut samples = job.samples(0..4, &operations);
    samples.push(Sample::Lost {
        pid: Some(FIRST_PID),
        carrier: Carrier::Ring,
        kind: Some(Kind::ProxyStep),
        count: 7,
    });
    samples.push(Sample::Missed {
        pid: FIRST_PID,
        kind: Kind::OpLaunched,
        count: 5,
    });
    collector.ingest(&mut samples);
    let metrics = read(&mut collector);
    let missed: Vec<_> = of(&metrics, "ccl.probe.missed").collect();
    assert_eq!(missed.len(), 1);
    assert_eq!(
        missed[0].attributes,
        [("ccl.record.kind", Value::Static("op_launched"))]
    );
    assert!(matches!(missed[0].data, MetricData::Counter(5)));
    let counts = collector.readings().counts;
    assert_eq!((counts.missed_total(), counts.lost_total()), (5, 7), "told apart");

    let durations: Vec<_> = of(&metrics, "ccl.operation.duration").collect();
    assert_eq!(durations.len(), 4, "one a rank");
    for duration in &durations {
        assert_eq!(
            duration.attributes,
            [("ccl.operation.name", Value::Static("all_reduce"))]
        );
        assert_eq!(
            (duration.start_unix_ns, duration.unix_ns),
            (1_000, 10_000_001_000)
        );
        let (count, sum, max) = histogram(duration);
        assert_eq!(count, 10);
        // The late rank itself took no longer than ever; the others waited for it.
        let late = duration
            .resource
            .attributes
            .contains(&("ccl.job.rank", Value::Int(3)));
        let longest = if late { 100e-6 } else { 30.1e-3 };
        assert!(
            (max - longest).abs() < 1e-9 && (sum - (9.0 * 100e-6 + longest)).abs() < 1e-9,
            "{sum} {max}"
        );
    }
    let lags: Vec<_> = of(&metrics, "ccl.operation.straggler.lag")
        .map(histogram)
        .collect();
    assert_eq!(
        lags.iter()
            .filter(|(_, _, max)| (max - 0.03).abs() < 1e-9)
            .count(),
        1
    );
    assert_eq!(
        lags.iter()
            .filter(|(count, sum, _)| *count == 10 && *sum == 0.0)
            .count(),
        3
    );
    for bandwidth in of(&metrics, "ccl.operation.bus_bandwidth") {
        let expected = f64::from(1 << 20) * 1.5 / 100e-6;
        assert!((histogram(bandwidth).2 - expected).abs() < 1.0);
    }
    // Ranks 1 and 3 send, 0 and 2 receive: two states each.
    assert_eq!(of(&metrics, "ccl.proxy.state.duration").count(), 8);
    for metric in of(&metrics, "ccl.communicator.count") {
        assert_eq!(metric.data, MetricData::UpDown(1));
    }
    assert_eq!(
        of(&metrics, "ccl.operation.active").next().unwrap().data,
        MetricData::UpDown(0)
    );
    assert_eq!(
        counter(&metrics, "ccl.probe.lost", ("ccl.record.kind", "proxy_step")),
        Some(7)
    );
    assert_eq!(
        counter(&metrics, "ccl.probe.records", ("ccl.record.kind", "op_completed")),
        Some(40)
    );
    // Launched, proxy done, completed on each rank.
    assert_eq!(
        of(&metrics, "ccl.probe.hits").next().unwrap().data,
        MetricData::Counter(120)
    );
    assert_eq!(
        of(&metrics, "ccl.probe.cpu.time").next().unwrap().data,
        MetricData::Total(1.5)
    );
}

#[test]
fn points_accumulate_and_each_has_one_identity() {
    let job = Job::default();
    let mut collector = Collector::new(Options::default(), Clock::fixed(0), 0);
    for round in 0..2u32 {
        let operations: Vec<_> = (1..=5).map(|n| Operation::all_reduce(5 * round + n)).collect();
        let mut samples = job.samples(0..4, &operations);
        samples.retain(|sample| round == 0 || !matches!(sample, Sample::Process(_)));
        collector.ingest(&mut samples);
        let metrics = read(&mut collector);
        assert_eq!(
            of(&metrics, "ccl.operation.size")
                .map(|metric| histogram(metric).0)
                .collect::<Vec<_>>(),
            [5 * (u64::from(round) + 1); 4]
        );
        for (at, metric) in metrics.iter().enumerate() {
            let same = |other: &&Metric| {
                other.name == metric.name
                    && other.attributes == metric.attributes
                    && other.resource == metric.resource
            };
            assert_eq!(metrics[at..].iter().filter(same).count(), 1, "{metric:?}");
        }
    }
}

#[test]
fn exporters_are_accounted_for_by_signal() {
    let mut stats = ExportStats {
        retries: 4,
        ..ExportStats::default()
    };
    stats[Signal::Traces].delivered = 7;
    stats[Signal::Logs].delivered = 2;
    stats[Signal::Logs].drop_items("queue_full", 3);
    let mut collector = Collector::new(Options::default(), Clock::fixed(0), 0);
    collector.add_metrics(10_000_000_000, 1.5, vec![("there".to_owned(), stats)]);
    let metrics = collector.take_batch().metrics;
    let values = |name| {
        of(&metrics, name)
            .map(|metric| {
                let texts = metric.attributes.iter().map(|(_, value)| match value {
                    Value::Static(text) => (*text).to_owned(),
                    Value::Text(text) => text.to_string(),
                    other => panic!("{other:?}"),
                });
                (texts.collect::<Vec<_>>().join(" "), metric.data.clone())
            })
            .collect::<Vec<_>>()
    };
    let counter = |text: &str, count| (text.to_owned(), MetricData::Counter(count));
    assert_eq!(
        values("ccl.probe.export.delivered"),
        [
            counter("there traces", 7),
            counter("there metrics", 0),
            counter("there logs", 2)
        ]
    );
    assert_eq!(
        values("ccl.probe.export.dropped"),
        [counter("there logs queue_full", 3)]
    );
    assert_eq!(values("ccl.probe.export.retries"), [counter("there", 4)]);
}
