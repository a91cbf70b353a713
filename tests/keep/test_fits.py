"""What the patches of frameworks have in common. The tests play agent and framework; the workers are real."""

from contextlib import closing

import pytest

from elasticrs._engine.inside.keep.layout import SlotState

pytestmark = pytest.mark.torch

FRAMEWORK = """
import gc, weakref
from elasticrs._engine.inside.keep import frameworks
class Progress:
    step = 0
    def state_dict(self): return {"step": self.step}
class Training:
    def __init__(self, width=40):
        self.net = torch.nn.Linear(width, width)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.progress = Progress()
    def begin(self, unknown=None, resume=None, step=0):
        self.fit = frameworks.begin("lightning", lambda: unknown)
        if self.fit is None: return None
        if self.fit.progress is not None:
            kept = self.fit.progress["step"]
            self.progress.step = kept if self.fit.choose(self.net, resume, step, kept) else step
        self.fit.open(self.progress, module=self.net, optimizer=self.optimizer)
        return self.progress.step
    def train(self, steps):
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.net(torch.ones(4, self.net.in_features)).square().mean().backward()
            self.optimizer.step()
            self.progress.step += 1
            self.fit.step(self.progress.step)
    def end(self):
        self.fit.end()
        self.fit.close()
    def weight(self): return self.net.weight.double().sum().item()
a = Training()
"""


def first_attempt(agent, *lines):
    """Run lines in a worker. Return the last result, and what the worker has said."""
    agent.begin()
    with agent.worker(preamble=FRAMEWORK) as worker:
        results = [worker.run(line) for line in lines]
        return results[-1], worker.kill()[1]


def test_the_last_step_is_copied_and_its_objects_are_freed(agent):
    ended = "a.end(); a.net.weight.data.zero_()"  # As a framework that loads other weights.
    freed = "ref = weakref.ref(a.net); del a; gc.collect(); ref() is None"
    lines = ["a.begin(); a.train(5)", "weight = a.weight()", ended, *freed.rsplit("; ", 1), "weight"]
    agent.begin()
    with agent.worker(preamble=FRAMEWORK) as worker:
        *_, is_freed, weight = [worker.run(line) for line in lines]
        assert worker.end() == (0, "")
    assert is_freed

    agent.begin(step=5)
    with agent.worker(preamble=FRAMEWORK) as worker:
        assert worker.run("a.begin()") == 5
        assert worker.run("a.weight()") == weight
        assert "continues at step 5" in worker.kill()[1]


def test_a_kept_state_waits_for_the_training_of_which_it_is(agent):
    lines = [
        "a.begin(); a.train(3); a.end()",
        "b = Training(); b.begin(); b.train(4)",
        "b.fit.end()",
        "b.weight()",
    ]
    weight, said = first_attempt(agent, *lines)
    assert said == ""

    agent.begin(step=7)  # Three steps of the first training, and four of the second one.
    with agent.worker(preamble=FRAMEWORK) as worker:
        assert worker.run("a.begin()") is None
        worker.run("b = Training()")
        assert worker.run("b.begin()") == 4
        assert worker.run("b.weight()") == weight
        # A third training begins anew.
        worker.run("b.train(1); b.end(); c = Training()")
        assert worker.run("c.begin()") == 0
        worker.run("c.train(1)")
        lines = worker.kill()[1].splitlines()
    assert len(lines) == 2
    assert "training 1 of the script is done again, and its steps are not kept" in lines[0]
    assert "continues at step 7" in lines[1]
    with closing(agent.file()) as file:
        assert (
            sorted(slot.complete_step for slot in file.slots if slot.words[1] == SlotState.COMPLETE)[-1] == 8
        )


@pytest.mark.parametrize(
    ("training", "arguments", "step", "said"),
    [
        ("Training()", "resume='old.ckpt', step=2", 5, ["using the kept state", "continues at step 5"]),
        ("Training()", "resume='new.ckpt', step=9", 9, ["using the checkpoint"]),
        ("Training(50)", "", 0, ["the module has other tensors now (bias, weight)"]),
        ("Training()", "unknown='searches'", None, ["--keep does not support searches"]),
    ],
)
def test_the_kept_state_is_used_if_it_fits_and_is_the_newest(agent, training, arguments, step, said):
    first_attempt(agent, "a.begin(); a.train(5); a.fit.end()")
    agent.begin(step=5)
    with agent.worker(preamble=FRAMEWORK) as worker:
        worker.run(f"a = {training}")
        assert worker.run(f"a.begin({arguments})") == step
        if step is not None:
            worker.run("a.train(2)")
        lines = worker.kill()[1].splitlines()
    assert len(lines) == len(said)
    for line, words in zip(lines, said, strict=True):
        assert words in line
