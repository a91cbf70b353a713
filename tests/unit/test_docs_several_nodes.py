"""The page about several nodes names every setting, and only messages that the program prints."""

import re
from pathlib import Path

import pytest

from elasticrs._engine.job.options import OPTIONS
from elasticrs._engine.nodes.transport import etcd_site
from elasticrs._engine.nodes.transport.settings import KEYS

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs/several-nodes.md").read_text(encoding="utf-8")


def section(title):
    return PAGE.split(f"\n## {title}\n")[1].split("\n## ")[0]


def rows(title):
    """Return the cells of a section's tables, without the header rows."""
    lines = [line for line in section(title).splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line[1:-1].split("|")] for line in lines[2:]]


def shown(value):
    if value is None:
        return ""
    if isinstance(value, bool):
        return str(int(value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def test_the_settings_table_matches_the_program():
    expected = [
        [f"`{key.name}`", shown(key.default)] for key in KEYS if key.is_stored or key.name == "store_grace"
    ]
    assert [row[:2] for row in rows("Settings")] == expected


def test_the_etcd_settings_table_matches_the_program():
    expected = [[f"`{key.name}`", shown(key.default), key.help] for key in etcd_site.KEYS]
    assert rows("etcd") == expected


def test_every_setting_is_named_in_the_settings_section():
    for key in KEYS:
        assert f"`{key.name}`" in section("Settings")


def test_the_listed_timeouts_are_settings_or_options():
    known = {key.name for key in (*KEYS, *etcd_site.KEYS)} | {f"--{option.name}" for option in OPTIONS}
    named = {name for row in rows("Time-outs") for name in re.findall("`([^`]+)`", row[0])}
    assert named
    assert named <= known


def sources():
    """Return the source code, with adjacent parts of string literals joined, so that tests can search it for
    messages.
    """
    files = [*(ROOT / "python/elasticrs").rglob("*.py"), *(ROOT / "crates/elasticrs-store/src").rglob("*.rs")]
    text = "\n".join(file.read_text(encoding="utf-8") for file in sorted(files))
    return re.sub(r'"\s*\n\s*f?"', "", text)


@pytest.fixture(scope="module")
def program():
    return sources()


@pytest.mark.parametrize("message", [row[0].strip("`") for row in rows("What messages mean")])
def test_the_documented_messages_exist_in_the_program(program, message):
    # The page shows the message in one piece. The program may split it into several literals, which are
    # joined here.
    assert message in program
