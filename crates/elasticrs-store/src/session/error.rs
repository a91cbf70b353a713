//! Error types for calls, connections and sessions.

use std::sync::mpsc::SyncSender;

use crate::types::LostKind;

/// Reason why a store cannot be used. It consists of a kind for programs and a message for the user.
#[derive(Debug, Clone)]
pub(crate) struct StoreError {
    pub(crate) kind: LostKind,
    pub(crate) message: String,
}

impl StoreError {
    pub(crate) fn new(kind: LostKind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into() }
    }
}

/// A failed call or connection attempt. The variant says whether a retry can succeed.
#[derive(Debug)]
pub(crate) enum Failure {
    /// A retry may succeed, perhaps later or with another server.
    Retryable(StoreError),
    Fatal(StoreError),
}

impl Failure {
    pub(crate) fn retryable(kind: LostKind, message: impl Into<String>) -> Self {
        Self::Retryable(StoreError::new(kind, message))
    }

    pub(crate) fn fatal(kind: LostKind, message: impl Into<String>) -> Self {
        Self::Fatal(StoreError::new(kind, message))
    }

    pub(crate) fn into_error(self) -> StoreError {
        let (Self::Retryable(error) | Self::Fatal(error)) = self;
        error
    }
}

/// Reason why a session stops using its connection.
pub(crate) enum ConnectionEnd {
    /// The connection failed. The session may continue on another connection.
    Broken(StoreError),
    /// The session has ended with an error.
    Lost(StoreError),
    /// The user closed the session. Contains the channel that notifies the caller of `close`, or `None` if no caller is
    /// waiting.
    Closed(Option<SyncSender<()>>),
}

impl ConnectionEnd {
    pub(crate) fn broken(kind: LostKind, message: impl Into<String>) -> Self {
        Self::Broken(StoreError::new(kind, message))
    }
}

/// Result of one step of a session on its connection.
pub(crate) type Step<T = ()> = Result<T, ConnectionEnd>;

impl From<StoreError> for ConnectionEnd {
    fn from(error: StoreError) -> Self {
        Self::Lost(error)
    }
}

impl From<Failure> for ConnectionEnd {
    fn from(failure: Failure) -> Self {
        match failure {
            Failure::Retryable(error) => Self::Broken(error),
            Failure::Fatal(error) => Self::Lost(error),
        }
    }
}
