//! What ranks tell each other when their calls differ; the parser refuses everything else.

use super::{
    calls::Entry,
    verdict::Finding,
    wire::{self, Rest, put_identity},
};
use crate::op::{Call, Identity};

/// First four bytes: "RSCK".
const MAGIC: u32 = u32::from_le_bytes(*b"RSCK");
/// Longest text, bytes.
const MAX_TEXT: usize = 1 << 16;
/// Ranks that are named beside it, at most.
const MAX_ODD: usize = 64;

/// A control message between the ranks of a communicator.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// To the rank that asks for all: at this operation of mine another one's slot arrived, with tag `theirs`.
    Differs { mine: (Identity, Call), theirs: u32 },
    /// From that rank to all: what did you call around `identity`, and what with tag `theirs`?
    Ask { identity: Identity, theirs: u32 },
    /// Back to it: this.
    Called(Answer),
    /// From it to all: who called what.
    Verdict(Finding),
}

/// What a rank called.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Answer {
    /// In the sequence that was asked for, by number.
    pub(super) calls: Vec<(u64, Call)>,
    /// With the tag that was asked for.
    pub(super) tagged: Option<(Identity, Call)>,
}

fn call(rest: &mut Rest<'_>) -> Option<Call> {
    Call::parse(rest.take()?)
}

impl Message {
    /// Magic u32 | kind u8 | body.
    pub(super) fn encode(&self) -> Vec<u8> {
        let mut bytes = MAGIC.to_le_bytes().to_vec();
        match self {
            Self::Differs {
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
            Self::Called(Answer { calls, tagged }) => {
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
            Self::Verdict(Finding { text, odd }) => {
                bytes.push(4);
                let odd = &odd[..odd.len().min(MAX_ODD)];
                bytes.push(odd.len() as u8);
                odd.iter().for_each(|rank| bytes.extend(rank.to_le_bytes()));
                bytes.extend(&text.as_bytes()[..text.floor_char_boundary(MAX_TEXT)]);
            }
        }
        bytes
    }

    /// `None` for anything that [`Message::encode`] does not write.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let (kind, mut rest) = wire::open(MAGIC, bytes)?;
        let message = match kind {
            1 => Self::Differs {
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
                let mut calls = Vec::with_capacity(rest.0.len() / (8 + Call::BYTES));
                while !rest.is_empty() {
                    calls.push((rest.u64()?, call(&mut rest)?));
                }
                Self::Called(Answer { calls, tagged })
            }
            4 => {
                let [count] = *rest.take()?;
                let count = Some(usize::from(count)).filter(|count| *count <= MAX_ODD)?;
                let odd = (0..count).map(|_| rest.u32()).collect::<Option<_>>()?;
                let text = Some(std::mem::take(&mut rest.0)).filter(|text| text.len() <= MAX_TEXT)?;
                let text = std::str::from_utf8(text).ok()?.to_owned();
                Self::Verdict(Finding { text, odd })
            }
            _ => return None,
        };
        rest.is_empty().then_some(message)
    }
}

/// Feeds bytes to the parser, for [`crate::fuzzing`]; what it accepts must survive being written and read again.
pub(crate) fn fuzz(data: &[u8]) {
    if let Some(message) = Message::parse(data) {
        assert_eq!(message.encode(), data);
    }
}

impl From<Entry> for (Identity, Call) {
    fn from(entry: Entry) -> Self {
        (entry.identity, entry.call)
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

    fn messages() -> impl Strategy<Value = Message> {
        let answer = (
            prop::collection::vec((any::<u64>(), calls()), 0..5),
            prop::option::of((identities(), calls())),
        );
        prop_oneof![
            ((identities(), calls()), any::<u32>())
                .prop_map(|(mine, theirs)| Message::Differs { mine, theirs }),
            (identities(), any::<u32>()).prop_map(|(identity, theirs)| Message::Ask { identity, theirs }),
            answer.prop_map(|(calls, tagged)| Message::Called(Answer { calls, tagged })),
            (".{0,100}", prop::collection::vec(any::<u32>(), 0..=MAX_ODD))
                .prop_map(|(text, odd)| Message::Verdict(Finding { text, odd })),
        ]
    }

    proptest! {
        #[test]
        fn messages_survive_and_no_parser_panics(
            message in messages(), raw in prop::collection::vec(any::<u8>(), 0..80), kind: u8, cut: prop::sample::Index,
        ) {
            let bytes = message.encode();
            prop_assert_eq!(Message::parse(&bytes), Some(message.clone()));
            if !matches!(message, Message::Verdict(_) | Message::Called(_)) {
                prop_assert_eq!(Message::parse(&bytes[..cut.index(bytes.len())]), None);
            }
            prop_assert_eq!(Message::parse(&[b"XSCK", &bytes[4..]].concat()), None);
            fuzz(&[b"RSCK", &[kind % 6][..], &raw].concat());
            fuzz(&raw);
        }
    }

    #[test]
    fn no_more_is_read_than_is_ever_written() {
        let verdict = |odd: usize, text: usize| {
            let mut bytes = [b"RSCK", &[4, odd as u8][..]].concat();
            bytes.resize(bytes.len() + 4 * odd, 7);
            bytes.resize(bytes.len() + text, b'x');
            Message::parse(&bytes)
        };
        assert!(verdict(MAX_ODD, MAX_TEXT).is_some());
        assert_eq!(verdict(MAX_ODD, MAX_TEXT + 1), None);
        assert_eq!(verdict(MAX_ODD + 1, MAX_TEXT), None);
        let many = Message::Verdict(Finding {
            text: "x".repeat(MAX_TEXT + 1),
            odd: (0..100).collect(),
        });
        let Some(Message::Verdict(Finding { text, odd })) = Message::parse(&many.encode()) else {
            panic!("what is written is read");
        };
        assert_eq!((text.len(), odd), (MAX_TEXT, (0..MAX_ODD as u32).collect()));
    }
}
