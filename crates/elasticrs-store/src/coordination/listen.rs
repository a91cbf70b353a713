//! Sockets that wait for clients.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, ToSocketAddrs};

use nix::sys::socket::{
    AddressFamily, Backlog, SockFlag, SockType, SockaddrStorage, bind, listen, setsockopt, socket, sockopt,
};

/// Why an address cannot be listened on.
#[derive(Debug, thiserror::Error)]
#[error("listen on {host}:{port}")]
pub struct ListenError {
    /// As it was given.
    pub host: String,
    /// As it was given.
    pub port: u16,
    /// What the kernel or the resolver says.
    #[source]
    pub source: io::Error,
}

/// Binds all addresses and listens. An empty host stands for all interfaces, IPv4 and IPv6. With port 0, the first
/// address chooses for those after it.
///
/// # Errors
/// One of them cannot be had; none is left bound.
pub fn listen_on(addresses: &[(String, u16)]) -> Result<Vec<TcpListener>, ListenError> {
    let mut listeners = Vec::new();
    let mut chosen = 0;
    for (host, port) in addresses {
        let failed = |source| ListenError { host: host.clone(), port: *port, source };
        let port = if *port == 0 { chosen } else { *port };
        let listener = if host.is_empty() {
            everywhere(port).map_err(failed)?
        } else {
            // Of several addresses of a name, one after the other would be a surprise: the first is taken.
            let mut found = (host.as_str(), port).to_socket_addrs().map_err(failed)?;
            let address = found.next().ok_or_else(|| failed(io::ErrorKind::AddrNotAvailable.into()))?;
            open(address, true).map_err(failed)?
        };
        chosen = listener.local_addr().map_err(failed)?.port();
        listeners.push(listener);
    }
    Ok(listeners)
}

fn everywhere(port: u16) -> io::Result<TcpListener> {
    let both = SocketAddr::new(IpAddr::V6(Ipv6Addr::UNSPECIFIED), port);
    open(both, false).or_else(|error| match error.raw_os_error() {
        // The kernel knows no IPv6.
        Some(nix::libc::EAFNOSUPPORT | nix::libc::EADDRNOTAVAIL) => {
            open(SocketAddr::new(IpAddr::V4(Ipv4Addr::UNSPECIFIED), port), false)
        }
        _ => Err(error),
    })
}

fn open(address: SocketAddr, v6_only: bool) -> io::Result<TcpListener> {
    let family = if address.is_ipv6() { AddressFamily::Inet6 } else { AddressFamily::Inet };
    let fd = socket(family, SockType::Stream, SockFlag::SOCK_CLOEXEC | SockFlag::SOCK_NONBLOCK, None)?;
    setsockopt(&fd, sockopt::ReuseAddr, &true)?;
    if address.is_ipv6() {
        setsockopt(&fd, sockopt::Ipv6V6Only, &v6_only)?;
    }
    bind(std::os::fd::AsRawFd::as_raw_fd(&fd), &SockaddrStorage::from(address))?;
    // As many agents as a job has come in one instant; the kernel cuts this to what it allows.
    listen(&fd, Backlog::MAXALLOWABLE)?;
    Ok(TcpListener::from(fd))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_port_of_the_first_address_is_that_of_the_others() {
        let listeners = listen_on(&[("127.0.0.1".into(), 0), ("127.0.0.2".into(), 0)]).unwrap();
        let ports: Vec<_> = listeners.iter().map(|l| l.local_addr().unwrap().port()).collect();
        assert_eq!(ports[0], ports[1]);
        assert_ne!(ports[0], 0);
    }

    #[test]
    fn a_port_that_is_taken_is_named() {
        let taken = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = taken.local_addr().unwrap().port();
        let error = listen_on(&[("127.0.0.1".into(), port)]).unwrap_err();
        assert_eq!((error.port, error.source.kind()), (port, io::ErrorKind::AddrInUse));
    }
}
