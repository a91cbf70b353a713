//! A hook for the owner of a session. It allows another process to act at the end of the session if this process
//! cannot.

use std::os::fd::BorrowedFd;
use std::pin::Pin;

/// Receives a client's connections and its deadline. The methods are called on the runtime thread.
pub trait Guard: Send {
    /// The session has started on this socket. A duplicate of the socket, held elsewhere, keeps the session alive until
    /// the duplicate is closed, even if this process dies. [`super::client::Client::close`] ends the session in any
    /// case.
    fn connected(&self, socket: BorrowedFd<'_>);
    /// The session is about to be resumed on this socket. The future completes when a duplicate of this socket is held
    /// elsewhere, in addition to the duplicate of the previous socket. From then on the store may use either socket for
    /// the session. [`Self::resumed`] or [`Self::not_resumed`] follows, unless the session is lost or closed first.
    fn resuming(&self, socket: BorrowedFd<'_>) -> Pin<Box<dyn Future<Output = ()>>>;
    /// The session was resumed on the new socket. The previous socket is no longer used.
    fn resumed(&self);
    /// The session was not resumed, and the new socket will not be used.
    fn not_resumed(&self);
    /// Another session waits on this socket, which is called a link, for the end of this session. The guard duplicates
    /// the socket into a process that outlives this one. That process sends `word` on the duplicate when nothing that
    /// depends on this session is running. If `is_first`, this link replaces the links of the previous session.
    fn linked(&self, _socket: BorrowedFd<'_>, _word: [u8; 32], _is_first: bool) {}
    /// True if this guard arranges that the words passed to [`Self::linked`] are sent. If false, the session has no links,
    /// and other sessions notice its death only when its lease expires.
    fn says_words(&self) -> bool {
        false
    }
    /// The session will last at least until this time, in nanoseconds of the boot clock.
    fn deadline(&self, boot_ns: u64);
    /// The owner closed the session, so nothing depends on it anymore. Not called for a session that is lost: its last
    /// deadline and the duplicate of its socket remain until the owner has handled the loss, because the store may not
    /// see the end of the connection before that.
    fn closed(&self);
}

/// Guard for a client on which nothing depends. Does nothing.
#[derive(Debug, Clone, Copy, Default)]
pub struct NoGuard;

impl Guard for NoGuard {
    fn connected(&self, _socket: BorrowedFd<'_>) {}
    fn resuming(&self, _socket: BorrowedFd<'_>) -> Pin<Box<dyn Future<Output = ()>>> {
        Box::pin(std::future::ready(()))
    }
    fn resumed(&self) {}
    fn not_resumed(&self) {}
    fn deadline(&self, _boot_ns: u64) {}
    fn closed(&self) {}
}
