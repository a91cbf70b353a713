"""The names of the public packages that the engine uses."""

import re
from pathlib import Path

import elasticrs
from elasticrs._engine import public

NAMES = {
    "events",
    "events.get_logging_handler",
    *("rendezvous.registry.find_backend", "rendezvous.registry.handler_of_command_line"),
    *("rendezvous.api", "utils.store._barrier_nonblocking"),
    *("metrics.api.add_sink", "metrics.api.put_metric", "metrics.api.remove_sink"),
    *("multiprocessing.errors.get_error_handler", "multiprocessing.errors.record"),
    *("multiprocessing.logs_specs.attempt_logs", "multiprocessing.logs_specs.make_logs_specs"),
    "timer.file_based_local_timer.FileTimerRequest",
    "timer.file_based_local_timer.log_debug_info_for_expired_timers",
}
"""Public names that programs replace or extend, and the names that belong to them."""


def test_the_engine_uses_only_these_public_names():
    sources = Path(elasticrs.__file__).parent.joinpath("_engine").rglob("*.py")
    used = {name for path in sources for name in re.findall(r'\bpublic\("([^"]*)"\)', path.read_text())}
    assert used == NAMES


def test_each_public_name_exists_and_a_replacement_is_found(monkeypatch):
    for name in NAMES:
        assert public(name) is not None
    monkeypatch.setattr("elasticrs.metrics.api.put_metric", "replaced")
    assert public("metrics.api.put_metric") == "replaced"
