"""Programs written for torchelastic in 2019 and 2020 run unchanged under the alias."""

import json

import pytest
from helpers import ports
from helpers.trainers import store

pytestmark = [pytest.mark.torch]

STARTED_BY_HAND = """
import json, os, runpy, sys
import torch._dynamo  # The optimizers of torch import this module, which takes long.
for command in json.loads(sys.argv[1]):
    for rank in range(2):
        if os.fork() == 0:
            sys.argv[:] = command
            try:
                runpy.run_path(sys.argv[0], run_name="__main__")
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(sys.exc_info()[0] is not None)
    print("exit", *sorted(os.waitstatus_to_exitcode(os.wait()[1]) for rank in range(2)), flush=True)
"""
"""Torch is imported once for all programs; each child is then a process that somebody has started."""

OF_2019 = """
import os
import sys

import numpy
import torch
import torch.distributed as dist
import torchelastic
import torchelastic.distributed as edist
from torchelastic.worker_stats import WorkerStats  # noqa: F401
from torchelastic.p2p.coordinator_p2p import CoordinatorP2P


class ToyState(torchelastic.State):
    def __init__(self, limit):
        self.limit = limit
        self.nums = [1] * limit
        self.i = 0
        self.total = 0
        self.failed = False

    def capture_snapshot(self):
        return {"i": self.i, "total": self.total}

    def apply_snapshot(self, snapshot):
        self.i = snapshot["i"]
        self.total = snapshot["total"]

    def sync(self, world_size, rank):
        self.rank = rank
        if self.i >= self.limit:
            raise ValueError("no data are left")
        max_rank, self.i = edist.all_gather_return_max_long(self.i)
        self.total = edist.broadcast_long(self.total, src_rank=max_rank)
        array = numpy.array([7, 8], dtype=numpy.uint8) if rank == max_rank else None
        received = edist.broadcast_binary(array, max_rank)
        assert isinstance(received, numpy.ndarray) and received.tolist() == [7, 8], received
        model = torch.nn.Linear(1, 1)
        edist.broadcast_model(max_rank, model)
        assert edist.broadcast_float_list([rank], max_rank) == [max_rank]


def train_step(state):
    if state.i >= state.limit:
        raise StopIteration
    tensor = torch.tensor([state.nums[state.i]])
    dist.all_reduce(tensor)
    if state.i == 3 and state.rank == 1 and not state.failed:
        state.failed = True
        raise RuntimeError("a step that fails")
    state.total += int(tensor[0])
    state.i += 1
    return state, torchelastic.SimpleWorkerStats(progress_rate=1.0)


CoordinatorP2P.MONITOR_PROGRESS_FREQ = 5
coordinator = CoordinatorP2P(
    # A number from the environment, as it comes.
    c10d_backend="gloo",
    init_method=sys.argv[1],
    max_num_trainers=os.environ.get("MAX_SIZE", "2"),
    process_group_timeout=10000,
)
state = torchelastic.train(coordinator, train_step, ToyState(10))
assert coordinator.last_relative_prog_rate == 1
print(f"total {state.total}\\n", end="", flush=True)
"""

OF_2020 = """
import sys

import torch
import torch.nn.functional as functional
import torchelastic
import torchelastic.checkpoint as checkpoint
import torchelastic.distributed as edist
from torchelastic.worker_stats import WorkerStats  # noqa: F401
import torchelastic.event_logger as event_logger
import torchelastic.metrics as metrics
from torch.nn.parallel import DistributedDataParallel
from torchelastic.p2p import CoordinatorP2P
from torchelastic.rendezvous import RendezvousParameters
from torchelastic.utils.data import CyclingIterator, ElasticDistributedSampler

torch.manual_seed(0)
DATA = torch.utils.data.TensorDataset(torch.rand(40, 3))


class TrainState(torchelastic.State):
    def __init__(self, epochs):
        self.epochs = epochs
        self.epoch = 0
        self.batch = 0
        self.steps = 0
        self.model = torch.nn.Linear(3, 1)

    def capture_snapshot(self):
        weights = {name: value.clone() for name, value in self.model.state_dict().items()}
        return {"at": (self.epoch, self.batch, self.steps), "weights": weights}

    def apply_snapshot(self, snapshot):
        self.epoch, self.batch, self.steps = snapshot["at"]
        self.model.load_state_dict(snapshot["weights"])

    def sync(self, world_size, rank):
        max_rank, self.steps = edist.all_gather_return_max_long(self.steps)
        self.epoch = edist.broadcast_long(self.epoch, max_rank)
        self.batch = edist.broadcast_long(self.batch, max_rank)
        edist.broadcast_model(self.model, max_rank)
        self.parallel = DistributedDataParallel(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
        self.sampler = ElasticDistributedSampler(DATA, start_index=self.batch * 4 * world_size)
        loader = torch.utils.data.DataLoader(DATA, batch_size=4, sampler=self.sampler)

        def epoch(number):
            self.sampler.set_epoch(number)
            return iter(loader)

        self.data = CyclingIterator(self.epochs, epoch, start_epoch=self.epoch)

    def should_save_checkpoint(self, rank):
        return self.steps == 5


def train_steps(state):
    for (inputs,) in state.data:
        state.optimizer.zero_grad()
        loss = functional.mse_loss(state.parallel(inputs), inputs.sum(1, keepdim=True))
        loss.backward()
        state.optimizer.step()
        state.steps += 1
        state.epoch, state.batch = divmod(state.steps, 5)
        yield state, torchelastic.SimpleWorkerStats(4.0)


metrics.configure(metrics.NullMetricHandler())
event_logger.configure(event_logger.ConsoleEventLogHandler())
host, prefix, folder = sys.argv[1:]
parameters = RendezvousParameters("etcd", host, "job", 2, 2, f"last_call_timeout=1,etcd_prefix={prefix}")
coordinator = CoordinatorP2P("gloo", parameters.url, 2)
checkpoint.set_checkpoint_manager(checkpoint.FileSystemCheckpointManager(folder))
state = torchelastic.run_train(coordinator, train_steps, TrainState(2))
weights = [round(each, 6) for each in state.model.weight.flatten().tolist()]
print(f"steps {state.steps} weights {weights}\\n", end="")
"""


NAMES = {
    "torchelastic": "Coordinator NonRetryableException SimpleWorkerStats State StopException WorkerStats"
    " __version__ metrics run_train train train_loop version",
    "torchelastic.agent.server": "ElasticAgent SimpleElasticAgent Worker WorkerGroup WorkerSpec WorkerState",
    "torchelastic.agent.server.api": "WorkerSpec",
    "torchelastic.agent.server.local_elastic_agent": "LocalElasticAgent",
    "torchelastic.checkpoint": "Checkpoint CheckpointManager CheckpointUtil FileSystemCheckpointManager"
    " get_checkpoint_manager set_checkpoint_manager",
    "torchelastic.checkpoint.api": "Checkpoint CheckpointBarrier CheckpointManager CheckpointUtil"
    " get_checkpoint_manager set_checkpoint_manager",
    "torchelastic.checkpoint.file_system_checkpoint": "FileSystemCheckpointManager",
    "torchelastic.coordinator": "Coordinator NonRetryableException StopException",
    "torchelastic.distributed": "broadcast_long collectives get_rank",
    "torchelastic.distributed.collectives": "all_gather_return_max_long broadcast_binary broadcast_bool"
    " broadcast_float_list broadcast_long broadcast_model convert_to_distributed_tensor"
    " convert_to_normal_tensor is_distributed_training_run",
    "torchelastic.distributed.launch": "main parse_args",
    "torchelastic.distributed.utils": "get_rank",
    "torchelastic.event_logger.api": "ConsoleEventLogHandler EventLogHandler NullEventLogHandler configure"
    " get_event_logger",
    "torchelastic.events": "Event record",
    "torchelastic.fault_injection": "start_fault_injection_thread",
    "torchelastic.metrics": "api configure getStream initialize_metrics profile publish_metric",
    "torchelastic.metrics.api": "ConsoleMetricHandler MetricData MetricHandler MetricStream NullMetricHandler"
    " configure getStream get_elapsed_time_ms prof profile publish_metric put_metric",
    "torchelastic.multiprocessing.errors": "record",
    "torchelastic.p2p": "CoordinatorP2P coordinator_p2p",
    "torchelastic.p2p.coordinator_p2p": "CoordinatorP2P",
    "torchelastic.rendezvous.api": "RendezvousClosedException RendezvousHandler RendezvousNonRetryableError"
    " RendezvousTimeoutException",
    "torchelastic.rendezvous.etcd_rendezvous": "EtcdRendezvous EtcdRendezvousHandler EtcdStore",
    "torchelastic.rendezvous.etcd_server": "EtcdServer stop_etcd",
    "torchelastic.rendezvous.parameters": "RendezvousParameters get_rendezvous",
    "torchelastic.state": "State",
    "torchelastic.train_loop": "MAX_FAILURES run_train to_generator train",
    "torchelastic.utils.data": "CyclingIterator ElasticDistributedSampler",
    "torchelastic.version": "__version__",
    "torchelastic.worker_stats": "SimpleWorkerStats WorkerStats",
}
"""Names that programs import from the modules of torchelastic 0.1 and of its versions up to 0.2."""

CALLS = {
    "torchelastic.train": "elastic_coordinator train_step state",
    "torchelastic.run_train": "coordinator train_step_gen state",
    "torchelastic.train_loop.to_generator": "train_step_fn",
    "torchelastic.checkpoint.FileSystemCheckpointManager": "checkpoint_dir",
    "torchelastic.checkpoint.set_checkpoint_manager": "checkpoint_manager",
    "torchelastic.checkpoint.api.CheckpointBarrier": "rank",
    "torchelastic.checkpoint.api.CheckpointUtil": "coordinator",
    "torchelastic.checkpoint.api.CheckpointUtil.load_checkpoint": "self state rank",
    "torchelastic.checkpoint.api.CheckpointUtil.save_checkpoint": "self state rank",
    "torchelastic.checkpoint.api.CheckpointUtil.set_checkpoint_loaded": "self",
    "torchelastic.distributed.all_gather_return_max_long": "value",
    "torchelastic.distributed.broadcast_binary": "data src_rank",
    "torchelastic.distributed.broadcast_bool": "value src_rank",
    "torchelastic.distributed.broadcast_float_list": "float_list src_rank",
    "torchelastic.distributed.broadcast_long": "value src_rank",
    "torchelastic.event_logger.configure": "handler group",
    "torchelastic.event_logger.get_event_logger": "group",
    "torchelastic.fault_injection.start_fault_injection_thread": "fault_injection_rate interval_in_sec",
    "torchelastic.p2p.CoordinatorP2P": "c10d_backend init_method max_num_trainers process_group_timeout"
    " coordinator_pg_timeout",
}
"""Parameters of torchelastic 0.1, in order. Functions of elasticrs may have more parameters after these."""

SHOWS_INTERFACE = """
import importlib, inspect, json, operator, sys
names, calls = json.loads(sys.argv[1])
missing, different = [], {}
for module, expected in names.items():
    found = importlib.import_module(module)
    missing += [f"{module}.{name}" for name in expected.split() if not hasattr(found, name)]
for path, expected in calls.items():
    first, *rest = path.split(".")
    called = operator.attrgetter(".".join(rest))(sys.modules[first])
    got = list(inspect.signature(called).parameters)
    if got[: len(expected.split())] != expected.split():
        different[path] = got
print(json.dumps([missing, different]))
"""


def test_all_torchelastic_modules_names_and_parameters_exist(installed):
    done = installed("-c", SHOWS_INTERFACE, json.dumps([NAMES, CALLS]), check=False)
    assert json.loads(done.stdout or "null") == [[], {}], done.stderr


def test_the_torchelastic_launcher_passes_scripts_only_their_own_arguments(installed, tmp_path):
    script = tmp_path / "script.py"
    # Write each line in one call, because the two workers share the console.
    script.write_text("import os, sys; os.write(1, f'ran {os.environ[\"RANK\"]} {sys.argv[1:]}\\n'.encode())")
    launcher = ("-m", "torchelastic.distributed.launch", "--nnodes=1", "--nproc_per_node=2")
    done = installed(*launcher, str(script), "--lr=3", check=False)
    ran = sorted(line for line in done.stdout.splitlines() if line.startswith("ran"))
    assert ran == ["ran 0 ['--lr=3']", "ran 1 ['--lr=3']"], done.stderr


def test_torchelastic_programs_of_2019_and_2020_run(installed, tmp_path, etcd):
    toy, model = tmp_path / "toy.py", tmp_path / "model.py"
    toy.write_text(OF_2019, encoding="utf-8")
    model.write_text(OF_2020, encoding="utf-8")
    with store() as port:
        url = f"elasticrs://127.0.0.1:{port}/toy?min_workers=2&max_workers=2"
        of_2020 = (str(model), etcd.endpoint, etcd.prefix, str(tmp_path / "checkpoints"))
        done = installed("-c", STARTED_BY_HAND, json.dumps([(str(toy), url), of_2020]), check=False)
    lines = done.stdout.splitlines()
    assert lines[:3] == ["total 20", "total 20", "exit 0 0"], done.stderr
    *told, last = lines[3:]
    assert last == "exit 0 0", done.stderr
    first, second = (line for line in told if line.startswith("steps 10 weights"))
    assert first == second
    assert any(line.startswith("event: rendezvous_succeeded") for line in told)
    assert (tmp_path / "checkpoints" / "0" / "checkpoint.json").exists()


CHECKPOINT = """
import os, sys, torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import _async_process_executor as executor
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

def main():
    assert executor.get_free_port.__module__.startswith("elasticrs.")
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    state = {f"weights{rank}": torch.full((3,), float(rank))}
    how = AsyncCheckpointerType.PROCESS
    dcp.async_save(state, checkpoint_id=sys.argv[1], async_checkpointer_type=how).result()
    read = {name: torch.zeros(3) for name in state}
    dcp.load(read, checkpoint_id=sys.argv[1])
    assert all(torch.equal(read[name], state[name]) for name in state)
    dist.barrier()
    os.write(1, b"SAVED\\n")
    dist.destroy_process_group()

if __name__ == "__main__":
    main()
"""

BARRIER = """
import os, sys
from torch.distributed.checkpoint._experimental import barriers

rank = int(os.environ["RANK"])
assert barriers.store_util.__name__ == "elasticrs.utils.store"
barrier = barriers.TCPStoreBarrier(rank, 2, "saved", 30, False, int(sys.argv[1]), "127.0.0.1", 30)
for number in range(3):
    barrier.execute_barrier()
    os.write(1, f"PASSED {number}\\n".encode())
"""

XEON = """
import os
os.write(1, f"RUNS {os.environ['LAUNCHED']}\\n".encode())
"""


@pytest.mark.slow
def test_torch_saves_an_asynchronous_checkpoint_in_a_separate_process(installed, tmp_path):
    (tmp_path / "save.py").write_text(CHECKPOINT, encoding="utf-8")
    saved = tmp_path / "checkpoint"
    done = installed("-m", "elasticrs", "--nproc-per-node=2", "save.py", str(saved), check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("SAVED") == 2
    assert (saved / ".metadata").exists()


@pytest.mark.slow
def test_the_checkpoint_barrier_of_torch_works(installed, tmp_path):
    (tmp_path / "meet.py").write_text(BARRIER, encoding="utf-8")
    done = installed("-m", "elasticrs", "--nproc-per-node=2", "meet.py", str(ports.free()), check=False)
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.split()) == sorted(["PASSED", *"0", "PASSED", *"1", "PASSED", *"2"] * 2)


@pytest.mark.slow
def test_the_xeon_launcher_of_torch_works(installed, tmp_path):
    (tmp_path / "infer.py").write_text(XEON, encoding="utf-8")
    how = ("--ninstances=1", "--ncores-per-instance=1", "--disable-numactl", "--disable-taskset")
    done = installed(
        *("-m", "torch.backends.xeon.run_cpu", *how, f"--log-path={tmp_path}", "infer.py"),
        check=False,
        LAUNCHED="yes",
    )
    assert done.returncode == 0, done.stderr
    assert "RUNS yes" in done.stdout, done.stderr
