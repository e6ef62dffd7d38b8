//! How communicators end while a call to a device is under way: mlx5 only, where the stand-in for the hardware holds back what it answers.

use super::{
    links::{mend, two_ports},
    nodes::{check, patient, two_nodes},
};

#[test]
#[ignore = "guest: needs mlx5 devices"]
fn communicators_end_while_a_device_does_not_answer_and_leave_nothing() {
    let ended = two_nodes("held::unanswered", |rank, command| {
        patient(two_ports(rank, command)).env("RINGSIGHT_NET_PROBE_MS", "60000");
    });
    mend();
    check("held", &ended, &["ended "], &["use a socket"]);
    for (_, text) in &ended {
        let told = text.lines().filter(|line| line.starts_with("ended "));
        told.for_each(|line| println!("{line}"));
    }
}
