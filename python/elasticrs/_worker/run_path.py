"""What a worker of ``--run-path`` calls."""

import runpy
import sys


def run_script_path(training_script: str, *training_script_args: str) -> None:
    """Run a script in this interpreter, as its main program; torch's name.

    ``sys.exit()`` ends the script, as it does in any other: with torch it is an error here.

    Args:
        training_script: its path.
        training_script_args: its arguments.
    """
    sys.argv = [training_script, *training_script_args]
    try:
        runpy.run_path(training_script, run_name="__main__")
    except SystemExit as exit_:
        if exit_.code not in (None, 0):
            raise
