"""Many kills at random moments. A failure prints the seed, and ``SOAK_SEED`` repeats the run."""

import os
import random
import signal

import pytest
from helpers import procs
from helpers.steady import EXIT_0, EXIT_1, SteadyJob, send

pytestmark = [pytest.mark.slow, pytest.mark.beyond_torchrun, pytest.mark.timeout(300)]

KILLS = 200
N = 4


@pytest.fixture
def rng(record_property):
    seed = int(os.environ.get("SOAK_SEED", random.SystemRandom().randrange(10**6)))
    record_property("seed", seed)
    print(f"SOAK_SEED={seed}")
    return random.Random(seed)


def test_one_job_survives_200_kills(launch, tmp_path, rng):
    job = SteadyJob(launch, tmp_path, N, "--max-restarts", str(KILLS), "--shutdown-timeout", "5")
    for attempt in range(KILLS):
        # Kill at a random moment after the first worker has reported. Some workers may not have started yet.
        pids = list(job.ready(attempt, count=rng.randint(1, N)).values())
        job.launched.read_for(rng.uniform(0.0, 0.02))
        if rng.random() < 0.1:
            send(job.nursery(), signal.SIGKILL)
        else:
            for pid in rng.sample(pids, rng.randint(1, len(pids))):
                send(pid, rng.choice([signal.SIGKILL, signal.SIGSEGV, EXIT_1]))
    for pid in job.ready(KILLS).values():
        send(pid, EXIT_0)
    assert job.launched.wait() == 0, job.launched.stderr
    job.check_logs()


@pytest.mark.parametrize("batch", range(5))
def test_a_launcher_killed_at_a_random_moment_leaves_no_processes(launch, tmp_path, rng, batch):
    for number in range(20):
        folder = tmp_path / str(number)
        folder.mkdir()
        job = SteadyJob(launch, folder, N)
        job.launched.read_for(rng.uniform(0.0, 0.2))
        job.launched.signal(signal.SIGKILL)
        assert job.launched.wait() == -signal.SIGKILL
        procs.reap_adopted()
        job.check_logs(is_console_complete=False)
