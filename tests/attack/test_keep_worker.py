"""Programs that use :class:`elasticrs.Keep` in odd ways. The tests play the agent."""

from contextlib import closing

import pytest
from helpers.keep_agent import KeepAgent

from elasticrs._engine.inside.keep.layout import Answer

pytestmark = [pytest.mark.slow, pytest.mark.torch]


LINEAR = """
torch.manual_seed(0)
net = torch.nn.Linear(200, 200)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
keep = Keep(net=net, optimizer=optimizer, every=EVERY, replicated=REPLICATED)
def train(step):
    optimizer.zero_grad(); net(torch.randn(4, 200)).square().mean().backward()
    optimizer.step(); keep.step(step)
"""


def linear(every="auto", replicated=True):
    return LINEAR.replace("EVERY", repr(every)).replace("REPLICATED", repr(replicated))


def steps(agent, rank=0):
    with closing(agent.file(rank)) as file:
        return {each.complete_step for each in file.slots} - {None}


DTYPES = """
names = "bfloat16 float16 float64 complex64 complex128 bool uint8 int16 uint16 uint64".split()
names += ["float8_e4m3fn", "float8_e5m2"]
def filled(name, seed):
    numbers = torch.Generator().manual_seed(seed)
    data = torch.randint(0, 2, (70000 * 16,), dtype=torch.uint8, generator=numbers)
    return data.view(getattr(torch, name))
class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        for name in names:
            self.register_buffer("large_" + name, torch.zeros_like(filled(name, 0)))
            self.register_buffer("small_" + name, torch.zeros_like(filled(name, 0)[:3]))
        self.weight = torch.nn.Parameter(torch.zeros(300, 300).t()[:, ::2])
        self.empty = torch.nn.Parameter(torch.zeros(0, 5))
        self.scalar = torch.nn.Parameter(torch.tensor(1.5))
        self.tied = self.weight
net = Net()
keep = Keep(net=net, replicated=True)
def weight(seed):
    return torch.arange(45000.).view(300, 150) + seed
def fill(seed):
    with torch.no_grad():
        for name in names:
            getattr(net, "large_" + name).copy_(filled(name, seed))
            getattr(net, "small_" + name).copy_(filled(name, seed)[:3])
        net.weight.copy_(weight(seed))
def is_filled(seed):
    for name in names:
        for kind, expected in (("large_", filled(name, seed)), ("small_", filled(name, seed)[:3])):
            if not torch.equal(getattr(net, kind + name).view(torch.uint8), expected.view(torch.uint8)):
                return False
    return torch.equal(net.weight, weight(seed)) and net.tied is net.weight
"""


def test_tensors_of_all_kinds_are_restored(agent):
    agent.begin()
    with agent.worker(preamble=DTYPES) as worker:
        worker.run("keep.restore()")
        for step in (1, 2, 3):
            worker.run(f"keep.before_change(); fill({step}); keep.step({step})")
        assert agent.order(agent.joined()) == Answer.KEPT
        _, said = worker.kill()
        assert said == ""
    agent.begin(step=3)
    with agent.worker(preamble=DTYPES) as worker:
        assert worker.run("keep.restore()") == 3
        assert worker.run("is_filled(3)"), worker.kill()


CHECKPOINTED = """
from torch.utils.checkpoint import checkpoint
torch.manual_seed(0)
net = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.Dropout(0.5))
optimizer = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
keep = Keep(net=net, optimizer=optimizer, replicated=True)
def train(step, until="end"):
    batch = torch.randn(4, 200, requires_grad=True)
    optimizer.zero_grad(); out = checkpoint(net, batch, use_reentrant=True); torch.rand(5)
    out.square().mean().backward()
    if until == "end":
        optimizer.step(); keep.step(step)
"""


def test_random_numbers_are_not_recorded_in_a_recomputation(agent):
    agent.begin()
    with agent.worker(preamble=CHECKPOINTED) as worker:
        worker.run("keep.restore()")
        worker.run("train(1); train(2); train(3); train(4, until='backward')")
        found = """
from elasticrs._engine.inside.keep import keeper, trees
records = keeper._active._file.ring.records()
record = trees.decode(records[4, False])
"""
        worker.run(found)
        assert worker.run("list(record['random']['torch']) == torch.get_rng_state().tolist()")


MICRO = """
torch.manual_seed(0)
net = torch.nn.Linear(200, 200)
optimizer = torch.optim.SGD(net.parameters(), lr=0.01)
keep = Keep(net=net, optimizer=optimizer, replicated=True)
def train(step):
    net(torch.randn(4, 200)).square().mean().backward()
    if step % 4 == 0: optimizer.step(); optimizer.zero_grad()
    keep.step(step)
"""


def test_step_that_leaves_gradients_behind_is_not_kept(agent):
    agent.begin()
    with agent.worker(preamble=MICRO) as worker:
        worker.run("keep.restore()")
        for step in range(1, 11):
            worker.run(f"train({step})")
        agent.order(agent.joined())
        worker.kill()
    assert steps(agent) <= {4, 8}
    assert max(steps(agent)) == 8


def test_copies_are_never_of_two_consecutive_steps(agent):
    agent.begin()
    with agent.worker(preamble=linear(1, "auto")) as worker:
        worker.run("keep.restore()")
        seen = set()
        for step in range(1, 8):
            worker.run(f"train({step})")
            worker.run("keep.before_change()")  # It waits for a copy.
            seen |= steps(agent)
        worker.kill()
    assert seen == {2, 4, 6}


def test_rank_that_goes_on_from_another_step_ends_the_attempt(programs):
    with closing(KeepAgent(programs, world=2)) as agent:
        agent.begin()
        with agent.worker(0, linear()) as first, agent.worker(1, linear()) as second:
            for worker in (first, second):
                worker.run("keep.restore(); train(1); train(2)")
            names = [agent.joined(), agent.joined()]
            for name in names:
                agent.send(name)
            for _ in names:
                assert agent.notice() == ["keep", "answered"]
            first.kill()
            second.kill()
        agent.begin(step=2)
        with agent.worker(0, linear()) as first, agent.worker(1, linear()) as second:
            assert first.run("keep.restore()") == 2
            first.run("train(3)")
            name = agent.joined()
            assert agent.order(name) == Answer.APART
            second.send("train(1)")
            code, said = second.end()
            assert code == 1
            assert "this rank has restored no state, but rank 0 did not do the same" in said
            first.send("train(4)")
            assert "this rank has restored step 2, but rank 1" in first.end()[1]
        assert steps(agent, 0) | steps(agent, 1) == set()


def test_a_scheduler_with_milestones_can_go_on_by_epochs(agent):
    program = linear() + "scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 4])"
    program = program.replace("keep = Keep(", "keep = lambda: Keep(scheduler=scheduler, ")
    program += "; keep = keep()"
    agent.begin()
    with agent.worker(preamble=program) as worker:
        worker.run("keep.restore()")
        worker.run("train(1); train(2)")
        assert agent.order(agent.joined()) == Answer.KEPT
        worker.kill()
    agent.begin(step=2)
    with agent.worker(preamble=program) as worker:
        assert worker.run("keep.restore()") == 2
        worker.run("scheduler.step(4)")
        assert worker.run("optimizer.param_groups[0]['lr']") == pytest.approx(0.0001)


COMPILED = """
torch.manual_seed(1)
net = torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.Dropout(0.5))
optimizer = torch.optim.AdamW(net.parameters())
keep = Keep(net=net, optimizer=optimizer)
forward = torch.compile(net, backend="eager")
change = torch.compile(optimizer.step, backend="eager")
def train(step, is_announced=True):
    optimizer.zero_grad(); forward(torch.randn(4, 300)).square().mean().backward()
    if is_announced:
        keep.before_change()
    change(); keep.step(step)
def picture(): return str([each.tolist() for each in (*net.parameters(), torch.rand(2))])
"""


def test_a_compiled_training_is_kept_if_it_announces_its_changes(agent):
    agent.begin()
    with agent.worker(preamble=COMPILED) as worker:
        worker.run("keep.restore(); train(1); train(2); train(3)")
        assert agent.order(agent.joined()) == Answer.KEPT
        worker.kill()
    agent.begin(step=3)
    with agent.worker(preamble=COMPILED) as worker:
        assert worker.run("keep.restore()") == 3
        worker.run("train(4)")
        found = worker.run("picture()")
    agent.begin()
    with agent.worker(preamble=COMPILED) as worker:
        assert worker.run("train(1); train(2); train(3); train(4)") is None
        assert worker.run("picture()") == found
        worker.run("train(5, False); train(6, False)")
        assert "call keep.before_change()" in worker.kill()[1]
