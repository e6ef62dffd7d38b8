//! Devices of different kinds at the two ends.

use super::{
    nodes::{check, two_nodes},
    shared::LITTLE,
};

#[test]
#[ignore = "guest: needs soft-RoCE and mlx5 devices"]
fn different_link_layers_go_over_sockets() {
    let devices = ["hca0", "mlx5_0"];
    let ended = two_nodes("data::transfers", |rank, command| {
        command
            .env(LITTLE, "1")
            .env("NCCL_IB_HCA", format!("={}", devices[rank]));
    });
    check(
        "different link layers",
        &ended,
        &["[send] via NET/Socket", "use a socket on channel 0, not RDMA: "],
        &[],
    );
    let layers = ["hca0 is RoCE", "mlx5_0 is InfiniBand"];
    for (rank, (_, text)) in ended.iter().enumerate() {
        let said = format!("{}, the peer's {}", layers[rank], layers[1 - rank]);
        assert!(text.contains(&said), "no {said:?} in\n{text}");
    }
}
