"""Verdicts of real jobs: workers killed by the kernel or by their own runtime, lost peers, and programs that
launch a job and read its verdict. ``tests/e2e/test_verdicts.py`` tests the options.
"""

import sys

import pytest
from helpers import procs
from helpers.ended import Ended
from helpers.said import says

pytestmark = pytest.mark.beyond_torchrun

LIMIT = 192 << 20
"""Limit of the memory cgroup in bytes: more than a launcher and two idle workers take."""


@pytest.fixture
def run(launch, worker_script, tmp_path):
    """Return a function that runs a script and returns its outcome."""

    def run(source, *options, nproc=2, launch=launch, **how):
        report = tmp_path / "report.json"
        options = ("--exit-codes=verdict", f"--report=file:{report}", f"--nproc-per-node={nproc}", *options)
        return Ended(launch(*options, worker_script(source), **how), report)

    return run


@pytest.fixture
def memory_cgroup():
    with procs.memory_cgroup(LIMIT) as group:
        yield group


EATS = """
    import os, signal
    if os.environ["RANK"] == "1":
        blocks = [b"x" * (1 << 20) for _ in range(1024)]
    signal.pause()
"""


@pytest.mark.privileged
def test_an_oom_kill_is_reported_as_the_root_cause(run, memory_cgroup):
    enter = ("sh", "-c", f'echo $$ >{memory_cgroup}/cgroup.procs && exec "$@"', "sh")
    ended = run(EATS, prefix=enter)
    assert (ended.code, ended.report["verdict"], ended.report["root_cause"]) == (1, "failed", 1)
    says(ended.report["headline"], "rank 1 of 2", "SIGKILL", "OOM killer")
    says(ended.stderr, "oom_kill rose by 1 in", str(memory_cgroup), "memory limit")


FAULTS = {
    "SIGSEGV": ("import ctypes; ctypes.string_at(0)", "string_at"),
    "SIGABRT": ('import ctypes; ctypes.CDLL("libstdc++.so.6")._ZSt9terminatev()', "worker.py"),
}


@pytest.mark.parametrize("signal_name", FAULTS)
def test_a_fault_in_native_code_is_reported_with_its_stack(run, signal_name):
    fault, place = FAULTS[signal_name]
    ended = run(f"""
        import os, signal
        if os.environ["RANK"] == "1":
            {fault}
        signal.pause()
    """)
    assert (ended.code, ended.report["verdict"], ended.report["root_cause"]) == (1, "failed", 1)
    (failure,) = [each for each in ended.report["failures"] if not each["was_stopped"]]
    assert failure["signal"] == signal_name
    says(ended.stderr, "Root Cause", "Fatal Python error", place)


DIES = """
    import os, signal
    import torch
    from torch import distributed
    distributed.init_process_group("gloo")
    tensor = torch.ones(4)
    for step in range(1000):
        if step == 20 and distributed.get_rank() == 2:
            {how}
        distributed.all_reduce(tensor)
"""


@pytest.mark.parametrize("how", ["os.kill(os.getpid(), signal.SIGKILL)", "raise KeyError('batch')"])
def test_ranks_that_lose_a_peer_are_not_blamed(run, launch_with_torch, how):
    ended = run(DIES.format(how=how), nproc=4, launch=launch_with_torch, env={"OMP_NUM_THREADS": "1"})
    assert (ended.code, ended.report["verdict"], ended.report["root_cause"]) == (1, "failed", 2)
    says(ended.report["headline"], "rank 2 of 4", "KeyError" if "KeyError" in how else "SIGKILL")


PROGRAM = """
    import os, signal, sys
    from elasticrs.errors import JobFailedError, NonRetryable
    from elasticrs.launcher import LaunchConfig, elastic_launch
    def marked():
        if os.environ["RANK"] == "1":
            raise NonRetryable("bad config")
        signal.pause()
    def raises():
        raise ValueError("no")
    def exits():
        os._exit(42)
    if __name__ == "__main__":
        codes, what = sys.argv[1:]
        how = {"max_restarts": 5, "exit_codes": codes, "start_method": "fork"}
        config = LaunchConfig(1, 1, 2, rdzv_backend="c10d", **how)
        try:
            elastic_launch(config, {"marked": marked, "raises": raises, "exits": exits}.get(what, what))()
        except JobFailedError as error:
            print(error.verdict, error.reason, error, sep="\\n")
            sys.exit(error.exit_code)
"""


@pytest.mark.parametrize(
    ("codes", "what", "code", "verdict", "reason"),
    [
        ("torchrun", "marked", 1, "permanent", "must not be retried"),
        ("verdict", "marked", 93, "permanent", "must not be retried"),
        ("verdict:7,8", "raises", 7, "permanent", "3 times without progress"),
        ("worker", "exits", 42, "failed", "None"),
        ("verdict", "/no/such/program", 93, "permanent", "/no/such/program"),
    ],
)
def test_a_program_reads_the_verdict_from_the_exception(
    launch, worker_script, codes, what, code, verdict, reason
):
    program = worker_script(PROGRAM, "program.py")
    launched = launch(program, codes, what, argv=(sys.executable,)).exits(code)
    first, second, *report = launched.stdout.splitlines()
    assert first == verdict
    assert reason in second
    # The report also says why the workers were not restarted.
    assert reason == "None" or reason in "\n".join(report)
