//! Minimal HTTP/1.1 for the health server: one request per connection. Ignores most headers, and the bodies of `GET`
//! and `HEAD`.

use crate::page::POLICY;

/// Maximum length of a request head in bytes.
pub(crate) const MAX_HEAD: usize = 8 * 1024;

/// A request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Path of the request, without the query.
    pub path: String,
    /// Value of the `Host` header. `None` if the request has none.
    pub host: Option<String>,
    pub method: Method,
    /// Length of the body in bytes, from the `Content-Length` header. 0 if there is no such header.
    pub length: usize,
    /// True if the request has the header `Origin`. A browser adds it to each `POST`. It also adds it if the script of a
    /// page from another server sends the request.
    pub is_from_page: bool,
}

/// Method of a request. [`Method::Post`] is accepted only over the agent's Unix socket, not over TCP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Method {
    Get,
    Head,
    Post,
}

/// An HTTP response.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Response {
    pub status: u16,
    pub kind: &'static str,
    pub body: Vec<u8>,
}

/// Content type of plain text.
pub const TEXT: &str = "text/plain; charset=utf-8";
/// Content type of the page for browsers.
pub(crate) const HTML: &str = "text/html; charset=utf-8";
/// Content type of JSON.
pub const JSON: &str = "application/json";
/// Content type of the agent's replies to an order: lines that are JSON objects.
const LINES: &str = "application/x-ndjson";
/// Content type of Prometheus' text format.
pub(crate) const METRICS: &str = "text/plain; version=0.0.4; charset=utf-8";

impl Response {
    /// Creates a response with one line of text.
    pub fn text(status: u16, line: &str) -> Self {
        Self { status, kind: TEXT, body: format!("{line}\n").into_bytes() }
    }

    /// Returns the bytes to send for the response. The server closes the connection after sending them.
    pub fn bytes(&self, head_only: bool) -> Vec<u8> {
        let Self { status, kind, body } = self;
        let allow = if *status == 405 { "Allow: GET, HEAD\r\n" } else { "" };
        let policy = if *kind == HTML {
            format!("Content-Security-Policy: {}\r\nReferrer-Policy: no-referrer\r\n", *POLICY)
        } else {
            String::new()
        };
        let mut bytes = format!(
            "HTTP/1.1 {status} {}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n{allow}{policy}X-Content-Type-Options: nosniff\r\n\
             Cache-Control: no-store\r\nConnection: close\r\n\r\n",
            reason(*status),
            body.len(),
        )
        .into_bytes();
        if !head_only {
            bytes.extend_from_slice(body);
        }
        bytes
    }
}

/// Returns the head of a response without a length: lines follow one by one until the server closes the connection.
pub(crate) fn head_of_lines() -> String {
    format!("HTTP/1.1 200 OK\r\nContent-Type: {LINES}\r\nCache-Control: no-store\r\nConnection: close\r\n\r\n")
}

fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        403 => "Forbidden",
        404 => "Not Found",
        405 => "Method Not Allowed",
        413 => "Content Too Large",
        421 => "Misdirected Request",
        431 => "Request Header Fields Too Large",
        503 => "Service Unavailable",
        505 => "HTTP Version Not Supported",
        _ => "Bad Request",
    }
}

/// Returns the length of the request head, including the empty line after the headers. `None` if it is not complete.
pub fn head_length(bytes: &[u8]) -> Option<usize> {
    // Skip empty lines before the request line, as RFC 9112 recommends.
    let (mut begun, mut length) = (false, 0);
    for line in bytes.split_inclusive(|&byte| byte == b'\n') {
        let is_empty = matches!(line, b"\n" | b"\r\n");
        length += line.len();
        begun |= !is_empty;
        if begun && is_empty {
            return Some(length);
        }
    }
    None
}

/// Parses a complete request head. The error is the response to send if the request is invalid or not supported.
pub fn parse(head: &[u8]) -> Result<Request, Response> {
    let refused = || Response::text(400, "not an HTTP request");
    let line = head.split(|&byte| byte == b'\n').find(|line| !line.is_empty() && *line != b"\r").ok_or_else(refused)?;
    let line = str::from_utf8(line.strip_suffix(b"\r").unwrap_or(line)).map_err(|_| refused())?;
    let mut words = line.split(' ');
    let (Some(method), Some(target), Some(version), None) = (words.next(), words.next(), words.next(), words.next())
    else {
        return Err(refused());
    };
    if !version.starts_with("HTTP/") || target.is_empty() {
        return Err(refused());
    }
    if !version.starts_with("HTTP/1.") {
        return Err(Response::text(505, "HTTP/1.1, please"));
    }
    let method = match method {
        "GET" => Method::Get,
        "HEAD" => Method::Head,
        "POST" => Method::Post,
        _ => return Err(Response::text(405, "only GET and HEAD")),
    };
    let path = target.split(['?', '#']).next().unwrap_or_default();
    let length = match field(head, b"Content-Length")? {
        None => 0,
        Some(number) => number.parse().map_err(|_| Response::text(400, "Content-Length is no number"))?,
    };
    let is_from_page = field(head, b"Origin")?.is_some();
    Ok(Request { path: path.to_owned(), host: field(head, b"Host")?, method, length, is_from_page })
}

/// Returns the value of a header field. `None` if it is missing.
fn field(head: &[u8], wanted: &[u8]) -> Result<Option<String>, Response> {
    let fields = head.split(|&byte| byte == b'\n').skip_while(|line| line.trim_ascii().is_empty()).skip(1);
    let mut found = None;
    for line in fields {
        let Some(at) = line.iter().position(|&byte| byte == b':') else { continue };
        let (name, value) = (&line[..at], line[at + 1..].trim_ascii());
        // Reject a header such as `Host : x`, because some programs accept it as `Host` and others ignore it.
        if name.iter().any(u8::is_ascii_whitespace) {
            return Err(Response::text(400, "white space in the name of a field"));
        }
        let is_wanted = name.eq_ignore_ascii_case(wanted);
        if is_wanted && found.replace(String::from_utf8_lossy(value).into_owned()).is_some() {
            let name = String::from_utf8_lossy(wanted);
            return Err(Response::text(400, &format!("more than one {name}")));
        }
    }
    Ok(found)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_request_head_is_complete_after_its_empty_line() {
        assert_eq!(head_length(b""), None);
        assert_eq!(head_length(b"\r\n\r\n"), None);
        assert_eq!(head_length(b"GET / HTTP/1.1\r\nHost: x\r\n"), None);
        assert_eq!(head_length(b"GET / HTTP/1.1\r\nHost: x\r\n\r\nbody"), Some(27));
        assert_eq!(head_length(b"\r\nGET / HTTP/1.1\n\n"), Some(18));
    }

    #[test]
    fn a_request_line_is_parsed_or_refused_with_a_status() {
        let of = |head: &[u8]| parse(head).map_err(|response| response.status);
        let request = |path: &str, method, length| {
            Ok(Request { path: path.into(), host: None, method, length, is_from_page: false })
        };
        assert_eq!(of(b"GET /healthz?verbose=1 HTTP/1.1\r\n\r\n"), request("/healthz", Method::Get, 0));
        assert_eq!(of(b"\r\nHEAD / HTTP/1.0\n\n"), request("/", Method::Head, 0));
        assert_eq!(of(b"POST /do HTTP/1.1\ncontent-length: 12\n\n"), request("/do", Method::Post, 12));
        assert_eq!(of(b"PUT /healthz HTTP/1.1\r\n\r\n"), Err(405));
        for length in [&b"-1"[..], b"1 2", b"", b"99999999999999999999999", b"1\r\nContent-Length: 1"] {
            assert_eq!(of(&[b"POST /do HTTP/1.1\r\nContent-Length: ", length, b"\r\n\r\n"].concat()), Err(400));
        }
        assert_eq!(of(b"GET /healthz HTTP/2\r\n\r\n"), Err(505));
        for bad in [&b"GET\r\n\r\n"[..], b"GET  / HTTP/1.1\r\n\r\n", b"GET / FTP\n\n", b"\xff / HTTP/1.1\n\n", b""] {
            assert_eq!(of(bad), Err(400));
        }
    }

    #[test]
    fn the_host_header_is_parsed_and_ambiguous_headers_are_refused() {
        let of = |head: &[u8]| parse(head).map(|request| request.host).map_err(|response| response.status);
        assert_eq!(of(b"\r\nGET / HTTP/1.1\r\nA: Host: x\r\nhOST:  a:8 \r\n\r\n"), Ok(Some("a:8".into())));
        assert_eq!(of(b"GET / HTTP/1.1\nHost: a\nHost: b\n\n"), Err(400));
        for ambiguous in [&b"GET / HTTP/1.1\r\nHost : a\r\n\r\n"[..], b"GET / HTTP/1.1\nA: b\n Host: a\n\n"] {
            assert_eq!(of(ambiguous), Err(400));
        }
        assert_eq!(of(b"GET /Host: HTTP/1.1\n\n"), Ok(None));
    }

    #[test]
    fn a_response_has_a_content_length_and_a_405_lists_allowed_methods() {
        let bytes = Response::text(405, "no").bytes(true);
        let text = String::from_utf8(bytes).unwrap();
        assert!(text.starts_with("HTTP/1.1 405 Method Not Allowed\r\n"), "{text}");
        assert!(text.contains("Content-Length: 3\r\n") && text.contains("Allow: GET, HEAD\r\n"), "{text}");
        assert!(text.ends_with("\r\n\r\n"));
    }

    proptest! {
        #[test]
        fn random_bytes_are_parsed_or_refused_with_an_error_status(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            head_length(&bytes);
            if let Err(response) = parse(&bytes) {
                prop_assert!(response.status >= 400);
            }
        }
    }
}
