//! Launches each nursery on its own thread, because executing a program can block forever on a dead network file
//! system. The thread exits after the launch. If the nursery imports modules, the thread exits after the imports,
//! because the kernel would otherwise kill the nursery when the thread exits.

#![allow(clippy::disallowed_methods, reason = "the launches run on threads of their own")]

use std::convert::Infallible;
use std::ffi::CString;
use std::io;
use std::sync::Arc;
use std::sync::mpsc::sync_channel;
use std::thread::Builder;
use std::time::Duration;

use elasticrs_nursery::activity::ActivityPage;
use elasticrs_nursery::launch::{self, Interrupt, LaunchError, Launched, NurseryImage};
use elasticrs_nursery::token::Token;
use elasticrs_runtime::threads;
use elasticrs_sys::stage::Stage;
use nix::errno::Errno;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::timeout;

use super::nursery::{DEATH_LIMIT, Nursery};
use super::or_panic;
use crate::spec::GroupSpec;
use crate::supervisor::event::NurseryExit;
use crate::supervisor::queue::Queue;

/// Time limit for a launch. A launch for the start of a group uses the group's start deadline instead.
pub(super) const LAUNCH_LIMIT: Duration = Duration::from_secs(30);
/// Time after which the user is notified that a launch is still running.
pub(super) const SLOW_LAUNCH: Duration = Duration::from_secs(5);
/// Maximum number of launch threads. At the maximum, further launches fail. The maximum is reached only if earlier
/// launches hang in system calls that even SIGKILL does not interrupt.
const MAX_THREADS: usize = 8;
const STACK: usize = 256 * 1024;

/// Purpose of a launch. At most one launch of each kind runs at a time.
#[derive(Debug)]
pub(super) enum Purpose {
    /// The nursery that starts the workers.
    Current(Reason),
    /// A new sentinel (the process that cleans up if the nursery dies) for the nursery with this token. Nursery and
    /// sentinel share the memory page.
    Sentinel(Token, ActivityPage),
}

/// Reason for launching the nursery that starts the workers.
#[derive(Debug)]
pub(super) enum Reason {
    /// No nursery is running.
    Needed,
    /// The previous nursery exited during its imports. The new nursery imports the remaining modules.
    ImportRest(NurseryExit),
    /// The previous nursery exited during its imports. The new nursery imports no modules.
    GoOnCold(NurseryExit),
}

impl Purpose {
    pub(super) fn is_current(&self) -> bool {
        matches!(self, Self::Current(_))
    }

    pub(super) fn is_sentinel(&self) -> bool {
        matches!(self, Self::Sentinel(..))
    }
}

/// Result of a launch.
#[derive(Debug)]
pub(super) struct Finished {
    /// `None` if the launch was cancelled, because the nursery is no longer needed.
    pub(super) purpose: Option<Purpose>,
    pub(super) result: Result<Nursery, LaunchError>,
}

/// All running launches.
#[derive(Debug)]
pub(super) struct Launches {
    running: Vec<PendingLaunch>,
    tasks: JoinSet<(u64, Result<Nursery, LaunchError>)>,
    newest: u64,
    /// Shared with each launch thread, so that the reference count shows how many threads are still launching.
    threads: Arc<()>,
    queue: Arc<Queue>,
}

#[derive(Debug)]
struct PendingLaunch {
    number: u64,
    purpose: Purpose,
    _cancel: Cancel,
}

/// Kills the process of a launch when this value is dropped. Has no effect after the launch has finished.
#[derive(Debug)]
struct Cancel(Arc<Interrupt>);

impl Drop for Cancel {
    fn drop(&mut self) {
        self.0.set();
    }
}

impl Launches {
    pub(super) fn new(queue: Arc<Queue>) -> Self {
        Self { running: Vec::new(), tasks: JoinSet::new(), newest: 0, threads: Arc::default(), queue }
    }

    /// Launches a nursery on another thread. The nursery runs the first of these images that can be executed. `since`
    /// is passed to [`launch::launch`]. The launch fails if it takes longer than `limit`. Must be called on the runtime
    /// thread.
    pub(super) fn nursery(&mut self, reason: Reason, images: Vec<NurseryImage>, since: Option<u64>, limit: Duration) {
        let launch = Launch { program: program(&images), limit };
        self.start(Purpose::Current(reason), launch, move |interrupt| launch::launch(&images, since, interrupt));
    }

    /// Starts the launch of a sentinel for the nursery with this token.
    pub(super) fn sentinel(&mut self, images: Vec<NurseryImage>, token: Token, activity: ActivityPage) {
        let launch = Launch { program: program(&images), limit: LAUNCH_LIMIT };
        let purpose = Purpose::Sentinel(token, activity);
        self.start(purpose, launch, move |interrupt| launch::launch_sentinel(&images, token, interrupt));
    }

    fn start(
        &mut self,
        purpose: Purpose,
        launch: Launch,
        call: impl FnOnce(&Interrupt) -> Result<Launched, LaunchError> + Send + 'static,
    ) {
        self.newest += 1;
        let (number, interrupt) = (self.newest, Arc::new(Interrupt::default()));
        self.running.push(PendingLaunch { number, purpose, _cancel: Cancel(Arc::clone(&interrupt)) });
        let is_full = Arc::strong_count(&self.threads) > MAX_THREADS;
        let (threads, queue) = (Arc::clone(&self.threads), Arc::clone(&self.queue));
        self.tasks.spawn_local(async move {
            let result = if is_full { Err(launch.hung()) } else { launch.run(interrupt, &queue, threads, call).await };
            (number, result)
        });
    }

    /// Returns true if a launch is running whose purpose satisfies `is_purpose`.
    pub(super) fn are_running(&self, is_purpose: impl Fn(&Purpose) -> bool) -> bool {
        self.running.iter().any(|running| is_purpose(&running.purpose))
    }

    /// Cancels all launches whose purpose satisfies `is_purpose`. Returns their purposes.
    pub(super) fn cancel(&mut self, is_purpose: impl Fn(&Purpose) -> bool) -> Vec<Purpose> {
        self.running.extract_if(.., |running| is_purpose(&running.purpose)).map(|running| running.purpose).collect()
    }

    /// Waits until a launch has finished. The future never completes if no launch is running. Cancel-safe.
    pub(super) async fn finished(&mut self) -> Finished {
        let Some(done) = self.tasks.join_next().await else { return std::future::pending().await };
        let (number, result) = or_panic(done);
        let index = self.running.iter().position(|running| running.number == number);
        Finished { purpose: index.map(|index| self.running.swap_remove(index).purpose), result }
    }

    /// Waits until all cancelled launches have finished, for at most [`DEATH_LIMIT`]. Returns the nurseries that were
    /// launched before the cancellation took effect.
    pub(super) async fn finish(&mut self) -> Vec<Nursery> {
        let mut launched = Vec::new();
        let everything = async {
            while !self.tasks.is_empty() {
                launched.extend(self.finished().await.result);
            }
        };
        if timeout(DEATH_LIMIT, everything).await.is_err() {
            let message = "a nursery that was being launched did not exit after SIGKILL, and is still there";
            self.queue.degraded(message);
        }
        launched
    }
}

/// Program name for messages and time limit of a launch.
#[derive(Debug)]
struct Launch {
    program: CString,
    limit: Duration,
}

impl Launch {
    fn hung(self) -> LaunchError {
        LaunchError::Hung { program: self.program, limit: self.limit }
    }

    /// Runs `call` on a new thread. If `call` exceeds the time limit, interrupts it and waits a few seconds for its
    /// result. If the thread still hangs then, leaves it running, because it exits when its system call returns.
    async fn run(
        self,
        interrupt: Arc<Interrupt>,
        queue: &Queue,
        threads: Arc<()>,
        call: impl FnOnce(&Interrupt) -> Result<Launched, LaunchError> + Send + 'static,
    ) -> Result<Nursery, LaunchError> {
        let (sender, mut launched) = oneshot::channel();
        let (parent, all_ready) = sync_channel::<Infallible>(0);
        let thread = {
            let interrupt = Arc::clone(&interrupt);
            move || {
                if let Err(Ok(unwanted)) = sender.send(call(&interrupt)) {
                    unwanted.discard();
                }
                drop(threads);
                // Wait until the nursery no longer depends on this thread.
                let _ = all_ready.recv();
            }
        };
        threads::start(Builder::new().name("elasticrs-launch".into()).stack_size(STACK), thread)
            .map_err(without_thread)?;
        let slow = SLOW_LAUNCH.min(self.limit);
        let mut result = timeout(slow, &mut launched).await;
        if result.is_err() && slow < self.limit {
            queue.degraded(self.slow());
            result = timeout(self.limit.saturating_sub(slow), &mut launched).await;
        }
        let is_over = result.is_ok();
        if !is_over {
            interrupt.set();
            result = timeout(DEATH_LIMIT, launched).await;
        }
        match result {
            Ok(Ok(Ok(launched))) => Nursery::of(launched, &parent),
            Ok(Ok(Err(error))) if is_over => Err(error),
            // The launch was interrupted, or its thread has panicked.
            Ok(Ok(Err(_)) | Err(_)) | Err(_) => Err(self.hung()),
        }
    }

    fn slow(&self) -> String {
        format!(
            "{} is still being executed after {} s, probably because its file system does not respond; workers that \
             are to be started wait for it for at most {} s",
            self.program.to_string_lossy(),
            SLOW_LAUNCH.as_secs(),
            self.limit.as_secs_f64(),
        )
    }
}

/// Returns the error of a launch whose thread could not be created. The error is the same as for a process that could
/// not be created, because threads and processes count towards the same limits.
fn without_thread(error: io::Error) -> LaunchError {
    match error.raw_os_error() {
        Some(errno) => LaunchError::Start { stage: Stage::Clone, errno: Errno::from_raw(errno) },
        None => error.into(),
    }
}

/// Returns the program name for messages about a slow launch. This is the first program that is not run from memory.
fn program(images: &[NurseryImage]) -> CString {
    images.iter().find_map(NurseryImage::path).unwrap_or(c"the nursery's program in memory").to_owned()
}

/// Programs that can be run as the nursery process, in order of preference.
#[derive(Debug)]
pub(super) struct Images(Vec<NurseryImage>);

impl Images {
    pub(super) fn new(images: Vec<NurseryImage>) -> Self {
        Self(images)
    }

    pub(super) fn all(&self) -> Vec<NurseryImage> {
        self.0.clone()
    }

    /// Makes all later nursery processes start without importing modules in advance.
    pub(super) fn forget_warm(&mut self) {
        self.0.retain(|image| !is_warm(image));
    }

    /// Returns the programs that can be run as the nursery of this group. Omits programs that import modules in advance
    /// if no worker needs these modules, because the imports would delay the start of the group.
    pub(super) fn fitting(&self, spec: &GroupSpec) -> Vec<NurseryImage> {
        let has_warm_workers = spec.processes.iter().any(|process| process.warm);
        self.0.iter().filter(|image| has_warm_workers || !is_warm(image)).cloned().collect()
    }
}

fn is_warm(image: &NurseryImage) -> bool {
    matches!(image, NurseryImage::Warm(_))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::time::Duration;

    use elasticrs_nursery::launch::Warm;
    use elasticrs_nursery::spec::ProcessSpec;

    use super::*;
    use crate::supervisor::start::tests::group;

    fn images() -> Images {
        let report = nix::sys::memfd::memfd_create(c"report", nix::sys::memfd::MFdFlags::MFD_CLOEXEC).unwrap();
        let process = ProcessSpec::new(Vec::new(), Vec::new());
        let warm = Warm { process, ignored: Vec::new(), report, limit: Duration::ZERO };
        Images::new(vec![NurseryImage::Warm(Arc::new(warm)), NurseryImage::Embedded(b"")])
    }

    #[test]
    fn a_group_without_warm_workers_gets_a_cold_nursery() {
        assert!(matches!(images().fitting(&group(true))[..], [NurseryImage::Warm(_), NurseryImage::Embedded(_)]));
        assert!(matches!(images().fitting(&group(false))[..], [NurseryImage::Embedded(_)]));
    }

    #[test]
    fn a_failed_import_leaves_only_cold_nurseries() {
        let mut images = images();
        images.forget_warm();
        assert!(matches!(images.all()[..], [NurseryImage::Embedded(_)]));
        assert!(matches!(images.fitting(&group(true))[..], [NurseryImage::Embedded(_)]));
    }
}
