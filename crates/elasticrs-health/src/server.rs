//! The health server: its handle, its thread, and its responses.

use std::collections::VecDeque;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use elasticrs_runtime::door::{Door, Purpose, part};
use elasticrs_runtime::listen::{ListenError, Port, listen};
use elasticrs_runtime::lock;
use elasticrs_runtime::notices::{Notices, Tell};
use elasticrs_runtime::readings::{Heartbeat, Readings, Source};
use elasticrs_runtime::runtime::{Runtime, Spawn, Task};
use elasticrs_runtime::threads::WakeFd;
use elasticrs_sys::clock::Stamp;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{timeout, timeout_at};

use crate::http::{self, JSON, MAX_HEAD, METRICS, Request, Response};
use crate::liveness::{Liveness, LivenessReport, NextStep};
use crate::log_sizes::{LogFile, LogSizes};
use crate::metrics::{Moment, Registry, State, usages};
use crate::names;
use crate::processes::Worker;

/// Maximum number of simultaneous connections. See HEALTH-2.
pub const MAX_CONNECTIONS: usize = 64;
/// Time limit for receiving a client's request. The same limit applies to sending the response (HEALTH-1).
pub(crate) const CLIENT_LIMIT: Duration = Duration::from_secs(2);
/// Time limit for the agent's loop to answer. If no answer arrives in time, the response is based on the previous
/// answer and on the waiting time.
pub(crate) const ANSWER_LIMIT: Duration = Duration::from_secs(1);
/// Maximum number of bytes that the server reads and discards after a request.
const MAX_DROPPED: usize = 256 * 1024;
/// How long a page of metrics is reused.
const PAGE_FRESH: Duration = Duration::from_millis(100);

/// Job status that the agent last passed to [`Handle::publish`].
#[derive(Debug)]
struct Published {
    state: State,
    status: Value,
    workers: Vec<Worker>,
}

/// State that the handle and the server thread share.
struct Shared {
    began: Instant,
    host: String,
    wake: WakeFd,
    liveness: Mutex<Liveness>,
    answered: watch::Sender<()>,
    published: Mutex<Published>,
    registry: Mutex<Registry>,
    source: Mutex<Option<Arc<dyn Source>>>,
    /// Source that reports how long the agent's loop has been busy with its current event. `None` if no loop is
    /// watched.
    watched_loop: Mutex<Option<Arc<dyn Source>>>,
    sizes: LogSizes,
    page: Mutex<Option<(Instant, Vec<u8>)>>,
}

/// Reply of the agent's loop to a liveness request.
///
/// The reply is recorded in `drop`, so that it is not lost if the runtime drops the task without running it.
struct LoopAnswer {
    shared: Arc<Shared>,
    age: Duration,
    doing: Option<String>,
}

impl Drop for LoopAnswer {
    fn drop(&mut self) {
        self.shared.answer(self.age, self.doing.take());
    }
}

/// The agent's handle for its health server. Closing or dropping the handle waits for the server's thread to exit. No
/// other method blocks.
pub struct Handle {
    port: u16,
    shared: Arc<Shared>,
    runtime: Mutex<Option<Runtime>>,
    owner: u32,
}

impl Handle {
    /// Starts a server that answers HTTP requests about the job's health. The server listens on `host`, and accepts
    /// this name in the `Host` header of requests. `limit` is the time limit for an answer from the agent (HEALTH-4).
    /// If there is a problem, the server calls `tell` with a message for the user.
    pub fn start(host: &str, port: u16, limit: Duration, tell: Tell) -> Result<Self, ListenError> {
        let port = Port::from(port);
        let failed = |source: io::Error| ListenError { host: Some(host.to_owned()), port, source };
        let listener = listen(Some(host), port)?;
        let bound = listener.local_addr().map_err(failed)?.port();
        let now = Instant::now();
        let shared = Arc::new(Shared {
            began: now,
            host: host.to_owned(),
            wake: WakeFd::new().map_err(failed)?,
            liveness: Mutex::new(Liveness::new(limit)),
            answered: watch::Sender::default(),
            published: Mutex::new(Published { state: State::Init, status: json!({}), workers: Vec::new() }),
            registry: Mutex::new(Registry::new(now)),
            source: Mutex::default(),
            watched_loop: Mutex::default(),
            sizes: LogSizes::default(),
            page: Mutex::default(),
        });
        let runtime = Runtime::new("elasticrs-health").map_err(failed)?;
        let served = Arc::clone(&shared);
        runtime.spawn(Box::new(move || Box::pin(run(listener, served, Notices::new(tell)))));
        Ok(Self { port: bound, shared, runtime: Mutex::new(Some(runtime)), owner: std::process::id() })
    }

    /// Returns the port on which the server listens.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns a file descriptor that is readable while a client is waiting for the agent to call [`Self::answer`].
    pub fn fd(&self) -> BorrowedFd<'_> {
        self.shared.wake.as_fd()
    }

    /// Records that the agent is alive. `age` is the time since its last progress. `doing` is its current operation.
    pub fn answer(&self, age: Duration, doing: Option<String>) {
        self.shared.wake.clear();
        self.shared.answer(age, doing);
    }

    /// Like [`Self::answer`], but sends the answer through the supervisor's thread, so that a hang of that thread is
    /// also detected.
    pub fn answer_through(&self, supervisor: &impl Spawn, age: Duration, doing: Option<String>) {
        self.shared.wake.clear();
        lock(&self.shared.liveness).pass_on();
        // Ignore an error. It means that the runtime has stopped, and the loop is notified of this separately.
        let _ = supervisor.spawn(self.answer_of_runtime(age, doing));
    }

    fn answer_of_runtime(&self, age: Duration, doing: Option<String>) -> Task {
        let answer = LoopAnswer { shared: Arc::clone(&self.shared), age, doing };
        Box::new(move || Box::pin(async move { drop(answer) }))
    }

    /// Sets the source of the core's counters, which the server shows in the metrics and in the status.
    pub fn show(&self, source: Arc<dyn Source>) {
        *lock(&self.shared.source) = Some(source);
    }

    /// Sets the source that reports how long the agent's loop has been busy, see [`Source::at_work`].
    ///
    /// Without a source, a stuck loop is detected only once a liveness request has been unanswered for too long.
    pub fn watch_loop(&self, source: Arc<dyn Source>) {
        *lock(&self.shared.watched_loop) = Some(source);
    }

    /// Starts an attempt whose workers write directly to these log files. The server takes the byte counts from the
    /// sizes of the files, see [`crate::log_sizes`].
    pub fn watch_files(&self, files: Vec<LogFile>) -> io::Result<()> {
        self.shared.sizes.begin(files)
    }

    /// Ends the attempt that was started with [`Self::watch_files`]. Call this when the workers have exited.
    pub fn files_ended(&self) {
        self.shared.sizes.end();
    }

    /// Sets the job status that the server reports. If `workers` is `None`, the previous list of workers is kept.
    pub fn publish(&self, state: State, status: Value, workers: Option<Vec<Worker>>) {
        let mut published = lock(&self.shared.published);
        (published.state, published.status) = (state, status);
        if let Some(workers) = workers {
            published.workers = workers;
        }
        drop(published);
        lock(&self.shared.page).take();
    }

    /// Updates the metrics by calling `counts` with the registry and the current time.
    pub fn count<T>(&self, counts: impl FnOnce(&mut Registry, Instant) -> T) -> T {
        counts(&mut lock(&self.shared.registry), Instant::now())
    }

    /// Stops the server and its threads, see HEALTH-5. Idempotent. In a forked child, does nothing, because the threads
    /// exist only in the parent.
    pub fn close(&self) {
        if std::process::id() != self.owner {
            return;
        }
        let runtime = lock(&self.runtime).take();
        drop(runtime);
        self.shared.sizes.close();
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.close();
    }
}

async fn run(listener: std::net::TcpListener, shared: Arc<Shared>, notices: Notices) {
    let mut door = match Door::new(listener, Purpose::Health) {
        Ok(door) => door,
        Err(error) => return notices.say(format!("the health check server cannot be served: {error}")),
    };
    let mut clients = JoinSet::new();
    let mut oldest: VecDeque<AbortHandle> = VecDeque::new();
    loop {
        tokio::select! {
            biased;
            Some(_) = clients.join_next() => oldest.retain(|client| !client.is_finished()),
            (mut stream, _) = door.accept(&notices, "the health check server") => {
                if oldest.len() >= MAX_CONNECTIONS && let Some(client) = oldest.pop_front() {
                    client.abort();
                }
                let shared = Arc::clone(&shared);
                oldest.push_back(clients.spawn_local(async move { serve(&mut stream, &shared).await }));
            }
        }
    }
}

/// Serves one client, within the time limits of HEALTH-1. An error affects only this client.
async fn serve(stream: &mut TcpStream, shared: &Shared) {
    let (response, head_only) = match timeout(CLIENT_LIMIT, read_head(stream)).await {
        Err(_) | Ok(Err(_)) => return,
        Ok(Ok(None)) => (Response::text(431, "the request is too long"), false),
        Ok(Ok(Some(head))) => match http::parse(&head) {
            Err(refusal) => (refusal, false),
            Ok(request) => (respond(&request, shared).await, request.head_only),
        },
    };
    let bytes = response.bytes(head_only);
    // Ignore errors and timeouts: the client has disconnected or does not read the response in time.
    let _ = timeout(CLIENT_LIMIT, send(stream, &bytes)).await;
}

/// Reads the head of a request. `None` if the head is too long.
async fn read_head(stream: &mut TcpStream) -> io::Result<Option<Vec<u8>>> {
    let mut head = Vec::new();
    let mut block = [0; 1024];
    loop {
        match stream.read(&mut block).await? {
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            count => head.extend_from_slice(&block[..count]),
        }
        if http::is_whole(&head) {
            return Ok(Some(head));
        }
        if head.len() > MAX_HEAD {
            return Ok(None);
        }
    }
}

/// Sends the response. Then reads and discards further bytes from the client, up to a limit. Closing a connection
/// that has unread bytes would reset it, and the client could lose the response.
async fn send(stream: &mut TcpStream, bytes: &[u8]) -> io::Result<()> {
    stream.write_all(bytes).await?;
    part(stream, MAX_DROPPED).await
}

async fn respond(request: &Request, shared: &Shared) -> Response {
    // Do not check the `Host` header of health probes. Their responses reveal almost nothing, and rejecting a probe
    // could cause a restart of a healthy agent.
    let is_private = matches!(request.path.as_str(), "/metrics" | "/status");
    if is_private && !names::is_ours(request.host.as_deref(), &shared.host) {
        let said = "only by an address or a name of this machine, or the name that is given as --health-check-host";
        return Response::text(421, said);
    }
    match request.path.as_str() {
        "/healthz" => shared.health(shared.ask().await),
        "/readyz" => shared.ready(),
        "/metrics" => shared.metrics().await,
        "/status" => {
            // Wake the agent's loop before reading the status, because the loop updates parts of the status only on
            // request.
            shared.ask().await;
            shared.status()
        }
        "/" => Response::text(200, "/healthz /readyz /metrics /status"),
        _ => Response::text(404, "there are /healthz, /readyz, /metrics and /status"),
    }
}

fn add_heartbeats(workers: &mut [Value], heartbeats: &[Heartbeat]) {
    let now = Stamp::now();
    for worker in workers.iter_mut().filter_map(Value::as_object_mut) {
        let local_rank = worker.get("local_rank").and_then(Value::as_u64);
        let last = heartbeats.iter().find(|beat| Some(u64::from(beat.local_rank)) == local_rank);
        let shown = last.map_or(Value::Null, |beat| {
            let age = Duration::from_nanos(now.0.saturating_sub(beat.at.0)).as_secs_f64();
            json!({"step": beat.step, "age_seconds": age, "section": beat.section})
        });
        worker.insert("heartbeat".into(), shown);
    }
}

fn of_json(status: u16, value: &Value) -> Response {
    let mut body = value.to_string().into_bytes();
    body.push(b'\n');
    Response { status, kind: JSON, body }
}

impl Shared {
    fn answer(&self, age: Duration, doing: Option<String>) {
        lock(&self.liveness).answer(Instant::now(), age, doing);
        self.answered.send_replace(());
    }

    /// Asks the agent's loop whether it is alive, and waits at most [`ANSWER_LIMIT`] for the reply. Concurrent requests
    /// share one reply (HEALTH-3).
    ///
    /// Returns whether the agent is considered alive.
    async fn ask(&self) -> LivenessReport {
        let limit = ANSWER_LIMIT.min(lock(&self.liveness).limit());
        let deadline = Instant::now() + limit;
        // Subscribe before asking, so that no answer is missed.
        let mut answered = self.answered.subscribe();
        let step = lock(&self.liveness).ask(Instant::now());
        if step == NextStep::WakeLoop {
            self.wake.set();
        }
        if step != NextStep::Reuse {
            // Ignore a timeout, because `self.verdict` checks how long an answer has been missing.
            let _ = timeout_at(deadline.into(), answered.changed()).await;
        }
        self.verdict()
    }

    fn verdict(&self) -> LivenessReport {
        let at_work = lock(&self.watched_loop).as_ref().and_then(|source| source.at_work());
        lock(&self.liveness).verdict(Instant::now(), at_work)
    }

    fn read(&self) -> Readings {
        let source = lock(&self.source).clone();
        source.map(|source| source.read()).unwrap_or_default()
    }

    fn health(&self, verdict: LivenessReport) -> Response {
        let limit = lock(&self.liveness).limit().as_secs_f64();
        let LivenessReport { alive, age, reason } = verdict;
        let body = json!({"alive": alive, "age_seconds": age.as_secs_f64(), "limit_seconds": limit, "reason": reason});
        of_json(if alive { 200 } else { 503 }, &body)
    }

    fn ready(&self) -> Response {
        let state = lock(&self.published).state;
        let ready = state == State::Healthy;
        of_json(if ready { 200 } else { 503 }, &json!({"ready": ready, "state": state.name()}))
    }

    fn status(&self) -> Response {
        let mut status = lock(&self.published).status.clone();
        let LivenessReport { alive, age, reason } = self.verdict();
        let Readings { timers, heartbeats, .. } = self.read();
        if let Some(workers) = status.get_mut("workers").and_then(Value::as_array_mut) {
            add_heartbeats(workers, &heartbeats);
        }
        if let Some(fields) = status.as_object_mut() {
            let agent = json!({
                "pid": std::process::id(),
                "uptime_seconds": self.began.elapsed().as_secs_f64(),
                "alive": alive,
                "age_seconds": age.as_secs_f64(),
                "reason": reason,
            });
            let timers = json!({"live": timers.live, "expired": timers.expired, "late": timers.late});
            fields.insert("agent".into(), agent);
            fields.insert("timers".into(), timers);
        }
        of_json(200, &status)
    }

    async fn metrics(&self) -> Response {
        let mut page = self.fresh_page();
        if page.is_none() {
            self.sizes.ask().await;
            // Check the cache again, because another request may have rendered the metrics page during the wait.
            page = self.fresh_page();
        }
        let body = page.unwrap_or_else(|| self.new_page());
        Response { status: 200, kind: METRICS, body }
    }

    fn fresh_page(&self) -> Option<Vec<u8>> {
        let page = lock(&self.page);
        let fresh = page.as_ref().filter(|(at, _)| at.elapsed() < PAGE_FRESH);
        fresh.map(|(_, page)| page.clone())
    }

    fn new_page(&self) -> Vec<u8> {
        let now = Instant::now();
        let page = self.render(now).into_bytes();
        *lock(&self.page) = Some((now, page.clone()));
        page
    }

    fn render(&self, now: Instant) -> String {
        let alive = self.verdict().alive;
        let uptime = now.saturating_duration_since(self.began);
        let (state, workers, restarts_left) = {
            let published = lock(&self.published);
            let left = published.status.get("restarts_left").and_then(Value::as_f64);
            (published.state, published.workers.clone(), left)
        };
        // Read the usage from `/proc` before taking the lock, because other threads need the lock to update the
        // metrics.
        let usages = usages(&workers);
        let moment = Moment {
            now,
            uptime,
            alive,
            state,
            restarts_left,
            workers: &workers,
            usages: &usages,
            readings: &self.read(),
            sizes: &self.sizes.known(now),
        };
        lock(&self.registry).render(&moment)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_liveness_request_is_answered_even_if_the_runtime_drops_its_task() {
        let limit = Duration::from_secs(60);
        let handle = Handle::start("127.0.0.1", 0, limit, Box::new(|_| ())).unwrap();
        // A stopping runtime may drop a task before starting it, or drop the task's future before polling the future.
        // The agent's answer must be recorded in both cases.
        let ends: [fn(Task); 2] = [drop, |task| drop(task())];
        for end in ends {
            *lock(&handle.shared.liveness) = Liveness::new(limit);
            assert_eq!(lock(&handle.shared.liveness).ask(Instant::now()), NextStep::WakeLoop);
            assert!(handle.shared.verdict().reason.is_some());
            end(handle.answer_of_runtime(Duration::ZERO, None));
            assert_eq!(handle.shared.verdict().reason, None);
        }
    }
}
