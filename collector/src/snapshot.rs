//! What processes are in at one moment, from their shared pages alone: operations on their way, and who is missing in them.

mod connections;
mod proxies;
mod root_cause;
mod verdicts;

use std::collections::BTreeMap;

use ringsight_records::{
    DataType, Description, Flags, Function, Waits, connection::Connection, pages::Communicator,
    proxies::ProxyState, verdicts::GivenVerdict,
};

pub use connections::{End, Path};
pub use proxies::Proxy;
pub use ringsight_exporters::ranks::Ranks;
pub use root_cause::{Judged, Outcome, STALL_NS, outcome};
pub use verdicts::{HeldUp, VerdictView, verdicts};

/// Ranks that a communicator may have. A process that says more is broken, or hostile.
pub const RANKS: u32 = 131_072;
/// Ranks' parts in operations that are shown of one communicator.
const PARTS: usize = 65_536;

/// What was read of one process.
#[derive(Clone, Debug, Default)]
pub struct Process {
    /// Its number.
    pub pid: u32,
    /// Its user, as the kernel says: processes of two users are of no communicator together.
    pub user: u32,
    /// Its host, as spans have it.
    pub host: String,
    /// It is stopped by a signal or a debugger.
    pub stopped: bool,
    /// Its live communicators.
    pub communicators: Vec<Communicator>,
    /// Operations that it describes.
    pub operations: Vec<Description>,
    /// Ends of connections between nodes that it tells of.
    pub connections: Vec<Connection>,
    /// What its proxies are moving.
    pub proxies: Vec<ProxyState>,
    /// What its watchdog has said last.
    pub verdicts: Vec<GivenVerdict>,
}

/// Where a rank is with an operation. Times are nanoseconds until the moment of the snapshot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// It has not launched it.
    NotLaunched {
        /// Since its last operation on the communicator ended; `None` if there was none, or it is forgotten.
        idle_ns: Option<u64>,
    },
    /// Launched, not begun on the device.
    Queued {
        /// Since its launch.
        since_ns: u64,
    },
    /// Begun.
    Running {
        /// Since it began.
        since_ns: u64,
        /// What its kernel has just said that it waits for.
        waits: Option<Waits>,
    },
    /// Done.
    Done,
}

/// One rank's part in an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// Rank.
    pub rank: u32,
    /// Process.
    pub pid: u32,
    /// Device of the rank.
    pub device: i32,
    /// Its process is stopped.
    pub stopped: bool,
    /// Where it is.
    pub place: Place,
    /// It has not begun, and is in another operation meanwhile.
    pub held: bool,
}

impl Part {
    /// What its kernel has just said that it waits for. Whoever copies waits for no rank.
    fn waits(&self) -> Option<Waits> {
        match self.place {
            Place::Running { waits, .. } => waits.filter(|waits| !waits.is_for_copies()),
            _ => None,
        }
    }

    /// Since it began.
    fn since_ns(&self) -> Option<u64> {
        match self.place {
            Place::Running { since_ns, .. } => Some(since_ns),
            _ => None,
        }
    }
}

/// An operation that at least one rank is in.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Operation {
    /// Function, if it is a known one.
    pub function: Option<Function>,
    /// Sequence; of a captured operation `graph << 32 | node`.
    pub seq: u64,
    /// Sender and receiver of a message.
    pub pair: Option<(u32, u32)>,
    /// Message bytes.
    pub bytes: u64,
    /// Data type.
    pub data_type: Option<DataType>,
    /// Since it began on the first rank, or was launched there.
    pub oldest_ns: u64,
    /// By rank: those that take part and were looked at.
    pub parts: Vec<Part>,
    /// Ranks that take part and were not looked at.
    pub unseen: Ranks,
    /// What watchdogs have said of it.
    pub judged: Option<Judged>,
    /// Nobody is to blame for it: who is missing in it is in another operation.
    pub behind: bool,
}

impl Operation {
    /// It, by its function and sequence.
    #[must_use]
    pub fn name(&self) -> String {
        name(self.function, self.seq, self.pair)
    }
}

/// An operation, by its function and sequence.
#[must_use]
pub fn name(function: Option<Function>, seq: u64, pair: Option<(u32, u32)>) -> String {
    let function = function.map_or("operation", Function::name);
    let number = match (seq >> 32, seq & u64::from(u32::MAX)) {
        (0, seq) => format!("{seq}"),
        (graph, node) => format!("{node} of graph {graph}"),
    };
    match pair {
        None => format!("{function} {number}"),
        Some((from, to)) => format!("message {number} from rank {from} to rank {to}"),
    }
}

/// One communicator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// Id.
    pub id: u64,
    /// User whose processes it is of.
    pub user: u32,
    /// Name, if it has one.
    pub name: String,
    /// Ranks.
    pub ranks: u32,
    /// Ranks that were looked at.
    pub seen: Ranks,
    /// What is on its way, the oldest first; what is behind others comes last.
    pub operations: Vec<Operation>,
    /// Operations that are on their way, too, and are not shown: they are too many.
    pub operations_left_out: usize,
    /// What its ranks' proxies are moving, by rank, channel and peer.
    pub proxies: Vec<Proxy>,
    /// Ends of its connections between nodes that go over RDMA, by rank, channel and peer.
    pub connections: Vec<End>,
}

/// The identity of an operation within a communicator.
type Key = (Option<(u32, u32)>, u64);

/// Sender and receiver, if it is a message.
fn pair(flags: Flags, rank: u32, peer: i32) -> Option<(u32, u32)> {
    let peer = u32::try_from(peer).ok().filter(|_| flags.contains(Flags::P2P))?;
    Some(if flags.contains(Flags::SEND) {
        (rank, peer)
    } else {
        (peer, rank)
    })
}

fn key(description: &Description) -> Key {
    let Description {
        flags, rank, peer, ..
    } = *description;
    (pair(Flags(flags), rank, peer), description.seq)
}

/// Where an operation that is described is; `None` if it is captured and was never replayed.
fn place(description: &Description, now: u64) -> Option<Place> {
    let Description {
        launch_start_ns: launched,
        device_start_ns: begun,
        device_end_ns: ended,
        graph,
        ..
    } = *description;
    let ago = |ns: u64| now.saturating_sub(ns);
    Some(match (launched, begun, ended) {
        (_, begun, ended) if begun > ended => Place::Running {
            since_ns: ago(begun),
            waits: description.waits(now),
        },
        (_, _, ended) if ended != 0 => Place::Done,
        _ if graph != 0 => return None,
        (0, ..) => Place::NotLaunched { idle_ns: None },
        (launched, ..) => Place::Queued {
            since_ns: ago(launched),
        },
    })
}

/// A communicator that its process says has more ranks than there can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Refused {
    /// The process.
    pub pid: u32,
    /// The communicator.
    pub id: u64,
    /// How many ranks it is to have.
    pub ranks: u32,
}

/// Communicators that are of no use, of which nothing is shown.
pub fn refused(processes: &[Process]) -> impl Iterator<Item = Refused> {
    processes.iter().flat_map(|process| {
        let refused = process
            .communicators
            .iter()
            .filter(|communicator| !is_usable(communicator));
        refused.map(|communicator| Refused {
            pid: process.pid,
            id: communicator.id,
            ranks: communicator.ranks,
        })
    })
}

/// Whether a communicator can be one.
#[must_use]
pub fn is_usable(communicator: &Communicator) -> bool {
    communicator.ranks <= RANKS && communicator.rank < communicator.ranks
}

/// Puts together what was read at `now` (`CLOCK_MONOTONIC` nanoseconds), and the [`verdicts`] of then. Of a rank that two processes say is theirs the first one is
/// shown.
#[must_use]
pub fn take(processes: &[Process], said: &[VerdictView], now: u64) -> Vec<Group> {
    // By communicator and user: the process of each rank, and where its operations are.
    let mut groups: BTreeMap<(u64, u32), (Communicator, BTreeMap<u32, Member<'_>>)> = BTreeMap::new();
    for process in processes {
        let mut operations: BTreeMap<(u64, u32), Vec<&Description>> = BTreeMap::new();
        for description in &process.operations {
            let place = (description.comm, description.rank);
            operations.entry(place).or_default().push(description);
        }
        for communicator in process.communicators.iter().filter(|known| is_usable(known)) {
            let (_, members) = groups
                .entry((communicator.id, process.user))
                .or_insert_with(|| (*communicator, BTreeMap::new()));
            members.entry(communicator.rank).or_insert_with(|| {
                let own = operations.remove(&(communicator.id, communicator.rank));
                Member::of((process, communicator.device), &own.unwrap_or_default(), now)
            });
        }
    }
    let mut proxies = proxies::by_communicator(processes, now);
    let mut connections = connections::by_communicator(processes, now);
    let mut groups: Vec<Group> = groups
        .into_iter()
        .map(|((id, user), (communicator, members))| {
            let (operations, operations_left_out) = operations(&communicator, &members);
            Group {
                id,
                user,
                name: communicator.name().to_owned(),
                ranks: communicator.ranks,
                seen: members.keys().copied().collect(),
                operations,
                operations_left_out,
                proxies: proxies.remove(&(id, user)).unwrap_or_default(),
                connections: connections.remove(&(id, user)).unwrap_or_default(),
            }
        })
        .collect();
    root_cause::mark(&mut groups, said, processes);
    groups
}

/// One rank that was looked at.
struct Member<'a> {
    process: &'a Process,
    device: i32,
    /// Since the last operation ended.
    idle_ns: Option<u64>,
    places: BTreeMap<Key, (Place, &'a Description)>,
}

impl<'a> Member<'a> {
    fn of((process, device): (&'a Process, i32), own: &[&'a Description], now: u64) -> Self {
        let latest = own.iter().map(|description| description.device_end_ns).max();
        let places = own.iter().filter_map(|description| {
            let place = place(description, now)?;
            Some((key(description), (place, *description)))
        });
        Self {
            process,
            device,
            idle_ns: latest.filter(|ns| *ns != 0).map(|ns| now.saturating_sub(ns)),
            places: places.collect(),
        }
    }
}

/// What is on its way, and how many operations more are.
fn operations(communicator: &Communicator, members: &BTreeMap<u32, Member<'_>>) -> (Vec<Operation>, usize) {
    let mut found: BTreeMap<Key, (u64, &Description)> = BTreeMap::new();
    for member in members.values() {
        for (key, (place, description)) in &member.places {
            if let Place::Running { since_ns, .. } | Place::Queued { since_ns } = place {
                let (oldest, _) = found.entry(*key).or_insert((*since_ns, description));
                *oldest = (*oldest).max(*since_ns);
            }
        }
    }
    let mut found: Vec<_> = found.into_iter().collect();
    found.sort_by_key(|(_, (oldest_ns, _))| std::cmp::Reverse(*oldest_ns));
    let (mut operations, mut parts, all) = (Vec::new(), 0, found.len());
    for (key, (oldest_ns, description)) in found {
        let part = |(rank, member): (&u32, &Member<'_>)| {
            let place = member.places.get(&key).map(|(place, _)| *place);
            Part {
                rank: *rank,
                pid: member.process.pid,
                device: member.device,
                stopped: member.process.stopped,
                place: place.unwrap_or(Place::NotLaunched {
                    idle_ns: member.idle_ns,
                }),
                held: false,
            }
        };
        let operation = Operation {
            function: Function::from_code(description.function),
            seq: description.seq,
            pair: key.0,
            bytes: description.bytes,
            data_type: DataType::from_code(description.data_type),
            oldest_ns,
            parts: match key.0 {
                None => members.iter().map(part).collect(),
                Some(pair) => ends(pair)
                    .filter_map(|rank| members.get_key_value(&rank))
                    .map(part)
                    .collect(),
            },
            unseen: match key.0 {
                None => Ranks::all_but(communicator.ranks, members.keys().copied()),
                Some(pair) => ends(pair).filter(|rank| !members.contains_key(rank)).collect(),
            },
            judged: None,
            behind: false,
        };
        parts += operation.parts.len();
        if parts > PARTS {
            break;
        }
        operations.push(operation);
    }
    let left_out = all - operations.len();
    (operations, left_out)
}

/// The ranks of a message, in order; one to itself has one.
fn ends((from, to): (u32, u32)) -> impl Iterator<Item = u32> {
    let both = [from.min(to), from.max(to)];
    both.into_iter().take(if from == to { 1 } else { 2 })
}

#[cfg(test)]
mod tests {
    use ringsight_records::{Phase, pages::APART_BYTES, proxies::ProxyState};

    use super::*;

    const NOW: u64 = 1_000_000;

    fn communicator(rank: u32, ranks: u32) -> Communicator {
        Communicator {
            id: 7,
            parent: 0,
            init_start_ns: 1,
            init_end_ns: 2,
            rank,
            ranks,
            local_rank: rank,
            local_ranks: ranks,
            node: 0,
            nodes: 1,
            device: 0,
            channels: 1,
            name: [0; ringsight_records::vocabulary::NAME_BYTES],
            slot_bytes: 0,
            abilities: 0,
            apart: [0; APART_BYTES],
        }
    }

    fn operation(rank: u32, seq: u64, (launch, begin, end): (u64, u64, u64)) -> Description {
        Description {
            comm: 7,
            seq,
            rank,
            op: seq as u32 + 1,
            peer: -1,
            launch_start_ns: launch,
            device_start_ns: begin,
            device_end_ns: end,
            ..Description::default()
        }
    }

    fn process(rank: u32, operations: Vec<Description>) -> Process {
        Process {
            pid: 100 + rank,
            stopped: rank == 2,
            communicators: vec![communicator(rank, 5)],
            operations,
            ..Process::default()
        }
    }

    #[test]
    fn whoever_has_not_come_is_awaited() {
        let processes = [
            process(
                0,
                vec![operation(0, 1, (10, 11, 12)), operation(0, 2, (20, 21, 0))],
            ),
            process(1, vec![operation(1, 1, (10, 11, 15))]),
            process(2, vec![operation(2, 2, (20, 21, 0))]),
            process(3, vec![operation(3, 2, (30, 0, 0))]),
        ];
        let groups = take(&processes, &[], NOW);
        assert_eq!((groups.len(), groups[0].seen.to_string().as_str()), (1, "0-3"));
        let [operation] = &groups[0].operations[..] else {
            panic!("{groups:?}")
        };
        assert_eq!((operation.seq, operation.oldest_ns), (2, NOW - 20 - 1));
        assert_eq!(operation.unseen.to_string(), "4");
        assert_eq!(operation.awaited(), [2, 1, 3]);
        let places: Vec<_> = operation.parts.iter().map(|part| part.place).collect();
        let running = |since_ns| Place::Running {
            since_ns,
            waits: None,
        };
        let expected = [
            running(NOW - 21),
            Place::NotLaunched {
                idle_ns: Some(NOW - 15),
            },
            running(NOW - 21),
            Place::Queued { since_ns: NOW - 30 },
        ];
        assert_eq!(places, expected);
    }

    #[test]
    fn where_all_have_come_kernels_say_whom_they_wait_for() {
        let waiting = |rank: u32, peer: Option<u16>| {
            let mut operation = operation(rank, 2, (20, 21, 0));
            let waits = peer.map(|peer| Waits {
                op: operation.op as u16,
                channel: 1,
                phase: Phase::Data,
                peer: Some(peer),
                step: 3,
            });
            operation.waits = waits.map_or(0, Waits::word);
            operation.waits_ns = NOW - 1;
            let mut process = process(rank, vec![operation]);
            process.communicators = vec![communicator(rank, 3)];
            process.stopped = false;
            process
        };
        let processes = [waiting(0, Some(2)), waiting(1, None), waiting(2, Some(1))];
        let groups = take(&processes, &[], NOW);
        let operation = &groups[0].operations[0];
        assert_eq!(operation.awaited(), [1]);
        // Whether one that was not looked at has come is not known.
        let groups = take(&processes[..2], &[], NOW);
        assert!(groups[0].operations[0].awaited().is_empty());
    }

    #[test]
    fn numbers_that_no_communicator_has_take_neither_time_nor_memory() {
        let mut large = process(0, vec![operation(0, 1, (10, 11, 0))]);
        large.communicators[0].ranks = RANKS;
        let groups = take(std::slice::from_ref(&large), &[], NOW);
        assert_eq!(
            groups[0].operations[0].unseen.to_string(),
            format!("1-{}", RANKS - 1)
        );
        for ranks in [RANKS + 1, 100_000_000, u32::MAX, 0] {
            large.communicators[0].ranks = ranks;
            assert!(take(std::slice::from_ref(&large), &[], NOW).is_empty());
            let refused: Vec<_> = refused(std::slice::from_ref(&large)).collect();
            let expected = Refused {
                pid: 100,
                id: 7,
                ranks,
            };
            assert_eq!(refused, [expected]);
        }
    }

    #[test]
    fn tables_full_of_everything_take_time_for_each_entry_and_not_for_each_two() {
        // Each communicator, operation, proxy and verdict is another one.
        let full = |entries: u32| {
            let mut full = Process::default();
            for n in 0..entries {
                let comm = u64::from(n);
                full.communicators.push(Communicator {
                    id: comm,
                    ..communicator(0, 2)
                });
                full.operations.push(Description {
                    comm,
                    op: n,
                    ..operation(0, comm, (10, 11, 0))
                });
                full.proxies.push(ProxyState {
                    comm,
                    op: n,
                    ..ProxyState::default()
                });
                full.connections.push(Connection {
                    comm,
                    ..Connection::default()
                });
                // SAFETY: plain data; zero is a value of each field.
                let given: GivenVerdict = unsafe { std::mem::zeroed() };
                full.verdicts.push(GivenVerdict { comm, op: n, ..given });
            }
            full
        };
        let time = |entries| {
            let full = [full(entries)];
            let begun = std::time::Instant::now();
            let said = verdicts(&full, NOW);
            let groups = take(&full, &said, NOW);
            let took = begun.elapsed().as_secs_f64();
            assert_eq!((groups.len(), said.len()), (entries as usize, entries as usize));
            assert!(said.iter().all(|said| said.ended == Some(false)));
            took
        };
        let best = |entries| (0..3).map(|_| time(entries)).fold(f64::INFINITY, f64::min);
        let growth = best(8000) / best(2000);
        assert!(growth < 9.0, "{growth}");
    }

    #[test]
    fn of_many_operations_the_oldest_are_shown() {
        let ranks = 64;
        let processes: Vec<_> = (0..ranks)
            .map(|rank| {
                let operations = (1..=2000).map(|seq| operation(rank, seq, (10, 10 + seq, 0)));
                let mut process = process(rank, operations.collect());
                process.communicators = vec![communicator(rank, ranks)];
                process
            })
            .collect();
        let group = &take(&processes, &[], NOW)[0];
        assert_eq!(group.operations.len(), PARTS / 64);
        assert_eq!(group.operations[0].seq, 1);
        assert_eq!(group.operations_left_out, 2000 - PARTS / 64);
    }

    #[test]
    fn two_users_are_of_no_communicator_together_and_a_rank_is_the_first_ones() {
        let mut processes = [process(0, vec![]), process(1, vec![]), process(1, vec![])];
        (processes[1].user, processes[2].pid) = (65534, 99);
        let seen = |groups: &[Group]| -> Vec<_> {
            let of = |group: &Group| (group.user, group.seen.to_string());
            groups.iter().map(of).collect()
        };
        assert_eq!(
            seen(&take(&processes, &[], NOW)),
            [(0, "0-1".into()), (65534, "1".into())]
        );
        processes[1].user = 0;
        processes[2].operations = vec![operation(1, 1, (10, 11, 0))];
        assert!(take(&processes, &[], NOW)[0].operations.is_empty());
    }

    #[test]
    fn finished_and_unplayed_operations_are_nobodys() {
        let mut captured = operation(0, 1 << 32, (10, 0, 0));
        captured.graph = 1;
        let processes = [process(0, vec![operation(0, 1, (10, 11, 12)), captured])];
        assert!(take(&processes, &[], NOW)[0].operations.is_empty());
    }

    #[test]
    fn a_message_is_of_its_two_ends() {
        let mut send = operation(0, 4, (10, 11, 0));
        send.peer = 3;
        send.flags = Flags::P2P.with(Flags::SEND).0;
        let groups = take(&[process(0, vec![send]), process(3, vec![])], &[], NOW);
        let operation = &groups[0].operations[0];
        assert_eq!((operation.pair, operation.parts.len()), (Some((0, 3)), 2));
        assert_eq!(operation.awaited()[0], 3);
    }
}
