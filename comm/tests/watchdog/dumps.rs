//! Dumps that ranks write when one of them finds a hang.

use std::env;

use ringsight_comm::abi;
use ringsight_records::Function;

use super::ELEMENTS;
use crate::{
    common::{Call, host, ok, rank_of_process, waiting::eventually},
    skip,
};

/// One rank of [`a_hang_is_dumped_by_every_rank`]: one operation of each kind and a replayed graph, and then an operation that rank 1
/// never calls.
#[test]
#[ignore = "helper: the body of one rank; started by another test"]
fn dumped_rank() {
    let Some(rank) = rank_of_process() else { return };
    let device = host();
    let mut data = vec![1f32; 3 * ELEMENTS];
    let at: *mut u8 = data.as_mut_ptr().cast();
    let mut copy = vec![1f32; 3 * ELEMENTS];
    let other: *mut u8 = copy.as_mut_ptr().cast();
    for function in crate::common::COLLECTIVES {
        ok(rank.call(&Call::new(function, ELEMENTS), at, other));
    }
    match rank.rank {
        0 => ok(rank.call(&Call::peer(Function::Send, ELEMENTS, 2), at, at)),
        2 => ok(rank.call(&Call::peer(Function::Recv, ELEMENTS, 0), at, at)),
        _ => {}
    }
    device.capture_begin(rank.stream).unwrap();
    ok(rank.call(&Call::new(Function::AllReduce, ELEMENTS), at, at));
    let graph = device.capture_end(rank.stream).unwrap();
    let exec = device.graph_instantiate(graph).unwrap();
    device.graph_launch(exec, rank.stream).unwrap();
    rank.synchronize();
    if rank.rank != 1 {
        ok(rank.call(&Call::new(Function::AllReduce, 7), at, at));
    }
    let prefix = env::var("RINGSIGHT_DUMP_FILE").unwrap();
    eventually("a dump of every rank", || {
        (0..rank.ranks).all(|rank| std::path::Path::new(&format!("{prefix}{rank}")).exists())
    });
    // SAFETY: a live communicator.
    ok(unsafe { abi::ncclCommAbort(rank.comm) });
    rank.synchronize();
    device.graph_exec_destroy(exec).unwrap();
    println!("\nrank done");
}

/// Prints what PyTorch's analyzer looks for: the entries of each process group that not all of its ranks have, or not alike.
const ANALYZE: &str = r#"
import pickle, sys, ast
dumps = {rank: pickle.load(open(sys.argv[1] + str(rank), "rb")) for rank in range(3)}
found = {}
for rank, dump in dumps.items():
    assert dump["version"] == "2.10", dump["version"]
    for entry in dump["entries"]:
        group, description = entry["process_group"]
        ranks = ast.literal_eval(dump["pg_config"][group]["ranks"])
        assert rank in ranks and dump["pg_config"][group]["desc"] == description
        found.setdefault((group, tuple(ranks), entry["collective_seq_id"]), {})[rank] = entry
print("operations", len(found))
for (group, ranks, number), entries in sorted(found.items()):
    states = {entry["state"] for entry in entries.values()}
    kinds = sorted({entry["profiling_name"] for entry in entries.values()})
    missing = sorted(set(ranks) - set(entries))
    if missing or len(states) > 1:
        print("wrong", kinds, sorted(states), "missing", missing)
    if len(ranks) == 2:
        print("message", kinds, sorted(states))
    if number >> 32:
        print("captured", kinds, sorted(states))
"#;

#[test]
fn a_hang_is_dumped_by_every_rank() {
    let folder = tempfile::tempdir().unwrap();
    let (pickles, texts) = (folder.path().join("fr/trace_"), folder.path().join("json/trace_"));
    let variables = [
        ("NCCL_KERNEL_TIMEOUT_MS", "300"),
        ("RINGSIGHT_ARRIVAL_TIMEOUT_MS", "600"),
        ("RINGSIGHT_WATCHDOG_INTERVAL_MS", "100"),
        ("RINGSIGHT_DUMP_FILE", pickles.to_str().unwrap()),
        ("RINGSIGHT_DUMP_JSON", texts.to_str().unwrap()),
    ];
    crate::common::run_processes_with("watchdog::dumps::dumped_rank", 3, 2, &variables);
    let mut names: Vec<_> = std::fs::read_dir(folder.path().join("fr"))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names, ["trace_0", "trace_1", "trace_2"]);
    let Ok(output) = std::process::Command::new("python3")
        .args(["-c", ANALYZE])
        .arg(&pickles)
        .output()
    else {
        return skip::skip("a_hang_is_dumped_by_every_rank", "no python3 reads the dumps");
    };
    let text = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let expected = [
        "operations 11",
        "wrong ['nccl:all_reduce'] ['started'] missing [1]",
        "captured ['nccl:all_reduce'] ['completed']",
        "message ['nccl:recv 1<-0', 'nccl:send 0->1'] ['completed']",
    ];
    assert_eq!(text.lines().collect::<Vec<_>>(), expected, "{text}");
}
