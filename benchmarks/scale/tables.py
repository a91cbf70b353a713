"""Formats the figures as Markdown tables and as curves."""

from collections.abc import Mapping, Sequence

from benchmarks.scale.picture import Plot, curve, draw

Figures = Mapping[int, Mapping[str, float]]

TIMES = {
    "form": "all join at once → all started",
    "last join": "the last of n joins → all started",
    "failure: half stopped": "a worker fails → half of the agents have it",
    "failure: all stopped": "a worker fails → all agents have it",
    "failure: started": "a worker fails → all started again",
    "loss: all stopped": "an agent dies → all others have it",
    "loss: started": "an agent dies → all others started again",
    "leader lost: started": "the leader dies → all others started again",
    "success": "the workers are done → all agents have left",
    "store restarted: back": "kept store: from SIGKILL until it listens again",
    "store restarted: all confirmed": "… until all agents have taken up their sessions",
}

COSTS = {
    f"{name}: {key}": (f"{text}: {what}", unit)
    for name, text in (("form", "all join"), ("restart", "restart after a failure"))
    for key, what, unit in (
        ("up", "messages to the store, per agent", ""),
        ("down", "messages from the store, per agent", ""),
        ("received", "bytes to the store, per agent", ""),
        ("sent", "bytes from the store, per agent", ""),
        ("leader_cpu", "CPU of the leader", "ms"),
        ("store_cpu", "CPU of the store", "ms"),
        ("swarm_cpu", "CPU of all other agents (the imitation)", "ms"),
    )
}
COSTS["idle: store cpu"] = ("idle: CPU of the store (keep-alives)", "%")
COSTS["store memory"] = ("memory that the store's process has grown by", "MB")


def markdown(ours: Figures, others: Figures) -> str:
    """Return two tables: the times of elasticrs above those of torch, and the costs of elasticrs."""
    counts = sorted(ours)
    parts = [_table("time", counts, _times(ours, others, counts))]
    costs = [(text, [_figure(ours[n].get(key), unit) for n in counts]) for key, (text, unit) in COSTS.items()]
    parts.append(_table("cost", counts, costs))
    return "\n".join(parts)


def _times(ours: Figures, others: Figures, counts: Sequence[int]) -> list[tuple[str, list[str]]]:
    rows = []
    for key, text in TIMES.items():
        rows.append((text, [_figure(ours[n].get(key), "ms") for n in counts]))
        if any(key in values for values in others.values()):
            rows.append((f"torch: {text}", [_torch(others.get(n, {}), key) for n in counts]))
    return rows


def _torch(values: Mapping[str, float], key: str) -> str:
    if values and key not in values:
        return f"> {values['gave up after'] / 1e3:g} s"
    return _figure(values.get(key), "ms")


def _table(name: str, counts: Sequence[int], rows: Sequence[tuple[str, list[str]]]) -> str:
    lines = [[name, *(f"n = {n:,}" for n in counts)], ["---", *(["---:"] * len(counts))]]
    lines += [[text, *cells] for text, cells in rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def _figure(value: float | None, unit: str) -> str:
    if value is None:
        return "-"
    if unit == "ms" and value >= 1000:
        value, unit = value / 1000, "s"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2
    return f"{value:,.{digits}f} {unit}".strip()


def picture(ours: Figures, others: Figures) -> str:
    form = [
        curve("all at once", ours, "form"),
        curve("last join", ours, "last join"),
        curve("torch, all at once", others, "form", is_other=True),
    ]
    failure = [
        curve("all have it", ours, "failure: all stopped"),
        curve("all started again", ours, "failure: started"),
        curve("torch, all have it", others, "failure: all stopped", is_other=True),
        curve("torch, started again", others, "failure: started", is_other=True),
    ]
    cpu = [
        curve("leader", ours, "restart: leader_cpu"),
        curve("store", ours, "restart: store_cpu"),
        curve("all others", ours, "restart: swarm_cpu"),
    ]
    size = [
        curve("all join, received", ours, "form: sent"),
        curve("all join, sent", ours, "form: received"),
        curve("restart, received", ours, "restart: sent"),
        curve("restart, sent", ours, "restart: received"),
    ]
    plots = [
        Plot(title, unit, [each for each in curves if each])
        for title, unit, curves in (
            ("First round: until all agents have started", "ms", form),
            ("A worker fails: until all agents …", "ms", failure),
            ("CPU of one restart", "ms", cpu),
            ("Bytes per agent", "B", size),
        )
    ]
    return draw([plot for plot in plots if plot.curves], sorted(ours))
