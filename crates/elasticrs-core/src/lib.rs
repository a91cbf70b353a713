//! The Python-independent core of elasticrs: groups of workers, their timers and their logs.
//!
//! # Theory of operation
//!
//! Three kinds of processes are involved. The *agent* (a Python program that loads this crate through
//! `elasticrs._core`) makes the decisions. Its *nursery* ([`elasticrs_nursery`]) is a small single-threaded process
//! that spawns and reaps all workers. Because the nursery is a child subreaper, it can prove that no process of an
//! attempt is left. The *workers* are the user's training processes.
//!
//! In the agent, one runtime thread ([`supervisor`]) communicates with the nursery, carries out the group's stop
//! policy, and queues typed events, which Python fetches. A second thread writes to the console ([`logs`]). Decision
//! logic, such as the state machine of [`supervisor`] and the line splitter of [`logs`], is pure and separate from side
//! effects.
//!
//! | module | contents |
//! | --- | --- |
//! | [`spec`] | description of a group: its processes, how to stop it, how to react to a failure |
//! | [`limits`] | check of the machine's limits before the first worker starts |
//! | [`supervisor`] | starts, watches and stops a group; its module `state` decides, and `task` acts |
//! | [`timer`] | expiration timers that workers set, heartbeats, and the detection of hangs |
//! | [`logs`] | follows log files and writes to the console |
//!
//! [`supervisor::Supervisor`] is the handle that Python uses: it takes commands and returns [`supervisor::Event`]s.
//! Each module states the invariants that its tests cite, such as `SUP`, `TIM` and `LOGS`.
#![deny(unsafe_code)]

pub mod limits;
pub mod logs;
pub mod spec;
pub mod supervisor;
pub mod timer;
