//! The table against what was measured: every way of every operation over sizes, by the part `tune` of a bundle for GPU hosts.

use std::collections::BTreeMap;

use ringsight_records::{DataType, Function, ReduceOp};

use super::{
    algorithm::{Asked, Engines},
    limits::Limits,
    table::choose,
};

const MEASURED: &str = include_str!("../../../docs/src/performance/tuning.jsonl");
/// What is taken may be so much slower than the best: two runs of the same differ by as much.
const TOLERANCE: f64 = 1.1;

/// What the library asks of the table for an operation of the driver's.
fn asked(operation: &str, bytes: u64, ranks: u32) -> Asked {
    let function = Function::ALL.iter().find(|function| function.name() == operation);
    let function = function.copied().unwrap_or(Function::Send);
    let bytes = match function {
        // The driver tells those of a whole buffer, which one call is given for each peer.
        Function::AlltoAll => bytes / u64::from(ranks),
        _ => bytes,
    };
    Asked {
        function,
        reduce_op: ReduceOp::Sum,
        data_type: DataType::Float32,
        bytes,
        ranks,
        slot_bytes: 128 << 10,
        one_shot: true,
        peers: true,
        engines: Engines::NoWindow,
        limits: Limits::default(),
    }
}

/// A field of a line of JSON that `tune` has written: no text in it has a comma or a quote.
fn field<'a>(line: &'a str, name: &str) -> &'a str {
    let (_, rest) = line.split_once(&format!("\"{name}\":")).unwrap();
    rest.split([',', '}']).next().unwrap().trim_matches('"')
}

#[test]
fn the_table_takes_what_was_measured_to_be_fastest() {
    let mut sizes: BTreeMap<(u64, &str, u64), BTreeMap<&str, f64>> = BTreeMap::new();
    for line in MEASURED.lines() {
        let number = |name: &str| field(line, name).parse::<u64>().unwrap();
        let ways = sizes.entry((number("ranks"), field(line, "operation"), number("bytes")));
        let micros: f64 = field(line, "micros").parse().unwrap();
        ways.or_default().insert(field(line, "way"), micros);
    }
    assert!(sizes.len() > 50, "{} sizes", sizes.len());
    let mut slower = Vec::new();
    for ((ranks, operation, bytes), mut ways) in sizes {
        ways.remove("table");
        let choice = choose(&asked(operation, bytes, ranks as u32)).unwrap();
        let way = format!("{}/{}", choice.algorithm, choice.protocol);
        let (best, least) = ways.iter().min_by(|a, b| a.1.total_cmp(b.1)).unwrap();
        let taken = ways.get(&*way).copied();
        if taken.is_none_or(|taken| taken > least * TOLERANCE) {
            slower.push(format!(
                "{operation} of {bytes} bytes, {ranks} ranks: {way} {taken:?}, {best} {least}"
            ));
        }
    }
    assert!(slower.is_empty(), "{slower:#?}");
}
