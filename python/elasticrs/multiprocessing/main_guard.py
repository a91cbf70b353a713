"""Detect a launch from a main module that has no ``if __name__ == "__main__":`` guard."""

import sys

MESSAGE = (
    "elasticrs: the main module launched workers again while a worker imported it. "
    'Put the launch under `if __name__ == "__main__":`.'
)


def refuse_while_main_is_imported() -> None:
    """End this process with one line if it is a worker that is still importing the main module.

    Function workers that are started by ``spawn`` or ``forkserver`` import the main module of their parent.
    If that module launches workers without a guard, each worker would launch workers of its own. Python's own
    check raises only after the launch has begun, and each worker would print its long traceback.

    Raises:
        SystemExit: with the message, exit code 1.
    """
    # Look the module up instead of importing it, because the launch path imports as little as possible. Any
    # worker that imports the main module has loaded it.
    process = sys.modules.get("multiprocessing.process")
    if process is not None and getattr(process.current_process(), "_inheriting", False):
        sys.exit(MESSAGE)
