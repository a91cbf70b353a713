"""What :class:`elasticrs.Keep` does in a worker. The tests play the agent; the workers are real processes."""

import os
import re
import socket
from contextlib import closing

import pytest
from helpers.keep_agent import KeepAgent, model, step_of
from helpers.procs import wait_until

from elasticrs._engine.inside.keep import layout
from elasticrs._engine.inside.keep.choice import choose, refused_of
from elasticrs._engine.inside.keep.layout import Agreed, AgreedState, Answer, Head, Slot, Why

pytestmark = pytest.mark.torch


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

    # Restore the same copy twice, because the training must not write into the copy from which it goes on.
    for _ in range(2):
        agent.begin(step=3)
        with agent.worker(preamble=model()) as worker:
            assert worker.run("keep.restore()") == 3
            assert worker.run("keep.source") == [3, "memory", True, [], True, 0]
            assert worker.run("picture()") == expected
            worker.run("train(4, until='optimizer')")
            assert "continues at step 3" in worker.kill()[1]


WRITERS = {
    "counted": "torch.optim.AdamW(net.parameters(), lr=0.01)",
    "fused": "torch.optim.AdamW(net.parameters(), lr=0.01, fused=True)",
    "data": "Plain(net.parameters(), {'lr': 0.01})",
}
"""Optimizers. Only the first one changes tensors so that torch counts the changes (in `_version`)."""


@pytest.mark.parametrize("writer", WRITERS.values(), ids=WRITERS)
def test_order_while_the_optimizer_writes_waits_for_the_end_of_the_step(agent, writer):
    agent.begin()
    plain = """
class Plain(torch.optim.Optimizer):
    def step(self):
        for each in self.param_groups[0]["params"]: each.data.sub_(0.01 * each.grad.data)
"""
    program = plain + model(replicated=True).replace(WRITERS["counted"], writer)
    with agent.worker(preamble=program) as worker:
        for step in (1, 2):
            worker.run(f"train({step})")
        name = agent.joined()
        worker.run("train(3, until='optimizer')")
        assert agent.order(name) == Answer.CHANGING
        assert step_of(agent) is None
        worker.run("import threading; t = threading.Timer(0.05, keep.step, (3,)); t.start()")
        assert agent.order(name) == Answer.KEPT
        assert step_of(agent) == 3
        # The training goes on if the signals do not come in time, and what it does then is kept as well.
        worker.run("train(4); train(5)")
        assert step_of(agent) == 5
        assert agent.order(name) == Answer.KEPT
        worker.run("has_whole_end = True")
        assert worker.end() == (0, "")
        assert agent.notice() == ["keep", "left"]


def test_order_while_the_optimizer_calls_the_model_is_carried_out_at_once(agent):
    agent.begin()
    with agent.worker(preamble=model(replicated=True)) as worker:
        worker.run("train(1); train(2)")
        name = agent.joined()
        worker.run("import threading; called, go_on = threading.Event(), threading.Event()")
        closure = "lambda: (called.set(), go_on.wait(), forward().backward())"
        worker.run(
            f"t = threading.Thread(target=optimizer.step, args=({closure},)); t.start(); called.wait()"
        )
        assert agent.order(name) == Answer.KEPT
        assert step_of(agent) == 2
        worker.run("go_on.set(); t.join(); keep.step(3)")


def test_order_and_sigterm_during_the_copy_at_an_exception_block_nothing(agent, tmp_path):
    agent.begin()
    go_on = tmp_path / "go on"
    os.mkfifo(go_on)
    with agent.worker(preamble=model(replicated=True)) as worker:
        worker.run("train(1); train(2)")
        name = agent.joined()
        worker.run("signal.signal(signal.SIGTERM, lambda *_: keep.step(2))")
        worker.run("from elasticrs._engine.inside.keep import copier; calls = []")
        # The first copy lasts until the order has been sent.
        first = f"(os.kill(os.getpid(), signal.SIGTERM), open({str(go_on)!r}).close())"
        worker.run(f"def slow(*lists): calls or (calls.append(1), {first}); return real(*lists)")
        worker.run("real, copier.copy_and_sum = copier.copy_and_sum, slow")
        worker.send("1 / 0")
        agent.send(name)
        go_on.write_text("")
        while (words := agent.notice()) != ["keep", "answered"]:
            assert words == ["keep", "left"]
        # It has nothing to copy if its training has ended since the copy at the exception.
        assert agent.file(0).words[Head.ANSWER] in (Answer.KEPT, Answer.NOTHING)
        assert worker.end()[0] == 1
    assert step_of(agent) == 2


def test_after_an_order_the_training_waits_for_its_stop_so_that_it_does_not_end_steps_that_are_lost(agent):
    agent.begin()
    with agent.worker(preamble=model(replicated=True)) as worker:
        worker.run("train(1)")
        assert agent.order(agent.joined()) == Answer.KEPT
        worker.run("import time; begun = time.monotonic(); train(2)")
        assert worker.run("time.monotonic() - begun") > 0.4
        assert step_of(agent) == 2


def test_program_that_handles_sigterm_is_not_delayed_and_the_step_with_which_it_ends_is_kept(agent):
    agent.begin()
    with agent.worker(preamble=model(replicated=True)) as worker:
        worker.run("signal.signal(signal.SIGTERM, lambda *_: None); train(1)")
        assert agent.order(agent.joined()) == Answer.KEPT
        worker.run("import time; begun = time.monotonic(); train(2); ended = time.monotonic()")
        assert worker.run("ended - begun") < 0.4
        assert step_of(agent) == 2


@pytest.mark.parametrize(("nodes", "answer", "step"), [(1, Answer.KEPT, 2), (2, Answer.CHANGING, None)])
def test_rank_of_several_nodes_ends_the_step_whose_gradients_it_has(agent, nodes, answer, step):
    """Ranks of other nodes, which nobody sees here, may have ended the step already."""
    agent.begin()
    with agent.worker(preamble=f"os.environ['GROUP_WORLD_SIZE'] = '{nodes}'") as worker:
        worker.run(model(replicated=True))
        worker.run("train(1); train(2)")
        name = agent.joined()
        worker.run("train(3, until='backward')")
        if nodes == 2:
            worker.run("import threading; t = threading.Timer(0.02, lambda: optimizer.step()); t.start()")
        assert agent.order(name) == answer
        assert step_of(agent) == step
        if nodes == 2:
            worker.run("t.join(); keep.step(3)")
            assert step_of(agent) == 3


SEVERAL_NODES = """
os.environ["GROUP_WORLD_SIZE"] = "2"
torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=torch.distributed.HashStore())
"""


@pytest.mark.parametrize("is_agreed", [False, True])
def test_rank_of_several_nodes_copies_a_step_only_when_all_have_the_copy_before(agent, is_agreed):
    """Another rank may have no copy of step 5, because it died during the copy or has turned Keep off. The
    second is possible even if all ranks have stopped after an agreed step.
    """
    agent.begin()
    with agent.worker(preamble=SEVERAL_NODES) as worker:
        worker.run(model(every=1, replicated=False))
        # The ranks compare their copies, although the program does not restore any.
        worker.run("train(1); keep._keeper._peers._world = 2; train(2)")
        worker.run("copies = keep._keeper._schedule.generations; copies.announce(3); train(3); train(4)")
        worker.run("copies.settle(3, is_secured=True); copies.announce(5); train(5)")
        worker.run("keep._keeper._copier.wait_until_complete(60); train(6)")
        name = agent.joined()
        assert step_of(agent) == 5
        if is_agreed:
            with closing(agent.file()) as file:
                file.words[Agreed.STATE] = AgreedState.SENT
                file.words[Agreed.READY] = file.words[Agreed.NUMBER] = 1
        assert agent.order(name) == Answer.KEPT
        assert step_of(agent) == 5
        worker.run("copies.settle(5, is_secured=True)")
        assert agent.order(name) == Answer.KEPT
        assert step_of(agent) == 6
        with closing(agent.file()) as file:
            reasons = {slot.words[Slot.WHY] for slot in file.slots}
            assert reasons == {Why.PERIODIC, Why.AT_STOP if is_agreed else Why.AT_DEATH}


def test_own_exception_keeps_the_last_step_but_none_that_the_optimizer_is_changing(agent):
    agent.begin()
    with agent.worker(preamble=model()) as worker:
        for step in (1, 2, 3):
            worker.run(f"train({step})")
        agent.joined()
        worker.send("1 / 0")
        code, said = worker.end()
        assert code == 1
        assert said.count("ZeroDivisionError") == 1
    assert step_of(agent) == 3
    with closing(agent.file()) as file:
        assert [each.words[Slot.WHY] for each in file.slots if each.complete_step == 3] == [Why.AT_DEATH]

    agent.begin(step=3)
    with agent.worker(preamble=model()) as worker:
        worker.run("keep.restore()")
        worker.run("train(4); train(5, until='optimizer')")
        worker.send("1 / 0")
        assert worker.end()[0] == 1
    assert step_of(agent) == 3  # Step 4 was not copied when the optimizer began with step 5.


def test_periodic_copies_alternate_between_the_slots_and_the_survivors_copy_replaces_the_older(agent):
    agent.begin()
    with agent.worker(preamble=model(every=2)) as worker:
        for step in range(1, 8):
            worker.run(f"train({step})")
        name = agent.joined()
        with closing(agent.file()) as file:
            assert {each.complete_step for each in file.slots} == {4, 6}
            assert file.words[Head.COPIES] == 3
            assert agent.order(name) == Answer.KEPT
            assert {each.complete_step for each in file.slots} == {6, 7}
            assert file.words[Head.FAILED_COPIES] == 0
    agent.begin(step=6)  # The plan may name an older step, and then the agent drops the newer ones.
    with agent.worker(preamble=model(every=2)) as worker:
        assert worker.run("keep.restore()") == 6
        assert worker.run("keep.source.at_death") is False
        worker.run("train(7)")
        agent.joined()
        worker.run("train(8)")
        worker.end()
    with closing(agent.file()) as file:
        assert {each.complete_step for each in file.slots} == {6, 8}


@pytest.mark.parametrize(("replicated", "early"), [(True, {4, 10}), (False, {8, 10})])
def test_the_copy_before_a_restored_one_stays_until_that_one_has_proved_good(agent, replicated, early):
    """If the restored state makes the next attempts fail, they go on from the older copy."""
    agent.begin()
    with agent.worker(preamble=model(2, replicated)) as worker:
        for step in range(1, 8):
            worker.run(f"train({step})")
        worker.end()
    agent.begin(step=6)
    with agent.worker(preamble=model(2, replicated)) as worker:
        assert worker.run("keep.restore()") == 6

        def steps_after(first, last):
            for step in range(first, last + 1):
                worker.run(f"train({step})")
            wait_until(lambda: step_of(agent) == last)
            with closing(agent.file()) as file:
                return {each.complete_step for each in file.slots}

        assert steps_after(7, 10) == early
        assert steps_after(11, 28) == {26, 28}


def test_a_copy_stays_until_all_ranks_have_restored_it(programs):
    """A rank may restore its state much later than the others, for example because it loads a data set."""
    with closing(KeepAgent(programs, 2)) as agent:
        agent.begin()
        with agent.worker(preamble=model(2, replicated=True)) as holder:
            for step in range(1, 6):
                holder.run(f"train({step})")
            agent.joined()
            wait_until(lambda: step_of(agent) == 4)
            holder.kill()
        agent.begin(step=4, holder=0)
        with agent.worker(0, model(2, replicated=True)) as early:
            assert early.run("keep.restore()") == 4
            for step in range(5, 10):
                early.run(f"train({step})")
            while not is_alive(name := agent.joined()):
                pass  # The other worker may have told the agent again how long its copies take.
            assert agent.order(name) == Answer.APART
            with agent.worker(1, model(2, replicated=True)) as late:
                assert late.run("keep.restore()") == 4
                assert late.run("keep.source.from_rank") == 0
                early.run("train(10)")
                wait_until(lambda: step_of(agent) == 10)
                for step in range(5, 10):
                    late.run(f"train({step})")
                wait_until(lambda: step_of(agent, 1) == 8)


@pytest.mark.parametrize("until", ["backward", "optimizer"])
def test_rank_that_died_in_a_step_that_others_end_goes_on_from_its_end(programs, until):
    """The second time, it dies in the first step after a restart."""
    start = model(replicated=True) + "torch.manual_seed(int(os.environ['RANK'])); keep.restore()\n"
    with closing(KeepAgent(programs, 2)) as agent:
        agent.begin()
        for step in (3, 4):
            with agent.worker(0, start) as survivor, agent.worker(1, start) as dead:
                for each in (1, 2) if step == 3 else ():
                    survivor.run(f"train({each})")
                    dead.run(f"train({each})")
                if step == 3:
                    names = [agent.joined(), agent.joined()]
                dead.run(f"train({step}, until={until!r})")
                own = dead.run("torch.get_rng_state().tolist()")
                dead.kill()
                survivor.run(f"train({step})")
                expected = survivor.run("picture()")
                if step == 4:
                    names = [agent.joined()]
                assert agent.order(max(names, key=is_alive)) == Answer.KEPT
                assert step_of(agent) == step
            agent.begin(step=step, holder=0)
            with agent.worker(1, model()) as dead:
                assert dead.run("keep.restore()") == step
                assert dead.run("keep.source.exact") is True
                assert dead.run("torch.get_rng_state().tolist()") == own
                # The optimizer, the scheduler and the values are those of the end of the step.
                assert dead.run("picture()[1:3] + picture()[-1:]") == expected[1:3] + expected[-1:]
            agent.begin(step=step, holder=0)


def is_alive(name):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        return sender.connect_ex(name) == 0


@pytest.mark.parametrize(
    ("how", "step", "is_kept"),
    [
        ("default=5", 5, False),
        ("default=lambda: 5, default_step=5", 5, False),
        ("default=np.int64(4)", 4, False),
        ("default=3", 3, True),
        ("default=lambda: 5, default_step=2", 3, True),
        ("default=lambda: 5", 3, True),
    ],
)
def test_the_newer_of_kept_state_and_checkpoint_is_used(agent, how, step, is_kept):
    agent.begin()
    with agent.worker(preamble=model(replicated=True)) as worker:
        worker.run("train(1); train(2); train(3)")
        assert agent.order(agent.joined()) == Answer.KEPT
        expected = worker.run("picture()")
        worker.kill()
    agent.begin(step=3)
    with agent.worker(preamble=model(replicated=True)) as worker:
        start = worker.run("picture()")
        assert worker.run(f"keep.restore({how})") == step
        assert worker.run("keep.source is not None") is is_kept
        assert worker.run("picture()")[0] == (expected if is_kept else start)[0]
        worker.run(f"train({step + 1}); train({step + 2})")
        assert agent.order(agent.joined()) == Answer.KEPT
        assert step_of(agent) == step + 2
        _, said = worker.kill()
    assert said.count("\n") == 1
    assert ("step 3 is not restored" in said) is not is_kept


def test_steps_may_be_integers_of_other_libraries_but_nothing_else(agent):
    agent.begin()
    with agent.worker(preamble=model()) as worker:
        worker.run("keep.restore(default=torch.tensor(0))")
        for number, step in enumerate(("np.int64(1)", "torch.tensor(2)", "np.array(3)"), 1):
            worker.run(f"keep.step({step})")
            assert worker.run("[type(keep._last).__name__, keep._last]") == ["int", number]
        refused = """
def refused(call, *args, **kwargs):
    try: call(*args, **kwargs)
    except TypeError as error: return str(error)
"""
        worker.run(refused)
        for wrong in ("True", "5.0", "None", "'5'", "torch.tensor(5.)", "torch.tensor(True)", "np.bool_(1)"):
            for call in ("keep.step, {}", "keep.restore, {}", "keep.restore, lambda: {}"):
                assert "must be an integer, got" in worker.run(f"refused({call.format(wrong)})"), (
                    call,
                    wrong,
                )
        assert worker.end() == (0, "")


@pytest.mark.parametrize(
    "changed", [{"RANK": "1"}, {"WORLD_SIZE": "3"}, {"LOCAL_WORLD_SIZE": "3"}, {"TORCHELASTIC_RUN_ID": "b"}]
)
def test_worker_of_another_launcher_that_inherits_the_variables_keeps_nothing(agent, changed):
    agent.begin()
    with agent.worker(preamble=f"os.environ |= {changed}" + model()) as worker:
        worker.run("keep.restore(); train(1); train(2)")
        code, said = worker.end()
    assert (code, said.count("\n")) == (0, 1)
    assert "Keep is off: another launcher has started this process" in said
    with closing(agent.file()) as file:
        assert (file.words[Head.PID], file.words[Head.ENDED], step_of(agent)) == (0, 0, None)


def test_only_the_first_program_of_a_rank_keeps_its_state(agent):
    agent.begin()
    with agent.worker(preamble=model(replicated=True)) as worker:
        worker.run("train(1); train(2)")
        assert agent.order(agent.joined()) == Answer.KEPT
        worker.kill()
    with agent.worker(preamble=model(replicated=True)) as other:
        other.run("train(1); train(2); train(3); train(4)")
        assert "has kept its state" in other.end()[1]
    assert step_of(agent) == 2


@pytest.mark.parametrize("part", ["index", "data"])
@pytest.mark.parametrize("world", [1, 2])
def test_damaged_copy_is_not_restored(programs, world, part):
    with closing(KeepAgent(programs, world)) as agent:
        agent.begin()
        with agent.worker(preamble=model()) as worker:
            worker.run("train(1)")
            assert agent.order(agent.joined()) == Answer.KEPT
            worker.kill()
        with closing(agent.file()) as file:
            (slot,) = [each for each in file.slots if each.complete_step is not None]
            slot.map[{"index": layout.HEAD_SIZE, "data": slot.words[Slot.DATA_AT]}[part] + 1000] ^= 1
        agent.begin(step=1)
        with agent.worker(preamble=model()) as worker:
            if world == 1:
                assert worker.run("keep.restore(default=lambda: 9)") == 9
            else:
                # The other ranks go on from their copies, so this one must not begin anew.
                worker.send("keep.restore()")
            code, said = worker.end()
        assert code == world - 1
        assert "its checksum is wrong" in said
        assert "next" not in said  # This may be the last attempt.
        assert step_of(agent) is None


CHANGES = {
    "net = torch.nn.Sequential(torch.nn.Linear(200, 3))": "only the kept state has the tensors net.1.",
    "net[2] = torch.nn.Linear(200, 2)": "net.2.weight is (2, 200)",
    "net.double()": "torch.float64",
    "scheduler = torch.nn.Linear(1, 1)": "lacks the tensors scheduler.bias",
    "optimizer.add_param_group({'params': [torch.zeros(1, requires_grad=True)]})": "optimizer has [6, 1]",
    "scheduler.load_state_dict = None": "scheduler does not load",
    "net[2] = torch.nn.LazyLinear(1)": "UninitializedParameter",
    "net.state_dict = None": "TypeError",
}


def test_changed_objects_are_left_as_they_are(agent):
    agent.begin()
    with agent.worker(preamble=model()) as worker:
        worker.run("train(1)")
        assert agent.order(agent.joined()) == Answer.KEPT
        worker.kill()
    agent.begin(step=1)
    before, _, after = model().partition("keep = ")
    construct = "keep = " + after.partition("\n")[0]
    with agent.worker(preamble="from elasticrs._engine.inside.keep import keeper") as worker:
        for change in CHANGES:
            worker.run(f"{before}{change}\n{construct}")
            worker.run("def picture(): return str((list(net.buffers()), optimizer.state_dict()))")
            start = worker.run("picture()")
            assert worker.run("keep.restore(default=lambda: 77)") == 77
            assert worker.run("keep.source") is None
            assert worker.run("picture()") == start
            worker.run("keeper.close()")
        _, said = worker.end()
    lines = [line for line in said.splitlines() if "step 1 is not restored" in line]
    assert len(lines) == len(CHANGES)
    for line, part in zip(lines, CHANGES.values(), strict=True):
        assert part in line


OTHERS = {
    "lazy": """
torch.manual_seed(1)
net = torch.nn.LazyLinear(2)
keep = Keep(net=net)
def train(step):
    net(torch.randn(2, 2)).sum().backward()
    if step == 1:
        global optimizer
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    optimizer.step(); optimizer.zero_grad(); keep.step(step)
if keep._keeper._plan["step"]:
    net(torch.zeros(2, 2)); optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
""",
    "values only": """
keep = Keep()
def train(step):
    keep.values = {"drawn": keep.values.get("drawn", 0) + torch.rand(1).item()}; keep.step(step)
""",
    "channels last": """
torch.manual_seed(1)
net = torch.nn.Conv2d(3, 30, 30).to(memory_format=torch.channels_last)
optimizer = torch.optim.AdamW(net.parameters(), fused=True)
keep = Keep(net=net, optimizer=optimizer)
def train(step):
    optimizer.zero_grad(); net(torch.randn(2, 3, 31, 31)).square().mean().backward()
    optimizer.step(); keep.step(step)
    assert all(s["exp_avg"].stride() == p.stride() for p, s in optimizer.state.items())
""",
    "lbfgs": """
torch.manual_seed(1)
net = torch.nn.Linear(3, 1)
optimizer = torch.optim.LBFGS(net.parameters(), max_iter=3)
keep = Keep(net=net, optimizer=optimizer)
def train(step):
    def closure():
        optimizer.zero_grad(); loss = net(torch.randn(8, 3)).square().mean(); loss.backward()
        return loss
    optimizer.step(closure); keep.step(step)
""",
    "tied, frozen, empty and huge, in other types": """
torch.manual_seed(1)
net = torch.nn.Module()
net.a, net.b = (torch.nn.Linear(300, 300, dtype=torch.bfloat16) for _ in range(2))
net.b.weight = net.a.weight
net.empty = torch.nn.Parameter(torch.zeros(0, 3))
net.frozen = torch.nn.Parameter(torch.rand(4), requires_grad=False)
net.register_buffer("scale", torch.tensor(1 + 2j)); net.register_buffer("replaced", torch.zeros(3))
net.last = torch.nn.Linear(300, 300)
optimizer = torch.optim.SGD([p for p in net.parameters() if p.requires_grad], lr=0.1, momentum=0.9)
keep = Keep(net=net, optimizer=optimizer)
def train(step):
    optimizer.zero_grad()
    x = net.b(net.a(torch.randn(8, 300, dtype=torch.bfloat16)))
    net.last(x.float()).square().mean().backward()
    net.replaced = net.replaced + torch.rand(3)
    optimizer.step(); keep.step(step)
""",
    "views with another sign or fewer numbers": """
torch.manual_seed(1)
net = torch.nn.Linear(3, 1)
for size in (3, 20_000):
    turned = lambda: torch.rand(size, dtype=torch.complex64).conj()
    views = {"conj": turned(), "neg": turned().imag, "whole_neg": torch._neg_view(torch.rand(size))}
    views["expanded"] = torch.rand(2, 1, 1).expand(2, size, 3)
    views["repeated"] = torch.tensor(float("nan")).expand(size)
    for name, view in views.items():
        net.register_buffer(f"{name}_{size}", view)
    net.register_parameter(f"frozen_{size}", torch.nn.Parameter(views["expanded"] + 0, requires_grad=False))
    net.get_parameter(f"frozen_{size}").data = torch.rand(1).expand(size)
    net.register_parameter(f"turned_{size}", torch.nn.Parameter(turned()))
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
keep = Keep(net=net, optimizer=optimizer)
def train(step):
    optimizer.zero_grad()
    turned = sum(each.abs().square().mean() for name, each in net.named_parameters() if "turned" in name)
    (net(torch.randn(2, 3)).square().mean() + turned).backward()
    keep.before_change()
    for name, each in net.named_buffers():
        base = each[:, :1, :1] if "expanded" in name else each[:1] if "repeated" in name else each
        base += torch.rand(())
    keep.values["turned"] = net.neg_3
    optimizer.step(); keep.step(step)
""",
    "two optimizers, and an object with an own state": """
import collections, numpy as np
torch.manual_seed(1)
class Loader:
    def __init__(self): self.at, self.big = 0, torch.zeros(100_000)
    def state_dict(self):
        order = collections.OrderedDict(a=np.arange(self.at))
        return {"at": np.int64(self.at), "big": self.big, 3: [b"x", (None, 2.5)], "order": order}
    def load_state_dict(self, state): self.at, self.big, self.seen = int(state["at"]), state["big"], state
net, other = torch.nn.Linear(3, 1), torch.nn.Linear(3, 1)
optimizer = torch.optim.RMSprop(net.parameters())
second = torch.optim.AdamW(other.parameters(), amsgrad=True, fused=True)
loader = Loader()
keep = Keep(net=net, other=other, optimizer=optimizer, second=second, loader=loader)
def train(step):
    for each, o in ((net, optimizer), (other, second)):
        o.zero_grad(); each(torch.randn(4, 3)).square().mean().backward(); o.step()
    loader.at += 3; loader.big = loader.big + step; keep.step(step)
""",
}


@pytest.mark.parametrize("program", OTHERS.values(), ids=OTHERS)
def test_program_goes_on_as_if_it_had_not_been_stopped(agent, program):
    picture = """
import hashlib, io
def picture():
    objects = [each for name, each in sorted(globals().items()) if hasattr(each, "load_state_dict")]
    states = [each.state_dict() for each in objects if not isinstance(each, type)]
    # A restored value is a tensor of its own, without the sign and the memory of the view that was kept.
    values = {**keep.values}
    if "turned" in values: values["turned"] = (values["turned"] + 0).resolve_neg()
    states.append(values)
    file = io.BytesIO(); torch.save(states, file); return hashlib.sha256(file.getvalue()).hexdigest()
"""
    agent.begin()
    with agent.worker(preamble=program + picture) as worker:
        worker.run("train(1); train(2)")
        assert agent.order(agent.joined()) == Answer.KEPT
        assert worker.kill()[1] == ""
    agent.begin(step=2)
    with agent.worker(preamble=program + picture) as worker:
        assert worker.run("keep.restore()") == 2
        worker.run("train(3); train(4)")
        found = worker.run("picture()")
    agent.begin()
    with agent.worker(preamble=program + picture) as worker:
        worker.run("train(1); train(2); train(3); train(4)")
        assert worker.run("picture()") == found


OFF = {
    "bytes": (["train(1); train(2)"], {"memory": 100_000}),
    "not enough memory": (
        [
            "import resource; resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 18, 1 << 18))",
            "train(1); train(2)",
        ],
        {},
    ),
    "no need": (["train(1); train(2)"], {"off": "there is no need"}),
    "Colour": (
        ["import enum", "class Colour(enum.Enum): RED = 1", "keep.values['a'] = Colour.RED", "train(1)"],
        {},
    ),
    "cannot be copied": (
        ["net.register_buffer('s', torch.eye(300).to_sparse())", "train(1)", "train(2)"],
        {},
    ),
    "net.few is a tensor (torch.qint8": (
        [
            "import warnings; warnings.simplefilter('ignore')",
            "few = torch.quantize_per_tensor(torch.rand(3), 0.1, 3, torch.qint8)",
            "net.register_buffer('few', few); train(1); train(2)",
        ],
        {},
    ),
    "values.a.0 has a": (
        ["train(1)", "import types; keep.values['a'] = [types.SimpleNamespace()]", "train(2)"],
        {},
    ),
    "give all objects to that one": (["train(1)", "Keep(net=net)", "train(2)"], {}),
    "not visible": ([], {}),
}


def test_the_program_does_not_change_its_tensors_while_a_periodic_copy_reads_them(agent):
    agent.begin()
    with agent.worker(preamble=model(every=4)) as worker:
        worker.run("import threading; from elasticrs._engine.inside.keep import copier, keeper")
        worker.run("train(1); train(2); train(3); keeper._active._copier.wait_until_complete(60)")
        worker.run("gate, real, seen = threading.Event(), copier.copy_and_sum, []")
        worker.run("sums = lambda: [each.sum().item() for each in net.parameters()]")
        slow = "(gate.wait(), seen.append(sums()), real(*lists))[-1]"
        worker.run(f"copier.copy_and_sum = lambda *lists: {slow}")
        worker.run("train(4); t = threading.Thread(target=train, args=(5,))")
        expected = worker.run("sums()")
        worker.run("t.start(); t.join(0.3)")
        assert worker.run("t.is_alive()")
        worker.run("gate.set(); t.join(); keeper._active._copier.wait_until_complete(60)")
        assert worker.run("seen[0]") == expected
        with closing(agent.file()) as file:
            assert {slot.complete_step for slot in file.slots} >= {4}
        worker.kill()


REPLACED = {
    "memory": "net[0].weight.data = net[0].weight.data.clone()",
    "place in the memory": "net[0].weight.data = torch.rand(40200)[100:40100].view(200, 200)",
    "order of the numbers": "net[0].weight.data = torch.rand(200, 200).t()",
    "numbers with gaps": "net[0].weight.data = torch.rand(200, 400)[:, ::2]",
    "sign": "net[0].weight.data = torch._neg_view(torch.rand(200, 200))",
    "type": "net.double(); optimizer.load_state_dict(optimizer.state_dict())",
    "size": "net[2].weight.data, net[2].bias.data = torch.rand(3, 200), torch.rand(3)",
    "parameters": "net.load_state_dict({k: v + 1 for k, v in net.state_dict().items()}, assign=True)",
    "state of the optimizer": "optimizer.load_state_dict(optimizer.state_dict())",
    "one tensor of the optimizer": "optimizer.state[net[0].weight]['exp_avg'] = torch.rand(200, 200)",
}
"""What a program replaces between two copies, in a change of its state."""


EXTRA = """
class WithExtraState(torch.nn.Linear):
    seen = set()
    def get_extra_state(self): return self.seen
    def set_extra_state(self, state): self.seen = state
net = WithExtraState(3, 1)
keep = Keep(net=net, replicated=True)
"""


def test_the_first_periodic_copy_does_not_wait_for_the_memory_of_the_second(agent):
    agent.begin()
    with agent.worker(preamble=model(every=2)) as worker:
        worker.run("import threading; from elasticrs._engine.inside.keep import file, keeper")
        worker.run("gate, real, seen = threading.Event(), file.SlotRegion.reserve, []")
        state = "keeper._active._copier._is_copied.is_set()"
        slow = f"(seen or gate.wait(), seen.append({state}), real(*each))[-1]"
        worker.run(f"file.SlotRegion.reserve = lambda *each: {slow}")
        worker.run("train(1); train(2)")
        worker.run("gate.set(); keeper._active._copier.wait_until_complete(60)")
        assert worker.run("seen") == [False, True]
        worker.kill()


def test_a_value_that_the_program_changes_in_place_is_kept_as_it_is_now(agent):
    agent.begin()
    with agent.worker(preamble=EXTRA) as worker:
        for step in (1, 2, 3):
            worker.run(f"keep.before_change(); net.seen.add({step}); keep.step({step})")
        assert agent.order(agent.joined()) == Answer.KEPT
        assert worker.kill()[1] == ""
    agent.begin(step=3)
    with agent.worker(preamble=EXTRA) as worker:
        assert worker.run("keep.restore()") == 3
        assert worker.run("sorted(net.seen)") == [1, 2, 3]
        worker.kill()


def test_a_tensor_that_moves_to_a_device_without_memory_turns_keep_off_and_harms_no_worker(agent):
    agent.begin()
    with agent.worker(preamble=model(replicated=True)) as worker:
        worker.run("train(1)")
        name = agent.joined()
        assert agent.order(name) == Answer.KEPT
        moved = "torch.nn.Parameter(torch.empty(200, 200, device='meta'))"
        worker.run(f"keep.before_change(); torch.utils.swap_tensors(net[0].weight, {moved}); keep.step(2)")
        agent.send(name)
        assert agent.notice() == ["keep", "left"]
        assert worker.run("net[0].weight.device.type") == "meta"
        assert "net.0.weight" in worker.kill()[1]
    assert step_of(agent) == 1


@pytest.mark.parametrize("what", REPLACED)
def test_tensors_that_the_program_has_replaced_are_copied_as_they_are_now(agent, what):
    agent.begin()
    with agent.worker(preamble=model(replicated=True)) as worker:
        worker.run("train(1)")
        name = agent.joined()
        assert agent.order(name) == Answer.KEPT
        for step in (2, 3):
            worker.run(f"keep.before_change(); {REPLACED[what]}; keep.step({step})")
            assert agent.order(name) == Answer.KEPT
            assert step_of(agent) == step
        expected = worker.run("picture()[0]")
        assert worker.kill()[1] == ""
    agent.begin(step=3)
    with agent.worker(preamble=model(replicated=True)) as worker:
        if what in ("type", "size"):
            worker.run(REPLACED[what])
        assert worker.run("keep.restore()") == 3
        assert worker.run("picture()[0]") == expected


@pytest.mark.parametrize("said", OFF)
def test_what_cannot_be_kept_is_said_once(agent, said):
    lines, plan = OFF[said]
    agent.begin(**plan)
    if said == "not visible":
        agent.files.places[0] = f"1{agent.files.places[0]}"
    with agent.worker(preamble=model()) as worker:
        for line in lines:
            worker.run(line)
        worker.run("train(11); train(12)")
        code, told = worker.end()
    assert code == 0
    assert told.count("\n") == 1
    assert said in told


def test_a_rank_that_cannot_load_what_another_has_loaded_ends_and_leaves_the_older_copies(programs):
    with closing(KeepAgent(programs, 2)) as agent:
        agent.begin()
        with agent.worker(0, model(2, replicated=True)) as first, agent.worker(1, model(2)) as second:
            for step in range(1, 5):
                for worker in (first, second):
                    worker.run(f"train({step}); keep._keeper._copier.wait_until_complete(60)")
        agent.begin(step=4)
        with agent.worker(0, model()) as first, agent.worker(1, model()) as second:
            second.run("scheduler.load_state_dict = None")
            second.send("keep.restore()")
            assert first.run("keep.restore()") == 4
            code, said = second.end()
            assert code == 1
            assert "step 4 is not restored" in said
        holdings = {rank: agent.files.holding(rank, rank, 2) for rank in (0, 1)}
        assert [sorted(slot.step for slot in each.slots) for each in holdings.values()] == [[3, 4], [3, 4]]
        assert refused_of([*holdings.values()]) == 4
        assert choose(holdings, 2, refused=4, was_replicated=True).step == 3


def test_a_line_that_holds_for_several_ranks_is_written_once(programs):
    with closing(KeepAgent(programs, 2)) as agent:
        for plan, said in (
            ({"off": "no need"}, "elasticrs: keep: Keep is off: no need\n"),
            ({"why": "no copies"}, "elasticrs: keep: no kept state is restored: no copies\n"),
            ({"memory": 100_000}, "elasticrs: keep: rank 0: Keep is off: two copies need "),
        ):
            agent.begin(**plan)
            with agent.worker(0, model()) as first, agent.worker(1, model()) as second:
                for worker in (first, second):
                    worker.run("keep.restore(); train(1); train(2)")
                    worker.run("import gc; gc.collect()")
                (_, line), (_, nothing) = first.end(), second.end()
            assert line.startswith(said)
            assert (line.count("\n"), nothing) == (1, "")
            holdings = {rank: agent.files.holding(rank, rank, 2) for rank in (0, 1)}
            is_off = "memory" in plan
            assert [("--keep-memory" in each.off) for each in holdings.values()] == [is_off] * 2
            assert ("--keep-memory" in choose(holdings, 2).why) is is_off
        agent.begin(why="no copies", has_time=True)
        with agent.worker(0, model()) as worker:
            worker.run("keep.restore()")
            line = worker.end()[1]
        assert re.match(r"elasticrs\[\d{4}-\d\d-\d\dT[\d:.]+(Z|[+-][\d:]+)\]: keep: no kept state", line)


def test_rank_that_is_behind_another_copies_the_step_that_it_is_about_to_end(programs):
    with closing(KeepAgent(programs, 2)) as agent:
        agent.begin()
        with agent.worker(0, model(replicated=True)) as slow, agent.worker(1, model(replicated=True)) as fast:
            slow.run("train(1); train(2)")
            name = agent.joined()
            fast.run("train(1); train(2); train(3)")
            agent.joined()
            slow.run("import threading; t = threading.Timer(0.05, train, (3,)); t.start()")
            assert agent.order(name) == Answer.KEPT
            assert step_of(agent) == 3


FORK = """
pid = os.fork()
if not pid:
    try:
        train(7); keep.restore(); keep.before_change()
        os.write(2, b"child")
    finally:
        sys.excepthook(ValueError, ValueError(), None); os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
"""


def test_forked_child_keeps_nothing(agent):
    agent.begin()
    with agent.worker(preamble=model(replicated=True)) as worker:
        worker.run("train(1); train(2)")
        name = agent.joined()
        worker.run(FORK)
        with closing(agent.file()) as file:
            assert file.words[Head.ENDED] == 3
        assert agent.order(name) == Answer.KEPT
        assert step_of(agent) == 2
        code, said = worker.end()
    assert code == 0
    assert said.startswith("child")


def test_requests_of_other_processes_are_ignored(agent):
    agent.begin()
    with agent.worker(preamble=model(replicated=True)) as worker:
        worker.run("train(1); train(2)")
        name = agent.joined()
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
            for text in (b"end", b"periodic", b"own", b"", b"x" * 1000):
                sender.sendto(text, name)
        worker.run("train(3)")
        assert agent.order(name) == Answer.KEPT
        with closing(agent.file()) as file:
            assert file.words[Head.COPIES] == 1


def test_program_without_standard_error_goes_on(agent):
    agent.begin(memory=100_000)  # Too little, which a line would say.
    with agent.worker(preamble=model() + "sys.stderr.close()\n") as worker:
        worker.run("train(1); train(2); train(3)")
        code, said = worker.end()
    assert (code, said) == (0, "")
