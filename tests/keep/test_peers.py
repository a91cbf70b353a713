"""Copies of sharded state on a partner node."""

import os
import signal

import pytest
from helpers import ports
from helpers.procs import reap_adopted, wait_until
from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.inside.keep import layout, nodes
from elasticrs._engine.inside.keep.choice import Holding, KeptSlot
from elasticrs._engine.inside.keep.layout import Mode
from elasticrs._engine.inside.keep.peers import sources, without_second_copy


@given(st.integers(1, 50))
def test_nodes_form_pairs_and_one_triple_if_their_number_is_odd(count):
    found = sources(count)
    assert sorted(found) == list(range(count))
    in_triple = [node for node in range(count) if found[found[node]] != node]
    assert len(in_triple) == (3 if count % 2 and count > 1 else 0)
    assert all(found[found[found[node]]] == node for node in in_triple)
    assert count == 1 or all(source != node for node, source in enumerate(found))


@given(st.lists(st.integers(0, 3), min_size=2, max_size=12), st.integers(1, 3))
def test_a_copy_is_sent_only_if_no_other_node_has_the_same(contents, per_node):
    copies, parts = [(7, each) for each in contents], range(0, len(contents), per_node)
    places = [(first, len(contents[first : first + per_node])) for first in parts]
    sent = without_second_copy(copies, places)
    for rank, content in enumerate(contents):
        others = [each for each in range(len(contents)) if each // per_node != rank // per_node]
        assert (rank in sent) == all(contents[other] != content for other in others)


@st.composite
def lost_nodes(draw):
    """Holdings of sharded ranks on 2 to 5 nodes, some of which are lost. Each rank has the secured step."""
    count, per_node = draw(st.integers(2, 5)), draw(st.integers(1, 2))
    lost = draw(st.sets(st.integers(0, count - 1), max_size=2))
    taken_from, found = sources(count), []
    for node in range(count):
        holdings, partners = [], []
        for local_rank in range(per_node):
            slots = [KeptSlot(0, 10, 1, 3, 50 + local_rank, sequence=1)]
            if draw(st.booleans()):
                slots.append(KeptSlot(1, 20, 1, 3, 60 + local_rank, sequence=2))
            held = Holding(tuple(slots), frozenset((20,)), attempt=1, ended=23, mode=Mode.SHARDED)
            rank = {"rank": node * per_node + local_rank}
            holdings.append(None if node in lost else {**rank, "holding": held.to_json()})
            slots = [KeptSlot(layout.SLOTS, 10, 1, 3, 50 + local_rank, sequence=1)]
            if draw(st.booleans()):
                slots.append(KeptSlot(layout.SLOTS + 1, 20, 1, 3, 60 + local_rank, sequence=2))
            held = Holding(tuple(slots), has_joined=False)
            rank = {"rank": taken_from[node] * per_node + local_rank}
            partners.append([] if node in lost else [{**rank, "holding": held.to_json()}])
        facts = {
            "barred_from": None,
            "refused": None,
            "was_replicated": False,
            "has_peers": True,
            "first_rank": node * per_node,
        }
        ranks_before = 0 if node in lost else count * per_node
        found.append({**facts, "holdings": holdings, "partners": partners, "ranks_before": ranks_before})
    return found, lost, taken_from, per_node


@given(lost_nodes())
def test_the_secured_step_survives_the_loss_of_any_node_whose_partner_is_there(case):
    found, lost, taken_from, per_node = case
    choice = nodes.chosen(found, len(found) * per_node)
    if all(taken_from.index(node) not in lost for node in lost):
        assert choice["step"] in (10, 20)
        assert (choice["exact"], choice["behind"]) == (True, [])
        for node in range(len(found)):
            for local_rank in range(per_node):
                rank = node * per_node + local_rank
                _, (at, local, index, _) = nodes.source_of(choice, node, local_rank, rank)
                assert (at, local) == (taken_from.index(node) if node in lost else node, local_rank)
                assert (index >= layout.SLOTS) == (node in lost)
    else:
        assert choice["step"] is None


TRAINS = """
    import hashlib, os, sys, threading, torch, torch.distributed as dist
    from elasticrs import Keep

    steps, pause = int(sys.argv[1]), float(sys.argv[2])
    dist.init_process_group("gloo")
    rank, number = dist.get_rank(), os.environ["ELASTICRS_ROUND"]
    torch.manual_seed(100 + rank)
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    keep = Keep(model=model, optimizer=optimizer, every=5)
    step = keep.restore()
    source = keep.source
    print(f"BEGIN {number} {rank} {step} {source and (source.tier, source.exact)}", flush=True)
    while step < steps:
        optimizer.zero_grad()
        out = model(torch.randn(4, 64)).square().mean()
        total = out.detach().clone()
        dist.all_reduce(total)
        (out * total).backward()
        optimizer.step()
        threading.Event().wait(pause)
        step += 1
        keep.step(step)
        print("STEP", number, rank, step, flush=True)
    found = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    print("END", rank, hashlib.sha256(found).hexdigest(), flush=True)
    dist.destroy_process_group()
"""


@pytest.fixture
def agents(launch, worker_script):
    """Start agents of a job with three nodes. The first agent hosts the store."""
    script, port = worker_script(TRAINS), ports.free()
    options = ("--nnodes=3", "--nproc-per-node=1", "--rdzv-backend=c10d", f"--rdzv-endpoint=localhost:{port}")
    more = ("--rdzv-id=k", "--max-restarts=1", "--warm=torch", "--keep-peers=1", script)

    def start(count, *arguments):
        job = [launch(*options, *more, *arguments)]
        wait_until(lambda: not ports.is_free(port))
        return job + [launch(*options, *more, *arguments) for _ in range(count - 1)]

    return start


def said(job, word):
    return sorted(match.group(1) for agent in job for match in agent._matches(rf"{word} (.*)", "stdout"))


@pytest.mark.torch
@pytest.mark.slow
def test_a_lost_node_costs_the_steps_since_the_last_secured_copy(agents):
    job = agents(3, "60", "0")
    assert [agent.wait() for agent in job] == [0, 0, 0]
    expected = said(job, "END")
    job = agents(4, "60", "0.05")
    host, *others = job
    host.wait_for_line(r"STEP 1 \d 40")
    for agent in others:
        agent.read_for(0.05)
    lost = next(agent for agent in others if said([agent], "BEGIN"))
    os.kill(lost.pid, signal.SIGKILL)
    left = [agent for agent in job if agent is not lost]
    codes = [agent.wait() for agent in left]
    lost.wait()
    reap_adopted()
    assert codes == [0, 0, 0]
    assert said(left, "END") == expected
    begun = [line.split() for line in said(left, "BEGIN 2")]
    (step,) = {int(words[1]) for words in begun}
    ended = max(int(line.split()[1]) for line in said(job, "STEP 1"))
    # The copies are 5 steps apart, and one of them may be on its way.
    assert 0 < ended - step <= 11
    assert f"step {step} is downloaded from node" in job[3].stderr
    lines = "".join(agent.stderr for agent in left)
    assert f"the training continues at step {step}, copied by 3 of 3 ranks" in lines
    assert "from the copy on node" in lines
    assert sorted(words[2] for words in begun) == ["('memory',", "('memory',", "('peer',"]
    assert all(words[3] == "True)" for words in begun)
