//! The health server: its handle, its thread, and its responses.

use std::collections::VecDeque;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
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
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::watch;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::{sleep, timeout, timeout_at};

use crate::control::ControlSocket;
use crate::http::{self, HTML, JSON, MAX_HEAD, METRICS, Method, Request, Response};
use crate::liveness::{Liveness, LivenessReport, NextStep};
use crate::log_sizes::{LogFile, LogSizes};
use crate::metrics::{Moment, Registry, State, usages};
use crate::names;
use crate::orders::{Caller, MAX_ORDER, Order, Orders};
use crate::outline::Outline;
use crate::page::{EVENTS, Live, MAX_VIEWERS, PAGE, Seat};
use crate::processes::Worker;
use crate::steps::last_step;

/// Maximum number of simultaneous connections. See HEALTH-2.
pub const MAX_CONNECTIONS: usize = 64;
/// Maximum number of simultaneous connections to the control socket (the agent's Unix socket for `elasticctl`).
pub const MAX_CONTROLLERS: usize = 16;
/// Time limit for receiving a client's request. The same limit applies to sending the response (HEALTH-1).
const CLIENT_LIMIT: Duration = Duration::from_secs(2);
/// Time limit for the agent's loop to answer. If no answer arrives in time, the response is based on the previous
/// answer and on the waiting time.
pub(crate) const ANSWER_LIMIT: Duration = Duration::from_secs(1);
/// Maximum number of bytes that the server reads and discards after a request.
const MAX_DROPPED: usize = 256 * 1024;
/// How long a page of metrics is reused.
const PAGE_FRESH: Duration = Duration::from_millis(100);
/// Time for which the server waits before it ends, so that browsers get the last text of the page.
const LAST_TEXT: Duration = Duration::from_millis(20);
/// Delay before the next attempt to accept a connection to the control socket after an error.
const PAUSE: Duration = Duration::from_millis(100);

/// Job status that the agent last passed to [`Handle::publish`].
#[derive(Debug)]
struct Published {
    state: State,
    /// `None` if the agent has not published a status yet.
    status: Option<Value>,
    workers: Vec<Worker>,
    /// Basic facts from which the server builds a job status until the agent publishes one.
    outline: Option<Arc<Outline>>,
}

/// State that the handle and the server thread share.
pub(crate) struct Shared {
    began: Instant,
    /// Host on which the server listens. `None` if it has no port.
    host: Option<String>,
    orders: Orders,
    live: Arc<Live>,
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
    step_files: Mutex<Vec<File>>,
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
    thread: Arc<ServerThread>,
    control: Mutex<Option<ControlSocket>>,
    owner: u32,
}

/// The server's thread, which may not have started yet.
struct ServerThread(Mutex<ThreadState>);

enum ThreadState {
    NotStarted,
    Running(Runtime),
    Closed,
}

impl ServerThread {
    /// Starts the thread unless it is running. Returns false if the server has been closed. Does not block.
    fn start(&self) -> io::Result<bool> {
        let mut state = lock(&self.0);
        if matches!(*state, ThreadState::NotStarted) {
            *state = ThreadState::Running(Runtime::new("elasticrs-health")?);
        }
        Ok(matches!(*state, ThreadState::Running(_)))
    }

    /// Returns the thread if it is running. Otherwise, prevents the thread from starting later.
    fn close(&self) -> Option<Runtime> {
        match std::mem::replace(&mut *lock(&self.0), ThreadState::Closed) {
            ThreadState::Running(runtime) => Some(runtime),
            ThreadState::NotStarted | ThreadState::Closed => None,
        }
    }
}

impl Spawn for ServerThread {
    fn spawn(&self, task: Task) -> bool {
        matches!(&*lock(&self.0), ThreadState::Running(runtime) if runtime.spawn(task))
    }
}

impl Handle {
    /// Starts a server that answers HTTP requests about the job's health. The server listens on the host and port of
    /// `place`, and accepts this host in the `Host` header of requests. Without a `place`, it serves only the socket
    /// of [`Self::open_control`], and its thread starts at the first connection. `limit` is the time limit for an
    /// answer from the agent (HEALTH-4). `age` is how long the agent has been running. If there is a problem, the
    /// server calls `tell` with a message for the user.
    pub fn start(place: Option<(&str, u16)>, limit: Duration, age: Duration, tell: Tell) -> Result<Self, ListenError> {
        let host = place.map(|(host, _)| host.to_owned());
        let port = Port::from(place.map_or(0, |(_, port)| port));
        let failed = |source: io::Error| ListenError { host: host.clone(), port, source };
        let listener = place.map(|(host, _)| listen(Some(host), port)).transpose()?;
        let bound = listener.as_ref().map(std::net::TcpListener::local_addr).transpose().map_err(failed)?;
        let now = Instant::now();
        let shared = Arc::new(Shared {
            began: now.checked_sub(age).unwrap_or(now),
            host: host.clone(),
            orders: Orders::default(),
            live: Arc::default(),
            wake: WakeFd::new().map_err(failed)?,
            liveness: Mutex::new(Liveness::new(limit)),
            answered: watch::Sender::default(),
            published: Mutex::new(Published { state: State::Init, status: None, workers: Vec::new(), outline: None }),
            registry: Mutex::new(Registry::new(now)),
            source: Mutex::default(),
            watched_loop: Mutex::default(),
            sizes: LogSizes::default(),
            step_files: Mutex::default(),
            page: Mutex::default(),
        });
        let thread = Arc::new(ServerThread(Mutex::new(ThreadState::NotStarted)));
        if let Some(listener) = listener {
            thread.start().map_err(failed)?;
            let served = Arc::clone(&shared);
            thread.spawn(Box::new(move || Box::pin(run(listener, served, Notices::new(tell)))));
        }
        let port = bound.map_or(0, |bound| bound.port());
        Ok(Self { port, shared, thread, control: Mutex::default(), owner: std::process::id() })
    }

    /// Opens the control socket in `folder`, over which programs of this user and of root can also send orders to the
    /// agent. The agent gets them from [`Self::take_orders`]. Creates the folder if it is missing.
    ///
    /// Until the first connection, only the thread of `supervisor` waits for clients. Therefore, a job without requests
    /// needs no additional thread, and the first client gets an answer even if the agent's loop is stuck.
    pub fn open_control(&self, folder: &Path, supervisor: &impl Spawn) -> io::Result<()> {
        let (socket, listener) = ControlSocket::open(folder)?;
        *lock(&self.control) = Some(socket);
        let (thread, shared) = (Arc::clone(&self.thread), Arc::clone(&self.shared));
        supervisor.spawn(Box::new(move || Box::pin(wait_for_client(listener, thread, shared))));
        Ok(())
    }

    /// Removes the control socket, so that new clients no longer find it. Open connections stay open. Idempotent.
    pub fn close_control(&self) {
        drop(lock(&self.control).take());
    }

    /// Sets the basic facts from which the server builds a job status until the agent publishes one.
    pub fn outline(&self, outline: Outline) {
        lock(&self.shared.published).outline = Some(Arc::new(outline));
    }

    /// Returns the new orders to the agent, the oldest first. When there are some, [`Self::fd`] is readable.
    pub fn take_orders(&self) -> Vec<Order> {
        self.shared.orders.take()
    }

    /// Sends a line of text to the program that has sent the order `number`. `is_last`: the line ends the answer.
    pub fn reply(&self, number: u64, line: String, is_last: bool) {
        self.shared.orders.reply(number, line, is_last);
    }

    /// Returns true if the server needs a new text for the browsers that show its page. The agent then has to call
    /// [`Self::tell_page`] before its next [`Self::answer`]. Returns true only once for each such text.
    pub fn wants_page(&self) -> bool {
        self.shared.live.take_request()
    }

    /// Returns the number of browsers that listen to the events of the page.
    pub fn viewers(&self) -> usize {
        self.shared.live.viewers()
    }

    /// Sets the text that the page for browsers shows. It must be a JSON value.
    pub fn tell_page(&self, text: &str) {
        self.shared.live.set_text(text);
    }

    /// Returns the status of the job in JSON, as the path `/status` serves it.
    pub fn status(&self) -> String {
        self.shared.status().to_string()
    }

    /// Returns the port on which the server listens. 0 if it has none.
    pub fn port(&self) -> u16 {
        self.port
    }

    /// Returns a file descriptor that is readable while a client is waiting for the agent to call [`Self::answer`] or
    /// [`Self::take_orders`].
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

    /// Sets the files in memory into which the workers write their training steps, by local rank.
    pub fn watch_steps(&self, files: Vec<File>) {
        *lock(&self.shared.step_files) = files;
    }

    /// Sets the job status that the server reports. If `workers` is `None`, the previous list of workers is kept.
    pub fn publish(&self, state: State, status: Value, workers: Option<Vec<Worker>>) {
        let mut published = lock(&self.shared.published);
        (published.state, published.status) = (state, Some(status));
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

    /// Stops the server and its threads, and removes the control socket (rule HEALTH-5). If browsers are connected to
    /// the event stream of the status page, first sends them the last text, and waits 20 ms. Idempotent. Does nothing
    /// in a forked child, because the threads exist only in the parent.
    pub fn close(&self) {
        if std::process::id() != self.owner {
            return;
        }
        self.close_control();
        let runtime = self.thread.close();
        if let Some(runtime) = &runtime
            && self.viewers() > 0
        {
            let (told, is_told) = std::sync::mpsc::channel::<()>();
            let shared = Arc::clone(&self.shared);
            runtime.spawn(Box::new(move || {
                Box::pin(async move {
                    shared.live.tell(None);
                    sleep(LAST_TEXT).await;
                    drop(told);
                })
            }));
            // Wait until the server's thread has sent the last text and dropped the sender `told`. Ignore the result,
            // which is always an error, because nothing is sent through this channel. The wait has a limit, because
            // the thread may hang.
            let _ = is_told.recv_timeout(ANSWER_LIMIT);
        }
        drop(runtime);
        self.shared.sizes.close();
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        self.close();
    }
}

/// The open connections to one listening socket. A new one beyond the limit `most` ends the oldest (HEALTH-2).
struct Clients {
    tasks: JoinSet<()>,
    oldest: VecDeque<AbortHandle>,
    most: usize,
}

impl Clients {
    fn new(most: usize) -> Self {
        Self { tasks: JoinSet::new(), oldest: VecDeque::new(), most }
    }

    /// Waits until a connection ends, forever if there is no connection. Cancel-safe.
    async fn ended(&mut self) {
        match self.tasks.join_next().await {
            Some(_) => self.oldest.retain(|client| !client.is_finished()),
            None => std::future::pending().await,
        }
    }

    fn admit(&mut self, client: impl Future<Output = ()> + 'static) {
        if self.oldest.len() >= self.most
            && let Some(client) = self.oldest.pop_front()
        {
            client.abort();
        }
        self.oldest.push_back(self.tasks.spawn_local(client));
    }
}

async fn run(listener: std::net::TcpListener, shared: Arc<Shared>, notices: Notices) {
    let mut door = match Door::new(listener, Purpose::Health) {
        Ok(door) => door,
        Err(error) => return notices.say(format!("the health check server cannot be served: {error}")),
    };
    let mut clients = Clients::new(MAX_CONNECTIONS);
    loop {
        tokio::select! {
            biased;
            () = clients.ended() => {}
            (stream, _) = door.accept(&notices, "the health check server") => {
                clients.admit(attend(stream, Arc::clone(&shared), None));
            }
        }
    }
}

/// Waits for the first connection to the control socket, and then hands the socket to the server's thread. Runs on the
/// supervisor's thread without blocking it.
async fn wait_for_client(listener: UnixListener, thread: Arc<ServerThread>, shared: Arc<Shared>) {
    // This fails only if the process has no file descriptor left. Then programs that connect get no answer.
    let Ok(listener) = tokio::net::UnixListener::from_std(listener) else { return };
    let first = loop {
        match listener.accept().await.map(|(stream, _)| (stream, thread.start())) {
            Ok((_, Ok(false))) => return,
            Ok((stream, Ok(true))) => break stream,
            // The process lacks memory or file descriptors for the connection or for the thread. Retry later.
            Ok((_, Err(_))) | Err(_) => sleep(PAUSE).await,
        }
    };
    // Remove the sockets from this thread's poll set, so that the server's thread can add them to its own.
    if let (Ok(listener), Ok(first)) = (listener.into_std(), first.into_std()) {
        thread.spawn(Box::new(move || Box::pin(run_control(listener, first, shared))));
    }
}

/// Serves the clients of the control socket. `first` is the connection of the first client.
async fn run_control(listener: UnixListener, first: UnixStream, shared: Arc<Shared>) {
    let Ok(listener) = tokio::net::UnixListener::from_std(listener) else { return };
    let mut clients = Clients::new(MAX_CONTROLLERS);
    let mut next = tokio::net::UnixStream::from_std(first);
    loop {
        if let Ok(stream) = next
            && let Ok(peer) = stream.peer_cred()
        {
            let caller = Caller { uid: peer.uid(), pid: peer.pid().filter(|&pid| pid > 0) };
            clients.admit(attend(stream, Arc::clone(&shared), Some(caller)));
        } else {
            sleep(PAUSE).await;
        }
        next = loop {
            tokio::select! {
                biased;
                () = clients.ended() => {}
                accepted = listener.accept() => break accepted.map(|(stream, _)| stream),
            }
        };
    }
}

/// A connection to the server, over TCP or over a Unix socket.
trait Stream: AsyncRead + AsyncWrite + AsFd + AsRawFd + Unpin + 'static {}

impl<S: AsyncRead + AsyncWrite + AsFd + AsRawFd + Unpin + 'static> Stream for S {}

/// Serves one client. When a browser begins to listen to the events of the page, its connection no longer counts for
/// the maximum number of connections (HEALTH-2).
async fn attend(mut stream: impl Stream, shared: Arc<Shared>, caller: Option<Caller>) {
    if let Some(seat) = serve(&mut stream, &shared, caller).await {
        tokio::task::spawn_local(seat.serve(stream, CLIENT_LIMIT));
    }
}

/// Serves one request, within the time limits of HEALTH-1. An error affects only this client. `caller` is the process
/// that has connected to the control socket; `None` over TCP, where a client can only read the state of the job.
/// If the client asks for the page's events, sends no response, and returns the permission to listen to them.
async fn serve(stream: &mut impl Stream, shared: &Arc<Shared>, caller: Option<Caller>) -> Option<Seat> {
    let Ok(Ok(received)) = timeout(CLIENT_LIMIT, receive(stream)).await else { return None };
    let (response, head_only) = match (received, caller) {
        (_, Some(Caller { uid, .. })) if uid != 0 && uid != nix::unistd::geteuid().as_raw() => {
            (Response::text(403, "this job belongs to another user"), false)
        }
        (Err(refusal), _) => (refusal, false),
        // Refuse orders from browsers: a user may forward a port to the control socket to open the page in a browser,
        // and any other page in that browser could then send orders.
        (Ok((Request { method: Method::Post, is_from_page: true, .. }, _)), _) => {
            (Response::text(403, "orders come from elasticctl, not from a browser"), false)
        }
        (Ok((Request { path, is_from_page: true, .. }, _)), _) if path == EVENTS => {
            (Response::text(403, "only the page of this server gets its events"), false)
        }
        (Ok((Request { method: Method::Post, path, .. }, order)), Some(caller)) if path == "/do" => {
            carry_out(stream, shared, caller, order).await;
            return None;
        }
        (Ok((Request { method: Method::Post, .. }, _)), _) => (Response::text(405, "only GET and HEAD"), false),
        (Ok((request, _)), _) => {
            let is_event = request.path == EVENTS && request.method == Method::Get && is_ours(&request, shared);
            let ask = {
                let shared = Arc::clone(shared);
                move || {
                    let shared = Arc::clone(&shared);
                    async move { shared.ask().await }
                }
            };
            match is_event.then(|| Seat::take(&shared.live, ask)) {
                Some(Some(seat)) => return Some(seat),
                Some(None) => (Response::text(503, &format!("{MAX_VIEWERS} pages are open already")), false),
                None => (respond(&request, shared).await, request.method == Method::Head),
            }
        }
    };
    let bytes = response.bytes(head_only);
    // Ignore errors and timeouts: the client has disconnected or does not read the response in time.
    let _ = timeout(CLIENT_LIMIT, send(stream, &bytes)).await;
    None
}

/// Reads a request, and the body of a `POST`. The inner error is the response to send if the request is refused.
async fn receive(stream: &mut impl Stream) -> io::Result<Result<(Request, String), Response>> {
    let mut bytes = Vec::new();
    let mut block = [0; 1024];
    let mut next = async |bytes: &mut Vec<u8>| match stream.read(&mut block).await? {
        0 => Err(io::Error::from(io::ErrorKind::UnexpectedEof)),
        count => {
            bytes.extend_from_slice(&block[..count]);
            Ok(())
        }
    };
    let length = loop {
        next(&mut bytes).await?;
        match http::head_length(&bytes) {
            Some(length) => break length,
            None if bytes.len() > MAX_HEAD => return Ok(Err(Response::text(431, "the request is too long"))),
            None => {}
        }
    };
    let request = match http::parse(&bytes[..length]) {
        Ok(request) if request.method == Method::Post => request,
        Ok(request) => return Ok(Ok((request, String::new()))),
        Err(refusal) => return Ok(Err(refusal)),
    };
    if request.length > MAX_ORDER {
        return Ok(Err(Response::text(413, "the request is too long")));
    }
    let end = length.saturating_add(request.length);
    while bytes.len() < end {
        next(&mut bytes).await?;
    }
    let body = String::from_utf8_lossy(&bytes[length..end]).into_owned();
    Ok(Ok((request, body)))
}

/// Passes a client's order to the agent's main loop, and sends the lines of the agent's replies to the client as they
/// come. Ends after the last line, or when the client disconnects.
async fn carry_out(stream: &mut impl Stream, shared: &Shared, caller: Caller, order: String) {
    let mut replies = shared.orders.put(caller, order);
    shared.wake.set();
    let mut bytes = http::head_of_lines().into_bytes();
    let mut ignored = [0; 512];
    loop {
        // A client that does not read is treated as one that has disconnected.
        if !matches!(timeout(CLIENT_LIMIT, stream.write_all(&bytes)).await, Ok(Ok(()))) {
            return;
        }
        bytes = tokio::select! {
            line = replies.next() => match line {
                Some(line) => format!("{line}\n").into_bytes(),
                None => break,
            },
            read = stream.read(&mut ignored) => match read {
                Ok(0) | Err(_) => return,
                Ok(_) => Vec::new(),
            },
        };
    }
    // Ignore errors and timeouts: the client has received all lines or has disconnected.
    let _ = timeout(CLIENT_LIMIT, part(stream, MAX_DROPPED)).await;
}

/// Sends the response. Then reads and discards further bytes from the client, up to a limit. Closing a connection
/// that has unread bytes would reset it, and the client could lose the response.
async fn send(stream: &mut impl Stream, bytes: &[u8]) -> io::Result<()> {
    stream.write_all(bytes).await?;
    part(stream, MAX_DROPPED).await
}

/// Returns true if the request is for this machine. See [`names`].
fn is_ours(request: &Request, shared: &Shared) -> bool {
    names::is_ours(request.host.as_deref(), shared.host.as_deref().unwrap_or_default())
}

async fn respond(request: &Request, shared: &Shared) -> Response {
    // Do not check the `Host` header of health probes. Their responses reveal almost nothing, and rejecting a probe
    // could cause a restart of a healthy agent.
    let is_private = matches!(request.path.as_str(), "/metrics" | "/status" | EVENTS);
    if is_private && !is_ours(request, shared) {
        let said = "only by an address or a name of this machine, or the name that is given as --health-check-host";
        return Response::text(421, said);
    }
    match request.path.as_str() {
        "/healthz" => shared.health(shared.ask().await),
        "/readyz" => shared.ready(),
        // A server without a port was started for the first connection to the control socket, and has not counted what
        // happened before.
        "/metrics" if shared.host.is_none() => Response::text(404, "metrics need a job with --health-check-port"),
        "/metrics" => shared.metrics().await,
        "/status" => {
            // Wake the agent's loop before reading the status, because the loop updates parts of the status only on
            // request.
            shared.ask().await;
            of_json(200, &shared.status())
        }
        "/" => Response { status: 200, kind: HTML, body: PAGE.into() },
        EVENTS => Response::text(200, "events for the page at /"),
        _ => Response::text(404, "there are /, /healthz, /readyz, /metrics and /status"),
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

    fn status(&self) -> Value {
        let (published, outline) = {
            let published = lock(&self.published);
            (published.status.clone(), published.outline.clone())
        };
        let outlined = || outline.map_or_else(|| json!({}), |outline| outline.status());
        let mut status = published.unwrap_or_else(outlined);
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
        status
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
            let left = published.status.as_ref().and_then(|status| status.get("restarts_left")?.as_f64());
            (published.state, published.workers.clone(), left)
        };
        // Read the usage from `/proc` before taking the lock, because other threads need the lock to update the
        // metrics.
        let usages = usages(&workers);
        let files = lock(&self.step_files);
        let steps = files.iter().enumerate().filter_map(|(rank, file)| Some((rank, last_step(file)?))).collect();
        drop(files);
        let moment = Moment {
            now,
            uptime,
            alive,
            state,
            restarts_left,
            workers: &workers,
            usages: &usages,
            readings: &self.read(),
            steps: &steps,
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
        let handle = Handle::start(Some(("127.0.0.1", 0)), limit, Duration::ZERO, Box::new(|_| ())).unwrap();
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
