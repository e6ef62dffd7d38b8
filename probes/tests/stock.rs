//! Calls of a library without our symbols, decoded by signature.

mod common;

use common::{Target, compile, poll, session_with};
use ringsight_probes::{Options, Sample, Source as _, UseEbpf, sample::Call};
use ringsight_records::{DataType, Function, ReduceOp};

#[test]
fn calls_of_a_stock_library_are_decoded() {
    let name = "calls_of_a_stock_library_are_decoded";
    for force_perf_event in [false, true] {
        let options = Options {
            use_ebpf: UseEbpf::Require,
            force_perf_event,
            ..Options::default()
        };
        let Some(mut session) = session_with(name, options) else {
            return;
        };
        let directory = tempfile::tempdir().unwrap();
        let library = directory.path().join("libnccl.so.2");
        if compile(name, "libnccl.c", &library, &[]).is_none() {
            return;
        }
        let mut target = Target::start(&library);
        let attached = session.attach(target.pid()).unwrap();
        assert!(!attached.process.instrumented);
        assert_eq!(attached.process.library_version, 22703);
        assert_eq!(attached.sites.len(), 6);

        let before = ringsight_probes::process::now_ns();
        target.call("ncclAllReduce 4096 8192 1000 7 2 77 88");
        target.call("ncclBroadcast 1 2 3 9 5 77 0");
        target.call("ncclReduce 1 2 3 99 0 1 77 88");
        target.call("ncclSend 4096 10 1 3 77 88");
        let after = ringsight_probes::process::now_ns();
        let calls: Vec<_> = poll(&mut session)
            .into_iter()
            .filter_map(|sample| {
                if let Sample::Call(call) = sample {
                    Some(*call)
                } else {
                    None
                }
            })
            .collect();
        let operation = |call: &Call| match call {
            Call::Operation {
                function,
                send,
                recv,
                count,
                data_type,
                reduce_op,
                peer,
                comm,
                stream,
            } => Some((
                *function,
                [*send, *recv, *count, *comm, *stream],
                *data_type,
                *reduce_op,
                *peer,
            )),
            _ => None,
        };
        // In the order of their returns: the group calls within ncclAllReduce come before it.
        let groups: Vec<_> = calls
            .iter()
            .filter(|call| operation(&call.call).is_none())
            .map(|call| &call.call)
            .collect();
        assert!(
            groups.is_empty() || groups == [&Call::GroupStart, &Call::GroupEnd],
            "{groups:?}"
        );
        let operations: Vec<_> = calls.iter().filter_map(|call| operation(&call.call)).collect();
        assert_eq!(
            operations,
            [
                (
                    Function::AllReduce,
                    [4096, 8192, 1000, 77, 88],
                    Some(DataType::Float32),
                    Some(ReduceOp::Max),
                    -1
                ),
                (
                    Function::Broadcast,
                    [1, 2, 3, 77, 0],
                    Some(DataType::Bfloat16),
                    None,
                    5
                ),
                (Function::Reduce, [1, 2, 3, 77, 88], None, Some(ReduceOp::Sum), 1),
                (
                    Function::Send,
                    [4096, 0, 10, 77, 88],
                    Some(DataType::Uint8),
                    None,
                    3
                ),
            ]
        );
        for call in &calls {
            let end = call.end_ns.expect("returns are probed");
            assert!(before < call.start_ns && call.start_ns < end && end < after);
            let failed = operation(&call.call).is_some_and(|(function, ..)| function == Function::Broadcast);
            assert_eq!(call.result, Some(if failed { 4 } else { 0 }));
        }
        let mut nothing = Vec::new();
        session.poll(&mut nothing).unwrap();
        let elapsed = session.detach_all();
        println!(
            "stock library, 6 entries and 6 returns, {}: detached in {elapsed:?}",
            session.link_kind().unwrap()
        );
    }
}
