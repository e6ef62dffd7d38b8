//! Control messages between watchdogs. The parser refuses everything that [`WatchdogMessage::encode`] does not write.
//!
//! A kind's number stands for its layout: another layout is another kind. A library that does not know a kind ignores it, and its
//! rank counts as one that does not answer.
//!
//! | message | from | to | answer |
//! |---|---|---|---|
//! | [`Query`](WatchdogMessage::Query) | a rank with an overdue operation | ranks of the operation | `Answer` |
//! | [`HealthQuery`](WatchdogMessage::HealthQuery) | the same, about a silent rank | ranks of that rank's node | `HealthAnswer` |
//! | [`GaveUp`](WatchdogMessage::GaveUp) | a rank that gives up its operations | all | – |
//! | [`Debugger`](WatchdogMessage::Debugger) | a rank that a debugger attaches to, or detaches from | all | – |
//! | [`ArrivalQuery`](WatchdogMessage::ArrivalQuery) | a rank that waited in operations which have completed | ranks of the operations | `ArrivalAnswer` |
//! | [`WriteDump`](WatchdogMessage::WriteDump) | a rank that found a hang | all | – |

use ringsight_records::{PathCause, Waits, connection::DEVICE_NAME_BYTES, pages::text};

use super::rules::{
    arrivals::MOST_ASKED,
    completed::CompletedRuns,
    evidence::{BlockingOperation, OperationRun, Position, ProcessHealth, RankAnswer},
};
use crate::{
    checks::wire::{self, Rest, put_identity},
    proxy::stalls::{Stall, Why},
};

/// First four bytes: "RSWD".
const MAGIC: u32 = u32::from_le_bytes(*b"RSWD");

/// By its code in messages.
const HEALTH: [ProcessHealth; 5] = [
    ProcessHealth::Unknown,
    ProcessHealth::Alive,
    ProcessHealth::Stopped,
    ProcessHealth::Gone,
    ProcessHealth::Traced,
];

/// A control message between the ranks of a communicator. An answer repeats the number of its query.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum WatchdogMessage {
    /// Where is the receiver with this run?
    Query { query: u32, run: OperationRun },
    /// The sender is here with it.
    Answer { query: u32, answer: RankAnswer },
    /// In which state is the process of this rank? It is of the receiver's node.
    HealthQuery { query: u32, rank: u32 },
    /// Its process is in this state.
    HealthAnswer {
        query: u32,
        rank: u32,
        health: ProcessHealth,
    },
    /// The sender gives up its operations, but for these runs; nobody need ask it.
    GaveUp { completed: CompletedRuns },
    /// The sender found a hang: the receiver writes a dump.
    WriteDump,
    /// A debugger attached to the sender's process, or detached from it.
    Debugger { is_attached: bool },
    /// How long ago did the receiver arrive at these runs? At most [`MOST_ASKED`].
    ArrivalQuery { query: u32, runs: Vec<OperationRun> },
    /// The sender arrived at them so many nanoseconds ago, in the order of the query; `None` where it does not know.
    ArrivalAnswer { query: u32, ages: Vec<Option<u64>> },
}

fn put_run(bytes: &mut Vec<u8>, run: OperationRun) {
    put_identity(bytes, run.identity);
    bytes.extend(run.replay.to_le_bytes());
}

fn run(rest: &mut Rest<'_>) -> Option<OperationRun> {
    Some(OperationRun {
        identity: rest.identity()?,
        replay: rest.u32()?,
    })
}

/// For u64 | peer u32 | queue pair u32 | is send u8 | channel u8 | port u8 | why, its cause and status u8 | device.
fn put_stall(bytes: &mut Vec<u8>, stall: &Stall) {
    let why = match stall.why {
        Why::PortDown => [0; 3],
        Why::Left(cause, status) => [1, cause as u8, status],
        Why::Unanswered => [2, 0, 0],
        Why::Told => [3, 0, 0],
    };
    bytes.extend(stall.for_ns.to_le_bytes());
    bytes.extend(stall.peer.to_le_bytes());
    bytes.extend(stall.queue_pair.to_le_bytes());
    bytes.extend([stall.is_send.into(), stall.channel, stall.port]);
    bytes.extend(why);
    bytes.extend(stall.device);
}

fn stall(rest: &mut Rest<'_>) -> Option<Stall> {
    let (for_ns, peer, queue_pair) = (rest.u64()?, rest.u32()?, rest.u32()?);
    let [is_send @ 0..=1, channel, port, why @ ..] = *rest.take::<6>()? else {
        return None;
    };
    let why = match why {
        [0, 0, 0] => Why::PortDown,
        [1, cause, status] => Why::Left(PathCause::from_code(cause)?, status),
        [2, 0, 0] => Why::Unanswered,
        [3, 0, 0] => Why::Told,
        _ => return None,
    };
    let device = *rest.take::<DEVICE_NAME_BYTES>()?;
    // It goes to the log as it is.
    let name = text(&device);
    let is_name = name.bytes().all(|byte| byte.is_ascii_graphic());
    if !is_name || device[name.len()..].iter().any(|byte| *byte != 0) {
        return None;
    }
    Some(Stall {
        why,
        for_ns,
        peer,
        is_send: is_send == 1,
        channel,
        device,
        port,
        queue_pair,
    })
}

impl WatchdogMessage {
    /// Magic u32 | kind u8 | query u32 | body.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_le_bytes().to_vec();
        let mut begin = |kind: u8, query: u32| {
            bytes.push(kind);
            bytes.extend(query.to_le_bytes());
        };
        match *self {
            Self::Query { query, run } => {
                begin(1, query);
                put_run(&mut bytes, run);
            }
            Self::Answer { query, answer } => {
                begin(2, query);
                let (code, words) = match answer.position {
                    Position::NotLaunched { idle_ns } => (0, [idle_ns, 0, 0]),
                    Position::Queued { since_ns } => (1, [since_ns, 0, 0]),
                    Position::Running {
                        since_ns,
                        still_ns,
                        waits,
                    } => (2, [since_ns, still_ns, waits.map_or(0, Waits::word)]),
                    Position::Completed => (3, [0; 3]),
                    Position::CommunicatorEnded => (4, [0; 3]),
                    Position::DeviceFailed => (5, [0; 3]),
                    Position::WatchdogOff { called } => (6, [called.into(), 0, 0]),
                };
                bytes.push(code);
                bytes.extend(words.into_iter().flat_map(u64::to_le_bytes));
                let awaits_asker_ns = answer.blocked_by.and_then(|blocking| blocking.awaits_asker_ns);
                let flags = [
                    answer.blocked_by.is_some(),
                    answer.is_stale,
                    answer.stall.is_some(),
                    awaits_asker_ns.is_some(),
                ];
                bytes.push(
                    flags
                        .iter()
                        .rev()
                        .fold(0, |byte, flag| byte << 1 | u8::from(*flag)),
                );
                if let Some(blocking) = answer.blocked_by {
                    bytes.extend(blocking.comm.to_le_bytes());
                    put_run(&mut bytes, blocking.run);
                    bytes.extend(blocking.since_ns.to_le_bytes());
                    bytes.extend(awaits_asker_ns.iter().flat_map(|ns| ns.to_le_bytes()));
                }
                if let Some(stall) = &answer.stall {
                    put_stall(&mut bytes, stall);
                }
            }
            Self::HealthQuery { query, rank } => {
                begin(3, query);
                bytes.extend(rank.to_le_bytes());
            }
            Self::HealthAnswer { query, rank, health } => {
                begin(4, query);
                bytes.extend(rank.to_le_bytes());
                bytes.push(health_code(health));
            }
            Self::GaveUp { ref completed } => {
                begin(5, 0);
                completed.lasts.iter().for_each(|run| put_run(&mut bytes, *run));
            }
            Self::WriteDump => begin(6, 0),
            Self::Debugger { is_attached } => begin(7, is_attached.into()),
            Self::ArrivalQuery { query, ref runs } => {
                begin(8, query);
                runs.iter().for_each(|run| put_run(&mut bytes, *run));
            }
            Self::ArrivalAnswer { query, ref ages } => {
                begin(9, query);
                for age_ns in ages {
                    bytes.push(age_ns.is_some().into());
                    bytes.extend(age_ns.unwrap_or(0).to_le_bytes());
                }
            }
        }
        bytes
    }

    /// `None` for anything that [`WatchdogMessage::encode`] does not write.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let (kind, mut rest) = wire::open(MAGIC, bytes)?;
        let query = rest.u32()?;
        let message = match kind {
            1 => Self::Query {
                query,
                run: run(&mut rest)?,
            },
            2 => {
                let [code] = *rest.take()?;
                let position = match (code, [rest.u64()?, rest.u64()?, rest.u64()?]) {
                    (0, [idle_ns, 0, 0]) => Position::NotLaunched { idle_ns },
                    (1, [since_ns, 0, 0]) => Position::Queued { since_ns },
                    (2, [since_ns, still_ns, word]) => {
                        let waits = Waits::of(word);
                        if waits.map_or(0, Waits::word) != word {
                            return None;
                        }
                        Position::Running {
                            since_ns,
                            still_ns,
                            waits,
                        }
                    }
                    (3, [0, 0, 0]) => Position::Completed,
                    (4, [0, 0, 0]) => Position::CommunicatorEnded,
                    (5, [0, 0, 0]) => Position::DeviceFailed,
                    (6, [called @ 0..=1, 0, 0]) => Position::WatchdogOff { called: called == 1 },
                    _ => return None,
                };
                // An operation that awaits the asker is one that blocks the rank.
                let [flags @ (0..=7 | 9 | 11 | 13 | 15)] = *rest.take()? else {
                    return None;
                };
                let blocked_by = match flags & 1 {
                    0 => None,
                    _ => Some(BlockingOperation {
                        comm: rest.u64()?,
                        run: run(&mut rest)?,
                        since_ns: rest.u64()?,
                        awaits_asker_ns: match flags & 8 {
                            0 => None,
                            _ => Some(rest.u64()?),
                        },
                    }),
                };
                let answer = RankAnswer {
                    position,
                    blocked_by,
                    is_stale: flags & 2 != 0,
                    stall: match flags & 4 {
                        0 => None,
                        _ => Some(stall(&mut rest)?),
                    },
                };
                Self::Answer { query, answer }
            }
            3 => Self::HealthQuery {
                query,
                rank: rest.u32()?,
            },
            4 => {
                let rank = rest.u32()?;
                let [code] = *rest.take()?;
                Self::HealthAnswer {
                    query,
                    rank,
                    health: *HEALTH.get(usize::from(code))?,
                }
            }
            5 if query == 0 => {
                let mut completed = CompletedRuns::default();
                while !rest.is_empty() {
                    completed.lasts.push(run(&mut rest)?);
                }
                Self::GaveUp { completed }
            }
            6 if query == 0 => Self::WriteDump,
            7 if query <= 1 => Self::Debugger {
                is_attached: query == 1,
            },
            8 => {
                let mut runs = Vec::new();
                while !rest.is_empty() && runs.len() < MOST_ASKED {
                    runs.push(run(&mut rest)?);
                }
                Self::ArrivalQuery { query, runs }
            }
            9 => {
                let mut ages = Vec::new();
                while !rest.is_empty() && ages.len() < MOST_ASKED {
                    let [is_known] = *rest.take()?;
                    ages.push(match (is_known, rest.u64()?) {
                        (0, 0) => None,
                        (1, age_ns) => Some(age_ns),
                        _ => return None,
                    });
                }
                Self::ArrivalAnswer { query, ages }
            }
            _ => return None,
        };
        rest.is_empty().then_some(message)
    }
}

fn health_code(health: ProcessHealth) -> u8 {
    match health {
        ProcessHealth::Unknown => 0,
        ProcessHealth::Alive => 1,
        ProcessHealth::Stopped => 2,
        ProcessHealth::Gone => 3,
        ProcessHealth::Traced => 4,
    }
}

/// Feeds bytes to the parser, for [`crate::fuzzing`]. A message that it accepts must survive being written and read again.
pub(super) fn fuzz(data: &[u8]) {
    if let Some(message) = WatchdogMessage::parse(data) {
        assert_eq!(message.encode(), data);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use ringsight_records::pages::put_text;

    use super::*;
    use crate::op::Identity;

    fn runs() -> impl Strategy<Value = OperationRun> {
        let identity = prop_oneof![
            any::<u64>().prop_map(|seq| Identity::Collective { seq }),
            any::<(u32, u32, u64)>().prop_map(|(from, to, seq)| Identity::Message { from, to, seq }),
        ];
        (identity, any::<u32>()).prop_map(|(identity, replay)| OperationRun { identity, replay })
    }

    fn positions() -> impl Strategy<Value = Position> {
        prop_oneof![
            any::<u64>().prop_map(|idle_ns| Position::NotLaunched { idle_ns }),
            any::<u64>().prop_map(|since_ns| Position::Queued { since_ns }),
            any::<(u64, u64, u64)>().prop_map(|(since_ns, still_ns, word)| Position::Running {
                since_ns,
                still_ns,
                waits: Waits::of(word),
            }),
            Just(Position::Completed),
            Just(Position::CommunicatorEnded),
            Just(Position::DeviceFailed),
            any::<bool>().prop_map(|called| Position::WatchdogOff { called }),
        ]
    }

    fn stalls() -> impl Strategy<Value = Stall> {
        let why = prop_oneof![
            Just(Why::PortDown),
            Just(Why::Unanswered),
            Just(Why::Told),
            (prop::sample::select(PathCause::ALL), any::<u8>())
                .prop_map(|(cause, status)| Why::Left(cause, status)),
        ];
        let end = any::<(u64, u32, u32, bool, u8, u8)>();
        (why, end, "[!-~]{0,24}").prop_map(
            |(why, (for_ns, peer, queue_pair, is_send, channel, port), name)| {
                let mut device = [0; DEVICE_NAME_BYTES];
                put_text(&mut device, &name);
                Stall {
                    why,
                    for_ns,
                    peer,
                    is_send,
                    channel,
                    device,
                    port,
                    queue_pair,
                }
            },
        )
    }

    fn messages() -> impl Strategy<Value = WatchdogMessage> {
        let blocked_by = prop::option::of(
            (any::<u64>(), runs(), any::<u64>(), any::<Option<u64>>()).prop_map(
                |(comm, run, since_ns, awaits_asker_ns)| BlockingOperation {
                    comm,
                    run,
                    since_ns,
                    awaits_asker_ns,
                },
            ),
        );
        let answer = (positions(), blocked_by, prop::option::of(stalls()), any::<bool>()).prop_map(
            |(position, blocked_by, stall, is_stale)| RankAnswer {
                position,
                blocked_by,
                stall,
                is_stale,
            },
        );
        prop_oneof![
            (any::<u32>(), runs()).prop_map(|(query, run)| WatchdogMessage::Query { query, run }),
            (any::<u32>(), answer).prop_map(|(query, answer)| WatchdogMessage::Answer { query, answer }),
            prop::collection::vec(runs(), 0..4).prop_map(|lasts| WatchdogMessage::GaveUp {
                completed: CompletedRuns { lasts }
            }),
            Just(WatchdogMessage::WriteDump),
            any::<bool>().prop_map(|is_attached| WatchdogMessage::Debugger { is_attached }),
            (any::<u32>(), prop::collection::vec(runs(), 0..4))
                .prop_map(|(query, runs)| WatchdogMessage::ArrivalQuery { query, runs }),
            (any::<u32>(), prop::collection::vec(any::<Option<u64>>(), 0..4))
                .prop_map(|(query, ages)| WatchdogMessage::ArrivalAnswer { query, ages }),
            any::<(u32, u32)>().prop_map(|(query, rank)| WatchdogMessage::HealthQuery { query, rank }),
            (any::<(u32, u32)>(), prop::sample::select(&HEALTH[..]))
                .prop_map(|((query, rank), health)| WatchdogMessage::HealthAnswer { query, rank, health }),
        ]
    }

    proptest! {
        #[test]
        fn messages_survive_and_the_parser_never_panics(
            message in messages(), raw in prop::collection::vec(any::<u8>(), 0..160), kind: u8, cut: prop::sample::Index,
        ) {
            let bytes = message.encode();
            let cut = cut.index(bytes.len());
            // A shorter list is a message, too.
            let is_list = matches!(
                message,
                WatchdogMessage::GaveUp { .. }
                    | WatchdogMessage::ArrivalQuery { .. }
                    | WatchdogMessage::ArrivalAnswer { .. }
            );
            let may_be_cut = is_list && cut >= 9;
            prop_assert_eq!(WatchdogMessage::parse(&bytes), Some(message));
            prop_assert!(may_be_cut || WatchdogMessage::parse(&bytes[..cut]).is_none());
            fuzz(&[b"RSWD", &[kind % 10][..], &raw].concat());
            fuzz(&raw);
        }
    }

    #[test]
    fn a_question_about_too_many_operations_is_refused() {
        let run = OperationRun {
            identity: Identity::Collective { seq: 1 },
            replay: 0,
        };
        let query = |count| WatchdogMessage::ArrivalQuery {
            query: 1,
            runs: vec![run; count],
        };
        let answer = |count| WatchdogMessage::ArrivalAnswer {
            query: 1,
            ages: vec![Some(1); count],
        };
        for message in [query(MOST_ASKED), answer(MOST_ASKED)] {
            assert_eq!(WatchdogMessage::parse(&message.encode()), Some(message));
        }
        for message in [query(MOST_ASKED + 1), answer(MOST_ASKED + 1)] {
            assert_eq!(WatchdogMessage::parse(&message.encode()), None);
        }
    }

    #[test]
    fn only_known_codes_are_read() {
        for code in 0..=u8::MAX {
            let bytes = [b"RSWD", &[4, 1, 0, 0, 0, 2, 0, 0, 0, code][..]].concat();
            let health = HEALTH.get(usize::from(code)).copied();
            let expected = health.map(|health| WatchdogMessage::HealthAnswer {
                query: 1,
                rank: 2,
                health,
            });
            assert_eq!(WatchdogMessage::parse(&bytes), expected);
        }
        assert!(
            (0..)
                .zip(HEALTH)
                .all(|(code, health)| health_code(health) == code)
        );
    }
}
