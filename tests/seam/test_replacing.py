"""The Python interface of a group whose workers are replaced."""

import os
import signal
import sys

from elasticrs import _core


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
