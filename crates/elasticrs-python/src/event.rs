//! Converts events of the core to Python objects.

use std::ffi::OsString;

use elasticrs_core::supervisor::{self, Event, KillReason, StartFailure};
use elasticrs_nursery::protocol;
use elasticrs_runtime::readings;
use elasticrs_sys::process::WorkerExit;
use pyo3::prelude::*;

use crate::error::SupervisorError;

/// Returns the exit code or the negative signal number, as Python's `subprocess` does. `None` if the exit status is
/// unknown.
fn exitcode(exit: WorkerExit) -> Option<i32> {
    match exit {
        WorkerExit::Exited { code } => Some(code),
        WorkerExit::Signaled { signal } => Some(-signal),
        WorkerExit::Unknown => None,
    }
}

/// Declares classes whose fields are read-only attributes in Python.
macro_rules! records {
    ($($(#[$attribute:meta])* $name:ident { $($field:ident: $type:ty),* $(,)? })*) => {
        $(
            #[pyclass(frozen, get_all, module = "elasticrs._core")]
            $(#[$attribute])*
            pub(crate) struct $name {
                $(pub $field: $type),*
            }
        )*
    };
}

pub(crate) use records;

records! {
    Warmed {
        is_ready: bool,
        exitcode: Option<i32>,
        hung: bool,
    }

    GroupStarted {
        pids: Vec<i32>,
        started_ns: u64,
    }

    StartFailed {
        message: String,
        local_rank: u32,
        stage: Option<String>,
        errno: Option<i32>,
        subject: Option<String>,
    }

    WorkerExited {
        local_rank: u32,
        pid: i32,
        exitcode: Option<i32>,
        sent_signal: Option<i32>,
        seen_ns: u64,
    }

    FailureSeen {
        local_rank: u32,
        seen_ns: u64,
        signalled_ns: u64,
        siblings: u32,
    }

    StateKept {
        asked: Vec<u32>,
        answered: Vec<u32>,
        begun_ns: u64,
        ended_ns: u64,
    }

    WorkerSwept {
        local_rank: u32,
        ended: Vec<Descendant>,
        more_ended: u32,
        stuck: Vec<Descendant>,
    }

    WorkerReplaced {
        local_rank: u32,
        pid: i32,
        started_ns: u64,
    }

    ReplaceFailed {
        message: String,
        local_rank: u32,
    }

    TimerExpired {
        local_rank: u32,
        pid: i32,
        scope: String,
        at: Option<String>,
        deadline: f64,
        others: u32,
        signal: Option<i32>,
        seen_ns: u64,
    }

    #[derive(Clone)]
    Heartbeat {
        local_rank: u32,
        at_ns: u64,
        step: Option<u64>,
        is_global: bool,
        is_automatic: bool,
        section: Option<String>,
        has_returned: bool,
    }

    #[derive(Clone)]
    RankSeen {
        local_rank: u32,
        heartbeat: Option<Heartbeat>,
        is_late: bool,
        state: String,
        wait_channel: String,
        frame: Option<String>,
    }

    WorkerHung {
        local_rank: u32,
        pid: i32,
        missed: &'static str,
        since_ns: u64,
        limit: f64,
        seen_ns: u64,
        ground: &'static str,
        ranks: Vec<RankSeen>,
    }

    WorkerRaised {
        local_rank: u32,
        pid: i32,
        text: String,
        seen_ns: u64,
        limit: Option<f64>,
        origin: &'static str,
        exit: &'static str,
    }

    WorkersKilled {
        local_ranks: Vec<u32>,
        pids: Vec<i32>,
        reason: &'static str,
        signal: Option<i32>,
        limit: f64,
    }

    WorkerPaused {
        local_rank: u32,
        pid: i32,
        signal: i32,
    }

    WorkerResumed {
        local_rank: u32,
        pid: i32,
    }

    #[derive(Clone)]
    Descendant {
        pid: i32,
        command: String,
    }

    Fenced {}

    GroupEnded {
        outcome: &'static str,
        nursery_exitcode: Option<i32>,
        nursery_hung: bool,
        stuck_ranks: Vec<u32>,
        wait_channels: Vec<String>,
        ended: Vec<Descendant>,
        more_ended: u32,
        stuck: Vec<Descendant>,
        spared: Vec<Descendant>,
        ended_ns: u64,
    }

    LogTrouble {
        local_rank: u32,
        path: OsString,
        errno: i32,
    }

    Degraded {
        message: String,
    }

    FdReady {
        fd: i32,
    }
}

fn descendants(list: Vec<protocol::Descendant>) -> Vec<Descendant> {
    list.into_iter().map(|d| Descendant { pid: d.pid, command: d.command }).collect()
}

fn start_failed(failure: StartFailure) -> StartFailed {
    let message = failure.to_string();
    match failure {
        StartFailure::Worker { local_rank, stage, errno, subject } => {
            let subject = Some(subject).filter(|subject| !subject.is_empty());
            StartFailed { message, local_rank, stage: Some(stage.to_string()), errno: Some(errno), subject }
        }
        StartFailure::Hung { local_rank, stage, .. } => {
            StartFailed { message, local_rank, stage: stage.map(|stage| stage.to_string()), errno: None, subject: None }
        }
        StartFailure::Nursery { errno, .. } => {
            StartFailed { message, local_rank: 0, stage: None, errno, subject: None }
        }
    }
}

/// Converts an event to a Python object. Raises an exception if the supervisor's runtime has panicked.
pub(crate) fn to_python(py: Python<'_>, event: Event) -> PyResult<Py<PyAny>> {
    match event {
        Event::Warmed { failure } => {
            let (exitcode, hung) = failure.map_or((None, false), |end| (exitcode(end.exit), end.hung));
            object(py, Warmed { is_ready: failure.is_none(), exitcode, hung })
        }
        Event::GroupStarted { pids, started } => object(py, GroupStarted { pids, started_ns: started.0 }),
        Event::StartFailed(failure) => object(py, start_failed(failure)),
        Event::WorkerExited { local_rank, pid, exit, sent, seen } => {
            let exited = WorkerExited {
                local_rank,
                pid,
                exitcode: exitcode(exit),
                sent_signal: sent.map(elasticrs_sys::signal::Signal::number),
                seen_ns: seen.0,
            };
            object(py, exited)
        }
        Event::WorkerSwept { local_rank, swept } => {
            let (ended, stuck) = (descendants(swept.ended), descendants(swept.stuck));
            object(py, WorkerSwept { local_rank, ended, more_ended: swept.more, stuck })
        }
        Event::WorkerReplaced { local_rank, pid, started } => {
            object(py, WorkerReplaced { local_rank, pid, started_ns: started.0 })
        }
        Event::ReplaceFailed(failure) => {
            object(py, ReplaceFailed { message: failure.to_string(), local_rank: failure.local_rank() })
        }
        Event::StateKept { asked, answered, begun, ended } => {
            object(py, StateKept { asked, answered, begun_ns: begun.0, ended_ns: ended.0 })
        }
        Event::FailureSeen { local_rank, seen, signalled, siblings } => {
            object(py, FailureSeen { local_rank, seen_ns: seen.0, signalled_ns: signalled.0, siblings })
        }
        Event::TimerExpired(timer) => object(py, timer_expired(timer)),
        Event::WorkerHung(hung) => object(py, worker_hung(*hung)),
        Event::WorkerRaised(raised) => {
            let supervisor::WorkerRaised { local_rank, pid, text, seen, limit, origin, exit } = raised;
            let limit = limit.map(|limit| limit.as_secs_f64());
            object(
                py,
                WorkerRaised {
                    local_rank,
                    pid,
                    text,
                    seen_ns: seen.0,
                    limit,
                    origin: origin.name(),
                    exit: exit.name(),
                },
            )
        }
        Event::WorkersKilled(supervisor::WorkersKilled { workers, reason, limit }) => {
            let (local_ranks, pids) = workers.into_iter().unzip();
            let (reason, signal) = match reason {
                KillReason::AfterSignal(signal) => ("signal", Some(signal.number())),
                KillReason::SlowExit => ("slow exit", None),
                KillReason::StalledExit => ("stalled exit", None),
                KillReason::Request => ("request", None),
            };
            object(py, WorkersKilled { local_ranks, pids, reason, signal, limit: limit.as_secs_f64() })
        }
        Event::WorkerPaused { local_rank, pid, signal } => object(py, WorkerPaused { local_rank, pid, signal }),
        Event::WorkerResumed { local_rank, pid } => object(py, WorkerResumed { local_rank, pid }),
        Event::Fenced => object(py, Fenced {}),
        Event::GroupEnded { outcome, nursery, stuck_workers, swept, at } => {
            let (stuck_ranks, wait_channels) = stuck_workers.into_iter().unzip();
            let group_ended = GroupEnded {
                outcome: outcome.name(),
                nursery_exitcode: nursery.and_then(|end| exitcode(end.exit)),
                nursery_hung: nursery.is_some_and(|end| end.hung),
                stuck_ranks,
                wait_channels,
                ended: descendants(swept.ended),
                more_ended: swept.more,
                stuck: descendants(swept.stuck),
                spared: descendants(swept.spared),
                ended_ns: at.0,
            };
            object(py, group_ended)
        }
        Event::LogTrouble { local_rank, path, errno } => {
            object(py, LogTrouble { local_rank, path: path.into(), errno })
        }
        Event::Degraded { message } => object(py, Degraded { message }),
        Event::Panicked { message } => {
            Err(SupervisorError::new_err(format!("the supervisor's runtime panicked: {message}")))
        }
    }
}

#[expect(clippy::cast_precision_loss, reason = "milliseconds since 1970 fit for the next 200,000 years")]
fn timer_expired(timer: supervisor::TimerExpired) -> TimerExpired {
    let supervisor::TimerExpired { local_rank, pid, scope, at, deadline_ms, others, signal, seen } = timer;
    let (deadline, signal) = (deadline_ms as f64 / 1000.0, signal.map(elasticrs_sys::signal::Signal::number));
    TimerExpired { local_rank, pid, scope, at, deadline, others, signal, seen_ns: seen.0 }
}

/// Converts a heartbeat to its Python class.
pub(crate) fn heartbeat(beat: readings::Heartbeat) -> Heartbeat {
    let readings::Heartbeat { local_rank, at, step, is_global, is_automatic, section, has_returned } = beat;
    Heartbeat { local_rank, at_ns: at.0, step, is_global, is_automatic, section, has_returned }
}

fn worker_hung(hung: supervisor::WorkerHung) -> WorkerHung {
    let rank = |seen: supervisor::RankSeen| RankSeen {
        local_rank: seen.local_rank,
        heartbeat: seen.heartbeat.map(heartbeat),
        is_late: seen.is_late,
        state: seen.state.to_string().trim().to_owned(),
        wait_channel: seen.wait_channel,
        frame: seen.frame,
    };
    WorkerHung {
        local_rank: hung.local_rank,
        pid: hung.pid,
        missed: hung.missed.name(),
        since_ns: hung.since.0,
        limit: hung.limit.as_secs_f64(),
        seen_ns: hung.seen.0,
        ground: hung.ground.name(),
        ranks: hung.ranks.into_iter().map(rank).collect(),
    }
}

/// Converts a value of one of the event classes to a Python object.
pub(crate) fn object<T>(py: Python<'_>, value: T) -> PyResult<Py<PyAny>>
where
    T: pyo3::PyClass + Into<PyClassInitializer<T>>,
{
    Ok(Py::new(py, value)?.into_any())
}
