//! Both ends of a connection in one process, for what depends on when each is looked at.

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use ringsight_verbs::{
    endpoint::{Control, Failover, MESSAGE_BYTES, Path, Peer, Receiver, SLOTS, Sender},
    failover::{Cause, Report, Settings},
    port::Net,
    port_health::PortHealth,
};

use super::{
    case::Queues,
    fabric::{Port, fail_completion_queue, fail_queue_pair},
    rank::{SLOTS_AT, net, slots},
};

/// How long the kernel's word, or what is on the wire, may take.
const PATIENCE: Duration = Duration::from_secs(5);
const PORT: Port = Port { rank: 0, link: 0 };

/// One path between the ranks' first ports, connected.
struct Parts {
    port_health: Arc<PortHealth>,
    nets: [Arc<Net>; 2],
    paths: [Path; 2],
    controls: [Control; 2],
}

impl Parts {
    fn new(settings: Settings) -> Self {
        let port_health = PortHealth::new(Arc::new(settings));
        let nets = [0, 1].map(|rank| net(rank, Queues::default()));
        let memories = [(); 2].map(|()| slots().0);
        let controls = [(); 2].map(|()| Control::new().unwrap());
        let mut paths = [0, 1].map(|rank| {
            let port = nets[rank].open(0).unwrap();
            let memory = (&memories[rank], rank == 1);
            Path::new(0, port, memory, &controls[rank], &port_health, || 7).unwrap()
        });
        for rank in [0, 1] {
            let peer = Peer {
                slots: memories[1].address(),
                control: controls[1 - rank].memory().address(),
                path: paths[1 - rank].offer(),
            };
            paths[rank].connect(peer).unwrap();
        }
        Self {
            port_health,
            nets,
            paths,
            controls,
        }
    }

    fn ends(self) -> (Sender, Receiver) {
        let failover = [0, 1].map(|rank| Failover::new(&self.port_health, Some(&self.nets[rank]), vec![0]));
        let ([sends, receives], [own, other]) = (self.paths, self.controls);
        let [of_sender, of_receiver] = failover;
        let sender = Sender::new(vec![sends], own, SLOTS_AT, of_sender);
        (sender, Receiver::new(vec![receives], other, of_receiver))
    }
}

#[test]
#[ignore = "guest: needs mlx5 devices"]
fn a_queue_that_fails_before_its_end_is_made_is_noticed() {
    for fail in [fail_queue_pair, fail_completion_queue] {
        let parts = Parts::new(Settings::default());
        fail(PORT, parts.paths[0].qps()[0].number());
        // It has been told by then.
        thread::sleep(PATIENCE / 5);
        let (mut sender, _receiver) = parts.ends();
        let start = Instant::now();
        let timed = loop {
            assert!(start.elapsed() < PATIENCE, "nobody noticed");
            sender.poll().unwrap();
            if let Some(timed) = sender.take_report() {
                break timed;
            }
        };
        assert!(
            matches!(
                timed.report,
                Report::Broken {
                    cause: Cause::Build,
                    ..
                }
            ),
            "{timed:?}"
        );
    }
}

/// Who was away for longer than a time-out takes what has ended before it finds the time over, whatever else waits for it.
#[test]
#[ignore = "guest: needs two RDMA ports"]
fn a_message_that_waits_does_not_go_before_what_has_ended() {
    const TIMEOUT: Duration = Duration::from_millis(300);
    let (mut sender, mut receiver) = Parts::new(Settings {
        timeout: TIMEOUT,
        timeout_alone: TIMEOUT,
        ..Settings::default()
    })
    .ends();
    let start = Instant::now();
    receiver.grant(SLOTS as u64).unwrap();
    while !sender.may_post() {
        assert!(start.elapsed() < PATIENCE, "no credit");
        receiver.poll().unwrap();
        sender.poll().unwrap();
    }
    sender.set_busy(true);
    sender.post(b"step", 0).unwrap();
    thread::sleep(2 * TIMEOUT);
    sender.receive_message(&[0xff; MESSAGE_BYTES]);
    sender.poll().unwrap();
    assert_eq!(sender.take_report(), None);
    assert_eq!(sender.acked(), 1);
}
