"""Modules that misbehave while they are imported. A job that preloads such a module (``--warm``) has the same
exit code, output and traceback as a job that starts cold, and its script sees the same state of the process.
"""

import pytest
from helpers.fidelity import Job, flat

pytestmark = [pytest.mark.slow, pytest.mark.beyond_torchrun]

TEE = """
class Tee:
    def __init__(self, stream):
        self.stream = stream
    def write(self, text):
        return self.stream.write(text.upper())
    def flush(self):
        self.stream.flush()
"""
MODULES = {
    # Modules that replace or use the standard streams.
    "tee": f"import sys{TEE}sys.stdout = Tee(sys.stdout)",
    "tee_of_errors": f"import sys{TEE}sys.stderr = Tee(sys.stderr)",
    "codec": "import codecs, sys; sys.stdout = codecs.getwriter('utf-8')(sys.stdout.buffer)",
    "text_in_memory": "import io, sys; sys.stdout = io.StringIO()",
    "redirected": "import contextlib, io; kept = contextlib.redirect_stderr(io.StringIO()); kept.__enter__()",
    "second_wrapper": "import io, sys; sys.stdout = io.TextIOWrapper(sys.stdout.buffer, 'ascii')",
    "detached": "import io, sys; sys.stdout = io.TextIOWrapper(sys.stdout.detach(), 'utf-8')",
    "closed": "import sys; sys.stdout.close(); sys.stdout = sys.stderr",
    "no_stream": "import sys; sys.stdout = None",
    "original_replaced": "import io, sys; sys.__stdout__ = io.StringIO()",
    "null_descriptor": "import os; os.dup2(os.open('/dev/null', os.O_WRONLY), 1)",
    "closed_descriptor": "import os; os.close(2)",
    "reconfigured": "import sys; sys.stdout.reconfigure(encoding='utf-16', newline='|')",
    "half_a_line": "import sys; sys.stdout.write('half '); sys.stdout.buffer.write(b'a line')",
    "much_output": "print('x' * 300_000)",
    # Modules that end the process or raise an exception.
    "raises": "raise ValueError('no')",
    "interrupted": "raise KeyboardInterrupt",
    "leaves": "import sys; sys.exit(7)",
    "leaves_with_text": "import sys; sys.exit('bad learning rate')",
    "ends_at_once": "import os; os._exit(3)",
    "killed": "import os; os.kill(os.getpid(), 9)",
    "crashes": "import ctypes; ctypes.string_at(0)",
    "atexit_raises": "import atexit; atexit.register(lambda: 1 / 0)",
    "atexit_leaves": "import atexit, os; atexit.register(os._exit, 9)",
    "recursion": "def f(): f()\nf()",
    "missing_part": "import there_is_no_such_module",
    "bad_syntax": "def f(:",
    "slow": "import select; select.select([], [], [], 1.5)",
    # Modules that start processes or threads.
    "forks": "import os; os.fork() or os._exit(0); os.wait()",
    "forks_and_continues": "import os; pid = os.fork()\nif pid == 0: os._exit(0)\nos.waitpid(pid, 0)",
    "thread": "import threading; threading.Thread(target=threading.Event().wait, daemon=True).start()",
    "child": "import subprocess; subprocess.Popen(['sleep', '5'])",
    "fork_handler_raises": "import os; os.register_at_fork(after_in_child=lambda: 1 / 0)",
    "fork_handler_leaves": "import os; os.register_at_fork(after_in_child=lambda: os._exit(0))",
    "fork_handler_kills": "import os; os.register_at_fork(before=lambda: os.kill(os.getpid(), 9))",
    "fork_handler_ends": "import os; os.register_at_fork(before=lambda: os._exit(0))",
    "fork_handler_raises_in_parent": "import os; os.register_at_fork(before=lambda: 1 / 0)",
    "no_forks": "import sys; sys.addaudithook(lambda name, _: name == 'os.fork' and 1 / 0)",
    "patched_fork": "import os; os.fork = lambda: 1 / 0",
    "patched_processes": "import subprocess; subprocess.Popen = subprocess.run = None",
    "patched_exec": "import os; os.execv = os.execve = os.execvp = None",
    "session": "import contextlib, os\nwith contextlib.suppress(OSError): os.setsid()",
    # Modules that change the state of the process.
    "handler": "import signal; signal.signal(signal.SIGTERM, lambda *_: None)",
    "ignores_children": "import signal; signal.signal(signal.SIGCHLD, signal.SIG_IGN)",
    "handles_children": "import signal; signal.signal(signal.SIGCHLD, lambda *_: print('child'))",
    "ignores_everything": (
        "import contextlib, signal\nfor each in signal.valid_signals() - {9, 19, 32, 33}:\n"
        "    with contextlib.suppress(OSError): signal.signal(each, signal.SIG_IGN)"
    ),
    "blocks_everything": "import signal; signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())",
    "alarm": "import signal; signal.signal(signal.SIGALRM, lambda *_: None); signal.alarm(100)",
    "folder": "import os; os.chdir('/')",
    "mask": "import os; os.umask(0o77)",
    "few_files": "import resource; resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))",
    "no_core": "import resource; resource.setrlimit(resource.RLIMIT_CORE, (0, 0))",
    "small_files": "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))",
    "closes_files": "import os; os.closerange(3, 256)",
    "one_cpu": "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})",
    "listens": "import socket; kept = socket.create_server(('127.0.0.1', 0))",
    "event_loop": "import asyncio; loop = asyncio.new_event_loop(); asyncio.set_event_loop(loop)",
    "temporary": "import tempfile; kept = tempfile.TemporaryFile()",
    # Modules that change the state of the interpreter.
    "hook": "import sys; sys.excepthook = lambda *_: None",
    "unraisable": "import sys; sys.unraisablehook = None",
    "environment": "import os; os.environ['ADDED'] = 'x'; os.environ.pop('HOME', None)",
    "other_environment": "import os; os.environ = dict(os.environ)",
    "no_environment": "import os; os.environ.clear()",
    "importer": (
        "import sys\nclass Finder:\n    def find_spec(self, *_): return None\n"
        "sys.meta_path.insert(0, Finder())"
    ),
    "broken_importer": (
        "import sys\nclass Finder:\n    def find_spec(self, name, *_):\n"
        "        if name == 'colorsys': raise ImportError('no')\nsys.meta_path.insert(0, Finder())"
    ),
    "first_folder": "import os, sys; sys.path.insert(0, os.path.join(os.path.dirname(__file__), 'first'))",
    "no_folders": "import sys; sys.path.clear()",
    "patched_open": "import builtins; real = open; builtins.open = lambda *a, **k: real(*a, **k)",
    "broken_open": "import builtins; builtins.open = None",
    "patched_print": "import builtins; real = print; builtins.print = lambda *a: real('patched', *a)",
    "broken_print": "import builtins; builtins.print = None",
    "patched_import": "import builtins as b; real = __import__; b.__import__ = lambda *a, **k: real(*a, **k)",
    "patched_time": "import time; time.time = time.monotonic = lambda: 0.0",
    "no_time_zone": "import time; time.tzset = None",
    "patched_json": "import json; json.dumps = json.loads = None",
    "patched_pid": "import os; os.getpid = lambda: 1",
    "patched_seed": "import random; random.seed = None",
    "strict_warnings": "import warnings; warnings.simplefilter('error')",
    "traced": "import sys; sys.settrace(lambda *_: None)",
    "failing_trace": "import sys\ndef trace(*_): raise ValueError('traced')\nsys.setprofile(trace)",
    "shallow": "import sys; sys.setrecursionlimit(60)",
    "no_collector": "import gc; gc.disable(); gc.freeze()",
    "collector": "import gc; gc.set_threshold(1, 1, 1); gc.unfreeze()",
    "start_method": "import multiprocessing; multiprocessing.set_start_method('spawn')",
    "logging": "import logging as l; l.basicConfig(level=0, format='%(message)s'); l.info('at import')",
    "held_lock": "import threading; lock = threading.Lock(); lock.acquire()",
    "seeds": "import random; random.seed(7)",
    "library": "import ctypes; kept = ctypes.CDLL('libm.so.6')",
    "locale": "import locale; locale.setlocale(locale.LC_ALL, 'C')",
    "faults": "import faulthandler; faulthandler.disable()",
    "other_main": "import sys; sys.modules['__main__'].added = 7",
    "no_modules": "import sys; sys.modules.pop('os', None); sys.modules.pop('json', None)",
    "arguments": "import sys; sys.argv[:] = ['other', 'arguments']",
    "executable": "import sys; sys.executable = '/no/such/python'",
}
"""Source code of each module, by name."""

SCRIPT = """
import misbehaves
import gc, os, random, resource, signal, sys, threading
here = __file__
print("printed", 7)
if sys.stderr is not None:
    sys.stderr.write("told\\n")
import first_or_own
def say(*values):
    os.write(1, (" ".join(map(str, values)) + "\\n").encode())
if hasattr(sys.stdout, "flush"):
    sys.stdout.flush()
say("folder", os.getcwd(), "arguments", sys.argv, "added", globals().get("added"))
say("path", [entry for entry in sys.path[:3]], "from", first_or_own.__file__)
say("handlers", [str(signal.getsignal(each)).partition(" at ")[0] for each in (2, 10, 14, 15, 17)])
say("blocked", sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))))
say("limits", [resource.getrlimit(each) for each in (resource.RLIMIT_NOFILE, resource.RLIMIT_FSIZE)])
mask = os.umask(0)
os.umask(mask)
say("mask", mask, "CPUs", len(os.sched_getaffinity(0)), "collector", gc.isenabled(), gc.get_threshold())
say("variables", [os.environ.get(name) for name in ("ADDED", "HOME", "LANG", "RANK", "WORLD_SIZE")])
say("threads", threading.active_count(), len(os.listdir("/proc/self/task")))
say("number", random.random() if "seeds" in sys.argv else None, "leads", os.getpgid(0) == os.getpid())
sys.exit(int(os.environ.get("RANK", 0)) * 5)
"""


def told(outcome):
    """Return the exit code and the workers' output of a job, without the launcher's own lines about
    preloading, and without details that differ in every run.
    """
    streams = {
        f"{rank.replace('_cold', '')} {name}": "".join(
            line for line in text.splitlines(keepends=True) if not line.startswith("elasticrs: warm")
        )
        for rank, worker in outcome.workers.items()
        for name, text in (("stdout", worker.stdout), ("stderr", worker.stderr))
    }
    return flat({"code": outcome.code, "ends": outcome.ends, **streams})


@pytest.mark.parametrize("name", MODULES)
def test_a_preloaded_module_has_the_same_effects_as_one_that_is_not(launch, tmp_path, name):
    library = tmp_path / "library"
    (library / "first").mkdir(parents=True)
    (library / "misbehaves.py").write_text(MODULES[name])
    (library / "first" / "first_or_own.py").write_text("")
    (library / "first_or_own.py").write_text("")
    script = tmp_path / "script" / "train.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    (script.parent / "first_or_own.py").write_text("")
    job = Job(launch, tmp_path, "misbehaves")
    cold, warm = (
        job.run(
            *(("--warm-timeout=1", script) if is_warm else (script,)),
            warm=is_warm,
            env={"PYTHONPATH": str(library)},
        )
        for is_warm in (False, True)
    )
    assert told(warm) == told(cold), warm.stderr
