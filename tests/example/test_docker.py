"""The container image of the examples: its Dockerfile, and elasticrun as process 1."""

import json
import os
import signal
import subprocess
from fnmatch import fnmatch
from pathlib import Path

import pytest
from helpers import procs

from elasticrs._engine.job.options import parse

ROOT = Path(__file__).parents[2]
DOCKERFILE = ROOT / "examples/docker/Dockerfile"


def stages():
    """Return the instructions of each Dockerfile stage, as pairs of a name and its arguments."""
    lines = DOCKERFILE.read_text(encoding="utf-8").replace("\\\n", " ").splitlines()
    found = []
    for line in lines:
        name, _, arguments = line.partition(" ")
        if name == "FROM":
            found.append([])
        elif name and name != "#" and found:
            found[-1].append((name, arguments))
    return found


def test_the_image_runs_a_valid_command_without_root_or_a_shell():
    *_, (*steps, entrypoint, command) = stages()
    image = dict(steps)
    assert (image["USER"], image["STOPSIGNAL"]) == ("train", "SIGTERM")
    assert (entrypoint[0], json.loads(entrypoint[1])) == ("ENTRYPOINT", ["elasticrun"])
    script = parse(json.loads(command[1]), {}).training_script
    assert script in {Path(source).name for source in image["COPY"].split()[:-1]}


def test_the_build_context_contains_all_copied_files():
    ignored = DOCKERFILE.with_suffix(".dockerignore").read_text(encoding="utf-8").splitlines()
    allowed = [line.removeprefix("!") for line in ignored if line.startswith("!")]
    copies = [arguments.split()[:-1] for stage in stages() for name, arguments in stage if name == "COPY"]
    sources = {source for each in copies for source in each if not each[0].startswith("--from")}
    assert sources >= {"dist/*.whl", "examples/fsdp2.py", "examples/task.py"}
    for source in sources:
        assert any(fnmatch(source, pattern) for pattern in allowed), source
        assert source.startswith("dist/") or (ROOT / source).exists(), source


@pytest.mark.privileged
@pytest.mark.parametrize("proc", [["--mount-proc"], []], ids=["own-proc", "proc-of-the-host"])
def test_process_1_reaps_orphans_and_lets_workers_save_at_the_stop_signal(launch, worker_script, proc):
    script = worker_script("""
        import os, signal
        def save(*_):
            os.write(1, b"SAVED\\n")
            os._exit(0)
        signal.signal(signal.SIGTERM, save)
        os.write(1, f"READY {os.getpid()}\\n".encode())
        while True:
            signal.pause()
    """)
    prefix = ("unshare", "--pid", "--fork", "--kill-child", *proc, "--")
    container = launch("--nproc-per-node", "2", script, prefix=prefix)
    container.wait_for_lines("READY", 2)
    (first,) = procs.children(container.pid)
    # As with `docker exec`, this process is not a descendant of the nursery, so process 1 adopts it.
    enter = ("nsenter", "--target", str(first.pid), "--pid", *(["--mount"] if proc else []), "--")
    subprocess.run([*enter, "setsid", "--fork", "sleep", "1000"], check=True)
    # Until `setsid` executes `sleep`, it may be in the session of this test, whose processes are not reaped.
    (orphan,) = procs.wait_until(
        lambda: [each for each in procs.children(first.pid) if each.command.startswith("sleep")]
    )
    os.kill(orphan.pid, signal.SIGKILL)
    procs.wait_until(lambda: procs.process(orphan.pid), lambda seen: seen is None)
    os.kill(first.pid, signal.SIGTERM)
    container.exits(1)
    assert container.stdout.count("SAVED") == 2
