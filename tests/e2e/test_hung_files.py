"""Files whose access hangs, as on a dead network file system. They delay a restart by a limited time, and
never prevent it.
"""

import os
import sys

import pytest
from helpers.launcher import launcher_with

pytestmark = pytest.mark.beyond_torchrun

IMPATIENT = launcher_with("_engine.process.background_call", FILE_LIMIT=0.3)

PROGRAM = """
import os, signal, sys
error_file, attempt = os.environ["TORCHELASTIC_ERROR_FILE"], os.environ["TORCHELASTIC_RESTART_COUNT"]
if attempt != "0":
    sys.exit(0)
beside = os.path.join(os.path.dirname(error_file), sys.argv[1])
path = error_file + ".fault" if sys.argv[1] == "fault" else beside
if os.path.lexists(path):
    os.unlink(path)
os.mkfifo(path)
if sys.argv[1] == "fault":
    os.kill(os.getpid(), signal.SIGSEGV)
sys.exit(1)
"""


@pytest.mark.parametrize("file", ["fault", "stderr.log"])
def test_a_file_that_hangs_does_not_stop_the_restart(file, launch, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    options = ("--max-restarts", "1", "--log-dir", tmp_path / "logs", "--redirects", "3")
    launched = launch(*options, program, file, argv=IMPATIENT)
    launched.exits(0)
    assert launched.stderr.count("could not be read within 0.3 s") == 1
    assert "attempt 1 is running" in launched.stderr


def test_the_report_of_a_failure_whose_files_hang_names_the_exit_code(launch, tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    options = ("--max-restarts", "0", "--log-dir", tmp_path / "logs", "--redirects", "3")
    launched = launch(*options, program, "stderr.log", argv=IMPATIENT)
    launched.exits(1)
    assert "exit code 1" in launched.stderr
    assert "its error file could not be read" in launched.stderr


AUDITED = """
import os, sys, threading
from elasticrs.launch import main
from elasticrs._engine.supervise.run import loop, tracker

EVENTS = {
    "open", "os.listdir", "os.scandir", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate",
    "socket.getaddrinfo", "socket.gethostbyname", "subprocess.Popen", "os.posix_spawn",
}
# The counters of the kernel, the modules that are imported after a failure, and files in memory.
PACKAGE = os.path.dirname(sys.modules["elasticrs"].__file__)
ALLOWED = ("/proc/", "/sys/", "/dev/", "/memfd:", sys.prefix, sys.base_prefix, PACKAGE)
watch = {"on": False}

def hook(event, args):
    if watch["on"] and event in EVENTS and threading.get_ident() == threading.main_thread().ident:
        path = args[0]
        path = os.readlink(f"/proc/self/fd/{path}") if isinstance(path, int) else os.fsdecode(path)
        if not path.startswith(ALLOWED):
            os.write(2, f"TOUCHED {event} {path}\\n".encode())

def switching(kind, name, is_on):
    method = getattr(kind, name)
    def switch(self, *args):
        watch["on"] = is_on
        return method(self, *args)
    setattr(kind, name, switch)

switching(tracker.AttemptTracker, "_run_begins", True)
switching(loop.Agent, "_finish", False)
sys.addaudithook(hook)
main()
"""

FAILS = """
    import os, signal, sys, time
    from elasticrs.timer import heartbeat
    attempt = os.environ["TORCHELASTIC_RESTART_COUNT"]
    heartbeat(1)
    if os.environ["RANK"] == "0":
        if attempt == "0":
            raise ValueError("first")
        if attempt == "1":
            os.kill(os.getpid(), signal.SIGSEGV)
        if attempt == "2":
            print("wrong option", file=sys.stderr)
            sys.exit(3)
        if attempt == "3":
            raise ConnectionResetError(104, "Connection reset by peer")
    while True:
        signal.pause()
"""


TWO_NODES = (
    *("--nnodes", "1:2", "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0"),
    *("--rdzv-conf", "last_call_timeout=0.1"),
)


@pytest.mark.parametrize("options", [(), ("--on-failure", "replace"), TWO_NODES])
def test_the_main_thread_touches_no_file_while_the_job_runs(options, launch, worker_script, tmp_path):
    """Check the time from the first start of the workers to the end of the job. The kernel's counter files,
    imports and files in memory are allowed.
    """
    options = ("--nproc-per-node", "2", "--max-restarts", "4", "--hang-timeout", "2", *options)
    logs = ("--log-dir", tmp_path / "logs", "--tee", "3")
    launched = launch(*options, *logs, worker_script(FAILS), argv=(sys.executable, "-c", AUDITED))
    assert launched.wait() == 1
    touched = {line for line in launched.stderr.splitlines() if line.startswith("TOUCHED")}
    assert touched == set(), launched.stderr


def test_a_report_file_that_hangs_does_not_stop_the_end(launch, worker_script, tmp_path):
    os.mkfifo(tmp_path / "report")
    launched = launch("--report", tmp_path / "report", worker_script("raise SystemExit(3)"), argv=IMPATIENT)
    launched.exits(1)
    assert "--report could not be written" in launched.stderr
