"""Random host lists in Slurm's notation, and the hosts that they name."""

import itertools
from collections.abc import Sequence

from hypothesis import strategies as st

Numbers = tuple[str, list[str]]


@st.composite
def _span(draw: st.DrawFn) -> Numbers:
    """Draw a number or a range, with or without zero padding."""
    low = draw(st.integers(0, 120))
    high = draw(st.one_of(st.none(), st.integers(low, low + 5)))
    width = draw(st.integers(len(str(low)), 4))
    first = str(low).zfill(width)
    if high is None:
        return first, [first]
    return f"{first}-{str(high).zfill(draw(st.sampled_from((0, width))))}", [
        str(number).zfill(width) for number in range(low, high + 1)
    ]


@st.composite
def _brackets(draw: st.DrawFn) -> Numbers:
    spans = draw(st.lists(_span(), min_size=1, max_size=2))
    return f"[{','.join(text for text, _ in spans)}]", [number for _, all_of in spans for number in all_of]


_TEXT = st.from_regex(r"[a-z][a-z0-9.]{0,4}-?", fullmatch=True)


@st.composite
def _name(draw: st.DrawFn) -> Numbers:
    """Draw a plain name, or a name with up to two brackets. Slurm allows no text after the last bracket."""
    parts: list[Numbers] = []
    for _ in range(draw(st.integers(0, 2))):
        text = draw(_TEXT)
        parts += [(text, [text]), draw(_brackets())]
    if not parts:
        text = draw(_TEXT)
        parts.append((text, [text]))
    return "".join(text for text, _ in parts), [
        "".join(chosen) for chosen in itertools.product(*(choices for _, choices in parts))
    ]


@st.composite
def host_lists(draw: st.DrawFn) -> tuple[str, Sequence[str]]:
    """Draw a list in Slurm's notation, and return it with its hosts in order."""
    names = draw(st.lists(_name(), min_size=1, max_size=3))
    return ",".join(text for text, _ in names), [host for _, hosts in names for host in hosts]
