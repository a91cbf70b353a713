//! The listening socket.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};

use socket2::{Domain, Protocol, SockAddr, Socket, Type};

use super::handle::Port;

/// Clients that come at once must not be refused: one refused attempt costs torch's client half a second. The kernel cuts
/// this down to `net.core.somaxconn`.
const BACKLOG: i32 = 65_535;

/// Binds and listens. Without a host: on every address, IPv6 and IPv4 where the kernel has both.
pub(super) fn listen(host: Option<&str>, port: Port) -> io::Result<TcpListener> {
    let (first, last) = match port {
        Port::Any => (0, 0),
        Port::Range(first, last) => (first, last),
    };
    let mut failed = io::Error::new(io::ErrorKind::InvalidInput, "an empty range of ports");
    for port in first..=last {
        match listen_on(host, port) {
            Ok(listener) => return Ok(listener),
            Err(error) => failed = error,
        }
        if failed.kind() != io::ErrorKind::AddrInUse && failed.kind() != io::ErrorKind::PermissionDenied {
            break;
        }
    }
    Err(failed)
}

fn listen_on(host: Option<&str>, port: u16) -> io::Result<TcpListener> {
    let Some(host) = host else {
        return match open((Ipv6Addr::UNSPECIFIED, port).into()) {
            // A kernel without IPv6, or with IPv6 switched off.
            Err(error) if lacks_ipv6(&error) => open((Ipv4Addr::UNSPECIFIED, port).into()),
            result => result,
        };
    };
    let mut failed = io::Error::new(io::ErrorKind::NotFound, "no address of that name");
    for address in (host, port).to_socket_addrs()? {
        match open(address) {
            Ok(listener) => return Ok(listener),
            Err(error) => failed = error,
        }
    }
    Err(failed)
}

fn lacks_ipv6(error: &io::Error) -> bool {
    const EAFNOSUPPORT: i32 = 97;
    error.raw_os_error() == Some(EAFNOSUPPORT) || error.kind() == io::ErrorKind::AddrNotAvailable
}

fn open(address: SocketAddr) -> io::Result<TcpListener> {
    let socket = Socket::new(Domain::for_address(address), Type::STREAM.nonblocking(), Some(Protocol::TCP))?;
    if address.ip() == IpAddr::V6(Ipv6Addr::UNSPECIFIED) {
        socket.set_only_v6(false)?;
    }
    // Connections of an earlier round that linger in TIME_WAIT do not keep the port.
    socket.set_reuse_address(true)?;
    socket.bind(&SockAddr::from(address))?;
    socket.listen(BACKLOG)?;
    Ok(socket.into())
}

#[cfg(test)]
mod tests {
    use std::net::TcpStream;

    use super::*;

    #[test]
    fn it_listens_on_ipv6_and_ipv4() {
        let listener = listen(None, Port::Any).unwrap();
        let port = listener.local_addr().unwrap().port();
        TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        if listener.local_addr().unwrap().is_ipv6() {
            TcpStream::connect((Ipv6Addr::LOCALHOST, port)).unwrap();
        }
    }

    #[test]
    fn a_taken_port_is_passed_over_within_the_range() {
        let taken = listen(None, Port::Any).unwrap().local_addr().unwrap().port();
        let first = listen(None, Port::Range(taken, taken)).unwrap();
        let error = listen(None, Port::Range(taken, taken)).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::AddrInUse);
        let second = listen(None, Port::Range(taken, taken.saturating_add(50))).unwrap();
        assert!(second.local_addr().unwrap().port() > first.local_addr().unwrap().port());
    }

    #[test]
    fn a_host_is_listened_on_alone() {
        let listener = listen(Some("127.0.0.1"), Port::Any).unwrap();
        assert_eq!(listener.local_addr().unwrap().ip(), Ipv4Addr::LOCALHOST);
        assert!(listen(Some("192.0.2.1"), Port::Any).is_err());
    }
}
