//! Which rank arrived last at a completed operation, from the ages of arrivals that other ranks told.
//!
//! A rank's answer says how long before the answer it arrived: an age, which needs no clock that two hosts share. The answer
//! was written between the moment when the question was sent and the moment when the answer came. So the arrival lies, by this
//! rank's clock, between the first moment less the age and the second less the age. The lag that follows from the middles of
//! these spans is recorded, and how far the spans let it be off, also if another rank may have been the last.
//!
//! Lag is defined as in the collector (`collector/src/lag.rs`): arrival of the last rank less the median of the others'
//! arrivals. So the findings of one node's collector and of all nodes' agree.

use std::{cmp::Reverse, collections::BTreeMap};

use ringsight_records::{Arrival, ArrivalGap};

use super::evidence::OperationRun;
use crate::{op::Identity, progress::ArrivedOperation};

/// The most operations of one question.
pub(crate) const MOST_ASKED: usize = 64;

/// How long answers are waited for, nanoseconds.
const PATIENCE_NS: u64 = 1_000_000_000;

/// How uncertain a lag may be without another question, nanoseconds; a twentieth of the lag if that is more.
const TOLERANCE_NS: u64 = 500_000;

/// How often an operation is asked about. On a busy machine an answer may wait for its turn; the next one seldom does.
const MOST_ROUNDS: u32 = 3;

/// What was found out of one operation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Finding {
    pub(crate) operation: ArrivedOperation,
    pub(crate) arrival: Result<Arrival, ArrivalGap>,
}

/// What one rank is to be asked about.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Question {
    pub(crate) rank: u32,
    pub(crate) runs: Vec<OperationRun>,
}

/// When a rank arrived by this rank's clock: at the earliest and at the latest, nanoseconds.
#[derive(Clone, Copy, Debug)]
struct Span {
    rank: u32,
    low_ns: u64,
    high_ns: u64,
}

impl Span {
    fn middle_ns(&self) -> u64 {
        self.low_ns.midpoint(self.high_ns)
    }
}

/// An operation of an inquiry.
#[derive(Clone)]
struct Asked {
    operation: ArrivedOperation,
    /// Other ranks that it depends on.
    others: usize,
    heard: Vec<Span>,
    /// Ranks that did not know in this round. Their threads may not have heard of the device yet.
    ignorant: Vec<u32>,
    /// How often it was asked about.
    rounds: u32,
}

/// A rank that has not answered.
struct Awaited {
    sent_ns: u64,
    /// Which of the inquiry's operations it was asked about.
    operations: Vec<usize>,
}

/// Operations that were asked about together.
struct Inquiry {
    begun_ns: u64,
    asked: Vec<Asked>,
    awaited: BTreeMap<u32, Awaited>,
}

/// The questions of one communicator that wait for answers.
#[derive(Default)]
pub(crate) struct ArrivalInquiries {
    /// Number of the last inquiry.
    last: u32,
    open: BTreeMap<u32, Inquiry>,
    /// Operations to ask about again with the next inquiry, and the ranks to ask.
    later: Vec<(Asked, Vec<u32>)>,
}

/// What follows from an answer.
#[derive(Debug, Default)]
pub(crate) struct Heard {
    /// What is found out.
    pub(crate) findings: Vec<Finding>,
    /// What to ask again, and the number of that inquiry.
    pub(crate) again: Option<(u32, Vec<Question>)>,
}

impl ArrivalInquiries {
    /// How many more operations the next inquiry can be about.
    pub(crate) fn room(&self) -> usize {
        MOST_ASKED.saturating_sub(self.later.len())
    }

    /// Begins an inquiry about at most [`MOST_ASKED`] operations: those that ranks did not know of yet when they were asked, then
    /// these. `ranks_of` gives the ranks to ask about an operation, and how many ranks it depends on. Returns the inquiry's
    /// number and what to ask; `None` if there is nothing to ask about.
    pub(crate) fn begin(
        &mut self,
        operations: &[ArrivedOperation],
        ranks_of: impl Fn(&ArrivedOperation) -> (Vec<u32>, usize),
        now: u64,
    ) -> Option<(u32, Vec<Question>)> {
        let room = self.room();
        let mut asked: Vec<_> = self.later.drain(..self.later.len().min(MOST_ASKED)).collect();
        asked.extend(operations.iter().take(room).map(|operation| {
            let (ranks, others) = ranks_of(operation);
            let asked = Asked {
                operation: *operation,
                others,
                heard: Vec::new(),
                ignorant: Vec::new(),
                rounds: 0,
            };
            (asked, ranks)
        }));
        (!asked.is_empty()).then(|| self.start(asked, now))
    }

    /// Starts an inquiry about operations, each with the ranks to ask.
    fn start(&mut self, of_ranks: Vec<(Asked, Vec<u32>)>, now: u64) -> (u32, Vec<Question>) {
        let mut asked = Vec::new();
        let mut awaited: BTreeMap<u32, Awaited> = BTreeMap::new();
        for (at, (mut operation, ranks)) in of_ranks.into_iter().enumerate() {
            operation.rounds += 1;
            operation.ignorant.clear();
            asked.push(operation);
            for rank in ranks {
                let new = || Awaited {
                    sent_ns: now,
                    operations: Vec::new(),
                };
                awaited.entry(rank).or_insert_with(new).operations.push(at);
            }
        }
        let run = |at: &usize| {
            let operation = &asked[*at].operation;
            OperationRun {
                identity: Identity::of(&operation.info),
                replay: operation.replay,
            }
        };
        let questions = awaited.iter().map(|(rank, awaited)| Question {
            rank: *rank,
            runs: awaited.operations.iter().map(run).collect(),
        });
        let questions = questions.collect();
        self.last = self.last.wrapping_add(1);
        let inquiry = Inquiry {
            begun_ns: now,
            asked,
            awaited,
        };
        self.open.insert(self.last, inquiry);
        (self.last, questions)
    }

    /// A rank is about to be asked.
    pub(crate) fn sending(&mut self, query: u32, rank: u32, now: u64) {
        let inquiry = self.open.get_mut(&query);
        if let Some(awaited) = inquiry.and_then(|inquiry| inquiry.awaited.get_mut(&rank)) {
            awaited.sent_ns = now;
        }
    }

    /// A rank answered: by operation, how long ago it arrived, if it knows; nothing if it cannot be asked. Returns what follows.
    /// Ignores a rank that was not asked, or not about as many operations.
    pub(crate) fn hear(&mut self, query: u32, rank: u32, ages: Option<&[Option<u64>]>, now: u64) -> Heard {
        let Some(inquiry) = self.open.get_mut(&query) else {
            return Heard::default();
        };
        let is_answer = |awaited: &Awaited| ages.is_none_or(|ages| ages.len() == awaited.operations.len());
        if !inquiry.awaited.get(&rank).is_some_and(is_answer) {
            return Heard::default();
        }
        let Some(awaited) = inquiry.awaited.remove(&rank) else {
            return Heard::default();
        };
        for (at, age_ns) in awaited.operations.iter().zip(ages.unwrap_or_default()) {
            let Some(age_ns) = age_ns else {
                inquiry.asked[*at].hear_nothing(rank);
                continue;
            };
            inquiry.asked[*at].hear(Span {
                rank,
                low_ns: awaited.sent_ns.saturating_sub(*age_ns),
                high_ns: now.saturating_sub(*age_ns),
            });
        }
        if !inquiry.awaited.is_empty() {
            return Heard::default();
        }
        let asked = self.open.remove(&query).map(|inquiry| inquiry.asked);
        let ranks = asked.unwrap_or_default().into_iter().map(|asked| {
            let ranks = asked.ranks_to_ask_again();
            (asked, ranks)
        });
        let (known, uncertain): (Vec<_>, Vec<_>) = ranks.partition(|(_, ranks)| ranks.is_empty());
        let is_ignorant = |(asked, _): &(Asked, Vec<u32>)| !asked.ignorant.is_empty();
        let (later, uncertain): (Vec<_>, Vec<_>) = uncertain.into_iter().partition(is_ignorant);
        self.later.extend(later);
        Heard {
            findings: known.into_iter().map(|(asked, _)| asked.conclude()).collect(),
            again: (!uncertain.is_empty()).then(|| self.start(uncertain, now)),
        }
    }

    /// Ends the inquiries whose answers have been waited for long enough.
    pub(crate) fn expire(&mut self, now: u64) -> Vec<Finding> {
        let is_over = |_: &u32, inquiry: &mut Inquiry| now.saturating_sub(inquiry.begun_ns) >= PATIENCE_NS;
        let over: Vec<_> = self.open.extract_if(.., is_over).collect();
        over.into_iter()
            .flat_map(|(_, inquiry)| inquiry.conclude())
            .collect()
    }

    /// Ends all inquiries: no answer comes any more.
    pub(crate) fn end(&mut self) -> Vec<Finding> {
        let open = std::mem::take(&mut self.open).into_values();
        let later = std::mem::take(&mut self.later).into_iter();
        open.flat_map(Inquiry::conclude)
            .chain(later.map(|(asked, _)| asked.conclude()))
            .collect()
    }
}

impl Inquiry {
    fn conclude(self) -> Vec<Finding> {
        self.asked.into_iter().map(Asked::conclude).collect()
    }
}

impl Asked {
    fn hear(&mut self, span: Span) {
        // This rank completed the operation after the ranks that it depends on had arrived. What cannot be is not believed.
        if span.low_ns > self.operation.end_ns {
            return;
        }
        let high_ns = span.high_ns.min(self.operation.end_ns);
        match self.heard.iter_mut().find(|heard| heard.rank == span.rank) {
            None => self.heard.push(Span { high_ns, ..span }),
            // All answers are true, so the arrival is in all of their spans.
            Some(heard) if heard.low_ns <= high_ns && span.low_ns <= heard.high_ns => {
                heard.low_ns = heard.low_ns.max(span.low_ns);
                heard.high_ns = heard.high_ns.min(high_ns);
            }
            Some(_) => {}
        }
    }

    /// A rank does not know when it arrived, or not yet.
    fn hear_nothing(&mut self, rank: u32) {
        if self.heard.iter().all(|heard| heard.rank != rank) {
            self.ignorant.push(rank);
        }
    }

    /// The ranks whose arrivals are not known, or not well enough, unless it has been asked about often enough.
    fn ranks_to_ask_again(&self) -> Vec<u32> {
        if self.rounds >= MOST_ROUNDS {
            return Vec::new();
        }
        let Some(arrival) = self.arrival() else {
            return self.ignorant.clone();
        };
        let tolerance_ns = (arrival.lag_ns / 20).max(TOLERANCE_NS);
        if arrival.uncertainty_ns <= tolerance_ns {
            return self.ignorant.clone();
        }
        let is_wide = |span: &&Span| span.high_ns - span.low_ns > tolerance_ns;
        let wide = self.heard.iter().filter(is_wide).map(|span| span.rank);
        wide.chain(self.ignorant.iter().copied()).collect()
    }

    fn arrival(&self) -> Option<Arrival> {
        let own_ns = self.operation.arrived_ns;
        let own = Span {
            rank: self.operation.info.rank,
            low_ns: own_ns,
            high_ns: own_ns,
        };
        let last = last_of(self.heard.iter().copied().chain([own]).collect())?;
        let unknown = self.others.saturating_sub(self.heard.len());
        Some(Arrival {
            rank: last.span.rank,
            lag_ns: last.lag_ns,
            wait_ns: last.span.middle_ns().saturating_sub(own_ns),
            uncertainty_ns: last.uncertainty_ns,
            unknown_ranks: u8::try_from(unknown).unwrap_or(u8::MAX),
        })
    }

    fn conclude(self) -> Finding {
        Finding {
            arrival: self.arrival().ok_or(ArrivalGap::Unknown),
            operation: self.operation,
        }
    }
}

/// The rank that arrived last.
struct Last {
    span: Span,
    lag_ns: u64,
    uncertainty_ns: u64,
}

/// The last of several arrivals; of ranks that arrived at the same moment, the one with the lowest number.
fn last_of(mut spans: Vec<Span>) -> Option<Last> {
    // The n-th arrival is between the n-th of the lower and the n-th of the upper bounds, whichever rank's it is.
    let (least_last_ns, least_median_ns) = last_and_median(spans.iter().map(|span| span.low_ns).collect())?;
    let (most_last_ns, most_median_ns) = last_and_median(spans.iter().map(|span| span.high_ns).collect())?;
    let least_ns = least_last_ns.saturating_sub(most_median_ns);
    let most_ns = most_last_ns.saturating_sub(least_median_ns);
    let last = (0..spans.len()).max_by_key(|at| (spans[*at].middle_ns(), Reverse(spans[*at].rank)))?;
    let span = spans.swap_remove(last);
    let others = median(spans.iter().map(Span::middle_ns).collect())?;
    let lag_ns = span.middle_ns().saturating_sub(others);
    Some(Last {
        span,
        lag_ns,
        uncertainty_ns: lag_ns.abs_diff(least_ns).max(lag_ns.abs_diff(most_ns)),
    })
}

/// The last of several times, and the median of the others.
fn last_and_median(mut times: Vec<u64>) -> Option<(u64, u64)> {
    times.sort_unstable();
    let last = times.pop()?;
    Some((last, median(times)?))
}

/// The median: of an even number of values the lower middle plus half the distance to the upper one. `None` of none.
fn median(mut values: Vec<u64>) -> Option<u64> {
    values.sort_unstable();
    let upper = *values.get(values.len() / 2)?;
    if values.len() % 2 == 1 {
        return Some(upper);
    }
    Some(values[values.len() / 2 - 1].midpoint(upper))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use ringsight_records::Flags;

    use super::*;
    use crate::{op::OpInfo, progress::Dependencies};

    const MS: u64 = 1_000_000;

    /// A collective of rank 0 that began and ended then.
    fn operation(seq: u64, arrived_ns: u64, end_ns: u64) -> ArrivedOperation {
        ArrivedOperation {
            info: OpInfo {
                op: 1 + seq as u32,
                comm: 7,
                seq,
                bytes: 8,
                rank: 0,
                peer: -1,
                flags: Flags::NONE,
            },
            replay: 0,
            arrived_ns,
            end_ns,
            depends_on: Dependencies::All,
        }
    }

    /// An inquiry of rank 0 about an operation that took from 100 ms to 131 ms, sent at 200 ms to these ranks.
    fn inquiry(ranks: &[u32]) -> (ArrivalInquiries, u32) {
        let mut inquiries = ArrivalInquiries::default();
        let operation = operation(5, 100 * MS, 131 * MS);
        let ranks_of = |_: &_| (ranks.to_vec(), ranks.len());
        let (query, questions) = inquiries.begin(&[operation], ranks_of, 200 * MS).unwrap();
        assert_eq!(questions.len(), ranks.len());
        (inquiries, query)
    }

    fn found(heard: &Heard) -> Arrival {
        let Heard {
            findings,
            again: None,
        } = heard
        else {
            panic!("{heard:?}");
        };
        only(findings)
    }

    fn only(findings: &[Finding]) -> Arrival {
        let [finding] = findings else {
            panic!("{findings:?}");
        };
        finding.arrival.unwrap()
    }

    #[test]
    fn the_last_rank_is_named_with_its_lag_against_the_others_median() {
        let (mut inquiries, query) = inquiry(&[1, 2, 3]);
        // Round trips of 0.8 ms: the answers were written at 200.4 ms, as far as is known.
        let age = |arrived_ns| [Some(200 * MS + 2 * MS / 5 - arrived_ns)];
        let came = 200 * MS + 4 * MS / 5;
        for (rank, arrived_ns) in [(1, 101 * MS), (2, 130 * MS)] {
            let heard = inquiries.hear(query, rank, Some(&age(arrived_ns)), came);
            assert!(heard.findings.is_empty(), "rank 3 has not answered");
        }
        let heard = inquiries.hear(query, 3, Some(&age(100 * MS)), came);
        let expected = Arrival {
            rank: 2,
            lag_ns: 30 * MS,
            wait_ns: 30 * MS,
            uncertainty_ns: 4 * MS / 5,
            unknown_ranks: 0,
        };
        assert_eq!(found(&heard), expected);
        assert!(inquiries.open.is_empty());
    }

    #[test]
    fn a_rank_whose_answer_came_late_is_asked_again() {
        let (mut inquiries, query) = inquiry(&[1, 2]);
        inquiries.hear(query, 1, Some(&[Some(100 * MS)]), 200 * MS);
        // Rank 2 arrived between 100 and 131 ms.
        let heard = inquiries.hear(query, 2, Some(&[Some(100 * MS)]), 260 * MS);
        let (query, questions) = heard.again.expect("that is too uncertain");
        assert_eq!(
            questions.iter().map(|question| question.rank).collect::<Vec<_>>(),
            [2]
        );
        // Between 129 and 130 ms: the answer was written just before it came.
        let heard = inquiries.hear(query, 2, Some(&[Some(131 * MS)]), 261 * MS);
        let arrival = found(&heard);
        assert_eq!((arrival.rank, arrival.lag_ns / MS), (2, 29));
        assert_eq!(arrival.uncertainty_ns, MS / 2);
    }

    #[test]
    fn no_rank_is_asked_for_ever() {
        let (mut inquiries, mut query) = inquiry(&[1]);
        for round in 1.. {
            let heard = inquiries.hear(query, 1, Some(&[Some(100 * MS)]), 300 * MS);
            let Some((again, _)) = heard.again else {
                assert_eq!(round, MOST_ROUNDS);
                // It may have come at any time until the end.
                assert!(found(&heard).uncertainty_ns >= 15 * MS);
                break;
            };
            query = again;
            inquiries.sending(query, 1, 200 * MS);
        }
    }

    #[test]
    fn a_rank_that_does_not_know_or_does_not_answer_is_counted() {
        let (mut inquiries, query) = inquiry(&[1, 2, 3]);
        inquiries.hear(query, 1, Some(&[Some(100 * MS)]), 201 * MS);
        inquiries.hear(query, 2, Some(&[None]), 201 * MS);
        assert!(inquiries.expire(1199 * MS).is_empty());
        assert_eq!(only(&inquiries.expire(1200 * MS)).unknown_ranks, 2);
        let (mut inquiries, query) = inquiry(&[1]);
        let heard = inquiries.hear(query, 1, None, 200 * MS);
        assert_eq!(heard.findings[0].arrival, Err(ArrivalGap::Unknown), "it has left");
    }

    #[test]
    fn a_rank_that_does_not_know_yet_is_asked_again_with_the_next_inquiry() {
        let (mut inquiries, query) = inquiry(&[1, 2]);
        inquiries.hear(query, 1, Some(&[Some(100 * MS)]), 200 * MS);
        let heard = inquiries.hear(query, 2, Some(&[None]), 200 * MS);
        assert!(heard.findings.is_empty() && heard.again.is_none());
        assert_eq!(inquiries.room(), MOST_ASKED - 1);
        let nobody = |_: &_| (Vec::new(), 0);
        let (query, questions) = inquiries.begin(&[], nobody, 300 * MS).unwrap();
        let asked: Vec<u32> = questions.iter().map(|question| question.rank).collect();
        assert_eq!(asked, [2]);
        let arrival = found(&inquiries.hear(query, 2, Some(&[Some(170 * MS)]), 300 * MS));
        assert_eq!((arrival.rank, arrival.lag_ns), (2, 30 * MS));
        assert_eq!(arrival.unknown_ranks, 0);
        assert!(inquiries.begin(&[], nobody, 400 * MS).is_none(), "it is known");
    }

    #[test]
    fn what_was_not_asked_and_what_cannot_be_is_not_believed() {
        let (mut inquiries, query) = inquiry(&[1, 2]);
        let mut hear = |query, rank, ages: &[Option<u64>]| inquiries.hear(query, rank, Some(ages), 200 * MS);
        let rubbish = [
            (query, 3, &[Some(1)][..]),
            (query, 0, &[Some(1)]),
            (query, 1, &[]),
            (query, 1, &[Some(1), Some(1)]),
            (query + 1, 1, &[Some(1)]),
            // It cannot have come after the operation was over.
            (query, 1, &[Some(10 * MS)]),
            // It has answered.
            (query, 1, &[Some(100 * MS)]),
        ];
        for (query, rank, ages) in rubbish {
            let heard = hear(query, rank, ages);
            assert!(heard.findings.is_empty() && heard.again.is_none());
        }
        let arrival = found(&hear(query, 2, &[Some(u64::MAX)]));
        assert_eq!((arrival.rank, arrival.wait_ns, arrival.unknown_ranks), (0, 0, 1));
    }

    #[test]
    fn each_rank_is_asked_once_about_what_depends_on_it() {
        let mut inquiries = ArrivalInquiries::default();
        let operations = [operation(1, 0, MS), operation(2, 0, MS), operation(3, 0, MS)];
        let ranks_of = |operation: &ArrivedOperation| match operation.info.seq {
            1 => (vec![1, 2], 2),
            2 => (vec![2], 1),
            _ => (vec![1], 1),
        };
        let (query, questions) = inquiries.begin(&operations, ranks_of, 10 * MS).unwrap();
        let sequences = |question: &Question| -> Vec<u64> {
            question.runs.iter().map(|run| run.identity.seq()).collect()
        };
        let asked: Vec<_> = questions
            .iter()
            .map(|question| (question.rank, sequences(question)))
            .collect();
        assert_eq!(asked, [(1, vec![1, 3]), (2, vec![1, 2])]);
        let ages = [Some(10 * MS), Some(10 * MS)];
        assert!(inquiries.hear(query, 1, Some(&ages), 10 * MS).findings.is_empty());
        assert_eq!(inquiries.hear(query, 2, Some(&ages), 10 * MS).findings.len(), 3);
    }

    proptest! {
        /// Whatever the clocks and the ways of the messages, the true lag is within the stated uncertainty of the recorded one.
        #[test]
        fn the_uncertainty_bounds_the_error(
            arrivals in prop::collection::vec(0..50 * MS, 2..9),
            offsets in prop::collection::vec(any::<u32>(), 9),
            ways in prop::collection::vec((0..3 * MS, 0..3 * MS), 9 * MOST_ROUNDS as usize),
        ) {
            let begin = 1000 * MS;
            let last = *arrivals.iter().max().unwrap();
            let own = operation(1, begin + arrivals[0], begin + last + MS);
            let mut inquiries = ArrivalInquiries::default();
            let others: Vec<u32> = (1..arrivals.len() as u32).collect();
            let mut now = begin + 100 * MS;
            let mut ways = ways.into_iter();
            let mut to_ask = inquiries.begin(&[own], |_| (others.clone(), others.len()), now);
            let mut findings = Vec::new();
            while let Some((query, questions)) = to_ask.take() {
                for question in questions {
                    inquiries.sending(query, question.rank, now);
                    let (there, back) = ways.next().unwrap();
                    // By that rank's clock, which is off by any time.
                    let offset = u64::from(offsets[question.rank as usize]);
                    let answered = now + there + offset;
                    let age = answered - (begin + arrivals[question.rank as usize] + offset);
                    now += there + back;
                    let heard = inquiries.hear(query, question.rank, Some(&[Some(age)]), now);
                    findings.extend(heard.findings);
                    to_ask = heard.again;
                }
            }
            let arrival = only(&findings);
            let (last, others) = last_and_median(arrivals.clone()).unwrap();
            let off = arrival.lag_ns.abs_diff(last - others);
            prop_assert!(off <= arrival.uncertainty_ns, "{arrival:?} and not {}", last - others);
        }
    }
}
