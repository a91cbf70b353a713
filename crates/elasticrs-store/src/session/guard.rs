//! Hook that passes a session's socket and deadline to a process that outlives the session's owner.

use std::os::fd::BorrowedFd;
use std::pin::Pin;

/// Receives the sockets and the deadline of a client's session. The methods are called on the runtime thread. By default,
/// they do nothing.
pub trait Guard: Send {
    /// The session has started on this socket. If another process holds a duplicate of the socket, the session stays
    /// alive until that duplicate is closed, even if this process dies. [`super::client::Client::close`] always ends
    /// the session.
    fn connected(&self, _socket: BorrowedFd<'_>) {}
    /// The session is about to be resumed on this socket. The returned future must complete once another process holds
    /// duplicates of both this socket and the previous one. From then on, the store may use either socket for the
    /// session. Afterwards [`Self::resumed`] is called, unless the session is lost or closed first.
    fn resuming(&self, _socket: BorrowedFd<'_>) -> Pin<Box<dyn Future<Output = ()>>> {
        Box::pin(std::future::ready(()))
    }
    /// If `on_new` is true, the session was resumed on the new socket, and the previous socket is no longer used.
    /// Otherwise, the session was not resumed, and the new socket will not be used.
    fn resumed(&self, _on_new: bool) {}
    /// Another session has opened a link on this socket, to detect the end of this session. The guard passes a
    /// duplicate of the socket to a process that outlives this one. That process sends `word` on the duplicate once all
    /// processes that depend on this session have exited. If `is_first`, this link replaces the links of the previous
    /// session.
    fn linked(&self, _socket: BorrowedFd<'_>, _word: [u8; 32], _is_first: bool) {}
    /// Returns true if other sessions are notified of the end of this session through [`Self::linked`]. Otherwise, they
    /// notice the end only when the lease of this session expires.
    fn says_words(&self) -> bool {
        false
    }
    /// The session lasts at least until this time, in nanoseconds of the boot clock.
    fn deadline(&self, _boot_ns: u64) {}
    /// The owner has closed the session. The guard must release the socket and clear the deadline, because no process
    /// depends on the session anymore.
    ///
    /// Not called for a lost session, because the store should not see the connection close before the owner has
    /// handled the loss.
    fn closed(&self) {}
}

/// Guard that does nothing, for a session that no other process depends on.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoGuard;

impl Guard for NoGuard {}
