"""The same calls have the same effects in torch's error package and in ours: files, results, exceptions and
callbacks.
"""

import importlib
import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytestmark = pytest.mark.torch

PACKAGES = ("torch.distributed.elastic.multiprocessing.errors", "elasticrs.multiprocessing.errors")

NESTED = {"message": {"message": "m", "extraInfo": {"py_callstack": "s", "timestamp": "10"}}}


@pytest.fixture(autouse=True, scope="module")
def torch() -> None:
    """Import torch before the first test, because the import starts a thread that never exits."""
    importlib.import_module(PACKAGES[0])


@pytest.fixture(autouse=True)
def fault_handler() -> Any:
    """Mock ``faulthandler.enable``, because the tests would otherwise redirect pytest's fault handler."""
    with mock.patch("faulthandler.enable"):
        yield


@pytest.fixture
def both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[..., Any]], list[Any]]:
    """Return a function that calls another function with each package and an empty folder."""

    def call(function: Callable[..., Any]) -> list[Any]:
        seen = []
        for name in PACKAGES:
            folder = tmp_path / name
            folder.mkdir(exist_ok=True)
            monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(folder / "error.json"))
            seen.append(function(importlib.import_module(name), folder))
        return seen

    return call


def written(folder: Path) -> Any:
    """Return the error file in comparable form: without our additions and timestamps, and with only the last
    line of the stack.
    """
    path = folder / "error.json"
    if not path.exists():
        return None
    data = json.loads(path.read_text())
    path.unlink()
    data.pop("elasticrs", None)
    extra = data["message"].get("extraInfo") if isinstance(data["message"], dict) else None
    if extra:
        extra["py_callstack"] = extra["py_callstack"].strip().splitlines()[-1]
        extra["timestamp"] = type(extra["timestamp"]).__name__
    return data


def outcome(function: Callable[[], Any]) -> tuple[str, Any]:
    try:
        return "returned", function()
    except BaseException as error:
        return "raised", type(error).__name__


def raising(error: BaseException) -> Callable[[], None]:
    def fail() -> None:
        raise error

    return fail


FILES: list[Any] = [
    {"message": "text", "timestamp": 10},
    {"message": "text", "timestamp": "10"},
    {"message": "text"},
    {"message": "", "timestamp": 3},
    {"message": {"message": "m", "extraInfo": {"timestamp": "10"}}},
    NESTED,
    None,
]


@pytest.mark.parametrize("content", FILES, ids=range(len(FILES)))
@pytest.mark.parametrize("exitcode", [0, 1, 137, -11, -99])
def test_process_failures_match_torch(both, content, exitcode):
    def fields(errors: Any, folder: Path) -> dict[str, Any]:
        path = folder / "worker.json"
        if content is not None:
            path.write_text(json.dumps(content))
        failure = errors.ProcessFailure(2, 997, exitcode, str(path))
        iso = failure.timestamp_isoformat()
        return {
            "file": failure.error_file.replace(str(folder), ""),
            "message": failure.message,
            "data": failure.error_file_data["message"],
            "traits": exitcode >= 0 and failure.error_file_data.get("errorTraits"),
            "time": (failure.timestamp, iso) if content is not None else len(iso),
            "signal": failure.signal_name(),
        }

    theirs, ours = both(fields)
    assert ours == theirs


ENDINGS = [
    ValueError("a\nb"),
    RuntimeError(),
    SystemExit(0),
    SystemExit(None),
    SystemExit(1),
    SystemExit("text"),
    KeyboardInterrupt(),
]


@pytest.mark.parametrize("error", ENDINGS, ids=map(repr, ENDINGS))
def test_the_outcome_of_a_recorded_function_matches_torch(both, error):
    theirs, ours = both(lambda errors, folder: (outcome(errors.record(raising(error))), written(folder)))
    assert ours == theirs


def test_record_returns_the_result_of_any_callable(both):
    theirs, ours = both(lambda errors, _: outcome(errors.record(partial(max, 1, 2))))
    assert ours == theirs == ("returned", 2)


def child_failed(errors: Any, folder: Path, content: Any) -> Callable[[], None]:
    path = folder / "worker.json"
    if content is not None:
        path.write_text(json.dumps(content))
    failures = {
        0: errors.ProcessFailure(0, 997, -9, str(path)),
        1: errors.ProcessFailure(1, 998, 3, str(folder / "missing.json")),
    }
    return raising(errors.ChildFailedError("trainer", failures))


@pytest.mark.parametrize("content", [{"message": "text", "timestamp": "10"}, NESTED, None])
def test_a_forwarded_error_file_matches_torch(both, content):
    theirs, ours = both(
        lambda errors, folder: (
            outcome(errors.record(child_failed(errors, folder, content))),
            written(folder),
        )
    )
    assert ours == theirs


def told(errors: Any, calls: list[Any]) -> Any:
    """Return an error handler that overrides every hook, as a user might do, and records the calls."""
    hooks = [name for name in dir(errors.ErrorHandler) if not name.startswith("__")]

    def hook(name: str) -> Callable[..., Any]:
        def call(self: Any, *args: Any) -> Any:
            names = [os.path.basename(arg) for arg in args if isinstance(arg, str) and os.sep in arg]
            calls.append((name, names, [arg for arg in args if isinstance(arg, int)]))
            return getattr(errors.ErrorHandler, name)(self, *args)

        return call

    return type("Told", (errors.ErrorHandler,), {name: hook(name) for name in hooks if name != "_fn_name"})()


@pytest.mark.parametrize("how", ["returns", "raises", "a child failed", "raises SystemExit"])
@pytest.mark.parametrize("swapped", [False, True])
def test_error_handler_hooks_are_called_in_the_same_order_as_in_torch(both, how, swapped):
    def calls_of(errors: Any, folder: Path) -> list[Any]:
        calls: list[Any] = []
        handler = told(errors, calls)
        function: Callable[[], Any] = {
            "returns": lambda: None,
            "raises": raising(ValueError("x")),
            "a child failed": child_failed(errors, folder, NESTED),
            "raises SystemExit": raising(SystemExit(2)),
        }[how]
        (folder / "error.json").write_text('{"message": "in the way"}')
        with mock.patch(f"{errors.__name__}.get_error_handler", return_value=handler):
            calls.clear()
            outcome(errors.record(function) if swapped else errors.record(function, handler))
        return calls

    theirs, ours = both(calls_of)
    assert ours == theirs
    assert "initialize" in [name for name, *_ in ours]


def test_the_cause_of_an_error_of_a_data_loader_is_its_original_error(tmp_path):
    """The error file names the type and place of the error in the data loader's process, instead of the line
    in the worker that waits for the data loader.
    """
    from torch._utils import ExceptionWrapper  # type: ignore[attr-defined]

    from elasticrs._engine.failures.failure import how_it_failed
    from elasticrs._engine.inside.error_file import error_document
    from elasticrs.multiprocessing.errors import ProcessFailure

    def read(kind: type[Exception]) -> None:
        raise kind("sample 5")

    class NeedsTwoArgumentsError(Exception):
        def __init__(self, one: object, two: object) -> None:
            super().__init__(one, two)

    line = read.__code__.co_firstlineno + 1
    for kind in (ValueError, KeyError, partial(NeedsTwoArgumentsError, two=1)):
        try:
            read(kind)  # type: ignore[arg-type]
        except Exception:
            wrapper = ExceptionWrapper(where="in DataLoader worker process 0")
        path = tmp_path / "error.json"
        try:
            wrapper.reraise()
        except Exception as error:
            path.write_text(error_document(error, "hook"))
        failure = ProcessFailure(0, 1, 1, str(path))
        name = getattr(kind, "__name__", "NeedsTwoArgumentsError")
        assert (failure.exception or "").endswith(name)
        assert failure.place == f"test_as_torch.py:{line}"
        assert name in how_it_failed(failure)
        assert "sample 5" in how_it_failed(failure)


def test_the_report_of_one_failure_matches_torch(both):
    def report(errors: Any, folder: Path) -> list[str]:
        path = folder / "worker.json"
        path.write_text(json.dumps(NESTED))
        error = errors.ChildFailedError("train.py", {3: errors.ProcessFailure(1, 997, -15, str(path))})
        lines = str(error).replace(str(folder), "HERE").splitlines()
        # Our host name is not looked up in the network, and our lines have no trailing spaces.
        return [line.rstrip() for line in lines if "host  " not in line and not set(line) <= {"=", "-"}]

    theirs, ours = both(report)
    assert sorted(ours) == sorted(theirs)
    # Our report begins with the root cause, and torch's ends with it.
    root = theirs[theirs.index("Root Cause (first observed failure):") :]
    assert ours[ours.index(root[0]) :][: len(root)] == root
