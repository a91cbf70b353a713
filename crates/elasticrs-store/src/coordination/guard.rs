//! The hook for whoever must act when a session ends and this process cannot.

use std::os::fd::BorrowedFd;
use std::pin::Pin;

/// Is told of a client's connection and of its deadline, on the runtime thread.
pub trait Guard: Send {
    /// The session has started on this socket. A duplicate of the socket, held elsewhere, keeps the session alive until
    /// the duplicate is closed, even if this process dies. [`super::client::Client::close`] ends the session in any
    /// case.
    fn connected(&self, socket: BorrowedFd<'_>);
    /// The session is about to be taken up on this socket. Done when a duplicate of it is held elsewhere, beside that of the
    /// socket before: from then on the store may count either as the session's. [`Self::resumed`] or
    /// [`Self::not_resumed`] follows, unless the session is lost or closed first.
    fn resuming(&self, socket: BorrowedFd<'_>) -> Pin<Box<dyn Future<Output = ()>>>;
    /// The session was resumed on the new socket. The previous socket is no longer used.
    fn resumed(&self);
    /// The session was not resumed, and the new socket will not be used.
    fn not_resumed(&self);
    /// Another session waits on this socket, which is called a link, for the end of this session. The guard duplicates
    /// the socket into a process that outlives this one. That process sends `word` on the duplicate when nothing that
    /// depends on this session is running. If `is_first`, this link replaces the links of the previous session.
    fn linked(&self, _socket: BorrowedFd<'_>, _word: [u8; 32], _is_first: bool) {}
    /// True if the guard gets the words passed to [`Self::linked`] sent. Without this, other sessions detect the end of
    /// this session differently.
    fn says_words(&self) -> bool {
        false
    }
    /// The session is sure to last until this moment on the boot clock, in nanoseconds.
    fn deadline(&self, boot_ns: u64);
    /// It was closed by its owner: nothing depends on it any more. One that is lost is not told of here. Its last deadline
    /// stands, and the duplicate stays, until its owner has done what the loss asks for: the store must not see the end
    /// of the connection before that.
    fn closed(&self);
}

/// For clients on which nothing depends.
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
