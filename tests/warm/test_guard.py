"""Workers are forked only from a clean process. A module that leaves something behind at import is named and
left out.
"""

import os
import re
import shutil
import signal
import subprocess
from pathlib import Path

import pytest
from helpers import procs
from helpers.fidelity import ARGUED, FACTS, Job
from helpers.said import line_with, says
from helpers.steady import send

pytestmark = pytest.mark.beyond_torchrun

LEAVES = {
    "a_thread": "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "a_socket": "import socket; kept = socket.socket()",
    "a_pair": "import socket; kept = socket.socketpair()",
    "a_file": "kept = open(__file__)",
    "a_pipe": "import os; kept = os.pipe()",
    "a_poll": "import select; kept = select.epoll()",
    "a_child": "import subprocess; kept = subprocess.Popen(['sleep', '1000'])",
    "a_daemon": "import os; os.fork() or os.execvp('sh', ['sh', '-c', 'sleep 1000 &'])",
    "a_zombie": "import os; kept = os.fork() or os._exit(0)",
    "an_error": "raise ValueError('broken at import')",
    "a_missing_part": "import no_such_part",
    "an_interrupt": "raise KeyboardInterrupt",
    "an_exit": "import sys; sys.exit(0)",
    "a_folder": "import os; os.chdir('/')",
    "a_umask": "import os; os.umask(0o77)",
    "a_mask": "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})",
    "a_timer": "import signal; signal.setitimer(signal.ITIMER_REAL, 1000)",
    "a_program": "import os, sys; os.execv(sys.executable, sys.orig_argv)",
    "a_rank": "import os; rank = int(os.environ.get('RANK', 0))",
    "a_rank_that_must_be": "import os; rank = os.environ['LOCAL_RANK']",
    "a_size": "import os; is_distributed = 'WORLD_SIZE' in os.environ",
    "a_temporary_folder": "import tempfile; kept = tempfile.TemporaryDirectory()",
    "a_tee": "import sys, types; s = sys.stdout; sys.stdout = types.SimpleNamespace(write=s.write)",
    "a_codec": "import codecs, sys; sys.stderr = codecs.getwriter('utf-8')(sys.stderr.buffer)",
    "a_detached_stream": "import io, sys; sys.stdout = io.TextIOWrapper(sys.stdout.detach())",
    "a_closed_stream": "import sys; sys.stdout.close(); sys.stdout = sys.stderr",
    "an_original_stream": "import io, sys; sys.__stdout__ = io.StringIO()",
    "a_standard_descriptor": "import os; os.dup2(os.open('/dev/null', os.O_WRONLY), 1)",
    "a_closed_descriptor": "import os; os.close(2)",
    "an_environment": "import os; os.environ = dict(os.environ)",
    "a_first_folder": "import sys; sys.path.insert(0, '/first')",
    "a_second_nursery": "import os, select; os.fork() and select.select([], [], [], 0.3)",
}
EXECUTES = """
import ctypes, os, sys
arguments = [*map(os.fsencode, sys.orig_argv), None]
ctypes.CDLL(None).execv(os.fsencode(sys.executable), (ctypes.c_char_p * len(arguments))(*arguments))
"""
ENDS = {
    "an_end": ("import os; os._exit(3)", "exit code 3"),
    "a_success": ("import os; os._exit(0)", "exit code 0"),
    "a_crash": ("import ctypes; ctypes.string_at(0)", "SIGSEGV"),
    "a_death": ("import os, signal; os.kill(os.getpid(), 9)", "SIGKILL"),
    "a_c_program": (EXECUTES, "executes"),
    "a_close": ("import os, signal; os.closerange(3, 256); signal.pause()", "descriptors"),
    "a_close_of_one": ("import os, signal; os.close(3); signal.pause()", "descriptors"),
    "a_close_of_another": ("import os; os.close(4)", "descriptors"),
    "a_close_and_an_error": ("import os; os.close(5); 1 / 0", "descriptors"),
}
"""Modules that end the process, and a token of the cause that is reported."""
CLEAN = {
    "a_copy": "import os; kept = os.environ.copy()",
    "a_device": "kept = open('/dev/null')",
    "a_log": "kept = open('log', 'a')",
    "a_folder_descriptor": "import os; kept = os.open('.', os.O_RDONLY)",
    "a_thread_that_ended": "import threading; t = threading.Thread(target=int); t.start(); t.join()",
    "a_child_that_ended": "import subprocess; subprocess.run(['true'])",
    "a_socket_that_is_closed": "import socket; socket.socket().close()",
}
SHOW = """
import sys
names = sorted({*sys.argv[1].split(",")} & {*sys.modules})
import os
os.write(1, " ".join(["PRELOADED", *names, "\\n"]).encode())
"""


@pytest.fixture
def preload(launch, library, worker_script):
    """Return a function that launches a job with these modules. It returns the preloaded modules, the reasons
    for leaving out the others, and stderr.
    """
    script = worker_script(SHOW)

    def run(modules, **how):
        names = ",".join(["json", *modules, "colorsys"])
        environment = {**library(**modules), **how.pop("env", {})}
        options = ("--nproc-per-node=2", "--warm", names)
        launched = launch(*options, script, names, env=environment, **how).exits(0)
        said = launched.wait_for_lines(r"^PRELOADED (.*)", 2, "stdout")
        (preloaded,) = {match[1] for match in said}
        left_out = re.findall(r"warm: (\w+) was left out: (.+)", launched.stderr)
        assert launched.stderr.count("left out") == len(left_out), launched.stderr
        return preloaded.split(), dict(left_out), launched.stderr

    return run


def test_fork_unsafe_modules_are_left_out_and_the_rest_is_preloaded(preload, tmp_path):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    preloaded, left_out, stderr = preload(LEAVES, env={"TMPDIR": str(temporary)})
    assert not list(temporary.iterdir())
    assert preloaded == ["colorsys", "json"], stderr
    assert list(left_out) == list(LEAVES), stderr


def test_a_missing_module_is_left_out_if_its_package_leaves_a_thread(launch, tmp_path, worker_script):
    package = tmp_path / "modules" / "a_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(LEAVES["a_thread"])
    script = worker_script("""
        import os
        try:
            import a_package.missing
        except ImportError:
            os.write(1, b"THREADS %d\\n" % len(os.listdir("/proc/self/task")))
    """)
    started = launch("--warm=auto", script, env={"PYTHONPATH": str(package.parent)}).exits(0)
    assert started.stdout == "THREADS 2\n"
    line_with(started.stderr, "warm: a_package.missing ", "thread")


def test_shared_memory_of_a_left_out_module_is_removed(preload):
    name = f"elasticrs-test-{os.getpid()}"
    module = f"from multiprocessing import shared_memory as m; kept = m.SharedMemory({name!r}, True, 8)"
    assert list(preload({"shared": module + procs.TRACKER_RUNS})[1]) == ["shared"]
    assert name not in os.listdir("/dev/shm")


LEAVES_A_SLOW_TRACKER = """
import os, signal, subprocess
from multiprocessing import shared_memory
kept = shared_memory.SharedMemory({name!r}, True, 8)
exec({runs!r})
os.kill(tracker, signal.SIGSTOP)
child = subprocess.Popen(["sleep", "1000"])
with open("pids.new", "w") as file:
    file.write(f"{{tracker}} {{child.pid}}")
os.rename("pids.new", "pids")
"""


def test_a_slow_resource_tracker_removes_the_shared_memory(launch, tmp_path, worker_script, library):
    """A slow resource tracker is not killed with the other processes, so that it can remove the shared
    memory.
    """
    name = f"elasticrs-test-{os.getpid()}-slow"
    env = library(leaves=LEAVES_A_SLOW_TRACKER.format(name=name, runs=procs.TRACKER_RUNS))
    job = launch("--warm=leaves", worker_script(""), env=env, cwd=tmp_path)
    procs.wait_until((tmp_path / "pids").exists)
    tracker, child = map(int, (tmp_path / "pids").read_text().split())
    try:
        procs.assert_gone([child], 20)
        send(tracker, signal.SIGCONT)
        job.exits(0)
        assert name not in os.listdir("/dev/shm")
    finally:
        Path("/dev/shm", name).unlink(missing_ok=True)


@pytest.mark.parametrize(
    "text",
    [
        "import os; del os._exit, os.listdir",
        "import os, sys; sys.modules['traceback'] = None; del os.listdir",
        "import io, sys; sys.stdout = io.TextIOWrapper(sys.stdout.detach())",
        EXECUTES,
    ],
)
def test_the_script_runs_only_in_workers(launch, tmp_path, worker_script, text, library):
    env = library(breaks=text)
    script = worker_script("import os; open('ran', 'a').write(os.environ.get('RANK', 'nobody') + ' ')")
    launch("--warm=breaks", script, env=env, cwd=tmp_path).exits(0)
    assert (tmp_path / "ran").read_text() == "0 "


def test_rank_zero_only_of_known_libraries_uses_the_rank_of_the_worker(launch, tmp_path, worker_script):
    folder = tmp_path / "modules"
    modules = {"torchmetrics.utilities.prints": "LOCAL_RANK", "lightning_fabric.utilities.rank_zero": "RANK"}
    for name, variable in modules.items():
        path = folder / f"{name.replace('.', '/')}.py"
        path.parent.mkdir(parents=True)
        # Create `__init__.py` files, because installed packages of the same name would otherwise take
        # precedence.
        for package in (path.parent, path.parent.parent):
            (package / "__init__.py").touch()
        path.write_text(f"""if True:
            import os
            def rank_zero_only(): pass
            rank_zero_only.rank = getattr(rank_zero_only, "rank", int(os.environ.get({variable!r}, 0)))
        """)
    script = worker_script(f"""
        import os, sys
        os.write(1, f"RUNS {{len({{*sys.modules}} & {set(modules)})}} ".encode())
        import torchmetrics.utilities.prints as t, lightning_fabric.utilities.rank_zero as l
        print(*(module.rank_zero_only.rank == int(os.environ["RANK"]) for module in (t, l)))
    """)
    options = ("--nproc-per-node=2", "--warm", ",".join(modules), "--tee=3")
    started = launch(*options, script, env={"PYTHONPATH": str(folder), "RANK": "7"}).exits(0)
    assert started.stdout.count("RUNS 2 True True") == 2, started.stderr


NO_FORKS = {
    "a_handler_that_exits": "import os; os.register_at_fork(after_in_child=lambda: os._exit(0))",
    "an_audit_hook": "import sys; sys.addaudithook(lambda name, _: name == 'os.fork' and 1 / 0)",
    "a_missing_function": "import time; time.tzset = None",
}


@pytest.mark.parametrize("name", NO_FORKS)
def test_workers_that_cannot_be_forked_start_cold(launch, worker_script, library, name):
    script = worker_script(f"""
        import os, sys
        os.write(1, f"RUNS {{sys.argv[1:]}} {{os.environ['RANK']}} {{{name!r} in sys.modules}}\\n".encode())
    """)
    options = ("--nproc-per-node=2", "--tee=3", "--max-restarts=0", "--warm", name)
    started = launch(*options, script, "an argument", env=library(**{name: NO_FORKS[name]})).exits(0)
    for rank in (0, 1):
        line_with(started.stdout, "RUNS ['an argument']", f"{rank} False")
    says(started.stderr, "warm:", "cold")


def test_modules_that_end_the_process_are_left_out_and_the_rest_is_preloaded(preload):
    modules = {"a_thread": LEAVES["a_thread"], **{name: text for name, (text, _) in ENDS.items()}}
    preloaded, left_out, stderr = preload(modules)
    assert preloaded == ["colorsys", "json"], stderr
    expected = {"a_thread": "thread", **{name: why for name, (_, why) in ENDS.items()}}
    assert left_out.keys() == expected.keys(), stderr
    for name, why in expected.items():
        assert why in left_out[name]


def test_a_nice_value_raised_by_an_import_is_raised_only_once(launch, worker_script, library):
    env = library(nicer="import os; os.nice(1)")
    script = worker_script("import os; import nicer; print('NICE', os.nice(0))")
    before = os.getpriority(os.PRIO_PROCESS, 0)
    launched = launch("--warm=nicer", script, env=env).exits(0)
    assert launched.stdout == f"NICE {before + 1}\n"


def test_fork_safe_modules_are_preloaded(preload):
    preloaded, left_out, stderr = preload(CLEAN)
    assert preloaded == sorted(["json", "colorsys", *CLEAN]), stderr
    assert not left_out


CHANGES = {
    "umask": "import os; os.umask(0o77)",
    "handler": "import signal; signal.signal(signal.SIGUSR1, lambda *_: None)",
    "ignored": "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)",
    "mask": "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR2})",
    "variable": "import os; os.environ['SET_AT_IMPORT'] = 'a=b'; os.environ['MINE'] = '2'",
    "removed": "import os; os.environ.pop('REMOVED', None)",
    "path": "import sys; sys.path.append('/added/at/import')",
    "arguments": "import sys; sys.argv[3:4] = ['interpreter', 'process']",
    "limit": "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))",
    "output": "import sys; sys.stdout.reconfigure(line_buffering=True)",
    "recursion": "import sys; sys.setrecursionlimit(2345)",
    "collector": "import gc; gc.disable()",
    "warnings": "import warnings; warnings.simplefilter('ignore', UserWarning)",
    "logging": "import logging; logging.basicConfig(level=logging.DEBUG)",
    "end": "import atexit; atexit.register(print, 'at exit')",
    "hook": "import sys; sys.excepthook = lambda *_: None",
    "words": "import sys; print('said at import'); sys.stderr.write('and this\\n')",
    "descriptor": "import os; kept = os.open('/dev/null', os.O_RDONLY)",
    "method": "import multiprocessing; multiprocessing.set_start_method('forkserver')",
    "name": "import ctypes; ctypes.CDLL(None).prctl(15, b'renamed', 0, 0, 0)",
}
ARGUED_HERE = ARGUED | {
    r"[\d.]+/facts/seen_first/.*": "what an import does is done before the script's first line",
    r"[\d.]+/facts/interpreter/excepthook": "the hook of the agent wraps it, like a sitecustomize's",
    r"[\d.]+/facts/descriptors/([3-9]|\d\d+)/.*": "those that imports open have other numbers",
}


def test_state_changed_by_an_import_is_the_same_warm_and_cold(launch, library, tmp_path):
    """After the script's own ``import``, the worker's state is the same whether the module was preloaded or
    left out.
    """
    modules = ",".join(["json", "colorsys", *(f"changes_{name}" for name in CHANGES)])
    job = Job(launch, tmp_path, modules)
    parts = ("interpreter", "process", "signals", "descriptors", "environment", "streams", "state")
    env = {
        **library(**{f"changes_{name}": text for name, text in CHANGES.items()}),
        "MINE": "1",
        "REMOVED": "1",
    }
    outcome = job.compare(FACTS, "facts", modules, *parts, "seen_first", argued=ARGUED_HERE, env=env)
    seen = outcome.workers["0.0"].facts["seen_first"]["modules"]
    left_out = [name for name in CHANGES if f"changes_{name}" not in seen]
    assert sorted(left_out) == ["mask", "output", "umask"], outcome.stderr


DRIVER = """
#include <stdlib.h>
int cuDeviceGetCount(int *count) {
    *count = 1;
    return getenv("FAKE_DRIVER")[0] == 'u' ? 0 : 3;
}
"""


@pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")
@pytest.mark.parametrize("state", ["up", "down"])
def test_a_module_that_initializes_the_cuda_driver_is_left_out(preload, tmp_path, state):
    library = tmp_path / "libcuda.so.1"
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-x", "c", "-", "-o", library], input=DRIVER, text=True, check=True
    )
    module = {"a_driver": f"import ctypes; kept = ctypes.CDLL({str(library)!r})"}
    preloaded, left_out, stderr = preload(module, env={"FAKE_DRIVER": state})
    assert ("a_driver" in preloaded) == (state == "down"), stderr
    assert list(left_out) == (["a_driver"] if state == "up" else []), stderr
