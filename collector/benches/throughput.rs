//! Records a second on one core: taken in, put together, made into spans and encoded as OTLP, with flat memory.
//!
//! `cargo bench -p ringsight-collector --bench throughput -- [SECONDS] [--json]`. One thread does all the work of the
//! measured path. Records of a synthetic job (4 ranks) lie in memory as the 64 bytes that carriers hold, and are fed again
//! and again with operation numbers, sequences and times moved on; moving them is outside of the measured time.

use std::time::{Duration, Instant};

use ringsight_collector::{
    Collector, Options,
    clock::Clock,
    synthetic::{Job, Operation},
};
use ringsight_exporters::otlp::encode::Encoder;
use ringsight_probes::sample::{Carrier, Sample};
use ringsight_records::Record;

/// Operations in the template of one round.
const OPERATIONS: u32 = 250;
/// How far the next round's operations are moved.
const ROUND_NS: u64 = OPERATIONS as u64 * 1_000_000 + 10_000_000;
/// Samples handed over at once: what a millisecond brings at 1 M records/s.
const SLICE: usize = 1000;
/// Largest OTLP request.
const REQUEST_BYTES: usize = 4 << 20;

struct Case {
    name: &'static str,
    job: Job,
}

/// A sample as the carriers hold it: records are bytes.
enum Raw {
    Record {
        pid: u32,
        tid: u32,
        carrier: Carrier,
        bytes: [u8; 64],
    },
    Other(Sample),
}

impl From<Sample> for Raw {
    fn from(sample: Sample) -> Self {
        match sample {
            Sample::Record {
                pid,
                tid,
                carrier,
                record,
            } => Self::Record {
                pid,
                tid,
                carrier,
                bytes: record.to_bytes(),
            },
            other => Self::Other(other),
        }
    }
}

impl From<Raw> for Sample {
    fn from(raw: Raw) -> Self {
        match raw {
            Raw::Record {
                pid,
                tid,
                carrier,
                bytes,
            } => Self::Record {
                pid,
                tid,
                carrier,
                record: Record::from_bytes(&bytes),
            },
            Raw::Other(sample) => sample,
        }
    }
}

/// Moves a sample on by `rounds` rounds.
fn moved(sample: &Sample, rounds: u64) -> Sample {
    let (ns, op, seq) = (
        rounds * ROUND_NS,
        rounds as u32 * OPERATIONS,
        rounds * u64::from(OPERATIONS),
    );
    let later = |time: &mut u64| *time += if *time == 0 { 0 } else { ns };
    let mut sample = sample.clone();
    match &mut sample {
        Sample::Record { record, .. } => {
            later(&mut record.time_ns);
            record.op += op;
            record.seq += if record.comm == 0 { 0 } else { seq };
            if record.kind() == Some(ringsight_records::Kind::OpCompleted) {
                later(&mut record.value);
            }
        }
        Sample::Description { description, .. } => {
            let d = &mut **description;
            for time in [
                &mut d.api_start_ns,
                &mut d.api_end_ns,
                &mut d.launch_start_ns,
                &mut d.launch_end_ns,
                &mut d.device_start_ns,
                &mut d.device_end_ns,
            ] {
                later(time);
            }
            d.op += op;
            d.group += op;
            d.plan += op;
            d.seq += seq;
        }
        Sample::Watermark { time_ns, .. } => *time_ns += ns,
        _ => {}
    }
    sample
}

/// Resident memory of this process in KiB.
fn resident_kib() -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"));
    line.and_then(|text| text.trim().trim_end_matches(" kB").trim().parse().ok())
        .unwrap_or(0)
}

fn cpu() -> Duration {
    let mut time = libc::timespec {
        tv_sec: 0,
        tv_nsec: 0,
    };
    // SAFETY: `time` is a valid timespec to write to; the clock always exists.
    unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
    Duration::new(
        time.tv_sec.cast_unsigned(),
        u32::try_from(time.tv_nsec).unwrap_or(0),
    )
}

/// Orders one round as the carriers would deliver it: by time, each process's watermark behind every slice.
fn template(job: &Job) -> (Vec<Sample>, Vec<Sample>) {
    let operations: Vec<_> = (1..=OPERATIONS).map(Operation::all_reduce).collect();
    let mut head = Vec::new();
    let mut timed: Vec<(u64, Sample)> = Vec::new();
    for rank in 0..job.ranks {
        let streams = job.streams(rank, &operations);
        head.extend(streams.head);
        for carrier in [streams.ring, streams.probe] {
            let mut last = 0;
            for sample in carrier {
                if let Sample::Record { record, .. } = &sample {
                    last = record.time_ns;
                }
                timed.push((last, sample));
            }
        }
    }
    timed.sort_by_key(|(ns, _)| *ns);
    let mut body = Vec::with_capacity(timed.len() + timed.len() / SLICE * job.ranks as usize);
    for slice in timed.chunks(SLICE) {
        let watermark = slice.last().map_or(0, |(ns, _)| *ns);
        body.extend(slice.iter().map(|(_, sample)| sample.clone()));
        body.extend((0..job.ranks).map(|rank| Sample::Watermark {
            pid: job.pid(rank),
            time_ns: watermark,
        }));
    }
    (head, body)
}

fn run(case: &Case, seconds: f64) -> serde_json::Value {
    let (mut head, body) = template(&case.job);
    let mut collector = Collector::new(Options::default(), Clock::fixed(1_700_000_000_000_000_000), 0);
    collector.ingest(&mut head);
    let mut encoder = Encoder::default();
    let (mut encoded_spans, mut encoded_bytes, mut operations, mut complete) = (0u64, 0u64, 0u64, 0u64);
    let mut busy = Duration::ZERO;
    let mut on_cpu = Duration::ZERO;
    let mut memory = (0, 0);
    let begun = Instant::now();
    let mut round = 0;
    let mut samples = Vec::new();
    while busy.as_secs_f64() < seconds {
        for slice in body.chunks(SLICE + case.job.ranks as usize) {
            let raw: Vec<Raw> = slice.iter().map(|sample| moved(sample, round).into()).collect();
            let (started, cpu_started) = (Instant::now(), cpu());
            samples.extend(raw.into_iter().map(Sample::from));
            collector.ingest(&mut samples);
            // The live loop exports at this many spans too, or after 200 ms.
            if collector.batched() >= 16_384 {
                let batch = collector.take_batch();
                let left = encoder.traces(&batch.spans, REQUEST_BYTES, |message, spans| {
                    encoded_spans += spans as u64;
                    encoded_bytes += message.len() as u64;
                });
                assert_eq!(left, 0, "a span was too large");
                operations += batch.operations.len() as u64;
                complete += batch
                    .operations
                    .iter()
                    .filter(|operation| operation.complete)
                    .count() as u64;
            }
            on_cpu += cpu() - cpu_started;
            busy += started.elapsed();
        }
        round += 1;
        // Memory after a tenth of the time has all that a steady state takes.
        if memory.0 == 0 && busy.as_secs_f64() > seconds / 10.0 {
            memory.0 = resident_kib();
        }
    }
    memory.1 = resident_kib();
    let readings = collector.readings();
    let records = readings.counts.received_total();
    assert_eq!(
        complete, operations,
        "operations were incomplete: {:?} {:?}",
        readings.given, readings.given_up
    );
    let given_up: u64 = readings.given_up_by_reason().iter().map(|(_, count)| count).sum();
    let rate = records as f64 / busy.as_secs_f64();
    serde_json::json!({
        "case": case.name,
        "records": records,
        "records_per_s": rate.round(),
        "records_per_cpu_s": (records as f64 / on_cpu.as_secs_f64()).round(),
        "busy_s": busy.as_secs_f64(),
        "elapsed_s": begun.elapsed().as_secs_f64(),
        "operations": operations,
        "spans": encoded_spans,
        "spans_per_s": (encoded_spans as f64 / busy.as_secs_f64()).round(),
        "otlp_bytes_per_span": encoded_bytes as f64 / encoded_spans.max(1) as f64,
        "given_up": given_up,
        "resident_kib": [memory.0, memory.1],
    })
}

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let seconds = arguments
        .iter()
        .find_map(|argument| argument.parse().ok())
        .unwrap_or(3.0);
    let json = arguments.iter().any(|argument| argument == "--json");
    let between = Job {
        ranks: 4,
        nodes: 2,
        channels: 2,
        ..Job::default()
    };
    let cases = [
        // Large messages between nodes: most records are network steps.
        Case {
            name: "steps",
            job: Job { steps: 64, ..between },
        },
        // Small messages between nodes.
        Case {
            name: "mixed",
            job: Job { steps: 8, ..between },
        },
        // One node: no proxy, few records for each span. The dearest per record.
        Case {
            name: "node",
            job: Job { nodes: 1, ..between },
        },
    ];
    for case in &cases {
        let result = run(case, seconds);
        if json {
            println!("{result}");
        } else {
            println!(
                "{:<6} {:>10} records/s, {:>8} spans/s, {:.0} B/span, {} operations, {} given up, resident {} -> {} KiB",
                case.name,
                result["records_per_s"],
                result["spans_per_s"],
                result["otlp_bytes_per_span"].as_f64().unwrap_or(0.0),
                result["operations"],
                result["given_up"],
                result["resident_kib"][0],
                result["resident_kib"][1],
            );
        }
    }
}
