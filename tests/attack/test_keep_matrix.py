"""Jobs whose state is kept, with failures of every kind and at random moments. Each of them ends as an
undisturbed job, to the last bit, or says in a line why nothing is kept. Nothing is left behind.
"""

import os
import random
import re
import signal
import sys
from contextlib import suppress
from itertools import accumulate, zip_longest
from typing import NamedTuple

import pytest
from helpers import procs
from helpers.kept import ENVIRONMENT, OPTIONS, PROGRAM, KeptTraining
from helpers.kept_nodes import Nodes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.torch,
    pytest.mark.beyond_torchrun,
    pytest.mark.timeout(600),
]

VARIANTS = (
    "adamw",
    "fused",
    "foreach",
    "momentum",
    "closure",
    "two-optimizers",
    "batch-norm",
    "accumulation",
    "autocast",
    "scaled",
    "average",
    "tied",
    "compiled-model",
    "loaded",
    "positioned",
    "fsdp",
)
NODES = (
    "adamw",
    "fused",
    "momentum",
    "closure",
    "two-optimizers",
    "accumulation",
    "scaled",
    "average",
    "fsdp",
)
"""Variants whose ends are the same after the loss of a node: no rank has small state of its own but random
numbers.
"""
CASES = [
    *((variant, ranks, 1) for variant in VARIANTS for ranks in (2, 4, 8)),
    *((variant, *layout) for variant in NODES for layout in ((2, 2), (3, 3), (4, 2), (8, 4))),
]
"""Variants, numbers of ranks and numbers of nodes of the jobs with random kills."""
NEAR = 21
"""Steps after which a failure does not make the restored state suspect."""


class Job:
    """A job that trains with kept state."""

    def __init__(self, launch, folder, *arguments, ranks=2, options=(), env=None, argv=None):
        self.training = KeptTraining(folder, ranks)
        command = (*OPTIONS, f"--nproc-per-node={ranks}", *options, PROGRAM, folder, *arguments)
        self.launched = launch(*command, env={**ENVIRONMENT, **(env or {})}, argv=argv)

    def ends(self):
        """Wait until the job has succeeded. Return the digest of each rank's state."""
        self.launched.exits(0, timeout=300)
        ends = self.training.ends()
        assert len(ends) == self.training.ranks
        return ends

    def pid(self, rank, attempt):
        return self.training.wait_for(self.launched, "restored", rank=rank, attempt=attempt).pid

    def reaches(self, steps, attempt):
        """Wait until rank 0 has ended this many steps of an attempt. Return the seconds that a step takes."""
        begin = self.training.wait_for(self.launched, "restored", rank=0, attempt=attempt).step
        middle, end = (
            self.training.wait_for(self.launched, "ended", rank=0, attempt=attempt, step=step)
            for step in (begin + steps // 2, begin + steps)
        )
        return (end.at_ns - middle.at_ns) / (end.step - middle.step) / 1e9


class ForkedJob(Job):
    """A job on one or several nodes. Its processes are forks of one that has imported torch, because a new
    node would import torch for seconds.
    """

    def __init__(self, launch, folder, *arguments, ranks, nodes=1, options=()):
        self.training = KeptTraining(folder, ranks)
        each = (
            "--max-restarts=99",
            f"--nproc-per-node={ranks // nodes}",
            *options,
            PROGRAM,
            folder,
            *arguments,
        )
        if nodes == 1:
            self.launched = launch("--standalone", *each, env=ENVIRONMENT)
        else:
            self.launched = Nodes(launch, f"--nnodes={nodes}", *each, are_forks=True, env=ENVIRONMENT)
            # One of the agents is a spare.
            self.launched.start(nodes + 1)


@pytest.fixture
def job(launch, tmp_path):
    """Return a function that starts a job."""

    def start(name, *arguments, **how):
        return Job(launch, tmp_path / name, *arguments, **how)

    return start


ENDS = {}
"""Ends of undisturbed jobs by their arguments."""


@pytest.fixture
def calm(launch_with_torch, tmp_path):
    """Return a function that returns the end of an undisturbed job."""

    def run(*arguments, ranks=2):
        key = (*arguments, ranks)
        if key not in ENDS:
            ENDS[key] = ForkedJob(launch_with_torch, tmp_path / "calm", *arguments, ranks=ranks).ends()
        return ENDS[key]

    return run


def faults(*texts):
    """Return the arguments of the program for these faults."""
    return [argument for text in texts for argument in ("--fault", text)]


KILLS = int(os.environ.get("ELASTICRS_KEEP_KILLS", "11"))
"""Number of kills for each variant and number of ranks."""
SEED = os.environ.get("ELASTICRS_KEEP_SEED", "0")
"""Seed of the kinds of kills, the killed ranks, and the delays before the kills."""
PACE = 45
"""Maximum number of steps between two kills."""
SHORT = ("start", "restore", "start-node", "restore-agent")
"""Kinds of kills that end an attempt in its first steps."""
LOSSES = ("agent", "node", "any+node", "copy-agent", "start-node", "restore-agent")
"""Kinds of kills that cost a node."""


class Kill(NamedTuple):
    """How an attempt ends.

    Attributes:
        kind: ``any`` kills a rank at a random time. ``pair`` kills another rank shortly after it. ``copy``
            kills a rank in a copy, and ``double`` a second one in its copy after the death of the first.
            ``start`` kills a rank while it starts and restores its state, and ``restore`` in the middle of
            restoring. On several nodes, ``agent`` kills the agent of a rank at a random time, ``node`` the
            agent and all its workers, and ``any+node`` the node of another rank shortly after a rank.
            ``copy-agent``, ``start-node`` and ``restore-agent`` are the kinds above for agents and nodes.
        rank: the rank that is killed (first).
        other: another rank.
        chance: random number below 1.
    """

    kind: str
    rank: int
    other: int
    chance: float

    def faults(self, attempt, begin):
        """Return the faults of the program for this kill. The attempt begins at most at step ``begin``."""
        step = begin + NEAR
        if self.kind in ("copy", "copy-agent"):
            return [f"{self.kind}:{attempt}:{self.rank}:{step}"]
        if self.kind == "double":
            return [f"kill:{attempt}:{self.rank}:{step}", f"copy:{attempt}:{self.other}:{step}"]
        if self.kind in ("restore", "restore-agent"):
            return [f"{self.kind}:{attempt}:{self.rank}:0"]
        return []

    def strike(self, job, attempt):
        """Kill as planned, unless the program has a fault for it."""
        if self.kind in ("any", "pair", "agent", "node", "any+node"):
            pace = job.reaches(NEAR, attempt)
            first, second = (job.pid(rank, attempt) for rank in (self.rank, self.other))
            delay = (PACE - NEAR) * pace
        elif self.kind in ("start", "start-node"):
            first = job.training.wait_for(job.launched, "start", rank=self.rank, attempt=attempt).pid
            delay = 0.1
        else:
            return
        job.launched.read_for(self.chance * delay)
        if self.kind in ("agent", "node", "start-node"):
            job.launched.kill(first, is_whole=self.kind != "agent")
        else:
            os.kill(first, signal.SIGKILL)
        if self.kind in ("pair", "any+node"):
            job.launched.read_for(self.chance * 0.01)
            # The launcher may have stopped this rank already.
            with suppress(ProcessLookupError):
                if self.kind == "pair":
                    os.kill(second, signal.SIGKILL)
                else:
                    job.launched.kill(second, is_whole=True)


def random_kills(rng, ranks, nodes):
    """Return random kills. A restored state that fails at once twice in a row would be set aside, so after a
    kill in the first steps of an attempt, the next attempt goes further.
    """
    kills = []
    while len(kills) < KILLS:
        kinds = ["any", "any", "any", "any", "pair", "copy", "double"]
        if nodes > 1:
            kinds = [
                "any",
                "pair",
                "copy",
                "double",
                "agent",
                "agent",
                "node",
                "node",
                "any+node",
                "copy-agent",
            ]
        if kills and kills[-1].kind not in SHORT:
            kinds += ["start", "restore"]
            # A third node has the state, also if the two others are lost before they have restored it.
            if nodes > 1 and (nodes > 2 or kills[-1].kind not in LOSSES):
                kinds += ["start-node", "restore-agent"]
        kills.append(Kill(rng.choice(kinds), *rng.sample(range(ranks), 2), rng.random()))
    return kills


@pytest.mark.parametrize(("variant", "ranks", "nodes"), CASES)
def test_random_kills_change_nothing(
    launch_with_torch, tmp_path, calm, variant, ranks, nodes, record_property
):
    kills = random_kills(random.Random(f"{SEED} {variant} {ranks} {nodes}"), ranks, nodes)
    begins = [*accumulate((PACE * (kill.kind not in SHORT) for kill in kills), initial=0)]
    arguments = ("--variant", variant, "--steps", str(begins.pop() + PACE), "--every", "7")
    options = ()
    if nodes > 1:
        # Steps take as long as some comparisons of the nodes.
        arguments = (*arguments, "--seeded", "--pause=0.01")
        options = ("--keep-peers=1",) * (variant == "fsdp")
    ordered = []
    for attempt, (kill, begin) in enumerate(zip(kills, begins, strict=True)):
        # However late a kill comes, its attempt ends no step that the next attempt may not begin at.
        last = begin if kill.kind in SHORT else begin + PACE - 1
        ordered += [*kill.faults(attempt, begin), f"hang:{attempt}:*:{last + 1}"]
    how = {"ranks": ranks, "nodes": nodes, "options": options}
    hurt = ForkedJob(launch_with_torch, tmp_path / "hurt", *arguments, *faults(*ordered), **how)
    for attempt, kill in enumerate(kills):
        kill.strike(hurt, attempt)
        if kill.kind in LOSSES:
            hurt.launched.start()
        hurt.training.wait_for(hurt.launched, "start", rank=0, attempt=attempt + 1)
    ends = hurt.ends()
    lost = hurt.training.lost_by_attempt()
    found, kinds = [], []
    for attempt, kill in enumerate(kills, start=1):
        kinds.append(kill.kind)
        if attempt in lost:
            # Of several kills until all ranks had restored their state, the first one has cost the steps.
            found += zip_longest(kinds, [lost[attempt]], fillvalue=0)
            kinds = []
    record_property("lost", [variant, ranks, nodes, *found])
    print(
        variant,
        ranks,
        nodes,
        found,
        re.findall(r"continues at step .* [1-9]\d* steps? lost.*", hurt.launched.stderr),
    )
    assert ends == calm(*arguments, ranks=ranks)
    assert len(found) == KILLS
    assert max(lost.values()) <= (8 if nodes == 1 else PACE)
    if variant not in ("closure", "fsdp"):
        # Another node has copied its state.
        assert {cost for kind, cost in found if kind in ("agent", "node")} <= {0}


def test_a_killed_agent_of_the_only_node_costs_the_steps_since_the_saved_state(
    launch_with_torch, tmp_path, calm
):
    arguments = ("--steps", "60", "--every", "7")

    def job(name, *fault):
        options = (f"--keep-save={tmp_path / 'saved'}", "--max-restarts=0")
        more = (*arguments, *faults(*fault))
        return ForkedJob(launch_with_torch, tmp_path / name, *more, ranks=2, options=options)

    job("saves", "raise:*:1:20").launched.exits(1)
    hurt = job("hurt", "hang:*:*:40")
    hurt.training.wait_for(hurt.launched, "ended", rank=0, step=39)
    hurt.launched.signal(signal.SIGKILL)
    hurt.launched.exits(-signal.SIGKILL)
    procs.reap_adopted()
    last = job("last")
    assert last.ends() == calm(*arguments)
    begun = [each.training.logged("restored", attempt=0)[0].step for each in (hurt, last)]
    assert begun == [19, 19]


HANGS = ("--hang-timeout", "2")


@pytest.mark.parametrize(
    ("kind", "options"),
    [("raise", ()), ("exit", ()), ("hang", HANGS), ("stop", HANGS)],
    ids=["raise", "exit", "hang", "stop"],
)
@pytest.mark.parametrize("more", [(), ("--sharded",)], ids=["replicated", "sharded"])
def test_a_failure_of_a_rank_that_is_alive_loses_no_step(job, calm, kind, options, more):
    arguments = ("--steps", "60", "--every", "7", *more)
    hurt = job("hurt", *arguments, *faults(f"{kind}:0:1:33"), options=options)
    assert hurt.ends() == calm(*arguments)
    # A stopped process cannot copy its state.
    is_copied = not more or kind != "stop"
    assert hurt.training.lost() == [0 if is_copied else 4]


@pytest.mark.parametrize("variant", ["loaded", "adamw"])
def test_forks_of_a_worker_do_not_disturb(job, calm, variant):
    arguments = ("--steps", "60", "--variant", variant)
    hurt = job("hurt", *arguments, *faults("fork:0:1:10", "kill:0:1:33"))
    assert hurt.ends() == calm(*arguments)
    assert hurt.training.lost() == [0]
    assert "in the child" in hurt.launched.stderr


@pytest.mark.parametrize(
    ("first", "most"),
    [
        # In a periodic copy. The other rank has completed its own, or completes it when it is told to.
        (("copy:0:0:20",), 0),
        # While the copies after another rank's death are made.
        (("kill:0:1:24", "copy:0:0:24"), 8),
        (("raise:0:1:24", "copy:0:0:24"), 8),
        # While the state is restored, in one attempt, and in two.
        (("kill:0:1:24", "restore:1:0:0"), 0),
        (("kill:0:1:24", "restore:1:0:0", "restore:2:1:0"), 24),
        # Soon after a restart, when the copy from before the restart is not overwritten.
        (("kill:0:0:16", "kill:1:0:34", "kill:2:0:47", "copy:2:1:47"), 8),
    ],
    ids=["copy", "kill+copy", "raise+copy", "restore", "restore twice", "after a restart"],
)
@pytest.mark.parametrize("more", [(), ("--sharded",)], ids=["replicated", "sharded"])
def test_a_second_kill_at_the_worst_moment(job, calm, first, most, more):
    arguments = ("--steps", "60", "--every", "7", *more)
    hurt = job("hurt", *arguments, *faults(*first))
    assert hurt.ends() == calm(*arguments)
    print(first, more, hurt.training.lost(), re.findall(r"continues .*", hurt.launched.stderr))
    assert max(hurt.training.lost()) <= (8 if more and most < 8 else most)


@pytest.mark.parametrize("nodes", [1, 2])
def test_ranks_that_die_in_their_copies_soon_after_restarts_go_on_exactly(
    launch_with_torch, tmp_path, calm, nodes
):
    """After the second restart, the ranks have different copies: each was the only one to copy a step at the
    death of the other. Both ranks then die in their next copies.
    """
    # Steps take as long as some comparisons of the nodes.
    arguments = ("--steps", "60", "--every", "7", "--pause=0.01")
    ordered = faults("kill:0:1:24", "kill:1:0:30", "copy:2:0:34", "copy:2:1:34")
    hurt = ForkedJob(launch_with_torch, tmp_path / "hurt", *arguments, *ordered, ranks=2, nodes=nodes)
    assert hurt.ends() == calm(*arguments)
    assert "random numbers" not in hurt.launched.stderr
    # Step 21 stays in case that a restored state makes the training fail, and is the last that both have.
    *first, last = hurt.training.lost()
    assert first == [0, 0]
    assert last <= 21


def test_a_restored_state_that_fails_at_once_is_set_aside_after_two_attempts(job, calm):
    arguments = ("--steps", "90", "--every", "7")
    hurt = job("hurt", *arguments, *faults("kill:0:1:40", "raise:1:1:42", "raise:2:1:42"))
    assert hurt.ends() == calm(*arguments)
    # Look only at the first rank that restores its state. It may fail before the other one restores its own.
    begins = [hurt.training.logged("restored", attempt=attempt)[0].step for attempt in range(4)]
    assert begins[:3] == [0, 39, 41]
    assert begins[3] < 39
    assert "set aside" in hurt.launched.stderr


@pytest.mark.parametrize(
    "limits",
    [
        {"options": ("--keep-memory", "64K")},
        {"options": ("--keep-memory", "0")},
        {"argv": ("prlimit", "--fsize=600000", sys.executable, "-m", "elasticrs.launch")},
    ],
    ids=["option", "zero", "file size"],
)
def test_without_enough_memory_the_training_goes_on_unkept(job, calm, limits):
    arguments = ("--steps", "60", "--width", "4000")
    hurt = job("hurt", *arguments, *faults("kill:0:1:33"), **limits)
    assert hurt.ends() == calm(*arguments)
    assert hurt.training.lost() == [32]
    assert re.search(r"keep: (rank \d: )?Keep is off: .*memory", hurt.launched.stderr)


@pytest.mark.privileged
def test_a_state_too_large_for_the_memory_cgroup_is_not_kept(job, calm):
    """Two copies of a rank's state need 193 MiB. The limit of the cgroup leaves 102 MiB for them."""
    arguments = ("--steps", "9", "--width", "400000")
    with procs.memory_cgroup(2 << 30) as group:
        join = ("sh", "-c", 'echo $$ > "$0/cgroup.procs" && exec "$@"', str(group))
        argv = (*join, sys.executable, "-m", "elasticrs.launch")
        options = ("--keep-memory", "10%")
        hurt = job("hurt", *arguments, *faults("kill:0:1:5"), options=options, argv=argv)
        assert hurt.ends() == calm(*arguments)
    assert hurt.training.lost() == [4]
    off = r"Keep is off: two copies need 193 MiB, and --keep-memory allows this rank (\d+) MiB"
    assert 50 < int(re.search(off, hurt.launched.stderr)[1]) <= 102


@pytest.mark.parametrize("step", range(30, 36))
def test_a_worker_that_writes_random_words_into_its_file_harms_no_training(job, calm, step):
    arguments = ("--steps", "60", "--every", "7")
    hurt = job("hurt", *arguments, *faults(f"scribble:0:1:{step}", f"scribble:1:0:{step + 20}"))
    # A rank whose file was destroyed has no random numbers. If it goes on with new ones, a line says so.
    assert hurt.ends() == calm(*arguments) or "draws new random numbers" in hurt.launched.stderr


def test_under_torchrun_nothing_is_kept_and_nothing_is_said(launch, tmp_path, calm):
    training = KeptTraining(tmp_path / "torchrun")
    torchrun = (sys.executable, "-m", "torch.distributed.run")
    options = ("--standalone", "--nproc-per-node=2", PROGRAM, training.folder, "--steps", "30")
    launched = launch(*options, argv=torchrun, env=ENVIRONMENT).exits(0)
    assert training.ends() == calm("--steps", "30")
    assert "keep" not in launched.stderr
