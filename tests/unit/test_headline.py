"""A traceback summarized in one line: the exception, and its place in the user's code."""

import pytest

from elasticrs._worker import error_file
from elasticrs.report.traceback_summary import LIBRARIES, headline

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
