//! Errors that etcd reports to its clients. Pure.
//!
//! gRPC reports an error as a code and a text. etcd publishes its pairs of code and text in the package `rpctypes` of
//! its API. The pairs are the same in all versions. [`TABLE`] contains those that this client handles specially. For
//! all other errors, the client considers only the code.

/// Status codes of gRPC.
pub(super) mod code {
    pub(in crate::etcd) const OK: u32 = 0;
    pub(in crate::etcd) const INVALID_ARGUMENT: u32 = 3;
    pub(in crate::etcd) const NOT_FOUND: u32 = 5;
    pub(in crate::etcd) const PERMISSION_DENIED: u32 = 7;
    pub(in crate::etcd) const RESOURCE_EXHAUSTED: u32 = 8;
    pub(in crate::etcd) const FAILED_PRECONDITION: u32 = 9;
    pub(in crate::etcd) const OUT_OF_RANGE: u32 = 11;
    pub(in crate::etcd) const UNIMPLEMENTED: u32 = 12;
    pub(in crate::etcd) const UNAUTHENTICATED: u32 = 16;
}

/// An etcd error that this client handles specially.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum EtcdError {
    /// Authentication is disabled in etcd, so it issues no tokens.
    AuthDisabled,
    /// The user does not exist, or the password is wrong.
    AuthFailed,
    /// A user or role was changed after this connection's token was issued.
    AuthRevisionOld,
    /// The requested revision is no longer in the history.
    Compacted,
    /// The requested revision does not exist yet.
    FutureRevision,
    LeaseExists,
    LeaseNotFound,
    /// A member has run out of space, so etcd rejects all writes.
    NoSpace,
    PermissionDenied,
    RequestTooLarge,
    TooManyOps,
    /// The member has too many unfinished requests.
    TooManyRequests,
    /// etcd requires authentication, but the request had no token.
    UserEmpty,
}

const TABLE: [(EtcdError, u32, &str); 13] = [
    (EtcdError::AuthDisabled, code::FAILED_PRECONDITION, "authentication is not enabled"),
    (EtcdError::AuthFailed, code::INVALID_ARGUMENT, "authentication failed, invalid user ID or password"),
    (EtcdError::AuthRevisionOld, code::INVALID_ARGUMENT, "revision of auth store is old"),
    (EtcdError::Compacted, code::OUT_OF_RANGE, "mvcc: required revision has been compacted"),
    (EtcdError::FutureRevision, code::OUT_OF_RANGE, "mvcc: required revision is a future revision"),
    (EtcdError::LeaseExists, code::FAILED_PRECONDITION, "lease already exists"),
    (EtcdError::LeaseNotFound, code::NOT_FOUND, "requested lease not found"),
    (EtcdError::NoSpace, code::RESOURCE_EXHAUSTED, "mvcc: database space exceeded"),
    (EtcdError::PermissionDenied, code::PERMISSION_DENIED, "permission denied"),
    (EtcdError::RequestTooLarge, code::INVALID_ARGUMENT, "request is too large"),
    (EtcdError::TooManyOps, code::INVALID_ARGUMENT, "too many operations in txn request"),
    (EtcdError::TooManyRequests, code::RESOURCE_EXHAUSTED, "too many requests"),
    (EtcdError::UserEmpty, code::INVALID_ARGUMENT, "user name is empty"),
];

/// Prefix of every text in [`TABLE`], as etcd sends it.
const PREFIX: &str = "etcdserver: ";

/// A gRPC status that reports an error.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Status {
    pub(super) code: u32,
    /// Error from [`TABLE`] that matches the code and the text. `None` if there is no match.
    pub(super) error: Option<EtcdError>,
    /// Text of the error for the user, without etcd's prefix.
    pub(super) message: String,
}

impl Status {
    /// Creates a status from the code and the text that the server sent.
    pub(super) fn new(code: u32, text: &str) -> Self {
        let error = text.strip_prefix(PREFIX).and_then(|text| find(text, |known| known == code));
        Self { code, error, message: text.trim_start_matches(PREFIX).to_owned() }
    }
}

/// Returns the error in [`TABLE`] that matches the reason with which etcd canceled a watch. The reason is formatted
/// like a gRPC status in Go: `rpc error: code = NAME desc = TEXT`.
pub(super) fn cancel_error(reason: &str) -> Option<EtcdError> {
    let (_, text) = reason.strip_prefix("rpc error: code = ")?.split_once(" desc = ")?;
    find(text.strip_prefix(PREFIX)?, |_| true)
}

fn find(text: &str, is_code: impl Fn(u32) -> bool) -> Option<EtcdError> {
    TABLE.iter().find(|(_, code, known)| is_code(*code) && *known == text).map(|(error, ..)| *error)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_error_is_identified_by_its_code_and_its_whole_text() {
        for (error, code, text) in TABLE {
            let sent = format!("etcdserver: {text}");
            assert_eq!(Status::new(code, &sent), Status { code, error: Some(error), message: text.to_owned() });
            assert_eq!(Status::new(code + 100, &sent).error, None);
            assert_eq!(Status::new(code, text).error, None);
            assert_eq!(Status::new(code, &format!("{sent}, or so")).error, None);
            assert_eq!(cancel_error(&format!("rpc error: code = Name desc = {sent}")), Some(error));
        }
    }

    #[test]
    fn an_unknown_error_text_is_kept_but_matches_no_known_error() {
        let status = Status::new(code::INVALID_ARGUMENT, "etcdserver: too many users");
        assert_eq!((status.error, &*status.message), (None, "too many users"));
        assert_eq!(Status::new(2, "permission denied").error, None);
        assert_eq!(cancel_error("permission denied"), None);
        assert_eq!(cancel_error("rpc error: code = Unknown desc = permission denied"), None);
    }
}
