//! Lets workers copy their training state before they are stopped.
//!
//! A worker whose program uses `elasticrs.Keep` can copy its state into memory that outlives it. Before the group stops
//! such workers, it orders each of them to copy its state ([`Effect::OrderCopies`]). Their stop signals are held back
//! until all of them have answered or exited, or until a time limit has passed. All other workers are signalled at once.
//!
//! - **KEEP-1** a group orders its workers to copy their states at most once, when it starts to stop;
//! - **KEEP-2** no signal is held back if the agent may lose its lease, if the nursery is lost, or if the caller asks for
//!   SIGKILL;
//! - **KEEP-3** a worker that is paused by a signal such as SIGSTOP gets no order, because it could not answer;
//! - **KEEP-4** the grace period of the workers begins when the signals that were held back are sent.

use std::time::Duration;

use elasticrs_sys::signal::Signal;

use super::{Deadline, Effect, Group, Input, Member, Pause, Phase};
use crate::spec::StopScope;

/// Minimum time that workers get for copying their states.
const SHORTEST_LIMIT: Duration = Duration::from_millis(500);

/// Whether the workers of a group have been ordered to copy their states.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) enum Order {
    #[default]
    NotGiven,
    /// The workers are copying their states.
    Given {
        /// Local ranks of the workers that have got the order.
        asked: Vec<u32>,
        /// Local ranks of the workers that have answered.
        answered: Vec<u32>,
        /// Actions that are delayed until the workers have copied their states: sending the stop signals to the workers
        /// in `asked`, and setting the deadlines for the exits of all workers.
        held: Vec<Effect>,
    },
    Done,
}

impl Group {
    /// Records whether a worker can copy its state. `pace` is the time that a copy is expected to take. It is `None` if
    /// the worker can no longer copy its state.
    pub(super) fn on_keeper(&mut self, local_rank: u32, pace: Option<Duration>) {
        if let Some(member) = self.members.iter_mut().find(|m| m.local_rank == local_rank && m.runs()) {
            member.copy_time = pace;
        }
        if pace.is_none() {
            self.on_copied(local_rank);
        }
    }

    /// Records a worker's answer to the order: it has copied its state, or cannot copy it.
    pub(super) fn on_copied(&mut self, local_rank: u32) {
        if let Order::Given { asked, answered, .. } = &mut self.order
            && asked.contains(&local_rank)
            && !answered.contains(&local_rank)
        {
            answered.push(local_rank);
        }
    }

    /// Takes the effects of an input, and returns the effects to carry out now.
    ///
    /// If the input starts the stop of the group, adds the order to copy the states, and holds back the stop signals to
    /// the workers that get the order. If the last of these workers has answered, adds the signals that were held back.
    /// `before` is the phase before the input.
    pub(super) fn order_copies_first(&mut self, effects: Vec<Effect>, before: Phase, rule: HoldRule) -> Vec<Effect> {
        if self.order == Order::NotGiven && before == Phase::Running && self.phase != Phase::Running {
            self.order = Order::Done;
            let asked = self.to_ask(&effects);
            let is_on = rule == HoldRule::MayHold && !self.policy.keep_grace.is_zero();
            if is_on && !asked.is_empty() {
                return self.give_order(asked, effects);
            }
        }
        if !matches!(self.order, Order::Given { .. }) {
            return effects;
        }
        if rule != HoldRule::AtOnce && self.awaits_copies() {
            return if rule == HoldRule::MayHold { self.hold(effects) } else { effects };
        }
        let mut all = self.release_signals();
        all.extend(effects);
        all
    }

    /// Returns the local ranks of the running workers that can copy their states and that these effects would stop.
    fn to_ask(&self, effects: &[Effect]) -> Vec<u32> {
        let is_signalled = |m: &Member| effects.iter().any(|effect| target(effect) == Some(m.pid));
        let keeps = |m: &&Member| m.runs() && m.copy_time.is_some() && m.pause == Pause::Running && is_signalled(m);
        self.members.iter().filter(keeps).map(|m| m.local_rank).collect()
    }

    fn give_order(&mut self, asked: Vec<u32>, effects: Vec<Effect>) -> Vec<Effect> {
        let paces = self.members.iter().filter(|m| asked.contains(&m.local_rank)).filter_map(|m| m.copy_time);
        let limit = (paces.max().unwrap_or_default() * 3).max(SHORTEST_LIMIT).min(self.policy.keep_grace);
        self.order = Order::Given { asked: asked.clone(), answered: Vec::new(), held: Vec::new() };
        let mut now = vec![Effect::OrderCopies(asked), Effect::Arm(Deadline::Copies, limit)];
        now.extend(self.hold(effects));
        now
    }

    /// Returns true if a worker was ordered to copy its state, is still running, and has not answered.
    fn awaits_copies(&self) -> bool {
        let Order::Given { asked, answered, .. } = &self.order else { return false };
        let is_awaited = |m: &Member| m.runs() && asked.contains(&m.local_rank) && !answered.contains(&m.local_rank);
        self.members.iter().any(is_awaited)
    }

    /// Delays some of these actions until the workers have copied their states: sending stop signals to the workers that
    /// are copying, and setting the deadlines for the exits of all workers. Returns the actions to carry out now.
    fn hold(&mut self, effects: Vec<Effect>) -> Vec<Effect> {
        let Order::Given { asked, held, .. } = &mut self.order else { return effects };
        let mut others = Vec::new();
        for effect in effects {
            let is_deadline = matches!(
                effect,
                Effect::Arm(Deadline::Kill | Deadline::GiveUp, _)
                    | Effect::Hasten(Deadline::Kill | Deadline::GiveUp, _)
                    | Effect::Disarm(Deadline::Kill | Deadline::GiveUp)
            );
            let target = target(&effect);
            let member = self.members.iter_mut().find(|m| m.runs() && Some(m.pid) == target);
            match member.filter(|m| asked.contains(&m.local_rank)) {
                // The signal is recorded when it is sent: until then the worker may exit for a reason of its own.
                Some(member) => (member.sent, member.group_sent) = (None, None),
                None if is_deadline => {}
                None => {
                    others.push(effect);
                    continue;
                }
            }
            held.push(effect);
        }
        others
    }

    /// Stops waiting for copies, and returns the effects that were held back. If a worker has exited meanwhile, drops the
    /// signals to the worker itself, but not those to its process group.
    fn release_signals(&mut self) -> Vec<Effect> {
        let Order::Given { asked, answered, held } = std::mem::replace(&mut self.order, Order::Done) else {
            return Vec::new();
        };
        let mut effects = vec![Effect::Disarm(Deadline::Copies)];
        for effect in held {
            let target = target(&effect);
            let member = self.members.iter_mut().find(|m| Some(m.pid) == target);
            if member.is_none_or(|member| member.is_sent(&effect)) {
                effects.push(effect);
            }
        }
        effects.push(Effect::ReportCopies { asked, answered });
        effects
    }
}

/// What an input means for a group that waits until its workers have copied their states.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HoldRule {
    /// The group goes on waiting. Stop signals are held back.
    MayHold,
    /// The group goes on waiting. The signals of this input do not stop the group, so they are sent at once.
    PassOn,
    /// The group waits no longer, because the workers must be killed at once, or because the time limit has passed.
    AtOnce,
}

impl HoldRule {
    pub(super) fn of(input: &Input) -> Self {
        match input {
            Input::Fenced | Input::NurseryLost(_) | Input::Expired(Deadline::Copies) => Self::AtOnce,
            Input::Stop(policy) | Input::StopForHang(policy, _) if policy.signal == Signal::KILL => Self::AtOnce,
            Input::Signal(..) | Input::Forward(..) | Input::Suspend | Input::Resume => Self::PassOn,
            _ => Self::MayHold,
        }
    }
}

impl Member {
    /// Returns true if this effect, a signal that was held back, is still useful. If so, records the signal as sent.
    fn is_sent(&mut self, effect: &Effect) -> bool {
        let (signal, to) = match effect {
            Effect::Signal { signal, to, .. } => (*signal, *to),
            Effect::SignalProcess { signal, .. } => (*signal, StopScope::Worker),
            _ => return true,
        };
        if !self.runs() && (to == StopScope::Worker || self.group_has_got(signal)) {
            return false;
        }
        let _ = self.send(signal, to);
        true
    }
}

/// Returns the pid of the worker that this effect signals. Returns `None` for SIGCONT, which must not be held back,
/// because a suspended worker could not copy its state.
fn target(effect: &Effect) -> Option<i32> {
    match effect {
        Effect::Signal { signal: Signal::CONT, .. } => None,
        Effect::Signal { pid, .. } | Effect::SignalProcess { pid, .. } => Some(*pid),
        _ => None,
    }
}
