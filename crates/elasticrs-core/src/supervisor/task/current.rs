//! The group that is being started or is running.

use super::running::Running;
use crate::supervisor::start::Starting;
use crate::supervisor::watch::MemberExit;

/// State of the current group.
#[expect(clippy::large_enum_variant, reason = "there is only one")]
pub(super) enum Current {
    Idle,
    Starting(Starting),
    Running(Running),
}

impl Current {
    pub(super) fn is_idle(&self) -> bool {
        matches!(self, Self::Idle)
    }

    pub(super) fn is_starting(&self) -> bool {
        matches!(self, Self::Starting(_))
    }

    pub(super) fn running(&self) -> Option<&Running> {
        if let Self::Running(running) = self { Some(running) } else { None }
    }

    pub(super) fn running_mut(&mut self) -> Option<&mut Running> {
        if let Self::Running(running) = self { Some(running) } else { None }
    }

    pub(super) fn starting_mut(&mut self) -> Option<&mut Starting> {
        if let Self::Starting(starting) = self { Some(starting) } else { None }
    }

    /// Returns true while the nursery may be blocked starting a worker.
    pub(super) fn starts_a_worker(&self) -> bool {
        match self {
            Self::Idle => false,
            Self::Starting(_) => true,
            Self::Running(running) => running.group.starting().next().is_some(),
        }
    }

    /// Waits for the exit of any member that is not watched by the nursery, such as a process that Python started.
    /// Returns `None` if there is no such member. Cancel-safe.
    pub(super) async fn next_exit(&mut self) -> Option<MemberExit> {
        self.running_mut()?.next_exit().await
    }
}
