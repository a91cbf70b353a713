"""Parsers and tables of the benchmarks. A wrong parser would print wrong figures without an error."""

import os
import signal
import subprocess
import sys

import pytest
from benchmarks import etcd
from benchmarks.harness import Launcher, Options, Report, Reports, Row, Samples, percentile, time_box
from benchmarks.nodes import Connections, Job, Shape, connections
from benchmarks.procs import children, nothing_left, tree
from benchmarks.report import table

A, B = Launcher("a", ()), Launcher("b", ())
BOTH = Options((A, B), is_quick=False)

# Connections in the format of /proc/net/tcp. Port 29400 is 72D8 in hexadecimal.
TCP = """\
  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode
   0: 0100007F:72D8 00000000:0000 0A 00000000:00000000 00:00000000 00000000     0        0 101 1
   1: 0100007F:72D8 0100007F:C001 01 00000000:00000000 00:00000000 00000000     0        0 102 1
   2: 0100007F:C001 0100007F:72D8 01 00000000:00000000 00:00000000 00000000     0        0 103 1
   3: 0100007F:72D8 0100007F:C002 06 00000000:00000000 00:00000000 00000000     0        0 104 1
   4: 0100007F:72D9 0100007F:C003 01 00000000:00000000 00:00000000 00000000     0        0 105 1
"""
TCP6 = """\
  sl  local_address                         remote_address                        st tx_queue rx_queue
   0: 00000000000000000000000000000000:72D8 00000000000000000000000000000000:0000 0A 00000000:00000000
   1: 0000000000000000FFFF00000100007F:72D8 0000000000000000FFFF00000100007F:C001 01 00000000:00000000
"""


@pytest.mark.parametrize(
    ("text", "port", "found"),
    [
        (TCP, 29400, Connections(is_listening=True, established=1)),
        (TCP, 29401, Connections(is_listening=False, established=1)),
        (TCP, 29402, Connections(is_listening=False, established=0)),
        (TCP6, 29400, Connections(is_listening=True, established=1)),
        (TCP.splitlines()[0], 29400, Connections(is_listening=False, established=0)),
    ],
)
def test_connections_are_counted_by_their_local_port(text, port, found):
    assert connections(text, port) == found


@pytest.fixture
def channel(tmp_path):
    reports = Reports(tmp_path / "reports")
    writer = os.open(tmp_path / "reports", os.O_WRONLY)
    yield reports, writer
    os.close(writer)
    reports.close()


def test_reports_are_selected_by_event_attempt_and_process(channel):
    reports, writer = channel
    os.write(writer, b"up 0 0 11 100\nup 1 0 12 110\ndown 1 0 12 120\nup 0 1 13 1")
    assert reports.take("up", 1, pids={12}) == [Report("up", 1, 0, 12, 110)]
    os.write(writer, b"30\n")
    assert reports.take("up", 1, attempt=1) == [Report("up", 0, 1, 13, 130)]
    assert reports.peek("up", 1) == [Report("up", 0, 0, 11, 100)]
    assert reports.take("up", 1) == [Report("up", 0, 0, 11, 100)]
    with pytest.raises(TimeoutError, match="0 of 1 workers reported 'up'"):
        reports.take("up", 1, timeout=0)
    assert reports.take("down", 1)[0].at_ns == 120


def test_waiting_for_reports_stops_when_an_agent_has_exited(tmp_path):
    def check():
        raise RuntimeError("an agent ended")

    reports = Reports(tmp_path / "reports", check)
    with pytest.raises(RuntimeError, match="an agent ended"):
        reports.take("up", 1)
    reports.close()


def test_an_agent_that_exits_is_reported_with_its_last_line(tmp_path):
    program = "import sys; print('refused', sys.argv[1:5], file=sys.stderr); exit(3)"
    with nothing_left():
        made = Job(Launcher("x", (sys.executable, "-c", program)), Shape(2, 1), (), tmp_path)
        with pytest.raises(
            RuntimeError, match=r"an agent ended with 3: refused \['--nnodes', '2', '--nproc-per-node', '1'\]"
        ):
            made.start_waiting(1)
    made.reports.close()


def test_stopped_and_orphaned_processes_of_a_job_are_killed():
    # Leave a stopped child that has a child in another session, and an orphaned grandchild.
    program = (
        "import os, signal, subprocess\n"
        "subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        "print(flush=True)\n"
        "os.kill(os.getpid(), signal.SIGSTOP)\n"
    )
    before = children(os.getpid())
    with nothing_left():
        started = subprocess.Popen((sys.executable, "-c", program), stdout=subprocess.PIPE)
        started.stdout.readline()
        os.waitpid(started.pid, os.WUNTRACED)
        killed = subprocess.Popen(("sh", "-c", "sleep 600 & echo; wait"), stdout=subprocess.PIPE)
        killed.stdout.readline()
        pids = [*tree(started.pid), *tree(killed.pid)]
        killed.kill()
        killed.wait()
    assert len(pids) == 4
    assert children(os.getpid()) == before
    assert not [pid for pid in pids if os.path.exists(f"/proc/{pid}")]
    for each in (started, killed):
        each.stdout.close()
        each.poll()


def test_processes_of_a_failed_benchmark_are_killed():
    started = None

    def fail():
        nonlocal started
        with nothing_left():
            started = subprocess.Popen(("sleep", "600"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    with pytest.raises(ProcessLookupError):
        os.kill(started.pid, signal.SIGKILL)
    started.poll()


def test_an_event_that_never_happened_is_shown_as_a_lower_bound():
    samples = Samples(BOTH)
    samples.add_limit(A, 20_000)
    samples.add(B, 8.0, 12.0)
    rows = samples.rows("lost", "ms", "N = 2")
    assert rows == [
        Row("lost", "a", 20_000, "ms", "N = 2", samples=1, is_bound=True),
        Row("lost", "b", 10.0, "ms", "N = 2", samples=2),
    ]
    line = table(rows, ["a", "b"]).splitlines()[-1]
    assert line == "| lost | > 20000 ms | 10.0 ms | > 2000 | N = 2; 1 and 2 samples |"


def test_a_median_below_the_limit_is_exact_even_if_a_sample_reached_it():
    samples = Samples(BOTH)
    samples.add(A, 1.0, 2.0)
    samples.add_limit(A, 50.0)
    assert not samples.rows("x", "ms", "")[0].is_bound
    assert samples.rows("x", "ms", "", max)[0].is_bound


def test_a_ratio_with_a_lower_bound_as_divisor_is_not_shown():
    rows = [
        Row("x", "a", 30.0, "ms", "N", samples=3),
        Row("x", "b", 50.0, "ms", "N", samples=3, is_bound=True),
    ]
    assert table(rows, ["a", "b"]).splitlines()[-1] == "| x | 30.0 ms | > 50.0 ms | - | N; 3 samples |"


def test_a_percentile_is_one_of_the_values():
    values = list(range(1, 101))
    assert [percentile(values, percent) for percent in (1, 50, 99, 100)] == [1, 50, 99, 100]
    assert percentile([7.0], 50) == 7.0


def test_a_time_box_yields_at_least_one_sample():
    assert list(time_box(0.0, 5)) == [0]
    assert list(time_box(60.0, 3)) == [0, 1, 2]


def test_a_benchmark_without_etcd_says_that_it_is_skipped(monkeypatch, capsys):
    monkeypatch.setenv(etcd.PROGRAM, "/no/etcd")
    assert etcd.measure(BOTH) == []
    assert "is skipped: no etcd" in capsys.readouterr().err


def test_etcd_next_to_python_is_used_if_none_is_on_the_path(monkeypatch, tmp_path):
    monkeypatch.setenv(etcd.PROGRAM, "")
    monkeypatch.setenv("PATH", "")
    beside = tmp_path / "etcd"
    beside.touch(mode=0o700)
    monkeypatch.setattr(sys, "executable", str(tmp_path / "python"))
    assert etcd._choose_program("nodes-etcd")
    assert os.environ[etcd.PROGRAM] == str(beside)
