//! A captured all-reduce, replayed a thousand times, whose port goes down midway.

use std::sync::{
    Arc, Mutex,
    atomic::{AtomicU32, Ordering},
};

use ringsight_comm::observe;
use ringsight_records::{DataType, Flags, Function, Kind, PathChange, State, connection::Connection};

use super::{connections::ends, links::set_link};
use crate::common::{
    Call, Rank, host, ok,
    processes::rank_of_process,
    waiting::eventually,
    watch::{Watch, of},
};

const REPLAYS: u32 = 1000;

/// The replay after which the port goes down.
const MIDWAY: u32 = 400;

/// Elements of four bytes.
const COUNT: usize = 3000;

/// What a rank puts in an element of the buffer before a replay.
fn input(rank: usize, replay: u32, index: usize) -> u32 {
    (rank as u32 + 1)
        .wrapping_mul(0x9e37_79b1)
        .wrapping_add(replay.wrapping_mul(7919))
        .wrapping_add(index as u32)
}

/// The buffer, and what was found in it.
struct Buffer {
    words: Vec<AtomicU32>,
    /// Replays whose sums were right.
    right: AtomicU32,
    wrong: Mutex<Vec<String>>,
}

impl Buffer {
    fn fill(&self, rank: usize, replay: u32) {
        for (index, word) in self.words.iter().enumerate() {
            // Relaxed: the stream orders what its functions and kernels do.
            word.store(input(rank, replay, index), Ordering::Relaxed);
        }
    }

    fn look(&self, replay: u32) {
        let sum = |index| input(0, replay, index).wrapping_add(input(1, replay, index));
        let found = |word: &AtomicU32| word.load(Ordering::Relaxed);
        let wrong = (0..)
            .zip(&self.words)
            .find(|(index, word)| found(word) != sum(*index));
        match wrong {
            None => drop(self.right.fetch_add(1, Ordering::Relaxed)),
            Some((index, word)) => {
                let text = format!(
                    "replay {replay}, element {index}: {} not {}",
                    found(word),
                    sum(index)
                );
                self.wrong.lock().unwrap().push(text);
            }
        }
    }
}

/// Replays the graph; rank 0's port goes down midway.
pub(crate) fn thousand() {
    let rank = rank_of_process();
    let watch = Watch::begin_for(Kind::Failover.bit());
    let device = host();
    let stream = device.stream_create().unwrap();
    let buffer = Arc::new(Buffer {
        words: (0..COUNT).map(|_| AtomicU32::new(0)).collect(),
        right: AtomicU32::new(0),
        wrong: Mutex::default(),
    });
    let (filled, looked, place) = (buffer.clone(), buffer.clone(), rank.rank);
    device.capture_begin(stream).unwrap();
    let fill = move |replay| filled.fill(place, replay);
    device.launch_host(stream, Arc::new(fill)).unwrap();
    let call = Call {
        data_type: DataType::Uint32,
        ..Call::new(Function::AllReduce, COUNT)
    };
    let at = buffer.words.as_ptr().cast_mut().cast();
    ok(Rank { stream, ..rank }.call(&call, at, at));
    let look = move |replay| looked.look(replay);
    device.launch_host(stream, Arc::new(look)).unwrap();
    let graph = device.capture_end(stream).unwrap();
    let exec = device.graph_instantiate(graph).unwrap();
    device.graph_destroy(graph).unwrap();
    for _ in 0..REPLAYS {
        device.graph_launch(exec, stream).unwrap();
    }
    let done = || buffer.right.load(Ordering::Relaxed);
    if rank.rank == 0 {
        eventually("half the replays are done", || done() >= MIDWAY);
        set_link(0, false);
    }
    device.stream_synchronize(stream).unwrap();
    let ended_ns = observe::now_ns();
    assert_eq!(*buffer.wrong.lock().unwrap(), [""; 0]);
    assert_eq!(done(), REPLAYS);
    for end in ends() {
        assert!(end.active == 1 && end.phase == Connection::FLOWS, "{end:?}");
    }
    device.graph_exec_destroy(exec).unwrap();
    device.stream_destroy(stream).unwrap();
    rank.leave();
    // The switch came while there were replays to go, and these went on after it.
    let records = watch.end();
    let switches: Vec<_> = of(&records, Kind::Failover)
        .filter(|record| record.state == State::PATH_SWITCHED)
        .collect();
    assert!(!switches.is_empty());
    for switch in switches {
        let change = PathChange::from_value(switch.value);
        assert_eq!((change.from, change.to), (0, 1), "{change:?}");
        // One that came between two replays is of none of them.
        if switch.op == 0 {
            assert!(switch.time_ns < ended_ns, "{switch:?}");
            assert_eq!(switch.replay, 0);
        } else {
            assert!((MIDWAY - 1..REPLAYS).contains(&switch.replay), "{switch:?}");
        }
        assert_eq!(switch.flags().contains(Flags::GRAPH), switch.op != 0);
        println!(
            "switched at replay {} with {} bytes sent again",
            switch.replay, switch.bytes
        );
    }
}
