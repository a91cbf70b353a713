"""A trainer that uses elasticrs.train under an agent; see `helpers/agent_trainers.py`.

`agent_trainer.py FOLDER NAME...`: its name is that with its local rank, its order is `FOLDER/NAME.json`.
"""

import faulthandler
import json
import os
import sys
import time
from pathlib import Path
from urllib.parse import urlencode

import acceptance
import torch

from elasticrs.train.rendezvous import MEMBER_VARIABLE, URL_VARIABLE


def main():
    folder = Path(sys.argv[1])
    name = sys.argv[2 + int(os.environ["LOCAL_RANK"])]
    order = json.loads((folder / f"{name}.json").read_text())
    told = os.open(folder / "told", os.O_WRONLY)

    def say(name, what, **more):
        text = json.dumps({"name": name, "what": what, "pid": os.getpid(), "at": time.monotonic(), **more})
        os.write(told, (text + "\n").encode())

    torch.set_num_threads(1)
    faulthandler.enable()
    if query := order.pop("query"):
        os.environ[URL_VARIABLE] += "&" + urlencode(query)
    _, _, before = os.environ[MEMBER_VARIABLE].partition(" ")
    if before:
        order |= {"name": name + "+", "faults": ()}
        say(order["name"], "up")
    else:
        order["name"] = name
        with open(folder / "gate") as gate:
            say(name, "up")
            # Wait at the gate, so that all trainers start at the same time.
            gate.read()
    acceptance.run(order, say)
    # Skip the interpreter's shutdown, because it takes half a second with torch.
    os._exit(0)


main()
