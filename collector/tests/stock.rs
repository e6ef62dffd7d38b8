//! Calls of a library without our symbols.

mod common;

use common::{attribute, check_trees, collect, named};
use ringsight_collector::synthetic::{FIRST_PID, Job};
use ringsight_exporters::model::Value;
use ringsight_probes::sample::{Call, Carrier, HostCall, Sample};
use ringsight_records::Function;

#[test]
fn a_call_of_a_stock_library_is_a_host_timed_span() {
    let job = Job::default();
    let call = |function, start_ns, result| {
        Sample::Call(Box::new(HostCall {
            pid: FIRST_PID,
            tid: 77,
            call: Call::Operation {
                function,
                send: 1,
                recv: 2,
                count: 1024,
                data_type: Some(ringsight_records::DataType::Float16),
                reduce_op: None,
                peer: -1,
                comm: 0xabc,
                stream: 0,
            },
            start_ns,
            end_ns: Some(start_ns + 500),
            result: Some(result),
        }))
    };
    let mut samples = job.streams(0, &[]).head;
    samples.push(call(Function::AllReduce, 5000, 0));
    samples.push(call(Function::AllGather, 6000, 3));
    let batch = collect(samples);
    check_trees(&batch.spans);
    assert_eq!(batch.spans.len(), 2);
    let first = named(&batch.spans, "all_reduce").next().unwrap();
    assert_eq!(
        attribute(first, "ccl.timing.source"),
        Some(&Value::Static("host"))
    );
    assert_eq!(attribute(first, "ccl.message.size"), Some(&Value::Int(2048)));
    assert_eq!(first.end_unix_ns - first.start_unix_ns, 500);
    // How many ranks gather is not known: the size of nccl-tests' definition is not either.
    let second = named(&batch.spans, "all_gather").next().unwrap();
    assert!(second.error.is_some());
    assert_eq!(attribute(second, "ccl.message.size"), None);
    assert_eq!(
        attribute(second, "ccl.message.size_per_rank"),
        Some(&Value::Int(2048))
    );
    assert_eq!(attribute(first, "ccl.message.size_per_rank"), None);
}

#[test]
fn a_group_of_a_stock_library_links_to_its_calls() {
    let job = Job::default();
    let call = |call, (start_ns, end_ns), result| {
        Sample::Call(Box::new(HostCall {
            pid: FIRST_PID,
            tid: 77,
            call,
            start_ns,
            end_ns: Some(end_ns),
            result: Some(result),
        }))
    };
    let operation = |function| Call::Operation {
        function,
        send: 1,
        recv: 2,
        count: 1024,
        data_type: None,
        reduce_op: None,
        peer: 1,
        comm: 0xabc,
        stream: 0,
    };
    let mut samples = job.streams(0, &[]).head;
    samples.extend([
        // Opened before the attach.
        call(Call::GroupEnd, (900, 950), 0),
        call(Call::GroupStart, (1000, 1010), 0),
        call(operation(Function::Send), (1020, 1030), 0),
        // Nested, as a framework's.
        call(Call::GroupStart, (1040, 1045), 0),
        call(operation(Function::Recv), (1050, 1060), 0),
        call(Call::GroupEnd, (1070, 1075), 0),
        call(Call::GroupEnd, (1080, 1500), 3),
        // A library's own, inside a call: it returns first.
        call(Call::GroupStart, (2010, 2020), 0),
        call(Call::GroupEnd, (2030, 2040), 0),
        call(operation(Function::AllReduce), (2000, 2050), 0),
        // What was lost may have been its end.
        call(Call::GroupStart, (3000, 3010), 0),
        Sample::Lost {
            pid: Some(FIRST_PID),
            carrier: Carrier::Probe,
            kind: None,
            count: 1,
        },
        call(operation(Function::AllGather), (3020, 3050), 0),
    ]);
    let batch = collect(samples);
    check_trees(&batch.spans);
    let groups: Vec<_> = named(&batch.spans, "group").collect();
    let [group] = groups[..] else {
        panic!("{groups:#?}")
    };
    assert_eq!(group.end_unix_ns - group.start_unix_ns, 500);
    assert!(group.error.is_some());
    assert_eq!(attribute(group, "ccl.group.operations"), Some(&Value::Int(2)));
    let members: Vec<_> = ["send", "recv"]
        .iter()
        .map(|name| named(&batch.spans, name).next().unwrap())
        .collect();
    assert_eq!(group.links.len(), 2);
    for (link, member) in group.links.iter().zip(members) {
        assert_eq!((link.trace_id, link.span_id), (member.trace_id, member.span_id));
        let [back] = &member.links[..] else {
            panic!("{member:#?}")
        };
        assert_eq!((back.trace_id, back.span_id), (group.trace_id, group.span_id));
    }
    for alone in ["all_reduce", "all_gather"] {
        assert!(named(&batch.spans, alone).next().unwrap().links.is_empty());
    }
}
