"""Workers that exit without the teardown of their interpreter after an uncaught exception."""

import gzip
import multiprocessing
import sys

import pytest
from helpers.procs import interpreters
from worker_hook.test_hook import worker

__all__ = ["worker"]

TORN_DOWN = """
    import atexit, os, sys, threading

    class Holder:
        def __del__(self, write=os.write):
            write(1, b"torn down\\n")

    holder = Holder()
"""


def run(worker, source, **env):
    """Return the lines that a program prints, and its exit code."""
    done = worker.run(TORN_DOWN + source, **env)
    return done.stdout.splitlines(), done.returncode


@pytest.mark.parametrize("python", interpreters())
def test_a_failed_program_is_not_torn_down_but_everything_else_has_run(worker, python):
    source = """
    def late():
        threading.main_thread().join()
        print("thread")

    atexit.register(print, "callback")
    threading.Thread(target=late).start()
    try:
        raise ValueError
    finally:
        print("finally")
    """
    done = worker.run(TORN_DOWN + source, python=python)
    assert (done.stdout.splitlines(), done.returncode) == (["finally", "thread", "callback"], 1)
    assert done.stderr.endswith("ValueError\n")


@pytest.mark.parametrize(
    ("source", "env", "exitcode"),
    [
        ("    raise ValueError\n", {"ELASTICRS_FAST_EXIT": "0"}, 1),
        ("    raise ValueError\n", {"CUDA_INJECTION64_PATH": "/opt/nsys/libToolsInjection64.so"}, 1),
        ("    print('done')\n", {}, 0),
        ("    raise KeyboardInterrupt\n", {}, -2),
        ("    sys.excepthook(ValueError, ValueError(), None)\n", {}, 0),
        ("    sys.last_value = ValueError()\n", {}, 0),
        ("    t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()\n", {}, 0),
        ("    if os.fork() == 0: raise ValueError\n    os.wait()\n", {}, 0),
    ],
)
def test_other_ends_are_torn_down_as_usual(worker, source, env, exitcode):
    lines, code = run(worker, source, **env)
    assert ("torn down" in lines, code) == (True, exitcode)


CYCLE = """
    def f():
        try: sys.exit(3)
        except SystemExit as error: error.me = error
    f()
"""
EXITS = [
    ("    sys.exit(3)\n", 3, False),
    ("    sys.exit(-1)\n", 255, False),
    ("    sys.exit(2**70)\n", 255, False),
    ("    sys.exit('bad lr')\n", 1, False),
    ("    import argparse; argparse.ArgumentParser().error('x')\n", 2, False),
    ("    try: 1 / 0\n    except ZeroDivisionError: sys.exit(4)\n", 4, False),
    ("    atexit.register(print, 'callback')\n    sys.exit(3)\n", 3, False),
    # These programs succeed, or exit in a way that the hook cannot detect.
    ("    sys.exit()\n", 0, True),
    ("    sys.exit(0)\n", 0, True),
    ("    sys.exit(256)\n", 0, True),
    ("    raise SystemExit(3)\n", 3, True),
    ("    try: sys.exit(3)\n    except SystemExit: print()\n", 0, True),
    ("    try: sys.exit(3)\n    except SystemExit as error: kept = error\n", 0, True),
    ("    try: sys.exit(3)\n    except SystemExit as error: error.code = 0; raise\n", 0, True),
    (CYCLE, 0, True),
    ("    atexit.register(sys.exit, 3)\n", 0, True),
    ("    t = threading.Thread(target=sys.exit, args=(3,)); t.start(); t.join()\n", 0, True),
]


@pytest.mark.parametrize("python", interpreters())
def test_an_exit_with_a_code_is_not_torn_down(worker, python):
    for source, exitcode, is_torn_down in EXITS:
        plain, done = worker.both(TORN_DOWN + source, python=python)
        assert (done.returncode, plain.returncode) == (exitcode, exitcode), source
        assert ("torn down" in done.stdout) == is_torn_down, source
        assert done.stdout.replace("torn down\n", "") == plain.stdout.replace("torn down\n", ""), source
        # Compare only the last line, because the traceback also contains the wrapper's frame.
        assert done.stderr.splitlines()[-1:] == plain.stderr.splitlines()[-1:], source
        assert worker.error_file.exists() == ("bad lr" in source or "argparse" in source), source
        worker.error_file.unlink(missing_ok=True)


def test_the_code_of_a_caught_exit_is_equal_to_that_of_the_program(worker):
    source = """
    import json, pickle
    for status in (3, "text"):
        try:
            sys.exit(status)
        except SystemExit as error:
            assert error.code == status and isinstance(error.code, type(status))
            assert type(pickle.loads(pickle.dumps(error.code))) is type(status)
            assert error.args == (status,)
    """
    assert run(worker, source) == (["torn down"], 0)


def test_an_error_is_not_torn_down_although_the_script_replaces_sys_excepthook(worker):
    source = "    sys.excepthook = lambda *_: print('own hook')\n    raise ValueError\n"
    assert run(worker, source) == (["own hook"], 1)


def test_the_exit_code_is_that_of_a_failed_flush(worker):
    source = """
    print("lost")
    os.close(1)
    raise ValueError
    """
    plain, done = worker.both(TORN_DOWN + source)
    assert done.returncode == plain.returncode == 120


def test_data_in_open_files_is_written(worker):
    source = """
    import gzip, tempfile
    text = open("text", "w")
    text.write("text")
    binary = open("binary", "wb")
    binary.write(b"binary")
    packed = gzip.open("packed", "wt")
    packed.write("packed")
    temporary = tempfile.NamedTemporaryFile(dir=".", prefix="temporary")
    temporary.write(b"x")
    raise ValueError
    """
    assert run(worker, source) == ([], 1)
    folder = worker.directory
    assert [(folder / name).read_text() for name in ("text", "binary")] == ["text", "binary"]
    with gzip.open(folder / "packed", "rt") as file:
        assert file.read() == "packed"
    assert list(folder.glob("temporary*")) == []


def test_a_function_in_a_spawned_process_runs_its_callbacks_and_is_not_torn_down(worker):
    source = """
    import multiprocessing
    from elasticrs._engine.workers.functions.function_process import call_and_return

    def fail():
        atexit.register(print, "callback")
        threading.kept = Holder()
        raise ValueError

    if __name__ == "__main__":
        holder = None
        child = multiprocessing.get_context("spawn").Process(target=call_and_return, args=(fail, (), 1))
        child.start()
        child.join()
        print(child.exitcode)
    """
    assert "spawn" in multiprocessing.get_all_start_methods()
    done = worker.run(TORN_DOWN + source, python=sys.executable)
    lines = done.stdout.splitlines()
    assert lines[lines.index("callback") :] == ["callback", "1"]


LIBRARY = """
    import types, weakref

    def _del_library():
        os.write(1, b"unregistered\\n")

    sys.modules["torch.library"] = types.ModuleType("torch.library")
    sys.modules["torch.library"]._del_library = _del_library
    holder = None
    class Held: pass
    held = Held()
    for function, *arguments in [(_del_library,), (os.write, 1, b"finalized\\n"), (_del_library,)]:
        weakref.finalize(held, function, *arguments)
"""


@pytest.mark.parametrize(
    ("source", "env", "found"),
    [
        ("    raise ValueError\n", {}, ["finalized"]),
        ("    sys.exit(3)\n", {}, ["finalized"]),
        (
            "    raise ValueError\n",
            {"ELASTICRS_FAST_EXIT": "0"},
            ["finalized", "unregistered", "unregistered"],
        ),
        ("    pass\n", {}, ["finalized", "unregistered", "unregistered"]),
    ],
)
def test_finalizers_run_except_those_that_unregister_the_operators_of_torch(worker, source, env, found):
    lines, _ = run(worker, LIBRARY + source, **env)
    assert sorted(line for line in lines if line != "torn down") == found


def test_torch_unregisters_its_operators_by_finalizers_that_are_skipped(torch_programs):
    source = """
import weakref
from elasticrs._engine.inside.fast_exit import keep_operators

held = type("Held", (), {})()
own = weakref.finalize(held, print)
before = [each for each in weakref.finalize._registry if each.atexit]
keep_operators()
after = [each for each in weakref.finalize._registry if each.atexit]
assert after == [own] and len(before) > 1, (before, after)
"""
    done = torch_programs.run(source)
    assert done.returncode == 0, done.stderr
