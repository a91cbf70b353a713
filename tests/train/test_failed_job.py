"""A worker that joins a failed job does not return as if the training were done."""

import sys

from helpers.procs import run_program
from helpers.said import says

PROGRAM = """
from elasticrs._engine.nodes.transport.coordination import Server
from elasticrs.train import NonRetryableException, groups
from elasticrs.train.p2p import CoordinatorP2P

# PyTorch is not needed before there is a round.
groups.destroy = lambda: None
server = Server([("127.0.0.1", 0)], run_id="job")
conf = "is_host=0&join_timeout=0.3&close_timeout=1"
url = f"elasticrs://127.0.0.1:{server.port}/job?min_workers=2&max_workers=2&{conf}"
for _ in range(2):
    worker = CoordinatorP2P("gloo", url, 2)
    try:
        worker.rendezvous_barrier()
    except NonRetryableException as error:
        print(worker.should_stop_training(), error)
"""


def test_a_worker_that_joins_a_timed_out_job_fails_with_the_reason():
    done = run_program([sys.executable, "-c", PROGRAM], check=True)
    first, late = done.stdout.splitlines()
    says(first, "False", "1", "2", "join_timeout")
    says(late, "False", "job job", "closed", "timeout")
