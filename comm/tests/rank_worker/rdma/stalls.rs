//! Operations while the network carries nothing.

use std::{
    thread,
    time::{Duration, Instant},
};

use ringsight_comm::observe;
use ringsight_records::{Cause, Function, verdicts::GivenVerdict};

use super::{
    control::Control,
    data::replays,
    links::{devices, lose_packets, packets, set_link},
    shared::PHASES,
};
use crate::common::{Call, waiting::eventually};

/// The network is away for so long: a verdict takes the threshold, and what a rank may take to answer.
const AWAY: Duration = Duration::from_secs(5);

/// Elements of an operation of one step.
const LITTLE: usize = 5003;

/// Operations in each phase of a network that goes away.
pub(crate) fn network_away() {
    let control = Control::of_process();
    let comm = control.make();
    let all_reduce = |count| Call::new(Function::AllReduce, count).check(&comm, true);
    all_reduce(LITTLE);
    // What is lost first are credits: the next operation has not begun.
    let lose = |lost: bool| lose_packets(0, lost);
    phase(PHASES[0], &control, lose, None, || all_reduce(LITTLE));
    // And here it is steps.
    let device = &devices(comm.rank)[0];
    let sent = packets(device, "sent_pkts");
    let in_the_middle = || eventually("steps are posted", || packets(device, "sent_pkts") > sent + 50);
    phase(PHASES[1], &control, lose, Some(&in_the_middle), || {
        all_reduce(1 << 20);
    });
    let down = |down: bool| set_link(0, !down);
    phase(PHASES[2], &control, down, None, || replays(&comm));
    all_reduce(LITTLE);
    let pages = observe::pages().unwrap();
    let kept = pages.verdicts();
    let kept: Vec<_> = kept
        .filter(|given| given.cause() == Some(Cause::StuckNic))
        .collect();
    let names_its_end = |given: &GivenVerdict| {
        let known = devices(given.culprit as usize);
        given
            .nic()
            .is_some_and(|nic| nic.port == 1 && known.iter().any(|device| device == nic.device()))
    };
    assert!(!kept.is_empty() && kept.iter().all(names_its_end), "{kept:?}");
    comm.leave();
    control.rank.leave();
}

/// Runs `work`, which cannot end before the network is back that rank 0 takes away by `set_away`: before it, or `when` so far.
fn phase(
    name: &str,
    control: &Control,
    set_away: impl Fn(bool) + Sync,
    when: Option<&(dyn Fn() + Sync)>,
    work: impl FnOnce(),
) {
    let is_first = control.rank.rank == 0;
    control.meet();
    if is_first && when.is_none() {
        set_away(true);
    }
    control.meet();
    println!("{name}");
    let start = Instant::now();
    thread::scope(|scope| {
        if is_first {
            scope.spawn(|| {
                if let Some(when) = when {
                    when();
                    set_away(true);
                }
                thread::sleep(AWAY);
                set_away(false);
            });
        }
        work();
    });
    let took = start.elapsed();
    assert!(took >= AWAY, "{name}: the network was there, it took {took:?}");
}
