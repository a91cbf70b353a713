"""Jobs in a real Slurm, started with `srun elasticrun train.py`."""

import os
import re
import signal
from pathlib import Path

import pytest
from helpers import procs
from helpers.nodes import READY, WORKERS, Worker
from helpers.said import says

pytestmark = pytest.mark.privileged

CONTRIB = Path(__file__).resolve().parents[2] / "contrib/slurm"
RANKS = WORKERS / "ranks.py"


@pytest.fixture
def submit(cluster, launch, tmp_path):
    """Return a function that starts a Slurm cluster of N nodes and runs a user's command in it."""

    def start(nodes, *command, **env):
        slurm = cluster(nodes)
        return slurm, launch(argv=slurm.prefix(*command), env={**slurm.env, **env}, cwd=tmp_path)

    return start


def parsed(lines):
    return sorted((Worker.parse(line[1]) for line in lines), key=lambda each: each.rank)


def workers(launched, count):
    """Return the first ``count`` workers that report themselves, sorted by rank."""
    return parsed(launched.wait_for_lines(READY.pattern, count, "stdout"))


def succeed(workers):
    for each in workers:
        os.kill(each.pid, signal.SIGUSR1)


def ended(slurm, job):
    """Wait until a job has finished, and return its state."""
    running = ("PENDING", "RUNNING", "COMPLETING", "CONFIGURING")
    return procs.wait_until(lambda: slurm.job(job)["JobState"], lambda state: state not in running)


def test_srun_elasticrun_forms_a_job_without_further_options(submit):
    slurm, job = submit(2, "srun", "-N2", "elasticrun", RANKS)
    found = workers(job, 2)
    # The ranks follow the order of Slurm's nodes.
    assert [(each.rank, each.host, each.world) for each in found] == [(0, "node2", 2), (1, "node3", 2)]
    assert {each.run for each in found} == {"1.0"}
    for number in (0, 1):
        job.wait_for_line(rf"Slurm job 1: 2 nodes, this is number {number}, meeting at node2:\d+")
    succeed(found)
    job.exits(0)
    for node in slurm.nodes:
        node.wait_empty()


@pytest.mark.slow
def test_the_other_nodes_continue_without_a_lost_node(submit):
    slurm, job = submit(
        3,
        *("srun", "-N3", "--no-kill", "elasticrun"),
        *("--nnodes=2:3", "--rdzv-conf=keep_alive_interval=0.4,last_call_timeout=5", RANKS),
        SLURM_NO_KILL="set",
    )
    assert [each.host for each in workers(job, 3)] == ["node2", "node3", "node4"]
    slurm.nodes[-1].power_off()
    again = parsed(job.wait_for_lines(READY.pattern, 5, "stdout")[3:])
    assert [(each.host, each.world) for each in again] == [("node2", 2), ("node3", 2)]
    succeed(again)
    job.wait()
    assert ended(slurm, 1) == "COMPLETED"
    assert "--no-kill" not in job.stderr


def test_a_step_may_use_fewer_nodes_than_its_slurm_job(submit):
    script = f"#!/bin/sh\nsrun -N1 elasticrun {RANKS}; srun -N2 -r1 elasticrun --max-restarts=1 {RANKS}\n"
    _, job = submit(3, "salloc", "-N3", "sh", "-c", script)
    (alone,) = workers(job, 1)
    assert (alone.host, alone.world) == ("node2", 1)
    job.wait_for_line("Slurm job 1: 1 node")
    succeed([alone])
    pair = parsed(job.wait_for_lines(READY.pattern, 3, "stdout")[1:])
    assert [(each.host, each.world) for each in pair] == [("node3", 2), ("node4", 2)]
    assert {each.run for each in pair} == {"1.1"}
    succeed(pair)
    job.exits(0)


def test_components_of_a_heterogeneous_job_form_one_elasticrun_job(submit):
    _, job = submit(2, "srun", "-N1", "elasticrun", RANKS, ":", "-N1", "elasticrun", RANKS)
    found = workers(job, 2)
    assert [(each.host, each.world) for each in found] == [("node2", 2), ("node3", 2)]
    succeed(found)
    job.exits(0)


@pytest.mark.parametrize("options", [(), ("--standalone",)])
def test_a_launcher_in_only_one_of_several_tasks_runs_or_says_at_once_what_is_wrong(submit, options):
    in_task_0 = 'test "$SLURM_PROCID" != 0 || exec elasticrun "$@"'
    _, job = submit(1, "srun", "-N1", "-n4", "sh", "-c", in_task_0, "sh", *options, RANKS)
    if options:
        succeed(workers(job, 1))
        job.exits(0)
    else:
        job.exits(2)
        says(job.stderr, "SLURM_STEP_TASKS_PER_NODE=4", "--standalone")


IN_A_TERMINAL = ("python3", "-c", "import os, pty, sys; os._exit(pty.spawn(sys.argv[1:]) >> 8)")


def test_a_launcher_in_a_shell_of_srun_uses_only_its_node(submit):
    shell = ("srun", "-N2", "--pty", "sh", "-c", f'[ "$SLURM_NODEID" != 0 ] || elasticrun {RANKS}; exit $?')
    _, job = submit(2, *IN_A_TERMINAL, *shell)
    (alone,) = workers(job, 1)
    assert (alone.host, alone.world) == ("node2", 1)
    succeed([alone])
    job.exits(0)


def test_a_launcher_in_a_worker_runs_a_job_of_its_own(submit, worker_script):
    script = worker_script(f"""
        import subprocess, sys
        sys.exit(subprocess.call(["elasticrun", "--nproc-per-node=2", {str(RANKS)!r}]))
    """)
    _, job = submit(2, "srun", "-N2", "elasticrun", script)
    found = workers(job, 4)
    assert sorted((each.host, each.rank, each.world) for each in found) == [
        *(("node2", 0, 2), ("node2", 1, 2)),
        *(("node3", 0, 2), ("node3", 1, 2)),
    ]
    succeed(found)
    job.exits(0)


def test_a_slurm_allocation_is_not_used_without_srun(submit):
    _, job = submit(2, "salloc", "-N2", "elasticrun", RANKS)
    (alone,) = workers(job, 1)
    assert (alone.host, alone.world) == ("node1", 1)
    job.wait_for_line("Slurm job 1 is not used: start elasticrun with srun")
    succeed([alone])
    job.exits(0)


def test_a_batch_script_without_srun_uses_one_node(cluster, tmp_path):
    slurm, out = cluster(2), tmp_path / "out"
    slurm.run("sbatch", "-N2", "-o", out, "--wrap", "elasticrun --no-python true")
    assert ended(slurm, 1) == "COMPLETED"
    text = out.read_text(encoding="utf-8")
    assert "Slurm job 1: 1 node\n" in text
    assert "Slurm job 1 has 2 nodes, but only this one is used: start elasticrun with srun" in text


def test_a_signal_from_slurm_reaches_each_worker_once_it_has_a_handler(submit, worker_script):
    script = worker_script("""
        import os, signal, sys

        def tell(text):
            # A single write, because the lines of other workers may come between two.
            os.write(1, f"{text}\\n".encode())

        tell("IMPORTING")
        if os.environ["RANK"] == "3":
            # This worker is late: the signal would kill it now.
            open(os.environ["GATE"]).read()
        signal.signal(signal.SIGUSR1, lambda *_: sys.exit(tell("SAVED " + os.environ["RANK"])))
        tell("READY")
        while True:
            signal.pause()
    """)
    gate = script.with_name("gate")
    os.mkfifo(gate)
    slurm, job = submit(2, "srun", "-N2", "elasticrun", "--nproc-per-node=2", script, GATE=str(gate))
    job.wait_for_lines("^IMPORTING$", 4, "stdout")
    job.wait_for_lines("^READY$", 3, "stdout")
    # Slurm delivers the signal of `--signal=USR1@SECONDS` in the same way.
    slurm.run("scancel", "--signal=USR1", "1")
    job.wait_for_lines(r"^SAVED (\d)$", 3, "stdout")
    gate.write_text("")
    saved = job.wait_for_lines(r"^SAVED (\d)$", 4, "stdout")
    assert sorted(line[1] for line in saved) == ["0", "1", "2", "3"]
    job.exits(0)


def test_a_cancelled_job_leaves_no_processes(submit):
    slurm, job = submit(2, "srun", "-N2", "elasticrun", "--nproc-per-node=2", RANKS)
    workers(job, 4)
    slurm.run("scancel", "1")
    job.wait()
    assert ended(slurm, 1) == "CANCELLED"
    for node in slurm.nodes:
        node.wait_empty()


class TestBatchScripts:
    """The scripts in contrib/."""

    def submit(self, slurm, script, folder, *options, **env):
        exported = ",".join(["ALL", *(f"{name}={value}" for name, value in env.items())])
        command = ("sbatch", f"--chdir={folder}", "--gpus-per-node=0", f"--export={exported}", *options)
        return slurm.run(*command, CONTRIB / script)

    @pytest.mark.slow
    def test_a_job_with_an_unfit_first_node_is_requeued(self, cluster, worker_script, tmp_path):
        slurm = cluster(3)
        worker_script("print('TRAINED', flush=True)", "train.py")
        # The check fails on the first node, but only in the first run of the job.
        check = tmp_path / "check.sh"
        check.write_text('#!/bin/sh\n[ "$SLURM_NODEID" != 0 ] || [ -n "$SLURM_RESTART_COUNT" ]\n')
        check.chmod(0o755)
        output = ("--nodes=3", "--output=%j-%a.out", "--open-mode=append")
        self.submit(slurm, "train.sbatch", tmp_path, *output, PET_NODE_CHECK=str(check))
        procs.wait_until(lambda: slurm.job(1)["Restarts"], "1".__eq__)
        assert ended(slurm, 1) == "COMPLETED", f"{slurm.job(1)}\n{slurm.logs()}"
        (out,) = tmp_path.glob("*.out")
        text = out.read_text(encoding="utf-8")
        assert len(re.findall("^TRAINED$", text, re.MULTILINE)) == 3, text + slurm.logs()

    @pytest.mark.slow
    def test_the_next_array_task_runs_after_a_stopped_task(self, cluster, worker_script, tmp_path):
        slurm = cluster(2)
        # The first two jobs are stopped as if they had reached their time limit. The third one finishes.
        worker_script(
            """
            import os, subprocess, signal

            task = os.environ["SLURM_ARRAY_TASK_ID"]
            if os.environ["RANK"] == "0":
                print("TASK", task, os.environ["TORCHELASTIC_RUN_ID"], flush=True)
                if task != "3":
                    step = os.environ["SLURM_JOB_ID"] + ".0"
                    subprocess.run(["scancel", "--signal=TERM", step], check=True)
            if task != "3":
                signal.pause()
            """,
            "train.py",
        )
        self.submit(slurm, "spares.sbatch", tmp_path, "--nodes=2", "--output=out", "--open-mode=append")
        procs.wait_until(slurm.queue, "".__eq__)
        text = (tmp_path / "out").read_text(encoding="utf-8")
        tasks = re.findall(r"^TASK (\d+) (\S+)$", text, re.MULTILINE)
        assert tasks == [("1", "1_1.0"), ("2", "1_2.0"), ("3", "1_3.0")], text
