"""Nodes agree on the kept step from which they go on, and hand copies from node to node."""

import os
import re
import signal
from contextlib import closing, contextmanager

import pytest
from helpers.keep_agent import keep_files
from helpers.kept_nodes import Nodes, published, said
from helpers.procs import reap_adopted, wait_until
from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.inside.keep import layout, nodes
from elasticrs._engine.inside.keep.choice import Choice, Holding, KeptSlot
from elasticrs._engine.inside.keep.file import KeepFile, OffError
from elasticrs._engine.inside.keep.layout import Mode, Slot

MOST = 5
modes = st.sampled_from((Mode.AUTO, Mode.REPLICATED, Mode.SHARDED))


@st.composite
def published_by_all(draw):
    """What the nodes of an attempt publish. Some have missed the attempt before, or are new."""
    per_node, found, ranks = draw(st.integers(1, 3)), [], draw(st.permutations(range(9)))
    mode, check = draw(modes), draw(st.none() | st.just((1, 7)))
    for group_rank in range(draw(st.integers(1, 3))):
        holdings = []
        for local_rank in range(per_node):
            steps = draw(st.lists(st.integers(0, MOST), max_size=2, unique=True))
            slots = tuple(
                KeptSlot(index, step, 1, 3, step, sequence=index + 1) for index, step in enumerate(steps)
            )
            small = frozenset(draw(st.lists(st.integers(0, MOST), max_size=2)))
            attempt = draw(st.integers(1, 2))
            holding = Holding(slots, small, attempt=attempt, ended=MOST, mode=mode, check=check)
            record = {"rank": ranks[group_rank * per_node + local_rank], "holding": holding.to_json()}
            holdings.append(draw(st.sampled_from((record, None))))
        partners = [[] for _ in range(per_node)]
        for records in partners:
            steps = draw(st.lists(st.integers(0, MOST), max_size=2, unique=True))
            for index, step in enumerate(steps):
                slots = (KeptSlot(layout.SLOTS + index, step, 1, 3, step, sequence=index + 1),)
                copies = Holding(slots, has_joined=False).to_json()
                records.append({"rank": draw(st.integers(0, 8)), "holding": copies})
        more = {"ranks_before": 9, "has_peers": draw(st.booleans()), "partners": partners}
        found.append(published(group_rank * per_node, holdings, **more))
    return found


@given(published_by_all())
def test_every_rank_finds_a_copy_of_the_chosen_step(found):
    world = sum(len(each["holdings"]) for each in found)
    choice = nodes.chosen(found, world)
    if choice["step"] is None:
        assert choice["behind"] == []
        return
    for group_rank, each in enumerate(found):
        for local_rank in range(len(each["holdings"])):
            rank = each["first_rank"] + local_rank
            holder, (node, local, index, sequence) = nodes.source_of(choice, group_rank, local_rank, rank)
            record = found[node]["holdings"][local]
            if index >= layout.SLOTS:
                record = next(
                    each
                    for each in found[node]["partners"][local]
                    if each["rank"] == holder and Holding.of_json(each["holding"]).slots[0].index == index
                )
            assert record["rank"] == holder
            kept = Holding.of_json(record["holding"]).slot_of(choice["step"])
            assert (kept.index, kept.sequence) == (index, sequence)
            assert choice["replicated"] or holder == rank
            # A node takes a copy from another node only if it has none.
            has_own = any(place[0] == group_rank for place in choice["where"].values())
            assert node == group_rank or not choice["replicated"] or not has_own
            has_small = not choice["replicated"] or (
                each["holdings"][local_rank] is not None
                and Holding.of_json(each["holdings"][local_rank]["holding"]).has_small(choice["step"])
            )
            assert has_small or rank in choice["behind"]


def test_a_node_without_keep_lets_no_node_restore():
    choice = nodes.chosen([published(0), {"first_rank": 2, "off": "no memory"}], 4)
    assert (choice["step"], choice["no_peers"]) == (None, "")
    assert "no memory" in choice["why"]


@pytest.mark.parametrize(
    ("others", "step"),
    [((8, 8), None), ((7, 7), 7), ((8, 9), 7), ((8, None), 7), ((None, None), 7)],
)
def test_a_newer_checkpoint_is_used_only_if_all_nodes_have_it(others, step):
    holding = Holding((KeptSlot(0, 7),), ended=7, mode=Mode.REPLICATED).to_json()
    found = [
        published(rank, [{"rank": rank, "holding": holding}], other=other, ranks_before=2)
        for rank, other in enumerate(others)
    ]
    choice = nodes.chosen(found, 2)
    assert choice["step"] == step
    assert ("newer step 8" in choice["why"]) is (step is None)


@pytest.mark.parametrize(("seen", "step"), [((7, 7), 7), ((7, 8), None), ((7, None), None)])
def test_saved_state_is_restored_only_if_all_nodes_see_the_same(seen, step):
    saved = [each and {**Choice(each, ranks=2).facts(), "number": "kept-1"} for each in seen]
    found = [published(rank, [None], saved=each) for rank, each in enumerate(saved)]
    choice = nodes.chosen(found, 2)
    assert (choice["step"], bool(choice["why"])) == (step, step is None)


@pytest.mark.parametrize("twins", [None, (0, 2, 2)])
def test_fewer_ranks_restore_their_parts_only_if_these_are_replicated(twins):
    """The first of two nodes with two ranks each is left. Its ranks had the first two of four parts."""
    kept = Holding((KeptSlot(0, 20),), frozenset((20,)), mode=Mode.SHARDED, twins=twins).to_json()
    records = [{"rank": rank, "holding": kept} for rank in (0, 1)]
    choice = nodes.chosen([published(0, records, ranks_before=4)], 2)
    assert choice["step"] == (None if twins is None else 20)
    assert twins or "4 ranks kept step 20, now there are 2" in choice["why"]
    # If another node has taken the place of the lost one, the number of ranks is the same.
    both = [published(0, records, ranks_before=4), published(2, [None, None])]
    assert "ranks 2, 3 had no copy of step 20" in nodes.chosen(both, 4)["why"] or twins


def test_lost_steps_are_counted_from_the_latest_attempt_of_any_node():
    slot = Holding((KeptSlot(0, 27),), frozenset((27,)), mode=Mode.REPLICATED, attempt=3).to_json()
    found = [
        published(rank, [{"rank": rank, "holding": slot}], reached=at, saved=None, ranks_before=2)
        for rank, at in enumerate(([2, 29], [1, 99]))
    ]
    assert nodes.chosen(found, 2)["lost"] == 2
    saved = {**Choice(20, ranks=2, lost=4).facts(), "number": "kept-1"}
    found = [published(rank, [None], reached=[2, 29], saved=saved) for rank in (0, 1)]
    assert nodes.chosen(found, 2)["lost"] == 9
    # The state of four ranks cannot be restored by two, and only the reader can load it.
    other = {**Choice(ranks=4, why="4 ranks saved step 20").facts(), "number": "kept-1"}
    choice = nodes.chosen([published(rank, [None], reached=[2, 29], saved=other) for rank in (0, 1)], 2)
    assert (choice["step"], choice["is_saved"], choice["why"]) == (None, True, "4 ranks saved step 20")


@pytest.mark.parametrize(
    "wrong",
    [
        {"slots": [[1, 2]]},
        {"slots": [[-1, 0, 0, 0, 0, 0, False]]},
        {"small": ["x"]},
        {"ended": 1 << 64},
        {"check": [1]},
        {"unknown": 1},
    ],
)
def test_a_damaged_record_of_another_node_is_refused(wrong):
    record = {**Holding((KeptSlot(0, 1),), frozenset((1,)), ended=3, check=(1, 2)).to_json(), **wrong}
    with pytest.raises((ValueError, TypeError, LookupError)):
        Holding.of_json(record)


class Store(dict):
    """The store of an attempt."""

    set = dict.__setitem__


def test_a_rank_without_keep_tells_others_that_restore_and_others_that_do_not(monkeypatch):
    stores = {}

    class CountingStore(Store):
        def add(self, key, number):
            self[key] = self.get(key, 0) + number

    monkeypatch.setattr(nodes, "Store", lambda name="": stores.setdefault(name, CountingStore()))
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "GROUP_RANK": 1, "LOCAL_RANK": 0}.items():
        monkeypatch.setenv(name, str(value))
    nodes.tell_off("no memory", "/0")
    assert {name: store["copied/1"][1] for name, store in stores.items()} == dict.fromkeys(
        ("", "/0"), "no memory"
    )
    assert stores[""]["node/1"]["off"] == "no memory"


def keep(file, step, data, index=b"index"):
    """Write a copy into the first slot of a file."""
    (slot, _), size = file.slots, layout.HEAD_SIZE + 4096
    slot.reserve(size + len(data))
    slot.begin(index, size, {Slot.STEP: step, Slot.RANK: 5, Slot.WORLD: 8, Slot.DATA_LENGTH: len(data)})
    slot.map[size : size + len(data)] = data
    slot.complete(99, 3)


def test_the_agent_reads_on_which_step_the_nodes_have_agreed():
    facts = {"step": 17, "exact": False, "behind": [1], "why": "because\n", "kept_by": [0], "ranks": 2}
    facts |= {"at_death": 1, "lost": 0, "fallback": 11, "readable": None}
    with keep_files(1) as files:
        files.begin({}, {0: {"rank": "0"}}, None)
        assert files.agreed() is None
        with closing(KeepFile(files.places[0])) as file:
            file.tell_agreed({"rank": "0"}, facts)
            found = files.agreed()
            assert (found.step, found.behind, found.kept_by, found.why) == (17, (1,), (0,), "because?")
            assert set(nodes.FACTS) == set(facts)
            for wrong in ({"step": -1}, {"behind": 3}, {"lost": "x"}):
                file.tell_agreed({"rank": "0"}, {**facts, **wrong})
                assert files.agreed() is None
            file.words[layout.Head.PID] = 1
        files.begin({}, {0: {"rank": "0"}}, None)
        assert files.agreed() is None


@pytest.fixture
def near(monkeypatch):
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "1")


@contextmanager
def offered_copy():
    """Yield the files of two ranks, of which the first has a copy, and what it offers to other nodes."""
    with keep_files(2) as files:
        holder, taker, said = KeepFile(files.places[0]), KeepFile(files.places[1]), []
        keep(holder, 7, os.urandom(3 << 20))
        with closing(nodes._offer(Store(), (0, 0), [holder], 0, said.append)) as handover:
            yield holder, taker, handover.offer
        assert said == []


def test_a_copy_from_another_node_is_the_same(near):
    with offered_copy() as (holder, taker, offer):
        number = nodes.take_copy(offer, "0", taker, 1 << 30)
        source, words, index = holder.slots[0].read_only()
        copy, taken, taken_index = taker.slots[number].read_only()
        data = slice(words[Slot.DATA_AT], words[Slot.DATA_AT] + words[Slot.DATA_LENGTH])
        assert (copy[data], taken_index) == (source[data], index)
        same = (Slot.STATE, Slot.STEP, Slot.RANK, Slot.WORLD, Slot.DIGEST, Slot.DATA_LENGTH)
        assert [taken[word] for word in same] == [words[word] for word in same]


def test_a_copy_that_does_not_fit_is_refused(near):
    with offered_copy() as (_, taker, offer):
        with pytest.raises(OffError):
            nodes.take_copy(offer, "0", taker, 1 << 20)
        assert [slot.complete_step for slot in taker.slots] == [None, None]


HYBRID = """
    import os, signal, sys, torch, torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from elasticrs import Keep

    dist.init_process_group("gloo")
    torch.manual_seed(7)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model, rank = torch.nn.Linear(16, 5), dist.get_rank()
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    keep = Keep(model=model, optimizer=optimizer, every=10)
    step, number = keep.restore(), os.environ["ELASTICRS_ROUND"]
    os.write(1, f"BEGIN {number} {rank} {step} {keep.source and keep.source.from_rank}\\n".encode())
    while step < 30:
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        step += 1
        keep.step(step)
        agent = os.environ["ELASTICRS_KEEP"].split("/")[2]
        if f"{number}:{step}" == sys.argv[1] and agent != open("host").read():
            os.write(1, b"VICTIM\\n")
            signal.pause()
    found = [each.full_tensor().double().sum().item() for each in model.parameters()]
    os.write(1, f"END {found}\\n".encode())
    dist.barrier()
    os._exit(0)
"""

TRAINS = """
    import hashlib, os, signal, sys, torch, torch.distributed as dist
    from elasticrs import Keep

    steps, victim = int(sys.argv[1]), sys.argv[2]
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    model, rank = torch.nn.Linear(16, 4), dist.get_rank()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    torch.manual_seed(100 + rank)
    keep = Keep(model=model, optimizer=optimizer, replicated=True, every=10)
    step, number = keep.restore(), os.environ["ELASTICRS_ROUND"]
    print(f"BEGIN {number} {rank} {step} {keep.source is not None and keep.source.exact}", flush=True)
    # Each rank writes its last step into this file.
    log = os.open(f"ended.{number}.{rank}", os.O_WRONLY | os.O_CREAT)
    is_stopped = False
    def stop(*_):
        global is_stopped
        is_stopped = True
    if sys.argv[3:] == ["gracefully"]:
        signal.signal(signal.SIGTERM, stop)
    while step < steps or victim.startswith(f"{number}:drain"):
        optimizer.zero_grad()
        model(torch.randn(4, 16)).square().mean().backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        step += 1
        keep.step(step)
        os.pwrite(log, b"%20d" % step, 0)
        if is_stopped:
            sys.exit()
        agent = os.environ["ELASTICRS_KEEP"].split("/")[2]
        if victim == f"{number}:drain:{step}" and agent != open("host").read():
            os.kill(int(agent), signal.SIGTERM)
        if victim == f"{number}:{rank}:{step}":
            os.kill(os.getpid(), signal.SIGKILL)
        if victim == f"{number}:all:{step}":
            print("VICTIM", os.getpid(), flush=True)
            os.kill(os.getpid(), signal.SIGSTOP)
    found = b"".join(each.detach().numpy().tobytes() for each in model.parameters())
    print("END", hashlib.sha256(found).hexdigest(), flush=True)
    dist.destroy_process_group()
"""


@pytest.fixture
def agents(launch, worker_script, tmp_path):
    """Start agents of a job with two nodes. A third agent is a spare."""
    script = worker_script(TRAINS)

    def start(count, *arguments, own=("--max-restarts=1",)):
        command = ("--nnodes=2", "--nproc-per-node=1", *own, script, *arguments)
        return Nodes(launch, *command, pid_file=tmp_path / "host").start(count)

    return start


@pytest.mark.torch
@pytest.mark.slow
def test_a_killed_worker_costs_no_step_on_any_node(agents):
    ends = []
    for victim in ("none", "1:1:17"):
        job = agents(2, "30", victim)
        assert [agent.wait() for agent in job] == [0, 0]
        ends.append(set(said(job, "END")))
    assert said(job, "BEGIN") == ["1 0 0 False", "1 1 0 False", "2 0 17 True", "2 1 17 True"]
    assert ends[0] == ends[1]
    assert len(ends[0]) == 1
    assert any("can continue at step 17" in agent.stderr for agent in job)
    # After rank 0 has said that the training continues, its agent does not say that it can.
    (after,) = filter(None, (agent.stderr.partition("training continues at step 17")[2] for agent in job))
    assert "can continue" not in after


@pytest.mark.torch
@pytest.mark.slow
def test_a_lost_node_costs_no_step_because_a_spare_takes_the_copy_of_another_node(agents):
    host, *others = job = agents(3, "30", "1:all:17")
    stopped = host.wait_for_line(r"VICTIM (\d+)")

    def with_victim():
        for agent in others:
            agent.read_for(0.05)
        return [agent for agent in others if said([agent], "VICTIM")]

    (lost,) = wait_until(with_victim)
    os.kill(lost.pid, signal.SIGKILL)
    os.kill(int(stopped.group(1)), signal.SIGCONT)
    (spare,) = (agent for agent in job if agent not in (host, lost))
    assert [host.wait(), spare.wait()] == [0, 0]
    lost.wait()
    reap_adopted()
    begun = said([host, spare], "BEGIN")
    assert [line.split()[2] for line in begun if line.startswith("2 ")] == ["17", "17"]
    assert len(set(said([host, spare], "END"))) == 1
    assert "step 17 is downloaded from node" in spare.stderr


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("how", ["at once", "gracefully"])
def test_a_drained_node_costs_no_step(agents, tmp_path, how):
    job = agents(3, "30", "1:drain:17", how)
    assert sorted(agent.wait() for agent in job) == [0, 0, 1]
    begun = {int(line.split()[2]) for line in said(job, "BEGIN") if line.startswith("2 ")}
    ended = [int((tmp_path / f"ended.1.{rank}").read_text()) for rank in (0, 1)]
    assert begun == {max(ended)}
    assert len(set(said(job, "END"))) == 1
    lines = [line for agent in job for line in agent.stderr.splitlines()]
    told = [line for line in lines if re.search("continues? at step", line)]
    assert {f"step {max(ended)}," in line for line in told} == {True}
    assert sum("can continue" in line for line in told) <= 1  # The spare had no copies.


@pytest.mark.torch
@pytest.mark.slow
def test_the_state_of_a_failed_job_goes_on_in_the_next_one(agents, tmp_path):
    own = ("--max-restarts=0", f"--keep-save={tmp_path / 'saved'}")
    failed = agents(2, "30", "1:1:17", own=own)
    assert [agent.wait() for agent in failed] == [1, 1]
    parts = sorted(path.name.partition(".")[0] for path in (tmp_path / "saved").iterdir())
    assert parts == ["kept-000001"] * 2
    job = agents(2, "30", "none", own=own)
    assert [agent.wait() for agent in job] == [0, 0]
    assert said(job, "BEGIN") == ["1 0 17 True", "1 1 17 True"]
    calm = agents(2, "30", "none")
    assert [agent.wait() for agent in calm] == [0, 0]
    assert set(said(job, "END")) == set(said(calm, "END"))


@pytest.mark.torch
@pytest.mark.slow
def test_a_lost_node_of_replicated_shards_costs_no_step(launch, worker_script, tmp_path):
    """Lose one of two nodes that both have the whole state: ranks 0 and 2 have equal parts, and 1 and 3."""
    options = ("--nnodes=2", "--nproc-per-node=2", "--max-restarts=1", worker_script(HYBRID))

    def job_of(victim):
        return Nodes(launch, *options, victim, pid_file=tmp_path / "host")

    calm = job_of("none").start(2)
    assert [agent.wait() for agent in calm] == [0, 0]
    job = job_of("1:17")
    host, lost = job.start(2)
    lost.wait_for_lines("^BEGIN", 2, "stdout")
    lost.wait_for_lines("^VICTIM", 2, "stdout")
    (spare,) = job.start()
    os.kill(lost.pid, signal.SIGKILL)
    assert [host.wait(), spare.wait(), lost.wait()] == [0, 0, -signal.SIGKILL]
    reap_adopted()
    begun = [line.split()[1:] for line in said([host, spare], "BEGIN") if line.startswith("2 ")]
    holders = {rank: int(holder) for rank, step, holder in begun if step == "17"}
    assert sorted(holders) == ["0", "1", "2", "3"]
    assert [holders[rank] % 2 for rank in sorted(holders)] == [0, 1, 0, 1]
    assert len(set(holders.values())) == 2
    assert set(said([host, spare], "END")) == set(said(calm, "END"))


RESHARDS = """
    import hashlib, os, torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from elasticrs import Keep

    dist.init_process_group("gloo")
    torch.manual_seed(7)
    rank, number = dist.get_rank(), os.environ["ELASTICRS_ROUND"]
    model = torch.nn.Linear(16, 7)
    fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    keep = Keep(model=model, optimizer=optimizer, every=5)

    def picture():
        found = hashlib.sha256()
        for each in model.parameters():
            for tensor in (each, optimizer.state[each]["exp_avg"]):
                found.update(tensor.full_tensor().detach().numpy().tobytes())
        return found.hexdigest()

    def load():
        reader = keep.reader()
        if reader is None:
            return 0
        of_model, of_optimizer = get_state_dict(model, optimizer)
        state = {"model": of_model, "optimizer": of_optimizer}
        dcp.load(state, storage_reader=reader)
        set_state_dict(model, optimizer, model_state_dict=of_model, optim_state_dict=of_optimizer)
        os.write(1, f"LOADED {reader.step} {picture()}\\n".encode())
        return reader.step

    step = keep.restore(default=load)
    end = step + 12
    while step < end or number == "1":
        torch.manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(4, 16)).square().mean().backward()
        optimizer.step()
        step += 1
        if number == "1":
            os.write(1, f"AT {step} {picture()}\\n".encode())
        keep.step(step)
    os.write(1, b"END\\n")
    dist.barrier()
    os._exit(0)
"""


@pytest.mark.torch
@pytest.mark.slow
@pytest.mark.parametrize("how", ["joins", "is lost"])
def test_shards_of_other_nodes_are_loaded_with_another_number_of_ranks(launch, worker_script, tmp_path, how):
    options = {
        "joins": ("--nnodes=2:3", "--rdzv-conf=last_call_timeout=1"),
        "is lost": ("--nnodes=1:2", "--keep-peers=1"),
    }[how]
    command = ("--nproc-per-node=1", "--max-restarts=1", *options, worker_script(RESHARDS))
    nodes_of_job = Nodes(launch, *command, pid_file=tmp_path / "host")
    _, other = job = nodes_of_job.start(2)
    other.wait_for_line("AT 30 ")
    if how == "joins":
        job += nodes_of_job.start()
        assert [agent.wait() for agent in job] == [0, 0, 0]
    else:
        os.kill(other.pid, signal.SIGKILL)
        assert [agent.wait() for agent in job] == [0, -signal.SIGKILL]
        reap_adopted()
    loaded = said(job, "LOADED")
    assert len(loaded) == (3 if how == "joins" else 1)
    assert set(loaded) <= set(said(job, "AT"))
    step = loaded[0].partition(" ")[0]
    assert any(f"can load step {step} with keep.reader()" in agent.stderr for agent in job)
    assert not any("without kept state" in agent.stderr for agent in job)
