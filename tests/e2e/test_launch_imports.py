"""The import budget: a short list of modules that a launch may load beyond those of a bare interpreter."""

import functools
import sys

from helpers.procs import run_program

PROGRAM = """
import os, sys  # what every interpreter has loaded, through site
before = set(sys.modules)
sys.argv[1:] = {argv!r}
from elasticrs.launch import main
main()
print(*sorted(set(sys.modules) - before))
"""

STANDARD = {
    "__future__",
    # The signal module defines enums, and the enum module needs the others.
    *("signal", "enum", "types", "functools", "_functools", "operator", "_operator"),
    *("collections", "_collections", "itertools", "keyword", "reprlib", "_thread", "collections.abc"),
    # Modules written in C.
    *("_signal", "_socket", "select", "errno", "gc"),
}


@functools.cache
def loaded(*argv):
    done = run_program(
        [sys.executable, "-S", "-c", PROGRAM.format(argv=list(argv))],
        check=True,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(filter(None, sys.path))},
    )
    return set(done.stdout.splitlines()[-1].split())


def test_a_launch_imports_only_the_allowed_modules():
    foreign = {
        name for name in loaded("--nproc-per-node=2", "--no-python", "true") if "elasticrs" not in name
    }
    assert foreign <= STANDARD


def test_a_single_node_job_imports_no_multi_node_rendezvous():
    for argv in (("--no-python", "true"), ("--standalone", "--nnodes=1:4", "--no-python", "true")):
        assert not {name for name in loaded(*argv) if name.startswith("elasticrs.rendezvous.e")}


def test_other_backends_import_no_etcd_modules():
    for backend in ("c10d", "static"):
        modules = loaded(f"--rdzv-backend={backend}", "--rdzv-endpoint=localhost:0", "--no-python", "true")
        assert not {name for name in modules if "etcd" in name}


def test_unused_observer_modules_are_not_imported():
    watchers = (
        "elasticrs.events",
        "elasticrs.metrics",
        "elasticrs._engine.supervise.observe.job_",
        "elasticrs._engine.supervise.observe.recorder",
        "elasticrs._engine.workers.warm",
    )
    assert not {name for name in loaded("--no-python", "true") if name.startswith(watchers)}


def test_help_does_not_import_the_agent():
    modules = loaded("--help")
    assert {name for name in modules if "elasticrs" not in name} <= STANDARD
    assert "elasticrs._core" not in modules
    assert "elasticrs._engine.supervise.run.loop" not in modules


def test_the_texts_of_options_are_imported_only_when_they_are_printed():
    name = "elasticrs._engine.cli.help"
    assert name not in loaded("--no-python", "true")
    assert name in loaded("--check", "torchrun", "--no-python", "true")
