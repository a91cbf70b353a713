//! `elasticrs._core`: Python bindings for the Rust crates of elasticrs.
//!
//! This crate only translates between Python and the other crates. Its classes are frozen, it makes no decisions, and
//! Rust threads never call into Python. Calls that can block release the GIL. Every name is documented in
//! `python/elasticrs/_core.pyi`.
//!
//! | modules | contents |
//! | --- | --- |
//! | `supervisor`, `spec`, `event` | the supervisor, the descriptions that it is given, and the events that it returns |
//! | `nursery` | the nursery's embedded program, and the nurseries that are Python processes |
//! | `coordination`, `worker_store` | the clients and servers of both stores |
//! | `stores`, `home` | the threads of the servers and clients, and how the nursery guards the lease of a client |
//! | `health`, `timer_fifo` | the health check server, and timers for programs without an agent |
//! | `memory` | copies of memory by address; the only `unsafe` code here |
//! | `helpers`, `error` | functions without a supervisor, and the exception types of all errors |
//!
//! A new class or function is exported by `_core` below, and declared in `_core.pyi`; `make lint` compares the two.

use pyo3::prelude::*;

mod coordination;
mod error;
mod event;
mod health;
mod helpers;
mod home;
mod memory;
mod nursery;
mod spec;
mod stores;
mod supervisor;
mod timer_fifo;
mod worker_store;

/// The private native module of elasticrs.
#[pymodule(gil_used = false)]
mod _core {
    #[pymodule_export]
    #[expect(non_upper_case_globals, reason = "Python's name for it")]
    const __version__: &str = env!("CARGO_PKG_VERSION");

    #[pymodule_export]
    use crate::coordination::{
        Change, Changes, Compare, Connected, ConnectionLost, CoordinationClient, CoordinationServer, Entry, Op, Reply,
        StoreNotice,
    };
    #[pymodule_export]
    use crate::error::SupervisorError;
    #[pymodule_export]
    use crate::event::{
        Degraded, Descendant, FailureSeen, FdReady, Fenced, GroupEnded, GroupStarted, Heartbeat, LogTrouble, RankSeen,
        ReplaceFailed, StartFailed, StateKept, TimerExpired, Warmed, WorkerExited, WorkerHung, WorkerPaused,
        WorkerRaised, WorkerReplaced, WorkerResumed, WorkerSwept, WorkersKilled,
    };
    #[pymodule_export]
    use crate::health::HealthServer;
    #[pymodule_export]
    use crate::helpers::{
        check_limits, children, heartbeat_page, last_lines, name_of, order_stop_signals, patience_with,
        raise_descriptor_limit, scoped_token, stop_unless_continued,
    };
    #[pymodule_export]
    use crate::memory::copy_and_sum;
    #[pymodule_export]
    use crate::nursery::{WarmNursery, nursery_main, warm_nursery_begin, warm_nursery_main};
    #[pymodule_export]
    use crate::spec::{GroupSpec, LogStream, ProcessSpec, StopPolicy};
    #[pymodule_export]
    use crate::supervisor::Supervisor;
    #[pymodule_export]
    use crate::timer_fifo::TimerFifo;
    #[pymodule_export]
    use crate::worker_store::WorkerStore;
}
