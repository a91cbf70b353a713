//! The messages of etcd's v3 API that this client uses, with etcd's field numbers.
//!
//! Fields that are neither sent nor read are omitted, because protobuf skips unknown fields.

use prost::{Enumeration, Message, Oneof};

/// Defines messages. The parentheses before a field contain the arguments of prost's attribute for the field.
macro_rules! messages {
    ($($name:ident { $($(#[$doc:meta])* ($($prost:tt)*) $field:ident: $type:ty,)* })*) => {
        $(
            #[derive(Clone, PartialEq, Message)]
            pub(super) struct $name {
                $($(#[$doc])* #[prost($($prost)*)] pub(super) $field: $type,)*
            }
        )*
    };
}

messages! {
    Header {
        (uint64, tag = "1") cluster_id: u64,
        (int64, tag = "3") revision: i64,
    }

    KeyValue {
        (bytes = "vec", tag = "1") key: Vec<u8>,
        (int64, tag = "2") create_revision: i64,
        (int64, tag = "3") mod_revision: i64,
        (bytes = "vec", tag = "5") value: Vec<u8>,
    }

    RangeRequest {
        (bytes = "vec", tag = "1") key: Vec<u8>,
        /// End of the range, exclusive. Empty to read only `key`.
        (bytes = "vec", tag = "2") range_end: Vec<u8>,
        (int64, tag = "3") limit: i64,
        /// Revision to read. 0 for the newest.
        (int64, tag = "4") revision: i64,
        (enumeration = "SortOrder", tag = "5") sort_order: i32,
        (enumeration = "SortTarget", tag = "6") sort_target: i32,
        (bool, tag = "8") keys_only: bool,
        (int64, tag = "12") min_create_revision: i64,
        (int64, tag = "13") max_create_revision: i64,
    }

    RangeResponse {
        (message, optional, tag = "1") header: Option<Header>,
        (message, repeated, tag = "2") kvs: Vec<KeyValue>,
    }

    PutRequest {
        (bytes = "vec", tag = "1") key: Vec<u8>,
        (bytes = "vec", tag = "2") value: Vec<u8>,
        (int64, tag = "3") lease: i64,
        /// True to keep the current lease of the key. The key must exist.
        (bool, tag = "6") ignore_lease: bool,
    }

    DeleteRangeRequest {
        (bytes = "vec", tag = "1") key: Vec<u8>,
        (bytes = "vec", tag = "2") range_end: Vec<u8>,
    }

    DeleteRangeResponse {
        (int64, tag = "2") deleted: i64,
    }

    RequestOp {
        (oneof = "Request", tags = "1, 2, 3, 4") request: Option<Request>,
    }

    ResponseOp {
        (oneof = "Response", tags = "1, 2, 3, 4") response: Option<Response>,
    }

    Compare {
        (enumeration = "CompareResult", tag = "1") result: i32,
        (enumeration = "CompareTarget", tag = "2") target: i32,
        (bytes = "vec", tag = "3") key: Vec<u8>,
        (oneof = "Operand", tags = "5, 6, 7") operand: Option<Operand>,
    }

    TxnRequest {
        (message, repeated, tag = "1") compare: Vec<Compare>,
        (message, repeated, tag = "2") success: Vec<RequestOp>,
        (message, repeated, tag = "3") failure: Vec<RequestOp>,
    }

    TxnResponse {
        (message, optional, tag = "1") header: Option<Header>,
        (bool, tag = "2") succeeded: bool,
        (message, repeated, tag = "3") responses: Vec<ResponseOp>,
    }

    LeaseGrantRequest {
        /// Time to live in seconds.
        (int64, tag = "1") ttl: i64,
        /// ID of the lease. 0 lets the server choose one.
        (int64, tag = "2") id: i64,
    }

    LeaseGrantResponse {
        (message, optional, tag = "1") header: Option<Header>,
        (int64, tag = "2") id: i64,
        (int64, tag = "3") ttl: i64,
    }

    LeaseRevokeRequest {
        (int64, tag = "1") id: i64,
    }

    KeepAliveRequest {
        (int64, tag = "1") id: i64,
    }

    KeepAliveResponse {
        (message, optional, tag = "1") header: Option<Header>,
        (int64, tag = "2") id: i64,
        /// Remaining time to live in seconds. 0 if the lease does not exist.
        (int64, tag = "3") ttl: i64,
    }

    WatchRequest {
        (oneof = "WatchCommand", tags = "1, 2") command: Option<WatchCommand>,
    }

    WatchCreate {
        (bytes = "vec", tag = "1") key: Vec<u8>,
        (bytes = "vec", tag = "2") range_end: Vec<u8>,
        (int64, tag = "3") start_revision: i64,
        (int64, tag = "7") watch_id: i64,
    }

    WatchCancel {
        (int64, tag = "1") watch_id: i64,
    }

    WatchResponse {
        (message, optional, tag = "1") header: Option<Header>,
        (int64, tag = "2") watch_id: i64,
        (bool, tag = "4") canceled: bool,
        /// Oldest revision that is still available. etcd sets it together with `canceled` if the watch needs older
        /// revisions.
        (int64, tag = "5") compact_revision: i64,
        (string, tag = "6") cancel_reason: String,
        (message, repeated, tag = "11") events: Vec<WatchEvent>,
    }

    WatchEvent {
        (enumeration = "EventKind", tag = "1") kind: i32,
        (message, optional, tag = "2") kv: Option<KeyValue>,
    }

    AuthenticateRequest {
        (string, tag = "1") name: String,
        (string, tag = "2") password: String,
    }

    AuthenticateResponse {
        (string, tag = "2") token: String,
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Enumeration)]
pub(super) enum SortOrder {
    None = 0,
    Descend = 2,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Enumeration)]
pub(super) enum SortTarget {
    Key = 0,
    Create = 2,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum Request {
    #[prost(message, tag = "1")]
    Range(RangeRequest),
    #[prost(message, tag = "2")]
    Put(PutRequest),
    #[prost(message, tag = "3")]
    DeleteRange(DeleteRangeRequest),
    #[prost(message, tag = "4")]
    Txn(TxnRequest),
}

impl From<Request> for RequestOp {
    fn from(request: Request) -> Self {
        Self { request: Some(request) }
    }
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum Response {
    #[prost(message, tag = "1")]
    Range(RangeResponse),
    #[prost(message, tag = "2")]
    Put(()),
    #[prost(message, tag = "3")]
    DeleteRange(DeleteRangeResponse),
    #[prost(message, tag = "4")]
    Txn(TxnResponse),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Enumeration)]
pub(super) enum CompareResult {
    Equal = 0,
    Greater = 1,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Enumeration)]
pub(super) enum CompareTarget {
    Version = 0,
    Create = 1,
    Mod = 2,
    Value = 3,
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum Operand {
    #[prost(int64, tag = "5")]
    CreateRevision(i64),
    #[prost(int64, tag = "6")]
    ModRevision(i64),
    #[prost(bytes, tag = "7")]
    Value(Vec<u8>),
}

#[derive(Clone, PartialEq, Oneof)]
pub(super) enum WatchCommand {
    #[prost(message, tag = "1")]
    Create(WatchCreate),
    #[prost(message, tag = "2")]
    Cancel(WatchCancel),
}

impl From<WatchCommand> for WatchRequest {
    fn from(command: WatchCommand) -> Self {
        Self { command: Some(command) }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Enumeration)]
pub(super) enum EventKind {
    Put = 0,
    Delete = 1,
}
