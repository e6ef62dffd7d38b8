//! Works that no device runs.

use ringsight_kernels::{Connections, Scalar, Work};
use ringsight_records::{Algorithm, Function, ReduceOp};

use super::{fifo, p2p, ring};

#[test]
fn what_cannot_run_is_refused_with_a_reason() {
    let good = || {
        let connections = ring(&[0, 1, 2], 64).remove(0);
        Work {
            ranks: 3,
            algorithm: Algorithm::Ring,
            ..p2p(4, Function::AllGather, 0, 10, connections)
        }
    };
    good().check().unwrap();
    let refused = |work: Work| work.check().unwrap_err().to_string();
    assert!(
        refused(Work {
            function: Function::AlltoAll,
            ..good()
        })
        .contains("no ring program")
    );
    assert!(
        refused(Work {
            function: Function::AllReduce,
            ..good()
        })
        .contains("no none reduction")
    );
    assert!(
        refused(Work {
            part: 3..11,
            ..good()
        })
        .contains("part 3..11")
    );
    assert!(refused(Work { rank: 1, ..good() }).contains("rank 1 first"));
    assert!(refused(Work { root: 3, ..good() }).contains("root 3"));
    assert!(
        refused(Work {
            connections: Connections::Send(fifo(64)),
            ..good()
        })
        .contains("needs a ring")
    );
    assert!(
        refused(Work {
            algorithm: Algorithm::Tree,
            ..good()
        })
        .contains("no tree program round a ring")
    );
    let ring_of_two = p2p(0, Function::Send, 0, 10, Connections::Send(fifo(64)));
    assert!(
        refused(Work {
            algorithm: Algorithm::Ring,
            ..ring_of_two
        })
        .contains("no ring program between two")
    );
    let one_shot = || Work {
        function: Function::AllReduce,
        reduce_op: ReduceOp::Sum,
        algorithm: Algorithm::OneShot,
        ..good()
    };
    one_shot().check().unwrap();
    assert!(
        refused(Work {
            function: Function::ReduceScatter,
            ..one_shot()
        })
        .contains("no one_shot program")
    );
    assert!(
        refused(Work {
            reduce_op: ReduceOp::PreMulSum,
            scalar: Scalar::Immediate(2),
            ..one_shot()
        })
        .contains("each rank's factor")
    );
    assert!(
        refused(Work {
            count: 65,
            part: 0..65,
            ..one_shot()
        })
        .contains("65 bytes for a one_shot program that holds 64")
    );
    let mut odd = good();
    if let Connections::Ring { prev, .. } = &mut odd.connections {
        *prev = fifo(128);
    }
    assert!(refused(odd).contains("slots of a ring differ"));
}
