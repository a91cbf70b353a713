"""``--on-failure replace``: a failed worker is replaced, and the others keep running."""

import os
import re
import signal

import pytest
from helpers import procs
from helpers.said import line_with

pytestmark = pytest.mark.beyond_torchrun

WAITS = """
    import os, signal, sys
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))
    rank, life = os.environ["LOCAL_RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    os.write(1, f"UP rank={rank} pid={os.getpid()} life={life}\\n".encode())
    while True:
        signal.pause()
"""
DAEMON = """
    import os, signal
    if (pid := os.fork()) == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        os.write(1, f"DAEMON rank={os.environ['LOCAL_RANK']} pid={os.getpid()}\\n".encode())
        signal.pause()
    os.waitpid(pid, 0)
"""

TRAINS = """
    import os, signal
    import torch
    from torch import distributed
    from elasticrs.train import AgentCoordinator, State, train

    class Steps(State):
        steps = torch.zeros(1)
        def sync(self, world_size, rank):
            distributed.all_reduce(self.steps, distributed.ReduceOp.MAX)
        def capture_snapshot(self):
            return self.steps.clone()
        def apply_snapshot(self, snapshot):
            self.steps = snapshot

    def step(state):
        if state.steps[0] == 20:
            raise StopIteration
        life = os.environ["LOCAL_RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
        if state.steps[0] == 5 and life == ("1", "0"):
            FAULT
        distributed.all_reduce(torch.ones(1))
        state.steps += 1
        return state, None

    done = int(train(AgentCoordinator("gloo"), step, Steps()).steps[0])
    os.write(1, f"DONE {done}.\\n".encode())
"""

UP = r"UP rank=(\d) pid=(\d+) life=(\d)"


def started(job, count):
    """Wait until ``count`` workers have started, and return their local ranks and pids."""
    return [(int(found[1]), int(found[2])) for found in job.wait_for_lines(UP, count, "stdout")]


def end(job, pids):
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)
    return job.wait()


@pytest.mark.parametrize("options", [(), ("--run-path",), ("--logs-specs=default", "--tee=3")])
def test_only_the_killed_worker_is_replaced(launch, worker_script, options):
    options = ("--nproc-per-node=3", "--max-restarts=2", "--on-failure=replace", *options)
    job = launch(*options, worker_script(WAITS))
    pids = dict(started(job, 3))
    os.kill(pids[1], signal.SIGKILL)
    rank, new = started(job, 4)[-1]
    assert rank == 1
    assert end(job, [pids[0], pids[2], new]) == 0
    (line,) = re.findall(
        rf"rank 1 \(pid {pids[1]}\) died by SIGKILL; replaced by pid {new} .* \(restart 1 of 2\)", job.stderr
    )
    assert re.search(r"in [\d.]+ ms", line)
    assert re.search(r"succeeded after .*\b1 restart\b", job.stderr)


@pytest.mark.parametrize(("given", "seen"), [({}, "0"), ({"TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}, "3")])
def test_on_failure_replace_disables_nccl_async_error_handling_unless_set(launch, worker_script, given, seen):
    script = worker_script("""
        import os
        os.write(1, f"NCCL {os.environ['TORCH_NCCL_ASYNC_ERROR_HANDLING']}.\\n".encode())
    """)
    job = launch("--on-failure=replace", script, env=given).exits(0)
    assert re.findall(r"NCCL (\d)\.", job.stdout) == [seen]


def test_workers_failing_before_the_next_rendezvous_cost_one_restart(launch, worker_script):
    meets = """
    import os
    from elasticrs._engine.workers.node_page import page_of
    page = page_of(os.environ)
    if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
        page.place(int(os.environ["LOCAL_RANK"]), 3, 1)
    """
    script = worker_script(meets + WAITS.replace("os._exit(0)", "(page.finish(), os._exit(0))"))
    job = launch("--nproc-per-node=3", "--max-restarts=1", "--on-failure=replace", script)
    pids = dict(started(job, 3))
    news = []
    for rank in (0, 2):
        os.kill(pids[rank], signal.SIGKILL)
        news.append(started(job, 4 + len(news))[-1][1])
    assert end(job, [pids[1], *news]) == 0
    assert len(re.findall(r"replaced by .* \(restart 1 of 1\)", job.stderr)) == 2


@pytest.mark.parametrize("options", [(), ("--warm=json",)], ids=["cold", "warm"])
def test_only_the_descendants_of_the_dead_worker_are_killed(launch, worker_script, options):
    options = ("--nproc-per-node=2", "--max-restarts=1", "--on-failure=replace", *options)
    job = launch(*options, worker_script(DAEMON + WAITS))
    pids = dict(started(job, 2))
    found = job.wait_for_lines(r"DAEMON rank=(\d) pid=(\d+)", 2)
    of = {int(each[1]): os.pidfd_open(int(each[2])) for each in found}
    try:
        os.kill(pids[0], signal.SIGKILL)
        _, new = started(job, 3)[-1]
        assert procs.wait_readable(of[0], procs.HANG)
        assert not procs.wait_readable(of[1], 0)
        end(job, [pids[1], new])
    finally:
        for fd in of.values():
            os.close(fd)


def test_stacks_and_flight_records_of_a_replaced_worker_are_set_aside(launch, worker_script, tmp_path):
    script = worker_script("""
        import ctypes, os, signal
        error_file, rank = os.environ["TORCHELASTIC_ERROR_FILE"], os.environ["RANK"]
        os.write(1, f"FOUND {os.path.exists(error_file + '.flight_dump_' + rank)} {os.getpid()}\\n".encode())
        for name in (".flight", ".flight_at_exit", f".flight_dump_{rank}"):
            open(error_file + name, "w").close()
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            ctypes.string_at(0)
        os.kill(os.getpid(), signal.SIGSEGV)
    """)
    options = ("--max-restarts=1", "--on-failure=replace", f"--log-dir={tmp_path}/logs")
    job = launch(*options, script).exits(1)
    (_, pid), _ = found = re.findall(r"FOUND (\w+) (\d+)", job.stdout)
    assert [is_there for is_there, _ in found] == ["False", "False"]
    names = [
        f"of_{pid}_error.json{end}" for end in (".fault", ".flight", ".flight_at_exit", ".flight_dump_0")
    ]
    files = {path.name: path for path in (tmp_path / "logs").glob("*/attempt_0/0/*")}
    assert set(names) <= files.keys()
    assert "string_at" in files[names[0]].read_text()
    assert "string_at" not in job.stderr


def test_a_file_that_cannot_be_set_aside_costs_no_restart(launch, worker_script, tmp_path):
    script = worker_script("""
        import os
        folder, name = os.path.split(os.environ["TORCHELASTIC_ERROR_FILE"])
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.mkdir(os.path.join(folder, f"of_{os.getpid()}_{name}"))
            open(os.path.join(folder, name + ".flight"), "w").close()
            raise ValueError("first")
    """)
    job = launch("--max-restarts=1", "--on-failure=replace", f"--log-dir={tmp_path}/logs", script).exits(0)
    line = line_with(job.stderr, "a file of the replaced worker is not renamed")
    assert line.endswith("/error.json")
    assert "1 restart charged" in job.stderr
    (path,) = (tmp_path / "logs").glob("*/attempt_0/0/of_*_error.json.flight")
    assert path.is_file()


def test_the_job_fails_with_the_last_failure_if_no_restart_is_left(launch, worker_script):
    script = worker_script("""
        import os, signal
        if os.environ["LOCAL_RANK"] == "1":
            raise ValueError(f"life {os.environ['TORCHELASTIC_RESTART_COUNT']}")
        signal.pause()
    """)
    job = launch("--nproc-per-node=2", "--max-restarts=2", "--on-failure=replace", script).exits(1)
    lines = re.findall(r"ValueError: life (\d) .*\(restart (\d) of 2\)", job.stderr)
    assert lines == [("0", "1"), ("1", "2")]
    report = job.stderr[job.stderr.index("Root Cause") :]
    assert "ValueError: life 2" in report


def test_a_replacement_appends_to_the_same_log_files(launch, worker_script, tmp_path):
    job = launch(
        *("--nproc-per-node=2", "--max-restarts=1", "--on-failure=replace", "--tee=3"),
        *("--log-dir", tmp_path, worker_script(WAITS)),
    )
    pids = dict(started(job, 2))
    os.kill(pids[1], signal.SIGKILL)
    _, new = started(job, 3)[-1]
    assert end(job, [pids[0], new]) == 0
    (file,) = tmp_path.glob("*/attempt_0/1/stdout.log")
    assert re.findall(UP, file.read_text()) == [("1", str(pids[1]), "0"), ("1", str(new), "1")]


def test_a_signal_stops_all_workers_after_a_replacement(launch, worker_script):
    job = launch("--nproc-per-node=2", "--max-restarts=1", "--on-failure=replace", worker_script(WAITS))
    pids = dict(started(job, 2))
    os.kill(pids[1], signal.SIGKILL)
    started(job, 3)
    os.kill(job.pid, signal.SIGTERM)
    assert job.wait() == 1


TRAINERS = {
    "none": "",
    "agent's": "import elasticrs._engine.workers.node_page as n, os; page = n.page_of(os.environ)",
    "own endpoint": "from elasticrs.train import CoordinatorP2P; "
    "made = CoordinatorP2P('gloo', 'elasticrs://127.0.0.1:1/job?min_workers=1&max_workers=1', 1)",
}


@pytest.mark.parametrize(("trains", "lines"), [("none", 1), ("agent's", 0), ("own endpoint", 0)])
def test_the_launcher_reports_that_no_worker_used_elasticrs_train(launch, worker_script, trains, lines):
    script = worker_script(TRAINERS[trains])
    job = launch("--on-failure=replace", script).exits(0)
    assert job.stderr.count("used elasticrs.train") == lines


def test_a_checkpoint_request_does_not_reach_workers_that_do_not_train(launch, worker_script):
    waits = WAITS.replace("SIGUSR1", "SIGUSR2")
    job = launch("--nproc-per-node=2", "--on-failure=replace", worker_script(waits))
    pids = dict(started(job, 2))
    job.signal(signal.SIGUSR1)
    job.wait_for_line("SIGUSR1 received: .*checkpoint", "stderr")
    for pid in pids.values():
        os.kill(pid, signal.SIGUSR2)
    assert job.wait() == 0
    assert "no checkpoint" in job.stderr
    assert "replaced by" not in job.stderr


@pytest.mark.slow
@pytest.mark.torch
def test_all_workers_of_a_training_program_restart_without_replace(launch, worker_script):
    script = worker_script(TRAINS.replace("FAULT", "os._exit(3)"))
    job = launch("--nproc-per-node=2", "--max-restarts=1", "--warm=torch", script).exits(0)
    assert job.stdout.count("DONE 20.") == 2
    assert re.search(r"succeeded after .*\b1 restart\b", job.stderr)


def test_a_hung_worker_is_replaced(launch, worker_script):
    beats = """
    import os, signal
    from elasticrs.timer import heartbeat
    signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))
    rank, life = os.environ["LOCAL_RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
    heartbeat(0)
    os.write(1, f"UP rank={rank} pid={os.getpid()} life={life}\\n".encode())
    while (rank, life) == ("1", "0"):
        signal.pause()
    step = 0
    while True:
        heartbeat(step := step + 1)
        signal.sigtimedwait([signal.SIGUSR2], 0.05)
    """
    options = ("--nproc-per-node=3", "--max-restarts=1", "--on-failure=replace", "--hang-timeout=2")
    job = launch(*options, worker_script(beats))
    pids = dict(started(job, 3))
    rank, new = started(job, 4)[-1]
    assert rank == 1
    assert end(job, [pids[0], pids[2], new]) == 0
    assert re.search(rf"rank 1 \(pid {pids[1]}\).*hung: .*replaced by pid {new}", job.stderr)


@pytest.mark.slow
@pytest.mark.torch
def test_the_training_loop_sends_heartbeats(launch, worker_script):
    script = worker_script(TRAINS.replace("FAULT", "while True: signal.pause()"))
    options = (
        "--nproc-per-node=2",
        "--max-restarts=1",
        "--on-failure=replace",
        "--warm=torch",
        "--hang-timeout=2",
    )
    job = launch(*options, script).exits(0)
    assert job.stdout.count("DONE 20.") == 2
    assert re.search(r"rank 1\b.*hung: .*\breplaced\b", job.stderr)
    assert job.stderr.count(" hung: ") == 1


def test_a_rank_that_waits_for_a_hung_worker_is_not_replaced(launch, worker_script, tmp_path):
    script = worker_script("""
        import os, signal, sys
        from elasticrs.timer import heartbeat

        ready, done = sys.argv[1:]
        rank, life = os.environ["LOCAL_RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
        os.write(1, f"UP rank={rank} life={life}\\n".encode())
        if rank == "0":
            is_there = os.open(ready, os.O_WRONLY)
            # Its heartbeat is the older one, but only when the other rank is there.
            heartbeat(0)
            os.write(is_there, b"x")
            os.read(os.open(done, os.O_RDONLY), 1)
        elif life == "0":
            os.read(os.open(ready, os.O_RDONLY), 1)
            heartbeat(0)
            os.kill(os.getpid(), signal.SIGSTOP)
        else:
            os.write(os.open(done, os.O_WRONLY), b"x")
    """)
    fifos = [tmp_path / name for name in ("ready", "done")]
    for fifo in fifos:
        os.mkfifo(fifo)
    options = ("--nproc-per-node=2", "--max-restarts=2", "--on-failure=replace", "--hang-timeout=2")
    job = launch(*options, script, *map(str, fifos)).exits(0)
    assert re.search(r"rank 1\b.*hung: .*\breplaced\b", job.stderr)
    assert (job.stderr.count(" hung: "), job.stdout.count("UP")) == (1, 3)


@pytest.mark.slow
@pytest.mark.torch
def test_a_worker_that_exits_with_0_during_training_counts_as_failed(launch, worker_script):
    script = worker_script(TRAINS.replace("FAULT", "os._exit(0)"))
    options = ("--nproc-per-node=2", "--max-restarts=1", "--on-failure=replace", "--warm=auto")
    job = launch(*options, script).exits(0)
    assert job.stdout.count("DONE 20.") == 2
    assert len(re.findall(r"rank \d .*code 0.* middle", job.stderr)) == 1
    assert re.search(r"rank \d .*code 0 before .*; restarting \(restart 1 of 1\)", job.stderr)
    assert "attempt 1 is running" in job.stderr


@pytest.mark.slow
@pytest.mark.torch
def test_a_custom_loop_that_closes_its_job_is_not_restarted(launch, worker_script):
    script = worker_script("""
        import os
        import elasticrs.train
        import torch
        from torch import distributed

        with elasticrs.train.on_change() as job:
            job.meet()
            job.init_process_group("gloo")
            distributed.all_reduce(torch.ones(1))
            job.passed()
            job.close()
        os.write(1, b"DONE.\\n")
    """)
    options = ("--nproc-per-node=2", "--max-restarts=1", "--on-failure=replace", "--warm=auto")
    job = launch(*options, script).exits(0)
    assert job.stdout.count("DONE.") == 2
    assert "restarting" not in job.stderr


def test_a_worker_that_its_timer_ended_is_replaced_although_it_exits_with_0(launch, worker_script):
    script = worker_script("""
        import os, signal, sys
        from elasticrs import timer

        rank, life = os.environ["LOCAL_RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]
        signal.signal(signal.SIGUSR1, lambda *_: os._exit(0))
        signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
        os.write(1, f"UP rank={rank} pid={os.getpid()} life={life}\\n".encode())
        if (rank, life) == ("1", "0"):
            timer.configure(timer.FileTimerClient(os.environ["TORCHELASTIC_TIMER_FILE"], signal.SIGTERM))
            with timer.expires(after=0.1):
                while True:
                    signal.pause()
        while True:
            signal.pause()
    """)
    options = ("--nproc-per-node=2", "--max-restarts=2", "--on-failure=replace")
    job = launch(*options, script, env={"TORCHELASTIC_ENABLE_FILE_TIMER": "1"})
    *first, (rank, new) = started(job, 3)
    assert rank == 1
    assert end(job, [dict(first)[0], new]) == 0, job.stderr
    assert "1 of 2" in job.stderr
