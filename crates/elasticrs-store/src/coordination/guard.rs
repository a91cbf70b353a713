//! The hook for whoever must act when a session ends and this process cannot.

use std::os::fd::BorrowedFd;
use std::pin::Pin;

/// Is told of a client's connection and of its deadline, on the runtime thread.
pub trait Guard: Send {
    /// The session has begun on this socket. A duplicate of it, held elsewhere, keeps the session until it is closed,
    /// even when this process dies; only [`super::client::Client::close`] ends it all the same.
    fn connected(&self, socket: BorrowedFd<'_>);
    /// The session is about to be taken up on this socket. Done when a duplicate of it is held elsewhere, beside that of the
    /// socket before: from then on the store may count either as the session's. [`Self::resumed`] or
    /// [`Self::not_resumed`] follows, unless the session is lost or closed first.
    fn resuming(&self, socket: BorrowedFd<'_>) -> Pin<Box<dyn Future<Output = ()>>>;
    /// It was: the socket before means nothing any more.
    fn resumed(&self);
    /// It was not, and that socket will not be used.
    fn not_resumed(&self);
    /// Another session waits on this link for the end of this one. A duplicate of it, held elsewhere, says `word` when nothing
    /// that depends on this session is left. The first link of a session takes the place of those of the session before.
    fn linked(&self, _socket: BorrowedFd<'_>, _word: [u8; 32], _is_first: bool) {}
    /// True if something will say the words given to [`Self::linked`].
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
