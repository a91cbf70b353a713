"""Jobs of ``train.sbatch`` that get signals, or that Slurm stops and queues again, lose no step."""

import os
import random
import re
import signal
import sys
from pathlib import Path

import pytest
from helpers import procs
from helpers.nodes import WORKERS

SCRIPT = Path(__file__).resolve().parents[2] / "contrib/slurm/train.sbatch"
REQUEUES = int(os.environ.get("ELASTICRS_TEST_REQUEUES", "3"))

# Programs in the place of Slurm's srun and of elasticrun.
SRUN = """#!/bin/sh
SLURM_PROCID=0 exec "$@"
"""
ELASTICRUN = """#!/usr/bin/env python3
import os, signal, sys

def tell(signum, _frame):
    os.write(1, f"GOT {signal.Signals(signum).name}\\n".encode())
    if signum == signal.SIGTERM:
        sys.exit(5)

for signum in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(signum, tell)
os.write(1, f"TASK {os.getppid()}\\n".encode())
while True:
    signal.pause()
"""


def install(folder, elasticrun):
    for name, text in (("srun", SRUN), ("elasticrun", elasticrun)):
        (folder / name).write_text(text, encoding="utf-8")
        (folder / name).chmod(0o755)


def test_a_signal_to_a_task_of_the_batch_script_reaches_its_agent(launch, tmp_path):
    install(tmp_path, ELASTICRUN)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "4"}
    job = launch(argv=["bash", str(SCRIPT)], env=env, cwd=tmp_path)
    task = int(job.wait_for_line(r"^TASK (\d+)$")[1])
    # With control groups, Slurm signals only the processes that it has started itself.
    for number, signum in enumerate((signal.SIGUSR1, signal.SIGUSR2, signal.SIGUSR1), 1):
        os.kill(task, signum)
        assert job.wait_for_lines(r"^GOT (\w+)$", number)[-1][1] == signum.name
    os.kill(task, signal.SIGTERM)
    job.exits(5)
    assert not list(tmp_path.glob("exit-code-*"))


SLOW_TO_SAVE = f"""
    import runpy, signal, sys, torch
    from pathlib import Path

    def save(*arguments, inner=torch.save):
        while not Path("may-save").exists():
            signal.sigtimedwait([], 0.01)
        inner(*arguments)

    torch.save = save
    sys.argv = ["train.py", "plain", "save", "."]
    runpy.run_path({str(WORKERS / "agreed_training.py")!r}, run_name="__main__")
"""


@pytest.mark.slow
@pytest.mark.torch
def test_a_sigterm_that_reaches_the_agent_twice_lets_its_workers_save(launch, worker_script, tmp_path):
    elasticrun = f"""#!/bin/sh
        exec env -u SLURM_JOB_ID -u SLURM_JOB_NUM_NODES OMP_NUM_THREADS=1 GLOO_SOCKET_IFNAME=lo \\
            {sys.executable} -m elasticrs.launch --nproc-per-node=2 {worker_script(SLOW_TO_SAVE)}
    """
    install(tmp_path, elasticrun)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "1", "SLURM_JOB_NUM_NODES": "4"}
    job = launch(argv=["bash", str(SCRIPT)], env={**env, "STEPS": "1000000"}, cwd=tmp_path)
    job.wait_for_lines(r"^BEGUN \d$", 2)
    (shell,) = [each.pid for each in job.descendants() if each.ppid == job.pid]
    # Without control groups, Slurm signals the process group of the task. The shell passes the signal on when
    # it gets a processor.
    os.kill(shell, signal.SIGSTOP)
    os.killpg(job.pid, signal.SIGTERM)
    job.wait_for_lines(r"^ACTED \d \d+ end", 2)
    job.read_for(0.15)
    os.kill(shell, signal.SIGCONT)
    job.wait_for_line("SIGTERM counts as the stop request", "stderr")
    (tmp_path / "may-save").touch()
    job.exits(1)
    acted = re.findall(r"^ACTED \d (\d+ end \w+)$", job.stdout, re.MULTILINE)
    assert len(acted) == 2
    assert len(set(acted)) == 1
    assert (tmp_path / "checkpoint").exists()


PLAIN = f"""
    import os, pathlib, runpy, sys, torch

    saved = pathlib.Path("checkpoint")
    os.write(1, f"FROM {{torch.load(saved)['step'] if saved.exists() else 0}}\\n".encode())
    sys.argv = ["train.py", "plain", "save", "."]
    runpy.run_path({str(WORKERS / "agreed_training.py")!r}, run_name="__main__")
"""


@pytest.mark.privileged
@pytest.mark.slow
@pytest.mark.torch
@pytest.mark.timeout(120 * REQUEUES)
def test_a_job_goes_on_at_the_step_at_which_slurm_queued_it_again(cluster, worker_script, tmp_path):
    slurm, moments = cluster(3), random.Random(3)
    worker_script(PLAIN, "train.py")
    # Write the output of each task to a file of its own, because srun may end before the tasks.
    exported = f"ALL,OMP_NUM_THREADS=1,STEPS={1000 * REQUEUES},SLURM_STDOUTMODE=task-%t"
    options = (f"--chdir={tmp_path}", "--nodes=3", "--gpus-per-node=0", f"--export={exported}")
    slurm.run("sbatch", *options, "--output=batch", "--open-mode=append", SCRIPT)

    def lines(pattern, count):
        def found():
            texts = [each.read_text(encoding="utf-8") for each in tmp_path.glob("task-*")]
            return [re.findall(pattern, each, re.MULTILINE) for each in texts]

        def are_enough(found):
            return len(found) == 3 and all(len(each) >= count for each in found)

        return {each[count - 1] for each in procs.wait_until(found, are_enough)}

    for number in range(1, REQUEUES + 1):
        lines(r"^(BEGUN) \d$", number)
        signal.sigtimedwait([], moments.uniform(0, 0.3))
        slurm.run("scontrol", "requeue", "1")
        acted = lines(r"^ACTED \d (\d+) end (\w+)$", number)
        assert len(acted) == 1
        assert lines(r"^FROM (\d+)$", number + 1) == {acted.pop()[0]}
    lines(r"^(BEGUN) \d$", REQUEUES + 1)
    slurm.run("scancel", "1")
    assert len(lines(r"^ACTED \d (\d+) end (\w+)$", REQUEUES + 1)) == 1
    procs.wait_until(slurm.queue, "".__eq__)
    assert slurm.job(1)["Restarts"] == str(REQUEUES)
    for node in slurm.nodes:
        node.wait_empty()
