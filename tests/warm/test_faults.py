"""If the importing process is killed, stopped, hangs or outlives its agent, the job continues and
finishes.
"""

import os
import re
import signal
import subprocess
from pathlib import Path

import pytest
from helpers import procs
from helpers.said import line_with
from helpers.steady import send
from warm.test_guard import EXECUTES

pytestmark = pytest.mark.beyond_torchrun

SLOW = """
import os
open("importing", "w").close()
os.close(os.open("go-on", os.O_RDONLY))
"""
"""Its import says that it runs, and waits until the FIFO is opened for writing."""

SHOW = """
import os, sys
os.write(1, f"RUNS {os.environ['RANK']} {'slow' in sys.modules}\\n".encode())
"""


class Importing:
    """A job whose nursery (the process that forks workers) is in the middle of an import."""

    def __init__(self, launch, folder, script, text, *options):
        self._folder, self._fifo = folder, None
        (folder / "slow.py").write_text(text)
        os.mkfifo(folder / "go-on")
        options = ("--nproc-per-node=2", "--warm=json,slow", *options)
        self.launched = launch(*options, script, env={"PYTHONPATH": str(folder)})
        procs.wait_until((folder / "importing").exists)
        (self.nursery,) = [child.pid for child in procs.nurseries(self.launched.pid)]

    def go_on(self):
        """Let this import continue, and make all later imports finish immediately."""
        (self._folder / "slow.py").write_text("import os\n")
        # Open the FIFO for reading and writing, because opening it for writing only would block until there
        # is a reader.
        self._fifo = os.open(self._folder / "go-on", os.O_RDWR)

    def runs(self):
        self.launched.exits(0)
        if self._fifo is not None:
            os.close(self._fifo)
        return sorted(re.findall(r"^RUNS (\d) (\w+)$", self.launched.stdout, re.MULTILINE))


@pytest.fixture
def importing(launch, tmp_path, worker_script):
    script = tmp_path / "script" / "worker.py"
    script.parent.mkdir()
    script.write_text(SHOW)
    return lambda text=SLOW, *options: Importing(launch, tmp_path, script, text, *options)


@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSEGV])
def test_workers_run_if_the_nursery_is_killed_while_importing(importing, signum):
    job = importing()
    os.kill(job.nursery, signum)
    job.go_on()
    assert [rank for rank, _ in job.runs()] == ["0", "1"]


def test_workers_start_warm_if_the_nursery_is_paused_while_importing(importing):
    job = importing()
    os.kill(job.nursery, signal.SIGSTOP)
    procs.wait_state(job.nursery, "T")
    job.go_on()
    os.kill(job.nursery, signal.SIGCONT)
    assert job.runs() == [("0", "True"), ("1", "True")]


def test_a_long_import_is_reported_once_while_it_runs(importing):
    job = importing()
    job.launched.wait_for_line(r"warm: slow .*5 s", "stderr")
    job.go_on()
    assert job.runs() == [("0", "True"), ("1", "True")]
    line_with(job.launched.stderr, "warm: slow")


@pytest.mark.parametrize("is_stopped", [False, True], ids=["hangs", "is stopped"])
def test_an_import_over_the_time_limit_is_named_and_workers_start_cold(importing, is_stopped):
    job = importing(SLOW, "--warm-timeout=5")
    if is_stopped:
        os.kill(job.nursery, signal.SIGSTOP)
    assert job.runs() == [("0", "False"), ("1", "False")]
    line_with(job.launched.stderr, "elasticrs: warm: ", "cold", " slow ", "5 s")
    assert "; 0 restarts" in job.launched.stderr


def test_the_module_that_breaks_the_import_is_named(launch, worker_script, library):
    env = library(
        scarce="import resource\nlimit = resource.getrlimit(resource.RLIMIT_NOFILE)\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (0, limit[1]))\n"
    )
    job = launch("--warm=json,scarce", worker_script(""), env=env).exits(0)
    line_with(job.stderr, "warm: ", "OSError: ", "scarce")


STARTS = """
import os, subprocess
kept = subprocess.Popen(["sleep", "1000"])
if os.fork() == 0:
    os.setsid()
    os.execvp("sleep", ["sleep", "1000"])
"""


@pytest.mark.parametrize("is_paused", [False, True], ids=["nursery runs", "nursery is paused"])
@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGKILL])
def test_a_nursery_and_the_processes_of_its_import_end_with_the_agent(importing, signum, is_paused):
    job = importing(f"{STARTS}{SLOW}")
    started = [child.pid for child in procs.children(job.nursery)]
    if is_paused:
        os.kill(job.nursery, signal.SIGSTOP)
        procs.wait_state(job.nursery, "T")
    job.launched.signal(signum)
    assert job.launched.wait(20) == (1 if signum == signal.SIGTERM else -signum)
    assert len(started) == 2
    procs.assert_gone([job.nursery, *started], 20)
    procs.reap_adopted()


@pytest.mark.parametrize("whose", ["nursery", "sentinel"])
def test_processes_started_by_an_import_end_with_nursery_or_sentinel(importing, whose):
    job = importing(f"{STARTS}{SLOW}")
    started = [child.pid for child in procs.children(job.nursery)]
    if whose == "sentinel":
        (sentinel,) = [child.pid for child in procs.children(job.launched.pid) if child.pid != job.nursery]
        os.kill(sentinel, signal.SIGKILL)
        procs.assert_gone([job.nursery])
        job.go_on()
        assert job.runs() == [("0", "False"), ("1", "False")]
        line_with(job.launched.stderr, "warm: ", "cold", "lost")
    else:
        os.kill(job.nursery, signal.SIGKILL)
        job.go_on()
        job.runs()
    assert len(started) == 2
    procs.assert_gone([job.nursery, *started], 20)
    procs.reap_adopted()


STUBBORN = """
import subprocess, sys
wait = "import signal; signal.signal(2, 1); signal.signal(15, 1); print(flush=True); signal.pause()"
subprocess.Popen([sys.executable, "-c", wait], stdout=subprocess.PIPE).stdout.readline()
"""

# The shell is pid 1 and outlives the launcher, because the kernel kills all processes of the namespace when
# pid 1 exits.
NAMESPACE = ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", "--")
NAMESPACE += ("sh", "-c", '"$@"; read line', "sh")


@pytest.mark.privileged
def test_processes_of_an_import_end_with_the_agent_if_its_guard_started_last(
    launch, tmp_path, worker_script, library
):
    env = library(slow=STUBBORN + SLOW)
    os.mkfifo(tmp_path / "go-on")
    options = ("--warm=slow", worker_script(SHOW))
    launched = launch(*options, env=env, prefix=NAMESPACE, stdin=subprocess.PIPE)
    try:
        procs.wait_until((tmp_path / "importing").exists)
        running = {each.command: each.pid for each in launched.descendants()}
        (child,) = [pid for command, pid in running.items() if "signal.pause" in command]
        (agent,) = [
            pid for command, pid in running.items() if re.match(r"\S*python\S* (-\S+ )*-m elasticrs", command)
        ]
        send(agent, signal.SIGKILL)
        procs.assert_gone([child], 20)
    finally:
        launched.end_stdin()
        launched.wait()


def test_a_program_executed_by_an_import_does_not_run_the_script(importing):
    job = importing(f"{SLOW}{EXECUTES}")
    os.kill(job.launched.pid, signal.SIGSTOP)
    procs.wait_state(job.launched.pid, "T")
    environment = Path(f"/proc/{job.nursery}/environ")
    before = environment.read_bytes()
    job.go_on()
    # A changed environment shows that the nursery has executed the program. That program then sleeps, or it
    # has run the script and exited.
    procs.wait_until(lambda: environment.read_bytes() not in (before, b""))
    procs.wait_until(lambda: procs.process(job.nursery).state in "SZ")
    os.kill(job.launched.pid, signal.SIGCONT)
    assert [rank for rank, _ in job.runs()] == ["0", "1"]
    line_with(job.launched.stderr, "warm: slow ", "executes")


STARTS_PYTHON = """
import subprocess, sys
code = "import os, sys; print(os.environ.get('PYTHONPATH'), 'nursery' in sys.modules, sys.path)"
said = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True).stdout
"""


def test_a_python_program_started_by_an_import_runs_as_in_a_cold_worker(launch, worker_script, library):
    env = library(starts_python=STARTS_PYTHON)
    script = worker_script("import os, starts_python\nos.write(1, starts_python.said.encode())")
    cold, warm = (launch(f"--warm={it}", script, env=env).exits(0) for it in ("off", "starts_python"))
    assert warm.stdout == cold.stdout
    assert "left out" not in warm.stderr


WARM = ("--warm", "json,colorsys")


def test_a_warm_start_works_with_few_descriptors(launch, tmp_path, worker_script):
    prefix = ("sh", "-c", 'ulimit -n 100; exec "$@"', "sh")
    script = worker_script("import sys; print('RUNS', 'colorsys' in sys.modules, flush=True)")
    launched = launch("--nproc-per-node=2", "--tee=3", *WARM, script, prefix=prefix).exits(0)
    assert launched.stdout.count("RUNS True") == 2, launched.stderr
