"""Functions run by ``elastic_launch`` see the same environment warm as cold."""

import json
import sys

import pytest
from helpers import procs
from helpers.fidelity import ARGUED, FACTS, differences, flat

pytestmark = pytest.mark.beyond_torchrun

PROGRAM = f"""
import json, os, sys
sys.path.insert(0, {str(FACTS.parent)!r})
from elasticrs import LaunchConfig, elastic_launch
from elasticrs.multiprocessing.errors import ChildFailedError
from elasticrs.multiprocessing import DefaultLogsSpecs


class Thing:
    def __init__(self, value):
        self.value = value


def seen(argument):
    is_warm = "colorsys" in sys.modules
    import facts
    parts = ("interpreter", "process", "signals", "descriptors", "environment", "streams", "threads")
    found = {{name: facts.PARTS[name]() for name in parts}}
    found["function"] = [__name__, argument.value, type(argument) is Thing, sys.modules["__main__"].__name__]
    found["warm"] = is_warm
    return json.loads(json.dumps(found, default=repr))


def fail(how):
    if how == "raise":
        raise ValueError("in the function")
    sys.exit(7) if how == "exit" else os._exit(8)


if __name__ == "__main__":
    # Not in the arguments, which are compared.
    method, warm, how = open("how").read().split()
    config = LaunchConfig(
        1, 1, 2 if how == "see" else 1, rdzv_backend="c10d", run_id="job", start_method=method, warm=warm,
        max_restarts=0, logs_specs=DefaultLogsSpecs(os.path.abspath("logs")),
    )
    launched = elastic_launch(config, seen if how == "see" else fail)
    try:
        values = launched(Thing(3) if how == "see" else how)
    except ChildFailedError as error:
        ((rank, failure),) = error.failures.items()
        message = failure.message
        if isinstance(message, dict):
            message["extraInfo"].pop("timestamp", None)
        values = {{rank: [failure.exitcode, message]}}
        print(values, file=sys.stderr)
    with open("values.json", "w") as file:
        json.dump(values, file)
"""
ARGUED_HERE = ARGUED | {
    r"[01]/warm": "tells them apart",
    r"[01]/descriptors/\d\d/.*": "the pipes of multiprocessing have the numbers that were free in the agent",
}


@pytest.fixture
def values(launch, tmp_path, worker_script):
    """Return a function that runs the program and returns the results of its functions, keyed by rank and
    flattened.
    """
    program = worker_script(PROGRAM, "program.py")

    def run(method, warm, how):
        (tmp_path / "how").write_text(f"{method} {warm} {how}")
        launch(program, argv=(sys.executable,)).exits(0)
        procs.reap_adopted()
        return json.loads((tmp_path / "values.json").read_bytes())

    return run


@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_functions_see_the_same_environment_warm_and_cold(values, method):
    cold, warm = (values(method, how, "see") for how in ("off", "json,colorsys"))
    if found := differences(flat(cold), flat(warm), ARGUED_HERE):
        pytest.fail("\n".join([f"{len(found)} facts differ:", *found]), pytrace=False)
    assert [each["warm"] for each in warm.values()] == [method == "spawn"] * 2


@pytest.mark.parametrize("how", ["raise", "exit", "end"])
def test_function_failures_are_the_same_warm_and_cold(values, how):
    cold, warm = (values("spawn", each, how) for each in ("off", "json,colorsys"))
    assert cold == warm
