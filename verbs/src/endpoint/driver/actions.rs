//! The actions of the state machine, and the results of the jobs that carry them out.

use std::time::Instant;

use ringsight_failover::{Action, Event, Link, Message, PathSet, Reason, Report};

use super::{Drain, Driver, Failover, TimedReport};
use crate::{
    endpoint::path::{Fenced, Path, Rebuilt},
    error::{Error, Failure, PortError},
};

/// Messages for outside RDMA that are kept at most.
const MAX_OUTGOING: usize = 64;
/// Reports that are kept at most.
const MAX_REPORTS: usize = 1024;

/// The result of a job of a worker.
pub(super) enum JobResult {
    Fenced(Link, Fenced),
    Rebuilt(Link, Result<Rebuilt, PortError>),
    Connected(Link, Result<(), Error>),
}

impl Driver {
    /// Carries out an action that is the same at both ends.
    pub(in crate::endpoint) fn act(&mut self, action: Action) {
        match action {
            Action::Fence { link } => {
                let Some(path) = self.path(link) else {
                    // The queue pair was not made yet.
                    return self.events.push_back(Event::Fenced { link, sure: true });
                };
                let fence = path.fence();
                self.drains[usize::from(link.path)] = Some(Drain { link, fenced: None });
                self.submit(link, move || JobResult::Fenced(link, fence()));
            }
            Action::Rebuild { link } => {
                let index = usize::from(link.path);
                let Failover { net, ports, .. } = &self.failover;
                let (net, port) = (net.clone(), ports.get(index).copied());
                let port = move || {
                    let net = net.ok_or(PortError::NoNet)?;
                    net.open(port.ok_or(PortError::NoPort)?)
                };
                let rebuild = self.paths[index].rebuild(port, link.generation);
                self.submit(link, move || JobResult::Rebuilt(link, rebuild()));
            }
            Action::Connect { link, peer } => {
                let Some(connect) = self.path(link).and_then(|path| path.connecting(&peer)) else {
                    return self.events.push_back(Event::Failed { link });
                };
                // Resolving the peer's address may take the kernel a second.
                self.submit(link, move || JobResult::Connected(link, connect()));
            }
            Action::Probe { link } => {
                let posted = self.path(link).map(Path::post_probe);
                if let Some(Err(failure)) = posted {
                    self.fail(link, failure);
                }
            }
            Action::Send { message, over } => self.send_message(message, over),
            Action::Report(report) => self.record(report),
            Action::Credit { .. } | Action::Replay { .. } | Action::Commit { .. } | Action::GiveUp(_) => {}
        }
    }

    /// Submits a job to a path's worker, which runs it after all earlier ones.
    fn submit(&mut self, link: Link, job: impl FnOnce() -> JobResult + Send + 'static) {
        let (sender, waker) = (self.job_sender.clone(), self.waker.clone());
        self.workers[usize::from(link.path)].submit(move || {
            if sender.send(job()).is_err() {
                // The connection is gone, and nothing waits for the result.
            }
            if let Some(waker) = waker {
                waker.wake();
            }
        });
    }

    /// Takes the result of a job.
    pub(super) fn finish_job(&mut self, result: JobResult) {
        let (link, result) = match result {
            JobResult::Fenced(link, fenced) => {
                let index = usize::from(link.path);
                self.paths[index].finish_fence(fenced);
                if let Some(drain) = &mut self.drains[index] {
                    drain.fenced = Some((Instant::now(), fenced.sure));
                }
                return;
            }
            JobResult::Rebuilt(link, rebuilt) => {
                let index = usize::from(link.path);
                // Reports until now concern the previous queues: a queue pair's failure ends with them.
                self.check_queues(index);
                let path = &mut self.paths[index];
                let rebuilt = rebuilt.and_then(|rebuilt| Ok(path.finish_rebuild(rebuilt)?));
                let address = path.address();
                let rebuilt = rebuilt.map(|before| {
                    if let Some(before) = before {
                        path.failures = path.queue_failures(&self.failover.port_health);
                        self.workers[index].submit(move || drop(before));
                    }
                    Event::Rebuilt { link, address }
                });
                (link, rebuilt.map_err(|error| error.to_string()))
            }
            JobResult::Connected(link, connected) => {
                let connected = connected.map(|()| Event::Connected { link });
                (link, connected.map_err(|error| error.to_string()))
            }
        };
        self.events.push_back(result.unwrap_or_else(|text| {
            self.last_failure = Some(self.paths[usize::from(link.path)].failure(None, &text));
            Event::Failed { link }
        }));
    }

    fn send_message(&mut self, message: Message, over: PathSet) {
        let bytes = message.encode();
        for index in over.iter() {
            let Some(path) = self.paths.get_mut(usize::from(index)) else {
                continue;
            };
            if !path.is_fenced() {
                // If the post fails, the path has failed, and its other requests show that.
                drop(path.post_message(&bytes));
            }
        }
        self.outgoing.push_back(bytes);
        // Without a connection outside RDMA nothing takes these messages. The newest supersede the others.
        if self.outgoing.len() > MAX_OUTGOING {
            self.outgoing.pop_front();
        }
    }

    /// Keeps a report for the owner, and passes it to port health.
    fn record(&mut self, report: Report) {
        let port_health = &self.failover.port_health;
        let id = |path: u8| self.ids[usize::from(path)];
        match report {
            Report::Broken { link, cause, .. } => {
                port_health.report_failure(id(link.path), self.connection, cause);
            }
            Report::Switched { from, .. } => port_health.report_switch(id(from)),
            Report::Restored { link } => port_health.report_restored(id(link.path)),
            Report::Recovered { .. } => {}
        }
        let at = self.now();
        self.reports.push_back(TimedReport { at, report });
        if self.reports.len() > MAX_REPORTS {
            self.reports.pop_front();
        }
    }

    /// Fences all paths, and describes why the end gives up.
    pub(in crate::endpoint) fn give_up(&mut self, reason: Reason) -> Failure {
        for (path, worker) in self.paths.iter_mut().zip(&mut self.workers) {
            if !path.is_fenced() {
                let fence = path.fence();
                worker.submit(move || {
                    fence();
                });
            }
        }
        let last = self.last_failure.take();
        if let (Reason::FailoverOff(_) | Reason::Work(_), Some(last)) = (reason, &last) {
            return last.clone();
        }
        let why = match reason {
            Reason::NoPath => "no path to the peer works, or it does not answer".to_owned(),
            Reason::Peer => "the peer found no path that works".to_owned(),
            Reason::NotFenced(link) => format!("{link} cannot be stopped"),
            Reason::Work(status) => format!("a request ended with {status:?}"),
            Reason::Protocol(what) => format!("the peer broke the protocol: {what}"),
            Reason::FailoverOff(cause) => format!("{cause} (RINGSIGHT_NET_FAILOVER is off)"),
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
