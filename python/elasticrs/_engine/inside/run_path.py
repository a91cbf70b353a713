"""Entry function of workers that are started with ``--run-path``."""

import os
import runpy
import sys
import time

from elasticrs._engine.inside.error_file import is_rejection, write_uncaught


def run_script_path(training_script: str, *training_script_args: str) -> None:
    """Run a script in this interpreter as the main program, like torch's function of the same name.

    Unlike in torch, a script that calls ``sys.exit()`` or ``sys.exit(0)`` counts as successful.

    Args:
        training_script: path of the script.
        training_script_args: arguments for the script.
    """
    sys.argv = [training_script, *training_script_args]
    try:
        runpy.run_path(training_script, run_name="__main__")
    except SystemExit as exit_:
        if exit_.code in (None, 0):
            return
        # Record that an argument parser has rejected the arguments, because a restart cannot fix them. If our
        # `sitecustomize` is loaded, it records this itself, and its `sys.exit` uses a subclass of `int`.
        if type(exit_.code) is int and is_rejection(exit_):
            path = os.environ.get("TORCHELASTIC_ERROR_FILE")
            if path:
                write_uncaught(path, exit_, time.monotonic_ns())
        raise
