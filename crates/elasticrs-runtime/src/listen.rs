//! Opens sockets that listen for clients.
//!
//! The caller owns the listening sockets. Connections wait in the kernel's queue until the caller accepts them.
//!
//! - **LISTEN-1** Without a host, the socket listens on all addresses, IPv6 as well as IPv4 if the kernel supports
//!   both.
//! - **LISTEN-2** If a range of ports is given, the first free port is used. An error names the address and the port.

use std::fmt;
use std::io;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};
use std::os::fd::AsRawFd;

use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, SockaddrStorage, bind, listen as begin_to_listen, setsockopt, socket,
    sockopt,
};

/// Port to listen on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Port {
    Any,
    /// The first free port in this inclusive range.
    Range(u16, u16),
}

impl From<u16> for Port {
    /// Converts a port number. 0 means any port, as in the kernel.
    fn from(port: u16) -> Self {
        if port == 0 { Self::Any } else { Self::Range(port, port) }
    }
}

/// Failure to listen on an address.
#[derive(Debug)]
pub struct ListenError {
    /// The host that the caller passed, for messages. `None` for all addresses.
    pub host: Option<String>,
    pub port: Port,
    pub source: io::Error,
}

impl fmt::Display for ListenError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let place = self.host.as_deref().unwrap_or("all addresses");
        match (self.port, &self.host) {
            (Port::Any, _) => write!(f, "listen on {place}, any free port"),
            (Port::Range(first, last), Some(host)) if first == last && host.contains(':') => {
                write!(f, "listen on [{host}]:{first}")
            }
            (Port::Range(first, last), Some(host)) if first == last => write!(f, "listen on {host}:{first}"),
            (Port::Range(first, last), None) if first == last => write!(f, "listen on {place}, port {first}"),
            (Port::Range(first, last), _) => write!(f, "listen on {place}, ports {first} to {last}"),
        }
    }
}

impl std::error::Error for ListenError {
    fn source(&self) -> Option<&(dyn std::error::Error + 'static)> {
        Some(&self.source)
    }
}

/// Binds and listens on `host`, or on all addresses if `host` is `None`.
pub fn listen(host: Option<&str>, port: Port) -> Result<TcpListener, ListenError> {
    let failed = |source| ListenError { host: host.map(str::to_owned), port, source };
    let (first, last) = match port {
        Port::Any => (0, 0),
        Port::Range(first, last) => (first, last),
    };
    let mut error = io::Error::new(io::ErrorKind::InvalidInput, "an empty range of ports");
    for port in first..=last {
        match listen_at(host, port) {
            Ok(listener) => return Ok(listener),
            Err(refused) => error = refused,
        }
        if error.kind() != io::ErrorKind::AddrInUse && error.kind() != io::ErrorKind::PermissionDenied {
            break;
        }
    }
    Err(failed(error))
}

/// Listens on several addresses. An empty host means all addresses. Port 0 means any free port for the first address.
/// For every other address, port 0 means the port of the previous address. If listening on one address fails, closes
/// all sockets.
pub fn listen_at_all(addresses: &[(String, u16)]) -> Result<Vec<TcpListener>, ListenError> {
    let mut listeners = Vec::new();
    let mut chosen = 0;
    for (host, port) in addresses {
        let host = Some(host.as_str()).filter(|host| !host.is_empty());
        let port = Port::from(if *port == 0 { chosen } else { *port });
        let listener = listen(host, port)?;
        let bound = listener.local_addr();
        chosen = bound.map_err(|source| ListenError { host: host.map(str::to_owned), port, source })?.port();
        listeners.push(listener);
    }
    Ok(listeners)
}

fn listen_at(host: Option<&str>, port: u16) -> io::Result<TcpListener> {
    let Some(host) = host else {
        return match open((Ipv6Addr::UNSPECIFIED, port).into(), false) {
            Err(error) if is_no_address_of_ours(&error) => open((Ipv4Addr::UNSPECIFIED, port).into(), false),
            result => result,
        };
    };
    let mut failed = io::Error::new(io::ErrorKind::NotFound, "no address of that name");
    for address in (host, port).to_socket_addrs()? {
        match open(address, true) {
            // Try the next address if this address does not exist on this machine. For example, `localhost` resolves to
            // `::1` first even if the kernel has no IPv6.
            //
            // Stop after any other error. For example, another program may use the port on `::1`, and clients that
            // connect to `localhost` would reach that program.
            Err(error) if is_no_address_of_ours(&error) => failed = error,
            result => return result,
        }
    }
    Err(failed)
}

/// Returns true if the address does not exist on this machine, for example because the kernel has no IPv6.
fn is_no_address_of_ours(error: &io::Error) -> bool {
    matches!(error.raw_os_error(), Some(nix::libc::EAFNOSUPPORT | nix::libc::EADDRNOTAVAIL))
}

fn open(address: SocketAddr, is_v6_only: bool) -> io::Result<TcpListener> {
    let family = if address.is_ipv6() { AddressFamily::Inet6 } else { AddressFamily::Inet };
    let fd = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK, None)?;
    // Allow reuse of the address, because connections of an earlier listener may still be in TIME_WAIT.
    setsockopt(&fd, sockopt::ReuseAddr, &true)?;
    if address.is_ipv6() {
        setsockopt(&fd, sockopt::Ipv6V6Only, &is_v6_only)?;
    }
    bind(fd.as_raw_fd(), &SockaddrStorage::from(address))?;
    // Use the longest possible queue, because thousands of clients may connect at once, and a refused connection delays
    // a client of torch by half a second. The kernel limits the queue to `net.core.somaxconn`.
    begin_to_listen(&fd, Backlog::MAXALLOWABLE)?;
    Ok(TcpListener::from(fd))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn port_of(listener: &TcpListener) -> u16 {
        listener.local_addr().unwrap().port()
    }

    #[test]
    fn listening_without_a_host_accepts_ipv4_and_ipv6() {
        let listener = listen(None, Port::Any).unwrap();
        let port = port_of(&listener);
        std::net::TcpStream::connect((Ipv4Addr::LOCALHOST, port)).unwrap();
        if listener.local_addr().unwrap().is_ipv6() {
            std::net::TcpStream::connect((Ipv6Addr::LOCALHOST, port)).unwrap();
        }
    }

    #[test]
    fn a_port_in_use_is_skipped_within_a_port_range() {
        let first = listen(None, Port::Any).unwrap();
        let taken = port_of(&first);
        let error = listen(None, taken.into()).unwrap_err();
        assert_eq!(error.source.kind(), io::ErrorKind::AddrInUse);
        let second = listen(None, Port::Range(taken, taken.saturating_add(50))).unwrap();
        assert!(port_of(&second) > taken);
    }

    #[test]
    fn listening_on_a_host_uses_only_its_address() {
        let listener = listen(Some("127.0.0.1"), Port::Any).unwrap();
        assert_eq!(listener.local_addr().unwrap().ip(), Ipv4Addr::LOCALHOST);
        assert!(listen(Some("192.0.2.1"), Port::Any).is_err());
    }

    #[test]
    fn listening_on_a_host_name_uses_a_local_address_of_the_name() {
        assert!(listen(Some("localhost"), Port::Any).unwrap().local_addr().unwrap().ip().is_loopback());
    }

    #[test]
    fn all_addresses_get_the_same_free_port() {
        let listeners = listen_at_all(&[("127.0.0.1".into(), 0), ("127.0.0.2".into(), 0)]).unwrap();
        let ports: Vec<_> = listeners.iter().map(port_of).collect();
        assert_eq!(ports[0], ports[1]);
        assert_ne!(ports[0], 0);
    }

    #[test]
    fn a_listen_error_contains_the_address_and_the_port() {
        let taken = listen(Some("127.0.0.1"), Port::Any).unwrap();
        let port = port_of(&taken);
        let error = listen_at_all(&[("127.0.0.1".into(), port)]).unwrap_err();
        assert_eq!((error.port, error.source.kind()), (port.into(), io::ErrorKind::AddrInUse));
        assert_eq!(error.to_string(), format!("listen on 127.0.0.1:{port}"));

        let said = |host: Option<&str>, port| {
            let source = io::ErrorKind::AddrInUse.into();
            ListenError { host: host.map(str::to_owned), port, source }.to_string()
        };
        assert_eq!(said(None, 5.into()), "listen on all addresses, port 5");
        assert_eq!(said(Some("::1"), 5.into()), "listen on [::1]:5");
        assert_eq!(said(Some("host"), Port::Range(5, 9)), "listen on host, ports 5 to 9");
        assert_eq!(said(None, 0.into()), "listen on all addresses, any free port");
    }
}
