"""A script sees the same environment warm as cold. Each test runs a command line both ways and compares the
results.
"""

import sys

import pytest
from helpers.fidelity import ARGUED, ENDINGS, FACTS, MARK, Job, differences
from helpers.procs import run_program

pytestmark = pytest.mark.beyond_torchrun

MODULES = "json,colorsys"
WIDE = (
    "json,colorsys,logging,random,tempfile,multiprocessing,concurrent.futures,asyncio,uuid,ctypes,subprocess"
    ",threading,warnings,decimal,locale,inspect,pickle,socket,email"
)
"""Modules that keep something for their process."""

QUICK = ("interpreter", "main", "source", "process", "signals", "descriptors", "environment", "streams")
QUICK += ("threads", "faults", "seen_first")

TERMINAL = "import os, pty, sys; sys.exit(os.waitstatus_to_exitcode(pty.spawn(sys.argv[1:])))"
LIMITS = 'umask 027; ulimit -S -n 300; ulimit -S -s 4096; ulimit -c 0; exec nice -n 3 taskset -c 0 "$@"'


@pytest.fixture
def job(launch, tmp_path):
    return Job(launch, tmp_path, MODULES)


def facts(*parts, modules=MODULES):
    return (FACTS, "facts", modules, *parts)


def assert_is_warm(outcome, n=2):
    """Check that all workers ran, and that they were forked from a process that had imported the requested
    modules.
    """
    assert outcome.code == 0, outcome.stderr
    assert len(outcome.workers) == n
    for worker in outcome.workers.values():
        assert MARK in worker.facts["seen_first"]["modules"], outcome.stderr


@pytest.mark.parametrize("modules", [MODULES, WIDE], ids=["few", "many"])
def test_a_script_sees_the_same_environment_warm_and_cold(launch, tmp_path, modules):
    job = Job(launch, tmp_path, modules)
    assert_is_warm(job.compare("--nproc-per-node=2", *facts(modules=modules)))


def test_warm_auto_preloads_the_imports_of_the_script(launch, tmp_path, worker_script):
    script = worker_script(f"""
        import sys
        IS_WARM = "{MARK}" in sys.modules
        import {MARK}, runpy
        runpy.run_path({str(FACTS)!r}, run_name="__main__")
        with open("was_warm", "w") as file:
            file.write(str(IS_WARM))
    """)
    outcome = Job(launch, tmp_path, "auto").compare(script, *facts(*QUICK)[1:])
    assert outcome.code == 0, outcome.stderr
    assert (tmp_path / "was_warm").read_text() == "True"


SETTINGS = {
    "streams": {"PYTHONUNBUFFERED": "1", "PYTHONIOENCODING": "latin-1:replace", "PYTHONHASHSEED": "7"},
    "development": {
        "PYTHONDEVMODE": "1",
        "PYTHONUTF8": "1",
        "PYTHONWARNINGS": "error::FutureWarning,default",
    },
    "optimized": {"PYTHONOPTIMIZE": "2", "PYTHONSAFEPATH": "1", "PYTHONNOUSERSITE": "1", "PYTHONPATH": ""},
    "ascii": {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0", "TZ": "Asia/Tokyo"},
    "timers": {"TORCHELASTIC_ENABLE_FILE_TIMER": "1", "PYTHONPYCACHEPREFIX": "pycache", "PYTHONPATH": "a:b:"},
    "no tracebacks": {"ELASTICRS_TRACEBACKS": "0", "PYTHONFAULTHANDLER": "1"},
}
GPUS = {"CUDA_VISIBLE_DEVICES": "4,5"}
WAYS = {
    "--tee": (["--tee=3"], {"redirect": False, "env": GPUS}),
    "--virtual-local-rank": (["--virtual-local-rank"], {"env": GPUS}),
    "--hang-timeout": (["--hang-timeout=60"], {"env": GPUS}),
    "--signals-to-handle": (["--signals-to-handle=SIGUSR1"], {"env": GPUS}),
    **{f"settings for {name}": ([], {"env": env}) for name, env in SETTINGS.items()},
    "terminal": ([], {"redirect": False, "prefix": (sys.executable, "-c", TERMINAL)}),
    "limits and masks": ([], {"prefix": ("sh", "-c", LIMITS, "sh")}),
    "no stdin": ([], {"redirect": False, "prefix": ("sh", "-c", 'exec "$@" <&-', "sh")}),
    "no streams": ([], {"redirect": False, "prefix": ("sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh")}),
}
"""Options of the launcher, and how it is started. With options, the job has two workers."""


@pytest.mark.parametrize("way", WAYS)
def test_options_and_inherited_state_have_the_same_effect_warm_and_cold(job, way):
    options, how = WAYS[way]
    workers = 2 if options else 1
    outcome = job.compare(f"--nproc-per-node={workers}", *options, *facts(*QUICK), **how)
    assert_is_warm(outcome, workers)


def test_multiprocessing_children_are_the_same_warm_and_cold(job):
    assert_is_warm(job.compare(*facts("multiprocesses", "seen_first")), 1)


def test_rank_specific_arguments_are_the_same_warm_and_cold(job):
    command = ("--nproc-per-node=2", *facts("interpreter", "process", "seen_first", "${local_rank}"))
    assert_is_warm(job.compare(*command))


def test_the_comparison_detects_a_difference(job, tmp_path):
    """The test harness finds the differences between two runs with a different environment variable and
    umask.
    """
    first = job.run("--nproc-per-node=2", *facts(*QUICK), warm=False, env={"MINE": "1"})
    other = ("sh", "-c", 'umask 077; exec "$@"', "sh")
    second = job.run("--nproc-per-node=2", *facts(*QUICK), warm=False, env={"MINE": "2"}, prefix=other)
    found = "\n".join(differences(first.facts(), second.facts(), ARGUED))
    assert "0.0/facts/environment/python/MINE:\n    cold '1'\n    warm '2'" in found
    assert "1/facts/environment/listed by C:\n" in found
    assert "-'MINE=1'\n    +'MINE=2'" in found
    assert "facts/process/umask:\n    cold '0o22'\n    warm '0o77'" in found
    names = {
        line.partition(":")[0].partition("/facts/")[2] for line in found.splitlines() if "/facts/" in line
    }
    parts = {name.partition("/")[0] for name in names}
    assert parts == {"environment", "process", "descriptors", "seen_first"}, found


@pytest.mark.parametrize("kind", ["fail", "succeed"])
def test_every_kind_of_end_has_the_same_outcome_warm_and_cold(job, kind):
    counted = run_program([sys.executable, ENDINGS, "count"], check=True)
    failures, successes = map(int, counted.stdout.split())
    option, workers = (
        (f"--max-restarts={failures}", failures + 1)
        if kind == "fail"
        else (f"--nproc-per-node={successes}", successes)
    )
    outcome = job.compare(option, ENDINGS, kind, argued={r"\d+\.\d/facts": "tells them apart"})
    assert outcome.code == 0
    assert len(outcome.workers) == workers
    assert all(worker.facts for worker in outcome.workers.values()), outcome.stderr
