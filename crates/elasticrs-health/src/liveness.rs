//! Decides whether the agent is alive. Pure: even the current time is an argument.

use std::time::{Duration, Instant};

/// How long an answer is reused, so that a burst of requests wakes the agent's loop only once.
pub(crate) const FRESH: Duration = Duration::from_millis(50);

/// State of the agent's liveness check: the pending request, if any, and the agent's last answer.
#[derive(Debug, Clone)]
pub(crate) struct Liveness {
    limit: Duration,
    asked: Option<Instant>,
    /// A liveness request is answered first by the agent's loop, and then by the supervisor's thread. True if only the
    /// loop has answered the pending request.
    is_passed_on: bool,
    answered: Option<AgentAnswer>,
}

#[derive(Debug, Clone)]
struct AgentAnswer {
    at: Instant,
    /// Time since the agent last made progress, measured when the agent answered the liveness request.
    age: Duration,
    /// Activity of the agent when it answered. `None` if unknown.
    doing: Option<String>,
}

/// Next step in handling a liveness request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NextStep {
    /// Wake the agent's loop and wait for its answer.
    WakeLoop,
    /// Wait for the agent's answer to an earlier liveness request, because that request is still pending.
    Wait,
    /// Use the last answer, because it is recent enough.
    Reuse,
}

/// Answer to a liveness request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LivenessReport {
    pub alive: bool,
    /// Time since the agent's last progress, since its loop became stuck, or since an unanswered liveness request.
    /// `reason` tells which of the three times is meant.
    pub age: Duration,
    /// Reason why the agent is considered dead, or will be if the problem persists. `None` if nothing is wrong.
    pub reason: Option<String>,
}

impl Liveness {
    /// Creates the initial state, in which no liveness request has been made yet.
    pub(crate) fn new(limit: Duration) -> Self {
        Self { limit, asked: None, is_passed_on: false, answered: None }
    }

    /// Returns the time limit for an answer from the agent (HEALTH-4).
    pub(crate) fn limit(&self) -> Duration {
        self.limit
    }

    /// Registers a liveness request. Returns whether to wake the agent's loop, to wait, or to reuse the last answer.
    pub(crate) fn ask(&mut self, now: Instant) -> NextStep {
        if self.asked.is_some() {
            return NextStep::Wait;
        }
        if self.answered.as_ref().is_some_and(|answer| now.saturating_duration_since(answer.at) < FRESH) {
            return NextStep::Reuse;
        }
        self.asked = Some(now);
        NextStep::WakeLoop
    }

    /// Records that the agent's loop has answered a liveness request. The request stays open until the supervisor's
    /// runtime has answered it too.
    pub(crate) fn pass_on(&mut self) {
        self.is_passed_on = true;
    }

    /// Records a complete answer. `age` is the time since the agent's last progress, and `doing` is the agent's
    /// activity.
    pub(crate) fn answer(&mut self, now: Instant, age: Duration, doing: Option<String>) {
        (self.asked, self.is_passed_on) = (None, false);
        self.answered = Some(AgentAnswer { at: now, age, doing });
    }

    /// Decides whether the agent is alive at the time `now`.
    ///
    /// `at_work` is the time for which the agent's loop has been handling its current event. `None` if the loop is idle
    /// or is not monitored.
    pub(crate) fn verdict(&self, now: Instant, at_work: Option<Duration>) -> LivenessReport {
        let since = |at: Instant| now.saturating_duration_since(at);
        let stale = self.answered.as_ref().filter(|answer| answer.age > self.limit);
        if let Some(answer) = stale {
            let age = answer.age.saturating_add(since(answer.at));
            let place = answer.doing.as_ref().map_or_else(String::new, |doing| format!(", in {doing}"));
            let reason = format!("the last progress was {:.1} s ago{place}", age.as_secs_f64());
            return LivenessReport { alive: false, age, reason: Some(reason) };
        }
        let no_step = self.no_step(now, at_work);
        let of_loop = |age: Duration| format!("the agent's loop has taken no step for {:.1} s", age.as_secs_f64());
        if let Some(age) = no_step.filter(|&age| age > self.limit.max(FRESH)) {
            return LivenessReport { alive: false, age, reason: Some(of_loop(age)) };
        }
        let Some(asked) = self.asked else {
            let age =
                self.answered.as_ref().map_or(Duration::ZERO, |answer| answer.age.saturating_add(since(answer.at)));
            return LivenessReport { alive: true, age, reason: None };
        };
        let age = since(asked);
        if let Some(longer) = no_step.filter(|&longer| longer > age) {
            return LivenessReport { alive: age <= self.limit, age, reason: Some(of_loop(longer)) };
        }
        let who = if self.is_passed_on { "the runtime that supervises the workers" } else { "the agent's loop" };
        let reason = format!("{who} has not answered for {:.1} s", age.as_secs_f64());
        LivenessReport { alive: age <= self.limit, age, reason: Some(reason) }
    }

    /// Returns for how long the agent's loop has made no progress: the time since its current event began or since its
    /// last answer to a liveness check, whichever is shorter. `None` if the loop is idle or is not monitored.
    fn no_step(&self, now: Instant, at_work: Option<Duration>) -> Option<Duration> {
        let answered = self.answered.as_ref().map(|answer| now.saturating_duration_since(answer.at));
        Some(at_work?.min(answered.unwrap_or(Duration::MAX)))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const LIMIT: Duration = Duration::from_secs(60);
    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn the_agent_is_alive_if_there_was_no_liveness_request() {
        let (liveness, now) = (Liveness::new(LIMIT), Instant::now());
        assert!(liveness.verdict(now + LIMIT * 100, None).alive);
    }

    #[test]
    fn the_agent_is_dead_if_a_request_is_not_answered_in_time() {
        let (mut liveness, now) = (Liveness::new(LIMIT), Instant::now());
        assert_eq!(liveness.ask(now), NextStep::WakeLoop);
        assert_eq!(liveness.ask(now + SECOND), NextStep::Wait);
        assert!(liveness.verdict(now + LIMIT, None).alive);
        let verdict = liveness.verdict(now + LIMIT + SECOND, None);
        assert_eq!((verdict.alive, verdict.age), (false, LIMIT + SECOND));
        assert_eq!(verdict.reason.unwrap(), "the agent's loop has not answered for 61.0 s");
        liveness.answer(now + LIMIT + SECOND, Duration::ZERO, None);
        assert!(liveness.verdict(now + LIMIT + SECOND, None).alive);
    }

    #[test]
    fn an_agent_with_a_stuck_loop_is_dead_at_the_first_liveness_request() {
        let (mut liveness, now) = (Liveness::new(LIMIT), Instant::now());
        liveness.ask(now);
        assert!(liveness.verdict(now, None).alive, "it waits for events");
        let verdict = liveness.verdict(now, Some(LIMIT));
        assert!(verdict.alive);
        assert_eq!(verdict.reason.unwrap(), "the agent's loop has taken no step for 60.0 s");
        let verdict = liveness.verdict(now, Some(LIMIT + SECOND));
        assert_eq!((verdict.alive, verdict.age), (false, LIMIT + SECOND));
        assert_eq!(verdict.reason.unwrap(), "the agent's loop has taken no step for 61.0 s");
        // An answer to the liveness request proves that the loop is not stuck. The time limit therefore starts again.
        liveness.answer(now, Duration::ZERO, None);
        assert!(liveness.verdict(now + SECOND, Some(LIMIT * 2)).alive);
        assert!(!liveness.verdict(now + LIMIT + SECOND, Some(LIMIT * 3)).alive);
    }

    #[test]
    fn the_reason_names_the_component_that_does_not_answer() {
        let (mut liveness, now) = (Liveness::new(LIMIT), Instant::now());
        liveness.ask(now);
        liveness.pass_on();
        let verdict = liveness.verdict(now + LIMIT + SECOND, None);
        assert!(!verdict.alive);
        assert_eq!(verdict.reason.unwrap(), "the runtime that supervises the workers has not answered for 61.0 s");
        liveness.answer(now + LIMIT + SECOND, Duration::ZERO, None);
        liveness.ask(now + LIMIT * 2);
        assert_eq!(
            liveness.verdict(now + LIMIT * 2, None).reason.unwrap(),
            "the agent's loop has not answered for 0.0 s"
        );
    }

    #[test]
    fn the_agent_is_dead_while_its_last_progress_is_too_old() {
        let (mut liveness, now) = (Liveness::new(LIMIT), Instant::now());
        liveness.ask(now);
        liveness.answer(now, LIMIT + SECOND, Some("_start_workers".into()));
        assert_eq!(liveness.ask(now), NextStep::Reuse);
        let verdict = liveness.verdict(now, None);
        assert!(!verdict.alive);
        assert_eq!(verdict.reason.unwrap(), "the last progress was 61.0 s ago, in _start_workers");
        assert_eq!(liveness.ask(now + FRESH), NextStep::WakeLoop);
        assert!(!liveness.verdict(now + SECOND, None).alive);
        liveness.answer(now + SECOND, SECOND, None);
        assert!(liveness.verdict(now + SECOND, None).alive);
    }

    proptest! {
        /// Checks that liveness requests share one answer (HEALTH-3), and when the agent counts as dead (HEALTH-4).
        #[test]
        fn the_agent_is_dead_exactly_if_it_is_late_stuck_or_without_progress(steps in prop::collection::vec((0u64..40, 0u8..2, 0u64..120, prop::option::of(0u64..120)), 1..60)) {
            let start = Instant::now();
            let (mut liveness, mut now) = (Liveness::new(LIMIT), start);
            let (mut open, mut told): (Option<Instant>, Option<Duration>) = (None, None);
            let mut last_answer: Option<Instant> = None;
            for (pause, what, age, at_work) in steps {
                now += Duration::from_secs(pause);
                if what == 0 {
                    let asked = liveness.ask(now);
                    prop_assert_eq!(asked == NextStep::Wait, open.is_some());
                    if asked == NextStep::WakeLoop {
                        open = Some(now);
                    }
                } else {
                    liveness.answer(now, Duration::from_secs(age), None);
                    (open, told) = (None, Some(Duration::from_secs(age)));
                    last_answer = Some(now);
                }
                let is_late = open.is_some_and(|asked| now - asked > LIMIT);
                let is_old = told.is_some_and(|age| age > LIMIT);
                let at_work = at_work.map(Duration::from_secs);
                let is_stuck = at_work.is_some_and(|at_work| at_work > LIMIT)
                    && last_answer.is_none_or(|at| now - at > LIMIT);
                let verdict = liveness.verdict(now, at_work);
                prop_assert_eq!(verdict.alive, !is_late && !is_old && !is_stuck);
                prop_assert!(verdict.alive || verdict.reason.is_some());
            }
        }
    }
}
