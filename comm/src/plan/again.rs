//! The same call once more.
//!
//! A collective that a kernel does among peers is a plan by itself, and all that the kernel has to do follows from the call and from what stays
//! as it is for the communicator's life. So the plan of one that is over is that of the next one that calls the same, but for the
//! numbers: nothing is chosen, checked or written again. Buffers are no more to it than the addresses, which are the caller's each time.

use ringsight_kernels::Work;

use super::Plan;
use crate::{
    communicator::Communicator,
    error::Result,
    launch::reclaim::Spare,
    log, observe,
    op::{Request, Task},
};

/// Whether the plan of an operation among peers may be that of a later one. Not where it goes straight between buffers, which others have to
/// reach each time; nor where it is in a window, which may be gone, and is part of the call.
pub(super) fn can_be(task: &Task) -> bool {
    let path = task.method.path;
    !path.is_zero_copy() && !path.is_copy_engine() && !task.request.function.is_p2p()
}

/// Whether the work of such an operation is what a call asks for.
pub(crate) fn is_of(work: &Work, request: &Request) -> bool {
    work.function == request.function
        && work.send == request.send
        && work.recv == request.recv
        && work.count == request.count
        && work.data_type == request.data_type
        && work.reduce_op == request.reduce_op
        && work.scalar == request.scalar
        && work.root == request.peer.unwrap_or(0)
        && request.window.is_none()
}

/// Puts the plan of an eager operation, which nothing else is called with, into its place, if the memory for it is the plan of such a call.
pub(super) fn plan(
    comm: &Communicator,
    spare: &mut Option<Spare>,
    task: &Task,
    group: u32,
    place: &mut Option<Plan>,
) -> Result<()> {
    if spare.as_ref().and_then(|spare| spare.serves(&task.request)) != Some(task.method) {
        return Ok(());
    }
    let Some(spare) = spare.take() else { return Ok(()) };
    let number = observe::next_plan();
    let Some(ready) = spare.again(number, task.info)? else {
        return Ok(());
    };
    tracing::trace!(target: log::TUNING, "plan {number} is that of an earlier such call");
    let plan = place.insert(Plan::new(number));
    plan.ready = Some(ready);
    plan.announce(comm.ranks, group, task, 1, 0, task.method);
    Ok(())
}

#[cfg(test)]
mod tests {
    use ringsight_kernels::{Connections, Scalar, ZeroCopy};
    use ringsight_records::{Algorithm, DataType, Function, ReduceOp};

    use super::*;
    use crate::op::{DataPath, Stream, WindowBuffer};

    fn work(request: &Request) -> Work {
        Work {
            op: 7,
            tag: request.call().tag(),
            function: request.function,
            algorithm: Algorithm::OneShot,
            data_type: request.data_type,
            reduce_op: request.reduce_op,
            scalar: request.scalar,
            send: request.send,
            recv: request.recv,
            count: request.count,
            part: 0..request.count,
            rank: 0,
            ranks: 2,
            root: request.peer.unwrap_or(0),
            connections: Connections::Local,
            zero_copy: ZeroCopy::Off,
            pushes: false,
        }
    }

    #[test]
    fn only_the_same_call_is_served_again() {
        let work = work(&Request::example());
        assert!(is_of(&work, &Request::example()));
        // What the plan does not depend on.
        let stream = Stream(2);
        assert!(is_of(
            &work,
            &Request {
                stream,
                ..Request::example()
            }
        ));
        type Change = (&'static str, fn(&mut Request));
        let changes: &[Change] = &[
            ("function", |other| other.function = Function::AllGather),
            ("send buffer", |other| other.send += 4),
            ("receive buffer", |other| other.recv += 4),
            ("count", |other| other.count += 1),
            ("type", |other| other.data_type = DataType::Int32),
            ("reduction", |other| other.reduce_op = ReduceOp::Avg),
            ("factor", |other| other.scalar = Scalar::Immediate(1)),
            ("root", |other| other.peer = Some(1)),
            ("window", |other| other.window = Some(WindowBuffer::default())),
        ];
        for (what, change) in changes {
            let mut other = Request::example();
            change(&mut other);
            assert!(!is_of(&work, &other), "another {what}");
        }
    }

    #[test]
    fn what_depends_on_more_than_the_call_is_planned_each_time() {
        let by = |function, path| {
            let mut task = Task::example();
            (task.request.function, task.method.path) = (function, path);
            can_be(&task)
        };
        assert!(by(Function::AllReduce, DataPath::Ll128));
        for path in [DataPath::ZeroCopy, DataPath::Push, DataPath::CopyEngine] {
            assert!(!by(Function::AllReduce, path), "{path:?}");
        }
        assert!(!by(Function::Send, DataPath::Ll128));
    }
}
