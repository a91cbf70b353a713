"""The report of the importing process is read up to the last complete line, and printed as messages."""

import json

from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.workers.warm import import_report
from elasticrs._engine.workers.warm.import_report import LeftOut, Ready, Report, remember

READY = {
    "seconds": 4.25,
    "prefixes": ["/lib"],
    "stamps": {"/a.py": [7, 8], "/b.py": []},
}
TOLD = [
    {"importing": "json"},
    {"imported": "json", "seconds": 0.02},
    {"importing": "deep_speedup"},
    {"left_out": "deep_speedup", "why": "a thread", "traceback": None},
    {"importing": "broken"},
    {
        "left_out": "broken",
        "why": "it raises KeyError at import",
        "traceback": "Trace:\n  File\nKeyError: 'X'\n",
    },
    {"importing": "ends"},
    {"ended": 3},
    {"importing": "json"},
    {"imported": "json", "seconds": 1},
    {"importing": "torch:nn"},
    {"imported": "torch:nn", "seconds": 3.21},
    {"ready": READY},
]


def lines(records):
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def test_an_import_report_is_read_from_its_records():
    found = import_report.read(lines(TOLD))
    assert [each.name for each in found.left_out] == ["deep_speedup", "broken", "ends"]
    assert found.left_out[:2] == (
        LeftOut("deep_speedup", "a thread", []),
        LeftOut("broken", "it raises KeyError at import", ["Trace:", "  File", "KeyError: 'X'"]),
    )
    assert "exit code 3" in found.left_out[2].why
    ready = Ready(4.25, ("/lib",), {"/a.py": (7, 8), "/b.py": None})
    assert found == Report({"json": 1.0, "torch.nn": 3.21}, found.left_out, None, ready)


@given(st.integers(0, len(lines(TOLD))))
def test_an_incomplete_last_line_is_ignored(size):
    data = lines(TOLD)
    whole = data[:size].count(b"\n")
    assert import_report.read(data[:size]) == import_report.read(lines(TOLD[:whole]))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from((*READY, "x")), inner),
    max_leaves=5,
)
NAMES = ("failed", *(name for record in TOLD for name in record))
RECORDS = st.dictionaries(st.sampled_from(NAMES), JSON, max_size=3)


@given(st.lists(RECORDS), st.binary())
def test_arbitrary_report_content_gives_only_printable_text(records, junk):
    found = import_report.read(lines(records) + junk)
    if found.ready is not None:
        remember(found.ready.stamps, found.ready.prefixes, found.imported).changes()
    shown = [line for one in found.left_out for line in (one.name, one.why, *one.traceback)]
    assert all(line.isprintable() for line in (*shown, found.importing or "", *found.imported))


def test_an_import_report_is_printed_as_messages(warming):
    def told(records, **event):
        warming.said.clear()
        warming.ends(*records, **event)
        return warming.said

    assert told(TOLD, is_ready=True) == [
        "warm: deep_speedup was left out: a thread",
        "warm: broken was left out: it raises KeyError at import",
        *("  Trace:", "    File", "  KeyError: 'X'"),
        "warm: ends was left out: it ends the process at import (exit code 3)",
    ]
    assert warming.state.is_warm
    assert warming.state.found.ready == Ready(4.25, ("/lib",), {"/a.py": (7, 8), "/b.py": None})
    # Each of the following calls simulates a new importing process.
    cold = "warm: workers start cold: "
    assert told(TOLD[8:11], hung=True) == [f"{cold}the import of torch.nn did not end within 120 s"]
    assert not warming.state.is_warm
    assert told(TOLD[:1], exitcode=-9) == [f"{cold}the import of json died by SIGKILL"]
    assert told([], exitcode=3) == [f"{cold}its start exited with code 3"]
    failed = {"failed": "OSError: no", "traceback": "Trace:\nOSError: no"}
    assert told([failed], exitcode=1) == [f"{cold}OSError: no", "  Trace:", "  OSError: no"]
