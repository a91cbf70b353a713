//! Metrics of a job, in Prometheus' text format 0.0.4.
//!
//! - **METRICS-1** Names, types and labels are those in `docs/metrics.md`. Every metric family is present from the
//!   start, except those for values that are not known yet: `elasticrs_job_info`, `elasticrs_world_size` and
//!   `elasticrs_restarts_left`.
//! - **METRICS-2** The user's own metrics have at most [`MAX_SERIES`] series. Values of further series are dropped and
//!   counted.

use std::collections::BTreeMap;
use std::fmt::{Display, Write as _};
use std::time::{Duration, Instant};

use elasticrs_runtime::readings::{Heartbeat, Readings, Stream, TimerCounts};
use elasticrs_sys::clock::Stamp;
use elasticrs_sys::named_enum;

use crate::log_sizes::StreamCounts;
use crate::processes::{self, Usage, Worker};
use crate::steps::LastStep;

/// Maximum number of series (pairs of group and name) that `put_metric` may create.
pub const MAX_SERIES: usize = 2000;

/// Upper bounds of the recovery-time buckets, in seconds.
const BUCKETS: [f64; 13] = [0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];

named_enum! {
    /// Reason why the workers were restarted.
    pub enum Cause {
        WorkerFailed = "worker_failed",
        WorkerHung = "worker_hung",
        TimerExpired = "timer_expired",
        StartFailed = "start_failed",
        NurseryLost = "nursery_lost",
        PortTaken = "port_taken",
        Nodes = "nodes",
    }
}

named_enum! {
    /// State of the workers, named as in torch.
    pub enum State {
        Init = "INIT",
        Healthy = "HEALTHY",
        Unhealthy = "UNHEALTHY",
        Stopped = "STOPPED",
        Succeeded = "SUCCEEDED",
        Failed = "FAILED",
    }
}

#[derive(Debug, Clone, Copy, Default)]
struct Series {
    last: f64,
    sum: f64,
    count: u64,
}

/// Metrics that the agent updates itself, such as the number of restarts. The values in [`Moment`] are instead read at
/// each scrape.
#[derive(Debug)]
pub struct Registry {
    /// Time that an agent has spent on each activity.
    pub spans: Spans,
    restarts: [u64; Cause::ALL.len()],
    /// Number of recoveries in each bucket. The last bucket counts the recoveries that took longer than the highest
    /// bound.
    recoveries: [u64; BUCKETS.len() + 1],
    recovery_seconds: f64,
    put: BTreeMap<(String, String), Series>,
    dropped: u64,
    job: Option<Job>,
}

/// Identity of the agent within its job. Appears on the metrics page once [`Registry::identify`] has been called.
#[derive(Debug, Default)]
pub struct Job {
    pub run_id: String,
    /// Name of the machine.
    pub node: String,
    /// Group rank of this node, and the number of workers on all nodes. `None` before the first rendezvous.
    pub placed: Option<(u32, u32)>,
}

/// Values that are read at the time of a scrape.
pub struct Moment<'a> {
    pub now: Instant,
    pub uptime: Duration,
    pub alive: bool,
    pub state: State,
    pub restarts_left: Option<f64>,
    pub workers: &'a [Worker],
    /// Resource usage of the running workers, see [`usages`].
    pub usages: &'a [(&'a Worker, Usage)],
    pub readings: &'a Readings,
    /// Last training step of each worker that has written one into its file in memory, by local rank.
    pub steps: &'a BTreeMap<usize, LastStep>,
    pub sizes: &'a StreamCounts,
}

impl Registry {
    /// Creates a registry in which all counts are zero.
    pub fn new(now: Instant) -> Self {
        Self {
            spans: Spans::new(now),
            restarts: Default::default(),
            recoveries: Default::default(),
            recovery_seconds: 0.0,
            put: BTreeMap::new(),
            dropped: 0,
            job: None,
        }
    }

    /// Sets the identity of the agent within its job.
    pub fn identify(&mut self, job: Job) {
        self.job = Some(job);
    }

    /// Counts a restart of the workers.
    pub fn restarted(&mut self, cause: Cause) {
        self.restarts[cause as usize] += 1;
    }

    /// Records a recovery. `span` is the time from the failure until the workers were running again.
    pub fn recovered(&mut self, span: Duration) {
        let seconds = span.as_secs_f64();
        let bucket = BUCKETS.iter().position(|limit| seconds <= *limit).unwrap_or(BUCKETS.len());
        self.recoveries[bucket] += 1;
        self.recovery_seconds += seconds;
    }

    /// Records a value of the user's metric `name` in `group`. Drops the value if it would create too many series
    /// (METRICS-2).
    pub fn put(&mut self, group: &str, name: &str, value: f64) {
        let key = (group.to_owned(), name.to_owned());
        if self.put.len() >= MAX_SERIES && !self.put.contains_key(&key) {
            self.dropped += 1;
            return;
        }
        let series = self.put.entry(key).or_default();
        series.last = value;
        series.sum += value;
        series.count += 1;
    }

    /// Renders the metrics page (METRICS-1).
    pub(crate) fn render(&self, moment: &Moment<'_>) -> String {
        let mut page = Page(String::with_capacity(4096));
        render_agent(&mut page, moment);
        self.render_identity(&mut page);
        self.render_job(&mut page, moment);
        render_workers(&mut page, moment.usages);
        render_heartbeats(&mut page, &moment.readings.heartbeats, moment.workers);
        render_steps(&mut page, moment);
        render_timers(&mut page, moment.readings.timers);
        render_logs(&mut page, moment);
        self.render_put(&mut page);
        page.0
    }

    fn render_identity(&self, page: &mut Page) {
        let Some(Job { run_id, node, placed }) = &self.job else { return };
        let group_rank = placed.map_or_else(String::new, |(group_rank, _)| group_rank.to_string());
        let labels: [Label<'_>; 3] = [("run_id", run_id), ("node", node), ("group_rank", &group_rank)];
        // Put these labels on a separate metric, because they can change with every rendezvous. If every sample had
        // them, each change would start new series.
        page.family("elasticrs_job_info", "gauge", "Always 1; the job, the machine and the group rank of this agent.");
        page.sample("elasticrs_job_info", &labels, 1.0);
        if let Some((_, world_size)) = placed {
            page.value("elasticrs_world_size", "gauge", "Number of workers on all nodes.", f64::from(*world_size));
        }
    }

    fn render_job(&self, page: &mut Page, moment: &Moment<'_>) {
        page.family("elasticrs_restarts_total", "counter", "Times that the workers started again, by cause.");
        for (cause, count) in Cause::ALL.into_iter().zip(self.restarts) {
            page.sample("elasticrs_restarts_total", &[("cause", &cause.name())], whole(count));
        }
        if let Some(left) = moment.restarts_left {
            page.value("elasticrs_restarts_left", "gauge", "Restarts that may still be charged.", left);
        }
        page.family("elasticrs_time_seconds_total", "counter", "What the time of this agent went to.");
        for (activity, span) in self.spans.totals(moment.now) {
            page.sample("elasticrs_time_seconds_total", &[("activity", &activity.name())], span.as_secs_f64());
        }
        let name = "elasticrs_recovery_seconds";
        page.family(name, "histogram", "From a failure until the workers run again.");
        let mut sum = 0;
        for (index, count) in self.recoveries.iter().enumerate() {
            sum += count;
            let limit = BUCKETS.get(index).map_or_else(|| "+Inf".to_owned(), |limit| number(*limit));
            page.sample(&format!("{name}_bucket"), &[("le", &limit)], whole(sum));
        }
        page.sample(&format!("{name}_sum"), &[], self.recovery_seconds);
        page.sample(&format!("{name}_count"), &[], whole(sum));
    }

    fn render_put(&self, page: &mut Page) {
        page.family("elasticrs_metric_last", "gauge", "The last value given to put_metric.");
        for ((group, name), series) in &self.put {
            page.sample("elasticrs_metric_last", &[("group", group), ("name", name)], series.last);
        }
        page.family("elasticrs_metric", "summary", "All values given to put_metric.");
        for ((group, name), series) in &self.put {
            let labels: [Label<'_>; 2] = [("group", group), ("name", name)];
            page.sample("elasticrs_metric_sum", &labels, series.sum);
            page.sample("elasticrs_metric_count", &labels, whole(series.count));
        }
        let help = "Values of put_metric with one name too many.";
        page.value("elasticrs_metrics_dropped_total", "counter", help, whole(self.dropped));
    }
}

fn render_agent(page: &mut Page, moment: &Moment<'_>) {
    page.family("elasticrs_info", "gauge", "Always 1; the version of elasticrs.");
    page.sample("elasticrs_info", &[("version", &env!("CARGO_PKG_VERSION"))], 1.0);
    let help = "Since the health check server was started.";
    page.value("elasticrs_agent_uptime_seconds", "gauge", help, moment.uptime.as_secs_f64());
    let help = "0 when the loop of the agent is known to hang; see /healthz.";
    page.value("elasticrs_agent_alive", "gauge", help, f64::from(u8::from(moment.alive)));
    page.family("elasticrs_agent_state", "gauge", "1 for the state in which the workers are.");
    for state in State::ALL {
        let is_now = f64::from(u8::from(state == moment.state));
        page.sample("elasticrs_agent_state", &[("state", &state.name())], is_now);
    }
}

/// Returns the resource usage of the workers that are still running, as read from `/proc`.
pub fn usages(workers: &[Worker]) -> Vec<(&Worker, Usage)> {
    workers
        .iter()
        .filter_map(|worker| Some((worker, processes::usage(worker.pid)?)))
        .filter(|(worker, usage)| worker.started == Some(usage.started))
        .collect()
}

fn render_workers(page: &mut Page, usages: &[(&Worker, Usage)]) {
    let name = "elasticrs_worker_resident_memory_bytes";
    page.family(name, "gauge", "Memory of the worker's own process.");
    for (worker, usage) in usages {
        page.sample(name, &worker.labels(), whole(usage.resident));
    }
    let name = "elasticrs_worker_cpu_seconds_total";
    page.family(name, "counter", "CPU time of the worker's own process; begins anew with every attempt.");
    for (worker, usage) in usages {
        page.sample(name, &worker.labels(), usage.cpu);
    }
}

fn render_heartbeats(page: &mut Page, heartbeats: &[Heartbeat], workers: &[Worker]) {
    let now = Stamp::now();
    let beats: Vec<_> = heartbeats
        .iter()
        .filter_map(|beat| Some((workers.iter().find(|worker| worker.local_rank == beat.local_rank)?, beat)))
        .collect();
    let name = "elasticrs_worker_heartbeat_age_seconds";
    page.family(name, "gauge", "Since the last heartbeat of the worker.");
    for (worker, beat) in &beats {
        let age = Duration::from_nanos(now.0.saturating_sub(beat.at.0));
        page.sample(name, &worker.labels(), age.as_secs_f64());
    }
}

/// Renders the last training step of each worker: that of `elasticrs.Keep`, otherwise that of the last heartbeat,
/// otherwise the number of optimizer steps. The status chooses in the same order.
fn render_steps(page: &mut Page, moment: &Moment<'_>) {
    let name = "elasticrs_worker_step";
    page.family(name, "gauge", "The last training step of the worker.");
    for worker in moment.workers {
        let written = moment.steps.get(&(worker.local_rank as usize));
        let beat = moment.readings.heartbeats.iter().find(|beat| beat.local_rank == worker.local_rank);
        let kept = written.filter(|last| last.is_kept);
        let told = beat.and_then(|beat| beat.step);
        if let Some(step) = kept.map(|last| last.step).or(told).or(written.map(|last| last.step)) {
            page.sample(name, &worker.labels(), whole(step));
        }
    }
}

fn render_timers(page: &mut Page, timers: TimerCounts) {
    let help = "Expiration timers of the workers that are not released yet.";
    page.value("elasticrs_timers_live", "gauge", help, whole(timers.live));
    let help = "Timers that were not released in time.";
    page.value("elasticrs_timers_expired_total", "counter", help, whole(timers.expired));
    let help = "Of these, seen more than 10 ms after their deadline.";
    page.value("elasticrs_timers_late_total", "counter", help, whole(timers.late));
}

fn render_logs(page: &mut Page, moment: &Moment<'_>) {
    let (mut bytes, mut lines) = (moment.sizes.counts.clone(), BTreeMap::new());
    for &(stream, read, newlines) in &moment.readings.logs {
        *bytes.entry(stream).or_default() += read;
        lines.insert(stream, newlines);
    }
    let name = "elasticrs_log_bytes_total";
    render_streams(page, name, "Bytes of the streams that go to files or to the console.", &bytes, moment.workers);
    let name = "elasticrs_log_lines_total";
    render_streams(page, name, "Lines of the streams that go to the console.", &lines, moment.workers);
    let name = "elasticrs_log_sizes_age_seconds";
    page.family(name, "gauge", "Since the sizes of the files that are only written were looked at.");
    if let Some(age) = moment.sizes.age {
        page.sample(name, &[], age.as_secs_f64());
    }
}

fn render_streams(page: &mut Page, name: &str, help: &str, counts: &BTreeMap<Stream, u64>, workers: &[Worker]) {
    page.family(name, "counter", help);
    for ((local_rank, output), count) in counts {
        // Skip a stream whose worker is not known yet. Streams are registered shortly before their workers.
        let Some(worker) = workers.iter().find(|worker| worker.local_rank == *local_rank) else { continue };
        let [rank, local_rank] = worker.labels();
        page.sample(name, &[rank, local_rank, ("stream", &output.name())], whole(*count));
    }
}

/// Name and value of a label of a metric.
pub(crate) type Label<'a> = (&'static str, &'a dyn Display);

struct Page(String);

impl Page {
    fn family(&mut self, name: &str, kind: &str, help: &str) {
        // Writing to a string cannot fail.
        let _ = writeln!(self.0, "# HELP {name} {help}\n# TYPE {name} {kind}");
    }

    /// Adds a metric (a "family" in Prometheus) that has one value, without labels, to the page.
    fn value(&mut self, name: &str, kind: &str, help: &str, value: f64) {
        self.family(name, kind, help);
        self.sample(name, &[], value);
    }

    fn sample(&mut self, name: &str, labels: &[Label<'_>], value: f64) {
        self.0.push_str(name);
        for (index, (label, text)) in labels.iter().enumerate() {
            self.0.push(if index == 0 { '{' } else { ',' });
            let _ = write!(self.0, "{label}=\"");
            for character in text.to_string().chars() {
                match character {
                    '\\' => self.0.push_str("\\\\"),
                    '"' => self.0.push_str("\\\""),
                    '\n' => self.0.push_str("\\n"),
                    other => self.0.push(other),
                }
            }
            self.0.push('"');
        }
        if !labels.is_empty() {
            self.0.push('}');
        }
        let _ = writeln!(self.0, " {}", number(value));
    }
}

fn number(value: f64) -> String {
    if value.is_nan() {
        "NaN".to_owned()
    } else if value.is_infinite() {
        if value > 0.0 { "+Inf" } else { "-Inf" }.to_owned()
    } else {
        value.to_string()
    }
}

#[expect(clippy::cast_precision_loss, reason = "all numbers of the format are floats")]
fn whole(value: u64) -> f64 {
    value as f64
}

named_enum! {
    /// Current activity of an agent. The strings are the values of the `activity` label in the metrics.
    pub enum Activity {
        /// The workers are being started for the first time.
        Starting = "starting",
        /// The workers are running, and no failure is known.
        Productive = "productive",
        /// Workers have failed and are not running again yet.
        Restarting = "restarting",
        /// The agent is waiting for other nodes in a rendezvous.
        WaitingForNodes = "waiting_for_nodes",
        /// The workers are running, but at least one of them hangs.
        Hung = "hung",
    }
}

/// Time spent on each activity.
#[derive(Debug, Clone)]
pub struct Spans {
    now: Activity,
    since: Instant,
    totals: [Duration; Activity::ALL.len()],
}

impl Spans {
    /// Starts measuring the time spent on each activity, with [`Activity::Starting`] as the current activity. `now` is
    /// the current time.
    pub fn new(now: Instant) -> Self {
        Self { now: Activity::Starting, since: now, totals: Default::default() }
    }

    /// Ends the current activity at `now` and starts `activity`.
    pub fn enter(&mut self, activity: Activity, now: Instant) {
        self.totals[self.now as usize] += now.saturating_duration_since(self.since);
        (self.now, self.since) = (activity, now);
    }

    /// Moves `span` from productive time to hung time. Called when a hung worker is detected, with the time for which
    /// it has hung so far.
    pub fn was_hung(&mut self, span: Duration, now: Instant) {
        self.enter(self.now, now);
        let moved = span.min(self.totals[Activity::Productive as usize]);
        self.totals[Activity::Productive as usize] -= moved;
        self.totals[Activity::Hung as usize] += moved;
    }

    /// Returns the time spent on each activity so far.
    pub fn totals(&self, now: Instant) -> [(Activity, Duration); Activity::ALL.len()] {
        Activity::ALL.map(|activity| {
            let running = if activity == self.now { now.saturating_duration_since(self.since) } else { Duration::ZERO };
            (activity, self.totals[activity as usize] + running)
        })
    }
}

#[cfg(test)]
mod tests {
    use elasticrs_runtime::readings::Dest;
    use proptest::prelude::*;

    use super::*;

    fn page(registry: &Registry, workers: &[Worker]) -> String {
        let moment = Moment {
            now: Instant::now(),
            uptime: Duration::from_secs(2),
            alive: true,
            state: State::Healthy,
            restarts_left: Some(3.0),
            workers,
            usages: &usages(workers),
            readings: &Readings::default(),
            steps: &BTreeMap::new(),
            sizes: &StreamCounts {
                counts: BTreeMap::from([((1, Dest::Stderr), 12), ((7, Dest::Stdout), 1)]),
                age: Some(Duration::from_millis(500)),
            },
        };
        registry.render(&moment)
    }

    #[test]
    fn labels_are_escaped_and_numbers_use_the_prometheus_format() {
        let mut registry = Registry::new(Instant::now());
        registry.put("a\"b\\c\nd", "x", f64::INFINITY);
        let text = page(&registry, &[]);
        let line = "elasticrs_metric_last{group=\"a\\\"b\\\\c\\nd\",name=\"x\"} +Inf\n";
        assert!(text.contains(line), "{text}");
        assert!(text.contains("elasticrs_agent_state{state=\"HEALTHY\"} 1\n"));
        assert_eq!([number(f64::NAN), number(f64::NEG_INFINITY), number(0.5)], ["NaN", "-Inf", "0.5"]);
    }

    #[test]
    fn job_info_labels_are_escaped_and_updated_in_each_round() {
        let mut registry = Registry::new(Instant::now());
        assert!(!page(&registry, &[]).contains("job_info"));
        for (placed, group_rank) in [(None, ""), (Some((1, 8)), "1"), (Some((0, 16)), "0")] {
            registry.identify(Job { run_id: "a\"b\\c\nd".into(), node: "n1".into(), placed });
            let text = page(&registry, &[]);
            let labels = format!("{{run_id=\"a\\\"b\\\\c\\nd\",node=\"n1\",group_rank=\"{group_rank}\"}}");
            assert!(text.contains(&format!("elasticrs_job_info{labels} 1\n")), "{text}");
            assert_eq!(text.matches("\nelasticrs_job_info").count(), 1);
            let size = placed.map(|(_, world_size)| format!("\nelasticrs_world_size {world_size}\n"));
            assert!(size.is_none_or(|size| text.contains(&size)), "{text}");
            assert_eq!(text.contains("elasticrs_world_size"), placed.is_some());
        }
    }

    #[test]
    fn histogram_buckets_are_cumulative() {
        let mut registry = Registry::new(Instant::now());
        for millis in [5, 20, 600_000] {
            registry.recovered(Duration::from_millis(millis));
        }
        let text = page(&registry, &[]);
        for line in ["_bucket{le=\"0.01\"} 1", "_bucket{le=\"300\"} 2", "_bucket{le=\"+Inf\"} 3", "_count 3"] {
            assert!(text.contains(&format!("elasticrs_recovery_seconds{line}\n")), "{text}");
        }
    }

    #[test]
    fn the_number_of_metric_series_is_limited() {
        let mut registry = Registry::new(Instant::now());
        for number in 0..MAX_SERIES + 5 {
            registry.put("g", &number.to_string(), 1.0);
            registry.put("g", "0", 1.0);
        }
        assert_eq!((registry.put.len(), registry.dropped), (MAX_SERIES, 5));
    }

    #[test]
    fn restarts_are_counted_by_cause() {
        let mut registry = Registry::new(Instant::now());
        registry.restarted(Cause::Nodes);
        assert!(page(&registry, &[]).contains("elasticrs_restarts_total{cause=\"nodes\"} 1\n"));
    }

    #[test]
    fn log_sizes_are_shown_only_for_known_workers() {
        let own = Worker::new(3, 1, std::process::id().cast_signed());
        let text = page(&Registry::new(Instant::now()), &[own]);
        let found: Vec<_> = text.lines().filter(|line| line.starts_with("elasticrs_log_")).collect();
        let bytes = "elasticrs_log_bytes_total{rank=\"3\",local_rank=\"1\",stream=\"stderr\"} 12";
        assert_eq!(found, [bytes, "elasticrs_log_sizes_age_seconds 0.5"]);
    }

    #[test]
    fn a_process_with_a_reused_pid_is_not_shown_as_a_worker() {
        let pid = std::process::id().cast_signed();
        let own = Worker::new(3, 1, pid);
        let recycled = Worker { started: Some(1), ..own.clone() };
        let registry = Registry::new(Instant::now());
        let sample = "elasticrs_worker_resident_memory_bytes{rank=\"3\",local_rank=\"1\"} ";
        assert!(page(&registry, &[own]).contains(sample));
        assert!(!page(&registry, &[recycled]).contains(sample));
    }

    #[test]
    fn time_lost_in_a_hang_is_moved_from_productive_to_hung() {
        let start = Instant::now();
        let second = Duration::from_secs(1);
        let mut spans = Spans::new(start);
        spans.enter(Activity::Productive, start + second);
        spans.was_hung(second * 3, start + second * 11);
        spans.was_hung(second * 30, start + second * 11);
        spans.enter(Activity::Restarting, start + second * 11);
        let totals = spans.totals(start + second * 12).map(|(_, span)| span.as_secs());
        assert_eq!(totals, [1, 0, 1, 0, 10]);
    }

    proptest! {
        #[test]
        fn every_moment_is_counted_for_exactly_one_activity(steps in prop::collection::vec((0usize..6, 0u64..1000), 0..40)) {
            let start = Instant::now();
            let (mut spans, mut now) = (Spans::new(start), start);
            for (what, pause) in steps {
                now += Duration::from_millis(pause);
                match Activity::ALL.get(what) {
                    Some(activity) => spans.enter(*activity, now),
                    None => spans.was_hung(Duration::from_millis(pause * 3), now),
                }
                let sum: Duration = spans.totals(now).iter().map(|(_, span)| *span).sum();
                prop_assert_eq!(sum, now - start);
            }
        }
    }
}
