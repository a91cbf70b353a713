"""Entry function of workers that are started with ``--run-path``."""

import runpy
import sys


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
        if exit_.code not in (None, 0):
            raise
