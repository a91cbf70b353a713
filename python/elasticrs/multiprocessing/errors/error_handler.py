"""Write a worker's exception to ``TORCHELASTIC_ERROR_FILE``, unlike torch either completely or not at all."""

from __future__ import annotations

import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    import logging
    from typing import Any

    logger: logging.Logger

__all__ = ["ErrorHandler"]

_SHOWN = 1 << 16
"""Maximum number of characters that are logged from an error file before it is replaced."""


def __getattr__(name: str) -> Any:
    # Import lazily, because a worker that never fails does not need `logging`.
    if name == "logger":
        import logging

        return globals().setdefault("logger", logging.getLogger(__name__))
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def _logger() -> logging.Logger:
    found: logging.Logger = globals().get("logger") or __getattr__("logger")
    return found


def _debug(text: str, *args: object) -> None:
    # If the program has not imported `logging`, it cannot have enabled DEBUG. So do not import it here.
    if "logging" in sys.modules:
        _logger().debug(text, *args)


class ErrorHandler:
    """Records exceptions as JSON. Subclasses override :meth:`initialize` and :meth:`record_exception`."""

    _fn_name: str | None = None

    def _get_error_file_path(self) -> str | None:
        """Return the path of the error file; ``None`` if no file is to be written."""
        return os.environ.get("TORCHELASTIC_ERROR_FILE")

    def set_entrypoint_fn_name(self, fn_name: str | None) -> None:
        """Set the qualified name of the decorated function. Called before :meth:`initialize`."""
        self._fn_name = fn_name

    def initialize(self) -> None:
        """Enable :mod:`faulthandler` for all threads, before the decorated function runs. Under an elasticrs
        agent, the stacks of a crash appear in the failure report. Otherwise, they go to stderr.
        """
        import faulthandler

        # Import the hook now, because a signal could interrupt the import in `record_exception`.
        from elasticrs._engine.inside.flight import answer_with_stacks
        from elasticrs._engine.inside.hook import sitecustomize  # noqa: F401

        descriptor = answer_with_stacks()
        try:
            if descriptor is not None:
                faulthandler.enable(descriptor, all_threads=True)
            elif "ELASTICRS_ROUND" not in os.environ or not faulthandler.is_enabled():
                faulthandler.enable(all_threads=True)
        except Exception as error:  # For example, stderr has no file descriptor.
            _warn(f"Unable to enable fault handler. {type(error).__name__}: {error}")

    def record_exception(self, e: BaseException) -> None:
        """Write the exception to the error file, if there is a path. Raise ``OSError`` if that fails."""
        if self._fn_name:
            _debug("recording an exception of %s", self._fn_name)
        path = self._get_error_file_path()
        if path:
            from elasticrs._engine.inside.hook.sitecustomize import undisturbed

            undisturbed(lambda: _write(path, e))

    def record_success(self) -> None:
        """Log at DEBUG level that the function has returned. ``@record`` calls this."""
        if self._fn_name:
            _debug("%s has returned", self._fn_name)

    def maybe_enrich_signal_failure_message(self, message: str, error_file: str) -> str:  # noqa: ARG002
        """Return the failure message for a worker that a signal has killed. By default, this is ``message``.
        ``error_file`` is the path of the worker's error file, beside its logs, or ``"<N/A>"`` if it has none.
        """
        return message

    def override_error_code_in_rootcause_data(
        self, rootcause_error_file: str, rootcause_error: dict[str, Any], error_code: int = 0
    ) -> None:
        """Add the exit code, which the worker cannot know, to the contents of its error file."""
        message = rootcause_error.get("message")
        if isinstance(message, dict):
            message["errorCode"] = error_code
        else:
            _logger().warning(
                "%s has no place for error code %s: no nested `message`", rootcause_error_file, error_code
            )

    def dump_error_file(self, rootcause_error_file: str, error_code: int = 0) -> None:
        """Copy a worker's error file to this process's error file. If it cannot be read, only log this."""
        import json

        from elasticrs._engine.failures.failure import load_object

        try:
            rootcause_error = load_object(rootcause_error_file)
        except (OSError, ValueError) as problem:
            _logger().error("cannot pass on the error file %s: %s", rootcause_error_file, problem)
            return
        if error_code:
            self.override_error_code_in_rootcause_data(rootcause_error_file, rootcause_error, error_code)
        path = self._get_error_file_path()
        if path:
            self._rm(path)
            self._write_error_file(path, json.dumps(rootcause_error))
            _logger().info("wrote %s from %s", path, rootcause_error_file)
        else:
            _logger().error(
                "TORCHELASTIC_ERROR_FILE is not set; the error was: %s", json.dumps(rootcause_error, indent=2)
            )

    def _write_error_file(self, file_path: str, error_msg: str) -> None:
        from elasticrs._engine.inside.error_file import write_whole
        from elasticrs._engine.inside.hook.sitecustomize import undisturbed

        try:
            undisturbed(lambda: write_whole(file_path, error_msg))
        except OSError as error:
            _warn(f"Unable to write error to file. {type(error).__name__}: {error}")

    def _rm(self, my_error_file: str) -> None:
        """Log and remove the error file of this process, which a child of the worker may have written."""
        from elasticrs._engine.inside.error_file import may_be_replaced

        if not os.path.isfile(my_error_file) or not may_be_replaced(my_error_file):
            return
        try:
            with open(my_error_file, encoding="utf-8", errors="replace") as file:
                contents = file.read(_SHOWN)
        except OSError as error:
            contents = f"(cannot be read: {error})"
        _logger().warning("%s exists and is replaced; it contained:\n%s", my_error_file, contents)
        try:
            os.remove(my_error_file)
        # The caller overwrites a file that cannot be removed (it may be bind-mounted).
        except OSError as error:
            _logger().info("%s could not be removed: %s", my_error_file, error)


def _write(path: str, error: BaseException) -> None:
    from elasticrs._engine.inside.error_file import error_document, write_whole

    write_whole(path, error_document(error, "record"))


def _warn(text: str) -> None:
    import warnings

    warnings.warn(text, stacklevel=3)
