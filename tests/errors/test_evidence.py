"""The OOM killer's counters."""

import os
import subprocess
import sys

import pytest
from helpers.procs import HANG
from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.supervise import attempt

V1 = """\
31 23 0:28 / /sys/fs/cgroup rw,relatime - tmpfs tmpfs rw,mode=755
32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu
35 31 0:32 / /sys/fs/cgroup/memory rw,relatime shared:7 - cgroup cgroup rw,memory
41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw
"""
V2 = "26 23 0:24 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n"
CONTAINER_V1 = "600 590 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory\n"
ODD = "26 23 0:24 / /mnt/my\\040groups rw - cgroup2 none rw\n"
TWICE = V2 + "700 23 0:24 /job /run/job rw - cgroup2 cgroup2 rw\n"


@pytest.mark.parametrize(
    ("cgroups", "mountinfo", "files"),
    [
        (
            "9:name=systemd:/\n8:pids:/\n4:memory:/job/a\n0::/\n",
            V1,
            ["/sys/fs/cgroup/memory/job/a/memory.oom_control", "/sys/fs/cgroup/unified/memory.events"],
        ),
        ("0::/user.slice/x.scope\n", V2, ["/sys/fs/cgroup/user.slice/x.scope/memory.events"]),
        ("0::/\n", V2, ["/sys/fs/cgroup/memory.events"]),
        ("7:cpu,memory:/docker/abc\n", CONTAINER_V1, ["/sys/fs/cgroup/memory/memory.oom_control"]),
        ("7:memory:/docker/abc/x\n", CONTAINER_V1, ["/sys/fs/cgroup/memory/x/memory.oom_control"]),
        ("7:memory:/docker/abcd\n", CONTAINER_V1, []),
        ("0::/a:b\n", ODD, ["/mnt/my groups/a:b/memory.events"]),
        ("0::/job/x\n", TWICE, ["/run/job/x/memory.events"]),
        ("0::/other\n", TWICE, ["/sys/fs/cgroup/other/memory.events"]),
        ("0::/../outside\n", V2, ["/sys/fs/cgroup/../outside/memory.events"]),
        ("4:memory:/job\n", "", []),
        ("", V1, []),
        ("garbage\n0::\n", V2 + "garbage - x\n", []),
    ],
)
def test_oom_kill_counters_are_found_through_the_mounts(cgroups, mountinfo, files):
    assert attempt.memory_counters(cgroups, mountinfo) == files


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("low 0\nhigh 0\nmax 7\noom 2\noom_kill 2\noom_group_kill 0\n", 2),
        ("oom_kill_disable 0\nunder_oom 0\noom_kill 13\n", 13),
        ("oom_kill_disable 0\nunder_oom 0\n", None),
        ("oom_kill\n", None),
        ("oom_kill -1\n", None),
        ("", None),
    ],
)
def test_the_oom_kill_count_is_parsed(text, count):
    assert attempt.parse_oom_kill(text) == count


@given(cgroups=st.text(), mountinfo=st.text(alphabet="\\ -/a7\n"), counter=st.text())
def test_oom_kill_parsers_raise_no_exception_for_any_text(cgroups, mountinfo, counter):
    attempt.memory_counters(cgroups, mountinfo)
    attempt.memory_counters(cgroups, V1)
    attempt.memory_counters("0::/a\n4:memory:/b\n", mountinfo)
    attempt.parse_oom_kill(counter)


QUIET = {"/cg/memory.events": 3, attempt.VMSTAT: 10}
STRUCK = {"/cg/memory.events": 4, attempt.VMSTAT: 11}


@pytest.mark.parametrize(
    ("exitcode", "sent_signal", "before", "after", "probable"),
    [
        (-9, None, QUIET, STRUCK, True),
        (137, None, QUIET, STRUCK, True),
        (-9, 15, QUIET, STRUCK, True),
        (-9, 9, QUIET, STRUCK, False),
        (-9, None, QUIET, QUIET, False),
        (-9, None, {}, STRUCK, False),
        (-15, None, QUIET, STRUCK, False),
        (1, None, QUIET, STRUCK, False),
        (None, None, QUIET, STRUCK, False),
        (-9, None, {attempt.VMSTAT: 1}, {attempt.VMSTAT: 2}, True),
        (-9, None, QUIET, {**QUIET, attempt.VMSTAT: 11}, False),
        (-9, None, QUIET, {}, False),
    ],
)
def test_an_external_sigkill_and_a_higher_count_indicate_an_oom_kill(
    exitcode, sent_signal, before, after, probable
):
    assert attempt.probably_oom(exitcode, sent_signal, before, after) is probable


def test_oom_notes_name_the_counter_and_give_advice():
    note = attempt.oom_note(-9, None, QUIET, STRUCK)
    assert note is not None
    assert "oom_kill rose by 1 in /cg/memory.events" in note
    for advice in ("memory limit", "batch", "data loader"):
        assert advice in note
    machine = attempt.oom_note(-9, None, {attempt.VMSTAT: 1}, {attempt.VMSTAT: 2})
    assert machine is not None
    assert "memory limit" not in machine
    other = attempt.oom_note(1, None, QUIET, STRUCK)
    assert other is not None
    assert "perhaps a child of the worker" in other
    assert attempt.oom_note(-9, None, QUIET, QUIET) is None


def test_the_machine_has_oom_kill_counters():
    counts = attempt.oom_kills([os.getpid(), 2**22 + 1])
    assert counts[attempt.VMSTAT] >= 0
    assert attempt.read_counters(counts).keys() == counts.keys()


def test_a_plain_sigkill_is_not_taken_for_an_oom_kill():
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as worker:
        before = attempt.oom_kills([worker.pid])
        worker.kill()
        worker.wait(HANG)
    assert not attempt.probably_oom(worker.returncode, None, before, attempt.read_counters(before))
