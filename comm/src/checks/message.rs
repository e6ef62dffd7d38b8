//! Control messages between checks. The parser refuses everything that [`CheckMessage::encode`] does not write.

use super::wire::{self, Rest, put_identity};
use crate::op::{Call, Identity};

/// First four bytes: "RSCK".
const MAGIC: u32 = u32::from_le_bytes(*b"RSCK");
/// The longest text, bytes.
const MAX_TEXT: usize = 1 << 16;
/// The most calls in an answer: more than a rank looks at around an operation.
const MAX_CALLS: usize = 512;
/// The most ranks that are listed beside it.
const MAX_WRONG: usize = 64;

/// A control message between the ranks of a communicator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum CheckMessage {
    /// To the rank that asks for all: at this operation of the sender a slot with tag `theirs` arrived.
    Noticed { mine: (Identity, Call), theirs: u32 },
    /// From that rank to all: what did the receiver call around `identity`, and what with tag `theirs`?
    Ask { identity: Identity, theirs: u32 },
    /// Back to it: the sender's calls.
    Calls(CallsAnswer),
    /// From it to all: who called what.
    Finding(Finding),
}

/// What a rank called.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct CallsAnswer {
    /// In the sequence that was asked for: numbers and calls.
    pub(super) calls: Vec<(u64, Call)>,
    /// With the tag that was asked for.
    pub(super) tagged: Option<(Identity, Call)>,
}

/// Who called what.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Finding {
    /// Names the ranks and their calls.
    pub(super) text: String,
    /// The ranks that did not call what most ranks called, in rank order. If no call has the most ranks, nobody can say
    /// which is wrong: then all ranks that called the operation.
    pub(super) wrong: Vec<u32>,
}

fn call(rest: &mut Rest<'_>) -> Option<Call> {
    Call::parse(rest.take()?)
}

impl CheckMessage {
    /// Magic u32 | kind u8 | body.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_le_bytes().to_vec();
        match self {
            Self::Noticed {
                mine: (identity, call),
                theirs,
            } => {
                bytes.push(1);
                put_identity(&mut bytes, *identity);
                bytes.extend(call.encode());
                bytes.extend(theirs.to_le_bytes());
            }
            Self::Ask { identity, theirs } => {
                bytes.push(2);
                put_identity(&mut bytes, *identity);
                bytes.extend(theirs.to_le_bytes());
            }
            Self::Calls(CallsAnswer { calls, tagged }) => {
                bytes.push(3);
                bytes.push(tagged.is_some().into());
                if let Some((identity, call)) = tagged {
                    put_identity(&mut bytes, *identity);
                    bytes.extend(call.encode());
                }
                for (seq, call) in calls {
                    bytes.extend(seq.to_le_bytes());
                    bytes.extend(call.encode());
                }
            }
            Self::Finding(Finding { text, wrong }) => {
                bytes.push(4);
                let wrong = &wrong[..wrong.len().min(MAX_WRONG)];
                bytes.push(wrong.len() as u8);
                wrong.iter().for_each(|rank| bytes.extend(rank.to_le_bytes()));
                bytes.extend(&text.as_bytes()[..text.floor_char_boundary(MAX_TEXT)]);
            }
        }
        bytes
    }

    /// `None` for anything that [`CheckMessage::encode`] does not write.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let (kind, mut rest) = wire::open(MAGIC, bytes)?;
        let message = match kind {
            1 => Self::Noticed {
                mine: (rest.identity()?, call(&mut rest)?),
                theirs: rest.u32()?,
            },
            2 => Self::Ask {
                identity: rest.identity()?,
                theirs: rest.u32()?,
            },
            3 => {
                let tagged = match *rest.take()? {
                    [0] => None,
                    [1] => Some((rest.identity()?, call(&mut rest)?)),
                    _ => return None,
                };
                let count = rest.0.len() / (8 + Call::BYTES);
                let mut calls = Vec::with_capacity(Some(count).filter(|count| *count <= MAX_CALLS)?);
                while !rest.is_empty() {
                    calls.push((rest.u64()?, call(&mut rest)?));
                }
                Self::Calls(CallsAnswer { calls, tagged })
            }
            4 => {
                let [count] = *rest.take()?;
                let count = Some(usize::from(count)).filter(|count| *count <= MAX_WRONG)?;
                let wrong = (0..count).map(|_| rest.u32()).collect::<Option<_>>()?;
                let text = Some(std::mem::take(&mut rest.0)).filter(|text| text.len() <= MAX_TEXT)?;
                let text = std::str::from_utf8(text).ok()?.to_owned();
                Self::Finding(Finding { text, wrong })
            }
            _ => return None,
        };
        rest.is_empty().then_some(message)
    }
}

/// Feeds bytes to the parser, for [`crate::fuzzing`]. A message that it accepts must survive being written and read again.
pub(crate) fn fuzz(data: &[u8]) {
    if let Some(message) = CheckMessage::parse(data) {
        assert_eq!(message.encode(), data);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use ringsight_records::{DataType, Function, ReduceOp};

    use super::*;
    use crate::op::WindowPlace;

    fn identities() -> impl Strategy<Value = Identity> {
        prop_oneof![
            any::<u64>().prop_map(|seq| Identity::Collective { seq }),
            any::<(u32, u32, u64)>().prop_map(|(from, to, seq)| Identity::Message { from, to, seq }),
        ]
    }

    fn calls() -> impl Strategy<Value = Call> {
        (
            prop::sample::select(Function::ALL),
            any::<usize>(),
            prop::sample::select(DataType::ALL),
            prop::sample::select(ReduceOp::ALL),
            any::<Option<u32>>(),
            any::<Option<(u32, u64)>>(),
        )
            .prop_map(|(function, count, data_type, reduce_op, peer, place)| Call {
                function,
                count,
                data_type,
                reduce_op,
                peer,
                place: place.map(|(window, offset)| WindowPlace { window, offset }),
            })
    }

    fn messages() -> impl Strategy<Value = CheckMessage> {
        let answer = (
            prop::collection::vec((any::<u64>(), calls()), 0..5),
            prop::option::of((identities(), calls())),
        );
        prop_oneof![
            ((identities(), calls()), any::<u32>())
                .prop_map(|(mine, theirs)| CheckMessage::Noticed { mine, theirs }),
            (identities(), any::<u32>())
                .prop_map(|(identity, theirs)| CheckMessage::Ask { identity, theirs }),
            answer.prop_map(|(calls, tagged)| CheckMessage::Calls(CallsAnswer { calls, tagged })),
            (".{0,100}", prop::collection::vec(any::<u32>(), 0..=MAX_WRONG))
                .prop_map(|(text, wrong)| CheckMessage::Finding(Finding { text, wrong })),
        ]
    }

    #[test]
    fn an_answer_has_no_more_calls_than_a_rank_looks_at() {
        let call = Call {
            function: Function::AllReduce,
            count: 1,
            data_type: DataType::Float32,
            reduce_op: ReduceOp::Sum,
            peer: None,
            place: None,
        };
        let calls = vec![(1, call); MAX_CALLS + 1];
        let answer = |count: usize| CallsAnswer {
            calls: calls[..count].to_vec(),
            tagged: None,
        };
        for (count, is_taken) in [(MAX_CALLS, true), (MAX_CALLS + 1, false)] {
            let bytes = CheckMessage::Calls(answer(count)).encode();
            assert_eq!(CheckMessage::parse(&bytes).is_some(), is_taken, "{count}");
        }
    }

    proptest! {
        #[test]
        fn messages_survive_and_the_parser_never_panics(
            message in messages(), raw in prop::collection::vec(any::<u8>(), 0..80), kind: u8, cut: prop::sample::Index,
        ) {
            let bytes = message.encode();
            prop_assert_eq!(CheckMessage::parse(&bytes), Some(message.clone()));
            if !matches!(message, CheckMessage::Finding(_) | CheckMessage::Calls(_)) {
                prop_assert_eq!(CheckMessage::parse(&bytes[..cut.index(bytes.len())]), None);
            }
            prop_assert_eq!(CheckMessage::parse(&[b"XSCK", &bytes[4..]].concat()), None);
            fuzz(&[b"RSCK", &[kind % 6][..], &raw].concat());
            fuzz(&raw);
        }
    }

    #[test]
    fn longer_messages_than_are_ever_written_are_refused() {
        let finding = |wrong: usize, text: usize| {
            let mut bytes = [b"RSCK", &[4, wrong as u8][..]].concat();
            bytes.resize(bytes.len() + 4 * wrong, 7);
            bytes.resize(bytes.len() + text, b'x');
            CheckMessage::parse(&bytes)
        };
        assert!(finding(MAX_WRONG, MAX_TEXT).is_some());
        assert_eq!(finding(MAX_WRONG, MAX_TEXT + 1), None);
        assert_eq!(finding(MAX_WRONG + 1, MAX_TEXT), None);
        let many = CheckMessage::Finding(Finding {
            text: "x".repeat(MAX_TEXT + 1),
            wrong: (0..100).collect(),
        });
        let Some(CheckMessage::Finding(Finding { text, wrong })) = CheckMessage::parse(&many.encode()) else {
            panic!("an encoded message is read");
        };
        assert_eq!((text.len(), wrong), (MAX_TEXT, (0..MAX_WRONG as u32).collect()));
    }
}
