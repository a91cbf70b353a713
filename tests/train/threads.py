"""A job with threads as workers: its coordinator, and collectives that fail like real ones."""

import threading

from helpers.procs import HANG

from elasticrs.train import Coordinator, State, StopException, train


class Job:
    """The live workers, the workers that wait for the next round, and the current round."""

    def __init__(self, size):
        self.news = threading.Condition()
        self.alive = set(range(size))
        self.waiting = set()
        self.round = Round(())
        self.rounds = 0
        self.is_closed = False

    def run(self, work):
        """Run ``work(name, coordinator)`` for each worker. Return the result or the exception of each. A
        worker that returns leaves the job.
        """
        found = {}

        def live(name):
            try:
                found[name] = work(name, ThreadCoordinator(self, name))
            except Exception as error:
                found[name] = error
            finally:
                self.lose(name)

        threads = [threading.Thread(target=live, args=(name,), daemon=True) for name in sorted(self.alive)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(HANG)
            assert not thread.is_alive(), "it hangs"
        return [found[name] for name in sorted(found)]

    def lose(self, name):
        with self.news:
            self.alive.discard(name)
            self.waiting.discard(name)
            self.leave_round(name)
            self.begin_round()

    def leave_round(self, name):
        if name in self.round.names:
            self.round.is_broken = True
        self.news.notify_all()

    def begin_round(self):
        if self.alive and self.waiting == self.alive:
            self.round, self.waiting = Round(tuple(sorted(self.alive))), set()
            self.rounds += 1
            self.news.notify_all()


class Round:
    """The workers of a round, and the values that they have passed to each collective."""

    def __init__(self, names):
        self.names = names
        self.is_broken = False
        self.brought = {}


class ThreadCoordinator(Coordinator):
    def __init__(self, job, name):
        self.job, self.name = job, name
        self.round = None
        self.collectives = {}
        self.errors = []
        self.calls = []
        self.wants_to_meet = False
        self.is_stopped = False

    def rendezvous_barrier(self):
        job = self.job
        with job.news:
            job.leave_round(self.name)
            if job.is_closed:
                raise StopException
            job.waiting.add(self.name)
            job.begin_round()
            assert job.news.wait_for(lambda: self.name not in job.waiting or job.is_closed, HANG)
            if self.name in job.waiting:
                job.waiting.discard(self.name)
                raise StopException
            self.round, self.collectives = job.round, {}
            self.rounds_before = job.rounds - 1
            return None, self.rank, self.world_size

    @property
    def rank(self):
        return self.round.names.index(self.name)

    @property
    def world_size(self):
        return len(self.round.names)

    def gather(self, value, plane="data"):
        """Run a collective. Return the values of all workers by rank, or raise an error if a worker is
        missing.
        """
        with self.job.news:
            made, number = self.round, self.collectives.get(plane, 0)
            self.collectives[plane] = number + 1
            brought = made.brought.setdefault((plane, number), {})
            brought[self.rank] = value
            self.job.news.notify_all()
            whole = len(made.names)
            self.job.news.wait_for(lambda: len(brought) == whole or made.is_broken, HANG)
            if len(brought) < whole:
                raise RuntimeError("gloo: connection closed by peer")
            return [brought[rank] for rank in range(whole)]

    def init_process_group(self):
        self.gather(None)

    def barrier(self):
        self.gather(None, "control")

    def exchange(self, numbers):
        return self.gather(list(numbers), "control")

    def was_broken_off(self, **_):
        return self.round is not None and self.round.is_broken

    def should_rendezvous(self, _):
        wants, self.wants_to_meet = self.wants_to_meet, False
        return wants

    def should_stop_training(self):
        return self.is_stopped

    def announce_end(self):
        self.calls.append("announce_end")

    def signal_training_done(self):
        self.calls.append("signal_training_done")
        self.is_stopped = True
        with self.job.news:
            self.job.is_closed = True
            self.job.news.notify_all()

    def on_error(self, e):
        self.errors.append(e)

    def leave(self):
        self.calls.append("leave")
        self.job.lose(self.name)


class Sum(State):
    """A state to which each step adds a value from all workers."""

    def __init__(self, coordinator, length):
        self.coordinator, self.length = coordinator, length
        self.steps = self.total = 0
        self.syncs = []

    def sync(self, world_size, rank):
        self.syncs.append((world_size, rank))
        self.steps, self.total = max(self.coordinator.gather((self.steps, self.total)))

    def capture_snapshot(self):
        return self.steps, self.total

    def apply_snapshot(self, snapshot):
        self.steps, self.total = snapshot


def add(state):
    """Take a train step. After 10 steps, the total is 550 for any number of workers."""
    if state.steps == state.length:
        raise StopIteration
    state.steps += 1
    # Make the state inconsistent until the collective has succeeded.
    state.total += 1000
    share = sum(state.coordinator.gather(state.steps * 10)) // state.coordinator.world_size
    state.total += share - 1000
    return state, None


def train_sum(coordinator, length=10, step=add, state=Sum, **options):
    """Train until the data end, and return the number of steps and the total."""
    done = train(coordinator, step, state(coordinator, length), **options)
    return done.steps, done.total


def train_sums(size=1, **options):
    """Let workers train alike. Return the result or exception of each."""
    return Job(size).run(lambda _, coordinator: train_sum(coordinator, **options))
