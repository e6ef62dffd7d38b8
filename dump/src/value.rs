//! Plain data that is written as a pickle or as JSON.

/// A value. Texts are UTF-8, numbers whole or floating.
#[derive(Clone, Debug, PartialEq)]
pub enum Value {
    /// Nothing.
    None,
    /// A truth value.
    Bool(bool),
    /// A whole number.
    Int(i64),
    /// A floating-point number, finite.
    Float(f64),
    /// A text.
    Text(String),
    /// A list.
    List(Vec<Value>),
    /// A pair, which is a tuple to Python and a list to JSON.
    Pair(Box<[Value; 2]>),
    /// Names and values, in order.
    Dict(Vec<(String, Value)>),
}

impl From<bool> for Value {
    fn from(value: bool) -> Self {
        Self::Bool(value)
    }
}

impl From<u64> for Value {
    /// A larger number than `i64::MAX` becomes that.
    fn from(value: u64) -> Self {
        Self::Int(i64::try_from(value).unwrap_or(i64::MAX))
    }
}

impl From<u32> for Value {
    fn from(value: u32) -> Self {
        Self::Int(value.into())
    }
}

impl From<&str> for Value {
    fn from(value: &str) -> Self {
        Self::Text(value.to_owned())
    }
}

impl From<String> for Value {
    fn from(value: String) -> Self {
        Self::Text(value)
    }
}

impl From<Vec<Value>> for Value {
    fn from(values: Vec<Value>) -> Self {
        Self::List(values)
    }
}

impl Value {
    /// A dictionary.
    pub(crate) fn dict<const N: usize>(entries: [(&str, Value); N]) -> Self {
        let entries = entries.into_iter();
        Self::Dict(entries.map(|(name, value)| (name.to_owned(), value)).collect())
    }

    /// A pickle for Python's `pickle.load`: protocol 2 (PEP 307), with built-in types only, so that no class is looked up.
    #[must_use]
    pub fn pickle(&self) -> Vec<u8> {
        // PROTO 2 … STOP.
        let mut bytes = vec![0x80, 2];
        self.put_pickle(&mut bytes);
        bytes.push(b'.');
        bytes
    }

    fn put_pickle(&self, bytes: &mut Vec<u8>) {
        match self {
            Self::None => bytes.push(b'N'),
            // NEWTRUE, NEWFALSE
            Self::Bool(value) => bytes.push(if *value { 0x88 } else { 0x89 }),
            Self::Int(value) => match i32::try_from(*value) {
                Ok(small) => {
                    bytes.push(b'J'); // BININT
                    bytes.extend(small.to_le_bytes());
                }
                Err(_) => {
                    bytes.extend([0x8a, 8]); // LONG1, 8 bytes of two's complement
                    bytes.extend(value.to_le_bytes());
                }
            },
            Self::Float(value) => {
                bytes.push(b'G'); // BINFLOAT
                bytes.extend(value.to_be_bytes());
            }
            Self::Text(text) => put_text(bytes, text),
            Self::List(values) => {
                bytes.extend(b"]("); // EMPTY_LIST MARK … APPENDS
                values.iter().for_each(|value| value.put_pickle(bytes));
                bytes.push(b'e');
            }
            Self::Pair(values) => {
                values.iter().for_each(|value| value.put_pickle(bytes));
                bytes.push(0x86); // TUPLE2
            }
            Self::Dict(entries) => {
                bytes.extend(b"}("); // EMPTY_DICT MARK … SETITEMS
                for (name, value) in entries {
                    put_text(bytes, name);
                    value.put_pickle(bytes);
                }
                bytes.push(b'u');
            }
        }
    }

    /// As JSON on one line.
    #[must_use]
    pub fn json(&self) -> String {
        let mut text = String::new();
        self.put_json(&mut text);
        text
    }

    fn put_json(&self, text: &mut String) {
        let mut list = |values: &[Value]| {
            text.push('[');
            for (index, value) in values.iter().enumerate() {
                if index > 0 {
                    text.push(',');
                }
                value.put_json(text);
            }
            text.push(']');
        };
        match self {
            Self::None => text.push_str("null"),
            Self::Bool(value) => text.push_str(if *value { "true" } else { "false" }),
            Self::Int(value) => text.push_str(&value.to_string()),
            // With a point, so that it is read as a float.
            Self::Float(value) => text.push_str(&format!("{value:?}")),
            Self::Text(value) => quote(text, value),
            Self::List(values) => list(values),
            Self::Pair(values) => list(&values[..]),
            Self::Dict(entries) => {
                text.push('{');
                for (index, (name, value)) in entries.iter().enumerate() {
                    if index > 0 {
                        text.push(',');
                    }
                    quote(text, name);
                    text.push(':');
                    value.put_json(text);
                }
                text.push('}');
            }
        }
    }
}

/// BINUNICODE, which has a 32-bit length; no text here is longer.
fn put_text(bytes: &mut Vec<u8>, text: &str) {
    bytes.push(b'X');
    bytes.extend((text.len() as u32).to_le_bytes());
    bytes.extend(text.as_bytes());
}

fn quote(text: &mut String, value: &str) {
    text.push('"');
    for character in value.chars() {
        match character {
            '"' | '\\' => text.extend(['\\', character]),
            control if control < ' ' => text.push_str(&format!("\\u{:04x}", control as u32)),
            // What a terminal would obey is escaped, too.
            character => text.push_str(&ringsight_output::json(character.encode_utf8(&mut [0; 4]))),
        }
    }
    text.push('"');
}

#[cfg(test)]
#[path = "../../tests/src/skip.rs"]
mod skip;

#[cfg(test)]
mod tests {
    use std::{
        io::Write as _,
        process::{Command, Stdio},
    };

    use proptest::prelude::*;

    use super::*;

    fn values() -> impl Strategy<Value = Value> {
        let leaf = prop_oneof![
            Just(Value::None),
            any::<bool>().prop_map(Value::Bool),
            any::<i64>().prop_map(Value::Int),
            (-3i64..3).prop_map(Value::Int),
            // Few digits: `serde_json` reads the last of many a little wrong.
            (-8000i32..8000).prop_map(|eighths| Value::Float(f64::from(eighths) / 8.0)),
            "\\PC{0,8}|[\\x00-\\x7f]{0,8}".prop_map(Value::Text),
        ];
        leaf.prop_recursive(4, 40, 6, |inner| {
            prop_oneof![
                prop::collection::vec(inner.clone(), 0..6).prop_map(Value::List),
                (inner.clone(), inner.clone()).prop_map(|(a, b)| Value::Pair(Box::new([a, b]))),
                prop::collection::btree_map("\\PC{0,8}", inner, 0..6)
                    .prop_map(|entries| Value::Dict(entries.into_iter().collect())),
            ]
        })
    }

    /// What an independent reader makes of both forms.
    fn plain(value: &Value) -> serde_json::Value {
        match value {
            Value::None => serde_json::Value::Null,
            Value::Bool(value) => (*value).into(),
            Value::Int(value) => (*value).into(),
            Value::Float(value) => (*value).into(),
            Value::Text(value) => value.clone().into(),
            Value::List(values) => values.iter().map(plain).collect(),
            Value::Pair(values) => values.iter().map(plain).collect(),
            Value::Dict(entries) => entries
                .iter()
                .map(|(name, value)| (name.clone(), plain(value)))
                .collect(),
        }
    }

    proptest! {
        #[test]
        fn json_is_read_back(value in values()) {
            let read: serde_json::Value = serde_json::from_str(&value.json()).unwrap();
            prop_assert_eq!(read, plain(&value));
        }
    }

    #[test]
    fn pickles_are_read_back_by_python() {
        use proptest::strategy::ValueTree as _;
        let mut runner = proptest::test_runner::TestRunner::deterministic();
        let all: Vec<Value> = (0..200)
            .map(|_| values().new_tree(&mut runner).unwrap().current())
            .collect();
        let all = Value::List(all);
        let read = "import sys, pickle, json; json.dump(pickle.load(sys.stdin.buffer), sys.stdout)";
        let started = Command::new("python3")
            .args(["-c", read])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn();
        let Ok(mut python) = started else {
            return skip::skip("pickles_are_read_back_by_python", "no python3 reads them");
        };
        python.stdin.take().unwrap().write_all(&all.pickle()).unwrap();
        let output = python.wait_with_output().unwrap();
        assert!(output.status.success());
        let read: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(read, plain(&all));
    }
}
