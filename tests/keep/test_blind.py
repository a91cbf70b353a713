"""State that cannot be copied at a failure: it is on a GPU, or changes outside of the optimizer's step."""

import re
from contextlib import closing

import pytest
from helpers.keep_agent import model, step_of

from elasticrs._engine.inside.keep.layout import Answer, Head, Slot, Why

pytestmark = pytest.mark.torch


def find_changed_tensor(agent, name):
    """Let the worker answer the notice of a failure. Its copy finds a tensor that has changed."""
    agent.send(name)
    assert [agent.notice(), agent.notice()] == [["keep", "left"], ["keep", "answered"]]
    with closing(agent.file()) as file:
        assert file.words[Head.ANSWER] == Answer.TENSOR_CHANGED


def test_large_buffer_that_forward_changes_turns_copies_at_death_off(agent):
    agent.begin()
    queue = """
net.register_buffer("queue", torch.zeros(30_000))
net.forward = lambda x, plain=net.forward: (net.queue.add_(1), plain(x))[1]
"""
    with agent.worker(preamble=model(every=3, replicated=True) + queue) as worker:
        worker.run("train(1); train(2)")
        name = agent.joined()
        worker.run("forward()")
        find_changed_tensor(agent, name)
        worker.run("train(3)")
        code, said = worker.end()
    assert code == 0
    assert said.count("\n") == 1
    assert "net.queue" in said
    assert step_of(agent) == 3
    agent.begin(step=3)
    with agent.worker(preamble=model(every=3) + queue) as worker:
        assert worker.run("keep.restore()") == 3
        assert worker.run("int(net.queue[0])") >= 3


FREED = {
    "resize_": "net.queue.resize_(20_000_000)",
    "resize_ of the storage": "net.queue.untyped_storage().resize_(0)",
}
"""How a program frees the memory of a tensor. It is so large that it is unmapped then."""


@pytest.mark.parametrize("how", FREED)
def test_memory_that_the_program_frees_during_a_copy_ends_neither_the_program_nor_keep(agent, how):
    agent.begin()
    queue = 'net.register_buffer("queue", torch.zeros(10_000_000))\n'
    with agent.worker(preamble=model(every=3, replicated=True) + queue) as worker:
        worker.run("from elasticrs._engine.inside.keep import copier, keeper; real = copier.copy_and_sum")
        worker.run("train(1); train(2)")
        name = agent.joined()
        worker.run(f"copier.copy_and_sum = lambda *lists: ({FREED[how]}, real(*lists))[-1]")
        find_changed_tensor(agent, name)
        worker.run("copier.copy_and_sum = real; keep.before_change()")
        worker.run("net.queue.untyped_storage().resize_(40_000_000); net.queue.resize_(10_000_000)")
        worker.run("train(3)")
        code, said = worker.end()
    assert code == 0
    assert said.count("\n") == 1
    assert "net.queue" in said
    assert step_of(agent) == 3


def test_memory_that_is_freed_during_a_second_copy_turns_keep_off_and_leaves_the_copies(agent):
    agent.begin()
    queue = 'net.register_buffer("queue", torch.zeros(10_000_000))\n'
    with agent.worker(preamble=model(every=2, replicated=True) + queue) as worker:
        worker.run("train(1); train(2); train(3)")
        name = agent.joined()
        worker.run("from elasticrs._engine.inside.keep import copier; real = copier.copy_and_sum")
        free = FREED["resize_ of the storage"]
        worker.run(f"copier.copy_and_sum = lambda *lists: ({free}, real(*lists))[-1]")
        agent.send(name)
        while agent.notice() != ["keep", "answered"]:
            pass
        assert agent.file().words[Head.ANSWER] == Answer.TENSOR_CHANGED
        for step in range(4, 9):
            worker.run(f"net.queue.untyped_storage().resize_(40_000_000); train({step})")
        code, said = worker.end()
    assert code == 0
    first, second = said.splitlines()
    assert "cannot copy its state at a failure" in first
    assert re.search(
        "Keep is off: the memory of net.queue is smaller .* or was replaced during a copy", second
    )
    assert step_of(agent) == 2


LIMITED = """
import ctypes, resource, struct
ctypes.CDLL(None).prctl(8, 1)  # PR_SET_KEEPCAPS
os.setresuid(65534, 65534, 65534)
few = 1 << 1 | 1 << 19  # CAP_DAC_OVERRIDE and CAP_SYS_PTRACE, which the agent's files need
ctypes.CDLL(None).capset(struct.pack("Ii", 0x20080522, 0), struct.pack("6I", few, few, 0, 0, 0, 0))

def is_refused():
    resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
    try:
        os._exit(0) if os.fork() == 0 else None
    except BlockingIOError:
        return True
"""
"""Program of another user, to whom a limit of processes applies."""


@pytest.mark.privileged
def test_without_a_further_process_the_copy_is_made_all_the_same(agent):
    agent.begin()
    with agent.worker(preamble=LIMITED + model(replicated=True)) as worker:
        worker.run("train(1); train(2); train(3)")
        name = agent.joined()
        assert worker.run("is_refused()") is True
        assert agent.order(name) == Answer.KEPT
        assert step_of(agent) == 3
        expected = worker.run("picture()")
        assert worker.kill()[1] == ""
    agent.begin(step=3)
    with agent.worker(preamble=model(replicated=True)) as worker:
        assert worker.run("keep.restore()") == 3
        assert worker.run("picture()") == expected


KILLS = """
from elasticrs._engine.inside.keep import copier
real = copier.copy_and_sum

def kill(*lists):
    children, has_ended = f"/proc/self/task/{threading.get_native_id()}/children", threading.Event()
    def strike():
        while not has_ended.is_set():
            with open(children) as file:
                for helper in map(int, file.read().split()):
                    os.kill(helper, signal.SIGKILL)
    killer = threading.Thread(target=strike)
    killer.start()
    try:
        # Copy all tensors a hundred times, so that the helper is killed before it has completed its copy.
        return real(*(100 * each for each in lists))
    finally:
        has_ended.set()
        killer.join()
"""
"""Program that kills each process that copies its state when ``copier.copy_and_sum`` is ``kill``."""


def test_a_killed_helper_costs_its_copy_and_only_three_in_a_row_end_the_copies(agent):
    agent.begin()
    large = 'net.register_buffer("queue", torch.zeros(5_000_000))\n'
    with agent.worker(preamble=model(every=2, replicated=True) + large + KILLS) as worker:
        worker.run("train(1); train(2); train(3)")
        name = agent.joined()
        worker.run("copier.copy_and_sum = kill")
        assert agent.order(name) == Answer.KILLED
        assert step_of(agent) == 2
        worker.run("copier.copy_and_sum = real; signal.signal(signal.SIGTERM, lambda *_: None)")
        assert agent.order(name) == Answer.KEPT
        assert step_of(agent) == 3
        worker.run("copier.copy_and_sum = kill")
        for step in range(4, 9):
            worker.run(f"train({step})")
        code, said = worker.end()
    assert code == 0
    # After an order, the end of step 4 is copied twice, which is said once.
    assert said.count("was killed, perhaps because memory is short; the next copy is tried") == 2
    assert said.count("Keep is off: the process that makes the copy was killed") == 1
    assert "tensor" not in said
    assert step_of(agent) == 3


ON_GPU = """
from elasticrs._engine.inside.keep import keeper, state
waited, made = [], state.Parts.__init__
def make(self, *args): made(self, *args); self.is_on_cpu = False
state.Parts.__init__, torch.cuda.synchronize = make, lambda: waited.append(keeper._active._at)
"""
"""Program whose tensors count as being on a GPU, although this machine may have none."""


def test_state_on_a_gpu_is_copied_only_periodically_and_while_the_training_waits(agent):
    agent.begin()
    with agent.worker(preamble=model(2, replicated=True) + ON_GPU) as worker:
        for step in range(1, 6):
            worker.run(f"train({step})")
            assert worker.run("keeper._active._copier.is_idle()")  # No copy reads tensors any more.
        # Before each copy, all kernels of the GPU have ended.
        assert worker.run("waited") == [2, 4]
        expected = worker.run("picture()[0]")
        worker.send("1 / 0")
        code, said = worker.end()
    assert code == 1
    assert said.count("elasticrs: keep: ") == 1
    assert "cannot copy its state at a failure: it is on a GPU" in said
    # The rank has never told the agent that it can copy its state at a failure.
    agent.notices.settimeout(0)
    with pytest.raises(BlockingIOError):
        agent.notices.recv(4096)
    with closing(agent.file()) as file:
        assert {each.complete_step for each in file.slots} == {2, 4}
        assert {each.words[Slot.WHY] for each in file.slots} == {Why.PERIODIC}
    agent.begin(step=4)
    with agent.worker(preamble=model(2, replicated=True) + ON_GPU) as worker:
        assert worker.run("keep.restore()") == 4
        worker.run("train(5)")
        assert worker.run("picture()[0]") == expected
