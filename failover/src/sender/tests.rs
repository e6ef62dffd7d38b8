use super::*;
use crate::message::ADDRESS_BYTES;

const AT: Duration = Duration::ZERO;
const ADDRESS: Address = Address([7; ADDRESS_BYTES]);

/// A sender, and its actions so far.
struct End {
    sender: Sender,
    out: Vec<Action>,
}

impl End {
    /// A sender over two paths.
    fn new() -> Self {
        let ready = PathSet::EMPTY.with(0).with(1);
        let sender = Sender::new(Arc::new(Settings::default()), 2, 2, ready).unwrap();
        Self {
            sender,
            out: Vec::new(),
        }
    }

    fn handle(&mut self, event: Event) -> &mut Self {
        self.sender.handle(AT, event, &mut self.out);
        self
    }

    /// Has a path fail and be rebuilt.
    fn rebuild(&mut self, path: u8) -> Link {
        let [before, link] = [1, 2].map(|generation| Link { path, generation });
        self.handle(Event::Failed { link: before })
            .handle(Event::Fenced {
                link: before,
                sure: true,
            })
            .handle(Event::Received(Message::Offer {
                link,
                address: ADDRESS,
            }))
            .handle(Event::Rebuilt {
                link,
                address: ADDRESS,
            })
            .handle(Event::Connected { link });
        assert_eq!(self.restored(), []);
        link
    }

    fn switch(&mut self, epoch: u32, link: Link) -> &mut Self {
        self.handle(Event::Received(Message::Switch {
            epoch,
            link,
            committed: 0,
            granted: 0,
        }))
    }

    /// The queue pairs that the sender has reported as restored.
    fn restored(&self) -> Vec<Link> {
        let restored = |action: &Action| match action {
            Action::Report(Report::Restored { link }) => Some(*link),
            _ => None,
        };
        self.out.iter().filter_map(restored).collect()
    }
}

#[test]
fn an_inactive_path_is_restored_by_a_probe() {
    let mut end = End::new();
    let link = end.rebuild(1);
    assert!(end.out.contains(&Action::Probe { link }));
    let probed = Event::Completed {
        link,
        work: Work::Probe,
        status: Status::Success,
    };
    end.handle(probed);
    assert_eq!(end.restored(), [link]);
    // It is reported once.
    end.handle(probed);
    assert_eq!(end.restored(), [link]);
}

#[test]
fn a_path_is_restored_when_the_receiver_returns_to_it() {
    let mut end = End::new();
    let backup = Link {
        path: 1,
        generation: 1,
    };
    end.handle(Event::PortDown { path: 0 }).switch(1, backup);
    // A path that was never rebuilt needs no restoring.
    assert_eq!(end.restored(), []);
    end.handle(Event::PortUp { path: 0 });
    let first = end.rebuild(0);
    end.switch(2, first);
    assert_eq!((end.restored(), end.sender.active()), (vec![first], first));
    // The probe that was posted to prove it completes later.
    end.handle(Event::Completed {
        link: first,
        work: Work::Probe,
        status: Status::Success,
    });
    assert_eq!(end.restored(), [first]);
}

#[test]
fn a_path_whose_probe_fails_is_not_restored() {
    let mut end = End::new();
    let link = end.rebuild(1);
    end.handle(Event::Completed {
        link,
        work: Work::Probe,
        status: Status::RetryExceeded,
    });
    assert_eq!(end.restored(), []);
    assert_eq!(end.sender.paths().nth(1).unwrap().state, LinkState::Fencing);
}
