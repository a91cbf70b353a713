"""Writes everything that a script can see of its process and interpreter to ``FOLDER/<attempt>.<rank>.json``.

Usage: ``facts.py FOLDER MODULES [PART ...]``. MODULES (with commas) are imported after the first look, as a
script imports them at its top. What differs from run to run (pids, inodes) is replaced by words.
"""

import sys

FIRST = {
    "modules": sorted(sys.modules),
    "path_importer_cache": sorted(map(str, sys.path_importer_cache)),
    "main": sorted(set(globals()) - {"FIRST"}),
}

import os  # noqa: E402

FIRST["os.environ"] = {os.fsdecode(name): os.fsdecode(value) for name, value in os.environb.items()}
FIRST["descriptors"] = sorted(map(int, os.listdir("/proc/self/fd")))
FIRST["threads"] = len(os.listdir("/proc/self/task"))

import atexit  # noqa: E402
import gc  # noqa: E402
import importlib  # noqa: E402
import resource  # noqa: E402

FIRST["children"] = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
FIRST["gc"] = [gc.isenabled(), gc.get_threshold(), gc.get_debug(), len(gc.callbacks), len(gc.garbage)]

# Functions and children of `spawn` and `forkserver` also import this file. They have no modules as arguments.
MODULES = sys.argv[2].split(",") if __name__ == "__main__" else []
for name in MODULES:
    importlib.import_module(name)

import ctypes  # noqa: E402
import errno  # noqa: E402
import fcntl  # noqa: E402
import json  # noqa: E402
import signal  # noqa: E402
import stat  # noqa: E402
import threading  # noqa: E402

LIBC = ctypes.CDLL(None, use_errno=True)
PARTS = {}


def part(function):
    PARTS[function.__name__] = function
    return function


def name_of(thing):
    return f"{getattr(thing, '__module__', '')}.{getattr(thing, '__qualname__', type(thing).__qualname__)}"


def read(path):
    with open(path, "rb") as file:
        return file.read().decode(errors="surrogateescape")


def status(path="/proc/self/status"):
    return {line.partition(":")[0]: line.partition(":")[2].strip() for line in read(path).splitlines()}


@part
def interpreter():
    names = "argv orig_argv path flags warnoptions _xoptions executable _base_executable prefix base_prefix"
    names += " exec_prefix base_exec_prefix pycache_prefix dont_write_bytecode platlibdir byteorder"
    facts = {name: getattr(sys, name) for name in names.split()}
    facts["flags"] = repr(sys.flags)
    facts["_xoptions"] = repr(sys._xoptions)
    calls = (
        "getrecursionlimit getswitchinterval getfilesystemencoding getfilesystemencodeerrors getdlopenflags"
    )
    calls += " gettrace getprofile get_int_max_str_digits getdefaultencoding"
    for call in calls.split():
        facts[call] = getattr(sys, call)()
    for hook in ("excepthook", "unraisablehook", "displayhook", "breakpointhook"):
        facts[hook] = name_of(getattr(sys, hook))
    facts["meta_path"] = [name_of(each) for each in sys.meta_path]
    facts["path_hooks"] = [name_of(each) for each in sys.path_hooks]
    facts["last"] = [name for name in ("last_type", "last_value", "last_traceback") if hasattr(sys, name)]
    facts["names of sys"] = sorted(set(dir(sys)))
    facts["sitecustomize"] = [name in sys.modules for name in ("sitecustomize", "usercustomize", "site")]
    facts["builtins"] = sorted(vars(sys.modules["builtins"]))
    facts["depth"] = depth()
    import warnings

    facts["filters"] = [repr(entry) for entry in warnings.filters]
    import locale

    facts["locale"] = locale.setlocale(locale.LC_ALL)
    import time

    facts["timezone"] = [time.tzname, time.timezone]
    facts["our own modules"] = sorted(name for name in sys.modules if name.startswith("elasticrs"))
    return facts


def depth():
    frame, names = sys._getframe(), []
    while frame is not None:
        names.append(f"{frame.f_code.co_filename}:{frame.f_code.co_name}")
        frame = frame.f_back
    return names


@part
def imported():
    facts = {}
    for name in MODULES:
        module, spec = sys.modules[name], sys.modules[name].__spec__
        facts[name] = [
            module.__name__,
            module.__package__,
            getattr(module, "__file__", None),
            name_of(module),
        ]
        facts[name] += [spec.name, spec.origin, spec.cached, spec.parent, type(spec.loader).__name__]
        facts[name] += [getattr(module, "__cached__", None)]
    return facts


@part
def main():
    module = sys.modules["__main__"]
    names = ("__name__", "__file__", "__package__", "__cached__")
    facts = {name: getattr(module, name, "none") for name in names}
    facts["spec"] = repr(module.__spec__).partition("loader=")[0]
    facts["loader"] = name_of(type(module.__loader__))
    facts["builtins"] = repr(type(module.__builtins__))
    facts["is ours"] = vars(module) is globals()
    facts["doc"] = module.__doc__
    return facts


class Pickled:
    def __init__(self, value):
        self.value = value


@part
def source():
    import inspect
    import linecache
    import pickle

    copy = pickle.loads(pickle.dumps(Pickled(7)))
    facts = {"class": [copy.value, type(copy) is Pickled, pickle.dumps(Pickled).hex()]}
    facts["source"] = inspect.getsource(Pickled)
    facts["stack"] = [(each.filename, each.function, each.lineno) for each in inspect.stack()]
    facts["line"] = linecache.getline(__file__, 1)
    facts["module"] = repr(inspect.getmodule(Pickled))
    return facts


@part
def process():
    pid = os.getpid()
    facts = {"cwd": os.getcwd(), "PWD": os.environ.get("PWD"), "root": os.readlink("/proc/self/root")}
    old = os.umask(0)
    os.umask(old)
    facts["umask"] = oct(old)
    facts["limits"] = {
        name: [token_or(value) for value in resource.getrlimit(getattr(resource, name))]
        for name in dir(resource)
        if name.startswith("RLIMIT_")
    }
    facts["limit of RTTIME"] = [token_or(int(each)) for each in rttime()]
    facts["leads"] = [os.getsid(0) == pid, os.getpgid(0) == pid, os.tcgetpgrp(0) if os.isatty(0) else None]
    facts["parent"] = read(f"/proc/{os.getppid()}/comm")
    facts["comm"], facts["cmdline"] = read("/proc/self/comm"), read("/proc/self/cmdline").split("\0")
    facts["thread name"] = read(f"/proc/self/task/{pid}/comm")
    facts["exe"] = os.readlink("/proc/self/exe")
    facts["nice"] = os.getpriority(os.PRIO_PROCESS, 0)
    facts["scheduler"] = [os.sched_getscheduler(0), os.sched_getparam(0).sched_priority]
    facts["affinity"] = sorted(os.sched_getaffinity(0))
    fields = (
        "Umask Uid Gid Groups NStgid NSpid NSpgid NSsid Threads SigPnd ShdPnd SigBlk SigIgn SigCgt CapInh"
    )
    fields += (
        " CapPrm CapEff CapBnd CapAmb NoNewPrivs Seccomp CoreDumping THP_enabled Cpus_allowed Mems_allowed"
    )
    fields += " VmLck Speculation_Store_Bypass TracerPid"
    shown = status()
    facts["status"] = {
        name: "PID" if value.split() and value.split()[-1] == str(pid) else value
        for name in fields.split()
        if (value := shown.get(name)) is not None
    }
    files = "oom_score_adj coredump_filter personality timerslack_ns cgroup loginuid timers"
    for name in files.split():
        try:
            facts[name] = read(f"/proc/self/{name}")
        except OSError as error:
            facts[name] = errno.errorcode[error.errno or 0]
    for name, option in {"pdeathsig": 2, "dumpable": 3, "keepcaps": 7, "subreaper": 37, "thp": 42}.items():
        facts[f"prctl {name}"] = prctl(option)
    values = read("/proc/self/stat").rpartition(")")[2].split()
    names = {4: "tty", 5: "tpgid", 15: "priority", 16: "nice", 17: "threads", 35: "exit signal", 38: "policy"}
    facts["stat"] = {name: values[number] for number, name in names.items()}
    facts["children"] = children(pid)
    facts["itimers"] = [signal.getitimer(which) for which in range(3)]
    facts["mapped stack and heap"] = [name in read("/proc/self/maps") for name in ("[stack]", "[heap]")]
    facts["mapped extension"] = "elasticrs" in read("/proc/self/maps")
    return facts


def children(pid):
    return len(read(f"/proc/self/task/{pid}/children").split())


def token_or(value):
    return "TOKEN" if value > 1 << 61 and value != resource.RLIM_INFINITY else value


def rttime():
    values = (ctypes.c_ulong * 2)()
    LIBC.getrlimit(15, values)
    return [min(value, (1 << 64) - 1) for value in values]


def prctl(option):
    value = ctypes.c_int(-1)
    result = (
        LIBC.prctl(option, ctypes.byref(value), 0, 0, 0)
        if option in {2, 37}
        else LIBC.prctl(option, 0, 0, 0, 0)
    )
    return [result, value.value if option in {2, 37} else None]


@part
def signals():
    facts = {}
    for number in sorted(signal.valid_signals()):
        handler = signal.getsignal(number)
        facts[str(int(number))] = name_of(handler) if callable(handler) else repr(handler)
    facts["blocked"] = sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ())))
    facts["pending"] = sorted(map(int, signal.sigpending()))
    facts["wakeup"] = signal.set_wakeup_fd(-1)
    facts["alternate stack"] = alternate_stack()
    return facts


def alternate_stack():
    values = (ctypes.c_ulong * 3)()
    LIBC.sigaltstack(None, values)
    return [values[1] & 0xFFFFFFFF, values[2] > 0]


@part
def descriptors():
    facts = {}
    for fd in sorted(map(int, os.listdir("/proc/self/fd"))):
        try:
            kind = os.fstat(fd)
        except OSError:
            continue  # the descriptor that `os.listdir` had open
        target = os.readlink(f"/proc/self/fd/{fd}").partition(":[")[0]
        facts[str(fd)] = {
            "target": target,
            "kind": stat.filemode(kind.st_mode),
            "status": oct(fcntl.fcntl(fd, fcntl.F_GETFL)),
            "cloexec": fcntl.fcntl(fd, fcntl.F_GETFD),
            "tty": os.isatty(fd),
        }
    return facts


@part
def environment():
    LIBC.getenv.restype = ctypes.c_char_p
    shown = {os.fsdecode(name): os.fsdecode(value) for name, value in os.environb.items()}
    native = {name: LIBC.getenv(os.fsencode(name)) for name in shown}
    strings = ctypes.POINTER(ctypes.c_char_p).in_dll(LIBC, "environ")
    listed, index = [], 0
    while strings[index] is not None:
        listed.append(os.fsdecode(strings[index]))
        index += 1
    began = [entry for entry in read("/proc/self/environ").split("\0") if entry]
    missing = {name: LIBC.getenv(name.encode()) for name in ("PYTHONPATH", "PYTHONHOME", "NOT_THERE")}
    facts = {"python": shown, "order": [name for name in shown if not name.startswith("_")]}
    facts["getenv"] = {
        name: os.fsdecode(value) if value is not None else None for name, value in native.items()
    }
    facts["getenv of others"] = {name: value and value.decode() for name, value in missing.items()}
    facts["listed by C"] = sorted(listed)
    facts["/proc"] = sorted(began)
    os.environ["SET_LATE"] = "1"
    facts["set late"] = str(LIBC.getenv(b"SET_LATE"))
    del os.environ["SET_LATE"]
    facts["os.path.expanduser"] = os.path.expanduser("~")
    return facts


@part
def threads():
    current, main_thread = threading.current_thread(), threading.main_thread()
    facts = {"all": [repr(type(each)) + each.name for each in threading.enumerate()]}
    facts["main"] = [current is main_thread, main_thread.ident == threading.get_ident()]
    facts["native"] = [main_thread.native_id == os.getpid(), threading.get_native_id() == os.getpid()]
    facts["alive"] = [main_thread.is_alive(), main_thread.daemon, threading.active_count()]
    facts["size"] = threading.stack_size()
    facts["excepthook"] = name_of(threading.excepthook)
    seen = []
    thread = threading.Thread(target=lambda: seen.append([threading.current_thread().name, depth()[-1]]))
    thread.start()
    thread.join()
    facts["another"] = seen
    return facts


@part
def faults():
    import faulthandler

    return {"enabled": faulthandler.is_enabled(), "registered": faulthandler.unregister(signal.SIGRTMIN + 12)}


@part
def streams():
    facts = {}
    for name in ("stdin", "stdout", "stderr"):
        stream = getattr(sys, name)
        fact = {"original": stream is getattr(sys, f"__{name}__"), "type": name_of(type(stream))}
        if stream is not None:
            attributes = "name mode encoding errors line_buffering write_through newlines closed"
            for attribute in attributes.split():
                fact[attribute] = getattr(stream, attribute)
            calls = (stream.fileno, stream.seekable, stream.isatty, stream.readable, stream.writable)
            fact["calls"] = [call() for call in calls]
            raw = getattr(stream.buffer, "raw", stream.buffer)
            fact["layers"] = [name_of(type(stream.buffer)), name_of(type(raw))]
            fact["raw"] = [raw.closefd, raw.mode, str(raw.name)]
            fact["repr"] = repr(stream)
        facts[name] = fact
    return facts


@part
def state():
    """Return the per-process state that modules of the standard library keep."""
    import logging
    import multiprocessing
    import tempfile
    import uuid
    from multiprocessing import process, resource_tracker, util

    now = multiprocessing.current_process()
    facts = {"mp": [now.name, now.ident == os.getpid(), now.daemon, multiprocessing.parent_process()]}
    facts["mp ids"] = [repr(now._identity), len(now.authkey), now._parent_pid, process._children == set()]
    facts["mp start"] = multiprocessing.get_start_method(allow_none=True)
    facts["mp tracker"] = resource_tracker._resource_tracker._pid
    facts["mp finalizers"] = [name_of(each) for each in util._finalizer_registry.values()]
    facts["mp registry"] = len(util._afterfork_registry)
    facts["temporary"] = [tempfile.tempdir, tempfile.gettempdir(), os.path.exists(tempfile.gettempdir())]
    root = logging.getLogger()
    facts["logging"] = [root.level, [name_of(type(each)) for each in root.handlers], logging.raiseExceptions]
    ticks = float(read("/proc/self/stat").rpartition(")")[2].split()[19]) / os.sysconf("SC_CLK_TCK")
    import time

    started = time.time() - (time.clock_gettime(time.CLOCK_BOOTTIME) - ticks)
    began = logging._startTime / (1e9 if isinstance(logging._startTime, int) else 1)
    facts["logging began with the process"] = began > started - 0.05
    facts["uuid"] = [len(str(uuid.uuid4())), uuid.uuid1().node]
    # In a warm worker, one of the callbacks is `gc.unfreeze`. Do not count it.
    facts["atexit"] = atexit._ncallbacks() - (gc.get_freeze_count() > 0)
    facts["gc frozen"] = gc.get_freeze_count()
    import decimal
    import socket

    facts["others"] = [socket.getdefaulttimeout(), repr(decimal.getcontext()), os.get_exec_path()]
    return facts


CHILD = """
import json, os, sys
facts = {"path": sys.path, "argv": sys.argv, "flags": sys.flags[:], "modules": sorted(sys.modules)}
print(json.dumps(facts | {"environment": dict(os.environ)}))
"""


@part
def programs():
    """Return what programs started by the worker see, including Python programs."""
    import subprocess

    done = subprocess.run(
        [sys.executable, "-c", CHILD, "argument"], capture_output=True, text=True, check=True
    )
    facts = {"python": json.loads(done.stdout), "said": done.stderr}
    shell = "ulimit -a | grep -v -i real-time; umask; env | sort; ls -l /proc/self/fd | wc -l"
    facts["shell"] = subprocess.run(["sh", "-c", shell], capture_output=True, text=True, check=True).stdout
    facts["status"] = subprocess.run(
        ["grep", "-E", "^Sig(Blk|Ign|Cgt)", "/proc/self/status"], capture_output=True, text=True, check=True
    ).stdout
    facts["refused"] = refusal(["/does/not/exist"])
    return facts


def refusal(command):
    import subprocess

    try:
        subprocess.run(command, check=True)
    except OSError as error:
        return str(error)
    return None


def in_child(number):
    import multiprocessing

    now, parent = multiprocessing.current_process(), multiprocessing.parent_process()
    facts = [number + 1, now.name, parent.name, parent.pid == os.getppid() or "not its parent"]
    facts += [sys.argv, sys.path, sys.orig_argv[1:2]]
    facts += [sorted(name for name in sys.modules if "elasticrs" in name)]
    facts += [
        sys.modules["__main__"].__name__,
        "__mp_main__" in sys.modules,
        os.environ["RANK"],
        len(depth()),
    ]
    return facts


@part
def multiprocesses():
    import concurrent.futures
    import multiprocessing

    facts = {}
    for method in ("fork", "spawn", "forkserver"):
        context = multiprocessing.get_context(method)
        with concurrent.futures.ProcessPoolExecutor(1, context) as pool:
            facts[method] = pool.submit(in_child, 1).result()
        queue = context.Queue()
        process = context.Process(target=queue.put, args=(Pickled(3),))
        process.start()
        facts[f"{method} queue"] = queue.get().value
        process.join()
        facts[f"{method} exit"] = process.exitcode
        queue.close()
        queue.join_thread()
    with multiprocessing.Pool(1) as pool:
        facts["pool"] = pool.map(in_child, [2])
        pool.close()
        pool.join()
    return facts


@part
def logs():
    import io
    import logging

    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    handler.setFormatter(logging.Formatter("%(name)s %(processName)s %(threadName)s %(module)s %(message)s"))
    logger = logging.getLogger("facts")
    logger.addHandler(handler)
    logger.warning("said")
    record = logger.makeRecord("facts", logging.INFO, "", 0, "", (), None)
    is_mine, is_new = record.process == os.getpid(), record.relativeCreated < 30_000
    return {"said": stream.getvalue(), "pid": is_mine, "age": is_new}


@part
def torch():
    import torch

    facts = {"threads": [torch.get_num_threads(), torch.get_num_interop_threads()]}
    facts["configuration"] = torch.__config__.parallel_info()
    facts["cuda"] = [torch.cuda.is_available(), torch.cuda.is_initialized()]
    defaults = torch.get_default_dtype(), torch.get_default_device(), torch.is_grad_enabled()
    facts["defaults"] = list(map(str, defaults))
    facts["debug level"] = str(torch.distributed.get_debug_level())
    torch.manual_seed(3)
    facts["seeded"] = torch.rand(4).tolist()
    facts["product"] = (torch.ones(300, 300) @ torch.ones(300, 300)).sum().item()
    value = torch.ones(3, requires_grad=True)
    (value * value).sum().backward()
    facts["gradient"] = value.grad.tolist()
    import numpy

    facts["numpy"] = [float(numpy.ones((200, 200)).dot(numpy.ones((200, 200))).sum()), repr(numpy.geterr())]
    return facts


@part
def seen_first():
    return FIRST


def main_program():
    facts = {}
    for name in sys.argv[3:] or [each for each in PARTS if each not in {"torch", "multiprocesses"}]:
        try:
            facts[name] = PARTS[name]()
        except BaseException as error:
            import traceback

            facts[name] = {"raised": repr(error), "where": traceback.format_exc()}
    where = f"{sys.argv[1]}/{os.environ['TORCHELASTIC_RESTART_COUNT']}.{os.environ['RANK']}.json"
    with open(where, "w", encoding="utf-8", errors="surrogateescape") as file:
        json.dump(facts, file, default=repr)


if __name__ == "__main__":
    main_program()
