"""The pictures in docs/pictures show what real runs have printed, and elasticrs still prints the same."""

import json
import re
from pathlib import Path

import pytest
from tools import pictures

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def program():
    """The source code of the package, in which each message of several strings is put into one piece."""
    files = sorted((ROOT / "python/elasticrs").rglob("*.py"))
    text = "\n".join(file.read_text(encoding="utf-8") for file in files)
    return re.sub(r'"\s*\n\s*f?"', "", text)


def test_each_picture_is_the_one_that_its_records_give():
    drawn = pictures.pictures()
    assert {path.name for path in pictures.FOLDER.glob("*.svg")} == set(drawn)
    assert [name for name, text in drawn.items() if (pictures.FOLDER / name).read_text("utf-8") != text] == []
    assert max(len(text) for text in drawn.values()) < 150_000


@pytest.fixture(params=["exception", "hang", "node-lost"])
def cast(request):
    return pictures.read_cast(request.param)


def shown(cast):
    return "\n".join(line for _, line in pictures.lines_of(cast))


def events(cast, name):
    return [each for each in cast[0]["events"] if each["name"] == name]


def test_recordings_show_the_times_and_steps_of_their_events(cast):
    restarts = [
        each["metadata"] for each in events(cast, "attempt running") if each["metadata"]["agent_restarts"]
    ]
    for metadata in restarts:
        about = json.loads(metadata["metadata"])
        assert f"{metadata['duration_ms']:.1f} ms after the failure was seen" in shown(cast)
        assert f"can continue at step {about['kept']['step']}" in shown(cast)
    for hang in events(cast, "worker hung"):
        assert json.loads(hang["metadata"]["metadata"])["message"] in " ".join(shown(cast).split())
    assert restarts or "lost" in shown(cast)


def test_the_report_names_the_rank_and_the_line_that_has_failed():
    report = shown(pictures.read_cast("report"))
    rank = re.search(r"rank +: (\d+)", report)[1]
    at = int(re.findall(r"train\.py:(\d+)", report)[-1])
    assert f"rank {rank} of 4: ValueError: a bad batch" in report
    assert "raise ValueError" in pictures.DEMO.read_text(encoding="utf-8").splitlines()[at - 1]


def test_the_recording_of_a_hang_has_one():
    assert len(events(pictures.read_cast("hang"), "worker hung")) == 1


def test_the_lines_of_the_script_that_a_hang_names_are_those_of_the_demo():
    script = pictures.DEMO.read_text(encoding="utf-8").splitlines()
    page = " ".join((ROOT / "docs/install.md").read_text(encoding="utf-8").split())
    for text in (shown(pictures.read_cast("hang")), page):
        waits = re.search(r"of the default group \(train\.py:(\d+)\)", text)
        hangs = re.search(r"called at train\.py:(\d+)", text)
        assert "loss.backward()" in script[int(waits[1]) - 1]
        assert "never_filled.get()" in script[int(hangs[1]) - 1]


MESSAGES = {
    "exception": (
        "side effects",
        "failure was seen",
        "copied at the failure",
    ),
    "report": (
        "Root Cause",
        "Stopped by elasticrs after",
        "another attempt may succeed",
    ),
    "hang": ("keeps the other ranks waiting", "did not enter it", "no heartbeat"),
    "node-lost": ("was lost", "; stopping round", "no restart charged", "training continues"),
}
"""For each recording, parts of the messages in it, without figures and names, which differ between runs."""


@pytest.mark.parametrize(("name", "message"), [(name, each) for name in MESSAGES for each in MESSAGES[name]])
def test_the_program_still_says_what_a_recording_shows(name, message, program):
    assert message in shown(pictures.read_cast(name))
    assert message in program


@pytest.mark.parametrize("name", pictures.BARS)
def test_the_bars_show_rows_of_the_page_of_benchmarks(name):
    found = pictures.figures(name)
    assert list(dict.fromkeys(row.partition(", clients")[0] for row, _ in found)) == [
        *pictures.BARS[name][1:]
    ]
    counts = {len(bars) for _, bars in found}
    assert counts <= {2, 3, 4} or counts == {1}


def test_the_bars_of_restarts_show_the_recorded_times():
    rows = json.loads((pictures.FOLDER / "restart.json").read_text(encoding="utf-8"))
    text = pictures.draw_restarts(rows, pictures.LIGHT)
    for row in rows:
        assert row["ends"] == sorted(row["ends"])
        assert row["name"] in text
        assert (f"{row['lost']} steps again" if row["lost"] else "no step again") in text


def test_readme_quotes_the_benchmarks():
    readme = (pictures.ROOT / "README.md").read_text(encoding="utf-8")
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")[1:]]
        for line in re.findall(r"^\| (?:\[.*→|steps lost).*$", readme, re.MULTILINE)
    ]
    restarts = json.loads((pictures.FOLDER / "restart.json").read_text(encoding="utf-8"))
    milliseconds = [[text.removesuffix(" ms") for _, text in bars] for _, bars in pictures.figures("warm")]
    measured = [[int(text.replace(",", "")) / 1000 for text in row] for row in milliseconds]
    measured.append([row["ends"][-1] for row in restarts[:3]])
    for quoted, actual in zip(rows[:3], measured, strict=True):
        assert [
            f"{value:.{len(text.split('.')[1]) - 2}f} s" for text, value in zip(quoted, actual, strict=True)
        ] == quoted
    lost = [str(row["lost"]) for row in restarts]
    assert rows[3] == [*lost[:2], f"{lost[2]}, or {lost[3]} with `Keep`"]


def test_a_picture_of_a_terminal_begins_with_the_end_of_the_recording(cast):
    text = pictures.draw_cast(cast, pictures.LIGHT)
    total, begin = map(float, re.search(r"animation:([\d.]+)s step-end -([\d.]+)s", text).groups())
    assert total - pictures.LAST <= begin < total
