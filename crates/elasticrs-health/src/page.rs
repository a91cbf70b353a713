//! The page for browsers, and the events that keep it current.
//!
//! The page is an HTML file, the same one for every job. Its script shows texts about the job, which arrive as
//! server-sent events. The agent's loop renders these texts when the server asks it, once a second while at least one
//! browser listens to the events, so that the agent has no work for a page that is not open.
//!
//! - **PAGE-1** At most [`MAX_VIEWERS`] browsers listen. The limit of HEALTH-2 is for other connections.
//! - **PAGE-2** A browser gets an event at most once a second, and only if the text has changed. All browsers get the
//!   same text, which exists once in memory.
//! - **PAGE-3** A browser is disconnected if the buffers of its connection stay full, because it does not read, or if
//!   its machine does not acknowledge an event within [`UNREACHABLE`].

use std::os::fd::AsFd;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock, Mutex};
use std::time::{Duration, Instant};

use elasticrs_runtime::lock;
use nix::sys::socket::setsockopt;
use nix::sys::socket::sockopt::TcpUserTimeout;
use serde_json::json;
use sha2::{Digest, Sha256};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::watch;
use tokio::time::{sleep, sleep_until, timeout};

use crate::liveness::{FRESH, LivenessReport};

/// Maximum number of browsers that listen at the same time (PAGE-1).
pub const MAX_VIEWERS: usize = 8;
/// Path at which a browser gets the events of the page.
pub(crate) const EVENTS: &str = "/status/stream";
/// Minimum time between two events (PAGE-2).
const PERIOD: Duration = Duration::from_secs(1);
/// Time without an event after which the server sends an empty line to a browser, to notice a lost connection.
const SILENCE: Duration = Duration::from_secs(15);

/// Time without an acknowledgement of sent data after which the kernel closes the connection to a browser (PAGE-3).
const UNREACHABLE: Duration = Duration::from_secs(30);

pub(crate) const PAGE: &str = include_str!("page.html");

/// Value of the header `Content-Security-Policy` of the page. It allows the page to run only the script and to use only
/// the styles that are in the page itself, and to connect only to this server.
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

fn base64(bytes: &[u8]) -> String {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    let digits = bytes.chunks(3).flat_map(|three| {
        let bits = (0..3).fold(0, |bits, at| bits << 8 | usize::from(three.get(at).copied().unwrap_or(0)));
        (0..4).map(move |at| if at > three.len() { '=' } else { char::from(DIGITS[bits >> (18 - 6 * at) & 63]) })
    });
    digits.collect()
}

/// State of the page that is common to all browsers that listen to its events.
#[derive(Debug, Default)]
pub(crate) struct Live {
    viewers: AtomicUsize,
    /// True while [`keep_current`] runs, which asks the agent's loop for texts.
    is_kept_current: AtomicBool,
    /// True if the agent's loop is to render a text of the page before its next answer to the server.
    is_wanted: AtomicBool,
    /// The last text of the page that the agent's loop has rendered, a JSON value in one line. Empty before the first.
    text: Mutex<String>,
    /// The last event that was sent to browsers, in the format of server-sent events. Empty before the first event.
    event: watch::Sender<Arc<str>>,
}

impl Live {
    /// Returns true if the server has asked the agent's loop for a new text to show on the page. Later calls return
    /// false until the server asks again.
    pub(crate) fn take_request(&self) -> bool {
        self.is_wanted.swap(false, Ordering::Relaxed)
    }

    /// Returns the number of browsers that listen.
    pub(crate) fn viewers(&self) -> usize {
        self.viewers.load(Ordering::Relaxed)
    }

    pub(crate) fn set_text(&self, text: &str) {
        // Replace the line ends, because in an event they would begin another field. JSON has them only between values.
        *lock(&self.text) = text.replace(['\r', '\n'], " ");
    }

    /// Sends the last text of the page to all browsers. `stuck` is the reason why the agent's loop does not answer the
    /// server, so that it has rendered no newer text; `None` if it answers.
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

/// Permission of one browser to listen to the events of the page. While at least one browser has it, the text of the
/// page is kept current.
pub(crate) struct Seat(Arc<Live>);

impl Seat {
    /// Permits a browser to listen to the page's events. Returns `None` if [`MAX_VIEWERS`] browsers listen already.
    /// `ask` asks the agent's loop whether it is alive.
    pub(crate) fn take<Ask, Answer>(live: &Arc<Live>, ask: Ask) -> Option<Self>
    where
        Ask: Fn() -> Answer + 'static,
        Answer: Future<Output = LivenessReport> + 'static,
    {
        if live.viewers() >= MAX_VIEWERS {
            return None;
        }
        live.viewers.fetch_add(1, Ordering::Relaxed);
        if !live.is_kept_current.swap(true, Ordering::Relaxed) {
            // Delete the last event, because it is from the time when other browsers listened.
            live.event.send_replace("".into());
            tokio::task::spawn_local(keep_current(Arc::clone(live), ask));
        }
        Some(Self(Arc::clone(live)))
    }

    /// Sends the events of the page to a browser until it disconnects, or until an event is not sent within `limit`.
    pub(crate) async fn serve(self, mut stream: impl AsyncRead + AsyncWrite + AsFd + Unpin, limit: Duration) {
        // Ignore the error: a Unix socket does not have this option, and does not need it.
        let _ = setsockopt(&stream, TcpUserTimeout, &u32::try_from(UNREACHABLE.as_millis()).unwrap_or(u32::MAX));
        let mut events = self.0.event.subscribe();
        // Begin with the last event, because this browser has not received it.
        events.mark_changed();
        let mut next: Arc<str> = head_of_events().into();
        let mut ignored = [0; 64];
        loop {
            // A browser that does not read is treated as one that has disconnected.
            if !matches!(timeout(limit, stream.write_all(next.as_bytes())).await, Ok(Ok(()))) {
                return;
            }
            next = tokio::select! {
                changed = events.changed() => match changed {
                    Ok(()) => Arc::clone(&events.borrow_and_update()),
                    Err(_) => return,
                },
                // A browser sends only one request. So if a read returns, the client has disconnected, or is no browser.
                _ = stream.read(&mut ignored) => return,
                () = sleep(SILENCE) => ":\n\n".into(),
            };
        }
    }
}

impl Drop for Seat {
    fn drop(&mut self) {
        self.0.viewers.fetch_sub(1, Ordering::Relaxed);
    }
}

/// Asks the agent's loop for a text of the page once a second, and sends the text to all browsers, until no browser
/// listens.
async fn keep_current<Answer: Future<Output = LivenessReport>>(live: Arc<Live>, ask: impl Fn() -> Answer) {
    while live.viewers() > 0 {
        let next = Instant::now() + PERIOD;
        live.is_wanted.store(true, Ordering::Relaxed);
        let mut report = ask().await;
        if report.reason.is_none() && live.is_wanted.load(Ordering::Relaxed) {
            // The agent's loop has rendered no text: it was not asked, because its last answer was recent. Ask now.
            sleep(FRESH).await;
            report = ask().await;
        }
        live.tell(report.reason.as_deref());
        sleep_until(next.into()).await;
    }
    live.is_kept_current.store(false, Ordering::Relaxed);
}

/// Returns the head of the HTTP response whose body consists of the events, which follow one by one. It tells the
/// browser to connect again 2 s after a lost connection, and a proxy to pass each event on at once.
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
