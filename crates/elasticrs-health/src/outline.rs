//! A basic job status, which the server returns until the agent's loop publishes the full one. The loop publishes a
//! status only after the first connection to the control socket. If the loop is already stuck by then, only the basic
//! status is available.

use serde_json::{Value, json};

use crate::processes::state_of;

/// Facts about a job that its agent already knows when it starts the workers.
#[derive(Debug)]
pub struct Outline {
    pub job: JobOutline,
    /// `None` if no workers have been started yet.
    pub attempt: Option<AttemptOutline>,
}

/// The job as the user has configured it.
#[derive(Debug)]
pub struct JobOutline {
    pub run_id: String,
    pub role: String,
    pub name: String,
    pub nproc: u32,
    pub max_restarts: u32,
    pub event_log: Option<String>,
}

/// An attempt to run the job. Its workers have been started.
#[derive(Debug)]
pub struct AttemptOutline {
    pub name: String,
    pub round: u64,
    pub restarts: u32,
    /// Group rank of this node, number of nodes, and number of workers on all nodes.
    pub placed: (u32, u32, u32),
    /// Folder of the log files. `None` if the workers' output is not written to files.
    pub log_folder: Option<String>,
    /// Global rank, local rank and pid of each worker on this node. The global rank may be `None`.
    pub workers: Vec<(Option<u32>, u32, i32)>,
    /// Time at which all workers were running, in nanoseconds of the boot clock.
    pub at: u64,
}

impl Outline {
    /// Returns the job's status. It has the same fields as a status from the agent's loop, except those that the server
    /// adds itself. Reads the states of the workers from `/proc`. Facts that only the loop knows are `null`.
    pub(crate) fn status(&self) -> Value {
        let JobOutline { run_id, role, name, nproc, max_restarts, event_log } = &self.job;
        let attempt = self.attempt.as_ref();
        let workers: Vec<Value> = attempt.map(AttemptOutline::workers).unwrap_or_default();
        let state = match attempt {
            None => "INIT",
            Some(_) if workers.iter().all(|worker| worker["state"] == "EXITED") => "STOPPED",
            Some(_) => "HEALTHY",
        };
        let group = attempt.map(|AttemptOutline { placed: (rank, nodes, workers), .. }| {
            json!({"rank": rank, "world_size": nodes, "workers": workers, "master_addr": null, "master_port": null})
        });
        let log_folder = attempt.and_then(|attempt| attempt.log_folder.as_deref());
        json!({
            "schema": 1,
            "host": nix::unistd::gethostname().map(|name| name.to_string_lossy().into_owned()).unwrap_or_default(),
            "event_log": event_log,
            "log_folder": log_folder,
            "has_log_files": log_folder.is_some(),
            "job": {
                "run_id": run_id,
                "role": role,
                "name": name,
                "nproc": nproc,
                "max_restarts": max_restarts,
                "restart_window": null,
            },
            "state": state,
            "outcome": null,
            "spare_of": 0,
            "round": attempt.map(|attempt| attempt.round),
            "attempt": attempt.map(|attempt| attempt.name.as_str()),
            "warm": null,
            "why_cold": null,
            "restart_phases_ms": {},
            "restarts": attempt.map_or(0, |attempt| attempt.restarts),
            "restarts_left": null,
            "group": group,
            "workers": workers,
            "others": [],
            "slowest": null,
            "no_progress": null,
            "kept": null,
            "continued": null,
            "nodes": null,
            "cause": null,
            "last_failure": null,
            "earlier_failures": [],
        })
    }
}

impl AttemptOutline {
    fn workers(&self) -> Vec<Value> {
        let of = |&(rank, local_rank, pid)| {
            let state = match state_of(pid, self.at) {
                None | Some('Z' | 'X') => "EXITED",
                Some('T' | 't') => "PAUSED",
                Some(_) => "RUNNING",
            };
            json!({
                "rank": rank,
                "local_rank": local_rank,
                "role_rank": null,
                "pid": pid,
                "state": state,
                "exitcode": null,
                "was_stopped": false,
                "training": null,
                "progress": null,
            })
        };
        self.workers.iter().map(of).collect()
    }
}
