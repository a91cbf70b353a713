"""A traceback summarized in one line: the exception, and its place in the user's code."""

import builtins
import json
import sys
import traceback

import pytest
from helpers.procs import run_program
from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.inside import error_file
from elasticrs._engine.job.phrases import LIBRARIES, headline, shortened, summarize

LIBRARY = """Traceback (most recent call last):
  File "/data/me/train.py", line 41, in <module>
    main()
  File "/data/me/data/load.py", line 7, in load
    return torch.load(path)
  File "/venv/lib/python3.11/site-packages/torch/serialization.py", line 1500, in load
    with open(path, "rb") as file:
FileNotFoundError: [Errno 2] No such file or directory: 'a.pt'
"""


def test_the_worker_and_the_agent_use_the_same_list_of_library_paths():
    """The list exists twice, because the module that runs in the worker must not import elasticrs."""
    assert error_file._LIBRARIES == LIBRARIES


def test_a_headline_names_the_last_line_in_user_code():
    assert headline(LIBRARY) == f"{LIBRARY.splitlines()[-1]} (load.py:7)"


def test_a_headline_names_a_library_line_if_there_is_no_user_code():
    only = LIBRARY.replace("/data/me", "/usr/lib/python3/dist-packages")
    assert headline(only).endswith("(serialization.py:1500)")


@pytest.mark.parametrize(
    ("text", "line"),
    [
        # If an exception is raised while another one is handled, the last one has ended the worker.
        (LIBRARY + "\nDuring handling of the above exception, another exception occurred:\n\n"
         'Traceback (most recent call last):\n  File "x.py", line 3, in f\n    g()\nValueError: b\n',
         "ValueError: b (x.py:3)"),
        # Show only the first line of a message with several lines, such as those of load_state_dict.
        ('Traceback (most recent call last):\n  File "x.py", line 3, in f\n    g()\n'
         "RuntimeError: Error(s) in loading state_dict for Net:\n\tMissing key(s): a\nand more\n",
         "RuntimeError: Error(s) in loading state_dict for Net: (x.py:3)"),
        ('Traceback (most recent call last):\n  File "x.py", line 3\n    f(\n     ^\n'
         'SyntaxError: \'(\' was never closed\n',
         "SyntaxError: '(' was never closed (x.py:3)"),
        # Another node sends only the end of a long traceback.
        ('…in old\n    call()\n  File "x.py", line 3, in f\n    g()\nKeyError: 1\n', "KeyError: 1 (x.py:3)"),
        ("RuntimeError: no traceback\n", "RuntimeError: no traceback"),
        ("first\nlast\n", "last"),
        ("ValueError: \x1b[31mred\x07\n", "ValueError: ?[31mred?"),
        ("", None),
        ("\n", None),
    ],
)  # fmt: skip
def test_a_traceback_is_summarized_in_one_line(text, line):
    assert headline(text) == line


def test_a_long_exception_message_is_cut():
    assert len(headline("ValueError: " + "x" * 5000)) < 400


CARRIERS = """
import asyncio, json, multiprocessing, sys, traceback
from concurrent.futures import ProcessPoolExecutor
from elasticrs._engine.job.phrases import headline, summarize

def fails(text): raise ValueError(text)                                                     # line 6

def task_group():
    async def rollout(number):
        await asyncio.sleep(0)
        raise TimeoutError(f"generation {number}")                                          # line 11
    async def main():
        async with asyncio.TaskGroup() as group:
            for number in range(2):
                group.create_task(rollout(number))
    asyncio.run(main())

def never_raised(): raise ExceptionGroup("g", [KeyError("a")])                              # line 18

def nested(): raise ExceptionGroup("g", [ExceptionGroup("h", [OSError(1), KeyError(2)]), KeyError(3)])

def many(): raise ExceptionGroup("g", [KeyError(number) for number in range(40)])           # line 22

def group_as_cause():
    try:
        raise ExceptionGroup("g", [OSError(28, "full")])
    except ExceptionGroup as group:
        raise RuntimeError("no checkpoint") from group                                      # line 28

def pool():
    with multiprocessing.Pool(1) as pool: pool.map(fails, ["x"])                            # line 31

def executor():
    with ProcessPoolExecutor(1) as executor: executor.submit(fails, "x").result()

def executor_of_a_library_function():
    with ProcessPoolExecutor(1) as executor: executor.submit(int, "x").result()             # line 37

def handled_pool():
    try:
        pool()
    except ValueError:
        raise KeyError("own")                                                               # line 43

def newline_first(): raise ValueError("\\n  lr: field required\\n  batch: must be > 0")      # line 45

def table(): raise ValueError("no\\n+---------+\\n| a | b |\\n+---------+")                     # line 47

def no_text(): raise RuntimeError                                                           # line 49

if __name__ == "__main__":
    multiprocessing.set_start_method("fork")
    found = {}
    for name in sys.argv[1:]:
        try:
            globals()[name]()
        except Exception as error:
            text = "".join(traceback.format_exception(error))
        found[name] = headline(text), summarize(text).exception
    print(json.dumps(found))
"""

SAID = {
    "task_group": ("TimeoutError: generation 0 (carriers.py:11), and 1 more", "builtins.TimeoutError"),
    "never_raised": ("KeyError: 'a' (carriers.py:18)", "builtins.KeyError"),
    "nested": ("KeyError: 2 (carriers.py:20), and 2 more", "builtins.ExceptionGroup[KeyError, OSError]"),
    "many": ("KeyError: 0 (carriers.py:22), and 39 more", "builtins.KeyError"),
    "group_as_cause": ("RuntimeError: no checkpoint (carriers.py:28)", "builtins.RuntimeError"),
    "pool": ("ValueError: x (carriers.py:6)", "builtins.ValueError"),
    "executor": ("ValueError: x (carriers.py:6)", "builtins.ValueError"),
    "executor_of_a_library_function": (
        "ValueError: invalid literal for int() with base 10: 'x' (carriers.py:37)",
        "builtins.ValueError",
    ),
    "handled_pool": ("KeyError: 'own' (carriers.py:43)", "builtins.KeyError"),
    "newline_first": ("ValueError: lr: field required (carriers.py:45)", "builtins.ValueError"),
    "table": ("ValueError: no (carriers.py:47)", "builtins.ValueError"),
    "no_text": ("RuntimeError (carriers.py:49)", "builtins.RuntimeError"),
}


@pytest.fixture(scope="module")
def carriers(tmp_path_factory):
    """Return the headline and type of exceptions that wrap other exceptions, by the name of the function that
    raises them.
    """
    script = tmp_path_factory.mktemp("carriers") / "carriers.py"
    script.write_text(CARRIERS)
    done = run_program([sys.executable, script, *SAID], timeout=60)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


has_groups = pytest.mark.skipif(sys.version_info < (3, 11), reason="exception groups need Python 3.11")


@has_groups
@pytest.mark.parametrize("name", SAID)
def test_a_headline_is_of_the_exception_that_another_one_carries(carriers, name):
    assert tuple(carriers[name]) == SAID[name]


def text_of(error):
    try:
        raise error
    except BaseException as raised:
        return "".join(traceback.format_exception(raised))


@has_groups
@given(st.lists(st.sampled_from([KeyError, ValueError, OSError]), min_size=1), st.randoms())
def test_the_identity_of_a_group_does_not_depend_on_the_order_of_its_members(kinds, random):
    def group(order):
        return summarize(text_of(builtins.ExceptionGroup("g", [kind("x") for kind in order])))

    shuffled = list(kinds)
    random.shuffle(shuffled)
    one, other = group(kinds), group(shuffled)
    assert (one.exception, one.place, one.more) == (other.exception, other.place, other.more)
    assert one.more == len(kinds) - 1


@has_groups
@given(st.text(), st.integers(400, 1400))
def test_a_shortened_traceback_names_the_same_exception_and_place(text, limit):
    group = builtins.ExceptionGroup("g", [ValueError(text), KeyError("y" * 2000)])
    for error in (ValueError(text), group):
        whole = text_of(error)
        part = shortened(whole, limit)
        assert len(part) <= max(limit, 450)
        one, other = summarize(part), summarize(whole)
        assert (one.said, one.place) == (other.said, other.place)


@given(st.text(st.sampled_from('|+- \n"Traceback (most recent call last):, line 1File'), max_size=300))
def test_any_text_is_summarized(text):
    assert (summarize(text) is None) is not bool(text.strip())
