//! What proxies are moving at one moment.

use std::collections::BTreeMap;

use ringsight_records::{Description, Flags, Function};

use super::{Process, pair};

/// A proxy operation that is under way. Times are nanoseconds until the moment of the snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Proxy {
    /// Process.
    pub pid: u32,
    /// Rank in the communicator.
    pub rank: u32,
    /// The rank at the other end.
    pub peer: u32,
    /// Channel.
    pub channel: u8,
    /// Whether this end sends.
    pub sends: bool,
    /// Function of the operation that it is for, if its description is still there.
    pub function: Option<Function>,
    /// Sequence of that.
    pub seq: u64,
    /// Its sender and receiver, if it is a message.
    pub pair: Option<(u32, u32)>,
    /// Replay, 0 if eager.
    pub replay: u32,
    /// The step that it is at.
    pub step: u32,
    /// Steps that it has.
    pub steps: u32,
    /// Bytes of a full step.
    pub chunk_bytes: u32,
    /// Since its turn came.
    pub since_ns: u64,
    /// Operations that waited behind it then.
    pub queued: u32,
}

/// What is under way, by communicator and user.
pub(super) fn by_communicator(processes: &[Process], now: u64) -> BTreeMap<(u64, u32), Vec<Proxy>> {
    let mut proxies: BTreeMap<(u64, u32), Vec<Proxy>> = BTreeMap::new();
    for process in processes {
        let operations = process.operations.iter().rev();
        let described: BTreeMap<u32, &Description> = operations.map(|known| (known.op, known)).collect();
        for state in &process.proxies {
            let flags = Flags(state.flags);
            let described = described.get(&state.op);
            let of = proxies.entry((state.comm, process.user)).or_default();
            of.push(Proxy {
                pid: process.pid,
                rank: state.rank,
                peer: state.peer,
                channel: state.channel,
                sends: flags.contains(Flags::SEND),
                function: described.and_then(|known| Function::from_code(known.function)),
                seq: state.seq,
                pair: pair(flags, state.rank, state.peer.cast_signed()),
                replay: state.replay,
                step: state.step,
                steps: state.steps,
                chunk_bytes: state.chunk_bytes,
                since_ns: now.saturating_sub(state.begun_ns),
                queued: state.queued,
            });
        }
    }
    for proxies in proxies.values_mut() {
        proxies.sort_by_key(|proxy| (proxy.rank, proxy.channel, proxy.peer, !proxy.sends, proxy.pid));
    }
    proxies
}

#[cfg(test)]
mod tests {
    use ringsight_records::proxies::ProxyState;

    use super::*;

    #[test]
    fn each_is_told_with_its_operation_in_order() {
        let state = |rank, channel, flags| ProxyState {
            comm: 7,
            seq: 4,
            begun_ns: 10,
            op: 5,
            rank,
            peer: 2,
            channel,
            flags,
            step: 3,
            steps: 8,
            ..ProxyState::default()
        };
        let process = Process {
            pid: 9,
            operations: vec![Description {
                op: 5,
                function: Function::AllReduce.code(),
                ..Description::default()
            }],
            proxies: vec![
                state(1, 1, Flags::SEND.0),
                state(1, 0, 0),
                ProxyState {
                    comm: 8,
                    ..state(0, 0, 0)
                },
            ],
            ..Process::default()
        };
        let told = by_communicator(&[process], 110).remove(&(7, 0)).unwrap();
        let [first, second] = &told[..] else {
            panic!("{told:?}")
        };
        assert_eq!(
            (first.channel, first.sends, first.function),
            (0, false, Some(Function::AllReduce))
        );
        assert_eq!((second.channel, second.sends, second.pair), (1, true, None));
        assert_eq!((second.since_ns, second.step, second.steps), (100, 3, 8));
    }
}
