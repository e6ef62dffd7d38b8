//! What watchdogs ask each other; the parser refuses everything else.

use ringsight_records::{PathCause, Waits, connection::DEVICE_NAME_BYTES, pages::text};

use super::{
    done::Done,
    position::{Answer, HeldUp, Position, Run},
};
use crate::{
    checks::wire::{self, Rest, put_identity},
    process::{Stat, State},
    proxy::stalls::{Stall, Why},
    topology::Topology,
};

/// First four bytes: "RSWD".
const MAGIC: u32 = u32::from_le_bytes(*b"RSWD");

/// What a rank's node says of the rank's process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Health {
    /// Nothing can be found out.
    Unknown,
    /// It runs or sleeps.
    Alive,
    /// It is stopped by a signal.
    Stopped,
    /// It is gone.
    Gone,
    /// A debugger holds it.
    Traced,
}

impl Health {
    const ALL: [Self; 5] = [
        Self::Unknown,
        Self::Alive,
        Self::Stopped,
        Self::Gone,
        Self::Traced,
    ];

    /// What the system says of the process of a rank, if it is of this node.
    pub(super) fn of(topology: &Topology, rank: u32) -> Self {
        if topology.node_of(rank) != topology.node_of(topology.rank()) {
            return Self::Unknown;
        }
        let info = topology.info(rank);
        // In a pid namespace of its own it has another number here, and another process may have this one.
        let found = Stat::of(info.pid).filter(|stat| stat.start_time == info.process_start_time);
        found.map_or(Self::Unknown, |stat| match stat.state {
            State::Stopped => Self::Stopped,
            State::Traced => Self::Traced,
            State::Ended => Self::Gone,
            State::Alive => Self::Alive,
        })
    }
}

/// A control message between the ranks of a communicator. Answers repeat the number of the question.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// Where are you with this run?
    Where { query: u32, run: Run },
    /// Here.
    Here { query: u32, answer: Answer },
    /// To a rank on the node of a silent one: what is the matter with it?
    Look { query: u32, rank: u32 },
    /// This.
    Looked { query: u32, rank: u32, health: Health },
    /// To all: this rank gives up its operations, but for what it is done with; nobody need ask.
    Ended { done: Done },
    /// To all: a hang has been found, write what you are in.
    Dump,
    /// To all: a debugger has taken this rank's process, or has left it.
    Traced { is: bool },
}

fn put_run(bytes: &mut Vec<u8>, run: Run) {
    put_identity(bytes, run.identity);
    bytes.extend(run.replay.to_le_bytes());
}

fn run(rest: &mut Rest<'_>) -> Option<Run> {
    Some(Run {
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

impl Message {
    /// Magic u32 | kind u8 | query u32 | body.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_le_bytes().to_vec();
        let mut begin = |kind: u8, query: u32| {
            bytes.push(kind);
            bytes.extend(query.to_le_bytes());
        };
        match *self {
            Self::Where { query, run } => {
                begin(1, query);
                put_run(&mut bytes, run);
            }
            Self::Here { query, answer } => {
                begin(2, query);
                let (code, words) = match answer.position {
                    Position::NotLaunched { idle_ns } => (0, [idle_ns, 0, 0]),
                    Position::Queued { since_ns } => (1, [since_ns, 0, 0]),
                    Position::Running {
                        since_ns,
                        still_ns,
                        waits,
                    } => (2, [since_ns, still_ns, waits.map_or(0, Waits::word)]),
                    Position::Done => (3, [0; 3]),
                    Position::Ended => (4, [0; 3]),
                    Position::Faulted => (5, [0; 3]),
                    Position::Unwatched { called } => (6, [called.into(), 0, 0]),
                };
                bytes.push(code);
                bytes.extend(words.into_iter().flat_map(u64::to_le_bytes));
                let (held_up, stall) = (answer.held_up.is_some(), answer.stall.is_some());
                let bars_ns = answer.held_up.and_then(|held| held.bars_ns);
                let flags = [held_up, answer.is_old, stall, bars_ns.is_some()];
                bytes.push(
                    flags
                        .iter()
                        .rev()
                        .fold(0, |byte, flag| byte << 1 | u8::from(*flag)),
                );
                if let Some(held) = answer.held_up {
                    bytes.extend(held.comm.to_le_bytes());
                    put_run(&mut bytes, held.run);
                    bytes.extend(held.since_ns.to_le_bytes());
                    bytes.extend(bars_ns.iter().flat_map(|ns| ns.to_le_bytes()));
                }
                if let Some(stall) = &answer.stall {
                    put_stall(&mut bytes, stall);
                }
            }
            Self::Look { query, rank } => {
                begin(3, query);
                bytes.extend(rank.to_le_bytes());
            }
            Self::Looked { query, rank, health } => {
                begin(4, query);
                bytes.extend(rank.to_le_bytes());
                bytes.push(health as u8);
            }
            Self::Ended { ref done } => {
                begin(5, 0);
                done.runs.iter().for_each(|run| put_run(&mut bytes, *run));
            }
            Self::Dump => begin(6, 0),
            Self::Traced { is } => begin(7, is.into()),
        }
        bytes
    }

    /// `None` for anything that [`Message::encode`] does not write.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let (kind, mut rest) = wire::open(MAGIC, bytes)?;
        let query = rest.u32()?;
        let message = match kind {
            1 => Self::Where {
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
                    (3, [0, 0, 0]) => Position::Done,
                    (4, [0, 0, 0]) => Position::Ended,
                    (5, [0, 0, 0]) => Position::Faulted,
                    (6, [called @ 0..=1, 0, 0]) => Position::Unwatched { called: called == 1 },
                    _ => return None,
                };
                // Only what keeps the rank stands in its way.
                let [flags @ (0..=7 | 9 | 11 | 13 | 15)] = *rest.take()? else {
                    return None;
                };
                let held_up = match flags & 1 {
                    0 => None,
                    _ => Some(HeldUp {
                        comm: rest.u64()?,
                        run: run(&mut rest)?,
                        since_ns: rest.u64()?,
                        bars_ns: match flags & 8 {
                            0 => None,
                            _ => Some(rest.u64()?),
                        },
                    }),
                };
                let answer = Answer {
                    position,
                    held_up,
                    is_old: flags & 2 != 0,
                    stall: match flags & 4 {
                        0 => None,
                        _ => Some(stall(&mut rest)?),
                    },
                };
                Self::Here { query, answer }
            }
            3 => Self::Look {
                query,
                rank: rest.u32()?,
            },
            4 => {
                let rank = rest.u32()?;
                let [code] = *rest.take()?;
                Self::Looked {
                    query,
                    rank,
                    health: *Health::ALL.get(usize::from(code))?,
                }
            }
            5 if query == 0 => {
                let mut done = Done::default();
                while !rest.is_empty() {
                    done.runs.push(run(&mut rest)?);
                }
                Self::Ended { done }
            }
            6 if query == 0 => Self::Dump,
            7 if query <= 1 => Self::Traced { is: query == 1 },
            _ => return None,
        };
        rest.is_empty().then_some(message)
    }
}

/// Feeds bytes to the parser, for [`crate::fuzzing`]; what it accepts must survive being written and read again.
pub(super) fn fuzz(data: &[u8]) {
    if let Some(message) = Message::parse(data) {
        assert_eq!(message.encode(), data);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use ringsight_records::pages::put_text;

    use super::*;
    use crate::checks::Identity;

    fn runs() -> impl Strategy<Value = Run> {
        let identity = prop_oneof![
            any::<u64>().prop_map(|seq| Identity::Collective { seq }),
            any::<(u32, u32, u64)>().prop_map(|(from, to, seq)| Identity::Message { from, to, seq }),
        ];
        (identity, any::<u32>()).prop_map(|(identity, replay)| Run { identity, replay })
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
            Just(Position::Done),
            Just(Position::Ended),
            Just(Position::Faulted),
            any::<bool>().prop_map(|called| Position::Unwatched { called }),
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

    fn messages() -> impl Strategy<Value = Message> {
        let held_up = prop::option::of(
            (any::<u64>(), runs(), any::<u64>(), any::<Option<u64>>()).prop_map(
                |(comm, run, since_ns, bars_ns)| HeldUp {
                    comm,
                    run,
                    since_ns,
                    bars_ns,
                },
            ),
        );
        let answer = (positions(), held_up, prop::option::of(stalls()), any::<bool>()).prop_map(
            |(position, held_up, stall, is_old)| Answer {
                position,
                held_up,
                stall,
                is_old,
            },
        );
        prop_oneof![
            (any::<u32>(), runs()).prop_map(|(query, run)| Message::Where { query, run }),
            (any::<u32>(), answer).prop_map(|(query, answer)| Message::Here { query, answer }),
            prop::collection::vec(runs(), 0..4).prop_map(|runs| Message::Ended { done: Done { runs } }),
            Just(Message::Dump),
            any::<bool>().prop_map(|is| Message::Traced { is }),
            any::<(u32, u32)>().prop_map(|(query, rank)| Message::Look { query, rank }),
            (any::<(u32, u32)>(), prop::sample::select(&Health::ALL[..]))
                .prop_map(|((query, rank), health)| Message::Looked { query, rank, health }),
        ]
    }

    proptest! {
        #[test]
        fn messages_survive_and_no_parser_panics(
            message in messages(), raw in prop::collection::vec(any::<u8>(), 0..160), kind: u8, cut: prop::sample::Index,
        ) {
            let bytes = message.encode();
            let cut = cut.index(bytes.len());
            // What a rank is done with may be less.
            let may_be_cut = matches!(message, Message::Ended { .. }) && cut >= 9;
            prop_assert_eq!(Message::parse(&bytes), Some(message));
            prop_assert!(may_be_cut || Message::parse(&bytes[..cut]).is_none());
            fuzz(&[b"RSWD", &[kind % 9][..], &raw].concat());
            fuzz(&raw);
        }
    }

    #[test]
    fn only_codes_that_have_a_meaning_are_read() {
        for code in 0..=u8::MAX {
            let bytes = [b"RSWD", &[4, 1, 0, 0, 0, 2, 0, 0, 0, code][..]].concat();
            let health = Health::ALL.get(usize::from(code)).copied();
            let looked = health.map(|health| Message::Looked {
                query: 1,
                rank: 2,
                health,
            });
            assert_eq!(Message::parse(&bytes), looked);
        }
        assert!((0..).zip(Health::ALL).all(|(code, health)| health as u8 == code));
    }
}
