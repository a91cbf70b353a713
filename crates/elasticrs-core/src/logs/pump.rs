//! The thread: waits for news, reads, writes.
//!
//! It is the only one that touches the files and the console while streams are followed, so neither a console that
//! nobody reads nor a log directory on a dead network mount reaches the supervisor.

use std::ops::ControlFlow;
use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::Instant;

use nix::poll::{PollFd, PollFlags, PollTimeout, poll};
use nix::sys::signal::SigSet;

use super::console::Output;
use super::follow::{Follower, Opened};
use super::{Notice, Notify, Shared, StreamId, lock};

/// From the handle.
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
    notify: Notify,
}

/// What a turn of the loop waits for.
#[derive(Debug, Clone, Copy, Default)]
struct News {
    commands: bool,
    files: bool,
}

impl Pump {
    pub(super) fn new(shared: Arc<Shared>, outputs: Vec<Output>, notify: Notify) -> Self {
        let follower = Follower::new(Arc::clone(&notify));
        Self { shared, follower, outputs, notify }
    }

    pub(super) fn run(mut self) {
        // Python's handlers belong to its own threads. SIGPIPE, too: a lost reader is an error number here.
        SigSet::all().thread_block().expect("the arguments are constants, and there is no other error");
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
        if news.files {
            self.follower.take_events();
        }
        self.follower.read(&mut self.outputs, now);
        self.follower.tick(&mut self.outputs, now);
        self.outputs.iter_mut().for_each(Output::flush);
        for (dest, errno) in self.outputs.iter_mut().filter_map(Output::take_loss) {
            (self.notify)(Notice::ConsoleLost { to: dest, errno });
        }
        let through = self.follower.settle(&mut self.outputs);
        if !through.is_empty() {
            self.shared.forget(&through);
        }
        ControlFlow::Continue(())
    }

    fn take_commands(&mut self, now: Instant) -> ControlFlow<()> {
        // The counter's value says nothing: all commands are taken.
        let _count = self.shared.wake.read();
        for command in std::mem::take(&mut *lock(&self.shared.commands)) {
            match command {
                Command::Follow(files) => files.into_iter().for_each(|file| self.follower.add(file, now)),
                Command::Finish(streams) => streams.into_iter().for_each(|id| self.follower.finish(id)),
                Command::Stop => return ControlFlow::Break(()),
            }
        }
        ControlFlow::Continue(())
    }

    fn wait(&mut self) -> News {
        let timeout = if self.follower.can_read(&self.outputs) {
            PollTimeout::ZERO
        } else {
            self.follower.deadline(&mut self.outputs).map_or(PollTimeout::NONE, until)
        };
        let mut fds = vec![PollFd::new(self.shared.wake.as_fd(), PollFlags::POLLIN)];
        fds.extend(self.follower.inotify_fd().map(|fd| PollFd::new(fd, PollFlags::POLLIN)));
        let watched = fds.len();
        let waiting = self.outputs.iter().filter_map(Output::waits_for_room);
        fds.extend(waiting.map(|fd| PollFd::new(fd, PollFlags::POLLOUT)));
        // An error (EINTR, ENOMEM) leaves the answers empty: the next round asks again.
        let answered = poll(&mut fds, timeout).is_ok();
        let is_ready = |fd: &PollFd<'_>| answered && fd.any() == Some(true);
        News { commands: is_ready(&fds[0]), files: watched > 1 && is_ready(&fds[1]) }
    }
}

/// Rounded up: a round that comes too early would find nothing due.
fn until(deadline: Instant) -> PollTimeout {
    let left = deadline.saturating_duration_since(Instant::now()).as_micros().div_ceil(1000);
    PollTimeout::try_from(left).unwrap_or(PollTimeout::MAX)
}
