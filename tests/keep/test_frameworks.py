"""Unmodified scripts of Lightning and transformers under ``--keep``. Killed at any moment, they end as if
they had not been killed.

The scripts write down each batch and its loss. Those of the run without an accident are what is expected.
"""

import json
import re
from itertools import pairwise
from pathlib import Path

import pytest
from helpers.nodes import meeting
from helpers.procs import HANG

PROGRAMS = Path(__file__).parent / "programs"

pytestmark = [
    pytest.mark.frameworks,
    pytest.mark.slow,
    pytest.mark.torch,
    pytest.mark.beyond_torchrun,
    pytest.mark.timeout(6 * HANG),
]


class Run:
    """What the ranks of a job have written down."""

    def __init__(self, folder, output):
        self.folder, self.output = folder, output
        self.records = [
            [json.loads(line) for line in (folder / f"rank{rank}.jsonl").read_text().splitlines()]
            for rank in range(2)
        ]

    def effective(self, rank):
        """Return what the rank has done in each step, by event. Of a step that was done twice, return what
        the last attempt has done.
        """
        last, done = {}, {}
        for attempt, event, step, *values in self.records[rank]:
            key = (event, step)
            if last.get(key) != attempt:
                last[key], done[key] = attempt, []
            done[key].append(values)
        return {key: values for key, values in done.items() if not key[0].startswith("dies")}

    def first_steps(self, rank=0):
        """Return the first step of each attempt."""
        first = {}
        for attempt, event, step, *_ in self.records[rank]:
            if event == "batch":
                first.setdefault(attempt, step)
        return first

    def lost(self):
        """Return, for each restart, the number of steps that were done again. Do not count the step in which
        the rank died, which was done only in part before.
        """
        steps = {}
        for attempt, event, step, *_ in self.records[0] + self.records[1]:
            if event in ("batch", "trained"):
                steps.setdefault(attempt, []).append(step)
        return [max(0, max(steps[one]) - min(steps[other])) for one, other in pairwise(sorted(steps))]

    def lines(self):
        """Return what Keep has told the user."""
        return [line for line in self.output.splitlines() if re.search(r"elasticrs\S*: keep: ", line)]


@pytest.fixture
def train(launch, tmp_path):
    """Return a function that runs a program to completion, on one node or on more."""

    def train(program, *options, name="run", die=(), nodes=1, **settings):
        folder = tmp_path / name
        folder.mkdir(exist_ok=True)
        environment = {
            "PYTHONPATH": str(PROGRAMS),
            "KEEP_TEST": json.dumps({"folder": str(folder), "die": die, **settings}),
            "OMP_NUM_THREADS": "1",
            # Make a framework fail if it tries to download anything.
            "HF_HUB_OFFLINE": "1",
            "HF_HOME": str(tmp_path),
        }
        place = ("--standalone",) if nodes == 1 else meeting(str(nodes))
        common = (*place, f"--nproc-per-node={2 // nodes}", "--max-restarts=3", "--warm=auto", *options)
        launched = [launch(*common, PROGRAMS / f"{program}.py", env=environment) for _ in range(nodes)]
        ended = [each.exits(0, timeout=5 * HANG) for each in launched]
        return Run(folder, "".join(each.stdout + each.stderr for each in ended))

    return train


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """Remembers what programs have written down without an accident."""
    return {}


def ends_as_without(calm, train, program, die, **settings):
    """Check that a program with accidents does what it does without. Return both runs."""
    key = json.dumps([program, settings])
    if key not in calm:
        calm[key] = train(program, "--keep", name="calm", **settings)
        assert calm[key].lines() == [], calm[key].output
    hurt = train(program, "--keep", name="hurt", die=die, **settings)
    for rank in range(2):
        assert hurt.effective(rank) == calm[key].effective(rank)
    return calm[key], hurt


MOMENTS = {
    "first step": [[0, 1, "forward", 0, "SIGKILL"]],
    "forward": [[0, 1, "forward", 9, "SIGKILL"]],
    "exception": [[0, 1, "forward", 9, "raise"]],
    "copy": [[0, 1, "copy", 1, "SIGKILL"]],
    "before the optimizer": [[0, 0, "before optimizer", 13, "SIGKILL"]],
    "after the optimizer": [[0, 1, "after optimizer", 5, "SIGKILL"]],
    "between two steps": [[0, 1, "begin", 12, "SIGKILL"]],
    "evaluation": [[0, 0, "evaluate", 8, "SIGKILL"]],
    "save": [[0, 0, "save", 1, "SIGKILL"]],
    "loader": [[0, 1, "loader", 11, "SIGKILL"]],
    "after a restart": [[0, 1, "forward", 9, "SIGKILL"], [1, 0, "forward", 9, "SIGKILL"]],
    "restore": [[0, 1, "forward", 9, "SIGKILL"], [1, 0, "restore", 0, "SIGKILL"]],
    "last step": [[0, 1, "forward", 23, "SIGKILL"]],
    "end": [[0, 1, "done", 24, "SIGKILL"]],
}
"""For each test, when ranks die: a list of attempt, rank, moment, step and manner of each death."""

STRANGERS = {
    "with_lightning": {"checkpoints": 8, "options": {"val_check_interval": 8}},
    "with_transformers": {
        "options": {
            "eval_strategy": "steps",
            "eval_steps": 8,
            "save_strategy": "steps",
            "save_steps": 8,
            "logging_strategy": "steps",
            "logging_steps": 3,
        }
    },
    "with_four_lines": {},
    "with_four_lines sharded": {"sharded": True, "every": 4},
}


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("stranger", STRANGERS)
def test_a_script_goes_on_wherever_a_rank_dies(calm, train, stranger, moment):
    program, settings = stranger.partition(" ")[0], STRANGERS[stranger]
    _, hurt = ends_as_without(calm, train, program, MOMENTS[moment], **settings)
    # Attempt 0 may end before rank 0 has recorded a step.
    assert {0, *(record[0] for record in hurt.records[0])} == set(range(len(MOMENTS[moment]) + 1))
    most = settings["every"] + 1 if "sharded" in settings else 0
    # There is nothing to compare if a rank died before the first step, as while DCP saved its first files.
    assert max(hurt.lost(), default=0) <= most


@pytest.mark.parametrize("program", ["with_lightning", "with_transformers"])
def test_a_script_goes_on_after_each_of_three_failures(calm, train, program):
    die = [[0, 1, "forward", 5, "SIGKILL"], [1, 0, "forward", 6, "SIGKILL"], [2, 1, "forward", 20, "raise"]]
    _, hurt = ends_as_without(calm, train, program, die)
    assert hurt.first_steps() == {0: 0, 1: 5, 2: 6, 3: 20}


@pytest.mark.parametrize(
    ("program", "options"),
    [
        ("with_lightning", {"accumulate_grad_batches": 3, "max_steps": 9}),
        ("with_transformers", {"gradient_accumulation_steps": 3, "max_steps": 9}),
    ],
)
def test_gradients_are_accumulated_anew(calm, train, program, options):
    _, hurt = ends_as_without(calm, train, program, [[0, 1, "forward", 5, "SIGKILL"]], options=options)
    assert hurt.first_steps() == {0: 0, 1: 5}


@pytest.mark.parametrize("program", ["with_lightning", "with_transformers"])
@pytest.mark.parametrize("fit", [0, 1])
def test_a_state_is_restored_by_the_training_of_which_it_is(calm, train, program, fit):
    base = 16 if program == "with_lightning" else 0
    died = 9 + base * fit
    die = [[0, 1, f"forward in fit {fit}", died, "SIGKILL"]]
    _, hurt = ends_as_without(calm, train, program, die, fits=2, options={"max_steps": 16})
    starts = {}
    for attempt, event, step, *_ in hurt.records[0]:
        if attempt == 1 and "batch" in event:
            starts.setdefault(event, step)
    # The second training goes on where it was, but the first one is done again before it.
    first, second = (9, base) if fit == 0 else (0, died)
    assert starts == {"batch in fit 0": first, "batch in fit 1": second}


@pytest.mark.parametrize(
    ("moment", "step"),
    [("evaluate", 8), ("begin", 8), ("saved", 8), ("forward", 8), ("evaluate", 16), ("train end", 24)],
)
def test_what_follows_a_step_of_transformers_is_done_once_more(calm, train, moment, step):
    options = {
        "eval_strategy": "steps", "eval_steps": 8, "save_strategy": "steps", "save_steps": 8,
        "logging_strategy": "steps", "logging_steps": 3, "metric_for_best_model": "loss",
        "load_best_model_at_end": True,
    }  # fmt: skip
    die = [[0, 1, moment, step, "SIGKILL"]]
    _, hurt = ends_as_without(calm, train, "with_transformers", die, options=options, patience=3)
    (first,) = [event[2] for event in hurt.records[0] if event[0] == 1 and event[1] == "batch"][:1] or [24]
    assert first == step


@pytest.mark.parametrize("moment", ["evaluate", "forward"])
def test_the_end_of_an_epoch_of_transformers_is_not_left_out(calm, train, moment):
    options = {
        "eval_strategy": "epoch", "save_strategy": "epoch", "logging_strategy": "epoch", "max_steps": -1,
        "num_train_epochs": 2,
    }  # fmt: skip
    die = [[0, 1, moment, 16, "SIGKILL"]]
    ends_as_without(calm, train, "with_transformers", die, options=options)


@pytest.mark.parametrize("program", ["with_lightning", "with_transformers"])
def test_training_on_two_nodes_goes_on(calm, train, program):
    die = [[0, 1, "forward", 9, "SIGKILL"]]
    _, hurt = ends_as_without(calm, train, program, die, nodes=2)
    assert hurt.first_steps() == {0: 0, 1: 9}


def test_manual_optimization_of_lightning_goes_on(calm, train):
    die = [[0, 1, "forward", 14, "SIGKILL"]]
    _, hurt = ends_as_without(calm, train, "with_lightning", die, manual=True, options={"max_steps": 40})
    assert hurt.first_steps() == {0: 0, 1: 14}


def test_what_a_module_of_lightning_changes_after_a_batch_is_kept(calm, train):
    die = [[0, 1, "forward", 9, "SIGKILL"]]
    _, hurt = ends_as_without(calm, train, "with_lightning", die, average=True)
    assert hurt.first_steps() == {0: 0, 1: 9}


def test_the_other_package_of_lightning_goes_on(calm, train):
    die = [[0, 1, "forward", 9, "SIGKILL"]]
    _, hurt = ends_as_without(calm, train, "with_lightning", die, package="pytorch_lightning")
    assert hurt.first_steps() == {0: 0, 1: 9}


@pytest.mark.parametrize(
    ("program", "settings", "steps"),
    [
        ("with_lightning", {"checkpoints": 4, "resume": "last"}, (8, 4)),
        (
            "with_transformers",
            {"resume": "last", "options": {"save_strategy": "steps", "save_steps": 4}},
            (8, 4),
        ),
    ],
)
def test_the_newer_of_a_checkpoint_and_the_kept_state_is_used(calm, train, program, settings, steps):
    die = [[0, 1, "forward", 10, "SIGKILL"]]
    _, hurt = ends_as_without(calm, train, program, die, **settings)
    assert hurt.first_steps() == {0: 0, 1: 10}
    (line,) = [line for line in hurt.lines() if "checkpoint" in line]
    assert "step 8, and step 10 is kept: using the kept state" in line


def test_trainer_test_of_lightning_keeps_nothing(train):
    assert train("with_lightning", "--keep", test=True).lines() == []


@pytest.mark.parametrize(
    ("program", "options", "unknown"),
    [
        ("with_lightning", {"fast_dev_run": 2}, "fast_dev_run"),
        ("with_transformers", {"auto_find_batch_size": True, "max_steps": 2}, "auto_find_batch_size"),
    ],
)
def test_what_is_not_supported_trains_without_being_kept(train, program, options, unknown):
    run = train(program, "--keep", options=options)
    assert {line.partition("this training is not kept: ")[2] for line in run.lines()} == {
        f"--keep does not support {unknown}"
    }
