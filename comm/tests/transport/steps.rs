//! Operations and their steps in the records: what each waits for.

use std::{
    sync::{Barrier, Mutex},
    thread,
};

use ringsight_comm::observe;
use ringsight_kernels::fifo::SLOTS;
use ringsight_records::{Flags, Kind, Record, State, ring};

use super::ranks::{PATIENCE, Random, SLOT, consume, produce, turn, wait_for, world};

/// Takes the ring of this process while it lives.
struct Armed(u64);

impl Armed {
    fn new(mask: u64) -> Self {
        observe::prepare().unwrap();
        let lease = &observe::pages().unwrap().header().lease;
        Self(
            lease
                .acquire(
                    &ringsight_records::pages::Reader::new(std::process::id(), 1, 0),
                    observe::now_ns(),
                    mask,
                    |_| true,
                )
                .unwrap(),
        )
    }

    fn take(&self) -> Vec<Record> {
        let pages = observe::pages().unwrap();
        std::iter::from_fn(|| ring::pop(&pages.header().cursor, pages.ring())).collect()
    }
}

impl Drop for Armed {
    fn drop(&mut self) {
        self.take();
        observe::pages().unwrap().header().lease.release(self.0);
    }
}

/// The three states of an operation: none, ready, in progress.
#[test]
fn an_operation_is_ready_in_its_turn_in_progress_with_its_steps_and_gone_at_its_end() {
    let _turn = turn();
    let armed = Armed::new(Kind::ProxyOp.bit());
    let seen = Mutex::new(Vec::new());
    let states = |op: u32| -> Vec<State> {
        let mut seen = seen.lock().unwrap();
        seen.extend(armed.take());
        seen.iter()
            .filter(|record| record.op == op)
            .map(|record| record.state)
            .collect()
    };
    world(&[1, 2], |rank| {
        let (me, peer) = (rank.rank(), 1 - rank.rank());
        if me == 0 {
            rank.bootstrap.barrier().unwrap(); // the receiver has seen that its first operation waits
            let send = rank.connector.connect_send(peer, 0).unwrap();
            for op in [50, 51] {
                rank.post(rank.op(send.proxy.unwrap(), peer, true, (100 + op, 3)));
                produce(&send.fifo, op.into(), 3);
            }
            rank.proxy.stop();
            rank.bootstrap.barrier().unwrap(); // the receiver has seen that its third one waits
            return; // it is given up with the connection
        }
        let recv = rank.connector.connect_recv(peer, 0).unwrap();
        for op in 50..53 {
            rank.proxy
                .save_op(rank.op(recv.proxy.unwrap(), peer, false, (op, 3)));
        }
        rank.proxy.start();
        // The sender has not connected yet. Only the first one's turn has come.
        wait_for("the first operation to be ready", || states(50) == [State::START]);
        assert!(states(51).is_empty() && states(52).is_empty());
        rank.bootstrap.barrier().unwrap();
        consume(&recv.fifo, 50, 3);
        consume(&recv.fifo, 51, 3);
        let begun = [State::START, State::OP_IN_PROGRESS];
        wait_for("the third operation to be in progress", || states(52) == begun);
        let whole = [State::START, State::OP_IN_PROGRESS, State::STOP];
        assert_eq!((states(50), states(51)), (whole.to_vec(), whole.to_vec()));
        rank.bootstrap.barrier().unwrap();
        rank.proxy.stop();
        let text = rank.errors.recv_timeout(PATIENCE).unwrap();
        assert!(text.contains("step 0 of 3"), "{text}");
        let given_up = [State::START, State::OP_IN_PROGRESS, State::ABORTED];
        assert_eq!(states(52), given_up);
    });
}

#[test]
fn a_sender_waits_for_credit_and_every_wait_is_recorded() {
    let _turn = turn();
    const STEPS: u32 = 3 * SLOTS as u32;
    let armed = Armed::new(Kind::ProxyOp.bit() | Kind::ProxyStep.bit() | Kind::ProxyCtrl.bit());
    let waiting = Barrier::new(2);
    let early = Mutex::new(Vec::new());
    world(&[1, 2], |rank| {
        let (me, peer) = (rank.rank(), 1 - rank.rank());
        if me == 0 {
            let send = rank.connector.connect_send(peer, 0).unwrap();
            rank.post(rank.op(send.proxy.unwrap(), peer, true, (40, STEPS)));
            thread::scope(|scope| {
                scope.spawn(|| produce(&send.fifo, 1, STEPS));
                wait_for("the sender's wait for credit", || {
                    early.lock().unwrap().extend(armed.take());
                    early
                        .lock()
                        .unwrap()
                        .iter()
                        .any(|record| record.state == State::STEP_SEND_PEER_WAIT)
                });
                assert_eq!(send.fifo.released(), 0, "a slot left without credit");
                waiting.wait();
            });
        } else {
            let recv = rank.connector.connect_recv(peer, 0).unwrap();
            waiting.wait();
            rank.post(rank.op(recv.proxy.unwrap(), peer, false, (41, STEPS)));
            consume(&recv.fifo, 1, STEPS);
        }
        rank.proxy.stop();
        rank.bootstrap.barrier().unwrap();
    });
    let mut records = early.into_inner().unwrap();
    records.extend(armed.take());
    let of = |op: u32, kind: Kind| -> Vec<&Record> {
        records
            .iter()
            .filter(move |record| record.kind() == Some(kind) && record.op == op)
            .collect()
    };
    for (op, is_send) in [(40, true), (41, false)] {
        let states: Vec<_> = of(op, Kind::ProxyOp).iter().map(|record| record.state).collect();
        assert_eq!(states, [State::START, State::OP_IN_PROGRESS, State::STOP]);
        let record = of(op, Kind::ProxyOp)[2];
        assert_eq!(
            (record.comm, record.seq, record.replay, record.pid),
            (77, 5, 3, 99)
        );
        assert_eq!(
            (record.rank, record.peer),
            (u32::from(!is_send), i32::from(is_send))
        );
        assert_eq!(record.proxy_op_shape(), (STEPS, SLOT as u32));
        assert_eq!(
            record.flags(),
            Flags::SEND.when(is_send).with(Flags::P2P).with(Flags::GRAPH)
        );
        let steps = of(op, Kind::ProxyStep);
        assert!(steps.iter().all(|step| step.flags() == record.flags()));
        let mut random = Random(1);
        let mut total = 0;
        for step in 0..u64::from(STEPS) {
            let bytes = random.slot().len() as u64;
            total += bytes;
            let life: Vec<_> = steps
                .iter()
                .filter(|record| record.value == step)
                .map(|record| (record.state, record.bytes))
                .collect();
            let expected: &[_] = if is_send {
                &[
                    (State::START, 0),
                    (State::STEP_SEND_GPU_WAIT, 0),
                    (State::STEP_SEND_PEER_WAIT, 0),
                    (State::STEP_SEND_WAIT, 0),
                    (State::STOP, bytes),
                ]
            } else {
                &[
                    (State::START, 0),
                    (State::STEP_RECV_WAIT, 0),
                    (State::STEP_RECV_FLUSH_WAIT, bytes),
                    (State::STEP_RECV_GPU_WAIT, bytes),
                    (State::STOP, bytes),
                ]
            };
            assert_eq!(life, expected, "step {step} of operation {op}");
        }
        assert_eq!(record.bytes, total);
    }
    // A step leaves only after the receiver has begun it, and the receiver begins at most a FIFO ahead of its device.
    let time = |op: u32, step: u64, state: State| {
        let found = of(op, Kind::ProxyStep)
            .into_iter()
            .find(|record| record.value == step && record.state == state);
        found.unwrap().time_ns
    };
    for step in 0..u64::from(STEPS) {
        assert!(
            time(40, step, State::STEP_SEND_WAIT) >= time(41, step, State::START),
            "step {step} left uncalled"
        );
        if step >= SLOTS as u64 {
            let freed = time(41, step - SLOTS as u64, State::STOP);
            assert!(
                time(41, step, State::START) >= freed,
                "step {step} was granted a slot that was in use"
            );
        }
    }
    let control: Vec<_> = records
        .iter()
        .filter(|record| record.kind() == Some(Kind::ProxyCtrl) && record.rank == 0)
        .map(|record| record.state)
        .filter(|state| ![State::CTRL_SLEEP, State::CTRL_WAKEUP].contains(state))
        .collect();
    let life = [
        State::CTRL_APPEND,
        State::CTRL_APPEND_END,
        State::CTRL_ACTIVE,
        State::CTRL_IDLE,
    ];
    assert_eq!(control, life);
}
