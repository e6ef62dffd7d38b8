//! Abstract unix sockets that keep message boundaries (`SOCK_SEQPACKET`) and carry descriptors (`SCM_RIGHTS`).
//!
//! An abstract name lives in the network namespace and goes with its socket: nothing in the file system to clean up.

use std::{
    io,
    os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    ptr,
};

use super::{
    fork::ParentOnly,
    sys::{StandardTaken, above_standard, check},
};

/// Longest message, bytes; longer ones are cut and so refused by the parser.
pub(crate) const MAX_MESSAGE: usize = 1024;

/// A forked child keeps none: a name would outlive the thread that answers there.
pub(crate) type Socket = ParentOnly<OwnedFd>;

fn socket() -> io::Result<Socket> {
    let kind = libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    above_standard(|| {
        // SAFETY: no pointers; the result is checked.
        let fd = check(unsafe { libc::socket(libc::AF_UNIX, kind, 0) })?;
        // SAFETY: a new descriptor that nobody else owns.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    })
    .map(ParentOnly::new)
}

/// The address of an abstract name: a zero byte and the name, no zero at the end.
fn address(name: &str) -> io::Result<(libc::sockaddr_un, libc::socklen_t)> {
    // SAFETY: all-zero bytes are a valid `sockaddr_un`.
    let mut address: libc::sockaddr_un = unsafe { std::mem::zeroed() };
    address.sun_family = libc::AF_UNIX as libc::sa_family_t;
    if name.is_empty() || name.len() >= address.sun_path.len() {
        return Err(io::Error::new(
            io::ErrorKind::InvalidInput,
            format!("no unix socket name: {name:?}"),
        ));
    }
    for (to, from) in address.sun_path[1..].iter_mut().zip(name.bytes()) {
        *to = libc::c_char::from_ne_bytes([from]);
    }
    let length = std::mem::offset_of!(libc::sockaddr_un, sun_path) + 1 + name.len();
    Ok((address, length as libc::socklen_t))
}

/// A listener, not blocking.
pub(crate) fn listen(name: &str) -> io::Result<Socket> {
    let (address, length) = address(name)?;
    let socket = socket()?;
    // SAFETY: `address` holds an address of `length` bytes.
    check(unsafe { libc::bind(socket.as_raw_fd(), (&raw const address).cast(), length) })?;
    // SAFETY: no pointers.
    check(unsafe { libc::listen(socket.as_raw_fd(), libc::SOMAXCONN) })?;
    Ok(socket)
}

/// A connection, not blocking. `WouldBlock`: the listener's queue is full, try again.
pub(crate) fn connect(name: &str) -> io::Result<Socket> {
    let (address, length) = address(name)?;
    let socket = socket()?;
    // SAFETY: `address` holds an address of `length` bytes.
    check(unsafe { libc::connect(socket.as_raw_fd(), (&raw const address).cast(), length) })?;
    Ok(socket)
}

/// The next connection, not blocking.
pub(crate) fn accept(listener: &Socket) -> io::Result<Socket> {
    let flags = libc::SOCK_CLOEXEC | libc::SOCK_NONBLOCK;
    above_standard(|| {
        // SAFETY: null address: we do not ask who it is (its name is empty anyway).
        let fd =
            check(unsafe { libc::accept4(listener.as_raw_fd(), ptr::null_mut(), ptr::null_mut(), flags) })?;
        // SAFETY: a new descriptor that nobody else owns.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    })
    .map(ParentOnly::new)
}

/// Process at the other end, as the kernel saw it when it connected or listened, if it is one of this user or root: an abstract name has no
/// permissions, so that others are shown the door here.
pub(crate) fn friend(socket: &Socket) -> Option<libc::pid_t> {
    let who = credentials(socket).ok()?;
    // SAFETY: no arguments, cannot fail.
    let user = unsafe { libc::geteuid() };
    (who.uid == user || who.uid == 0).then_some(who.pid)
}

fn credentials(socket: &Socket) -> io::Result<libc::ucred> {
    let mut credentials = libc::ucred {
        pid: 0,
        uid: 0,
        gid: 0,
    };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: `credentials` is writable for `length` bytes.
    check(unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut length,
        )
    })?;
    Ok(credentials)
}

/// Room for one descriptor in a control message, aligned as `cmsghdr` wants it.
#[repr(C, align(8))]
struct Control([u8; 32]);

fn message(part: &mut libc::iovec, control: &mut Control, control_bytes: usize) -> libc::msghdr {
    // SAFETY: all-zero bytes are a valid `msghdr` without name, parts and control.
    let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
    message.msg_iov = part;
    message.msg_iovlen = 1;
    if control_bytes > 0 {
        message.msg_control = control.0.as_mut_ptr().cast();
        message.msg_controllen = control_bytes as _;
    }
    message
}

/// Sends one message, with a descriptor if given; all or nothing, not blocking.
pub(crate) fn send(socket: &Socket, bytes: &[u8], fd: Option<BorrowedFd<'_>>) -> io::Result<()> {
    let mut part = libc::iovec {
        iov_base: bytes.as_ptr().cast_mut().cast(),
        iov_len: bytes.len(),
    };
    let mut control = Control([0; 32]);
    // SAFETY: computes a size.
    let space = unsafe { libc::CMSG_SPACE(size_of::<libc::c_int>() as u32) } as usize;
    assert!(
        space <= size_of::<Control>(),
        "a control message with one descriptor has grown"
    );
    let message = message(&mut part, &mut control, if fd.is_some() { space } else { 0 });
    if let Some(fd) = fd {
        // SAFETY: the control buffer is aligned and has room for one header with one descriptor.
        unsafe {
            let header = libc::CMSG_FIRSTHDR(&raw const message);
            (*header).cmsg_level = libc::SOL_SOCKET;
            (*header).cmsg_type = libc::SCM_RIGHTS;
            (*header).cmsg_len = libc::CMSG_LEN(size_of::<libc::c_int>() as u32) as _;
            libc::CMSG_DATA(header)
                .cast::<libc::c_int>()
                .write_unaligned(fd.as_raw_fd());
        }
    }
    // SAFETY: `message` points to `part` and `control`, which live to the end of the call.
    let sent = unsafe { libc::sendmsg(socket.as_raw_fd(), &raw const message, libc::MSG_NOSIGNAL) };
    if sent < 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

/// Receives one message with the descriptor that came along, not blocking. No bytes: the other end has closed.
///
/// # Errors
/// `EMFILE` if a descriptor came for which this process has no number left: the message is lost, too.
pub(crate) fn receive(socket: &Socket) -> io::Result<(Vec<u8>, Option<OwnedFd>)> {
    let mut bytes = vec![0u8; MAX_MESSAGE];
    let mut part = libc::iovec {
        iov_base: bytes.as_mut_ptr().cast(),
        iov_len: bytes.len(),
    };
    let mut control = Control([0; 32]);
    let mut message = message(&mut part, &mut control, size_of::<Control>());
    // What comes along gets the lowest numbers.
    let standard = StandardTaken::new();
    // SAFETY: `message` points to `part` and `control`, both writable for the lengths given.
    let got = unsafe { libc::recvmsg(socket.as_raw_fd(), &raw mut message, libc::MSG_CMSG_CLOEXEC) };
    if got < 0 {
        return Err(io::Error::last_os_error());
    }
    drop(standard);
    bytes.truncate(got as usize);
    let mut received = None;
    // SAFETY: walks the control messages that the kernel wrote; each `SCM_RIGHTS` descriptor is new and ours to own,
    // so those beyond the first are closed by being dropped.
    unsafe {
        let mut header = libc::CMSG_FIRSTHDR(&raw const message);
        while !header.is_null() {
            if (*header).cmsg_level == libc::SOL_SOCKET && (*header).cmsg_type == libc::SCM_RIGHTS {
                let data = libc::CMSG_DATA(header).cast::<libc::c_int>();
                let length = (*header).cmsg_len as usize - libc::CMSG_LEN(0) as usize;
                for i in 0..length / size_of::<libc::c_int>() {
                    received.get_or_insert(OwnedFd::from_raw_fd(data.add(i).read_unaligned()));
                }
            }
            header = libc::CMSG_NXTHDR(&raw const message, header);
        }
    }
    // The kernel cuts what it finds no numbers for, and what there is no room for: so many descriptors nobody sends.
    if message.msg_flags & libc::MSG_CTRUNC != 0 {
        return Err(match received {
            None => io::Error::from_raw_os_error(libc::EMFILE),
            Some(_) => io::Error::new(io::ErrorKind::InvalidData, "more descriptors than one came along"),
        });
    }
    received
        .map(|fd| above_standard(|| Ok(fd)))
        .transpose()
        .map(|received| (bytes, received))
}

#[cfg(test)]
mod tests {
    use std::{os::fd::AsFd as _, time::Duration};

    use super::{
        super::sys::{self, interest},
        *,
    };

    /// Two ends of a connection.
    fn pair() -> (Socket, Socket) {
        let name = format!("ringsight-test-{:016x}", sys::random_u64().unwrap());
        let listener = listen(&name).unwrap();
        let client = connect(&name).unwrap();
        (client, accept(&listener).unwrap())
    }

    fn next(socket: &Socket) -> io::Result<(Vec<u8>, Option<OwnedFd>)> {
        let _ = sys::poll(
            &mut [interest(&**socket, libc::POLLIN)],
            Some(Duration::from_secs(10)),
        );
        receive(socket)
    }

    #[test]
    fn a_descriptor_comes_with_its_message() {
        let (client, server) = pair();
        let file = std::fs::File::open("/dev/null").unwrap();
        send(&client, b"here", Some(file.as_fd())).unwrap();
        let (bytes, fd) = next(&server).unwrap();
        assert_eq!(bytes, b"here");
        assert!(fd.is_some_and(|fd| fd.as_raw_fd() > libc::STDERR_FILENO));
        assert!(friend(&server).is_some() && friend(&client).is_some());
    }
}
