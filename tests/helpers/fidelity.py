"""Comparison of what the workers of the same job observe in a cold and in a warm start."""

import difflib
import json
import re
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from helpers.launcher import Launched
from helpers.procs import HANG

WORKERS = Path(__file__).resolve().parent.parent / "workers"
FACTS, ENDINGS = WORKERS / "facts.py", WORKERS / "endings.py"

MARK = "colorsys"
"""A module that nothing else imports: where the first line of a script finds it, the worker is warm."""

OF_A_RUN = (
    *("MASTER_PORT", "TORCHELASTIC_RUN_ID"),
    *("ELASTICRS_KEEP", "ELASTICRS_NOTICES", "ELASTICRS_HEARTBEAT"),
)
"""Variables with a value of their own in each run."""

CHANGES = (
    (re.compile(rf"\b({'|'.join(OF_A_RUN)})=[\w:/-]+"), r"\1=OF THE RUN"),
    (re.compile(r"(/logs)/[^/\s\"']+_[0-9a-z_]+(?=[/\s\"']|$)"), r"\1/RUN"),
    (re.compile(r"/dev/pts/\d+"), "/dev/pts/NUMBER"),
    (re.compile(r"(/elasticrs-timers)-[0-9a-f]+/"), r"\1/"),
    (re.compile(r" at 0x[0-9a-f]+"), " at ADDRESS"),
    (re.compile(r"\b(tracker_fd|pipe_handle)=\d+"), r"\1=DESCRIPTOR"),
)
"""What differs between any two runs."""

ARGUED = {
    r"[\d.]+/facts/seen_first/(modules|path_importer_cache)": "what was preloaded is there; see `preloaded`",
    r"[\d.]+/facts/process/mapped extension": "the nursery's loop stays mapped, and is never run again",
    r"[\d.]+/facts/state/gc frozen": "`gc.freeze` before the first fork",
}
"""The facts that may differ, as regular expressions of their names, and why."""


class Worker(NamedTuple):
    """The output of one worker: its facts, its streams and its error file."""

    facts: Any
    """What it has written to ``facts/<attempt>.<rank>.json``."""

    stdout: str
    stderr: str
    error: Any
    """The content of its error file, without time and pid."""


class Outcome(NamedTuple):
    code: int
    workers: dict[str, Worker]
    """By ``attempt.rank``."""

    ends: list[str]
    """How the failed ones ended, as the launcher's lines say it."""

    stderr: str

    def facts(self) -> dict[str, Any]:
        """Return all facts to compare; see :func:`flat`."""
        whole = {
            "code": self.code,
            "ends": self.ends,
            **{name: worker._asdict() for name, worker in self.workers.items()},
        }
        return flat(whole)


class Job:
    """Runs a command line, cold or warm, in a folder that looks the same in each run.

    Args:
        launch: the fixture.
        folder: the working directory of the launcher.
        modules: what a warm job preloads.
        timeout: seconds after which a job hangs.
    """

    def __init__(
        self, launch: Callable[..., Launched], folder: Path, modules: str, timeout: float = HANG
    ) -> None:
        self._launch, self._folder, self._modules, self._timeout = launch, folder, modules, timeout

    def run(self, *command: str | Path, warm: bool, redirect: bool = True, **how: Any) -> Outcome:
        """Run the job until it finishes.

        Args:
            command: options, script and its arguments.
            warm: with the options for it.
            redirect: standard output and error go to files, which are part of the outcome.
            how: more for ``launch``.
        """
        logs, facts = self._folder / "logs", self._folder / "facts"
        facts.mkdir()
        options = ["--log-dir", str(logs), *(("--redirects", "3") if redirect else ())]
        options += ("--warm", self._modules) if warm else ()
        launched = self._launch(*options, *command, cwd=self._folder, **how)
        code = launched.wait(self._timeout)
        workers = {
            f"{attempt.name.removeprefix('attempt_')}.{rank.name}": _worker(rank, facts, attempt)
            for attempt in sorted(logs.glob("*/attempt_*"))
            for rank in sorted(attempt.iterdir())
            if rank.is_dir()
        }
        # A job that was refused has no logs.
        shutil.rmtree(logs, ignore_errors=True)
        shutil.rmtree(facts)
        return Outcome(code, workers, _ends(launched.stderr), launched.stderr)

    def compare(self, *command: str | Path, argued: Mapping[str, str] = ARGUED, **how: Any) -> Outcome:
        """Run a command line cold, then warm. Fail if facts differ whose names match no pattern in
        ``argued``.

        Returns:
            That of the warm job.
        """
        cold, warm = (self.run(*command, warm=is_warm, **how) for is_warm in (False, True))
        if found := differences(cold.facts(), warm.facts(), argued):
            pytest.fail("\n".join([f"{len(found)} facts differ:", *found, warm.stderr]), pytrace=False)
        return warm


def differences(cold: Mapping[str, Any], warm: Mapping[str, Any], argued: Mapping[str, str]) -> list[str]:
    """Return one or more lines for each fact that differs.

    Args:
        cold: facts by name.
        warm: the same.
        argued: regular expressions of names, each with the reason why it differs.
    """
    found = []
    for name in sorted({*cold, *warm}):
        values = [facts.get(name, "(none)") for facts in (cold, warm)]
        if values[0] != values[1] and not any(re.fullmatch(pattern, name) for pattern in argued):
            found.append(f"{name}:{_difference(*values)}")
    return found


def _difference(cold: Any, warm: Any) -> str:
    texts = [_lines(value) for value in (cold, warm)]
    if max(map(len, texts)) == 1:
        return f"\n    cold {cold!r}\n    warm {warm!r}"
    diff = list(difflib.unified_diff(texts[0], texts[1], "cold", "warm", lineterm="", n=1))[2:]
    return "".join(f"\n    {line}" for line in diff)


def _lines(value: Any) -> list[str]:
    if isinstance(value, str):
        return value.splitlines() or [""]
    return [repr(each) for each in value] if isinstance(value, list) and len(value) > 1 else [repr(value)]


def flat(value: Mapping[str, Any]) -> dict[str, Any]:
    """Flatten nested facts, with names joined by slashes. Values that differ between any two runs are
    replaced.
    """
    return dict(_flat("", value))


def _flat(prefix: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for name, each in value.items():
            yield from _flat(f"{prefix}{name}/", "OF THE RUN" if name in OF_A_RUN else each)
    else:
        yield prefix.rstrip("/"), _unchanged(value)


def _unchanged(value: Any) -> Any:
    """Replace the parts of a value that differ between any two runs."""
    if isinstance(value, str):
        for pattern, replacement in CHANGES:
            value = pattern.sub(replacement, value)
    elif isinstance(value, list):
        return [_unchanged(each) for each in value]
    elif isinstance(value, dict):
        return {name: "OF THE RUN" if name in OF_A_RUN else _unchanged(each) for name, each in value.items()}
    return value


def _worker(logs: Path, facts: Path, attempt: Path) -> Worker:
    number = attempt.name.removeprefix("attempt_")
    written = facts / f"{number}.{logs.name}.json"
    error = _json(logs / "error.json")
    if isinstance(error, dict):
        error.pop("elasticrs", None)
        if isinstance(message := error.get("message"), dict):
            message.get("extraInfo", {}).pop("timestamp", None)
    return Worker(_json(written), _text(logs / "stdout.log"), _text(logs / "stderr.log"), error)


def _json(path: Path) -> Any:
    return json.loads(path.read_bytes() or b"null") if path.exists() else None


def _text(path: Path) -> str:
    return path.read_text(encoding="utf-8", errors="surrogateescape") if path.exists() else ""


def _ends(stderr: str) -> list[str]:
    lines = re.findall(
        r"(rank \d+) \(pid \d+\)( exited with code \d+| died by \w+|: .*?)(?:;|$)", stderr, re.M
    )
    return ["".join(line) for line in lines] + re.findall(r"exitcode\s*: (-?\d+)", stderr)
