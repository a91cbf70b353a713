"""Runs ``nursery.py`` beside it in its place, where Python can read that: ``PYTHON_EXEC`` may be any."""

import os
import sys

if sys.version_info < (3, 10):  # noqa: UP036
    # Some cannot compile the other file: the script would run then, in a process that is no worker.
    os.write(6, b'{"failed": "the workers\' Python is older than 3.10"}\n')
    os._exit(1)

try:
    from _frozen_importlib_external import SourceFileLoader

    _path = os.path.join(os.path.dirname(os.path.abspath(__file__)), "nursery.py")
    _code = SourceFileLoader(__name__, _path).get_code(__name__)
    if _code is None:
        raise ImportError(_path)
except BaseException:
    os._exit(1)
exec(_code, globals())
