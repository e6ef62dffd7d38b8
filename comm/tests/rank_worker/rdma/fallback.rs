//! Connections without a port that is up.

use ringsight_records::Function;

use super::{
    connections::ends,
    control::Control,
    links::{mend, set_link},
};
use crate::common::Call;

/// Makes a communicator while all ports are down.
pub(crate) fn late() {
    let control = Control::of_process();
    let rank = control.rank.rank;
    // Has the process look for its ports; its connections are not used, nor do they fail.
    let early = control.make();
    control.meet();
    if rank == 0 {
        set_link(0, false);
        set_link(1, false);
    }
    control.meet();
    let late = control.make();
    Call::new(Function::AllReduce, 5003).check(&late, true);
    late.leave();
    if rank == 0 {
        mend();
    }
    control.meet();
    early.leave();
    control.rank.leave();
}

/// Makes one before a port is up, and one after.
pub(crate) fn early() {
    let control = Control::of_process();
    let early = control.make();
    Call::new(Function::AllReduce, 5003).check(&early, true);
    assert_eq!(ends(), []);
    control.meet();
    if control.rank.rank == 0 {
        mend();
    }
    control.meet();
    let late = control.make();
    Call::new(Function::AllReduce, 5003).check(&late, true);
    assert!(!ends().is_empty());
    late.leave();
    early.leave();
    control.rank.leave();
}
