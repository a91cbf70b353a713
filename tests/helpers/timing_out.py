"""A worker script in which one rank does not enter a collective of gloo, so that the collective times out."""

import textwrap

REDUCE = "distributed.all_reduce(ones)"

_SCRIPT = """
import atexit, os, select, threading
from datetime import timedelta
import torch
from torch import distributed
from elasticrs.timer import heartbeat
rank, local = int(os.environ["RANK"]), os.environ["LOCAL_RANK"]
def exit_slowly():
    # Usually, the exit of a process with torch takes longer than the answers of the others.
    for each in range(int(os.environ["LOCAL_WORLD_SIZE"])):
        path = os.environ["TORCHELASTIC_ERROR_FILE"].replace(f"/{local}/", f"/{each}/")
        while os.path.exists(path + ".flight_requests") and not os.path.exists(path + ".flight"):
            select.select([], [], [], 0.01)
distributed.init_process_group("gloo", timeout=timedelta(seconds=3))
ones = torch.ones(4)
distributed.all_reduce(ones)
heartbeat(7)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    atexit.register(exit_slowly)
    if rank == CULPRIT:
        INSTEAD
REDUCES
distributed.destroy_process_group()
"""


def script(culprit: int, instead: str = "threading.Event().wait()", reduces: str = REDUCE) -> str:
    """Return the script. Its first attempt runs ``reduces``; the rank ``culprit`` runs ``instead`` before."""
    reduces = textwrap.indent(reduces, " " * 4)
    return _SCRIPT.replace("CULPRIT", str(culprit)).replace("INSTEAD", instead).replace("REDUCES", reduces)
