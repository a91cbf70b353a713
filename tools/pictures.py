"""Make the pictures in ``docs/pictures`` from real runs: ``make pictures``.

With ``--record``, this program runs jobs, and replaces the records of them: ``NAME.cast`` has what a terminal
showed (as asciicast, version 2, which asciinema plays), and ``restart.json`` has the times of restarts. A
browser takes the pictures of the status page of a job.
Without the option, it only draws the pictures again, from these records and from the tables of
``docs/benchmarks.md``. The same records always give the same pictures, so a test can compare the pictures in
the repository with the records.

Each picture exists twice, for a light and for a dark background. The fonts are those of the viewer's machine.
"""

import argparse
import fcntl
import json
import os
import pty
import re
import select
import shlex
import shutil
import socket
import struct
import subprocess
import sys
import tempfile
import termios
import textwrap
import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape, quoteattr

from tools.processes import JOBS, Facts, facts_of

ROOT = Path(__file__).resolve().parent.parent
FOLDER = ROOT / "docs" / "pictures"
DEMO = ROOT / "python" / "elasticrs" / "demo" / "train.py"


class Theme(NamedTuple):
    """Colours of a picture."""

    name: str
    paper: str
    bar: str
    line: str
    ink: str
    faint: str
    good: str
    bad: str
    accent: str


LIGHT = Theme("light", "#ffffff", "#f6f8fa", "#d0d7de", "#1f2328", "#59636e", "#1a7f37", "#cf222e", "#0969da")
DARK = Theme("dark", "#0d1117", "#161b22", "#30363d", "#e6edf3", "#9198a1", "#3fb950", "#f85149", "#58a6ff")

MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
SANS = "system-ui,-apple-system,'Segoe UI',Roboto,'DejaVu Sans',sans-serif"


def svg(width: int, height: int, title: str, style: str, body: Sequence[str]) -> str:
    """Return an SVG document with these elements. ``title`` is what a screen reader says for the picture."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}"'
    head += f' height="{height}" role="img" aria-label={quoteattr(title)}>'
    return "\n".join([head, f"<style>{style}</style>", *body, "</svg>", ""])


# --- recordings of a terminal ---

COLUMNS = 100
LINE, CHARACTER, MARGIN, TOP = 20, 8.0, 16, 40
LONGEST_WAIT = 1.6
"""Maximum seconds of a pause in the picture; longer pauses of a recording are shortened to this."""
LAST, FIRST = 4.0, 2.0
"""Seconds for which the animated picture shows the end of the recording: after each run, and when it begins.
It begins with the end, because a viewer without animations shows only the beginning.
"""

Cast = tuple[dict[str, Any], list[tuple[float, str]]]
"""The header of a recording, and each text that was printed, with its time in seconds since the start."""


def read_cast(name: str) -> Cast:
    """Read the recording of a terminal in the file ``NAME.cast``."""
    header, *events = (FOLDER / f"{name}.cast").read_text(encoding="utf-8").splitlines()
    return json.loads(header), [(at, text) for at, _, text in map(json.loads, events)]


def lines_of(cast: Cast) -> Iterator[tuple[float, str]]:
    """Yield the lines of a recording, each with the seconds after which the picture shows it. If the job has
    failed, yield only its report and the launcher's last line.
    """
    now, before, rest, is_shown = 0.0, 0.0, "", cast[0]["exit_code"] == 0
    for at, text in cast[1]:
        now, before = now + min(at - before, LONGEST_WAIT), at
        *lines, rest = (rest + text).replace("\r\n", "\n").split("\n")
        for line in lines:
            is_shown |= line.startswith("=====")
            if is_shown:
                yield now, line


COLOURED = (
    (r"^\$ .*", "b"),
    (r"^elasticrs(?:\[[^]]*\])?:", "a"),
    (r"\b(?:hung: no heartbeat for [\d.]+ s|raised \w+|ValueError: a bad batch|node \w+ was lost)\b", "r"),
    (r"\brank \d+ did not enter it: it is in \w+ \([\w.:]+\)|\bcalled at [\w.:]+", "r"),
    (r"\b(?:0 steps(?: lost)?|succeeded)\b", "g"),
)
"""Patterns of texts that the picture shows in a style, and the style."""
STYLES = {"1;31": "r", "2": "f", "1": "b"}
"""Style in the picture for the escape sequences of the report, by their numbers."""


def draw_cast(cast: Cast, theme: Theme) -> str:
    """Draw a recording as a terminal in which the lines appear one after the other."""
    shown = [
        (at, row, style)
        for at, line in _folded(list(lines_of(cast)))
        for style, text in [_style_of(line)]
        for row in textwrap.wrap(text, COLUMNS, subsequent_indent="    ", break_on_hyphens=False)
    ]
    total = shown[-1][0] + LAST
    width, height = round(2 * MARGIN + COLUMNS * CHARACTER), TOP + LINE * len(shown) + MARGIN
    css = [
        f"text{{font:13px {MONO};fill:{theme.ink};white-space:pre}}.a{{fill:{theme.accent}}}",
        f".b{{font-weight:bold}}.r{{fill:{theme.bad};font-weight:bold}}.g{{fill:{theme.good};font-weight:bold}}",
        f".f{{fill:{theme.faint}}}.t{{font:12px {SANS};fill:{theme.faint}}}",
        "@media(prefers-reduced-motion:no-preference)",
        f"{{.l{{animation:{total:.1f}s step-end {FIRST - total:.1f}s infinite}}}}",
    ]
    body = [
        f'<rect x=".5" y=".5" width="{width - 1}" height="{height - 1}" rx="8" fill="{theme.paper}"'
        f' stroke="{theme.line}"/>',
        f'<path d="M.5 28.5V8.5a8 8 0 0 1 8-8h{width - 17}a8 8 0 0 1 8 8v20z" fill="{theme.bar}"'
        f' stroke="{theme.line}"/>',
        *(f'<circle cx="{x}" cy="15" r="5" fill="{theme.line}"/>' for x in (18, 35, 52)),
        f'<text class="t" x="{width / 2:g}" y="19" text-anchor="middle">{escape(cast[0]["title"])}</text>',
    ]
    for number, (at, row, style) in enumerate(shown):
        css.append(f"@keyframes k{number}{{0%{{opacity:0}}{100 * at / total:.2f}%,to{{opacity:1}}}}")
        place = f'class="l" style="animation-name:k{number}" x="{MARGIN}" y="{TOP + LINE * number + 12}"'
        length = f'textLength="{len(row) * CHARACTER:g}" lengthAdjust="spacingAndGlyphs"'
        text = f'<tspan class="{style}">{escape(row)}</tspan>' if style else _coloured(row)
        body.append(f"<text {place} {length}>{text}</text>")
    return svg(width, height, cast[0]["title"], "".join(css), body)


def _style_of(line: str) -> tuple[str, str]:
    """Return the style of a line, empty if it has none, and the line without escape sequences."""
    coloured = re.fullmatch(r"\x1b\[([\d;]+)m(.*)\x1b\[0m", line)
    return (STYLES[coloured[1]], coloured[2]) if coloured else ("", line)


def _folded(lines: Sequence[tuple[float, str]]) -> Iterator[tuple[float, str]]:
    """Yield the lines, but only the first one and the last one of a traceback with more than ten lines."""
    for is_traceback, group in groupby(lines, lambda line: line[1].startswith("[rank")):
        some = list(group)
        if is_traceback and len(some) > 10:
            between = f"[… {len(some) - 2} lines of the traceback …]"
            some = [some[0], (some[0][0], between), some[-1]]
        # Remove emojis, because they have another width than the other characters.
        yield from ((at, re.sub("[^\0-\ufdff]", "", line)) for at, line in some)


def _coloured(row: str) -> str:
    spans = sorted((*found.span(), name) for pattern, name in COLOURED for found in re.finditer(pattern, row))
    text, end = "", 0
    for begin, until, name in spans:
        if begin >= end:
            text += escape(row[end:begin]) + f'<tspan class="{name}">{escape(row[begin:until])}</tspan>'
            end = until
    return text + escape(row[end:])


def record_cast(name: str, title: str, command: str, accidents: Sequence[tuple[int, int, str]] = ()) -> None:
    """Run a command in a terminal, and write what it shows to ``NAME.cast``.

    Args:
        name: name of the file, without its suffix.
        title: what the recording shows.
        command: command that starts a job with the demo's training script, which is ``train.py`` in the
            current directory. If the job waits for a second node, this function starts a second agent, too,
            and kills it after 100 steps.
        accidents: the failures of workers, as in :data:`elasticrs.demo.__main__.ACCIDENTS`.
    """
    with tempfile.TemporaryDirectory() as folder:
        shutil.copy(DEMO, folder)
        events = Path(folder, "events.jsonl")
        environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith(("ELASTICRS_", "PET_"))},
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "ELASTICRS_DEMO_ACCIDENTS": json.dumps(accidents),
            "TMPDIR": folder,
        }
        other = None
        primary, secondary = pty.openpty()
        fcntl.ioctl(secondary, termios.TIOCSWINSZ, struct.pack("HHHH", 40, COLUMNS, 0, 0))
        begin = time.monotonic()
        output = [[0.0, "o", f"$ {command}\r\n"]]
        job = subprocess.Popen(
            shlex.split(command),
            cwd=folder,
            env={**environment, "PET_EVENT_LOG_HANDLER": f"file:{events}"},
            stdin=secondary,
            stdout=secondary,
            stderr=secondary,
            start_new_session=True,
        )
        os.close(secondary)
        while select.select([primary], [], [], 120)[0]:
            try:
                text = os.read(primary, 1 << 16).decode(errors="replace")
                text = text.replace(f"{folder}/", "").replace(f"{ROOT}/", "")
            except OSError:  # The job has ended, and has closed its side of the terminal.
                break
            output.append([round(time.monotonic() - begin, 3), "o", text])
            if other is None and "have joined" in text:
                second = shlex.split(command.replace("is_host=1", "is_host=0").replace("-rank 0", "-rank 1"))
                quiet = subprocess.DEVNULL
                other = subprocess.Popen(second, cwd=folder, env=environment, stdout=quiet, stderr=quiet)
            if other is not None and "step 100" in text:
                other.kill()
        os.close(primary)
        job.wait()
        if other is not None:
            other.wait()
        told = [json.loads(line) for line in events.read_text(encoding="utf-8").splitlines()]
    names = ("worker hung", "attempt running")
    header = {
        "version": 2,
        "width": COLUMNS,
        "height": 40,
        "title": title,
        "command": command,
        "exit_code": job.returncode,
        "events": [each for each in told if each["name"] in names],
    }
    lines = [json.dumps(each) for each in (header, *output)]
    (FOLDER / f"{name}.cast").write_text("\n".join([*lines, ""]), encoding="utf-8")


def record_casts() -> None:
    """Record what the launcher prints at a hang, at an exception and at the loss of a node."""
    one = "elasticrun --standalone --nproc-per-node 4 --max-restarts 3 --warm auto"
    record_cast(
        "hang",
        "A rank hangs: it is named, and the job goes on",
        f"{one} --hang-timeout 2 train.py",
        [(1, 151, "hung")],
    )
    record_cast(
        "exception", "A rank raises an exception: no step is lost", f"{one} train.py", [(2, 151, "raised")]
    )
    record_cast(
        "report",
        "The report of a failed job",
        "elasticrun --standalone --nproc-per-node 4 train.py",
        [(2, 151, "raised")],
    )
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    nodes = f"elasticrun --nnodes 1:2 --rdzv-backend c10d --rdzv-endpoint localhost:{port}"
    record_cast(
        "node-lost",
        "One of two nodes is lost: the other one goes on",
        f"{nodes} --node-rank 0 --rdzv-conf is_host=1,last_call_timeout=5 --warm auto train.py",
    )


# --- times of restarts, side by side ---

STAMP = re.compile(r"stamp (?P<what>\w+) rank=\d+ step=(?P<step>\d+) ns=(?P<ns>\d+) pid=(?P<pid>\d+)")
KILLED_IN = 65
"""Training step in which a worker is killed. The training saves a checkpoint every 25 steps."""
PHASES = ("stop the others, start new workers", "import torch, build and load the model", "repeat lost steps")
WITHOUT_KEEP = (
    (r"\n +keep = Keep\(\*\*objects\)  # keep", ""),
    (r"keep\.restore\(default=lambda: (.*)\)  # keep", r"\1"),
    (r"\n +keep\.step\(step\)  # keep", ""),
)
"""Patterns and replacements that turn ``examples/keep/train.py`` into a script without ``Keep``."""


def record_restarts() -> None:
    """Kill a worker of a job under torchrun, and under elasticrun with several options. Write the times that
    the phases of the restart took into ``restart.json``, each time those of the second fastest of three runs.
    """
    ours = [sys.executable, "-m", "elasticrs.launch"]
    jobs: tuple[tuple[str, list[str], bool], ...] = (
        ("torchrun", [str(Path(sys.executable).parent / "torchrun")], False),
        ("elasticrs", ours, False),
        ("elasticrs --warm", [*ours, "--warm", "auto"], False),
        ("elasticrs --warm, Keep", [*ours, "--warm", "auto"], True),
    )
    rows = []
    for name, launcher, keeps in jobs:
        runs = sorted((_restart(launcher, keeps) for _ in range(3)), key=lambda run: run["ends"][-1])
        rows.append({"name": name, **runs[1]})
    (FOLDER / "restart.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def _restart(launcher: Sequence[str], keeps: bool) -> dict[str, Any]:
    """Run a job in which one of four workers is killed. Return the seconds after the kill at which the phases
    of the restart ended, and the number of steps that were lost.
    """
    script = (ROOT / "examples" / "keep" / "train.py").read_text(encoding="utf-8")
    for pattern, replacement in () if keeps else WITHOUT_KEEP:
        script, found = re.subn(pattern, replacement, script)
        assert found == 1
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.py").write_text(script, encoding="utf-8")
        command = [*launcher, "--standalone", "--nproc-per-node", "4", "--max-restarts", "1"]
        command += ["train.py", "--stamps", "--steps", "120", "--accidents", f"kill:{KILLED_IN}"]
        # Without the second variable, restarted workers of torchrun would read the addresses of the previous
        # attempt in the store that the agent shares with them.
        variables = {"OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
        killed, started, stamps = 0, 0.0, []
        environment = {**os.environ, **variables}
        with subprocess.Popen(command, cwd=folder, env=environment, stdout=subprocess.PIPE, text=True) as job:
            assert job.stdout is not None
            for stamp in filter(None, map(STAMP.search, job.stdout)):
                stamps.append(stamp)
                killed = int(stamp["ns"]) if stamp["what"] == "kill" else killed
                if killed and stamp["what"] == "continues":
                    ticks = Path(f"/proc/{stamp['pid']}/stat").read_text().rpartition(")")[2].split()[19]
                    started = max(started, int(ticks) / os.sysconf("SC_CLK_TCK"))
        assert job.returncode == 0, command
    later = [each for each in stamps if int(each["ns"]) > killed]
    loaded = [each for each in later if each["what"] == "continues"]
    new = [each for each in later if each["what"] == "ended" and int(each["step"]) == KILLED_IN]
    ends = [started, *(max(int(each["ns"]) for each in some) / 1e9 for some in (loaded, new))]
    lost = KILLED_IN - 1 - int(loaded[0]["step"])
    return {"ends": [round(each - killed / 1e9, 3) for each in ends], "lost": lost}


def draw_restarts(rows: Sequence[Mapping[str, Any]], theme: Theme) -> str:
    """Draw a bar for each restart, one below the other. The bar's colours show the phases of the restart."""
    left, right, height, top = 190, 190, 34, 66
    width = 840
    scale = (width - left - right) / max(row["ends"][-1] for row in rows)
    colours = (theme.accent, theme.faint, theme.bad)
    style = f"text{{font:13px {SANS};fill:{theme.ink}}}.f{{fill:{theme.faint}}}.n{{font-weight:600}}"
    bottom = top + height * len(rows)
    body = [
        f'<rect width="{width}" height="{bottom + 36}" rx="8" fill="{theme.paper}"/>',
        '<text class="n" x="16" y="26">One of 4 workers is killed: until all train again</text>',
    ]
    for x, colour, phase in zip((16, 282, 572), colours, PHASES, strict=True):
        body += [
            f'<rect x="{x}" y="39" width="11" height="11" rx="2" fill="{colour}"/>',
            f'<text class="f" x="{x + 17}" y="49">{phase}</text>',
        ]
    for number, row in enumerate(rows):
        y = top + height * number
        body.append(f'<text class="n" x="16" y="{y + 19}">{escape(row["name"])}</text>')
        begin = 0.0
        for end, colour in zip(row["ends"], colours, strict=True):
            bar = f'<rect x="{left + begin * scale:.1f}" y="{y + 5}" width="{(end - begin) * scale:.1f}"'
            body.append(f'{bar} height="20" fill="{colour}"/>')
            begin = end
        lost = f"{row['lost']} steps again" if row["lost"] else "no step again"
        body.append(f'<text x="{left + begin * scale + 8:.1f}" y="{y + 19}">{_seconds(begin)}, {lost}</text>')
    body.append(f'<path d="M{left} {top}V{bottom}" stroke="{theme.line}"/>')
    note = "4 workers with DDP on 2 cores; a checkpoint every 25 steps, each of which takes some milliseconds"
    body.append(f'<text class="f" x="16" y="{bottom + 20}">{note}</text>')
    return svg(width, bottom + 36, "Restarts under torchrun and elasticrs, side by side", style, body)


def _seconds(value: float) -> str:
    return f"{value:.1f} s" if value >= 1 else f"{1000 * value:.0f} ms"


# --- bars for the figures in the tables of benchmarks ---

BARS = {
    "benchmarks": (
        "# Benchmarks",
        "launch: last worker's first line",
        "kill: SIGTERM in all siblings, p50",
        "restart: last worker's first line",
        "exit: launcher gone",
        "tee: latency p50",
        "idle: resident size",
        "idle: CPU of one core",
    ),
    "keep": (
        "## Kept state",
        "SIGKILL of a rank, steps lost",
        "SIGKILL of a rank, until all have ended that step",
        "exception in a rank, steps lost",
        "exception in a rank, until all have ended that step",
    ),
    "nodes": (
        "### Figures",
        "2 agents rendezvous, the others wait",
        "4 agents rendezvous, all at once",
        "worker killed, SIGTERM in the peers' workers, p50",
        "worker killed, all run again, p50",
        "agent killed, SIGTERM in the peers' workers, p50",
        "silent host, keep-alive limit 2 s, max",
        "idle, agent with the store: resident size",
    ),
    "slower": (
        "## On a slower machine",
        "launch: last worker's first line",
        "kill: SIGTERM in all siblings, p50",
        "restart: last worker's first line",
        "exit: launcher gone",
    ),
    "warm": (
        "### Four workers in one run",
        "launch → all have used torch",
        "SIGKILL of one → all have used torch",
    ),
    "replace": ("## Training through failures", "all workers have done the next step"),
    "timers": (
        "## Timers, heartbeats, metrics",
        "timer: deadline → signal has arrived, p50",
        "acquire, p50",
        "acquire, p99",
    ),
    "store": ("## The workers' store", "get", "add", "set+add", "ping-pong", "get-1MiB"),
    "many": (
        "## Warm workers",
        "launch → all have used torch, --warm torch, N: 8",
        "SIGKILL of one → all have used torch, N: 4",
        "SIGKILL of one → all have used torch, N: 8",
        "files opened by the launch *, N: 8",
        "private memory of a worker after a step *, N: 8",
    ),
    "verdicts": (
        "## Verdicts",
        "the leader reads the failures of 1,000 nodes",
        "the leader decides about them",
        "stacks of 1,000 ranks, parsed and merged",
        "flight records of 1,000 ranks, parsed",
        "the whole diagnosis of 1,000 ranks",
    ),
    "operate": ("## Operating", "jobs that hang on a SIGTERM"),
    "etcd": (
        "## Nodes that meet in etcd",
        "all join at once → all started",
        "a worker fails → all agents have it",
        "a worker fails → all started again",
        "an agent dies → all others started again",
    ),
    "store-killed": (
        "## A store that is killed and started again",
        "SIGKILL of the store → it listens again",
        "… → all agents have resumed their sessions",
        "all join at once → all started",
        "a worker fails → all started again",
        "an agent dies → all others started again",
    ),
}
"""For each picture, a heading of ``docs/benchmarks.md``, and names of rows in the next table."""
PROGRAMS = re.compile(
    r"torch\b(?!: CPU)|torchrun$|elasticrs(: p50)?$|restart|replace|.*--(warm|on-failure)|(cold|warm)$|n = "
)
"""Titles of the columns that have a bar."""


def figures(picture: str) -> list[tuple[str, list[tuple[str, str]]]]:
    """Return the figures for a picture: the name of each row, with the titles and texts of its columns."""
    heading, *names = BARS[picture]
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    table = page.partition(f"\n{heading}\n" if heading != "# Benchmarks" else heading)[2].partition("\n|")[2]
    rows = [
        [cell.partition("(")[0].replace("`", "").strip() for cell in line.strip("|").split("|")]
        for line in table.partition("\n\n")[0].splitlines()
    ]
    found = []
    last = ""
    for start, *cells in rows[2:]:
        last = name = start or last
        if rows[0][1] in {"clients", "N"}:
            name += f", {rows[0][1]}: {cells[0]}"
        columns = zip(rows[0][1:], cells, strict=True)
        figures = [
            (title, text) for title, text in columns if PROGRAMS.match(title) and re.search(r"\d", text)
        ]
        if name in names or last in names:
            found.append((name, figures))
    return found


def draw_bars(rows: Sequence[tuple[str, Sequence[tuple[str, str]]]], theme: Theme) -> str:
    """Draw a bar for each figure of each row. The longest bar of a row has the full length. If each row has
    only one bar, the lengths are those of one scale.
    """
    left, right, width, top = 350, 190, 840, 44
    style = f"text{{font:13px {SANS};fill:{theme.ink}}}.f{{fill:{theme.faint}}}.n{{font-weight:600}}"
    body = ['<text class="n" x="16" y="26">shorter is better</text>']
    y = top
    longest = max(_value(text) for _, bars in rows for _, text in bars)
    for name, bars in rows:
        body.append(f'<text x="16" y="{y + (24 if len(bars) > 1 else 16)}">{escape(name)}</text>')
        values = [_value(text) for _, text in bars]
        full = max(values) if len(bars) > 1 else longest
        for (title, text), value in zip(bars, values, strict=True):
            is_torchs, is_plain = title.startswith("torch"), title.startswith(("elasticrs", "cold", "n ="))
            colour = theme.faint if is_torchs else theme.accent if is_plain else theme.good
            size = max(2.0, value / full * (width - left - right)) if value else 0.0
            bar = f'<rect x="{left}" y="{y + 4}" width="{size:.1f}" height="15" rx="2"'
            body.append(f'{bar} fill="{colour}"/>')
            program = f"{title}:" if "=" in title else title.partition(":")[0]
            label = escape(f"{program} {text}{' µs' if ': p50' in title else ''}")
            body.append(f'<text class="f" x="{left + size + 8:.1f}" y="{y + 16}">{label}</text>')
            y += 18
        y += 10
    paper = f'<rect width="{width}" height="{y + 8}" rx="8" fill="{theme.paper}"/>'
    return svg(width, y + 8, "Figures of torchrun and elasticrs", style, [paper, *body])


def _value(text: str) -> float:
    """Return the number in a figure, of times in milliseconds."""
    number, *unit = text.lstrip("> ").split()
    return float(number.replace(",", "")) * (1000 if unit[:1] == ["s"] else 1)


# --- processes and threads of a job ---

THREADS = {
    "elasticrun": "main thread: decides",
    "elasticrs": "stop policy, deadlines, lease",
    "elasticrs-ranks": "serves the workers' store",
    "elasticrs-store": "serves the coordination store",
    "elasticrs-logs": "copies log files to the console",
    "nursery": "starts, reaps, sweeps",
    "sentinel": "helps a stuck nursery",
}
"""What each thread of an agent does, and what the only thread of each other process does."""
ROW, HEAD = 18, 30
"""Heights in pixels of a line of text in a box, and of its title."""


def record_processes() -> None:
    """Run the jobs whose processes are drawn, and write what was seen into ``processes.json``."""
    seen = {name: facts_of(name)._asdict() for name in JOBS}
    (FOLDER / "processes.json").write_text(json.dumps(seen, indent=1) + "\n", encoding="utf-8")


def draw_processes(facts: Facts, theme: Theme) -> str:
    """Draw the processes of a job as boxes, node beside node, with the names of their threads and with what
    connects them.
    """
    agents = [name for name in facts.processes if name.startswith("agent")]
    width, gap = 660, 96
    wide = (width - 20 - gap * (len(agents) - 1)) // len(agents)
    agent_height = HEAD + max(len(_threads(facts, name, wide)) for name in agents) * ROW + 6
    middle = 20 + agent_height + 96
    height = HEAD + 2 * ROW + 6
    frame = middle + height + 40
    body: list[str] = []
    for number, agent in enumerate(agents):
        x, node = 10 + number * (wide + gap), agent.removeprefix("agent")
        ranks = [
            other for one, other, what in facts.links if (one, what) == (agent, "pidfd") and "rank" in other
        ]
        body += _box(x, 20, wide, agent_height, agent, _threads(facts, agent, wide), theme)
        below = round(wide * 0.6) if len(agents) == 2 else 190
        left = x
        for name in (f"nursery{node}", "sentinel"):
            if name in facts.processes:
                body += _box(left, middle, below, height, name, _threads(facts, name, below), theme)
                body += _link(left + 12, 20 + agent_height, middle, _between(facts, agent, name))
                left += below + 100
        body += _across(x + below, x + below + 100, middle + 30, _between(facts, "nursery", "sentinel"))
        body += _link(x + 12, middle + height, frame, ["its children"])
        to_ranks = sorted({kind for rank in ranks for kind in _between(facts, agent, rank)})
        to_ranks = ["TCP (store)" if kind == "TCP" else kind for kind in to_ranks]
        body += _link(x + wide - 90, 20 + agent_height, frame, to_ranks)
        workers = [(rank, facts.processes[rank]) for rank in ranks]
        tall = HEAD + max(len(names) for _, names in workers) * ROW + 6
        size = (wide - 20 - 56 * (len(workers) - 1)) // len(workers)
        bottom = frame + tall + 20
        body.append(f'<rect class="w" x="{x}" y="{frame}" width="{wide}" height="{tall + 20}" rx="8"/>')
        for at, (rank, names) in enumerate(workers):
            left = x + 10 + at * (size + 56)
            body += _box(left, frame + 10, size, tall, rank, [(name, "") for name in names], theme)
            for kind in _between(facts, workers[at - 1][0], rank) if at else ():
                body += _across(left - 56, left, frame + 10 + tall // 2, [kind])
    if len(agents) == 2:
        left, right = 10 + wide, 10 + wide + gap
        one, other = agents
        near, far = (name for name in facts.processes if name.startswith("rank"))
        body += _across(
            left, right, 20 + HEAD + 60, [*_between(facts, one, other), "coordi-", "nation", "store"]
        )
        if kinds := _between(facts, one, far):
            corner = 20 + agent_height - 18
            body.append(f'<path class="c" d="M{left} {corner}h24V{frame + 24}H{right}"/>')
            for row, word in enumerate((*kinds, "workers'", "store")):
                body.append(f'<text class="f" x="{left + 30}" y="{middle + 14 * row}">{word}</text>')
        body += _across(left, right, frame + 62, _between(facts, near, far))
    style = f"text{{font:12px {SANS};fill:{theme.ink}}}.f{{fill:{theme.faint}}}"
    style += f".n{{font-weight:600;font-size:13px}}.c{{fill:none;stroke:{theme.faint}}}"
    style += f".m{{font:12px {MONO};fill:{theme.accent}}}"
    style += f".w{{fill:none;stroke:{theme.line};stroke-dasharray:4 3}}"
    paper = f'<rect width="{width}" height="{bottom + 14}" rx="8" fill="{theme.paper}"/>'
    title = "Processes of a job, the names of their threads, and what connects them"
    return svg(width, bottom + 14, title, style, [paper, *body])


def _threads(facts: Facts, name: str, wide: int) -> list[tuple[str, str]]:
    """Return the lines for the threads of an agent, a nursery or a sentinel: name and description of each. In
    a narrow box, the description has a line of its own.
    """
    kind = name.split(maxsplit=1)[0]
    names = facts.processes[name]
    lines = [(each, THREADS[each]) for each in THREADS if each in names]
    if kind in THREADS:
        lines = [(names[0], THREADS[kind])]
    if wide > 300:
        return lines
    return [line for each, text in lines for line in ((each, ""), ("", text))]


def _box(
    x: int, y: int, width: int, height: int, title: str, lines: Sequence[tuple[str, str]], theme: Theme
) -> Iterator[str]:
    yield f'<rect x="{x}" y="{y}" width="{width}" height="{height}" rx="6" fill="{theme.bar}"'
    yield f' stroke="{theme.line}"/>'
    yield f'<text class="n" x="{x + 10}" y="{y + 20}">{title}</text>'
    for row, (name, text) in enumerate(lines):
        below = y + HEAD + 12 + ROW * row
        yield f'<text class="m" x="{x + 10}" y="{below}">{name}</text>'
        yield f'<text class="f" x="{x + 10 + (122 if name else 0)}" y="{below}">{text}</text>'


def _link(x: int, top: int, bottom: int, labels: Sequence[str]) -> Iterator[str]:
    yield f'<path class="c" d="M{x} {top}V{bottom}"/>'
    for row, label in enumerate(labels):
        yield f'<text class="f" x="{x + 6}" y="{top + 18 + 15 * row}">{label}</text>'


def _across(left: int, right: int, y: int, labels: Sequence[str]) -> Iterator[str]:
    if labels:
        yield f'<path class="c" d="M{left} {y}H{right}"/>'
    for row, label in enumerate(labels):
        below = y - 5 if row == 0 else y + 14 * row
        yield f'<text class="f" x="{(left + right) // 2}" y="{below}" text-anchor="middle">{label}</text>'


def _between(facts: Facts, one: str, other: str) -> list[str]:
    """Return what connects two processes."""
    return sorted({kind for *ends, kind in facts.links if set(ends) == {one, other}})


# --- the path of a failure ---

LANES = ("nursery", "runtime thread", "main thread")
"""The threads that a failure passes: one of the nursery, and two of the agent."""


def path_of_a_failure() -> list[tuple[str, str, str, bool]]:
    """Return the rows of the tables in ``docs/design/path-of-a-failure.md``: the thread that runs the file's
    code, the file's name, what happens there, and whether that is a decision. A test compares the page with a
    real job.
    """
    page = (ROOT / "docs" / "design" / "path-of-a-failure.md").read_text(encoding="utf-8")
    rows = []
    for file, text in re.findall(r"^\| `([\w/-]+\.(?:rs|py))` \| (.*) \|$", page, re.MULTILINE):
        lane = LANES[2 if file.endswith(".py") else "elasticrs-core/" in file]
        decides = re.search(r"\*\*.*?decides\*\*", text)
        words = re.sub(r"[`*]|\[(?=\w)|\]\(.*?\)", "", text[decides.start() :] if decides else text)
        words = re.sub(r": \w+$", "", re.split(r"[.;(]", words)[0].strip())
        while len(words) > 56:
            words = words[: max(words.rfind(","), words.rfind(" and "))].rstrip(",")
        name = "/".join(file.split("/")[-2 if file.endswith("mod.rs") else -1 :])
        rows.append((lane, name, words, decides is not None))
    return rows


def draw_path(rows: Sequence[tuple[str, str, str, bool]], theme: Theme) -> str:
    """Draw a line through the threads that a failure passes, with a dot for each source file."""
    width, top, height = 710, 64, 22
    colours = dict(zip(LANES, (theme.bad, theme.good, theme.accent), strict=True))
    style = f"text{{font:12px {SANS};fill:{theme.ink}}}.n{{font-weight:600}}"
    style += f".m{{font:11px {MONO};fill:{theme.faint}}}"
    bottom = top + height * len(rows) + 10
    body = [f'<rect width="{width}" height="{bottom}" rx="8" fill="{theme.paper}"/>']
    places = [(20 + 26 * LANES.index(lane), top + height * row) for row, (lane, *_) in enumerate(rows)]
    for x, lane in zip((16, 100, 230), LANES, strict=True):
        body.append(f'<circle cx="{x + 4}" cy="24" r="5" fill="{colours[lane]}"/>')
        body.append(f'<text class="n" x="{x + 16}" y="28">{lane}</text>')
    line = " ".join(f"{x},{y}" for x, y in places)
    body.append(f'<polyline points="{line}" fill="none" stroke="{theme.line}" stroke-width="2"/>')
    for (x, y), (lane, file, words, decides) in zip(places, rows, strict=True):
        body.append(f'<circle cx="{x}" cy="{y}" r="{7 if decides else 4}" fill="{colours[lane]}"/>')
        name = ' class="n"' if decides else ""
        body.append(f'<text class="m" x="94" y="{y + 4}">{file}</text>')
        body.append(f'<text{name} x="250" y="{y + 4}">{escape(words)}</text>')
    return svg(width, bottom, "The path of a failure through the threads of a node", style, body)


def main() -> None:
    """Draw the pictures. With ``--record``, record the runs first."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--record", action="store_true", help="run the jobs, and replace their records")
    arguments = parser.parse_args()
    FOLDER.mkdir(exist_ok=True)
    if arguments.record:
        record_casts()
        record_restarts()
        record_processes()
        demo = ROOT / "examples" / "operate" / "demo.py"
        subprocess.run([sys.executable, demo, "--pictures", FOLDER], check=True)
    for name, text in pictures().items():
        (FOLDER / name).write_text(text, encoding="utf-8")


def pictures() -> dict[str, str]:
    """Draw all pictures. Return their texts (SVG) by the names of their files."""
    drawn = {}
    for theme in (LIGHT, DARK):
        for path in sorted(FOLDER.glob("*.cast")):
            drawn[f"{path.stem}-{theme.name}.svg"] = draw_cast(read_cast(path.stem), theme)
        rows = json.loads((FOLDER / "restart.json").read_text(encoding="utf-8"))
        drawn[f"restart-{theme.name}.svg"] = draw_restarts(rows, theme)
        seen = json.loads((FOLDER / "processes.json").read_text(encoding="utf-8"))
        for name, facts in seen.items():
            drawn[f"processes-{name}-{theme.name}.svg"] = draw_processes(Facts(**facts), theme)
        drawn[f"path-{theme.name}.svg"] = draw_path(path_of_a_failure(), theme)
        for name in BARS:
            drawn[f"{name}-{theme.name}.svg"] = draw_bars(figures(name), theme)
    return drawn


if __name__ == "__main__":
    main()
