"""Tests for the hook in the worker, in real interpreters: it records exceptions and changes nothing else."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from helpers.procs import HANG, interpreters, run_program

from elasticrs._engine.workers.plan import hook_environment

HOOK = str(Path(hook_environment({})["PYTHONPATH"]))


def reap_orphans(group: int) -> None:
    """Wait for processes that a program left in its process group. Helper processes of multiprocessing exit
    after the program.
    """
    try:
        while True:
            os.waitpid(-group, 0)
    except ChildProcessError:
        return


class Worker:
    """Runs Python programs as the agent runs workers."""

    def __init__(self, directory: Path) -> None:
        self.error_file = directory / "error.json"
        self.plain = {
            name: value
            for name, value in os.environ.items()
            if not name.startswith(("PYTHON", "TORCHELASTIC_", "ELASTICRS_"))
        }
        self.directory = directory

    def run(
        self, source: str, *flags: str, hooked: bool = True, python: str = sys.executable, **env: str
    ) -> subprocess.CompletedProcess[str]:
        program = self.directory / "program.py"
        program.write_text(textwrap.dedent(source), encoding="utf-8")
        return self.command([python, *flags, str(program)], hooked=hooked, **env)

    def both(
        self, source: str, *flags: str, **how: str
    ) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
        """Run a program without the hook, and then with it."""
        return self.run(source, *flags, hooked=False, **how), self.run(source, *flags, **how)

    def command(
        self, argv: list[str], *, hooked: bool = True, **env: str
    ) -> subprocess.CompletedProcess[str]:
        whole = {**self.plain, "TORCHELASTIC_ERROR_FILE": str(self.error_file), **env}
        with subprocess.Popen(
            argv,
            env=hook_environment(whole) if hooked else whole,
            cwd=self.directory,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            stdout, stderr = process.communicate(timeout=HANG)
        reap_orphans(process.pid)
        return subprocess.CompletedProcess(argv, process.returncode, stdout, stderr)

    def error(self) -> dict[str, object]:
        data = json.loads(self.error_file.read_text())
        assert isinstance(data, dict)
        return data

    def callstack(self) -> str:
        return str(self.error()["message"]["extraInfo"]["py_callstack"])  # type: ignore[index]


@pytest.fixture
def worker(tmp_path: Path) -> Worker:
    return Worker(tmp_path)


FAILING = """
    def train():
        raise ValueError("no such batch: \u00e4")

    train()
"""


# --- what it records ---

INNER_LAUNCHER = """
    import json, os, subprocess, sys, textwrap

    inner = '''
    import json, os
    with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
        json.dump({"message": "inner", "elasticrs": {"pid": os.getpid(), "written_by": "launcher"}}, file)
    raise SystemExit(1)
    '''
    def launch():
        subprocess.run([sys.executable, "-c", textwrap.dedent(inner)], check=True)

    if sys.argv[1] == "handled":
        try:
            launch()
        except subprocess.CalledProcessError:
            print("handled")
        raise KeyError("own")
    try:
        launch()
    except subprocess.CalledProcessError as error:
        raise RuntimeError("the launcher failed") from error
"""


@pytest.mark.parametrize(("kind", "is_kept"), [("handled", False), ("fatal", True)])
def test_the_failure_of_an_inner_launcher_is_recorded_only_if_it_ends_the_worker(worker, kind, is_kept):
    (worker.directory / "program.py").write_text(textwrap.dedent(INNER_LAUNCHER))
    worker.command([sys.executable, str(worker.directory / "program.py"), kind])
    assert (worker.error()["message"] == "inner") == is_kept
    if not is_kept:
        assert "KeyError: 'own'" in worker.callstack()


def test_leaving_the_debugger_is_recorded_as_not_retryable_with_the_interpreter(worker):
    worker.run("import bdb; raise bdb.BdbQuit")
    facts = worker.error()["elasticrs"]["failure"]
    assert (facts["exception"], facts["is_retryable"]) == ("bdb.BdbQuit", False)
    assert facts["python"] == sys.executable


@pytest.mark.parametrize("python", interpreters())
def test_an_uncaught_exception_is_recorded_and_printed_as_without_the_hook(worker, python):
    bare = worker.run(FAILING, hooked=False, python=python)
    assert not worker.error_file.exists()
    hooked = worker.run(FAILING, python=python)

    assert (hooked.stdout, hooked.stderr, hooked.returncode) == (bare.stdout, bare.stderr, bare.returncode)
    message = worker.error()["message"]
    assert isinstance(message, dict)
    assert message["message"] == "ValueError: no such batch: \u00e4"
    assert message["extraInfo"]["py_callstack"] == hooked.stderr
    assert all(isinstance(value, str) for value in message["extraInfo"].values())


def test_the_record_contains_time_pid_and_writer(worker):
    done = worker.run("import os, time; print(os.getpid(), time.monotonic_ns(), flush=True); 1 / 0")
    pid, before = map(int, done.stdout.split())
    ours = worker.error()["elasticrs"]
    assert isinstance(ours, dict)
    assert ours["pid"] == pid
    assert ours["monotonic_ns"] > before
    assert ours["written_by"] == "hook"


@pytest.mark.parametrize(
    ("source", "end"),
    [
        ("def f(:\n", "SyntaxError: invalid syntax"),
        ("import missing_module_of_nobody\n", "'missing_module_of_nobody'"),
        (
            "class Bad(Exception):\n def __str__(self): raise RuntimeError\nraise Bad",
            "<exception str() failed>",
        ),
        (
            "class PanicException(BaseException): pass\nraise PanicException('native')",
            "PanicException: native",
        ),
    ],
)
def test_unusual_errors_are_recorded(worker, source, end):
    assert worker.run(source).returncode == 1
    assert worker.callstack().rstrip().endswith(end)


@pytest.mark.parametrize(
    ("source", "exitcode"),
    [
        ("pass", 0),
        ("raise SystemExit(7)", 7),
        ("import os; os._exit(5)", 5),
        ("import signal, os; os.kill(os.getpid(), signal.SIGKILL)", -9),
        ("import signal, os; os.kill(os.getpid(), signal.SIGINT)", -2),
        ("import threading; t = threading.Thread(target=lambda: 1 / 0); t.start(); t.join()", 0),
        ("try:\n 1 / 0\nexcept Exception: print()", 0),
    ],
)
def test_other_exits_keep_their_exit_code_and_record_nothing(worker, source, exitcode):
    bare, hooked = worker.both(source)
    assert hooked.returncode == bare.returncode == exitcode
    assert hooked.stderr == bare.stderr
    assert not worker.error_file.exists()


def test_an_error_is_recorded_although_the_script_replaces_sys_excepthook(worker):
    done = worker.run("import sys; sys.excepthook = lambda *a: print('mine', file=sys.stderr); 1 / 0")
    assert done.stderr == "mine\n"
    assert "ZeroDivisionError" in worker.callstack()


def test_a_chained_excepthook_keeps_working(worker):
    source = """
        import sys
        before = sys.excepthook
        def mine(*args):
            print("mine", file=sys.stderr)
            before(*args)
        sys.excepthook = mine
        1 / 0
    """
    bare, hooked = worker.both(source)
    assert hooked.stderr == bare.stderr
    assert "ZeroDivisionError" in worker.callstack()


@pytest.mark.parametrize(("end", "kept"), [("3", "kept"), ("'text'", "kept"), ("0", ""), ("", "")])
def test_the_state_of_a_program_that_exits_with_an_error_is_kept(worker, end, kept):
    source = """
        import sys
        from elasticrs._engine.inside import keep
        keep.keep_own = lambda: print("kept")
        def leave(): sys.exit(END)
        leave()
    """
    assert worker.run(source.replace("END", end)).stdout.strip() == kept


def test_an_error_file_written_by_record_is_not_replaced(worker):
    by_record = json.dumps({"message": {"message": "m", "extraInfo": {"timestamp": "1"}}})
    worker.error_file.write_text(by_record)
    worker.run("1 / 0")
    assert worker.error_file.read_text() == by_record


def test_a_later_error_replaces_an_error_file_written_by_the_hook(worker):
    worker.run("1 / 0")
    worker.run("raise KeyError('later')")
    assert "KeyError: 'later'" in worker.callstack()


def test_an_unwritable_error_file_is_reported_before_the_traceback(worker):
    lost = worker.directory / "missing" / "error.json"
    done = worker.run("1 / 0", TORCHELASTIC_ERROR_FILE=str(lost))
    assert done.returncode == 1
    assert re.match(rf"elasticrs: .* {lost}: ", done.stderr)
    assert done.stderr.endswith("ZeroDivisionError: division by zero\n")


def test_no_partial_error_file_remains(worker):
    worker.run("1 / 0")
    assert sorted(path.name for path in worker.directory.iterdir()) == [
        "error.json",
        "error.json.fault",
        "program.py",
    ]


# --- what the hook leaves unchanged ---

STATE = """
    import sys, os, json
    print(repr({
        "path": sys.path, "argv": sys.argv, "orig_argv": getattr(sys, "orig_argv", None),
        "flags": str(sys.flags), "environ": dict(os.environ), "cached": sorted(sys.path_importer_cache),
        "main": sorted(vars(sys.modules["__main__"])), "modules": sorted(sys.modules),
    }))
"""
OURS = ["atexit", "faulthandler"]
"""Built into the interpreter: a name in `sys.modules`, not a file read."""


@pytest.mark.parametrize("python", interpreters())
@pytest.mark.parametrize("pythonpath", [None, "", "/nonexistent/a", ":/nonexistent/a::/nonexistent/b:"])
def test_the_hook_does_not_change_the_state_of_the_interpreter(worker, python, pythonpath):
    env = {} if pythonpath is None else {"PYTHONPATH": pythonpath}
    states = []
    for done in worker.both(STATE, "-X", "utf8", python=python, **env):
        assert done.stderr == ""
        state = ast.literal_eval(done.stdout)
        state["modules"] = [name for name in state["modules"] if name not in OURS]
        states.append(state)
    assert states[1] == states[0]
    assert states[1]["environ"].get("PYTHONPATH") == pythonpath


FINDERS = "import sys; print(*(type(finder).__name__ for finder in sys.meta_path))"
WATCHED = {"ELASTICRS_HEARTBEAT": "9:9:9"}
KEPT = {"ELASTICRS_KEEP_FRAMEWORKS": "1"}


@pytest.mark.parametrize("python", interpreters())
def test_an_import_finder_is_installed_only_for_heartbeats_and_kept_frameworks(worker, python):
    bare = worker.run(FINDERS, hooked=False, python=python).stdout
    assert worker.run(FINDERS, python=python).stdout == bare
    for variables in (WATCHED, KEPT, {**WATCHED, **KEPT}):
        assert worker.run(FINDERS, python=python, **variables).stdout == f"_Imports {bare}"  # HOOK-5


@pytest.fixture
def optimizers(worker):
    """Create a package in place of torch's optimizers, and return the path of its source file."""
    package = worker.directory / "torch" / "optim"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").touch()
    return package / "optimizer.py"


@pytest.mark.parametrize("automatic", ["0", "1"])
def test_the_flight_record_thread_starts_even_without_automatic_heartbeats(worker, optimizers, automatic):
    optimizers.write_text("register_optimizer_step_post_hook = lambda hook: print('HOOK')")
    source = "import os, torch.optim.optimizer; print(*os.listdir())"
    done = worker.run(source, **WATCHED, ELASTICRS_AUTO_HEARTBEAT=automatic)
    assert "error.json.flight_requests" in done.stdout
    assert ("HOOK" in done.stdout) == (automatic == "1")


@pytest.mark.parametrize("python", interpreters())
def test_the_import_finder_removes_itself_even_if_elasticrs_is_missing(worker, optimizers, python):
    optimizers.write_text("print(__spec__.loader.name, 'exec_module' in vars(__loader__))")
    source = f"import sys; sys.modules['elasticrs'] = None; import torch.optim.optimizer; {FINDERS}"
    bare, hooked = worker.both(source, python=python, **WATCHED)
    assert bare.stderr == hooked.stderr == ""
    assert bare.stdout == hooked.stdout


@pytest.mark.parametrize("how", ["-m", "-c", "stdin"])
def test_errors_are_recorded_for_every_way_of_starting_python(worker, how):
    (worker.directory / "module.py").write_text("raise KeyError('here')")
    argv = {"-m": ["-m", "module"], "-c": ["-c", "raise KeyError('here')"], "stdin": ["-"]}[how]
    whole = hook_environment({**worker.plain, "TORCHELASTIC_ERROR_FILE": str(worker.error_file)})
    done = run_program(
        [sys.executable, *argv], env=whole, cwd=worker.directory, input="raise KeyError('here')"
    )
    assert done.returncode == 1
    assert worker.callstack() == done.stderr


def sitecustomize(worker: Worker, source: str) -> str:
    """Write a user's `sitecustomize` module, and return its directory for PYTHONPATH."""
    directory = worker.directory / "site"
    directory.mkdir()
    (directory / "sitecustomize.py").write_text(textwrap.dedent(source))
    return str(directory)


@pytest.mark.parametrize("python", interpreters())
def test_the_users_sitecustomize_runs_with_its_own_name_and_path(worker, python):
    path = sitecustomize(worker, "import os\nprint('site', __name__, __file__, os.environ.get('PYTHONPATH'))")
    source = "import sitecustomize; print(sitecustomize.__file__, sitecustomize.__spec__.name)"
    bare, hooked = worker.both(source, python=python, PYTHONPATH=path)
    assert bare.stdout.count("sitecustomize.py") == 2
    assert (hooked.stdout, hooked.stderr) == (bare.stdout, bare.stderr)


@pytest.mark.parametrize(
    "source", ["1 / 0", "import missing_module_of_nobody", "def f(:", "import os; os._exit(4)"]
)
def test_errors_in_the_users_sitecustomize_behave_as_without_the_hook(worker, source):
    path = sitecustomize(worker, source)
    bare, hooked = worker.both("print('main')", PYTHONPATH=path)
    assert (hooked.stdout, hooked.stderr, hooked.returncode) == (bare.stdout, bare.stderr, bare.returncode)


def test_system_exit_in_sitecustomize_only_adds_lines_to_the_traceback(worker):
    path = sitecustomize(worker, "raise SystemExit(3)")
    bare, hooked = worker.both("print('main')", PYTHONPATH=path)
    assert (hooked.stdout, hooked.returncode) == (bare.stdout, bare.returncode)
    assert set(bare.stderr.splitlines()) < set(hooked.stderr.splitlines())


def test_a_failed_sitecustomize_with_python_v_is_not_recorded_as_an_error(worker):
    path = sitecustomize(worker, "1 / 0")
    assert worker.run("print('main')", "-v", PYTHONPATH=path).returncode == 0
    assert not worker.error_file.exists()


def test_the_excepthook_of_the_users_sitecustomize_still_prints(worker):
    path = sitecustomize(
        worker, "import sys\nsys.excepthook = lambda *args: print('theirs', file=sys.stderr)"
    )
    assert worker.run("1 / 0", PYTHONPATH=path).stderr == "theirs\n"
    assert "ZeroDivisionError" in worker.callstack()


@pytest.mark.parametrize("flag", ["-I", "-E", "-S"])
def test_an_isolated_interpreter_works_without_a_record(worker, flag):
    bare, hooked = worker.both(FAILING, flag)
    assert (hooked.stderr, hooked.returncode) == (bare.stderr, 1)
    assert not worker.error_file.exists()


def test_a_non_python_program_sees_one_additional_pythonpath_entry(worker):
    done = worker.command(["/bin/sh", "-c", "echo $PYTHONPATH; exit 3"], PYTHONPATH="/a")
    assert (done.stdout, done.returncode) == (f"{HOOK}:/a\n", 3)


def test_an_error_of_a_python_program_run_by_a_shell_is_recorded(worker):
    done = worker.command(["/bin/sh", "-c", f"{sys.executable} -c '1 / 0'; exit 9"])
    assert done.returncode == 9
    assert "ZeroDivisionError" in worker.callstack()


def test_the_hook_is_not_installed_without_an_error_file(worker):
    source = "import sys; print(sys.excepthook is sys.__excepthook__, sys.path)"
    done = worker.run(source, TORCHELASTIC_ERROR_FILE="")
    assert done.stdout.startswith("True")
    assert HOOK not in done.stdout


def test_elasticrs_tracebacks_0_disables_the_hook(worker):
    env = {"ELASTICRS_TRACEBACKS": "0", "A": "b"}
    assert hook_environment(env) == env
    worker.run("1 / 0", ELASTICRS_TRACEBACKS="0")
    assert not worker.error_file.exists()


def test_hook_environment_does_not_change_the_given_environment():
    env = {"PYTHONPATH": "/a"}
    assert hook_environment(env) == {"PYTHONPATH": f"{HOOK}:/a"}
    assert env == {"PYTHONPATH": "/a"}


# --- children of the worker ---


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_a_failing_multiprocessing_child_records_nothing(worker, method):
    source = f"""
        import multiprocessing, os
        def child():
            assert "PYTHONPATH" not in os.environ and os.environ["TORCHELASTIC_ERROR_FILE"]
            print("in the child", flush=True)
            raise ValueError("the child's own")
        if __name__ == "__main__":
            process = multiprocessing.get_context("{method}").Process(target=child)
            process.start()
            process.join()
            print("exit code", process.exitcode)
    """
    done = worker.run(source)
    assert done.stdout == "in the child\nexit code 1\n"
    assert not worker.error_file.exists()


@pytest.mark.parametrize(
    "child",
    [
        "import subprocess, sys; subprocess.run([sys.executable, '-c', '1 / 0'])",
        "import os\nif os.fork() == 0: 1 / 0\nos.wait()",
    ],
)
def test_other_failing_children_record_nothing(worker, child):
    done = worker.run(child)
    assert done.returncode == 0
    assert "ZeroDivisionError" in done.stderr
    assert not worker.error_file.exists()


# --- crashes ---

CRASH = "import os, signal\ndef deep(): os.kill(os.getpid(), signal.{})\ndeep()"


@pytest.mark.parametrize("name", ["SIGSEGV", "SIGABRT", "SIGBUS", "SIGFPE", "SIGILL"])
def test_a_fatal_signal_writes_the_python_stack(worker, name):
    done = worker.run(CRASH.format(name))
    assert done.returncode == -getattr(signal, name)
    assert done.stderr == ""
    assert "in deep" in (worker.directory / "error.json.fault").read_text()


@pytest.mark.parametrize(
    ("flags", "env", "before"),
    [
        (["-X", "faulthandler"], {}, ""),
        (["-X", "dev"], {}, ""),
        ([], {"PYTHONFAULTHANDLER": "1"}, ""),
        ([], {}, "import faulthandler; faulthandler.enable()\n"),
    ],
)
def test_a_faulthandler_enabled_by_the_user_or_the_script_is_kept(worker, flags, env, before):
    done = worker.run(before + CRASH.format("SIGSEGV"), *flags, **env)
    assert "in deep" in done.stderr
    # The file is used only if the agent asks for the stacks.
    assert (worker.directory / "error.json.fault").read_text() == ""


def test_the_hook_causes_no_warnings_at_exit(worker):
    assert worker.run("pass", "-X", "dev", "-W", "error").stderr == ""


@pytest.fixture
def lone_copy(tmp_path: Path) -> Callable[[], str]:
    """Return a function that copies the hook and its writer to a folder without the rest of the package."""

    def copy() -> str:
        target = tmp_path / "lone"
        shutil.copytree(HOOK, target / "hook")
        for name in ("error_file.py", "fast_exit.py"):
            shutil.copy(Path(HOOK).parent / name, target)
        return str(target / "hook")

    return copy


def test_the_hook_works_without_the_rest_of_the_package(worker, lone_copy):
    done = worker.run(FAILING, hooked=False, PYTHONPATH=lone_copy())
    assert worker.callstack() == done.stderr


# --- signal handlers that raise while an exception is being recorded ---

RAISES = """
    import os, signal, sys, threading

    ran = []

    def handler(signum, frame):
        ran.append(signum)
        raise RuntimeError("from the handler")

    signal.signal(signal.SIGUSR1, handler)
    signal.signal(signal.SIGTERM, handler)
    # With it a mask of the main thread keeps no handler away: the kernel interrupts this one instead.
    threading.Thread(target=threading.Event().wait, daemon=True).start()

    def interrupt(event, args):
        if event == {event!r} and {of!r} in str(args):
            os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)

    sys.addaudithook(interrupt)
"""
END = """
    import atexit
    atexit.register(lambda: print(sorted(ran), signal.getsignal(signal.SIGUSR1) is handler))
    train()
"""
MOMENTS = [
    ("open", "error_file."),
    ("exec", "error_file.py"),
    ("open", ".partial"),
    ("os.rename", "error.json"),
]


@pytest.mark.parametrize(("event", "of"), MOMENTS)
def test_an_uncaught_exception_is_recorded_although_signal_handlers_raise(worker, event, of):
    train = "    def train(): raise ValueError('the cause')\n"
    done = worker.run(RAISES.format(event=event, of=of) + train + END)
    assert worker.callstack().endswith("ValueError: the cause\n")
    assert done.stdout == "[10, 15] True\n", "both handlers ran, and are installed again"
    assert "ValueError: the cause" in done.stderr
    assert "RuntimeError: from the handler" in done.stderr


@pytest.mark.parametrize(("event", "of"), MOMENTS[2:])
def test_record_writes_the_error_although_signal_handlers_raise(worker, event, of):
    train = """
    from elasticrs.multiprocessing.errors import record
    @record
    def train(): raise ValueError('the cause')
    """
    done = worker.run(RAISES.format(event=event, of=of) + train + END)
    assert worker.error()["elasticrs"]["written_by"] == "record"  # type: ignore[index]
    assert worker.callstack().endswith("ValueError: the cause\n")
    assert done.stdout == "[10, 15] True\n"


def test_recording_in_a_thread_does_not_change_signal_handlers(worker):
    source = """
        import signal, threading
        from elasticrs.multiprocessing.errors import record
        handler = lambda *args: None
        signal.signal(signal.SIGUSR1, handler)
        @record
        def train(): raise ValueError('the cause')
        thread = threading.Thread(target=train)
        thread.start(); thread.join()
        print(signal.getsignal(signal.SIGUSR1) is handler)
    """
    done = worker.run(source)
    assert done.stdout == "True\n"
    assert worker.callstack().endswith("ValueError: the cause\n")


@pytest.mark.torch
def test_the_error_is_recorded_although_torchs_data_loader_handler_raises(worker):
    source = """
        import os, signal, sys
        from torch.utils.data import DataLoader

        def end_a_loader(event, args):
            if event == "open" and ".partial" in str(args):
                process = loaders._workers[0]
                os.kill(process.pid, signal.SIGKILL)
                os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)

        if __name__ == "__main__":
            loaders = iter(DataLoader(range(1000), num_workers=2))
            next(loaders)
            sys.addaudithook(end_a_loader)
            raise ValueError("the cause")
    """
    done = worker.run(source)
    assert "DataLoader worker" in done.stderr, "torch's handler has raised"
    assert worker.callstack().endswith("ValueError: the cause\n")
