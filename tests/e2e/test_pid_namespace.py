"""A launcher in a pid namespace without its own ``/proc`` leaves no processes behind."""

import os
import signal
import subprocess
import sys

import pytest
from helpers import procs
from helpers.lines import leftovers
from helpers.procs import run_program

pytestmark = [pytest.mark.privileged, pytest.mark.beyond_torchrun]

# The launcher is not process 1 of its namespace, because all other processes would be killed when process 1
# exits.
FIRST = ("sh", "-c", '"$@"; echo "ENDED $?"; read line', "sh")
INSIDE = ("unshare", "--pid", "--fork", "--kill-child", "--")
WITHOUT = ("unshare", "--mount", "--", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh")
PROCS = {"outer": (*INSIDE, *FIRST), "none": (*WITHOUT, *INSIDE, *FIRST)}

# The script leaves several `sleep` processes behind. One of them has a child, and another one has lost its
# parent.
SCRIPT = """
    import os, signal, subprocess, sys
    attempt, how = os.environ["TORCHELASTIC_RESTART_COUNT"], sys.argv[1]
    left = "trap '' TERM; (sleep 1000 & exec sleep 1000) & (sleep 1000 &); echo LEFT; exec sleep 1000"
    daemons = [["sh", "-c", left]]
    if how == "spares":
        daemons.append(["bash", "-c", "ulimit -S -R unlimited; echo LEFT; exec sleep 2000"])
    for command in daemons:
        daemon = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
        assert daemon.stdout.readline() == b"LEFT\\n"
    os.write(1, b"READY\\n")
    if how in ("launch", "nursery") and attempt == "0":
        signal.pause()
    os._exit(3 if how == "fails" and attempt == "0" else 0)
"""


@pytest.fixture(params=PROCS)
def inside(request, launch, worker_script):
    """Return a function that starts a launcher in a pid namespace, whose process 1 stays until the end of the
    test.
    """
    started = []

    def start(how, script=SCRIPT):
        options = ("--linger=0", "--max-restarts=1", worker_script(script), how)
        started.append(launch(*options, prefix=PROCS[request.param], stdin=subprocess.PIPE))
        return started[-1]

    yield start
    for launched in started:
        launched.end_stdin()
        launched.wait()


def code_of(launched):
    return launched.wait_for_line(r"ENDED (\d+)", "stdout")[1]


def program_of(launched, name):
    """Return the pid of the only program whose command contains ``name``, ignoring shells."""
    programs = [each for each in launched.descendants() if not each.command.startswith("sh ")]
    (pid,) = (each.pid for each in programs if name in each.command)
    return pid


def sleeps_in(launched):
    return {each.pid: each.command for each in launched.descendants() if each.command.startswith("sleep")}


@pytest.mark.parametrize("how", ["ends", "fails", "spares"])
def test_only_spared_processes_survive_in_a_pid_namespace(inside, how):
    launched = inside(how)
    assert code_of(launched) == "0", launched.stderr
    assert list(sleeps_in(launched).values()) == (["sleep 2000"] if how == "spares" else [])
    assert launched.stderr.count("/proc is missing") == 1, launched.stderr
    assert leftovers(launched.stderr, "could not kill") == [], launched.stderr


USR1 = """
    import os, signal, sys
    if sys.argv[1] == "handles":
        signal.signal(signal.SIGUSR1, lambda *_: os.write(1, b"GOT\\n"))
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    os.write(1, b"READY\\n")
    while True:
        signal.pause()
"""


@pytest.mark.parametrize("how", ["handles", "ignores"])
def test_sigusr1_is_not_forwarded_in_a_pid_namespace_without_proc(inside, how):
    launched = inside(how, USR1)
    launched.wait_for_line("READY", "stdout")
    agent = program_of(launched, "-m elasticrs.launch")
    os.kill(agent, signal.SIGUSR1)
    launched.wait_for_line(r"SIGUSR1 .*\bnot\b", "stderr")
    os.kill(agent, signal.SIGTERM)
    assert code_of(launched) == "1", launched.stderr
    assert "GOT" not in launched.stdout


@pytest.mark.parametrize(("killed", "code"), [("launch", "137"), ("nursery", "0")])
def test_no_process_remains_if_the_launcher_or_nursery_is_killed(inside, killed, code):
    launched = inside(killed)
    launched.wait_for_line("READY", "stdout")
    names = {"launch": "-m elasticrs.launch", "nursery": "worker-nursery"}
    os.kill(program_of(launched, names[killed]), signal.SIGKILL)
    assert code_of(launched) == code, launched.stderr
    # Poll, because a single scan can miss a process that is reparented in the meantime.
    procs.wait_until(lambda: not sleeps_in(launched))


CHILDREN = """
import os, signal
from elasticrs import _core
started = [os.fork() for _ in range(2)] if _core.children() == [] else []
if 0 in started:
    signal.pause()
print(sorted(_core.children()) == started, len(started), [_core.name_of(pid) for pid in started])
"""


@pytest.mark.parametrize("proc", PROCS)
def test_processes_of_the_outer_namespace_are_not_mistaken_for_children(proc):
    command = [*PROCS[proc][: -len(FIRST)], sys.executable, "-c", CHILDREN]
    done = run_program(command)
    assert done.stdout == "True 2 ['', '']\n", done.stderr


def test_a_launcher_that_is_process_1_handles_sigterm(launch, worker_script):
    """The launcher can be process 1, as in a container without an init program. It handles SIGTERM, which the
    kernel ignores for process 1 by default. A leftover orphan does not change that.
    """
    script = """
        import os, signal, subprocess
        subprocess.Popen(["sh", "-c", "sleep 1000 &"], start_new_session=True).wait()
        print("READY", os.getppid() != 1, flush=True)
        os.kill(1, signal.SIGTERM)
        signal.pause()
    """
    first = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--")
    launched = launch(worker_script(script), prefix=first).exits(1)
    assert "READY True" in launched.stdout
    assert "stopped by SIGTERM" in launched.stderr
