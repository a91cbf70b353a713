"""Forks the ranks of gloo groups in which one rank diverges, for ``tests/verdicts``. All ranks share one
import of torch.

Each line on stdin is a list of plans as JSON; see ``collectives.py``. A plan also has ``error_file``, beside
which the rank leaves its evidence as a worker of a job does. The answer is a line with the pids. The next
line, or the end of stdin, kills the ranks.
"""

import json
import os
import signal
import sys

from collectives import join, run

from elasticrs._worker.flight import answer_with_record


def fork(plan):
    """Start a rank and return its pid."""
    pid = os.fork()
    if pid:
        return pid
    try:
        os.environ["TORCHELASTIC_ERROR_FILE"], os.environ["ELASTICRS_HEARTBEAT"] = plan["error_file"], ""
        groups = join(plan)
        answer_with_record()
        run(plan["steps"], groups, lambda: open(plan["error_file"], "w").close())
    finally:
        os._exit(1)


def main():
    for line in sys.stdin:
        pids = [fork(plan) for plan in json.loads(line)]
        print(json.dumps(pids), flush=True)
        sys.stdin.readline()
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for pid in pids:
            os.waitpid(pid, 0)
        print("null", flush=True)


main()
