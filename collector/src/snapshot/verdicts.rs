//! What watchdogs have said, the last verdicts of each process.

use std::collections::BTreeMap;

use ringsight_records::{Cause, Description, Flags, Function, verdicts::Nic};

use super::{Process, pair};

/// A watchdog's verdict as a snapshot shows it. Times are nanoseconds until the moment of the snapshot.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VerdictView {
    /// Process that gave it.
    pub pid: u32,
    /// Communicator, which may be gone.
    pub communicator: u64,
    /// Rank that gave it.
    pub rank: u32,
    /// Since it was given.
    pub ago_ns: u64,
    /// Why; `None`: a cause that this version does not know.
    pub cause: Option<Cause>,
    /// It said that the operation will not end by itself.
    pub hang: bool,
    /// The rank that is waited for.
    pub culprit: u32,
    /// How many others the same is true of.
    pub others: u32,
    /// Function of the operation, if its description is still there.
    pub function: Option<Function>,
    /// Sequence.
    pub seq: u64,
    /// Sender and receiver of a message.
    pub pair: Option<(u32, u32)>,
    /// Replay, 0 if eager.
    pub replay: u32,
    /// How long the operation had been in progress then.
    pub waited_ns: u64,
    /// Whether it has ended since, if that can be seen.
    pub ended: Option<bool>,
    /// What the culprit was in instead, if it said so.
    pub held_up: Option<HeldUp>,
    /// Where the culprit's network carried nothing, if it was that.
    pub nic: Option<Nic>,
}

/// An operation that keeps a culprit.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeldUp {
    /// Communicator.
    pub communicator: u64,
    /// Sequence.
    pub seq: u64,
    /// Sender and receiver of a message.
    pub pair: Option<(u32, u32)>,
    /// Replay, 0 if eager.
    pub replay: u32,
    /// How long it had been in progress when the verdict was given.
    pub for_ns: u64,
}

/// The verdicts of processes that were read at `now` (`CLOCK_MONOTONIC` nanoseconds), the oldest first.
#[must_use]
pub fn verdicts(processes: &[Process], now: u64) -> Vec<VerdictView> {
    let mut verdicts = Vec::new();
    for process in processes {
        let operations = process.operations.iter().rev();
        let described: BTreeMap<(u32, u64), &Description> =
            operations.map(|known| ((known.op, known.comm), known)).collect();
        for given in &process.verdicts {
            let described = described.get(&(given.op, given.comm));
            verdicts.push(VerdictView {
                pid: process.pid,
                communicator: given.comm,
                rank: given.rank,
                ago_ns: now.saturating_sub(given.time_ns),
                cause: given.cause(),
                hang: given.is_hang != 0,
                culprit: given.culprit,
                others: given.others,
                function: described.and_then(|known| Function::from_code(known.function)),
                seq: given.seq,
                pair: pair(Flags(given.flags), given.rank, given.peer),
                replay: given.replay,
                waited_ns: given.time_ns.saturating_sub(given.begun_ns),
                // An entry of a captured operation has the times of its latest replay.
                ended: described.map(|known| known.device_end_ns > given.begun_ns),
                held_up: (given.is_held_up != 0).then(|| HeldUp {
                    communicator: given.held_comm,
                    seq: given.held_seq,
                    pair: given.held_pair(),
                    replay: given.held_replay,
                    for_ns: given.held_for_ns,
                }),
                nic: given.nic(),
            });
        }
    }
    verdicts.sort_by_key(|verdict| (std::cmp::Reverse(verdict.ago_ns), verdict.pid));
    verdicts
}

#[cfg(test)]
mod tests {
    use ringsight_records::{pages::put_text, verdicts::GivenVerdict};

    use super::*;

    fn given(op: u32, time_ns: u64) -> GivenVerdict {
        GivenVerdict {
            number: 1,
            time_ns,
            comm: 7,
            seq: u64::from(op),
            begun_ns: 100,
            held_comm: 8,
            held_seq: 3,
            held_for_ns: 50,
            op,
            replay: 0,
            rank: 1,
            culprit: 2,
            others: 0,
            peer: -1,
            held_replay: 0,
            held_from: GivenVerdict::NOBODY,
            held_to: GivenVerdict::NOBODY,
            cause: Cause::NotLaunched.code(),
            is_hang: 0,
            flags: 0,
            is_held_up: 1,
            queue_pair: 0,
            port: 0,
            reserved: [0; 3],
            device: Default::default(),
        }
    }

    #[test]
    fn verdicts_stand_in_the_order_of_their_times_with_what_became_of_it() {
        let described = |op, device_end_ns| Description {
            comm: 7,
            op,
            device_end_ns,
            ..Description::default()
        };
        let first = Process {
            pid: 1,
            operations: vec![described(5, 900), described(6, 0)],
            verdicts: vec![given(5, 400), given(6, 700)],
            ..Process::default()
        };
        let unknown = GivenVerdict {
            cause: 200,
            is_held_up: 0,
            ..given(4, 600)
        };
        let mut stuck = GivenVerdict {
            cause: Cause::StuckNic.code(),
            is_held_up: 0,
            queue_pair: 18,
            port: 2,
            ..given(3, 800)
        };
        put_text(&mut stuck.device, "mlx5_2");
        let second = Process {
            pid: 2,
            verdicts: vec![unknown, stuck],
            ..Process::default()
        };
        let told = verdicts(&[first, second], 1000);
        let times: Vec<_> = told
            .iter()
            .map(|verdict| (verdict.ago_ns, verdict.pid, verdict.ended))
            .collect();
        assert_eq!(
            times,
            [
                (600, 1, Some(true)),
                (400, 2, None),
                (300, 1, Some(false)),
                (200, 2, None)
            ]
        );
        assert_eq!(
            (told[0].cause, told[0].waited_ns),
            (Some(Cause::NotLaunched), 300)
        );
        let held_up = told[0].held_up.unwrap();
        assert_eq!((held_up.communicator, held_up.seq, held_up.pair), (8, 3, None));
        assert_eq!((told[1].cause, told[1].held_up, told[1].nic), (None, None, None));
        let nic = told[3].nic.unwrap();
        assert_eq!((nic.device(), nic.port, nic.queue_pair), ("mlx5_2", 2, 18));
    }
}
