//! A receiver that ends its communicator as soon as it has its data, whose acknowledgements have not got through: the sender has nobody
//! to ask any more.

use super::{
    links::{mend, two_ports},
    nodes::{check, patient, two_nodes},
};

#[test]
#[ignore = "guest: needs two RDMA links"]
fn a_receiver_that_leaves_at_once_fails_no_sender_whose_acknowledgements_were_lost() {
    let ended = two_nodes("parting::receiver_leaves", |rank, command| {
        // Nothing but the receiver's end has the sender come to its own.
        patient(two_ports(rank, command))
            .env("NCCL_IB_RETRY_CNT", "7")
            .env("RINGSIGHT_NET_TIMEOUT_MS", "60000");
    });
    mend();
    check("parting", &ended, &["parted "], &["use a socket"]);
}
