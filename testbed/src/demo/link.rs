//! Network devices that are taken down and up.

use std::{io, os::fd::AsRawFd as _};

/// Takes a network device up or down, as `ip link set` does, within microseconds of the call.
///
/// # Errors
/// As the kernel says: no such device, no right.
pub fn set(name: &str, up: bool) -> io::Result<()> {
    let socket = std::net::UdpSocket::bind("127.0.0.1:0")?;
    // SAFETY: plain data; zero is a value of each field.
    let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    for (place, letter) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *place = letter.cast_signed();
    }
    // SAFETY: an open socket, and a request of the kernel's layout with a name that ends with a zero.
    if unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCGIFFLAGS, &raw mut request) } == -1 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the call has put them there.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    let bit = libc::IFF_UP as libc::c_short;
    request.ifr_ifru.ifru_flags = if up { flags | bit } else { flags & !bit };
    // SAFETY: as above.
    match unsafe { libc::ioctl(socket.as_raw_fd(), libc::SIOCSIFFLAGS, &raw const request) } {
        -1 => Err(io::Error::last_os_error()),
        _ => Ok(()),
    }
}
