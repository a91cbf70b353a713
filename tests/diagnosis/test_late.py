"""Late ranks, found by the times of their calls to collectives in simulated jobs."""

import json
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elasticrs._engine.hangs.late import FEWEST, arrivals_of, late_ranks

STEPS = 60
WORLD = tuple(range(8))
TP = {rank: ("tp", tuple(sorted((rank, rank ^ 1)))) for rank in WORLD}
DP = {rank: ("dp", tuple(each for each in WORLD if each % 2 == rank % 2)) for rank in WORLD}
ACROSS = {rank: ("x", tuple(sorted((rank, rank ^ 4)))) for rank in WORLD}
ALL = dict.fromkeys(WORLD, ("0", WORLD))


class Rank:
    def __init__(self, number):
        self.number, self.now, self.at, self.rows, self.pending = number, 0.0, 0, [], []
        self.counts, self.sends = {}, {}


def simulate(programs, backend="nccl"):
    """Run each rank's program, and return the headers of their flight records. An instruction is a number of
    milliseconds to work, a group to call, ``"wait"`` for all calls so far, or ``("p2p", group)``, a send.
    """
    ranks = {number: Rank(number) for number in programs}
    arrived = {}
    groups = {number: {"0": list(WORLD)} for number in programs}
    is_moving = True
    while is_moving:
        is_moving = False
        for rank in ranks.values():
            program = programs[rank.number]
            while rank.at < len(program):
                word = program[rank.at]
                if word == "wait":
                    if any(len(arrived[key]) < len(key[0][1]) for key in rank.pending):
                        break
                    rank.now = max([rank.now, *(max(arrived[key].values()) for key in rank.pending)])
                    rank.pending.clear()
                elif isinstance(word, (int, float)):
                    rank.now += word
                else:
                    is_p2p = word[0] == "p2p"
                    group = word[1] if is_p2p else word
                    groups[rank.number][group[0]] = list(group[1])
                    sends = rank.sends[group] = rank.sends.get(group, 0) + is_p2p
                    seq = rank.counts[group] = rank.counts.get(group, 0) + (not is_p2p)
                    if not is_p2p:
                        arrived.setdefault((group, seq), {})[rank.number] = rank.now
                        rank.pending.append((group, seq))
                    if not is_p2p or backend == "nccl":
                        at_ns = 10**18 + round(rank.now * 1e6)
                        rank.rows.append([group[0], f"{backend}:all_reduce", seq, seq + sends, is_p2p, at_ns])
                rank.at += 1
                is_moving = True
    assert all(rank.at == len(programs[rank.number]) for rank in ranks.values())
    return {number: {"arrivals": rank.rows, "groups": groups[number]} for number, rank in ranks.items()}


def named(headers, node=WORLD):
    told = {rank: arrivals_of(json.loads(json.dumps(headers[rank]))) for rank in node}
    return late_ranks({rank: arrivals for rank, arrivals in told.items() if arrivals is not None})


def blocking(group):
    return [group, "wait"]


def data_parallel(rank, work):
    return [work(20), *blocking(ALL[rank])]


def buckets(rank, work):
    return [work(10), *[word for _ in range(4) for word in (work(3), ALL[rank])], "wait"]


def mesh(rank, work):
    layers = [word for _ in range(4) for word in (work(3), *blocking(TP[rank]))]
    return [*layers, DP[rank], 20, DP[rank], 20, DP[rank], "wait"]


def clipped(rank, work):
    return [*mesh(rank, work), *blocking(ALL[rank])]


def slow_loader(rank, work):
    return [work(20), *blocking(TP[rank]), 1, *blocking(TP[rank]), 1, *blocking(DP[rank])]


def across_nodes(rank, work):
    return [work(20), *blocking(ACROSS[rank]), *blocking(ALL[rank])]


PROGRAMS = [data_parallel, buckets, mesh, clipped, slow_loader, across_nodes]


def job(program, slow, seed=0, noise=0.2, extra=15.0, **fields):
    """Simulate a job. The ``slow`` ranks need ``extra`` milliseconds more in each step. All work takes up to
    ``noise`` times longer.
    """
    random = Random(seed)

    def steps(rank):
        plain = sum(isinstance(word, str) and word == "work" for word in program(rank, lambda _: "work"))
        more = extra / plain if rank in slow else 0

        def work(span):
            return span * (1 + noise * random.random()) + more

        return [word for _ in range(STEPS) for word in program(rank, work)]

    return simulate({rank: steps(rank) for rank in WORLD}, **fields)


@pytest.mark.parametrize("program", PROGRAMS)
@pytest.mark.parametrize("slow", [{3}, {0}])
@pytest.mark.parametrize("node", [WORLD, WORLD[:4]])
def test_a_slow_rank_is_named_with_its_delay(program, slow, node):
    found = named(job(program, slow, noise=0.02, extra=40.0), node)
    assert found.keys() == slow
    (late,) = found.values()
    assert late.may_wait is (node != WORLD and program is across_nodes)
    assert (late.operation, late.times >= 0.8 * late.of, late.of >= FEWEST) == ("all_reduce", True, True)
    assert 8 < late.lag_ms < 60


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(PROGRAMS),
    st.sets(st.sampled_from(WORLD), max_size=8),
    st.integers(0, 1000),
    st.floats(0, 3),
    st.floats(0, 60),
    st.sampled_from([WORLD, WORLD[:4], WORLD[4:], (0, 3, 4), (1, 2)]),
    st.sampled_from(["nccl", "gloo"]),
)
def test_no_rank_is_named_that_is_not_slow(program, slow, seed, noise, extra, node, backend):
    found = named(job(program, slow, seed, noise, extra, backend=backend), node)
    assert {rank for rank, late in found.items() if not late.may_wait} <= slow
    if set(node) >= slow:
        assert found.keys() <= slow


def test_a_rank_that_waits_for_another_node_is_shown_with_this_doubt():
    headers = job(across_nodes, {7})
    assert {rank: late.may_wait for rank, late in named(headers, WORLD[:4]).items()} == {3: True}
    assert {rank: late.may_wait for rank, late in named(headers).items()} == {7: False}


def test_a_delay_that_persists_because_no_rank_waits_names_no_rank():
    for seed in range(20):
        random = Random(seed)

        def step(rank, random=random):
            return [
                DP[rank],
                10 * random.random(),
                ALL[rank],
                30 + 30 * random.random(),
                ACROSS[rank],
                "wait",
            ]

        programs = {rank: [word for _ in range(STEPS) for word in step(rank)] for rank in WORLD}
        assert named(simulate(programs)) == {}, seed


def test_a_long_wait_at_the_start_does_not_clear_a_slow_rank():
    programs = {rank: [3000 * (rank == 2), *blocking(TP[rank])] for rank in WORLD}
    for rank, program in programs.items():
        program += [word for _ in range(STEPS) for word in slow_loader(rank, lambda span: span)]
        program[2:] = [30 * (rank == 3) if word == 20 else word for word in program[2:]]
    assert named(simulate(programs)).keys() == {3}


def test_no_rank_is_named_if_the_delays_of_all_ranks_differ():
    programs = {rank: [20 + 4 * rank, *blocking(ALL[rank])] * STEPS for rank in WORLD}
    assert named(simulate(programs)) == {}


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_the_ranks_of_a_pipeline_are_not_named(backend):
    def programs(*sends):
        # The first stage of a pipeline always ends its backward pass last.
        return {rank: [2, 20 * (rank == 0), *sends, *blocking(ALL[rank])] * STEPS for rank in WORLD}

    for group in (("pp", WORLD), ALL[0]):
        assert named(simulate(programs(("p2p", group)), backend)) == {}
    # Without sends and receives, the same times name the rank.
    assert named(simulate(programs(), backend)).keys() == {0}


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_group_of_gloo_that_is_never_called_may_be_one_for_sends(backend):
    headers = job(data_parallel, {3}, backend=backend)
    assert {rank: late.may_wait for rank, late in named(headers).items()} == {3: False}
    headers[3]["groups"]["pp"] = [2, 3]
    assert named(headers).keys() == ({3} if backend == "nccl" else set())


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_a_default_group_of_gloo_that_is_never_called_leaves_a_doubt(backend):
    headers = job(mesh, {3}, backend=backend)
    assert {rank: late.may_wait for rank, late in named(headers).items()} == {3: backend == "gloo"}


@pytest.mark.parametrize("steps", [FEWEST, 3])
def test_few_collectives_name_no_rank(steps):
    programs = {rank: [1000 * (rank == 3) + 1, *blocking(ALL[rank])] * steps for rank in WORLD}
    assert named(simulate(programs)) == {}


def test_collectives_within_a_second_name_no_rank():
    programs = {rank: [5 * (rank == 3) + 1, *blocking(ALL[rank])] * 100 for rank in WORLD}
    assert named(simulate(programs)) == {}


def test_one_pause_before_many_calls_names_no_rank():
    calls = [word for _ in range(100) for word in (15, ALL[0])]
    once = {rank: [20 * (rank == 3), *calls, "wait"] for rank in WORLD}
    assert named(simulate(once)) == {}
    assert named(simulate({rank: [*once[rank], *calls, "wait"] for rank in WORLD})) == {}


def test_a_job_without_collectives_names_no_rank():
    assert named({rank: {"arrivals": [], "groups": {}} for rank in WORLD}) == {}
    assert late_ranks({}) == {}


def test_calls_of_different_operations_are_not_compared():
    headers = job(data_parallel, {3})
    for row in headers[3]["arrivals"]:
        row[1] = "nccl:broadcast"
    assert named(headers) == {}


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda each: st.lists(each, max_size=6) | st.dictionaries(st.text(max_size=8), each, max_size=4),
)


@given(JSON, JSON)
def test_a_damaged_header_has_no_times(arrivals, groups):
    found = arrivals_of({"arrivals": arrivals, "groups": groups})
    if found is not None:
        late_ranks({0: found, 1: found})


@given(
    st.permutations([1, 1, 2, "0", "nccl:all_reduce", None]),
    st.sampled_from([None, 3, {"0": [-1]}, {"0": 3}]),
)
def test_a_damaged_row_has_no_time(row, groups):
    assert arrivals_of({"arrivals": [row], "groups": groups}) is None
