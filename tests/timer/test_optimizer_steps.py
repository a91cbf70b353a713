"""Each step of a torch optimizer is a heartbeat, without any change to the script."""

import subprocess
import sys

import pytest
from helpers.procs import run_program, wait_readable
from helpers.said import says

TRAINING = """
    import os, select
    import torch

    model = torch.nn.Linear(2, 2)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1), torch.optim.Adam(model.parameters())]

    def train(steps):
        for _ in range(steps):
            model(torch.ones(1, 2)).sum().backward()
            for optimizer in optimizers:
                optimizer.step()
"""
STUCK = "os.read(os.pipe()[0], 1)"
SHOW_FINDER = (
    "import sys",
    "names = {type(finder).__name__ for finder in sys.meta_path}",
    "print('FINDER', '_Imports' in names, 'elasticrs' in sys.modules, flush=True)",
)


@pytest.fixture
def job(launch, worker_script):
    """Return a function that runs a training script as a job."""

    def start(source, *options, **more):
        script = worker_script(TRAINING + "\n".join(f"    {line}" for line in source))
        return launch(*options, script, **more)

    return start


def test_steps_of_a_child_do_not_hide_a_hang_nor_is_a_slow_exit_one_or_a_rank_without_steps(job):
    # All workers are forks of one process that has imported torch.
    source = [
        "if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0':",
        "    train(5)",
        "    if os.fork() == 0:",
        "        while True:",
        "            optimizers[0].step()",
        "            os.write(1, b'CHILD\\n')",
        "            select.select([], [], [], 0.1)",
        f"    {STUCK}",
        "elif os.environ['LOCAL_RANK'] == '0':",
        "    import atexit",
        "    atexit.register(select.select, [], [], [], 6)",
        "    train(25)",
        "else:",
        "    os.read(0, 1)",
    ]
    warm = "--warm=torch,torch._dynamo"
    options = ("--nproc-per-node=2", warm, "--hang-timeout=3", "--max-restarts=1")
    launched = job(source, *options, stdin=subprocess.PIPE)
    launched.wait_for_line("restarting")
    assert launched.stdout.count("CHILD\n") > 1
    # With two optimizers, only the steps of the first one are counted.
    says(launched.stderr, "hung", "limit 3 s", "after optimizer step 5 of this attempt", "in <module> (")
    launched.wait_for_line("local rank 1 .*not watched", stream="stderr")
    launched.wait_for_line("still exiting", stream="stderr")
    # Several limits long.
    assert not wait_readable(launched.pidfd, 2)
    launched.end_stdin()
    launched.exits(0, timeout=120)
    second = launched.stderr.partition("restarting")[2]
    says(second, "still exiting", "3 s")
    assert second.count("not watched") == 1
    assert "hung" not in second


def test_optimizer_steps_do_not_count_after_an_explicit_heartbeat(job):
    source = [
        *SHOW_FINDER,
        "from torch.optim.optimizer import _global_optimizer_post_hooks as hooks",
        "print('HOOKS', len(hooks), flush=True)",
        *("train(5)", "from elasticrs.timer import heartbeat", "heartbeat(700)", "train(5)", STUCK),
    ]
    launched = job(source, "--hang-timeout=2").exits(1, timeout=120)
    assert launched.stdout == "FINDER False True\nHOOKS 1\n"
    says(launched.stderr, "hung", "stopped at step 700;")


def test_steps_are_counted_without_hang_timeout_but_no_heartbeat_is_sent(job):
    source = [
        *SHOW_FINDER,
        "train(2)",
        "import elasticrs._engine.inside.heartbeats as heartbeats",
        "print('SENT', heartbeats._count, flush=True)",
    ]
    launched = job(source).exits(0, timeout=120)
    assert launched.stdout == "FINDER False True\nSENT 0\n"


COMPILED = """
import sys
import torch
from elasticrs._engine.inside.heartbeats import beat_with_steps

beat_with_steps(sys.modules["torch.optim.optimizer"])
model = torch.nn.Linear(2, 2)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = torch.compile(optimizer.step, backend="eager")
for _ in range(5):
    model(torch.ones(1, 2)).sum().backward()
    step()
"""


@pytest.mark.slow
def test_compiled_optimizer_steps_are_traced_without_a_warning():
    done = run_program([sys.executable, "-c", COMPILED], timeout=120, check=True)
    assert "Python extension" not in done.stderr


@pytest.mark.parametrize("method", ["spawn", "fork", "forkserver"])
def test_steps_of_function_workers_are_seen(launch, worker_script, tmp_path, method):
    package = tmp_path / "modules" / "torch" / "optim"
    package.mkdir(parents=True)
    (package.parent / "__init__.py").touch()
    (package / "__init__.py").touch()
    (package / "optimizer.py").write_text(
        "hooks = []\nregister_optimizer_step_post_hook = hooks.append\nclass Optimizer:\n    zero_grad = id\n"
    )
    script = worker_script("from torch.optim.optimizer import hooks; print('HOOKS', len(hooks))")
    options = ("--run-path", f"--start-method={method}", "--nproc-per-node=1", "--hang-timeout=60")
    job = launch(*options, script, env={"PYTHONPATH": str(package.parent.parent)})
    job.exits(0)
    says(job.stdout, "HOOKS 1")
