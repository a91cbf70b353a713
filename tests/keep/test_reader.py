"""Kept state of sharded programs is loaded with other numbers of ranks, by torch's own checkpoint library."""

import shutil
from contextlib import ExitStack, closing

import pytest
from helpers.keep_agent import KeepAgent

from elasticrs._engine.inside.keep import saved
from elasticrs._engine.inside.keep.choice import choose
from elasticrs._engine.inside.keep.layout import Head, Mode

pytestmark = pytest.mark.torch

PROGRAM = """
import torch.distributed as dist, torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
dist.init_process_group("gloo", init_method="file://RENDEZVOUS", rank=rank, world_size=world)
torch.manual_seed(world)
# Layers of 5, 1 and 3 rows: shards of different sizes, some empty.
Linear = torch.nn.Linear
net = torch.nn.Sequential(Linear(7, 5), torch.nn.BatchNorm1d(5), Linear(5, 1), Linear(1, 3))
for each in (net[0], net[2], net[3], net):
    fully_shard(each, mesh=init_device_mesh("cpu", (world,)))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
keep = Keep(net=net, optimizer=optimizer, scheduler=scheduler, every=2)
def train(step):
    torch.manual_seed(step)
    optimizer.zero_grad(); net(torch.randn(6, 7)).square().sum().backward()
    optimizer.step(); scheduler.step()
    keep.values["seen"] = 6 * step
    keep.step(step)
def state():
    model, of_optimizer = get_state_dict(net, optimizer)
    return {"net": model, "optimizer": of_optimizer, "scheduler": scheduler.state_dict()}
def whole():
    found, _ = flatten_state_dict(state())
    return {k: v.full_tensor() if hasattr(v, "full_tensor") else v for k, v in found.items()}
def load(reader, step=None):
    found = state()
    dcp.load(found, storage_reader=reader)
    set_state_dict(net, optimizer, model_state_dict=found["net"], optim_state_dict=found["optimizer"])
    scheduler.load_state_dict(found["scheduler"])
    return step or reader.step
def differing(path):
    found, kept = whole(), torch.load(path)
    assert found.keys() == kept.keys(), found.keys() ^ kept.keys()
    same = lambda one, other: torch.equal(one, other) if torch.is_tensor(one) else one == other
    return [name for name, each in kept.items() if not same(each, found[name])]
"""


def test_sharded_state_is_read_with_any_number_of_ranks(programs, tmp_path):
    reference = tmp_path / "reference.pt"

    def run(agent, *lines):
        """Run lines in all ranks at once. Return the answers of the last one, and what the ranks said."""
        meeting = tmp_path / f"meeting{agent.world}-{len(list(tmp_path.iterdir()))}"
        with ExitStack() as stack:
            ranks = [stack.enter_context(agent.worker(rank)) for rank in range(agent.world)]
            for line in (PROGRAM.replace("RENDEZVOUS", str(meeting)), *lines):
                for each in ranks:
                    each.send(line)
                answers = [each.answer() for each in ranks]
            return answers, [each.kill()[1] for each in ranks]

    with closing(KeepAgent(programs, 3)) as agent:
        agent.world = 2
        agent.begin()
        save = f"found = whole(); rank or torch.save(found, {str(reference)!r})"
        run(agent, "keep.restore(); train(1); train(2)", save, "train(3)")
        assert agent.file().words[Head.MODE] == Mode.SHARDED
        holdings = {rank: agent.files.holding(rank, rank, 2) for rank in (0, 1)}
        choice = choose(holdings, 2)
        assert (choice.step, choice.is_replicated) == (2, False)
        # Each of two nodes saves the part of its rank on its own disk.
        for rank, node in enumerate(("a", "b")):
            own, folder = {rank: holdings[rank]}, str(tmp_path / node)
            saved.save(agent.files, own, {rank: rank}, folder, world=2, job="j", node=node)
        nodes = [str(tmp_path / node) for node in ("a", "b")]
        with pytest.raises(ValueError, match="lacks the state of rank 1"):
            saved.newest(nodes[0])
        for world in (1, 2, 3):
            agent.world = world
            agent.begin(readable=(2, 2), why="the number of ranks has changed")
            answers, said = run(
                agent,
                "keep.restore(default=lambda: load(keep.reader()))",
                f"[keep.reader().values, scheduler.last_epoch, differing({str(reference)!r})]",
            )
            assert answers == [[{"seen": 12}, 2, []]] * world
            told = ["keep.reader() can load step 2" in each for each in said]
            assert told == [True] + [False] * (world - 1)

        agent.world = 1
        # The folder of a file system that both nodes share has both parts.
        (part,) = (tmp_path / "b").iterdir()
        shutil.copytree(part, tmp_path / "shared" / part.name)
        shutil.copytree(tmp_path / "a", tmp_path / "shared", dirs_exist_ok=True)
        agent.begin(reader={"step": 2, "folder": str(tmp_path / "shared")})
        out = str(tmp_path / "exported")
        answers, _ = run(
            agent,
            "keep.restore(default=lambda: load(keep.reader()))",
            f"differing({str(reference)!r})",
            "train(3)",
            "from elasticrs._engine.inside.keep.reader import export_saved as export",
            f"export({nodes!r}, {out!r})",
            f"load(dcp.FileSystemReader({out!r}), 2)",
            f"differing({str(reference)!r})",
        )
        assert answers == [[]]
