"""What :class:`elasticrs.Keep` does in a worker. The tests play the agent; the workers are real processes."""

from contextlib import closing

import pytest
from helpers.keep_agent import KeepAgent

from elasticrs._engine.inside.keep.layout import Answer, Head

pytestmark = pytest.mark.torch

MODEL = """
import random, numpy as np
torch.manual_seed(3); random.seed(4); np.random.seed(5)
net = torch.nn.Sequential(torch.nn.Linear(200, 200), torch.nn.BatchNorm1d(200), torch.nn.Linear(200, 1))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
keep = Keep(net=net, optimizer=optimizer, scheduler=scheduler, every=EVERY)
def forward():
    noise = random.random() + np.random.rand()
    return (net(torch.randn(8, 200)) + noise).square().mean()
def train(step, end=True):
    optimizer.zero_grad(); forward().backward(); optimizer.step(); scheduler.step()
    keep.values["seen"] = 8 * step
    if end: keep.step(step)
def picture():
    import hashlib
    found = hashlib.sha256()
    for each in (*net.state_dict().values(), *(v for s in optimizer.state.values() for v in s.values())):
        found.update(each.numpy().tobytes())
    more = [scheduler.last_epoch, optimizer.param_groups[0]["lr"], torch.rand(1).item(), random.random()]
    return [found.hexdigest(), *more, np.random.rand(), keep.values.get("seen")]
"""


def model(every=0):
    return MODEL.replace("EVERY", str(every))


@pytest.fixture
def agent():
    with closing(KeepAgent()) as made:
        yield made


def test_state_that_is_copied_at_an_order_is_restored_exactly(agent):
    agent.begin()
    with agent.worker(preamble=model()) as worker:
        assert worker.run("keep.restore(default=lambda: 0)") == 0
        for step in (1, 2, 3):
            worker.run(f"train({step})")
        name = agent.joined()
        assert agent.order(name) == Answer.KEPT
        expected = worker.run("picture()")
        _, said = worker.kill()
        assert said == ""
    head = agent.file().words
    assert (head[Head.ENDED], head[Head.CHECK_STEP], head[Head.RESTORED]) == (4, 3, 0)

    agent.begin(step=3)
    with agent.worker(preamble=model()) as worker:
        assert worker.run("keep.restore()") == 3
        assert worker.run("keep.source") == [3, "memory", True, [], True, 0]
        assert worker.run("picture()") == expected
        assert "continues at step 3" in worker.kill()[1]
