//! The page for browsers, and the events that keep it current.
//!
//! The page is the same for every job: it shows the texts that come as server-sent events. The agent's loop renders
//! these texts when the server asks it, once a second while at least one browser listens, so that nobody pays for a
//! page that is not open.
//!
//! - **PAGE-1** At most [`MAX_VIEWERS`] browsers listen. They do not count as connections in the sense of HEALTH-2.
//! - **PAGE-2** A browser gets an event at most once a second, and only if the text has changed. All browsers get the
//!   same text, which exists once in memory.
//! - **PAGE-3** A browser that does not read is disconnected after [`CLIENT_LIMIT`].

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use elasticrs_runtime::lock;
use serde_json::json;
use sha2::{Digest, Sha256};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::watch;
use tokio::time::{sleep, sleep_until, timeout};

use crate::http::{HTML, Response};
use crate::liveness::FRESH;
use crate::server::{CLIENT_LIMIT, Shared, Stream};

/// Maximum number of browsers that listen at the same time (PAGE-1).
pub const MAX_VIEWERS: usize = 8;
/// Path of the events.
pub(crate) const EVENTS: &str = "/status/stream";
/// Minimum time between two events (PAGE-2).
const PERIOD: Duration = Duration::from_secs(1);
/// Time without an event after which a browser gets an empty line, so that a lost connection is noticed.
const SILENCE: Duration = Duration::from_secs(15);

const PAGE: &str = include_str!("page.html");

/// Value of the header `Content-Security-Policy` of the page: it runs the script and uses the styles that are in it,
/// and connects only to this server.
pub(crate) static POLICY: LazyLock<String> = LazyLock::new(|| {
    let hash_of = |tag: &str| {
        let inside = PAGE.split_once(&format!("<{tag}>")).and_then(|(_, rest)| rest.split_once(&format!("</{tag}>")));
        base64(&Sha256::digest(inside.map_or("", |(inside, _)| inside)))
    };
    format!(
        "default-src 'none'; style-src 'sha256-{}'; script-src 'sha256-{}'; connect-src 'self'; base-uri 'none'; \
         form-action 'none'; frame-ancestors 'none'",
        hash_of("style"),
        hash_of("script"),
    )
});

/// Returns the page.
pub(crate) fn page() -> Response {
    Response { status: 200, kind: HTML, body: PAGE.into() }
}

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digits = bytes.chunks(3).flat_map(|three| {
        let bits = (0..3).fold(0, |bits, at| bits << 8 | usize::from(three.get(at).copied().unwrap_or(0)));
        (0..4).map(move |at| if at > three.len() { '=' } else { char::from(DIGITS[bits >> (18 - 6 * at) & 63]) })
    });
    digits.collect()
}

/// What all browsers that listen have in common.
#[derive(Debug, Default)]
pub(crate) struct Live {
    viewers: AtomicUsize,
    /// True while a task asks the agent's loop for texts.
    is_kept_current: AtomicBool,
    /// True if the agent's loop is to render a text with its next answer.
    is_wanted: AtomicBool,
    /// The text that the agent's loop has rendered last, a JSON value in one line. Empty before the first one.
    text: Mutex<String>,
    /// The event that browsers get, in the format of server-sent events. Empty before the first one.
    event: watch::Sender<Arc<str>>,
}

impl Live {
    /// Returns true if the agent's loop is to render a text, once for each request.
    pub(crate) fn take_request(&self) -> bool {
        self.is_wanted.swap(false, Ordering::Relaxed)
    }

    /// Returns the number of browsers that listen.
    pub(crate) fn viewers(&self) -> usize {
        self.viewers.load(Ordering::Relaxed)
    }

    pub(crate) fn set_text(&self, text: &str) {
        // JSON has line ends only between values. In an event, they would begin another field.
        *lock(&self.text) = text.replace(['\r', '\n'], " ");
    }

    /// Tells all browsers the last text. `stuck` is the reason why the agent's loop has rendered none since then.
    pub(crate) fn tell(&self, stuck: Option<&str>) {
        let text = lock(&self.text);
        if text.is_empty() && stuck.is_none() {
            return;
        }
        let view = if text.is_empty() { "null" } else { &text };
        let event = format!("data: {{\"stuck\":{},\"view\":{view}}}\n\n", json!(stuck));
        drop(text);
        self.event.send_if_modified(|last| {
            let is_new = **last != *event;
            if is_new {
                *last = event.into();
            }
            is_new
        });
    }
}

/// Permission of one browser to listen. While a browser has one, a task keeps the text current.
pub(crate) struct Seat(Arc<Shared>);

impl Seat {
    /// Returns `None` if too many browsers listen already.
    pub(crate) fn take(shared: &Arc<Shared>) -> Option<Self> {
        let live = &shared.live;
        if live.viewers() >= MAX_VIEWERS {
            return None;
        }
        live.viewers.fetch_add(1, Ordering::Relaxed);
        if !live.is_kept_current.swap(true, Ordering::Relaxed) {
            // This is an event from an earlier time, when other browsers listened.
            live.event.send_replace("".into());
            tokio::task::spawn_local(keep_current(Arc::clone(shared)));
        }
        Some(Self(Arc::clone(shared)))
    }

    /// Sends the events to a browser until it disconnects.
    pub(crate) async fn serve(self, mut stream: impl Stream) {
        let mut events = self.0.live.event.subscribe();
        // The last event is new to this browser.
        events.mark_changed();
        let mut next: Arc<str> = head_of_events().into();
        let mut ignored = [0; 64];
        loop {
            // A browser that does not read is treated as one that has disconnected.
            if !matches!(timeout(CLIENT_LIMIT, stream.write_all(next.as_bytes())).await, Ok(Ok(()))) {
                return;
            }
            next = tokio::select! {
                changed = events.changed() => match changed {
                    Ok(()) => Arc::clone(&events.borrow_and_update()),
                    Err(_) => return,
                },
                // A browser sends nothing more, so this is the end of the connection or not a browser.
                _ = stream.read(&mut ignored) => return,
                () = sleep(SILENCE) => ":\n\n".into(),
            };
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.live.viewers.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Asks the agent's loop for a text once a second, and tells it to all browsers, until none listens.
async fn keep_current(shared: Arc<Shared>) {
    let live = &shared.live;
    while live.viewers() > 0 {
        let next = Instant::now() + PERIOD;
        live.is_wanted.store(true, Ordering::Relaxed);
        let mut report = shared.ask().await;
        if report.reason.is_none() && live.is_wanted.load(Ordering::Relaxed) {
            // The loop has not been asked, because its answer to an earlier request was still fresh.
            sleep(FRESH).await;
            report = shared.ask().await;
        }
        live.tell(report.reason.as_deref());
        sleep_until(next.into()).await;
    }
    live.is_kept_current.store(false, Ordering::Relaxed);
}

/// Returns the head of a response to which events are added one by one. It tells the browser to connect again 2 s
/// after a lost connection, and a proxy not to wait for more.
fn head_of_events() -> &'static str {
    "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nCache-Control: no-store\r\nX-Accel-Buffering: no\r\n\
     Connection: close\r\n\r\nretry: 2000\n\n"
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_test_vectors_of_base64_are_encoded() {
        let of = |text: &str| base64(text.as_bytes());
        assert_eq!(["", "f", "fo", "foo", "foobar"].map(of), ["", "Zg==", "Zm8=", "Zm9v", "Zm9vYmFy"]);
        assert_eq!(base64(&[0xfb, 0xff]), "+/8=");
    }

    #[test]
    fn browsers_get_an_event_only_if_the_text_or_the_agent_has_changed() {
        let live = Live::default();
        let mut events = live.event.subscribe();
        let mut told = |stuck| {
            live.tell(stuck);
            events.has_changed().unwrap().then(|| events.borrow_and_update().to_string())
        };
        assert_eq!(told(None), None);
        assert_eq!(told(Some("a")).as_deref(), Some("data: {\"stuck\":\"a\",\"view\":null}\n\n"));
        live.set_text("{\"a\":\n1}");
        assert_eq!(told(None).as_deref(), Some("data: {\"stuck\":null,\"view\":{\"a\": 1}}\n\n"));
        live.set_text("{\"a\": 1}");
        assert_eq!(told(None), None);
        assert_eq!(
            told(Some("its \"loop\"")).as_deref(),
            Some("data: {\"stuck\":\"its \\\"loop\\\"\",\"view\":{\"a\": 1}}\n\n")
        );
        assert_eq!(told(Some("its \"loop\"")), None);
    }
}
