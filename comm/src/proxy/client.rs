//! The client of a proxy's service: of this rank's proxy, or of another rank's on the node.

use std::{
    collections::{HashMap, HashSet},
    io,
    os::fd::OwnedFd,
    sync::{Arc, Mutex, MutexGuard},
    thread,
    time::{Duration, Instant},
};

use ringsight_comm_base::{sync::lock, sys};
use ringsight_kernels::AbortWord;

use super::{
    Error, Result,
    message::{EVERY_REQUEST, Refusal, Reply, Request, parse_response},
    system,
};
use crate::bootstrap::unix;

/// Names a request until its response has been taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct RequestId(u64);

/// A response of a proxy.
#[derive(Debug)]
pub struct Response {
    /// The reply, or [`Error::Refused`] with the reason.
    pub outcome: Result<Reply>,
    /// The descriptor that came with it.
    pub fd: Option<OwnedFd>,
}

/// A connection to a proxy's service. Any number of requests may be outstanding; responses come in any order.
pub struct ProxyClient {
    socket: unix::Socket,
    /// The rank of the proxy, for messages.
    rank: u32,
    /// The proxy belongs to this process.
    own: bool,
    abort: Arc<AbortWord>,
    timeout: Duration,
    state: Mutex<ClientState>,
}

#[derive(Default)]
struct ClientState {
    last_id: u64,
    /// Requests whose responses have not arrived.
    outstanding: HashSet<u64>,
    /// Responses that have arrived and not been taken.
    arrived: HashMap<u64, Response>,
}

impl ProxyClient {
    /// Connects to the proxy of `rank` at `name` ([`super::ProxyAddress::unix`]).
    ///
    /// # Errors
    /// [`Error::PeerLost`] when nobody listens there, or a process of another user; [`Error::System`] when this process has no descriptor left.
    pub fn connect(name: &str, rank: u32, abort: Arc<AbortWord>, timeout: Duration) -> Result<Self> {
        let deadline = Instant::now() + timeout;
        let socket = loop {
            match unix::connect(name) {
                Ok(socket) => break socket,
                // The listener's queue is full; a unix socket does not report when it has room.
                Err(error) if error.kind() == io::ErrorKind::WouldBlock && Instant::now() < deadline => {
                    if abort.is_set() {
                        return Err(Error::Aborted(format!("connecting to the proxy of rank {rank}")));
                    }
                    thread::sleep(Duration::from_millis(2));
                }
                Err(error) if sys::is_starved(&error) => {
                    return Err(system(&format!("connecting to the proxy of rank {rank}"))(error));
                }
                Err(error) => {
                    return Err(Error::PeerLost(format!(
                        "the proxy of rank {rank} does not answer at @{name} ({error}): its rank has failed or ended, or is in \
                         another network namespace (set NCCL_HOSTID apart for such ranks)"
                    )));
                }
            }
        };
        // The name of a proxy that is gone is free for everybody, and the secret is for the ranks alone.
        let Some(pid) = unix::friend(&socket) else {
            return Err(Error::PeerLost(format!(
                "the proxy of rank {rank} is gone: a process of another user listens at @{name}"
            )));
        };
        Ok(Self {
            socket,
            rank,
            own: pid.cast_unsigned() == std::process::id(),
            abort,
            timeout,
            state: Mutex::default(),
        })
    }

    fn state(&self) -> MutexGuard<'_, ClientState> {
        lock(&self.state)
    }

    /// Sends a request. [`ProxyClient::poll`] returns the response.
    ///
    /// # Errors
    /// [`Error::PeerLost`], [`Error::Aborted`], [`Error::TimedOut`].
    pub fn call_async(&self, request: &Request) -> Result<RequestId> {
        let deadline = Instant::now() + self.timeout;
        let mut state = self.state();
        state.last_id += 1;
        let id = state.last_id;
        state.outstanding.insert(id);
        drop(state);
        let bytes = request.encode(id);
        loop {
            match unix::send(&self.socket, &bytes, None) {
                Ok(()) => return Ok(RequestId(id)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait(libc::POLLOUT, deadline)?;
                }
                Err(error) => {
                    // It may have said why it closed the connection.
                    let said = self.poll(RequestId(EVERY_REQUEST));
                    return Err(match said {
                        Err(refused @ (Error::Refused(_) | Error::System { .. })) => refused,
                        _ => self.lost(&error.to_string()),
                    });
                }
            }
        }
    }

    /// The response to a request, if it has arrived. Each response is returned once.
    ///
    /// # Errors
    /// [`Error::PeerLost`] when the proxy is gone, [`Error::Protocol`].
    pub fn poll(&self, id: RequestId) -> Result<Option<Response>> {
        let mut state = self.state();
        let mut was_reset = false;
        loop {
            if let Some(response) = state.arrived.remove(&id.0) {
                return Ok(Some(response));
            }
            match unix::receive(&self.socket) {
                Ok((bytes, _)) if bytes.is_empty() => return Err(self.lost("it closed the connection")),
                Ok((bytes, fd)) => {
                    let response = parse_response(&bytes);
                    if let Some((EVERY_REQUEST, Err(refusal))) = response {
                        return Err(self.refused(refusal));
                    }
                    // An answer that nobody asked for would be kept for good, with its descriptor.
                    let (id, outcome) = response
                        .filter(|(id, _)| state.outstanding.remove(id))
                        .ok_or_else(|| {
                            Error::Protocol(format!("the proxy of rank {} answers rubbish", self.rank))
                        })?;
                    let outcome = outcome.map_err(|refusal| self.refused(refusal));
                    state.arrived.insert(id, Response { outcome, fd });
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                // It closed the connection before it read all. The kernel says that first, then what the proxy said.
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset && !was_reset => {
                    was_reset = true;
                }
                Err(error) if sys::is_starved(&error) => {
                    let what = format!("receiving a descriptor of the proxy of rank {}", self.rank);
                    return Err(system(&what)(error));
                }
                Err(error) => return Err(self.lost(&error.to_string())),
            }
        }
    }

    /// The error of a request that the proxy does not grant. What a proxy of this process lacks, this process lacks.
    fn refused(&self, Refusal { text, is_starved }: Refusal) -> Error {
        if is_starved && self.own {
            return system(&format!("the proxy of rank {}", self.rank))(io::Error::other(text));
        }
        Error::Refused(format!("the proxy of rank {} refuses: {text}", self.rank))
    }

    /// Sends a request and waits for the response.
    ///
    /// # Errors
    /// The proxy refuses the request; [`Error::PeerLost`], [`Error::Aborted`] within 100 ms of the abort word,
    /// [`Error::TimedOut`].
    pub fn call_blocking(&self, request: &Request) -> Result<Reply> {
        self.wait_for(self.call_async(request)?)?.outcome
    }

    /// The descriptor behind a handle of [`Reply::Setup`].
    ///
    /// # Errors
    /// As [`ProxyClient::call_blocking`].
    pub fn get_fd(&self, handle: u64) -> Result<OwnedFd> {
        let response = self.wait_for(self.call_async(&Request::GetFd { handle })?)?;
        response.outcome?;
        response
            .fd
            .ok_or_else(|| Error::Protocol(format!("the proxy of rank {} sent no descriptor", self.rank)))
    }

    /// Waits for a response.
    ///
    /// # Errors
    /// [`Error::PeerLost`], [`Error::Aborted`], [`Error::TimedOut`].
    pub fn wait_for(&self, id: RequestId) -> Result<Response> {
        let deadline = Instant::now() + self.timeout;
        loop {
            if let Some(response) = self.poll(id)? {
                return Ok(response);
            }
            self.wait(libc::POLLIN, deadline)?;
        }
    }

    fn wait(&self, events: libc::c_short, deadline: Instant) -> Result<()> {
        if self.abort.is_set() {
            return Err(Error::Aborted(format!(
                "waiting for the proxy of rank {}",
                self.rank
            )));
        }
        let left = deadline.saturating_duration_since(Instant::now());
        if left.is_zero() {
            let text = format!(
                "the proxy of rank {} has not answered for {:?}",
                self.rank, self.timeout
            );
            return Err(Error::TimedOut(text));
        }
        // Another thread may read this response from the socket, so never sleep long.
        match sys::poll(
            &mut [sys::interest(&*self.socket, events)],
            Some(left.min(sys::ABORT_CHECK)),
        ) {
            Ok(_) => Ok(()),
            Err(error) => Err(self.lost(&error.to_string())),
        }
    }

    fn lost(&self, what: &str) -> Error {
        Error::PeerLost(format!("the proxy of rank {} is gone: {what}", self.rank))
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use super::{super::message::encode_response, *};

    const PATIENCE: Duration = Duration::from_secs(10);

    fn name() -> String {
        format!("ringsight-test-{:016x}", sys::random_u64().unwrap())
    }

    #[test]
    fn an_answer_that_nobody_asked_for_is_not_kept() {
        let name = name();
        let listener = unix::listen(&name).unwrap();
        let client = ProxyClient::connect(&name, 3, Arc::default(), PATIENCE).unwrap();
        let proxy = unix::accept(&listener).unwrap();
        let id = client.call_async(&Request::Stop).unwrap();
        unix::send(&proxy, &encode_response(id.0 + 1, &Ok(Reply::Stop)), None).unwrap();
        let error = client.wait_for(id).unwrap_err();
        assert!(
            matches!(&error, Error::Protocol(text) if text == "the proxy of rank 3 answers rubbish"),
            "{error}"
        );
        // One that was asked for comes once.
        let answer = encode_response(id.0, &Ok(Reply::Stop));
        unix::send(&proxy, &answer, None).unwrap();
        unix::send(&proxy, &answer, None).unwrap();
        assert_eq!(client.wait_for(id).unwrap().outcome.unwrap(), Reply::Stop);
        assert!(matches!(client.wait_for(id), Err(Error::Protocol(_))));
    }

    #[test]
    fn what_a_proxy_said_before_it_closed_the_connection_is_told() {
        let text = "accepting a client: Too many open files";
        let refusal = || {
            Err(Refusal {
                text: text.into(),
                is_starved: true,
            })
        };
        for is_read in [true, false] {
            for asks_before in [true, false] {
                let name = name();
                let listener = unix::listen(&name).unwrap();
                let client = ProxyClient::connect(&name, 3, Arc::default(), PATIENCE).unwrap();
                let proxy = unix::accept(&listener).unwrap();
                let asked = asks_before.then(|| client.call_async(&Request::Stop).unwrap());
                if asks_before && is_read {
                    unix::receive(&proxy).unwrap();
                }
                unix::send(&proxy, &encode_response(EVERY_REQUEST, &refusal()), None).unwrap();
                drop(proxy);
                let told = match asked {
                    Some(id) => client.wait_for(id).map(|_| ()),
                    None => client.call_async(&Request::Stop).map(|_| ()),
                };
                // This process's own proxy: it is this process that lacks descriptors.
                let told = told.unwrap_err();
                assert!(matches!(&told, Error::System { .. }), "{told:?}");
                assert!(told.to_string().contains(text), "{told}");
            }
        }
    }

    #[test]
    fn want_of_this_process_is_no_failure_of_a_peer() {
        let name = name();
        let _listener = unix::listen(&name).unwrap();
        let client = ProxyClient::connect(&name, 3, Arc::default(), PATIENCE).unwrap();
        let refusal = |is_starved| Refusal {
            text: "Too many open files".into(),
            is_starved,
        };
        assert!(matches!(client.refused(refusal(false)), Error::Refused(_)));
        let starved = client.refused(refusal(true));
        assert!(matches!(&starved, Error::System { .. }));
        assert_eq!(starved.to_string(), "the proxy of rank 3: Too many open files");
    }

    #[test]
    fn the_secret_is_not_told_to_another_user() {
        // SAFETY: no arguments.
        if unsafe { libc::geteuid() } != 0 {
            // A user cannot play another one.
            println!("skipped: the_secret_is_not_told_to_another_user: needs root");
            return;
        }
        let (name, other) = (name(), 65534);
        let (listens, is_listening) = mpsc::channel();
        let (done, is_done) = mpsc::channel::<()>();
        thread::scope(|scope| {
            let name = &name;
            scope.spawn(move || {
                // The call of the C library would change the user of all threads.
                // SAFETY: numbers of users.
                let changed = unsafe { libc::syscall(libc::SYS_setresuid, other, other, other) };
                assert_eq!(changed, 0);
                let listener = unix::listen(name).unwrap();
                listens.send(()).unwrap();
                let _ = is_done.recv();
                drop(listener);
            });
            is_listening.recv().unwrap();
            let refused = ProxyClient::connect(name, 3, Arc::default(), PATIENCE)
                .map(|_| ())
                .unwrap_err();
            assert!(
                matches!(&refused, Error::PeerLost(text) if text.contains("a process of another user")),
                "{refused}"
            );
            drop(done);
        });
    }
}
