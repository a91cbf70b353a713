//! gRPC over one HTTP/2 connection: unary calls and streams.

use std::marker::PhantomData;

use bytes::{Buf, BufMut, Bytes, BytesMut};
use h2::client::{ResponseFuture, SendRequest};
use h2::{RecvStream, SendStream};
use http::header::{CONTENT_TYPE, HeaderMap, HeaderValue, TE};
use http::{Request, Response, StatusCode, Uri};
use prost::Message;

use super::errors::{EtcdError, Status, code};
use crate::types::MAX_ANSWER;

/// Reason why a call failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum CallError {
    /// The server answered with an error.
    Status(Status),
    /// The answer is not valid gRPC.
    Foreign(String),
    /// The answer is larger than [`MAX_ANSWER`]. Contains the length of the answer in bytes.
    TooLarge(usize),
    /// The server reset the stream of this call.
    Reset(String),
    /// The connection is broken.
    Broken(String),
}

impl CallError {
    /// Returns true if etcd answered with `error`.
    pub(super) fn is(&self, error: EtcdError) -> bool {
        matches!(self, Self::Status(status) if status.error == Some(error))
    }

    /// Returns true if the member does not have the requested revision, because the revision was compacted or does
    /// not exist yet.
    pub(super) fn is_out_of_history(&self) -> bool {
        self.is(EtcdError::Compacted) || self.is(EtcdError::FutureRevision)
    }
}

impl From<h2::Error> for CallError {
    fn from(error: h2::Error) -> Self {
        if error.is_reset() && error.is_remote() {
            Self::Reset(error.to_string())
        } else {
            Self::Broken(error.to_string())
        }
    }
}

/// Handle for making calls on a connection. Cheap to clone.
#[derive(Debug, Clone)]
pub(super) struct Channel {
    requests: SendRequest<Bytes>,
    /// Scheme and authority.
    base: String,
    token: Option<HeaderValue>,
}

impl Channel {
    /// Creates a channel. `base` is the scheme and authority, such as `http://host:2379`.
    pub(super) fn new(requests: SendRequest<Bytes>, base: String) -> Self {
        Self { requests, base, token: None }
    }

    /// Sets the authentication token for all further calls.
    pub(super) fn set_token(&mut self, token: &str) -> Result<(), CallError> {
        let token = HeaderValue::from_str(token);
        self.token = Some(token.map_err(|_| CallError::Foreign("a token that is no text".into()))?);
        Ok(())
    }

    /// Makes a unary call: sends one message and waits for the answer.
    pub(super) async fn call<A: Message + Default>(&self, path: &str, question: &impl Message) -> Result<A, CallError> {
        let (response, mut body) = self.begin(path).await?;
        body.send_data(framed(question), true)?;
        let mut answers = Answers::new(response);
        let answer = answers.next().await?;
        // Read the status that follows the answer, because a call can fail even after an answer was sent.
        match (answer, answers.next().await?) {
            (Some(answer), None) => Ok(answer),
            (None, _) => Err(CallError::Foreign("a call without an answer".into())),
            (Some(_), Some(_)) => Err(CallError::Foreign("a call with two answers".into())),
        }
    }

    /// Opens a bidirectional stream of messages.
    pub(super) async fn stream<A: Message + Default>(&self, path: &str) -> Result<Duplex<A>, CallError> {
        let (response, body) = self.begin(path).await?;
        Ok(Duplex { body, answers: Answers::new(response) })
    }

    async fn begin(&self, path: &str) -> Result<(ResponseFuture, SendStream<Bytes>), CallError> {
        let mut requests = self.requests.clone().ready().await?;
        let uri: Uri = format!("{}{path}", self.base).parse().map_err(|error| CallError::Broken(format!("{error}")))?;
        let mut request = Request::post(uri).body(()).map_err(|error| CallError::Broken(error.to_string()))?;
        let headers = request.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
        headers.insert(TE, HeaderValue::from_static("trailers"));
        // With this header, a member returns an error if it has no leader, instead of waiting for one.
        headers.insert("hasleader", HeaderValue::from_static("true"));
        if let Some(token) = &self.token {
            headers.insert("token", token.clone());
        }
        Ok(requests.send_request(request, false)?)
    }
}

/// A bidirectional stream of messages. Either side can close it, and dropping it closes it.
#[derive(Debug)]
pub(super) struct Duplex<A> {
    body: SendStream<Bytes>,
    answers: Answers<A>,
}

impl<A: Message + Default> Duplex<A> {
    pub(super) fn send(&mut self, question: &impl Message) -> Result<(), CallError> {
        Ok(self.body.send_data(framed(question), false)?)
    }

    /// Returns the next message. Cancel-safe: no message is lost if the future is dropped.
    pub(super) async fn next(&mut self) -> Result<A, CallError> {
        let next = self.answers.next().await?;
        next.ok_or_else(|| CallError::Broken("the server has ended a stream".into()))
    }
}

impl<A> Drop for Duplex<A> {
    fn drop(&mut self) {
        self.body.send_reset(h2::Reason::CANCEL);
    }
}

#[derive(Debug)]
enum Body {
    Awaited(ResponseFuture),
    Open(RecvStream),
}

/// Messages that the server sends on a stream.
#[derive(Debug)]
struct Answers<A> {
    body: Body,
    buffer: BytesMut,
    kind: PhantomData<A>,
}

impl<A: Message + Default> Answers<A> {
    fn new(response: ResponseFuture) -> Self {
        Self { body: Body::Awaited(response), buffer: BytesMut::new(), kind: PhantomData }
    }

    /// Returns the next message, or `None` if the server has closed the stream without an error.
    async fn next(&mut self) -> Result<Option<A>, CallError> {
        loop {
            if let Some(message) = cut(&mut self.buffer)? {
                let message = A::decode(message).map_err(|error| CallError::Foreign(error.to_string()))?;
                return Ok(Some(message));
            }
            match &mut self.body {
                Body::Awaited(response) => self.body = Body::Open(checked(response.await?)?),
                Body::Open(stream) => match stream.data().await {
                    Some(bytes) => {
                        let bytes = bytes?;
                        // Return the bytes to the flow-control window, so that the server can send more data.
                        stream.flow_control().release_capacity(bytes.len())?;
                        self.buffer.extend_from_slice(&bytes);
                    }
                    None => return status(stream.trailers().await?.as_ref()).map(|()| None),
                },
            }
        }
    }
}

/// Encodes a message for gRPC: a zero byte ("not compressed"), the length, and the message itself.
fn framed(message: &impl Message) -> Bytes {
    let length = message.encoded_len();
    let mut bytes = BytesMut::with_capacity(5 + length);
    bytes.put_u8(0);
    // The length always fits, because requests are limited to much less than 4 GiB.
    bytes.put_u32(u32::try_from(length).unwrap_or(u32::MAX));
    bytes.put_slice(&message.encode_to_vec());
    bytes.freeze()
}

/// Removes the first message from the buffer and returns it. Returns `None` if the message is incomplete.
fn cut(buffer: &mut BytesMut) -> Result<Option<Bytes>, CallError> {
    let Some(&[flag, a, b, c, d]) = buffer.first_chunk() else { return Ok(None) };
    let length = usize::try_from(u32::from_be_bytes([a, b, c, d])).unwrap_or(usize::MAX);
    if flag != 0 {
        return Err(CallError::Foreign(format!("a message of {length} bytes, flag {flag}")));
    }
    if length > MAX_ANSWER {
        return Err(CallError::TooLarge(length));
    }
    if buffer.len() - 5 < length {
        return Ok(None);
    }
    buffer.advance(5);
    Ok(Some(buffer.split_to(length).freeze()))
}

/// Returns the body of a response. Fails if the response is not gRPC or reports an error in its headers.
fn checked(response: Response<RecvStream>) -> Result<RecvStream, CallError> {
    let (head, body) = response.into_parts();
    let is_grpc = head.headers.get(CONTENT_TYPE).is_some_and(|value| value.as_bytes().starts_with(b"application/grpc"));
    if head.status != StatusCode::OK || !is_grpc {
        return Err(CallError::Foreign(format!("it answers by HTTP status {}", head.status.as_u16())));
    }
    // If a call fails immediately, the status is in the response headers and there is no body.
    if head.headers.contains_key(STATUS) {
        status(Some(&head.headers))?;
    }
    Ok(body)
}

const STATUS: &str = "grpc-status";

fn status(headers: Option<&HeaderMap>) -> Result<(), CallError> {
    let text = |name: &str| headers.and_then(|headers| headers.get(name)).and_then(|value| value.to_str().ok());
    let Some(code) = text(STATUS).and_then(|code| code.parse().ok()) else {
        return Err(CallError::Broken("an answer was cut off".into()));
    };
    if code == code::OK {
        return Ok(());
    }
    Err(CallError::Status(Status::new(code, &unquoted(text("grpc-message").unwrap_or_default()))))
}

/// Decodes a percent-encoded string (`%XX`).
fn unquoted(text: &str) -> String {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&first, after)) = rest.split_first() {
        let quoted = after.first_chunk::<2>().filter(|_| first == b'%');
        let byte = quoted.and_then(|digits| u8::from_str_radix(str::from_utf8(digits).ok()?, 16).ok());
        bytes.push(byte.unwrap_or(first));
        rest = if byte.is_some() { &after[2..] } else { after };
    }
    String::from_utf8_lossy(&bytes).into_owned()
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use crate::etcd::messages::KeyValue;

    #[test]
    fn percent_encoded_text_is_decoded() {
        assert_eq!(unquoted("a%20b%C3%A4%zz%"), "a bä%zz%");
    }

    #[test]
    fn an_answer_that_is_too_large_is_refused_by_its_length_prefix() {
        let length = MAX_ANSWER + 1;
        let mut buffer = BytesMut::from(&[&[0][..], &u32::try_from(length).unwrap().to_be_bytes()].concat()[..]);
        assert_eq!(cut(&mut buffer), Err(CallError::TooLarge(length)));
    }

    #[test]
    fn an_answer_without_a_grpc_status_counts_as_broken() {
        assert!(matches!(status(None), Err(CallError::Broken(_))));
        let mut headers = HeaderMap::new();
        headers.insert(STATUS, HeaderValue::from_static("0"));
        assert_eq!(status(Some(&headers)), Ok(()));
        headers.insert(STATUS, HeaderValue::from_static("14"));
        headers.insert("grpc-message", HeaderValue::from_static("no%20leader"));
        assert_eq!(status(Some(&headers)), Err(CallError::Status(Status::new(14, "no leader"))));
    }

    proptest! {
        #[test]
        fn the_messages_do_not_depend_on_how_the_stream_is_split(values in vec(vec(any::<u8>(), 0..50), 0..8), size in 1..30_usize) {
            let sent: Vec<_> = values.into_iter().map(|value| KeyValue { value, ..KeyValue::default() }).collect();
            let stream: Vec<u8> = sent.iter().flat_map(|message| framed(message).to_vec()).collect();
            let mut buffer = BytesMut::new();
            let mut read = Vec::new();
            for chunk in stream.chunks(size) {
                buffer.extend_from_slice(chunk);
                while let Some(message) = cut(&mut buffer).unwrap() {
                    read.push(KeyValue::decode(message).unwrap());
                }
            }
            prop_assert_eq!(read, sent);
            prop_assert!(buffer.is_empty());
        }

        #[test]
        fn random_bytes_do_not_cause_a_large_allocation(bytes in vec(any::<u8>(), 0..300)) {
            let mut buffer = BytesMut::new();
            buffer.extend_from_slice(&bytes);
            while let Ok(Some(_)) = cut(&mut buffer) {}
            prop_assert!(buffer.capacity() <= 1024);
        }
    }
}
