//! The table against measurements: the part `tune` of a bundle for GPU hosts times every row that serves an operation, over sizes.

use std::collections::BTreeMap;

use ringsight_records::{DataType, Function, ReduceOp};

use super::{Query, WindowSupport, choose};
use crate::plan::limits::Limits;

const MEASURED: &str = include_str!("../../../../measurements/tuning.jsonl");
/// The chosen row may be this much slower than the fastest: two runs of one row differ by as much.
const TOLERANCE: f64 = 1.1;

/// What the library asks of the table for an operation of the driver's.
fn query(operation: &str, data_type: DataType, bytes: u64, ranks: u32) -> Query {
    let function = Function::ALL.iter().find(|function| function.name() == operation);
    let function = function.copied().unwrap_or(Function::Send);
    let bytes = match function {
        // The driver tells those of a whole buffer, which one call is given for each peer.
        Function::AlltoAll | Function::Gather | Function::Scatter => bytes / u64::from(ranks),
        _ => bytes,
    };
    Query {
        function,
        reduce_op: ReduceOp::Sum,
        data_type,
        bytes,
        ranks,
        slot_bytes: 128 << 10,
        one_shot: true,
        peer_access: true,
        window: WindowSupport::NoWindow,
        limits: Limits::default(),
    }
}

/// A field of a line of JSON that `tune` has written, if it has that: no text in it has a comma or a quote.
fn field<'a>(line: &'a str, name: &str) -> Option<&'a str> {
    let (_, rest) = line.split_once(&format!("\"{name}\":"))?;
    Some(rest.split([',', '}']).next()?.trim_matches('"'))
}

/// Ranks, operation, type and bytes.
type Size<'a> = (u32, &'a str, &'a str, u64);

/// What was measured, by size and way. Earlier runs have written one time of each, and no type, which was float32; those that tell captured operations
/// from eager ones have both of short ones, and the captured ones count: the host's part of an eager one is the same in all ways.
fn read(lines: &str) -> BTreeMap<Size<'_>, BTreeMap<&str, f64>> {
    let mut sizes: BTreeMap<Size<'_>, BTreeMap<&str, (bool, f64)>> = BTreeMap::new();
    for line in lines.lines() {
        let number = |name: &str| field(line, name).unwrap().parse::<u64>().unwrap();
        let data_type = field(line, "type").unwrap_or("float32");
        let operation = field(line, "operation").unwrap();
        let ways = sizes.entry((number("ranks") as u32, operation, data_type, number("bytes")));
        let micros: f64 = field(line, "micros").unwrap().parse().unwrap();
        let timed = (field(line, "graph") != Some("false"), micros);
        let way = ways
            .or_default()
            .entry(field(line, "way").unwrap())
            .or_insert(timed);
        if timed.0 {
            *way = timed;
        }
    }
    let without = |(size, ways): (_, BTreeMap<_, (bool, f64)>)| {
        let micros = ways.into_iter().map(|(way, (_, micros))| (way, micros));
        (size, micros.collect())
    };
    sizes.into_iter().map(without).collect()
}

#[test]
fn captured_operations_count_where_there_are_both() {
    let lines = "{\"ranks\":2,\"operation\":\"all_reduce\",\"bytes\":8,\"way\":\"table\",\"micros\":2.5}\n\
                 {\"gpu\":\"A GPU\",\"driver\":\"1.2\",\"ranks\":4,\"type\":\"bfloat16\",\"way\":\"direct/ll128\",\"operation\":\"reduce\",\"bytes\":8,\"graph\":true,\"micros\":3.5}\n\
                 {\"gpu\":\"A GPU\",\"driver\":\"1.2\",\"ranks\":4,\"type\":\"bfloat16\",\"way\":\"direct/ll128\",\"operation\":\"reduce\",\"bytes\":8,\"graph\":false,\"micros\":9.5}\n\
                 {\"gpu\":\"A GPU\",\"driver\":\"1.2\",\"ranks\":4,\"type\":\"float32\",\"way\":\"table\",\"operation\":\"reduce\",\"bytes\":16,\"graph\":false,\"micros\":7}\n";
    let sizes = read(lines);
    assert_eq!(sizes.len(), 3);
    assert_eq!(sizes[&(2, "all_reduce", "float32", 8)]["table"], 2.5);
    assert_eq!(sizes[&(4, "reduce", "bfloat16", 8)]["direct/ll128"], 3.5);
    assert_eq!(sizes[&(4, "reduce", "float32", 16)]["table"], 7.0);
}

#[test]
fn the_table_takes_what_was_measured_to_be_fastest() {
    let sizes = read(MEASURED);
    assert!(sizes.len() > 50, "{} sizes", sizes.len());
    let mut slower = Vec::new();
    for ((ranks, operation, name, bytes), mut ways) in sizes {
        ways.remove("table");
        let data_type = DataType::ALL.iter().find(|each| each.name() == name).unwrap();
        let row = choose(&query(operation, *data_type, bytes, ranks)).unwrap();
        let way = format!("{}/{}", row.algorithm, row.path.protocol());
        let (best, least) = ways.iter().min_by(|a, b| a.1.total_cmp(b.1)).unwrap();
        let taken = ways.get(&*way).copied();
        if taken.is_none_or(|taken| taken > least * TOLERANCE) {
            slower.push(format!(
                "{operation} of {bytes} bytes of {name}, {ranks} ranks: {way} {taken:?}, {best} {least}"
            ));
        }
    }
    assert!(slower.is_empty(), "{slower:#?}");
}
