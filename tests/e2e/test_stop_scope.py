"""The first signal of a stop reaches only the worker, because the worker needs its helper processes while it
saves.
"""

import os
import signal
import sys

import pytest
from helpers.built import old_kernel

pytestmark = pytest.mark.beyond_torchrun

BEFORE_6_9 = old_kernel("group_signal")

HELPER = """
import os, select, signal, sys
def stop(signum, frame):
    os.write(2, f"HELPER {sys.argv[1]} {signal.Signals(signum).name}\\n".encode())
    os._exit(0)
signal.signal(signal.SIGTERM, stop)
os.write(1, b"up\\n")
# It waits only for short times: Python would not see a signal that comes right before a wait without an end.
while True:
    if select.select([0], [], [], 0.1)[0]:
        if not (text := os.read(0, 100)):
            break
        os.write(1, text)
# It outlives the worker.
while True:
    signal.sigtimedwait([], 0.1)
"""
WORKER = f"""
    import os, signal, subprocess, sys

    rank, last_waits_for = os.environ["RANK"], sys.argv[1]
    command = [sys.executable, "-S", "-c", {HELPER!r}, rank]
    helper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    helper.stdout.readline()
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    os.write(1, b"READY\\n")
    if rank == "0" and len(sys.argv) > 2:
        open(sys.argv[2]).read()
        os._exit(3)
    signal.sigwait([signal.SIGTERM])
    if last_waits_for == "helper":
        os.write(1, f"HELPER ENDED {{helper.wait()}}\\n".encode())
        os._exit(0)
    helper.stdin.write(b"part\\n")
    helper.stdin.flush()
    if helper.stdout.readline() == b"part\\n":
        os.write(1, f"SAVED {{rank}}\\n".encode())
    if rank == "1":
        open(last_waits_for).read()
    os._exit(0)
"""


@pytest.fixture
def fifos(tmp_path):
    """Return two FIFOs. A process that opens one of them for reading blocks until :func:`let_go`."""
    made = [tmp_path / "one", tmp_path / "other"]
    for path in made:
        os.mkfifo(path)
    return made


def let_go(fifo):
    os.close(os.open(fifo, os.O_WRONLY))


@pytest.mark.parametrize(
    ("options", "prefix"),
    [
        ((), ()),
        ((), BEFORE_6_9),
        (("--stop-scope", "worker", "--no-python", sys.executable), ()),
        (("--run-path",), ()),
        (("--run-path", "--start-method", "fork"), ()),
        (("--run-path", "--start-method", "forkserver"), ()),
    ],
)
def test_helper_processes_are_stopped_after_their_worker_has_exited(
    launch, worker_script, fifos, options, prefix
):
    fifo, _ = fifos
    launched = launch("--nproc-per-node", "2", *options, worker_script(WORKER), str(fifo), prefix=prefix)
    launched.wait_for_lines("READY", 2)
    launched.signal(signal.SIGTERM)
    saved = [match[1] for match in launched.wait_for_lines(r"SAVED (\d)", 2)]
    assert sorted(saved) == ["0", "1"]
    launched.wait_for_line("HELPER 0 SIGTERM", "stderr")
    assert "HELPER 1" not in launched.stderr
    let_go(fifo)
    launched.exits(1)


def test_a_stopped_worker_saves_while_its_helper_processes_run(launch, worker_script, fifos):
    fifo, other = fifos
    launched = launch("--nproc-per-node", "2", worker_script(WORKER), str(fifo), str(other))
    launched.wait_for_lines("READY", 2)
    let_go(other)
    launched.wait_for_line("SAVED 1")
    launched.wait_for_line("HELPER 0 SIGTERM", "stderr")
    assert "HELPER 1" not in launched.stderr
    let_go(fifo)
    launched.exits(1)


@pytest.mark.parametrize(
    ("options", "env"),
    [
        (("--stop-scope", "group"), {}),
        ((), {"PET_STOP_SCOPE": "group"}),
        (("--no-python", sys.executable), {}),
    ],
)
def test_stop_scope_group_or_no_python_signals_the_whole_process_group(launch, worker_script, options, env):
    launched = launch("--nproc-per-node", "2", *options, worker_script(WORKER), "helper", env=env)
    launched.wait_for_lines("READY", 2)
    launched.signal(signal.SIGTERM)
    launched.wait_for_lines("HELPER ENDED 0", 2)
    launched.exits(1)


def test_a_stop_signal_reaches_function_workers_before_linux_6_9(launch, worker_script, fifos):
    # Before Linux 6.9, only the keeper (the parent process of these workers) may signal their groups.
    fifo, _ = fifos
    options = ("--nproc-per-node", "2", "--run-path", "--start-method", "fork", "--stop-scope", "group")
    launched = launch(*options, worker_script(WORKER), str(fifo), prefix=BEFORE_6_9)
    launched.wait_for_lines("READY", 2)
    launched.signal(signal.SIGTERM)
    launched.wait_for_lines("SAVED", 2)
    let_go(fifo)
    launched.exits(1)


LOADS = """
    import os, select, signal, sys
    import torch
    from torch.utils.data import DataLoader, Dataset

    class Numbers(Dataset):
        def __len__(self):
            return 1 << 30

        def __getitem__(self, index):
            return torch.tensor(index)

    def save(signum, frame):
        with open(f"{sys.argv[1]}/saved-{os.environ['RANK']}", "w") as file:
            for part in range(10):
                select.select([], [], [], 0.1)
                file.write(f"{part}\\n")
        os._exit(0)

    signal.signal(signal.SIGTERM, save)
    for step, _ in enumerate(DataLoader(Numbers(), num_workers=2)):
        if step == 2:
            os.write(1, b"TRAINS\\n")
"""


def test_all_ranks_save_while_their_data_loaders_run(launch_with_torch, worker_script, tmp_path):
    launched = launch_with_torch("--nproc-per-node", "2", worker_script(LOADS), str(tmp_path))
    launched.wait_for_lines("TRAINS", 2)
    launched.signal(signal.SIGTERM)
    launched.exits(1)
    parts = "".join(f"{part}\n" for part in range(10))
    assert [(tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)] == [parts, parts], launched.stderr
