//! The client of a proxy's service: of this rank's proxy, or of another rank's on the node.

use std::{
    collections::HashMap,
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
    message::{Reply, Request, parse_response},
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
    abort: Arc<AbortWord>,
    timeout: Duration,
    state: Mutex<ClientState>,
}

#[derive(Default)]
struct ClientState {
    last_id: u64,
    /// Responses that have arrived and not been taken.
    arrived: HashMap<u64, Response>,
}

impl ProxyClient {
    /// Connects to the proxy of `rank` at `name` ([`super::ProxyAddress::unix`]).
    ///
    /// # Errors
    /// [`Error::PeerLost`] when nobody listens there.
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
                Err(error) => {
                    return Err(Error::PeerLost(format!(
                        "the proxy of rank {rank} does not answer at @{name} ({error}): its process is gone or in \
                         another network namespace (set NCCL_HOSTID apart for such ranks)"
                    )));
                }
            }
        };
        Ok(Self {
            socket,
            rank,
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
        drop(state);
        let bytes = request.encode(id);
        loop {
            match unix::send(&self.socket, &bytes, None) {
                Ok(()) => return Ok(RequestId(id)),
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                    self.wait(libc::POLLOUT, deadline)?;
                }
                Err(error) => return Err(self.lost(&error.to_string())),
            }
        }
    }

    /// The response to a request, if it has arrived. Each response is returned once.
    ///
    /// # Errors
    /// [`Error::PeerLost`] when the proxy is gone, [`Error::Protocol`].
    pub fn poll(&self, id: RequestId) -> Result<Option<Response>> {
        let mut state = self.state();
        loop {
            if let Some(response) = state.arrived.remove(&id.0) {
                return Ok(Some(response));
            }
            match unix::receive(&self.socket) {
                Ok((bytes, _)) if bytes.is_empty() => return Err(self.lost("it closed the connection")),
                Ok((bytes, fd)) => {
                    let (id, outcome) = parse_response(&bytes).ok_or_else(|| {
                        Error::Protocol(format!("the proxy of rank {} answers rubbish", self.rank))
                    })?;
                    let refused =
                        |text| Error::Refused(format!("the proxy of rank {} refuses: {text}", self.rank));
                    state.arrived.insert(
                        id,
                        Response {
                            outcome: outcome.map_err(refused),
                            fd,
                        },
                    );
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => return Ok(None),
                Err(error) => return Err(self.lost(&error.to_string())),
            }
        }
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
