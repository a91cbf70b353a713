"""Detect a main module that launches workers without an ``if __name__ == "__main__":`` guard."""

import sys

MESSAGE = (
    "elasticrs: the main module launched workers again while a worker imported it. "
    'Put the launch under `if __name__ == "__main__":`.'
)


def refuse_while_main_is_imported() -> None:
    """Exit with a one-line message if this process is a worker that is still importing the main module.

    Function workers that are started with ``spawn`` or ``forkserver`` import the main module of their parent.
    Without a guard in that module, each worker would launch workers itself. Python's own check detects this
    only after the launch has started, and then each worker prints a long traceback.

    Raises:
        SystemExit: this process is such a worker. The exception contains the message, and the exit code is 1.
    """
    # Look up `multiprocessing.process` without importing it, because the launch path imports as little as
    # possible. A worker that is importing the main module has already loaded `multiprocessing.process`.
    process = sys.modules.get("multiprocessing.process")
    if process is not None and getattr(process.current_process(), "_inheriting", False):
        sys.exit(MESSAGE)
