"""Programs and functions that a program starts on its own, without an agent."""

import contextlib
import errno
import functools
import io
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from helpers import functions, held, procs

from elasticrs import _core
from elasticrs._engine.gpus import numa
from elasticrs._engine.job.config import START_METHODS
from elasticrs._engine.workers.functions.start_methods import BY_METHOD
from elasticrs.multiprocessing import (
    DefaultLogsSpecs,
    LogsDest,
    LogsSpecs,
    SignalException,
    Std,
    start_processes,
)
from elasticrs.multiprocessing.api import MultiprocessContext, SubprocessContext
from elasticrs.multiprocessing.subprocess_handler import SubprocessHandler, get_subprocess_handler

methods = pytest.mark.parametrize("method", START_METHODS)


def start(tmp_path, entrypoint, *args, n=2, tee=Std.NONE, redirects=Std.NONE, **how):
    specs = how.pop("specs", None) or DefaultLogsSpecs(str(tmp_path / "logs"), redirects=redirects, tee=tee)
    of_rank = how.pop("args_by_rank", None) or dict.fromkeys(range(n), args)
    envs = {rank: {"NAME": f"n{rank}"} for rank in range(len(of_rank))}
    return start_processes("echo", entrypoint, of_rank, envs, specs, **how)


def test_start_methods_lists_the_implemented_methods():
    assert tuple(BY_METHOD) == START_METHODS


# --- programs ---


def test_programs_get_text_arguments_and_their_own_environment(tmp_path):
    context = start(tmp_path, "sh", "-c", "echo $0 $1 $NAME; exit 0", 1, [2], redirects=Std.OUT)
    assert isinstance(context, SubprocessContext)
    result = context.wait()
    assert result.return_values == {0: None, 1: None}
    assert [Path(result.stdouts[rank]).read_text() for rank in range(2)] == ["1 [2] n0\n", "1 [2] n1\n"]


def test_a_failed_program_stops_the_others_and_reports_their_signals(tmp_path):
    context = start(tmp_path, "sh", args_by_rank={0: ("-c", "exec sleep 1000"), 1: ("-c", "exit 3")})
    failures = context.wait().failures
    assert {rank: failure.exitcode for rank, failure in failures.items()} == {1: 3, 0: -15}
    assert next(iter(failures)) == 1
    assert (failures[1].sent_signal, failures[0].sent_signal) == (None, signal.SIGTERM)


def test_a_missing_program_is_named_in_the_error(tmp_path):
    with pytest.raises(RuntimeError, match="no-such-program") as raised:
        start(tmp_path, "no-such-program")
    # torch raises the same exception type.
    assert isinstance(raised.value, FileNotFoundError)
    assert raised.value.errno == errno.ENOENT
    with pytest.raises(PermissionError):
        start(tmp_path, "/etc")


def test_subprocess_handlers_behave_like_popen(tmp_path):
    context = start(tmp_path, "sleep", "1000")
    process = context.subprocess_handlers[1].proc
    assert process.pid == context.pids()[1]
    assert process.poll() is None is process.returncode
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.send_signal(signal.SIGINT)
    assert process.wait(procs.HANG) == -signal.SIGINT
    assert context.wait().failures[1].exitcode == -signal.SIGINT


def test_a_subprocess_handler_works_without_a_context(tmp_path):
    out = tmp_path / "out"
    handler = get_subprocess_handler("sh", ("-c", "echo $A; exit 4"), {"A": "b"}, str(out), None, 3)
    assert isinstance(handler, SubprocessHandler)
    assert (handler.proc.wait(procs.HANG), handler.local_rank_id, out.read_text()) == (4, 3, "b\n")
    handler = get_subprocess_handler("sleep", (1000,), {}, None, None, 0)
    handler.close()
    assert handler.proc.wait(procs.HANG) == -signal.SIGTERM


def test_a_subprocess_handler_binds_its_program_but_not_this_one_to_cpus(tmp_path, monkeypatch):
    before, out = os.sched_getaffinity(0), tmp_path / "out"
    wanted = max(before)
    monkeypatch.setattr(numa, "cpus_by_local_rank", lambda _mode, nproc, _environ: [[wanted]] * nproc)
    show = "import os; print(os.sched_getaffinity(0))"
    options = numa.NumaOptions(numa.AffinityMode.NODE)
    handler = SubprocessHandler(sys.executable, ("-c", show), {}, str(out), None, 1, options)
    assert (handler.proc.wait(procs.HANG), out.read_text()) == (0, f"{{{wanted}}}\n")
    assert os.sched_getaffinity(0) == before


def test_a_subprocess_handler_does_not_wait_for_leftover_processes(tmp_path, monkeypatch):
    # Let leftover processes run for as long as this test takes.
    monkeypatch.setattr(_core, "GroupSpec", functools.partial(_core.GroupSpec, linger=1000.0))
    before = os.listdir("/proc/self/fd")
    out = tmp_path / "out"
    handlers = [
        SubprocessHandler("sh", ("-c", "sleep 1000 & echo $!"), {}, str(out), None, 0) for _ in range(3)
    ]
    assert handlers[0].proc.wait(procs.HANG) == 0
    for handler in handlers[1:]:
        assert procs.wait_gone(handler.proc.pid)
    procs.wait_until(handlers[1].proc.poll, lambda code: code is not None)
    handlers[2].close()
    for pid in map(int, out.read_text().split()):
        assert procs.process(pid) is not None
        os.kill(pid, signal.SIGKILL)
    for handler in handlers:
        group = handler.proc._group
        assert group.wait_until(lambda group=group: group.log.end is not None, procs.HANG)
        assert handler.proc.poll() == 0
    assert os.listdir("/proc/self/fd") == before


def test_a_handler_sends_no_signal_between_the_exit_and_its_event(tmp_path, monkeypatch):
    context = start(tmp_path, "true", n=1)
    handler, group, signals = context.subprocess_handlers[0], context._group, []
    assert procs.wait_gone(handler.proc.pid)
    with monkeypatch.context() as patch:
        patch.setattr(group, "wait", lambda _timeout: None)
        patch.setattr(group, "signal", lambda signum, local_rank: signals.append((signum, local_rank)))
        handler.close()
    assert signals == []
    assert handler.proc.wait(procs.HANG) == 0
    assert context.wait().return_values == {0: None}


def test_an_unreferenced_handler_kills_its_process_and_leaks_no_descriptor():
    before = os.listdir("/proc/self/fd")
    handler = SubprocessHandler("sleep", (1000,), {}, None, None, 0)
    pid = handler.proc.pid
    del handler
    assert procs.wait_gone(pid)
    assert os.listdir("/proc/self/fd") == before


# --- functions ---


@methods
def test_large_values_are_returned_and_other_children_are_not_affected(tmp_path, method):
    child = subprocess.Popen(["sleep", "1000"])
    context = start(tmp_path, functions.repeat, b"x", 20_000_000, start_method=method)
    assert isinstance(context, MultiprocessContext)
    values = context.wait().return_values
    assert {rank: len(value) for rank, value in values.items()} == {0: 20_000_000, 1: 20_000_000}
    assert child.poll() is None
    child.kill()
    assert child.wait() == -signal.SIGKILL


@methods
def test_a_function_has_its_own_surroundings_and_this_program_as_parent(tmp_path, method):
    context = start(tmp_path, functions.look_around, "hello", start_method=method, redirects=Std.OUT)
    result = context.wait()
    by_default = True
    assert result.return_values == {rank: (f"n{rank}", by_default, os.getpid(), "alive") for rank in range(2)}
    assert [Path(path).read_text() for path in result.stdouts.values()] == ["hello\n"] * 2


@methods
def test_an_unpicklable_exception_ends_all_workers_and_their_descendants(tmp_path, method):
    reader, writer = os.pipe()
    with open(reader, encoding="ascii") as pids:
        # Only a forked worker inherits the descriptor.
        pipe = (writer,) if method == "fork" else ()
        arguments = {0: (False, *pipe), 1: (True, *pipe)}
        context = start(tmp_path, functions.with_descendants, args_by_rank=arguments, start_method=method)
        os.close(writer)
        failures = context.wait().failures
        assert {rank: failure.message["message"] for rank, failure in failures.items()} == {
            1: "UnpicklableError: boom"
        }
        assert failures[1].exitcode == 1
        procs.assert_gone([*context.pids().values(), *map(int, pids.read().split())])


@methods
def test_unpicklable_and_missing_return_values_are_failures(tmp_path, method):
    failures = start(tmp_path, functions.unloadable, n=1, start_method=method).wait().failures
    assert "pickle" in failures[0].message["message"]
    failures = start(tmp_path, functions.leave_silently, n=1, start_method=method).wait().failures
    assert failures[0].exitcode == 0
    assert "function" in failures[0].cause


@methods
def test_close_has_one_deadline_for_all_workers(tmp_path, method):
    markers = [tmp_path / f"m{rank}" for rank in range(4)]
    arguments = {rank: (str(marker),) for rank, marker in enumerate(markers)}
    context = start(tmp_path, functions.ignore_term, args_by_rank=arguments, start_method=method)
    while not all(marker.exists() for marker in markers):
        assert context.wait(timeout=0.01) is None
    context.close(timeout=0.2)
    procs.assert_gone(context.pids().values())
    assert {ended.exitcode for ended in context._group.log.exits.values()} == {-signal.SIGKILL}
    context.close()


def test_a_forked_function_need_not_be_picklable(tmp_path):
    seen = []
    context = start(tmp_path, lambda: seen.append(1) or len(seen), start_method="fork")
    assert context.wait().return_values == {0: 1, 1: 1}
    assert seen == []


@methods
def test_a_worker_outlives_the_thread_that_started_it(tmp_path, method):
    contexts = []
    thread = threading.Thread(
        target=lambda: contexts.append(start(tmp_path, functions.wait_for_signal, start_method=method))
    )
    thread.start()
    thread.join()
    assert contexts[0].wait(timeout=0.1) is None
    contexts[0].close()


def test_unpicklable_functions_and_unknown_start_methods_are_refused(tmp_path):
    for method in ("spawn", "forkserver"):
        with pytest.raises(Exception, match="pickle"):
            start(tmp_path, lambda: None, start_method=method)
    with pytest.raises(ValueError, match="thread"):
        start(tmp_path, functions.wait_for_signal, start_method="thread")


@pytest.mark.slow
@methods
def test_sixty_four_processes_return_their_values(tmp_path, method):
    context = start(tmp_path, functions.repeat, b"x", 2, n=64, start_method=method)
    assert context.wait().return_values == dict.fromkeys(range(64), b"xx")


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_traced_function_does_not_block_other_functions(tmp_path, method):
    context = start(tmp_path, functions.wait_for_signal, start_method=method)
    group, (traced, other) = context._group, context.pids().values()
    held.trace(traced)
    os.kill(traced, signal.SIGKILL)
    try:
        procs.wait_state(traced, "Z")
        # The group also sends this worker SIGTERM, and may be faster.
        with contextlib.suppress(ProcessLookupError):
            os.kill(other, signal.SIGTERM)
        assert group.wait_until(lambda: 1 in group.log.exits, procs.HANG)
    finally:
        os.waitpid(traced, 0)
        result = context.wait()
    assert group.log.exits[1].exitcode == -signal.SIGTERM, "its keeper has told"
    assert result.failures[0].exitcode == -signal.SIGKILL


HOST = """
import sys
from helpers import functions
from elasticrs.multiprocessing import start_processes, DefaultLogsSpecs
if __name__ == "__main__":
    pipe = int(sys.argv[2])
    n = int(sys.argv[4])
    pipe = pipe if sys.argv[1] == "fork" else None
    print("begin", flush=True)
    args = {i: (False, pipe) for i in range(n)}
    context = start_processes("x", functions.with_descendants, args,
                              {i: {} for i in args}, DefaultLogsSpecs(sys.argv[3]), start_method=sys.argv[1])
    print(*context.pids().values(), flush=True)
    context.wait()
"""


def _host(tmp_path, method, n):
    reader, writer = os.pipe()
    program = tmp_path / "host.py"
    program.write_text(HOST)
    path = os.pathsep.join(entry for entry in sys.path if entry)
    host = subprocess.Popen(
        [sys.executable, str(program), method, str(writer), str(tmp_path / "logs"), str(n)],
        stdout=subprocess.PIPE,
        pass_fds=[writer],
        env={**os.environ, "PYTHONPATH": path},
        text=True,
    )
    os.close(writer)
    assert host.stdout.readline() == "begin\n"
    return host, open(reader, encoding="ascii")


@methods
def test_no_process_outlives_a_killed_program(tmp_path, method):
    host, pids = _host(tmp_path, method, 3)
    with pids, host.stdout:
        workers = host.stdout.readline().split()
        if method == "fork":
            started = [pids.readline().split() for _ in range(3)]
            workers = [pid for each in started for pid in each]
        before = procs.descendants(host.pid)
        host.kill()
        host.wait()
        procs.assert_gone(map(int, workers))
        # The keeper exits after its workers. This process adopts and reaps it, too.
        procs.assert_gone([each.pid for each in before if "resource_tracker" not in each.command])
        _reap()


@pytest.mark.slow
def test_a_program_killed_while_starting_workers_leaves_no_processes(tmp_path):
    for method in START_METHODS:
        host, pids = _host(tmp_path, method, 32)
        with pids, host.stdout:
            before = procs.descendants(host.pid)
            while len(before) < 8:
                before = procs.descendants(host.pid)
            host.kill()
            host.wait()
            procs.assert_gone([each.pid for each in before if "resource_tracker" not in each.command])
            _reap()


def _reap():
    """Reap adopted processes. The resource trackers of killed programs exit on their own."""
    procs.reap_adopted(keep=[child.pid for child in procs.children() if "pytest" in child.command])


# --- waiting and signals ---


def start_with_gate(tmp_path, name):
    """Start a program that sends this process a signal on request. Return its context, and the function that
    requests the signal.
    """
    gate = tmp_path / "gate"
    os.mkfifo(gate)
    command = f"read go < {gate}; kill -{name} $0; exec sleep 1000"
    context = start(tmp_path, "sh", "-c", command, os.getpid(), n=1)

    def go(context):
        gate.write_text("go\n")
        context.wait()

    return context, go


def test_wait_returns_none_after_its_timeout(tmp_path):
    context = start(tmp_path, "sleep", "1000")
    assert context.wait(timeout=0) is None
    assert context.wait(timeout=0.01, period=1000) is None
    context.close(signal.SIGINT)
    assert {failure.exitcode for failure in context.wait().failures.values()} == {-signal.SIGINT}


def test_wait_raises_on_a_signal_and_close_restores_the_handlers(tmp_path):
    mine = signal.signal(signal.SIGHUP, lambda *_: None)
    before = signal.getsignal(signal.SIGHUP)
    outer = start(tmp_path, "sleep", "1000", n=1)
    inner, go = start_with_gate(tmp_path, "HUP")
    with pytest.raises(SignalException) as caught:
        go(inner)
    assert caught.value.sigval is signal.SIGHUP
    inner.close(caught.value.sigval)
    assert signal.getsignal(signal.SIGHUP) is not before
    outer.close()
    assert signal.getsignal(signal.SIGHUP) is before
    signal.signal(signal.SIGHUP, mine)


def test_an_environment_variable_sets_the_handled_signals(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGUSR2,SIGNOSUCH")
    term = signal.getsignal(signal.SIGTERM)
    context = start(tmp_path, "sleep", "1000", n=1)
    assert signal.getsignal(signal.SIGTERM) is term
    with pytest.raises(SignalException):
        os.kill(os.getpid(), signal.SIGUSR2)
    context.close()
    assert signal.getsignal(signal.SIGUSR2) == signal.SIG_DFL


def test_close_ends_the_processes_after_a_keyboard_interrupt_in_wait(tmp_path, monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_SIGNALS_TO_HANDLE", "SIGTERM")
    context, go = start_with_gate(tmp_path, "INT")
    with pytest.raises(KeyboardInterrupt):
        go(context)
    context.close()
    procs.assert_gone(context.pids().values())


def test_several_threads_can_wait_for_the_same_context(tmp_path):
    context = start(tmp_path, "sleep", "1000")
    results = []
    threads = [threading.Thread(target=lambda: results.append(context.wait())) for _ in range(3)]
    for thread in threads:
        thread.start()
    context.close()
    for thread in threads:
        thread.join(procs.HANG)
    assert [len(result.failures) for result in results] == [2, 2, 2]


@pytest.mark.parametrize("redirects", [Std.NONE, Std.OUT])
def test_an_empty_temporary_log_folder_is_removed(tmp_path, monkeypatch, redirects):
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    specs = DefaultLogsSpecs(redirects=redirects)
    for _ in range(2):
        start(tmp_path, sys.executable, "-c", "print(1)", specs=specs).wait()
        files = [path.name for path in tmp_path.rglob("*") if path.is_file()]
        assert files == ["stdout.log"] * len(files)
        assert list(tmp_path.iterdir()) == ([Path(specs.root_log_dir)] if files else [])
    assert len(files) == 4 * (redirects is Std.OUT)


def test_arguments_and_environments_must_have_the_same_ranks(tmp_path):
    with pytest.raises(RuntimeError, match="envs, local rank mapping mismatch"):
        start_processes("x", "true", {0: (), 1: ()}, {0: {}}, DefaultLogsSpecs(str(tmp_path)))


# --- output ---


def test_tee_writes_lines_to_the_stdout_descriptor(tmp_path, capfd):
    start(tmp_path, "sh", "-c", "printf 'a\\nb'", tee=Std.ALL, log_line_prefixes={1: "one: "}).wait()
    lines = capfd.readouterr().out.splitlines()
    assert sorted(lines) == ["[echo0]:a", "[echo0]:b", "one: a", "one: b"]


def test_tee_writes_lines_to_a_replaced_sys_stdout(tmp_path, monkeypatch):
    screen = io.StringIO()
    monkeypatch.setattr(sys, "stdout", screen)
    start(tmp_path, "sh", "-c", "printf 'a\\nb'", tee=Std.ALL).wait()
    assert sorted(screen.getvalue().splitlines()) == [
        f"[echo{rank}]:{line}" for rank in (0, 1) for line in "ab"
    ]


def test_bytes_in_log_files_are_unchanged(tmp_path):
    result = start(tmp_path, "printf", r"\377\000\r\n\376", n=12, redirects={11: Std.OUT}).wait()
    with open(result.stdouts[11], "rb") as file:
        assert file.read() == b"\xff\x00\r\n\xfe"
    assert result.stdouts[10] == ""


def test_lines_matching_a_filter_are_copied_to_the_filtered_file(tmp_path):
    context = start(tmp_path, "printf", r"loss 1\nother\n", tee=Std.OUT, duplicate_stdout_filters=["loss"])
    context.wait()
    assert context.filtered_stdout.closed
    with open(context.filtered_stdout.name, encoding="utf-8") as file:
        assert sorted(file) == ["[echo0]:loss 1\n", "[echo1]:loss 1\n"]


def test_a_dev_null_log_dir_creates_no_files_even_with_filters(tmp_path):
    specs = DefaultLogsSpecs(os.devnull, tee=Std.ALL)
    context = start(tmp_path, "true", specs=specs, duplicate_stdout_filters=["loss"])
    assert context.wait().stdouts == {0: "", 1: ""}
    assert context.filtered_stdout is None


class OneFile(LogsSpecs):
    """A user's logs specs, written for a release that did not have filtered log files."""

    def __init__(self, path):
        super().__init__()
        self._path = path

    @property
    def root_log_dir(self):
        return str(self._path)

    def reify(self, envs):  # noqa: ARG002 -- the interface
        return LogsDest({0: f"{self._path}/out"}, {0: ""}, {}, {}, {0: f"{self._path}/error.json"})


def test_a_user_defined_logs_specs_class_chooses_the_output_file(tmp_path):
    result = start(tmp_path, "echo", "x", n=1, specs=OneFile(tmp_path)).wait()
    assert (tmp_path / "out").read_text() == "x\n"
    assert result.stdouts == {0: f"{tmp_path}/out"}
