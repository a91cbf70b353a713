//! The logs thread, which waits for events, reads the files and writes to the console. While streams are
//! followed, only this thread accesses the files and the console. Therefore, neither a stuck console nor a log
//! directory on a dead network mount can block the supervisor.

use std::ops::ControlFlow;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use nix::poll::{PollFd, PollFlags, ppoll};
use nix::sys::time::TimeSpec;

use super::console::Output;
use super::follow::{Follower, Opened};
use super::{Notify, Shared, StreamId, To, lock};

/// Command from the [`Logs`](super::Logs) handle to the logs thread.
#[derive(Debug)]
pub(super) enum Command {
    Follow(Vec<Opened>),
    Finish(Vec<StreamId>),
    Stop,
}

pub(super) struct Pump {
    shared: Arc<Shared>,
    follower: Follower,
    outputs: Vec<Output>,
    /// Indices of the outputs for standard output and standard error.
    output_of: [usize; 2],
    next_round: Option<Instant>,
    notify: Notify,
}

/// Pause between two rounds of reading. Handling all lines of half a millisecond at once is much cheaper than
/// handling each line separately, and the delay is not noticeable.
const ROUND: Duration = Duration::from_micros(500);

/// Events that have woken up the logs thread.
#[derive(Debug, Clone, Copy, Default)]
struct News {
    commands: bool,
    files: bool,
}

impl Pump {
    /// Creates the state of the thread. `outputs` comes from [`Output::pair`].
    pub(super) fn new(shared: Arc<Shared>, outputs: (Vec<Output>, [usize; 2]), notify: Notify) -> Self {
        let follower = Follower::new(Arc::clone(&notify));
        let (outputs, output_of) = outputs;
        Self { shared, follower, outputs, output_of, next_round: None, notify }
    }

    pub(super) fn run(mut self) {
        let mut news = News { commands: true, files: true };
        while self.turn(news).is_continue() {
            news = self.wait();
        }
    }

    fn turn(&mut self, news: News) -> ControlFlow<()> {
        let now = Instant::now();
        if news.commands {
            self.take_commands(now)?;
        }
        let is_round = self.next_round.take_if(|at| *at <= now).is_some();
        if news.files || is_round {
            self.follower.take_events();
        }
        if is_round {
            self.follower.begin_round();
        }
        self.follower.read(&mut self.outputs, now);
        if self.follower.has_active(&mut self.outputs) {
            self.next_round.get_or_insert(now + ROUND);
        }
        self.follower.tick(&mut self.outputs, now);
        self.outputs.iter_mut().for_each(Output::flush);
        self.give_up_lost();
        let through = self.follower.settle(&mut self.outputs);
        if !through.is_empty() {
            self.shared.forget(&through);
        }
        ControlFlow::Continue(())
    }

    fn give_up_lost(&mut self) {
        for (index, output) in self.outputs.iter_mut().enumerate().filter(|(_, output)| output.is_lost()) {
            self.follower.drop_output(index);
            if let Some(loss) = output.take_loss() {
                (self.notify)(loss);
            }
            output.close_own();
        }
    }

    fn take_commands(&mut self, now: Instant) -> ControlFlow<()> {
        // Clear the wake-up before taking the commands, so that a command that is queued later sets it again.
        self.shared.wake.clear();
        let commands = std::mem::take(&mut *lock(&self.shared.commands));
        for command in commands {
            match command {
                Command::Follow(files) => {
                    for file in files {
                        self.follow(file, now);
                    }
                }
                Command::Finish(streams) => streams.into_iter().for_each(|id| self.follower.finish(id)),
                Command::Stop => return ControlFlow::Break(()),
            }
        }
        ControlFlow::Continue(())
    }

    fn follow(&mut self, opened: Opened, now: Instant) {
        let Opened { info, file, offset, copy } = opened;
        let output = match (copy, &info.stream.to) {
            (Some(copy), _) => Some(self.add_output(Output::of_file(copy, &info.stream))),
            (None, To::Console(dest)) => {
                let index = self.output_of[*dest as usize];
                self.outputs[index].mark_used();
                Some(index)
            }
            (None, To::Nowhere | To::File(_)) => None,
        };
        self.follower.add(info, (file, offset), output, now);
    }

    /// Adds an output and returns its index. Reuses the slot of a closed output if there is one. Slots are never
    /// removed, because the indices of the other outputs must stay the same.
    fn add_output(&mut self, output: Output) -> usize {
        if let Some(free) = self.outputs.iter().position(Output::is_free) {
            self.outputs[free] = output;
            return free;
        }
        self.outputs.push(output);
        self.outputs.len() - 1
    }

    fn wait(&mut self) -> News {
        let now = Instant::now();
        let (timeout, pause) = if self.follower.can_read(&self.outputs) {
            (Some(Duration::ZERO), None)
        } else {
            let deadline = self.follower.deadline(&mut self.outputs).map(|at| at.saturating_duration_since(now));
            let pause = self.next_round.map(|at| at.saturating_duration_since(now));
            (deadline.into_iter().chain(pause).min(), pause)
        };
        let mut fds = vec![PollFd::new(self.shared.wake.as_fd(), PollFlags::POLLIN)];
        if pause.is_none() {
            fds.extend(self.follower.inotify_fd().map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
        }
        let watched = fds.len();
        let waiting = self.outputs.iter().filter_map(Output::waits_for_room);
        fds.extend(waiting.map(|fd| PollFd::new(fd, PollFlags::POLLOUT)));
        // If `poll` fails (EINTR, ENOMEM), treat no descriptor as ready. The next turn polls again.
        let answered = ppoll(&mut fds, timeout.map(TimeSpec::from), None).is_ok();
        let is_ready = |fd: &PollFd<'_>| answered && fd.any() == Some(true);
        News { commands: is_ready(&fds[0]), files: watched > 1 && is_ready(&fds[1]) }
    }
}
