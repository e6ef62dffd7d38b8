//! Which algorithm a library takes for an operation, and why not another: `ringsight explain`.
//!
//! The table belongs to the library, which tells of it through `ringsightExplain` of ringsight.h. Here are the operations that
//! it is asked about: of a running process, of recorded spans, or of nobody.

use std::{
    collections::BTreeMap,
    ffi::{CStr, CString, c_char, c_int},
    fmt::{self, Write as _},
    path::Path,
};

use ringsight_records::{
    Algorithm, DataType, Description, Flags, Function, Protocol, ReduceOp, pages::Communicator,
};
use serde_json::{Value, json};

/// An operation, as far as the choice depends on it, and the communicator that it is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Operation {
    /// Function.
    pub function: Function,
    /// Message bytes by nccl-tests' definition.
    pub bytes: u64,
    /// Type.
    pub data_type: DataType,
    /// Reduction, [`ReduceOp::None`] where there is none.
    pub reduce_op: ReduceOp,
    /// Ranks of the communicator.
    pub ranks: u32,
    /// Its buffers lie in registered memory; `None` where that is not known.
    pub registered: Option<bool>,
    /// It was captured; `None` where that is not known.
    pub captured: Option<bool>,
}

impl Operation {
    /// Elements, as the function takes them.
    #[must_use]
    pub fn count(&self) -> u64 {
        let parts = match self.function {
            Function::AllGather
            | Function::ReduceScatter
            | Function::AlltoAll
            | Function::Gather
            | Function::Scatter => u64::from(self.ranks.max(1)),
            _ => 1,
        };
        self.bytes / (self.data_type.size() as u64 * parts)
    }
}

impl fmt::Display for Operation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {} bytes, {}", self.function, self.bytes, self.data_type)?;
        if self.reduce_op != ReduceOp::None {
            write!(f, " {}", self.reduce_op)?;
        }
        write!(f, ", {} ranks", self.ranks)?;
        match self.registered {
            Some(true) => f.write_str(", registered buffers")?,
            Some(false) => f.write_str(", ordinary buffers")?,
            None => {}
        }
        match self.captured {
            Some(true) => f.write_str(", captured"),
            Some(false) => f.write_str(", eager"),
            None => Ok(()),
        }
    }
}

/// What the choice depends on of a communicator.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Terms {
    /// Channels.
    pub channels: u32,
    /// Bytes of a FIFO slot.
    pub slot_bytes: u32,
    /// All ranks' devices do operations in one shot.
    pub one_shot: bool,
    /// All ranks' kernels reach each other's memory.
    pub peers: bool,
}

impl Terms {
    /// Those of a communicator; `None` if its library does not tell.
    #[must_use]
    pub fn of(communicator: &Communicator) -> Option<Self> {
        (communicator.slot_bytes != 0).then_some(Self {
            channels: communicator.channels,
            slot_bytes: communicator.slot_bytes,
            one_shot: communicator.abilities & Communicator::ONE_SHOT != 0,
            peers: communicator.abilities & Communicator::PEERS != 0,
        })
    }
}

/// How an operation was done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Done {
    /// Algorithm.
    pub algorithm: Algorithm,
    /// Protocol.
    pub protocol: Protocol,
    /// Channels.
    pub channels: u32,
}

impl fmt::Display for Done {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let s = if self.channels == 1 { "" } else { "s" };
        write!(
            f,
            "{}/{}, {} channel{s}",
            self.algorithm, self.protocol, self.channels
        )
    }
}

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

/// A row of the library's table, as it tells of it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Row {
    /// Algorithm's name.
    pub algorithm: String,
    /// Protocol's name.
    pub protocol: String,
    /// Channels, if it is the one that is taken.
    pub chosen: Option<u32>,
    /// Why it is not taken.
    pub reason: String,
}

/// `ringsightExplain_t`.
#[repr(C)]
struct Asked {
    size: usize,
    function: *const c_char,
    count: usize,
    data_type: c_int,
    op: c_int,
    ranks: c_int,
    channels: c_int,
    slot_bytes: usize,
    one_shot: c_int,
    peers: c_int,
}

/// `ringsightExplainRow_t`.
#[derive(Clone, Copy)]
#[repr(C)]
struct RawRow {
    algorithm: [u8; 16],
    protocol: [u8; 16],
    chosen: c_int,
    channels: c_int,
    reason: [u8; 128],
}

const _: () = assert!(size_of::<Asked>() == 56 && size_of::<RawRow>() == 168);

type Explain = unsafe extern "C" fn(*const Asked, *mut RawRow, *mut c_int) -> c_int;
type LastError = unsafe extern "C" fn(*const std::ffi::c_void) -> *const c_char;

/// A library that tells of its table.
pub struct Table {
    library: libloading::Library,
}

impl Table {
    /// Loads a library.
    ///
    /// # Errors
    /// It cannot be loaded, or is another than ringsight's.
    ///
    /// # Safety
    /// Loading a library runs what its maker put into it: the caller trusts the file.
    pub unsafe fn load(file: &Path) -> Result<Self, String> {
        // SAFETY: the caller's promise.
        let library = unsafe { libloading::Library::new(file) }.map_err(|error| error.to_string())?;
        // SAFETY: only whether it is there.
        unsafe { library.get::<Explain>(b"ringsightExplain\0") }.map_err(|_| {
            format!(
                "{} tells of no table: it is no libnccl.so.2 of ringsight, or an older one",
                file.display()
            )
        })?;
        Ok(Self { library })
    }

    /// The rows of the table, in the order in which they are tried.
    ///
    /// # Errors
    /// What the library refuses.
    pub fn explain(&self, operation: &Operation, terms: &Terms) -> Result<Vec<Row>, String> {
        /// More than any table has rows.
        const MOST: usize = 256;
        let name = CString::new(operation.function.name()).map_err(|error| error.to_string())?;
        let number = |what: &str, value: u32| {
            c_int::try_from(value).map_err(|_| format!("{value} {what} are too many"))
        };
        let asked = Asked {
            size: size_of::<Asked>(),
            function: name.as_ptr(),
            count: operation.count() as usize,
            data_type: operation.data_type.code().into(),
            op: match operation.reduce_op {
                ReduceOp::None => ReduceOp::Sum.code().into(),
                op => op.code().into(),
            },
            ranks: number("ranks", operation.ranks)?,
            channels: number("channels", terms.channels)?,
            slot_bytes: terms.slot_bytes as usize,
            one_shot: terms.one_shot.into(),
            peers: terms.peers.into(),
        };
        let empty = RawRow {
            algorithm: [0; 16],
            protocol: [0; 16],
            chosen: 0,
            channels: 0,
            reason: [0; 128],
        };
        let mut rows = vec![empty; MOST];
        let mut count = MOST as c_int;
        // SAFETY: the function of ringsight.h, which has checked that the struct is of its size; room for as many rows as is
        // said; the texts live until it returns, and its own until the next call of this thread.
        unsafe {
            let explain = self
                .library
                .get::<Explain>(b"ringsightExplain\0")
                .map_err(|error| error.to_string())?;
            if explain(&raw const asked, rows.as_mut_ptr(), &raw mut count) != 0 {
                let reason = self.library.get::<LastError>(b"ncclGetLastError\0");
                let reason = reason.map_err(|error| error.to_string())?(std::ptr::null());
                if reason.is_null() {
                    return Err("the library refuses to explain it".to_owned());
                }
                return Err(CStr::from_ptr(reason).to_string_lossy().into_owned());
            }
        }
        let text = |bytes: &[u8]| ringsight_records::pages::text(bytes).to_owned();
        rows.truncate(usize::try_from(count).unwrap_or(0).min(MOST));
        Ok(rows
            .iter()
            .map(|row| Row {
                algorithm: text(&row.algorithm),
                protocol: text(&row.protocol),
                chosen: (row.chosen != 0).then(|| u32::try_from(row.channels).unwrap_or(0)),
                reason: text(&row.reason),
            })
            .collect())
    }
}

/// One operation explained: how it was done, if it was, and the rows of the table.
#[derive(Clone, Debug)]
pub struct Explained {
    /// The operation.
    pub operation: Operation,
    /// What was asked of its communicator.
    pub terms: Terms,
    /// How it was done, and how often.
    pub done: Option<(Done, u64)>,
    /// The table.
    pub rows: Vec<Row>,
}

impl Explained {
    /// Whether the table says what was done. It does not for a library of another version, or for other terms.
    #[must_use]
    pub fn agrees(&self) -> bool {
        let Some((done, _)) = self.done else { return true };
        self.rows.iter().any(|row| {
            row.chosen.is_some()
                && row.algorithm == done.algorithm.name()
                && row.protocol == done.protocol.name()
        })
    }

    /// For people. Rows for other operations are left out.
    #[must_use]
    pub fn text(&self) -> String {
        let mut text = format!("{}\n", self.operation);
        if let Some((done, times)) = self.done {
            let _ = writeln!(text, "    done {times} times: {done}");
        }
        for row in &self.rows {
            let name = format!("{}/{}", row.algorithm, row.protocol);
            match row.chosen {
                Some(channels) => {
                    let s = if channels == 1 { "" } else { "s" };
                    let _ = writeln!(text, "  * {name:<20} taken, {channels} channel{s}");
                }
                None if row.reason.contains("other operations") => {}
                None => {
                    let _ = writeln!(text, "    {name:<20} not taken: {}", row.reason);
                }
            }
        }
        if !self.agrees() {
            text.push_str(
                "    The table does not say what was done: is the library another one, or are its terms?\n",
            );
        }
        text
    }

    /// For machines.
    #[must_use]
    pub fn json(&self) -> Value {
        json!({
            "operation": self.operation.function.name(),
            "bytes": self.operation.bytes,
            "data_type": self.operation.data_type.name(),
            "reduction": self.operation.reduce_op.name(),
            "ranks": self.operation.ranks,
            "registered": self.operation.registered,
            "captured": self.operation.captured,
            "channels": self.terms.channels,
            "slot_bytes": self.terms.slot_bytes,
            "one_shot": self.terms.one_shot,
            "peers": self.terms.peers,
            "done": self.done.map(|(done, times)| json!({
                "algorithm": done.algorithm.name(),
                "protocol": done.protocol.name(),
                "channels": done.channels,
                "times": times,
            })),
            "agrees": self.agrees(),
            "rows": self.rows.iter().map(|row| json!({
                "algorithm": row.algorithm,
                "protocol": row.protocol,
                "chosen": row.chosen.is_some(),
                "channels": row.chosen,
                "reason": row.reason,
            })).collect::<Vec<_>>(),
        })
    }
}

#[cfg(test)]
mod tests {
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

    #[test]
    fn the_row_that_is_taken_is_marked_and_others_say_why_not() {
        let (operation, done) = of_description(&description(8, Algorithm::Ring)).unwrap();
        let row = |algorithm: &str, chosen, reason: &str| Row {
            algorithm: algorithm.to_owned(),
            protocol: "simple".to_owned(),
            chosen,
            reason: reason.to_owned(),
        };
        let explained = Explained {
            operation,
            terms: Terms {
                channels: 2,
                slot_bytes: 1 << 17,
                one_shot: true,
                peers: false,
            },
            done: Some((done, 3)),
            rows: vec![
                row("one_shot", None, "some rank's device has no program of it"),
                row("ring", Some(2), ""),
                row("direct", None, "it is for other operations"),
            ],
        };
        assert!(explained.agrees());
        assert_eq!(
            explained.text(),
            "all_reduce of 8 bytes, float32 sum, 4 ranks, ordinary buffers, eager\n\
             \x20   done 3 times: ring/simple, 2 channels\n\
             \x20   one_shot/simple      not taken: some rank's device has no program of it\n\
             \x20 * ring/simple          taken, 2 channels\n"
        );
        assert_eq!(explained.json()["rows"][1]["chosen"], true);
        let mut other = explained;
        other.rows[1].chosen = None;
        assert!(!other.agrees() && other.text().contains("another one"));
    }

    #[test]
    fn a_library_without_a_table_is_told() {
        // SAFETY: the C library, which is loaded already.
        let error = unsafe { Table::load(Path::new("libc.so.6")) }.err().unwrap();
        assert!(error.contains("tells of no table"), "{error}");
    }
}
