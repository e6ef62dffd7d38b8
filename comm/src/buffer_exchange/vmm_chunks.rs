//! Descriptors of VMM chunks, from the rank that exports them to the ranks that import them.
//!
//! The exporting rank has a thread that answers at an abstract unix socket, from its first export of such memory until its communicator ends. It opens a
//! chunk when that is requested and closes it when it is sent: a process may have more chunks than it may have descriptors. It is a thread of its own,
//! since the driver may make it wait, while the thread that waits for it on the other side has buffers of its own rank to export.

use std::{
    io,
    os::fd::{AsFd as _, OwnedFd},
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::{self, JoinHandle},
    time::{Duration, Instant},
};

use ringsight_comm_base::log;

use crate::{
    bootstrap::{
        sys::{self, Wake},
        unix::{self, Socket},
        wire::printable,
    },
    checks::wire::Rest,
    device::{self, Device, DeviceError, Result, VmmChunk},
};

/// First four bytes of a request.
const MAGIC: u32 = 0x5250_4350;
/// How long either side waits for the other.
const PATIENCE: Duration = Duration::from_secs(10);
/// How often it looks meanwhile whether its communicator ends.
const LOOKS: Duration = Duration::from_millis(100);
/// Pause when there is no descriptor left to accept a connection.
const STARVED_PAUSE: Duration = Duration::from_millis(20);
/// First byte of an answer that has a descriptor. Any other answer says why there is none.
const HERE: u8 = 1;

/// Where descriptors are fetched, and the secret that proves the right to them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Ticket {
    /// Name of the abstract socket.
    pub(super) name: String,
    pub(super) secret: u64,
}

/// A request for the chunks of an exported buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct ChunkRequest {
    secret: u64,
    number: u32,
    generation: u32,
}

impl ChunkRequest {
    fn encode(self) -> Vec<u8> {
        let mut bytes = MAGIC.to_le_bytes().to_vec();
        bytes.extend(self.secret.to_le_bytes());
        bytes.extend(self.number.to_le_bytes());
        bytes.extend(self.generation.to_le_bytes());
        bytes
    }

    fn parse(bytes: &[u8]) -> Option<Self> {
        let mut rest = Rest(bytes);
        if rest.u32()? != MAGIC {
            return None;
        }
        let (secret, number, generation) = (rest.u64()?, rest.u32()?, rest.u32()?);
        rest.is_empty().then_some(Self {
            secret,
            number,
            generation,
        })
    }
}

/// Waits until a socket is ready; false if its communicator ends, or nothing comes of it.
fn wait(socket: &Socket, events: libc::c_short, ending: &AtomicBool) -> bool {
    let deadline = Instant::now() + PATIENCE;
    // Relaxed: a request to end, which orders nothing.
    while !ending.load(Ordering::Relaxed) && Instant::now() < deadline {
        let mut fds = [sys::interest(&**socket, events)];
        match sys::poll(&mut fds, Some(LOOKS)) {
            Ok(_) if sys::is_ready(&fds[0]) => return true,
            Ok(_) => {}
            Err(_) => return false,
        }
    }
    false
}

/// Sends a message, which a socket that is full delays.
fn send(socket: &Socket, bytes: &[u8], fd: Option<&OwnedFd>, ending: &AtomicBool) -> io::Result<()> {
    loop {
        match unix::send(socket, bytes, fd.map(|fd| fd.as_fd())) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if !wait(socket, libc::POLLOUT, ending) {
                    return Err(io::ErrorKind::TimedOut.into());
                }
            }
            result => return result,
        }
    }
}

/// The next message; none: the other end has closed.
fn receive(socket: &Socket, ending: &AtomicBool) -> io::Result<(Vec<u8>, Option<OwnedFd>)> {
    loop {
        match unix::receive(socket) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {
                if !wait(socket, libc::POLLIN, ending) {
                    return Err(io::ErrorKind::TimedOut.into());
                }
            }
            result => return result,
        }
    }
}

/// Returns the chunks that were exported under a number and a generation.
pub(super) type Find = Box<dyn Fn(u32, u32) -> Option<Arc<[VmmChunk]>> + Send>;

/// The thread that answers. Dropping it ends it.
pub(super) struct ChunkServer {
    ticket: Ticket,
    ending: Arc<AtomicBool>,
    wake: Arc<Wake>,
    thread: Option<JoinHandle<()>>,
}

impl ChunkServer {
    /// Of a rank on device number `device`.
    pub(super) fn new(device: i32, rank: u32, find: Find) -> io::Result<Self> {
        let name = format!(
            "ringsight-chunks-{}-{rank}-{:016x}",
            std::process::id(),
            sys::random_u64()?
        );
        let ticket = Ticket {
            name,
            secret: sys::random_u64()?,
        };
        let listener = unix::listen(&ticket.name)?;
        let (ending, wake) = (Arc::<AtomicBool>::default(), Arc::new(Wake::new()?));
        let server = Server {
            device,
            listener,
            secret: ticket.secret,
            ending: ending.clone(),
            wake: wake.clone(),
            find,
        };
        let thread = thread::Builder::new()
            .name("rs-offers".into())
            .spawn(move || server.run())?;
        Ok(Self {
            ticket,
            ending,
            wake,
            thread: Some(thread),
        })
    }

    pub(super) fn ticket(&self) -> &Ticket {
        &self.ticket
    }
}

impl Drop for ChunkServer {
    fn drop(&mut self) {
        // Relaxed: see `wait`.
        self.ending.store(true, Ordering::Relaxed);
        self.wake.wake();
        if let Some(thread) = self.thread.take() {
            // A panic has been told of already.
            let _ = thread.join();
        }
    }
}

struct Server {
    device: i32,
    listener: Socket,
    secret: u64,
    ending: Arc<AtomicBool>,
    wake: Arc<Wake>,
    find: Find,
}

impl Server {
    fn run(&self) {
        let Ok(device) = device::device() else { return };
        if device.set_current(self.device).is_err() {
            return;
        }
        // Relaxed: see `wait`.
        while !self.ending.load(Ordering::Relaxed) {
            let mut fds = [
                sys::interest(&*self.wake, libc::POLLIN),
                sys::interest(&*self.listener, libc::POLLIN),
            ];
            if sys::poll(&mut fds, None).is_err() {
                return;
            }
            match unix::accept(&self.listener) {
                Ok(client) => {
                    if let Err(error) = self.serve(&**device, &client) {
                        tracing::info!(target: log::INIT, "Memory was asked for, and not given: {error}");
                    }
                }
                Err(error) if sys::is_starved(&error) => thread::sleep(STARVED_PAUSE),
                // Who came has left, or nobody had.
                Err(_) => {}
            }
        }
    }

    /// Serves one client after another: each of a few ranks asks once for each export.
    fn serve(&self, device: &dyn Device, client: &Socket) -> io::Result<()> {
        let refused = |text: &str| io::Error::new(io::ErrorKind::PermissionDenied, text);
        if unix::friend(client).is_none() {
            return Err(refused("another user asks"));
        }
        let (question, _) = receive(client, &self.ending)?;
        let question =
            ChunkRequest::parse(&question).ok_or_else(|| refused("a question that cannot be read"))?;
        if question.secret != self.secret {
            return Err(refused("a wrong secret"));
        }
        let Some(chunks) = (self.find)(question.number, question.generation) else {
            return send(client, b"\0it is shown no longer", None, &self.ending);
        };
        let _standard = sys::StandardTaken::new();
        for chunk in &*chunks {
            match device.export_vmm_chunk(chunk) {
                Ok(fd) => send(client, &[HERE], Some(&fd), &self.ending)?,
                Err(error) => {
                    let text = [&[0], error.to_string().as_bytes()].concat();
                    return send(
                        client,
                        &text[..text.len().min(unix::MAX_MESSAGE)],
                        None,
                        &self.ending,
                    );
                }
            }
        }
        Ok(())
    }
}

/// Descriptors of the chunks that another rank has exported, one after another.
pub(super) struct Fetch<'a> {
    socket: Socket,
    ending: &'a AtomicBool,
}

impl<'a> Fetch<'a> {
    /// Asks for them. Gives up when `ending` is set.
    pub(super) fn begin(
        ticket: &Ticket,
        number: u32,
        generation: u32,
        ending: &'a AtomicBool,
    ) -> Result<Self> {
        let failed = |error: io::Error| {
            DeviceError::Resource(format!("asking at @{} for its chunks: {error}", ticket.name))
        };
        // Its queue is longer than there are ranks.
        let socket = unix::connect(&ticket.name).map_err(failed)?;
        let question = ChunkRequest {
            secret: ticket.secret,
            number,
            generation,
        };
        send(&socket, &question.encode(), None, ending).map_err(failed)?;
        Ok(Self { socket, ending })
    }

    pub(super) fn next(&mut self) -> Result<OwnedFd> {
        let (bytes, fd) = receive(&self.socket, self.ending)
            .map_err(|error| DeviceError::Resource(format!("waiting for a chunk of it: {error}")))?;
        match (&bytes[..], fd) {
            ([HERE], Some(fd)) => Ok(fd),
            ([], _) => Err(DeviceError::InvalidHandle(
                "its rank has closed the connection".into(),
            )),
            ([_, text @ ..], _) => Err(DeviceError::InvalidHandle(printable(text))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{fs::File, io::Read as _};

    use super::*;

    #[test]
    fn questions_survive_the_way_and_rubbish_is_none() {
        let question = ChunkRequest {
            secret: 1 << 63,
            number: 3,
            generation: 9,
        };
        let bytes = question.encode();
        assert_eq!(ChunkRequest::parse(&bytes), Some(question));
        for length in 0..bytes.len() {
            assert_eq!(ChunkRequest::parse(&bytes[..length]), None);
        }
        assert_eq!(ChunkRequest::parse(&[&bytes[..], &[0]].concat()), None);
        assert_eq!(ChunkRequest::parse(&[0; 20]), None);
    }

    /// A listener, and who has connected to it.
    fn connected() -> (Socket, Socket) {
        let name = format!(
            "ringsight-test-{}-{:016x}",
            std::process::id(),
            sys::random_u64().unwrap()
        );
        let listener = unix::listen(&name).unwrap();
        let client = unix::connect(&name).unwrap();
        (listener, client)
    }

    fn pair() -> (Socket, Socket) {
        let (listener, client) = connected();
        (unix::accept(&listener).unwrap(), client)
    }

    /// What [`Server::serve`] says to who asks with these.
    fn answer(secret: u64, question: &[u8]) -> (io::Result<()>, Vec<u8>) {
        let ending = AtomicBool::new(false);
        let (listener, client) = connected();
        send(&client, question, None, &ending).unwrap();
        let accepted = unix::accept(&listener).unwrap();
        let server = Server {
            device: 0,
            listener,
            secret,
            ending: Arc::default(),
            wake: Arc::new(Wake::new().unwrap()),
            find: Box::new(|_, _| None),
        };
        let device = device::host::HostDevice::new().unwrap();
        let served = server.serve(&device, &accepted);
        drop(accepted);
        (served, receive(&client, &ending).unwrap().0)
    }

    #[test]
    fn nothing_is_given_to_who_does_not_know_the_secret() {
        let question = |secret| {
            let (number, generation) = (1, 1);
            ChunkRequest {
                secret,
                number,
                generation,
            }
            .encode()
        };
        let (served, said) = answer(5, &question(5));
        assert!(served.is_ok());
        assert_eq!(said, b"\0it is shown no longer");
        for question in [question(6), b"rubbish".to_vec()] {
            let (served, said) = answer(5, &question);
            assert!(served.is_err() && said.is_empty(), "{said:?}");
        }
    }

    #[test]
    fn a_wait_ends_when_the_communicator_does() {
        let (one, _other) = pair();
        let ending = AtomicBool::new(true);
        let error = receive(&one, &ending).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[test]
    fn descriptors_come_one_after_another() {
        let (server, client) = pair();
        let ending = AtomicBool::new(false);
        let mut fetch = Fetch {
            socket: client,
            ending: &ending,
        };
        for _ in 0..3 {
            let file = File::open("/proc/self/comm").unwrap();
            send(&server, &[HERE], Some(&file.into()), &ending).unwrap();
            let mut text = String::new();
            File::from(fetch.next().unwrap())
                .read_to_string(&mut text)
                .unwrap();
            assert!(!text.is_empty());
        }
        send(&server, b"\0the memory is gone", None, &ending).unwrap();
        assert_eq!(fetch.next().unwrap_err().to_string(), "the memory is gone");
        drop(server);
        assert!(fetch.next().is_err());
    }
}
