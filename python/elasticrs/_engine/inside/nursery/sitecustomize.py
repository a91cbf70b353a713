"""Runs ``nursery.py``, if the workers' Python (``PYTHON_EXEC``) is recent enough to compile it."""

import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))

if "ELASTICRS_NURSERY_START" not in os.environ:
    if os.environ.pop("ELASTICRS_NURSERY_PID", "") == str(os.getpid()):
        # This process was to preload modules, but one of them called `exec`. Wait until the agent kills us.
        import signal

        while True:
            signal.pause()
    # An import has started this child process, which continues as a normal interpreter.
    sys.path[:] = [entry for entry in sys.path if entry != _here]
    sys.path_importer_cache.pop(_here, None)
    _entries = [entry for entry in os.environ["PYTHONPATH"].split(os.pathsep) if entry != _here]
    if _entries:
        os.environ["PYTHONPATH"] = os.pathsep.join(_entries)
    else:
        del os.environ["PYTHONPATH"]
    del sys.modules["sitecustomize"]
    import sitecustomize  # type: ignore[import-not-found]  # noqa: F401
elif sys.version_info < (3, 10):  # noqa: UP036
    # Exit, because the script would otherwise run in a process that is not a worker.
    os.write(6, b'{"failed": "the workers\' Python is older than 3.10"}\n')
    os._exit(1)
else:
    try:
        from _frozen_importlib_external import SourceFileLoader

        _code = SourceFileLoader(__name__, os.path.join(_here, "nursery.py")).get_code(__name__)
        if _code is None:
            raise ImportError(_here)
    except BaseException:
        os._exit(1)
    exec(_code, globals())
