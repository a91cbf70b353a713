"""Benchmark of the rendezvous in etcd. elasticrs uses the v3 API, and torchrun's ``etcd-v2`` uses the v2 API.

Torchrun needs python-etcd, which it does not install, and an etcd version before 3.6, because later versions
lack the v2 API.
"""

import os
import shutil
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from benchmarks import peers, rendezvous
from benchmarks.etcd_member import PROGRAM, running
from benchmarks.harness import Launcher, Options, Row
from benchmarks.nodes import Shape


def measure(options: Options) -> list[Row]:
    if not _choose_program("nodes-etcd"):
        return []
    if find_spec("etcd") is None:
        print("  torchrun is left out: its etcd-v2 needs python-etcd", file=sys.stderr)
        options = _ours(options)
    with running() as member:

        def meet(launcher: Launcher) -> Sequence[str]:
            backend = "etcd-v2" if launcher.name == "torchrun" else "etcd"
            return "--rdzv-backend", backend, "--rdzv-endpoint", member.endpoint

        return [
            *rendezvous.measure_shape(options, Shape(4, 1), meet=meet, where=" over etcd"),
            *peers.measure(options, meet, " over etcd"),
        ]


def _choose_program(benchmark: str) -> bool:
    """Choose the etcd binary that all agents run: the user's, else the one next to Python, else the one on
    ``PATH``.

    Returns:
        False if there is none. A line says so.
    """
    beside, given = str(Path(sys.executable).with_name("etcd")), os.environ.get(PROGRAM)
    program = shutil.which(given) if given else shutil.which(beside) or shutil.which("etcd")
    if program is None:
        print(f"  {benchmark} is skipped: no etcd; run `make setup` or set {PROGRAM}", file=sys.stderr)
        return False
    os.environ[PROGRAM] = program
    return True


def _ours(options: Options) -> Options:
    return options._replace(launchers=tuple(each for each in options.launchers if each.name != "torchrun"))
