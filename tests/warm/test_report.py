"""What the importing process has told is read to the last whole line, and put into words."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elasticrs.warm import report
from elasticrs.warm.report import LeftOut, Ready, Report
from elasticrs.warm.sources import remember

READY = {"seconds": 4.25, "files": ["/a.py"], "prefixes": ["/lib"], "threads": 1}
TOLD = [
    {"importing": "json"},
    {"imported": "json", "seconds": 0.02},
    {"importing": "deep_speedup"},
    {"left_out": "deep_speedup", "why": "it starts a thread at import", "traceback": None},
    {"importing": "json"},
    {"imported": "json", "seconds": 1},
    {"importing": "torch:nn"},
    {"imported": "torch:nn", "seconds": 3.21},
    {"importing": "broken"},
    {
        "left_out": "broken",
        "why": "it raised KeyError: 'X'",
        "traceback": "Traceback:\n  File\nKeyError: 'X'\n",
    },
    {"importing": "nosuch"},
    {"left_out": "nosuch", "why": report.NOT_FOUND, "traceback": None},
    {"ready": READY},
]


def lines(records):
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def test_all_that_was_told():
    found = report.read(lines(TOLD))
    assert dict(found.imported) == {"json": 1.0, "torch.nn": 3.21}
    assert [one.name for one in found.left_out] == ["deep_speedup", "broken", "nosuch"]
    assert found.importing is None
    assert found.ready == Ready(4.25, ("/a.py",), ("/lib",), 1)
    assert report.left_out_lines(found, is_explicit=False) == [
        "deep_speedup was left out: it starts a thread at import",
        "broken was left out: it raised KeyError: 'X'",
    ]
    assert report.left_out_lines(found, is_explicit=True) == [
        "deep_speedup was left out: it starts a thread at import",
        "broken was left out: it raised KeyError: 'X'",
        *("  Traceback:", "    File", "  KeyError: 'X'"),
        "nosuch was left out: it was not found",
    ]
    assert report.summary(found) == "2 modules imported in 4.2 s (torch.nn 3.2 s, json 1.0 s)"


@pytest.mark.parametrize(
    ("count", "stage"),
    [
        (0, "before the first import"),
        (1, "while importing json"),
        (2, "after importing json"),
        (3, "while importing deep_speedup"),
        (7, "while importing torch.nn"),
        (len(TOLD), "after all modules were imported"),
    ],
)
def test_how_far_it_came(count, stage):
    assert report.stage(report.read(lines(TOLD[:count]))) == stage


def test_a_module_that_was_imported_and_is_guilty_after_all_counts_once():
    again = [{"imported": "a", "seconds": 1}, {"left_out": "a", "why": "it opens a socket at import"}]
    found = report.read(lines(again))
    assert found == Report({}, (LeftOut("a", "it opens a socket at import"),))


@given(st.integers(0, len(lines(TOLD))))
def test_a_torn_line_says_nothing(size):
    data = lines(TOLD)
    whole = data[:size].count(b"\n")
    assert report.read(data[:size]) == report.read(lines(TOLD[:whole]))


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from((*READY, "x")), inner),
    max_leaves=5,
)
RECORDS = st.dictionaries(
    st.sampled_from((*(key for record in TOLD for key in record), "x")), JSON, max_size=3
)


@given(st.lists(RECORDS), st.binary())
def test_nothing_in_the_file_is_trusted(records, junk):
    found = report.read(lines(records) + junk)
    if found.ready is not None:
        assert remember(found.ready.files, found.ready.prefixes, found.imported).changed() is None
    shown = [*report.left_out_lines(found, is_explicit=True), report.stage(found), report.summary(found)]
    assert all(line.isprintable() for line in shown)


def test_times_are_told_of_the_slowest_modules():
    told = Report({"a": 0.01, "b": 2.0, "c": 1.0, "d": 3.0, "e": 0.5})
    assert report.summary(told) == "5 modules imported in 6.5 s (d 3.0 s, b 2.0 s, c 1.0 s)"
    assert report.summary(Report({"a": 0.01})) == "1 module imported in 0.0 s"
