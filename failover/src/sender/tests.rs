use super::*;
use crate::ADDRESS_BYTES;

const AT: Duration = Duration::ZERO;
const ADDRESS: Address = Address([7; ADDRESS_BYTES]);

/// A sender, and what it wants done.
struct End {
    sender: Sender,
    out: Vec<Action>,
}

impl End {
    /// Over two paths.
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

    /// A path fails, and is made anew.
    fn rebuild(&mut self, path: u8) -> Link {
        let [before, link] = [1, 2].map(|generation| Link { path, generation });
        self.handle(Event::Failed { link: before })
            .handle(Event::Fenced {
                link: before,
                sure: true,
            })
            .handle(Event::Heard(Message::Offer {
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
        self.handle(Event::Heard(Message::Switch {
            epoch,
            link,
            committed: 0,
            granted: 0,
        }))
    }

    /// What it has said is good again.
    fn restored(&self) -> Vec<Link> {
        let restored = |action: &Action| match action {
            Action::Report(Report::Restored { link }) => Some(*link),
            _ => None,
        };
        self.out.iter().filter_map(restored).collect()
    }
}

#[test]
fn a_path_that_is_not_in_use_is_good_again_when_a_probe_got_over() {
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
    // Once.
    end.handle(probed);
    assert_eq!(end.restored(), [link]);
}

#[test]
fn a_path_is_good_again_when_the_receiver_goes_back_to_it() {
    let mut end = End::new();
    let backup = Link {
        path: 1,
        generation: 1,
    };
    end.handle(Event::PortDown { path: 0 }).switch(1, backup);
    // A path that was never made anew was never bad.
    assert_eq!(end.restored(), []);
    end.handle(Event::PortUp { path: 0 });
    let first = end.rebuild(0);
    end.switch(2, first);
    assert_eq!((end.restored(), end.sender.active()), (vec![first], first));
    // What was posted to prove it comes after.
    end.handle(Event::Completed {
        link: first,
        work: Work::Probe,
        status: Status::Success,
    });
    assert_eq!(end.restored(), [first]);
}

#[test]
fn a_path_whose_probe_fails_is_not_good_again() {
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
