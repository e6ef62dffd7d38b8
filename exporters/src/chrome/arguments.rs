//! Attributes as event arguments, under the keys of `PyTorch`'s profiler (Kineto, `record_param_comms`) where it has one.

use std::{borrow::Cow, io::Write as _};

use crate::model::{Attribute, Value};

/// The attributes of a span that decide its track or become profiler keys.
pub(super) struct Arguments<'a> {
    all: &'a [Attribute],
    /// `ccl.operation.name`
    pub(super) operation: Option<&'a str>,
    /// `ccl.channel.id`
    pub(super) channel: Option<i64>,
    /// `ccl.peer.rank`
    pub(super) peer: Option<i64>,
    /// `ccl.communicator.name`
    pub(super) communicator_name: Option<&'a str>,
    /// `ccl.communicator.id`
    pub(super) communicator: Option<&'a str>,
    /// `ccl.communicator.size`
    pub(super) size: Option<i64>,
    rank: Option<i64>,
    source: Option<i64>,
    destination: Option<i64>,
    bytes: Option<i64>,
    sequence: Option<i64>,
    data_type: Option<&'a str>,
}

fn str_of(value: &Value) -> Option<&str> {
    match value {
        Value::Static(text) => Some(text),
        Value::Text(text) => Some(text),
        _ => None,
    }
}

fn int_of(value: &Value) -> Option<i64> {
    if let Value::Int(number) = value {
        Some(*number)
    } else {
        None
    }
}

impl<'a> Arguments<'a> {
    /// Sorts the attributes.
    pub(super) fn of(all: &'a [Attribute]) -> Self {
        let mut found = Self {
            all,
            operation: None,
            channel: None,
            peer: None,
            communicator_name: None,
            communicator: None,
            size: None,
            rank: None,
            source: None,
            destination: None,
            bytes: None,
            sequence: None,
            data_type: None,
        };
        for (key, value) in all {
            match *key {
                "ccl.operation.name" => found.operation = str_of(value),
                "ccl.channel.id" => found.channel = int_of(value),
                "ccl.peer.rank" => found.peer = int_of(value),
                "ccl.communicator.name" => found.communicator_name = str_of(value),
                "ccl.communicator.id" => found.communicator = str_of(value),
                "ccl.rank" => found.rank = int_of(value),
                "ccl.source.rank" => found.source = int_of(value),
                "ccl.destination.rank" => found.destination = int_of(value),
                "ccl.communicator.size" => found.size = int_of(value),
                "ccl.message.size" => found.bytes = int_of(value),
                "ccl.operation.sequence" => found.sequence = int_of(value),
                "ccl.data_type" => found.data_type = str_of(value),
                _ => {}
            }
        }
        found.communicator_name = found.communicator_name.filter(|name| !name.is_empty());
        found
    }

    /// Every attribute under its own name and, for those that the profiler has a key for, that key; each followed by a
    /// comma.
    pub(super) fn write(&self, buffer: &mut Vec<u8>) {
        let mut text = |key: &str, value: Option<&str>| {
            if let Some(value) = value {
                string(buffer, key);
                buffer.push(b':');
                string(buffer, value);
                buffer.push(b',');
            }
        };
        text("Collective name", self.operation.map(collective_name));
        text("dtype", self.data_type.map(scalar_type));
        text("Process Group Name", self.communicator_name.or(self.communicator));
        text("Comms Id", self.communicator);
        let mut number = |key: &str, value: Option<i64>| {
            if let Some(value) = value {
                write!(buffer, "\"{key}\":{value},").ok();
            }
        };
        let (input, output) = self.elements().unzip();
        number("In msg nelems", input);
        number("Out msg nelems", output);
        number("Group size", self.size);
        number("Rank", self.rank);
        number("Seq", self.sequence);
        let (source, destination) = match self.operation {
            Some("send") => (self.rank, self.peer),
            Some("recv") => (self.peer, self.rank),
            _ => (self.source, self.destination),
        };
        number("Src Rank", source);
        number("Dst Rank", destination);
        for (key, value) in self.all {
            string(buffer, key);
            buffer.push(b':');
            self::value(buffer, value);
            buffer.push(b',');
        }
    }

    /// Every attribute under its own name.
    pub(super) fn write_plain(&self, buffer: &mut Vec<u8>) {
        for (index, (key, value)) in self.all.iter().enumerate() {
            if index > 0 {
                buffer.push(b',');
            }
            string(buffer, key);
            buffer.push(b':');
            self::value(buffer, value);
        }
    }

    /// Elements that one rank gives and gets. The message size counts all ranks' data for gathers and scatters, as
    /// nccl-tests does.
    fn elements(&self) -> Option<(i64, i64)> {
        let total = self.bytes? / element_bytes(self.data_type?)?;
        let share = || Some(total / self.size.filter(|ranks| *ranks > 0)?);
        Some(match self.operation? {
            "all_gather" | "gather" => (share()?, total),
            "reduce_scatter" | "scatter" => (total, share()?),
            _ => (total, total),
        })
    }
}

/// The operation's name in `PyTorch`'s profiler (`ProcessGroupNCCL`, tensors in one piece).
pub(super) fn collective_name(name: &str) -> &str {
    match name {
        "all_reduce" => "allreduce",
        "all_gather" => "_allgather_base",
        "reduce_scatter" => "_reduce_scatter_base",
        "alltoall" => "all_to_all",
        other => other,
    }
}

/// The data type's name in `PyTorch` (`c10::ScalarType`).
fn scalar_type(name: &str) -> &str {
    match name {
        "int8" => "Char",
        "uint8" => "Byte",
        "int32" => "Int",
        "uint32" => "UInt32",
        "int64" => "Long",
        "uint64" => "UInt64",
        "float16" => "Half",
        "float32" => "Float",
        "float64" => "Double",
        "bfloat16" => "BFloat16",
        "float8e4m3" => "Float8_e4m3fn",
        "float8e5m2" => "Float8_e5m2",
        other => other,
    }
}

fn element_bytes(name: &str) -> Option<i64> {
    Some(match name {
        "int8" | "uint8" | "float8e4m3" | "float8e5m2" => 1,
        "float16" | "bfloat16" => 2,
        "int32" | "uint32" | "float32" => 4,
        "int64" | "uint64" | "float64" => 8,
        _ => return None,
    })
}

/// Appends a JSON string.
pub(super) fn string(buffer: &mut Vec<u8>, text: &str) {
    crate::json_string(buffer, text);
}

fn value(buffer: &mut Vec<u8>, value: &Value) {
    match value {
        Value::Int(number) => write!(buffer, "{number}").unwrap_or_default(),
        // Rust prints a finite float as a JSON number; JSON has none for the others.
        Value::Double(number) if number.is_finite() => write!(buffer, "{number}").unwrap_or_default(),
        Value::Bool(flag) => write!(buffer, "{flag}").unwrap_or_default(),
        other => string(buffer, &text(other)),
    }
}

/// The value as text.
pub(super) fn text(value: &Value) -> Cow<'_, str> {
    match value {
        Value::Static(text) => Cow::Borrowed(text),
        Value::Text(text) => Cow::Borrowed(text),
        Value::Int(number) => Cow::Owned(number.to_string()),
        Value::Double(number) => Cow::Owned(number.to_string()),
        Value::Bool(flag) => Cow::Owned(flag.to_string()),
    }
}
