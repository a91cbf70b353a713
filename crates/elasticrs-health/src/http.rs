//! Minimal HTTP/1.1 for the health server: one `GET` or `HEAD` request per connection. Ignores request bodies and
//! most headers.

/// Maximum length of a request head in bytes.
pub(crate) const MAX_HEAD: usize = 8 * 1024;

/// A request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    /// Path of the request, without the query.
    pub path: String,
    /// Value of the `Host` header. `None` if the request has none.
    pub host: Option<String>,
    pub head_only: bool,
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
/// Content type of JSON.
pub const JSON: &str = "application/json";
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
        let mut bytes = format!(
            "HTTP/1.1 {status} {}\r\nContent-Type: {kind}\r\nContent-Length: {}\r\n{allow}Cache-Control: no-store\r\n\
             Connection: close\r\n\r\n",
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

fn reason(status: u16) -> &'static str {
    match status {
        200 => "OK",
        404 => "Not Found",
        405 => "Method Not Allowed",
        421 => "Misdirected Request",
        431 => "Request Header Fields Too Large",
        503 => "Service Unavailable",
        505 => "HTTP Version Not Supported",
        _ => "Bad Request",
    }
}

/// Returns true if the request head is complete, including the empty line after the headers.
pub fn is_whole(bytes: &[u8]) -> bool {
    let mut lines = bytes.split_inclusive(|&byte| byte == b'\n');
    // Skip empty lines before the request line, as RFC 9112 recommends.
    let mut begun = false;
    lines.any(|line| {
        let is_empty = matches!(line, b"\n" | b"\r\n");
        begun |= !is_empty;
        begun && is_empty
    })
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
    let head_only = match method {
        "GET" => false,
        "HEAD" => true,
        _ => return Err(Response::text(405, "only GET and HEAD")),
    };
    let path = target.split(['?', '#']).next().unwrap_or_default();
    Ok(Request { path: path.to_owned(), host: host(head)?, head_only })
}

fn host(head: &[u8]) -> Result<Option<String>, Response> {
    let fields = head.split(|&byte| byte == b'\n').skip_while(|line| line.trim_ascii().is_empty()).skip(1);
    let mut host = None;
    for line in fields {
        let Some(at) = line.iter().position(|&byte| byte == b':') else { continue };
        let (name, value) = (&line[..at], line[at + 1..].trim_ascii());
        // Reject a header such as `Host : x`, because some programs accept it as `Host` and others ignore it.
        if name.iter().any(u8::is_ascii_whitespace) {
            return Err(Response::text(400, "white space in the name of a field"));
        }
        let is_host = name.eq_ignore_ascii_case(b"host");
        if is_host && host.replace(String::from_utf8_lossy(value).into_owned()).is_some() {
            return Err(Response::text(400, "more than one Host"));
        }
    }
    Ok(host)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_request_head_is_complete_after_its_empty_line() {
        assert!(!is_whole(b""));
        assert!(!is_whole(b"\r\n\r\n"));
        assert!(!is_whole(b"GET / HTTP/1.1\r\nHost: x\r\n"));
        assert!(is_whole(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n"));
        assert!(is_whole(b"\r\nGET / HTTP/1.1\n\n"));
    }

    #[test]
    fn a_request_line_is_parsed_or_refused_with_a_status() {
        let of = |head: &[u8]| parse(head).map_err(|response| response.status);
        let request = |path: &str, head_only| Ok(Request { path: path.into(), host: None, head_only });
        assert_eq!(of(b"GET /healthz?verbose=1 HTTP/1.1\r\n\r\n"), request("/healthz", false));
        assert_eq!(of(b"\r\nHEAD / HTTP/1.0\n\n"), request("/", true));
        assert_eq!(of(b"POST /healthz HTTP/1.1\r\n\r\n"), Err(405));
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
            is_whole(&bytes);
            if let Err(response) = parse(&bytes) {
                prop_assert!(response.status >= 400);
            }
        }
    }
}
