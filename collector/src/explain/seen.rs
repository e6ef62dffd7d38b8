//! Operations that were done, and how.

use std::collections::BTreeMap;

use ringsight_records::{
    Algorithm, DataType, Description, Flags, Function, Protocol, ReduceOp, pages::Communicator,
};
use serde_json::Value;

use super::{Done, Operation, Terms};

/// Operations that are alike, and how often they were seen.
pub type Seen = BTreeMap<(Operation, Option<Terms>, Done), u64>;

/// The operations that a process describes.
#[must_use]
pub fn of_process(communicators: &[Communicator], descriptions: &[Description]) -> Seen {
    let mut seen = Seen::new();
    for description in descriptions {
        let Some((operation, done)) = of_description(description) else {
            continue;
        };
        let communicator = communicators
            .iter()
            .find(|communicator| communicator.id == description.comm);
        let terms = communicator.and_then(Terms::of);
        *seen.entry((operation, terms, done)).or_default() += 1;
    }
    seen
}

/// `None` if a number in it stands for nothing: the process may be broken, or newer.
fn of_description(description: &Description) -> Option<(Operation, Done)> {
    let flags = Flags(description.flags);
    Some((
        Operation {
            function: Function::from_code(description.function)?,
            bytes: description.bytes,
            data_type: DataType::from_code(description.data_type)?,
            reduce_op: ReduceOp::from_code(description.reduce_op)?,
            ranks: description.ranks,
            registered: Some(flags.contains(Flags::REGISTERED)),
            captured: Some(flags.contains(Flags::GRAPH)),
        },
        Done {
            algorithm: Algorithm::from_code(description.algorithm)?,
            protocol: Protocol::from_code(description.protocol)?,
            channels: description.channels.into(),
        },
    ))
}

/// The operations of recorded spans: OTLP JSON lines, as `ringsight attach --out` writes them. What is no span of an operation
/// is passed over.
///
/// # Errors
/// The number of a line that is no JSON.
pub fn of_spans(lines: &str) -> Result<Seen, String> {
    let mut seen = Seen::new();
    for (index, line) in lines
        .lines()
        .enumerate()
        .filter(|(_, line)| !line.trim().is_empty())
    {
        let line: Value =
            serde_json::from_str(line).map_err(|error| format!("line {}: {error}", index + 1))?;
        for span in children(&line, "resourceSpans")
            .flat_map(|resource| children(resource, "scopeSpans"))
            .flat_map(|scope| children(scope, "spans"))
        {
            if let Some((operation, done)) = of_span(span) {
                *seen.entry((operation, None, done)).or_default() += 1;
            }
        }
    }
    Ok(seen)
}

fn children<'a>(value: &'a Value, name: &str) -> impl Iterator<Item = &'a Value> {
    value[name].as_array().into_iter().flatten()
}

fn of_span(span: &Value) -> Option<(Operation, Done)> {
    let find = |key: &str| children(span, "attributes").find(|attribute| attribute["key"] == key);
    let text = |key: &str| find(key)?["value"]["stringValue"].as_str();
    // 64-bit integers are text in OTLP's JSON.
    let number = |key: &str| -> Option<u64> {
        let value = &find(key)?["value"]["intValue"];
        value.as_u64().or_else(|| value.as_str()?.parse().ok())
    };
    let named = |key: &str| text(key);
    let name = named("ccl.operation.name")?;
    let function = Function::ALL
        .iter()
        .find(|function| function.name() == name)
        // Both ends of a message in one span; they come to the same choice.
        .or_else(|| name.starts_with("send").then_some(&Function::Send))?;
    let data_type = named("ccl.data_type")?;
    let reduction = named("ccl.reduction").unwrap_or(ReduceOp::None.name());
    let (algorithm, protocol) = (named("ccl.algorithm")?, named("ccl.protocol")?);
    Some((
        Operation {
            function: *function,
            bytes: number("ccl.message.size")?,
            data_type: *DataType::ALL.iter().find(|one| one.name() == data_type)?,
            reduce_op: *ReduceOp::ALL.iter().find(|one| one.name() == reduction)?,
            ranks: number("ccl.communicator.size")?.try_into().ok()?,
            registered: None,
            captured: find("ccl.graph.captured").and_then(|flag| flag["value"]["boolValue"].as_bool()),
        },
        Done {
            algorithm: *Algorithm::ALL.iter().find(|one| one.name() == algorithm)?,
            protocol: *Protocol::ALL.iter().find(|one| one.name() == protocol)?,
            channels: number("ccl.channel.count")?.try_into().ok()?,
        },
    ))
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn description(bytes: u64, algorithm: Algorithm) -> Description {
        Description {
            comm: 7,
            bytes,
            ranks: 4,
            function: Function::AllReduce.code(),
            data_type: DataType::Float32.code(),
            reduce_op: ReduceOp::Sum.code(),
            algorithm: algorithm.code(),
            protocol: Protocol::Simple.code(),
            channels: 2,
            ..Description::default()
        }
    }

    #[test]
    fn operations_that_are_alike_are_counted_together() {
        let mut broken = description(8, Algorithm::Ring);
        broken.function = 200;
        let all = [
            description(8, Algorithm::OneShot),
            description(8, Algorithm::OneShot),
            description(1 << 20, Algorithm::Ring),
            broken,
        ];
        let seen = of_process(&[], &all);
        let counts: Vec<_> = seen
            .iter()
            .map(|((operation, ..), times)| (operation.bytes, *times))
            .collect();
        assert_eq!(counts, [(8, 2), (1 << 20, 1)]);
    }

    #[test]
    fn spans_are_read_and_others_passed_over() {
        let attribute = |key: &str, value: Value| json!({"key": key, "value": value});
        let span = |name: &str| {
            json!({"attributes": [
                attribute("ccl.operation.name", json!({"stringValue": name})),
                attribute("ccl.message.size", json!({"intValue": "4096"})),
                attribute("ccl.communicator.size", json!({"intValue": 2})),
                attribute("ccl.data_type", json!({"stringValue": "bfloat16"})),
                attribute("ccl.reduction", json!({"stringValue": "avg"})),
                attribute("ccl.algorithm", json!({"stringValue": "ring"})),
                attribute("ccl.protocol", json!({"stringValue": "simple"})),
                attribute("ccl.channel.count", json!({"intValue": "2"})),
                attribute("ccl.graph.captured", json!({"boolValue": true})),
            ]})
        };
        let spans = [
            span("all_gather"),
            span("nothing"),
            json!({"attributes": 3}),
            json!(7),
        ];
        let line = json!({"resourceSpans": [{"scopeSpans": [{"spans": spans}]}]});
        let seen = of_spans(&format!("{line}\n\n{{}}\n{line}\n")).unwrap();
        let ((operation, terms, done), times) = seen.first_key_value().unwrap();
        assert_eq!((seen.len(), *times, *terms), (1, 2, None));
        assert_eq!(operation.count(), 1024);
        assert_eq!(
            operation.to_string(),
            "all_gather of 4096 bytes, bfloat16 avg, 2 ranks, captured"
        );
        assert_eq!(done.to_string(), "ring/simple, 2 channels");
        let error = of_spans("{}\nrubbish\n").unwrap_err();
        assert!(error.starts_with("line 2"), "{error}");
    }
}
