"""The random number generators of preloaded modules behave as they do in cold workers."""

import importlib.util
import json

import pytest

pytestmark = pytest.mark.beyond_torchrun
needs_numpy = pytest.mark.skipif(importlib.util.find_spec("numpy") is None, reason="needs numpy")

LIBRARY = """
import random
plain, seeded, again, back = random.Random(), random.Random(5), random.Random(5), random.Random()
again.seed()
back.seed(6)
class Own(random.Random):
    pass
own = Own()
random.seed(3)
"""
NUMPY = """
import os
urandom = os.urandom
import numpy
from numpy.random import Generator, MT19937, PCG64, Philox, RandomState, SFC64
made = {
    "default": numpy.random.default_rng(),
    "mt": Generator(MT19937()), "philox": Generator(Philox()), "sfc": Generator(SFC64()),
    "child": numpy.random.default_rng().spawn(1)[0],
    "legacy": RandomState(),
    "seeded": numpy.random.default_rng(5),
    "seeded by much": Generator(PCG64(2**127 + 1)),
    "legacy seeded": RandomState(5),
    "legacy seeded later": RandomState(),
}
made["legacy seeded later"].seed(7)
"""
DRAWS = """
import os, sys
IS_WARM = "rng_library" in sys.modules
import rng_library, json, random
drawn = {name: getattr(rng_library, name).random() for name in ("plain", "seeded", "again", "back", "own")}
if NUMPY:
    import numpy_library, numpy
    drawn |= {name: float(generator.random(1)[0] if hasattr(generator, "spawn") else generator.rand())
              for name, generator in numpy_library.made.items()}
    drawn["shared"] = float(numpy.random.rand())
    drawn["urandom"] = len({numpy_library.urandom(16), os.urandom(16)}) + random.SystemRandom().random()
os.write(1, (json.dumps([IS_WARM, drawn]) + "\\n").encode())
"""
ALIKE = {"seeded", "back", "seeded by much", "legacy seeded", "legacy seeded later"}


@pytest.fixture
def draw(launch, library, worker_script):
    """Return a function that runs two workers cold and then warm. For each run, it yields the names of the
    draws that were equal in both workers, and the names of all draws.
    """

    def run(libraries):
        env = library(**libraries)
        script = worker_script(DRAWS.replace("NUMPY", str("numpy_library" in libraries)))
        for mode in ("off", ",".join(libraries)):
            job = launch("--nproc-per-node=2", f"--warm={mode}", script, env=env)
            lines = [json.loads(line) for line in job.exits(0).stdout.splitlines()]
            assert {is_warm for is_warm, _ in lines} == {mode != "off"}, job.stderr
            first, second = (drawn for _, drawn in lines)
            yield {name for name in first if first[name] == second[name]}, set(first)

    return run


@pytest.mark.parametrize(
    "libraries",
    [
        {"rng_library": LIBRARY},
        pytest.param({"rng_library": LIBRARY, "numpy_library": NUMPY}, marks=needs_numpy),
    ],
    ids=["random", "numpy"],
)
def test_only_unseeded_generators_differ_between_workers(draw, libraries):
    for alike, drawn in draw(libraries):
        assert alike == ALIKE & drawn


@needs_numpy
def test_a_numpy_seed_set_by_an_import_is_kept(draw):
    for alike, _ in draw({"rng_library": LIBRARY, "numpy_library": f"{NUMPY}\nnumpy.random.seed(9)\n"}):
        assert "shared" in alike


def test_a_module_of_the_user_named_random_is_found(launch, tmp_path, worker_script):
    (tmp_path / "random.py").write_text("mine = 1\n")
    script = worker_script(
        "import os, sys\nWARM = 'colorsys' in sys.modules\nimport colorsys, random\n"
        "os.write(1, f'{WARM} {random.mine} '.encode())\n"
    )
    job = launch("--nproc-per-node=2", "--warm=colorsys", script).exits(0)
    assert job.stdout == "True 1 True 1 ", job.stderr
