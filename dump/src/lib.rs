//! Dumps of a rank's operations in the form of PyTorch's Flight Recorder. Its analyzer finds the rank that is missing or
//! differs (`torchfrtrace`, in PyTorch `torch.distributed.flight_recorder.fr_trace`).
//!
//! Each rank has a file `<prefix><rank>`. The file has the process groups of the rank and its last operations. It has the
//! operations of graphs, too, which PyTorch's own recorder does not have.
//!
//! The analyzer expects every operation on *all* ranks of its process group. So the messages from one rank to another are a
//! process group of two.

#![cfg_attr(
    test,
    allow(clippy::disallowed_methods, reason = "tests play whoever else writes there")
)]

mod file;
mod value;

use std::collections::BTreeMap;

use ringsight_records::{DataType, Description, Flags, Function};

pub use file::{Format, path, write};
pub use value::Value;

/// The version of the form, as PyTorch 2.11 writes it.
const VERSION: &str = "2.10";

/// A communicator as a rank sees it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Id, the same on all its ranks.
    pub id: u64,
    /// Empty if the user gave no name.
    pub name: String,
    /// This rank's number in it.
    pub rank: u32,
    /// By rank of the communicator, its number in the job.
    pub members: Vec<u32>,
}

/// The members of a communicator as ranks of the job. Ranks are matched by their places, which `T` names. Returns `None` if
/// a member is not of the job, or cannot be told from another one.
#[must_use]
pub fn members<T: Ord>(job: &[T], communicator: &[T]) -> Option<Vec<u32>> {
    let mut numbers = BTreeMap::new();
    for (rank, place) in (0..).zip(job) {
        // Two ranks of one place are not known by it.
        numbers
            .entry(place)
            .and_modify(|number| *number = None)
            .or_insert(Some(rank));
    }
    if job == communicator {
        return Some((0..job.len() as u32).collect());
    }
    communicator
        .iter()
        .map(|place| numbers.get(place).copied().flatten())
        .collect()
}

/// One moment by both clocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Moment {
    /// `CLOCK_MONOTONIC` nanoseconds: the clock of operations.
    pub monotonic_ns: u64,
    /// `CLOCK_REALTIME` nanoseconds: the clock of the file.
    pub realtime_ns: u64,
}

impl Moment {
    /// A time of an operation by the file's clock; [`Value::None`] for 0, which stands for no time.
    fn realtime(&self, ns: u64) -> Value {
        if ns == 0 {
            return Value::None;
        }
        // The time may be later than the moment.
        let since = self.monotonic_ns.saturating_sub(ns);
        self.realtime_ns.saturating_sub(since).into()
    }
}

/// Sender and receiver of a message.
fn pair(operation: &Description) -> Option<(u32, u32)> {
    let flags = Flags(operation.flags);
    let peer = u32::try_from(operation.peer).ok()?;
    if !flags.contains(Flags::P2P) {
        return None;
    }
    Some(if flags.contains(Flags::SEND) {
        (operation.rank, peer)
    } else {
        (peer, operation.rank)
    })
}

/// The dump of a rank. `groups` are its communicators, the largest one first. Operations of other communicators are left
/// out.
#[must_use]
pub fn dump(groups: &[Group], operations: &[Description], moment: &Moment) -> Value {
    let mut entries: Vec<(u64, &Group, &Description)> = operations
        .iter()
        .filter_map(|operation| {
            let of = |group: &&Group| (group.id, group.rank) == (operation.comm, operation.rank);
            let group = groups.iter().find(of)?;
            // A captured operation counts as called once it has been replayed.
            let called = if operation.graph == 0 {
                operation.api_start_ns
            } else {
                operation.device_start_ns
            };
            let to_itself = pair(operation).is_some_and(|(from, to)| from == to);
            let has_members = group.members.len() == operation.ranks as usize;
            (called != 0 && !to_itself && has_members).then_some((called, group, operation))
        })
        .collect();
    entries.sort_by_key(|(called, _, operation)| (*called, operation.op));
    // The analyzer leaves out records before the latest first record of any rank. So the record number must be the same on all
    // ranks: it counts the collectives of the communicator that they are all in.
    let main = groups.first().map(|group| group.id);
    let mut record = 0;
    let mut process_groups = BTreeMap::new();
    for group in groups {
        let (name, config) = process_group(name(group), &description(group), &group.members);
        process_groups.insert(name, config);
    }
    let mut listed = Vec::new();
    for (called, group, operation) in entries {
        if main == Some(group.id) && pair(operation).is_none() && operation.graph == 0 {
            record = record.max(operation.seq);
        }
        let (process_group, entry) = entry(group, operation, record, called, moment);
        process_groups.extend(process_group);
        listed.push(entry);
    }
    Value::dict([
        ("version", VERSION.into()),
        ("pg_config", Value::Dict(process_groups.into_iter().collect())),
        ("pg_status", Value::Dict(Vec::new())),
        ("entries", listed.into()),
        ("nccl_comm_state", Value::Dict(Vec::new())),
    ])
}

fn name(group: &Group) -> String {
    format!("{:016x}", group.id)
}

fn description(group: &Group) -> String {
    match group.name.as_str() {
        "" => "undefined".to_owned(),
        name => name.to_owned(),
    }
}

/// A process group of these ranks of the job: its name and its configuration.
fn process_group(name: String, description: &str, ranks: &[u32]) -> (String, Value) {
    let ranks: Vec<String> = ranks.iter().map(u32::to_string).collect();
    let config = Value::dict([
        ("name", name.as_str().into()),
        ("desc", description.into()),
        ("ranks", format!("[{}]", ranks.join(", ")).into()),
    ]);
    (name, config)
}

/// The name of a scalar type in PyTorch.
fn data_type(code: u8) -> &'static str {
    match DataType::from_code(code) {
        Some(DataType::Int8) => "Char",
        Some(DataType::Uint8) => "Byte",
        Some(DataType::Int32) => "Int",
        Some(DataType::Uint32) => "UInt32",
        Some(DataType::Int64) => "Long",
        Some(DataType::Uint64) => "UInt64",
        Some(DataType::Float16) => "Half",
        Some(DataType::Float32) => "Float",
        Some(DataType::Float64) => "Double",
        Some(DataType::Bfloat16) => "BFloat16",
        Some(DataType::Float8e4m3) => "Float8_e4m3fn",
        Some(DataType::Float8e5m2) => "Float8_e5m2",
        None => "Undefined",
    }
}

/// An operation's name in PyTorch, and the elements of its input and output on this rank; `None` where it has none.
fn shape(function: Function, operation: &Description) -> (&'static str, Option<u64>, Option<u64>) {
    let one = operation.count;
    let all = one.saturating_mul(operation.ranks.into());
    let is_root = i64::from(operation.root) == i64::from(operation.rank);
    let at_root = is_root.then_some(all);
    match function {
        Function::AllReduce => ("all_reduce", Some(one), Some(one)),
        Function::AllGather => ("_all_gather_base", Some(one), Some(all)),
        Function::ReduceScatter => ("_reduce_scatter_base", Some(all), Some(one)),
        Function::Broadcast => ("broadcast", Some(one), Some(one)),
        Function::Reduce => ("reduce", Some(one), Some(one)),
        Function::AlltoAll => ("all_to_all", Some(all), Some(all)),
        Function::Gather => ("gather", Some(one), at_root),
        Function::Scatter => ("scatter", at_root, Some(one)),
        Function::Send => ("send", Some(one), Some(one)),
        Function::Recv => ("recv", Some(one), Some(one)),
    }
}

/// The entry of an operation. For a message also the process group of its two ranks.
fn entry(
    group: &Group,
    operation: &Description,
    record: u64,
    called: u64,
    moment: &Moment,
) -> (Option<(String, Value)>, Value) {
    let function = Function::from_code(operation.function).unwrap_or(Function::AllReduce);
    let (kind, input, output) = shape(function, operation);
    let pair = pair(operation);
    let (process_group, own, kind) = match pair {
        None => (None, name(group), kind.to_owned()),
        Some((from, to)) => {
            let own = format!("{} messages {from}->{to}", name(group));
            let global = |rank: u32| group.members.get(rank as usize).copied().unwrap_or(rank);
            let mut ranks = [global(from), global(to)];
            // The analyzer numbers the two by their ranks in the job.
            let places = (u8::from(ranks[0] > ranks[1]), u8::from(ranks[0] < ranks[1]));
            ranks.sort_unstable();
            let kind = match function {
                Function::Send => format!("send {}->{}", places.0, places.1),
                _ => format!("recv {}<-{}", places.1, places.0),
            };
            let process_group = process_group(own.clone(), &description(group), &ranks);
            (Some(process_group), own, kind)
        }
    };
    let sizes = |elements: Option<u64>| -> Value {
        let sizes: Vec<Value> = elements.map(Value::from).into_iter().collect();
        vec![sizes.into()].into()
    };
    let types = || -> Value { vec![data_type(operation.data_type).into()].into() };
    let (begun, ended) = (operation.device_start_ns, operation.device_end_ns);
    // The end of a captured operation may be that of the replay before.
    let ended = if ended >= begun { ended } else { 0 };
    let (state, duration) = match (begun, ended) {
        (_, 1..) => (
            "completed",
            Value::Float(ended.saturating_sub(begun) as f64 / 1e6),
        ),
        (0, 0) => ("scheduled", Value::None),
        _ => ("started", Value::None),
    };
    let entry = Value::dict([
        ("frames", Vec::new().into()),
        ("record_id", record.into()),
        ("pg_id", 0_u32.into()),
        (
            "process_group",
            Value::Pair(Box::new([own.into(), description(group).into()])),
        ),
        // The analyzer pairs messages by this number, too.
        ("collective_seq_id", operation.seq.into()),
        (
            "p2p_seq_id",
            if pair.is_some() { operation.seq } else { 0 }.into(),
        ),
        ("op_id", operation.op.into()),
        ("profiling_name", format!("nccl:{kind}").into()),
        ("time_created_ns", moment.realtime(called)),
        ("duration_ms", duration),
        ("input_sizes", sizes(input)),
        ("input_dtypes", types()),
        ("output_sizes", sizes(output)),
        ("output_dtypes", types()),
        ("state", state.into()),
        ("time_discovered_started_ns", moment.realtime(begun)),
        ("time_discovered_completed_ns", moment.realtime(ended)),
        ("retired", (state == "completed").into()),
        ("timeout_ms", 0_u32.into()),
        ("is_p2p", pair.is_some().into()),
        ("thread_id", operation.tid.to_string().into()),
        ("thread_name", "".into()),
        // Fields that PyTorch's recorder does not have.
        ("graph", operation.graph.into()),
        ("stream", operation.stream.into()),
        ("channel_mask", format!("{:#x}", operation.channel_mask).into()),
    ]);
    (process_group, entry)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOMENT: Moment = Moment {
        monotonic_ns: 1000,
        realtime_ns: 1_000_000,
    };

    fn group(rank: u32) -> Group {
        Group {
            id: 7,
            name: "tp".to_owned(),
            rank,
            members: vec![4, 9, 2],
        }
    }

    fn operation(function: Function, rank: u32, seq: u64) -> Description {
        Description {
            comm: 7,
            rank,
            ranks: 3,
            seq,
            op: seq as u32 + 1,
            peer: -1,
            root: -1,
            count: 10,
            function: function.code(),
            data_type: DataType::Float32.code(),
            api_start_ns: 100 + seq,
            device_start_ns: 200,
            device_end_ns: 300,
            ..Description::default()
        }
    }

    fn read(value: &Value) -> serde_json::Value {
        serde_json::from_str(&value.json()).unwrap()
    }

    #[test]
    fn members_are_matched_by_their_places() {
        assert_eq!(members(&["a", "b", "c"], &["c", "a"]), Some(vec![2, 0]));
        assert_eq!(members(&["a", "b"], &["c"]), None);
        assert_eq!(members(&["a", "a"], &["a"]), None);
        assert_eq!(members(&["a", "a"], &["a", "a"]), Some(vec![0, 1]));
    }

    #[test]
    fn operations_are_listed_as_the_analyzer_expects_them() {
        let hung = Description {
            device_end_ns: 0,
            ..operation(Function::AllGather, 1, 2)
        };
        let queued = Description {
            device_start_ns: 0,
            device_end_ns: 0,
            ..operation(Function::ReduceScatter, 1, 3)
        };
        let replayed = Description {
            graph: 1,
            device_start_ns: 400,
            ..operation(Function::AllReduce, 1, 1 << 32)
        };
        let never = Description {
            graph: 1,
            device_start_ns: 0,
            ..replayed
        };
        let send = Description {
            flags: Flags::P2P.0 | Flags::SEND.0,
            peer: 2,
            ..operation(Function::Send, 1, 0)
        };
        let operations = [
            replayed,
            queued,
            hung,
            operation(Function::AllReduce, 1, 1),
            never,
            send,
            operation(Function::AllReduce, 0, 1),
        ];
        let dump = read(&dump(&[group(1)], &operations, &MOMENT));
        assert_eq!(dump["version"], "2.10");
        let entries = dump["entries"].as_array().unwrap();
        let of = |key: &str| -> Vec<_> { entries.iter().map(|entry| entry[key].clone()).collect() };
        assert_eq!(
            of("profiling_name"),
            [
                "nccl:send 1->0",
                "nccl:all_reduce",
                "nccl:_all_gather_base",
                "nccl:_reduce_scatter_base",
                "nccl:all_reduce"
            ]
        );
        assert_eq!(
            of("state"),
            ["completed", "completed", "started", "scheduled", "started"]
        );
        assert_eq!(of("record_id"), [0, 1, 2, 3, 3]);
        assert_eq!(entries[2]["output_sizes"], serde_json::json!([[30]]));
        assert_eq!(entries[2]["time_discovered_started_ns"], 999_200);
        assert_eq!(
            entries[2]["time_discovered_completed_ns"],
            serde_json::Value::Null
        );
        let groups = &dump["pg_config"];
        assert_eq!(groups["0000000000000007"]["ranks"], "[4, 9, 2]");
        assert_eq!(groups["0000000000000007 messages 1->2"]["ranks"], "[2, 9]");
        assert_eq!(
            entries[0]["process_group"],
            serde_json::json!(["0000000000000007 messages 1->2", "tp"])
        );
    }
}
