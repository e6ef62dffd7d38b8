//! What an end's agreement wants done, and what has been done of it.

use std::time::Instant;

use ringsight_failover::{Action, Event, Link, Message, PathSet, Reason, Report};

use super::{Drain, Driver, Failover, Noted};
use crate::endpoint::{
    Failure,
    path::{Fenced, Path, Rebuilt},
};

/// What a worker has done.
pub(super) enum Done {
    Fenced(Link, Fenced),
    Rebuilt(Link, Result<Rebuilt, String>),
    Connected(Link, Result<(), String>),
}

impl Driver {
    /// Does what either end may want.
    pub(in crate::endpoint) fn act(&mut self, action: Action) {
        match action {
            Action::Fence { link } => {
                let Some(path) = self.path(link) else {
                    // It was not made yet.
                    return self.events.push_back(Event::Fenced { link, sure: true });
                };
                let fence = path.fence();
                self.drains[usize::from(link.path)] = Some(Drain { link, told: None });
                self.ask(link, move || Done::Fenced(link, fence()));
            }
            Action::Rebuild { link } => {
                let index = usize::from(link.path);
                let Failover { net, ports, .. } = &self.failover;
                let (net, port) = (net.clone(), ports.get(index).copied());
                let port = move || {
                    let net = net.ok_or("there are no ports to rebuild it on")?;
                    net.open(port.ok_or("the path has no port")?)
                };
                let rebuild = self.paths[index].rebuild(port, link.generation);
                self.ask(link, move || Done::Rebuilt(link, rebuild()));
            }
            Action::Connect { link, peer } => {
                let Some(connect) = self.path(link).and_then(|path| path.connecting(&peer)) else {
                    return self.events.push_back(Event::Failed { link });
                };
                // To find the peer's address may take a second, in the kernel.
                self.ask(link, move || {
                    Done::Connected(link, connect().map_err(|error| error.to_string()))
                });
            }
            Action::Probe { link } => {
                let posted = self.path(link).map(Path::post_probe);
                if let Some(Err(failure)) = posted {
                    self.fail(link, failure);
                }
            }
            Action::Tell { message, over } => self.tell(message, over),
            Action::Report(report) => self.note(report),
            Action::Credit { .. } | Action::Replay { .. } | Action::Commit { .. } | Action::GiveUp(_) => {}
        }
    }

    /// Has a path's worker do something after all that it was asked before.
    fn ask(&mut self, link: Link, job: impl FnOnce() -> Done + Send + 'static) {
        let (outbox, bell) = (self.doing.clone(), self.bell.clone());
        self.workers[usize::from(link.path)].ask(move || {
            if outbox.send(job()).is_err() {
                // Nobody waits for it any more: the connection is gone.
            }
            if let Some(bell) = bell {
                bell.ring();
            }
        });
    }

    pub(super) fn take_up(&mut self, done: Done) {
        let (link, result) = match done {
            Done::Fenced(link, fenced) => {
                let index = usize::from(link.path);
                self.paths[index].fenced(fenced);
                if let Some(drain) = &mut self.drains[index] {
                    drain.told = Some((Instant::now(), fenced.sure));
                }
                return;
            }
            Done::Rebuilt(link, rebuilt) => {
                let index = usize::from(link.path);
                // What was told until now is of the queues before: a queue pair's failure is over with them.
                self.look_at_queues(index);
                let path = &mut self.paths[index];
                let rebuilt =
                    rebuilt.and_then(|rebuilt| path.rebuilt(rebuilt).map_err(|error| error.to_string()));
                let address = path.address();
                let rebuilt = rebuilt.map(|before| {
                    if let Some(before) = before {
                        path.failures = path.told_failures(&self.failover.hub);
                        self.workers[index].ask(move || drop(before));
                    }
                    Event::Rebuilt { link, address }
                });
                (link, rebuilt)
            }
            Done::Connected(link, connected) => (link, connected.map(|()| Event::Connected { link })),
        };
        self.events.push_back(result.unwrap_or_else(|text| {
            self.last = Some(self.paths[usize::from(link.path)].failure(None, &text));
            Event::Failed { link }
        }));
    }

    fn tell(&mut self, message: Message, over: PathSet) {
        let bytes = message.encode();
        for index in over.iter() {
            let Some(path) = self.paths.get_mut(usize::from(index)) else {
                continue;
            };
            if !path.is_fenced() {
                // A path that takes no message has failed, which its other requests tell.
                drop(path.post_message(&bytes));
            }
        }
        self.outgoing.push_back(bytes);
        // Nobody takes them: there is nothing outside. The newest say it all.
        if self.outgoing.len() > 64 {
            self.outgoing.pop_front();
        }
    }

    fn note(&mut self, report: Report) {
        let hub = &self.failover.hub;
        let id = |path: u8| self.ids[usize::from(path)];
        match report {
            Report::Broken { link, cause, .. } => hub.failed(id(link.path), self.connection, cause),
            Report::Switched { from, .. } => hub.switched(id(from)),
            Report::Restored { link } => hub.restored(id(link.path)),
            Report::Recovered { .. } => {}
        }
        let at = self.now();
        self.noted.push_back(Noted { at, report });
        if self.noted.len() > 1024 {
            self.noted.pop_front();
        }
    }

    /// The end of it all, in words.
    pub(in crate::endpoint) fn given_up(&mut self, reason: Reason) -> Failure {
        for (path, worker) in self.paths.iter_mut().zip(&mut self.workers) {
            if !path.is_fenced() {
                let fence = path.fence();
                worker.ask(move || {
                    fence();
                });
            }
        }
        let last = self.last.take();
        if let (Reason::Off(_) | Reason::Work(_), Some(last)) = (reason, &last) {
            return last.clone();
        }
        let why = match reason {
            Reason::NoPath => "no path to the peer works, or it does not answer".to_owned(),
            Reason::Peer => "the peer found no path that works".to_owned(),
            Reason::NotFenced(link) => format!("{link} cannot be stopped"),
            Reason::Work(status) => format!("a request ended with {status:?}"),
            Reason::Protocol(what) => format!("the peer broke the protocol: {what}"),
            Reason::Off(cause) => format!("{cause} (RINGSIGHT_NET_FAILOVER is off)"),
        };
        let text = match &last {
            Some(last) => format!("{why}; last: {last}"),
            None => why,
        };
        Failure {
            path: last.as_ref().map_or(0, |last| last.path),
            status: last.and_then(|last| last.status),
            text,
        }
    }
}
