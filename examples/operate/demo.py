"""Operates the training in `train.py`, as a user would. Three nodes (three agents on this machine) train.
`elasticctl` shows their state, saves checkpoints, restarts and stops the training, and drains (removes) a
node. A browser opens the page of the job.

Prints what happened. Exits with 1 if a promise is broken: the ranks did not act after the same step, a step
was lost, or the training that was stopped did not continue like one that was never stopped.
"""

import argparse
import http.client
import json
import os
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from agents import Job
from browser import Browser, find_browser

NODES = 3
MORE = 60
"""Number of training steps between the stop and the comparison of the parameters."""
PACE = 0.02
"""Seconds that a rank waits after each training step, so that the training lasts while the demo acts."""


class Demo:
    """Runs the training, and records what the runs have shown, and which promises they have broken."""

    def __init__(self, folder: Path, pictures: Path | None) -> None:
        self.account: list[str] = []
        self.broken: list[str] = []
        self._folder, self._pictures = folder, pictures
        self._variables = {"ELASTICRS_CONTROL_DIR": str(folder / "control")}

    def start(self, checkpoint: str, *arguments: str) -> Job:
        """Start a job of three nodes that continues from this checkpoint file. Wait until all ranks train."""
        with socket.create_server(("localhost", 0)) as free:
            port = free.getsockname()[1]
        where = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"localhost:{port}", "--rdzv-id", "demo"]
        options = ["--nnodes", f"2:{NODES}", "--nproc-per-node", "1", *where, "--warm", "auto"]
        program = [str(Path(__file__).with_name("train.py")), "--checkpoint", str(self._folder / checkpoint)]
        command = [sys.executable, "-m", "elasticrs.launch", *options, *program, *arguments]
        print(f"\n$ {' '.join(['elasticrun', *command[3:]])}    # on each of {NODES} nodes", flush=True)
        job = Job(command, self._variables, limit=150.0)
        for node in range(NODES):
            page = ["--health-check-port", "0"] if node == 0 else []
            job.start("--rdzv-conf", f"is_host={int(node == 0)},last_call_timeout=2", *page, node=node)
            job.wait_for_port(port)
        job.read(rf"of {NODES} continues at step", NODES)
        return job

    def ask(self, job: Job, *words: str, agent: int = 0, shows: bool = True) -> str:
        """Run `elasticctl` for the agent with this number. Return its output, and print it if ``shows``."""
        if shows:
            print(f"\n$ elasticctl {' '.join(words)}", flush=True)
        command = [sys.executable, "-m", "elasticrs.ctl", *words, "--job", str(job.agents[agent].pid)]
        with subprocess.Popen(
            command, env={**os.environ, **self._variables}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
        ) as asked:
            # Meanwhile, read what the agents print, because they would wait if their pipes were full.
            while asked.poll() is None:
                job.read_some(0.1)
            assert asked.stdout is not None
            said = asked.stdout.read().decode()
        if shows:
            print(said, end="", flush=True)
        if asked.returncode:
            self.broken.append(f"elasticctl {words[0]} ended with {asked.returncode}")
        return said

    def asked_step(self, job: Job, wish: str, before: int) -> int:
        """Return the step after which all ranks were asked to "save" or to "stop", as ``wish`` says. Skip the
        first ``before`` lines about such requests.
        """
        found = job.read(rf"rank \d+ is asked to {wish} after step (\d+)", before + NODES)[before:]
        steps = {int(each[1]) for each in found}
        if len(found) != NODES or len(steps) != 1:
            self.broken.append(f"the ranks were asked to {wish} after the steps {sorted(steps)}")
        return max(steps, default=-1)

    def lost(self, job: Job, ranks: int, step: int, begun: int) -> int:
        """Wait until this number of ranks has printed at which step each continues. Skip the first ``begun``
        of these lines. Return how many steps up to ``step`` are lost, so that they are made again.
        """
        found = job.read(rf"of {ranks} continues at step (\d+)", begun + ranks)[begun:]
        lost = max((step - int(each[1]) for each in found), default=step)
        if lost or len(found) != ranks:
            self.broken.append(f"{lost} steps lost, {len(found)} of {ranks} ranks continued")
        return lost

    def open_page(self, job: Job) -> None:
        """Open the job's status page in a browser. Without a browser, read over HTTP what it would show."""
        (found,) = job.read(r"health check server on http://(127\.0\.0\.1:\d+)")[:1] or [None]
        if found is None:
            self.broken.append("the first agent has no page")
            return
        program, words = find_browser(), f"running with {NODES} ranks on {NODES} nodes"
        if program is None:
            sentence = sentence_of(found[1])
            how = "read over HTTP, because no chromium is installed"
        else:
            with closing(Browser(program)) as browser:
                browser.open(f"http://{found[1]}/")
                text = browser.wait_for(words)
                for rank in range(NODES):  # The ranks of other nodes appear on the page some moments later.
                    browser.wait_for(f"\n{rank}\t")
                sentence = next(line for line in text.splitlines() if words in line)
                how = f"in {Path(program).name}"
                if self._pictures is not None:
                    self._pictures.mkdir(parents=True, exist_ok=True)
                    for theme in ("light", "dark"):
                        browser.open(f"http://{found[1]}/", height=700, is_dark=theme == "dark")
                        for rank in range(NODES):
                            browser.wait_for(f"\n{rank}\t")
                        (self._pictures / f"page-{theme}.png").write_bytes(browser.picture())
                    how += f", pictures in {self._pictures}"
        if words not in sentence:
            self.broken.append(f"the page says {sentence!r}")
        self.account.append(f"page ({how}): {sentence}")


def sentence_of(address: str) -> str:
    """Return the first sentence that the status page at this address shows."""
    with closing(http.client.HTTPConnection(address, timeout=30)) as connection:
        connection.request("GET", "/status/stream")
        for line in connection.getresponse():
            if line.startswith(b"data: "):
                return str(json.loads(line.removeprefix(b"data: "))["view"]["sentence"])
    return "nothing"


def main(words: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--pictures", type=Path, help="folder for pictures of the page")
    arguments = parser.parse_args(words)
    with tempfile.TemporaryDirectory(prefix="operate_") as name:
        demo = Demo(Path(name), arguments.pictures)
        operate(demo)
    print("\n".join(["", *demo.account, *(f"NOT AS PROMISED: {each}" for each in demo.broken)]), flush=True)
    return 1 if demo.broken else 0


def operate(demo: Demo) -> None:
    job = demo.start("stopped.pt", "--pace", str(PACE), "--steps", "1000000")
    demo.open_page(job)
    demo.ask(job, "checkpoint")
    demo.account.append(f"checkpoint: all ranks after step {demo.asked_step(job, 'save', 0)}")
    stacks = demo.ask(job, "stacks")
    if "rank" not in stacks:
        demo.broken.append("elasticctl stacks shows no rank")
    demo.ask(job, "restart")
    step = demo.asked_step(job, "stop", 0)
    demo.account.append(
        f"restart: all ranks after step {step}, {demo.lost(job, NODES, step, NODES)} steps lost"
    )
    demo.ask(job, "stop")
    stopped = demo.asked_step(job, "stop", NODES)
    demo.account.append(f"stop: all ranks after step {stopped}")
    job.read()
    job.close()
    if stopped < 0:
        return

    compared = stopped + MORE
    again = demo.start("stopped.pt", "--pace", str(PACE), "--steps", "1000000", "--tell", str(compared))
    demo.account.append(f"started again: {demo.lost(again, NODES, stopped, 0)} steps lost")
    with_stop = again.read(rf"after step {compared}: sum of the parameters (\S+)")
    leaves = json.loads(demo.ask(again, "status", "--json", agent=NODES - 1, shows=False))
    demo.ask(again, "drain", str(leaves["group"]["rank"]))
    step = demo.asked_step(again, "stop", 0)
    lost = demo.lost(again, NODES - 1, step, 0)
    demo.account.append(f"drain of a node: all ranks after step {step}, {lost} steps lost")
    demo.ask(again, "stop")
    again.read()
    again.close()

    never = demo.start("never.pt", "--steps", str(compared))
    without = never.read(rf"after step {compared}: sum of the parameters (\S+)")
    never.read()
    never.close()
    sums = [found[0][1] if found else "missing" for found in (with_stop, without)]
    demo.account.append(f"parameters after step {compared}: {sums[0]} with a stop, {sums[1]} without")
    if sums[0] != sums[1] or "missing" in sums:
        demo.broken.append("the training that was stopped ended differently")


if __name__ == "__main__":
    sys.exit(main())
