//! The hook for whoever must act when a session ends and this process cannot.

use std::os::fd::BorrowedFd;

/// Is told of a client's connection and of its deadline, on the runtime thread.
pub trait Guard: Send {
    /// The session has begun on this socket. A duplicate of it, held elsewhere, keeps the session until it is closed,
    /// even when this process dies; only [`super::client::Client::close`] ends it all the same.
    fn connected(&self, socket: BorrowedFd<'_>);
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
    fn deadline(&self, _boot_ns: u64) {}
    fn closed(&self) {}
}
