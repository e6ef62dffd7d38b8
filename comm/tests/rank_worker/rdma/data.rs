//! What goes over RDMA when nothing fails.

use std::env;

use ringsight_comm::{abi, device::Stream};
use ringsight_records::{Flags, Function, Kind, Record, State};

use super::shared::{CLASS, LITTLE};
use crate::common::{Call, Rank, config, host, ok, processes::place_of_process, watch::Watch};

/// An all-reduce.
pub(crate) fn ring() {
    let (id, rank, ranks) = place_of_process();
    let rank = Rank::join_with(id, rank, ranks, &mut config());
    Call::new(Function::AllReduce, 5003).check(&rank, true);
    rank.leave();
}

/// Operations of all sizes; only all-reduces if [`LITTLE`] is set.
pub(crate) fn transfers() {
    let (id, rank, ranks) = place_of_process();
    let mut settings = config();
    if let Ok(class) = env::var(CLASS) {
        settings.traffic_class = class.parse().unwrap();
    }
    let rank = Rank::join_with(id, rank, ranks, &mut settings);
    // Less than a slot, more than one, and what goes with a notice.
    for count in [1, 17, 5003] {
        Call::new(Function::AllReduce, count).check(&rank, count == 17);
    }
    if env::var_os(LITTLE).is_none() {
        for function in [Function::AllGather, Function::ReduceScatter, Function::Broadcast] {
            Call::new(function, 5003).check(&rank, false);
        }
        messages(&rank);
        replays(&rank);
        watched(rank, &Call::new(Function::AllReduce, 70_001));
    } else {
        rank.leave();
    }
}

/// An operation whose work requests are on record: every step that is sent, every one that arrives, and all their bytes.
fn watched(rank: Rank, call: &Call) {
    let watch = Watch::begin_for(Kind::ProxyStep.bit() | Kind::NetPlugin.bit());
    call.check(&rank, true);
    // With the communicator its threads are gone: nothing more comes.
    rank.leave();
    let records = watch.end();
    let bytes = |records: Vec<&Record>| -> u64 { records.iter().map(|record| record.bytes).sum() };
    // A receiver's step ends when its device is done with it, which of the operation before may be now.
    for (sends, here) in [(true, State::STOP), (false, State::STEP_RECV_GPU_WAIT)] {
        let of = |kind, state| {
            let of = move |record: &&Record| record.kind() == Some(kind) && record.state == state;
            let of = records.iter().filter(of);
            of.filter(|record| record.flags().contains(Flags::SEND) == sends)
                .collect::<Vec<_>>()
        };
        let (steps, carried) = (of(Kind::ProxyStep, here), of(Kind::NetPlugin, State::STOP));
        assert!(!steps.is_empty());
        assert_eq!(carried.len(), steps.len(), "sends: {sends}");
        let is_of_port = |record: &&Record| record.carrier().port == Some(0) && record.carrier().number > 0;
        assert!(carried.iter().all(is_of_port), "sends: {sends}");
        assert_eq!(bytes(carried), bytes(steps), "sends: {sends}");
    }
}

/// Sends and receives of all sizes in one group, both ways.
pub(crate) fn messages(rank: &Rank) {
    let peer = 1 - rank.rank;
    let sizes = [0_usize, 1, 48, 49, 4096, 70_000];
    let content = |from: usize, size: usize| -> Vec<u8> {
        (0..size).map(|at| (at * 31 + from * 7 + size) as u8).collect()
    };
    let sent: Vec<Vec<u8>> = sizes.iter().map(|size| content(rank.rank, *size)).collect();
    let mut got: Vec<Vec<u8>> = sizes.iter().map(|size| vec![0; *size]).collect();
    // SAFETY: no arguments.
    ok(unsafe { abi::ncclGroupStart() });
    for (sent, got) in sent.iter().zip(&mut got) {
        let call = |function| Call {
            data_type: ringsight_records::DataType::Uint8,
            ..Call::peer(function, sent.len(), peer)
        };
        ok(rank.call(&call(Function::Send), sent.as_ptr(), std::ptr::null_mut()));
        ok(rank.call(&call(Function::Recv), std::ptr::null(), got.as_mut_ptr()));
    }
    // SAFETY: no arguments; the buffers of the calls live until the stream is synchronized.
    ok(unsafe { abi::ncclGroupEnd() });
    rank.synchronize();
    for (size, got) in sizes.iter().zip(&got) {
        assert!(*got == content(peer, *size), "{size} bytes");
    }
}

/// A captured all-reduce, replayed: each replay's network steps are posted without the host's doing.
pub(crate) fn replays(rank: &Rank) {
    const REPLAYS: i32 = 8;
    let device = host();
    let stream = device.stream_create().unwrap();
    let mut data = vec![1_f32; 3000];
    device.capture_begin(stream).unwrap();
    add_up(rank, stream, &mut data);
    let graph = device.capture_end(stream).unwrap();
    let exec = device.graph_instantiate(graph).unwrap();
    device.graph_destroy(graph).unwrap();
    for _ in 0..REPLAYS {
        device.graph_launch(exec, stream).unwrap();
    }
    device.stream_synchronize(stream).unwrap();
    assert!(
        data.iter().all(|value| *value == 2_f32.powi(REPLAYS)),
        "{}",
        data[0]
    );
    device.graph_exec_destroy(exec).unwrap();
    device.stream_destroy(stream).unwrap();
}

/// What a graph does with `data` when it is launched.
pub(crate) fn add_up(rank: &Rank, stream: Stream, data: &mut [f32]) {
    let at = data.as_mut_ptr().cast();
    let on = Rank { stream, ..*rank };
    ok(on.call(&Call::new(Function::AllReduce, data.len()), at, at));
}
