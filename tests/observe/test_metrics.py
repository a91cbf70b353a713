"""The API of metrics: torch's names, signatures, texts and order."""

import json

import pytest

from elasticrs import metrics
from elasticrs.metrics import api

TORCHS = "torch.distributed.elastic.metrics"

ALL = """
import importlib, json, sys
print(json.dumps(importlib.import_module(sys.argv[1]).__all__))
"""

CALLS = """
import importlib, json, sys
metrics = importlib.import_module(sys.argv[1])
emitted = []
class Kept(metrics.MetricHandler):
    def emit(self, data):
        emitted.append([data.group_name, data.name, data.value if "duration" not in data.name else 0])
metrics.configure(Kept())
def outer():
    def inner():
        return 1
    return inner
class Agent:
    def work(self):
        raise ValueError
metrics.prof(outer)()
metrics.prof(group="x")(outer())()
try:
    metrics.prof(Agent.work)(None)
except ValueError:
    metrics.put_metric("failed", 1, "y")
print(json.dumps([emitted, metrics.MetricData._fields, metrics.MetricsConfig().params]))
"""


class Kept(metrics.MetricHandler):
    def __init__(self):
        self.data = []

    def emit(self, metric_data):
        self.data.append(metric_data)

    @property
    def values(self):
        return [(data.group_name, data.name, data.value) for data in self.data]


@pytest.fixture
def kept(monkeypatch):
    monkeypatch.setattr(api, "_metrics_map", {})
    monkeypatch.setattr(api, "_default_metrics_handler", metrics.NullMetricHandler())
    monkeypatch.setattr(api, "_sinks", ())
    kept = Kept()
    metrics.configure(kept)
    return kept


@metrics.prof
def fine(number):
    """Says so."""
    return number


@metrics.prof(group="mine")
def broken():
    raise ValueError("no")


class Agent:
    @metrics.prof
    def work(self):
        return 5


def test_a_metric_group_uses_its_own_handler_or_the_default_handler(kept):
    other = Kept()
    metrics.configure(other, "mine")
    metrics.put_metric("a", 1)
    metrics.put_metric("b", 2, "mine")
    assert kept.values == [("torchelastic", "a", 1)]
    assert other.values == [("mine", "b", 2)]
    metrics.getStream("mine").add_value("c", 3)
    assert other.values[-1] == ("mine", "c", 3)


def test_the_console_metric_handler_prints_the_same_line_as_torch(kept, capsys):
    data = metrics.MetricData(1.5, "group", "name", 7)
    metrics.ConsoleMetricHandler().emit(data)
    assert capsys.readouterr().out == "[1.5][group]: name=7\n"


def test_prof_measures_a_function_under_its_qualified_name(kept):
    assert fine(3) == 3
    assert fine.__doc__ == "Says so."
    names = [(group, name) for group, name, _ in kept.values]
    assert names == [("torchelastic", f"test_metrics.fine.{what}") for what in ("success", "duration.ms")]
    assert Agent().work() == 5
    assert kept.values[2] == ("torchelastic", "Agent.work.success", 1)


def test_prof_measures_a_failure_and_raises_it_again(kept):
    with pytest.raises(ValueError, match="no"):
        broken()
    names = [(group, name) for group, name, _ in kept.values]
    assert names == [("mine", "test_metrics.broken.failure"), ("mine", "test_metrics.broken.duration.ms")]


def test_deprecated_metric_functions_warn_and_work(kept):
    with pytest.warns(FutureWarning, match="Deprecated, use `put_metric"):
        metrics.publish_metric("mine", "a", 1)
    with pytest.warns(FutureWarning, match="Deprecated, use `@prof` instead"):

        @metrics.profile("mine")
        def measured():
            return 1

    assert measured() == 1
    assert [name for _, name, _ in kept.values] == ["a", "measured.success", "measured.duration.ms"]


def test_a_metric_sink_gets_every_value_in_addition_to_the_handlers(kept):
    got, others = [], []
    sinks = [lambda *value: got.append(value), lambda *value: others.append(value)]
    for sink in sinks:
        api.add_sink(sink)
    metrics.put_metric("a", 1)
    assert got == others == [("torchelastic", "a", 1.0)]
    assert kept.values == [("torchelastic", "a", 1)]
    # Removing the sink of one agent leaves that of the other agent in place.
    api.remove_sink(sinks[0])
    metrics.put_metric("b", 2)
    assert (len(got), len(others)) == (1, 2)
    api.remove_sink(sinks[1])
    api.remove_sink(sinks[1])


def test_the_names_for_an_import_of_all_are_those_of_torch(torch_programs):
    assert set(json.loads(torch_programs.checked(ALL, f"{TORCHS}.api"))) == set(api.__all__)


def test_the_same_calls_emit_the_same_metrics_as_in_torch(torch_programs):
    outputs = (torch_programs.checked(CALLS, module) for module in ("elasticrs.metrics", TORCHS))
    ours, torchs = (output.splitlines()[-1] for output in outputs)
    assert ours == torchs
