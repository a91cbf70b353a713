"""Fixtures and rules for all tests.

``ELASTICRS_REQUIRE_ALL=1`` (set by ``.ci/run`` and ``make test ALL=1``) makes every skip a failure, except
for tests that need a GPU. ``ELASTICRS_HYPOTHESIS_PROFILE`` is ``fast`` (the default) or ``thorough`` (``make
nightly``). ``pytest tests/e2e --launcher torchrun`` runs the same black-box tests against the reference, but
for those marked ``beyond_torchrun``: so that a test of compatibility is known to be one.
"""

import functools
import gc
import importlib.util
import itertools
import json
import os
import signal
import textwrap
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import hypothesis
import pytest
from helpers.golden import golden
from helpers.host_programs import host_program
from helpers.launcher import LAUNCHERS, NO_TIME, Launched, clean_environment, write_at_once
from helpers.leaks import no_leaks
from helpers.network_fixtures import formed, hosts, impair, multinode, network
from helpers.procs import INTERPRETERS, interpreters
from helpers.torch_programs import TorchPrograms

__all__ = ["formed", "golden", "host_program", "hosts", "impair", "multinode", "network", "no_leaks"]

pytest_plugins = ["pytester", "helpers.browser", "helpers.elasticctl", "helpers.etcd_fixtures"]

# Use the same examples in every run, because a change must not be rejected by chance. The nightly runs use
# new ones.
hypothesis.settings.register_profile("fast", max_examples=100, deadline=None, derandomize=True)
hypothesis.settings.register_profile("thorough", max_examples=1000, deadline=None, print_blob=True)
hypothesis.settings.load_profile(os.environ.get("ELASTICRS_HYPOTHESIS_PROFILE", "fast"))

REQUIRE_ALL = os.environ.get("ELASTICRS_REQUIRE_ALL") == "1"

FRAMEWORKS = ("accelerate", "lightning", "transformers")


def is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


NEEDS: dict[str, tuple[Callable[[], bool], str]] = {
    "privileged": (lambda: os.geteuid() == 0, "needs root"),
    "gpu": (lambda: Path("/dev/nvidiactl").exists(), "needs a CUDA device"),
    "torch": (lambda: is_installed("torch"), "needs torch"),
    "frameworks": (lambda: all(map(is_installed, FRAMEWORKS)), f"needs {', '.join(FRAMEWORKS)}"),
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--launcher", choices=LAUNCHERS, default="elasticrs", help="what `launch` starts")
    parser.addoption("--update-golden", action="store_true", help="rewrite the files in tests/golden")


def pytest_configure(config: pytest.Config) -> None:
    """Set the environment and the signal handlers that the tests and their child processes inherit.

    A shell's background job, or ``nohup``, ignores signals, and so would all that a test starts.
    """
    os.environ.update(NO_TIME)
    if getattr(config.option, "numprocesses", None):
        # All processes of pytest need this list, and asking all interpreters takes a second.
        os.environ[INTERPRETERS] = json.dumps(interpreters())
    for number in (signal.SIGINT, signal.SIGQUIT, signal.SIGHUP):
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)


def may_take(item: pytest.Item) -> float:
    """Return how many seconds a test may take according to its markers. 0 without such a marker."""
    timeout = item.get_closest_marker("timeout")
    return float(timeout.args[0]) if timeout else 10.0 * (item.get_closest_marker("slow") is not None)


TORCH = {"torch_programs", "programs", "trainers", "torch_clients"}
"""Fixtures that import torch. Tests that use them are marked ``torch``."""


def pytest_itemcollected(item: pytest.Item) -> None:
    if TORCH.intersection(getattr(item, "fixturenames", ())):
        item.add_marker("torch")


SHARED = ("torch_programs", "programs", "trainers", "torch_clients", "etcd_program", "torch")
"""Fixtures that take long to start and serve all tests of a pytest process: torch's import, etcd's start."""


@pytest.hookimpl(trylast=True)  # Each process gets an equal part of the tests that ``-m`` and ``-k`` select.
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """If the tests run in several processes, distribute the slow tests evenly and run them first, so that no
    process finishes long after the others. Tests that use the same fixture of `SHARED` run in the same
    process, so that it is started only once for them.
    """
    processes = getattr(config, "workerinput", {}).get("workercount", 1)
    if processes == 1:
        return
    items.sort(key=may_take, reverse=True)
    first: list[list[pytest.Item]] = [[] for _ in range(processes)]
    others: list[pytest.Item] = []
    turns = itertools.cycle(first)
    for item in items:
        used = [number for number, name in enumerate(SHARED) if name in getattr(item, "fixturenames", ())]
        if used:
            first[used[0] % processes].append(item)
        elif may_take(item):
            next(turns).append(item)
        else:
            others.append(item)
    ordered: list[pytest.Item] = []
    for number, mine in enumerate(first):
        share = (len(items) - len(ordered)) // (processes - number)
        ordered += mine
        room = max(0, share - len(mine))
        ordered += others[:room]
        others = others[room:]
    items[:] = ordered


def pytest_collection_finish() -> None:
    """Exclude the thousands of collected tests from garbage collection, because they stay until the end."""
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("beyond_torchrun") and item.config.getoption("launcher") == "torchrun":
        pytest.skip("torchrun behaves otherwise")
    for marker, (is_met, reason) in NEEDS.items():
        if item.get_closest_marker(marker) and not is_met():
            pytest.skip(reason)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[Any]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    is_excused = hasattr(report, "wasxfail") or item.get_closest_marker("gpu")
    if REQUIRE_ALL and report.skipped and not is_excused:
        report.outcome = "failed"
        report.longrepr = f"skipped, but all is required here: {call.excinfo and call.excinfo.value}"
    return report


class Launch(Protocol):
    """A function that starts the launcher with these arguments."""

    def __call__(
        self,
        *args: str | Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        prefix: Sequence[str | Path] = (),
        argv: Sequence[str | Path] | None = None,
        **how: Any,
    ) -> Launched: ...


@pytest.fixture(scope="session")
def torch_programs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchPrograms]:
    """Run programs in forks of one process that has imported torch."""
    programs = TorchPrograms(tmp_path_factory.mktemp("programs"))
    yield programs
    programs.close()


@pytest.fixture
def launch(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Launch]:
    """Return a function that starts the launcher with the given arguments; see
    :class:`helpers.launcher.Launched`.

    ``prefix`` is put before the command line, for programs such as ``unshare``; ``argv`` is in place of the
    launcher's own, for another interpreter.
    """
    launcher = LAUNCHERS[request.config.getoption("launcher")]
    started: list[Launched] = []

    def start(
        *args: str | Path,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        prefix: Sequence[str | Path] = (),
        argv: Sequence[str | Path] | None = None,
        **how: Any,
    ) -> Launched:
        command = [*prefix, *(launcher if argv is None else argv), *args]
        # Keep the default log directories in the test's folder, too.
        environment = clean_environment({"TMPDIR": str(tmp_path), **(env or {})})
        started.append(Launched(command, env=environment, cwd=cwd or tmp_path, **how))
        return started[-1]

    yield start
    running = [each for each in started if not each.close()]
    assert not running, f"the test ended before its launcher: {[each.pid for each in running]}"


@pytest.fixture
def launch_with_torch(launch: Launch, torch_programs: TorchPrograms) -> Launch:
    """Start the launcher as a fork of a process that has imported torch. The workers are forks of the
    launcher (``--run-path --start-method=fork``), so none of them imports torch.
    """
    return functools.partial(launch, start=torch_programs.popen)


@pytest.fixture
def worker_script(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes a worker's dedented source to a file and returns the path."""

    def write(source: str, name: str = "worker.py") -> Path:
        path = tmp_path / name
        write_at_once(path, textwrap.dedent(source))
        return path

    return write
