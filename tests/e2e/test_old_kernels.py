"""elasticrs uses features of newer kernels if they exist, but does not require them.

The testkit puts a seccomp filter before the launcher, which all that it starts inherits.
"""

import re
import subprocess

import pytest
from helpers.built import old_kernel

SCRIPT = """
    import os, signal, subprocess, sys
    attempt, rank = os.environ["TORCHELASTIC_RESTART_COUNT"], os.environ["RANK"]
    if attempt == "0":
        # In the group of its worker, and in a session of its own.
        subprocess.Popen(["sleep", "1000"])
        subprocess.Popen(["sleep", "1000"], start_new_session=True)
        os.write(1, b"READY\\n")
        if rank == "1":
            sys.stdin.readline()
            sys.exit(7)
        signal.pause()
    os.write(1, f"attempt {attempt} {len(os.listdir('/proc/self/fd'))}\\n".encode())
"""


@pytest.mark.beyond_torchrun
@pytest.mark.parametrize(
    "features",
    [("group_signal",), ("close_range",), ("memfd",), ("close_range", "group_signal", "memfd")],
    ids=",".join,
)
def test_a_restart_works_without_newer_kernel_features(launch, worker_script, features):
    launched = launch(
        *("--standalone", "--nproc-per-node", "3", "--max-restarts", "1", worker_script(SCRIPT)),
        prefix=old_kernel(*features),
        stdin=subprocess.PIPE,
        # The traceback hook would open a file for the stack of a fatal signal.
        env={"ELASTICRS_TRACEBACKS": "0"},
    )
    launched.wait_for_lines("READY", 3, "stdout")
    launched.feed(b"go\n")
    launched.exits(0)
    # Each worker has three standard descriptors, and a fourth one while it lists them.
    launched.wait_for_lines("attempt 1 4", 3, "stdout")
    assert "code 7; restarting" in launched.stderr


@pytest.mark.beyond_torchrun
def test_heartbeats_without_sealed_memory_are_refused_in_one_line(launch, worker_script):
    # Heartbeats need sealed memory, because a worker could truncate any other file. Reading it would then
    # kill the agent with SIGBUS.
    options = ("--standalone", "--hang-timeout", "30")
    launched = launch(*options, worker_script("print('never')"), prefix=old_kernel("memfd")).exits(1)
    line, last = [line for line in launched.stderr.splitlines() if "heartbeats" in line]
    assert "failed" in last
    assert "--hang-timeout" in line
    assert "memfd_create" in line
    assert launched.stdout == ""


@pytest.mark.beyond_torchrun
@pytest.mark.parametrize(
    ("lacking", "named"), [("pidfd_open", "pidfd_open"), ("subreaper", "PR_GET_CHILD_SUBREAPER")]
)
def test_a_kernel_older_than_the_minimum_is_refused_in_one_line(launch, worker_script, lacking, named):
    launched = launch("--standalone", worker_script(""), prefix=old_kernel(lacking)).exits(1)
    (line,) = launched.stderr.splitlines()
    assert re.search(rf"\bLinux 5\.4\b.*\b{named}\b", line)
