"""The Python interface of a group whose workers are replaced."""

import errno
import os
import re
import signal
import sys

import pytest
from helpers.groups import Group
from helpers.procs import HANG, children, process

from elasticrs import _core
from elasticrs._engine.job.config import Preload
from elasticrs._engine.workers.plan import warm_environment

SLEEP = ["sleep", "1234"]


def test_a_failed_worker_is_replaced_by_a_new_process(group):
    pids = group.start(SLEEP, SLEEP, replaces=True)
    os.kill(pids[1], signal.SIGKILL)
    swept = group.until(_core.WorkerSwept)
    assert (swept.local_rank, swept.ended, swept.more_ended, swept.stuck) == (1, [], 0, [])
    pid = group.replace(1, SLEEP)
    replaced = group.events[-1]
    assert (replaced.local_rank, replaced.pid) == (1, pid)
    exited = next(e for e in group.events if isinstance(e, _core.WorkerExited))
    assert exited.sent_signal is None
    assert exited.seen_ns <= replaced.started_ns
    assert process(pids[0])
    assert group.kill().outcome == "stopped"
    assert not any(isinstance(e, _core.FailureSeen) for e in group.events)


@pytest.mark.parametrize(("replaces", "reason"), [(True, "local rank 0 "), (False, "replaced")])
def test_a_running_worker_cannot_be_replaced(group, replaces, reason):
    spec = _core.ProcessSpec(0, SLEEP, env=dict(os.environ))
    with pytest.raises(_core.SupervisorError, match="no group"):
        group.supervisor.replace(spec)
    group.start(SLEEP, replaces=replaces)
    with pytest.raises(_core.SupervisorError, match=reason):
        group.supervisor.replace(spec)
    group.kill()


def test_a_failed_replacement_reports_the_reason(group):
    pids = group.start(SLEEP, replaces=True)
    os.kill(pids[0], signal.SIGKILL)
    group.until(_core.WorkerSwept)
    group.supervisor.replace(_core.ProcessSpec(0, ["no-such-program"], env=dict(os.environ)))
    failed = group.until(_core.ReplaceFailed)
    assert failed.local_rank == 0
    assert re.search(
        rf"execute `no-such-program`.*local rank 0: {os.strerror(errno.ENOENT)}$", failed.message
    )
    group.replace(0, ["true"])
    assert group.end().outcome == "succeeded"


def python(code, *arguments):
    return [sys.executable, "-c", code, *map(str, arguments)]


BEATS = """
import signal, sys
from elasticrs.timer import heartbeat
heartbeat(int(sys.argv[1]))
open(sys.argv[2], "w").close()
signal.pause()
"""


def test_a_replacement_worker_has_its_own_heartbeats(group, tmp_path):
    fifo = tmp_path / "fifo"
    os.mkfifo(fifo)
    group.supervisor.watch_hangs(600.0)

    def steps():
        assert fifo.read_text() == ""
        return [(beat.local_rank, beat.step) for beat in group.supervisor.heartbeats()]

    [pid] = group.start(python(BEATS, 7, fifo), replaces=True)
    assert steps() == [(0, 7)]
    os.kill(pid, signal.SIGKILL)
    group.until(_core.WorkerSwept)
    group.replace(0, python(BEATS, 8, fifo))
    assert steps() == [(0, 8)]
    group.kill()


RAISES = """
import signal, socket, sys
socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(b"", chr(0) + sys.argv[1])
signal.pause()
"""


def test_a_replacement_worker_reports_its_own_exception(group):
    name = group.supervisor.watch_exits()
    [pid] = group.start(python(RAISES, name), replaces=True)
    for _ in range(2):
        assert group.until(_core.WorkerRaised).pid == pid
        os.kill(pid, signal.SIGKILL)
        group.until(_core.WorkerSwept)
        pid = group.replace(0, python(RAISES, name))
    assert group.until(_core.WorkerRaised).pid == pid
    group.kill()


FORKED = """
import os, signal, subprocess, sys
subprocess.run(["setsid", "-f", "sleep", "1234"], stdout=subprocess.DEVNULL)
with open(os.environ["TELLS"], "w") as told:
    print("colorsys" in sys.modules, file=told)
signal.pause()
"""


@pytest.fixture
def forking(tmp_path):
    """A group whose workers are forks of a process that has imported ``colorsys``, and a function that makes
    the spec of a worker.
    """
    script = tmp_path / "forked.py"
    script.write_text(FORKED)
    command = [sys.executable, str(script)]
    preload = Preload(("colorsys",), is_explicit=True)
    env = warm_environment(dict(os.environ), preload, os.path.abspath(_core.__file__))
    report = os.memfd_create("report")
    nursery = _core.WarmNursery(_core.ProcessSpec(0, command, env=env), report_fd=report, limit=HANG)
    os.close(report)
    group = Group(_core.Supervisor(warm=nursery))

    def worker(local_rank):
        env = dict(os.environ, TELLS=str(tmp_path / f"told-{local_rank}"))
        return _core.ProcessSpec(local_rank, command, env=env, warm=True)

    for local_rank in range(2):
        os.mkfifo(tmp_path / f"told-{local_rank}")
    yield group, worker
    group.supervisor.close()
    # Release the supervisor, as the `group` fixture does.
    del group.supervisor


def test_a_forked_worker_is_replaced_by_another_fork(forking, tmp_path):
    group, worker = forking

    def daemon_of(local_rank, pid):
        assert (tmp_path / f"told-{local_rank}").read_text() == "True\n", "what was imported is there"
        [daemon] = [p.pid for p in children(pid)]
        return daemon

    policy = _core.StopPolicy(signal.SIGTERM, HANG)
    group.supervisor.start(
        _core.GroupSpec([worker(0), worker(1)], on_failure=policy, linger=0, replaces=True)
    )
    pids = group.until(_core.GroupStarted).pids
    kept = daemon_of(0, pids[0])
    for _ in range(2):
        left = daemon_of(1, pids[1])
        os.kill(pids[1], signal.SIGKILL)
        assert [d.pid for d in group.until(_core.WorkerSwept).ended] == [left]
        group.supervisor.replace(worker(1))
        pids[1] = group.until(_core.WorkerReplaced).pid
    assert daemon_of(1, pids[1])
    assert [p.pid for p in children(pids[0])] == [kept]
    group.supervisor.stop(_core.StopPolicy(signal.SIGTERM, HANG))
    assert group.end().outcome == "stopped"
