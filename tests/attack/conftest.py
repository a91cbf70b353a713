"""Fixtures for workers that use :class:`elasticrs.Keep`, and a table of the steps that kills have cost."""

from collections import defaultdict

from helpers.keep_agent import agent, programs

__all__ = ["agent", "programs"]


def pytest_terminal_summary(terminalreporter):
    """Print how many steps the kills of ``test_keep_matrix.py`` have cost."""
    rows = defaultdict(list)
    for report in terminalreporter.getreports("passed") + terminalreporter.getreports("failed"):
        for name, value in getattr(report, "user_properties", ()):
            if name == "lost":
                variant, ranks, nodes, *costs = value
                for kind, cost in costs:
                    groups = ["replicated", f"{ranks} ranks, {nodes} nodes", kind, variant]
                    if variant == "fsdp":
                        groups = ["sharded", f"sharded, {nodes} nodes"]
                    elif ranks == 2 and kind in ("pair", "double", "any+node"):
                        groups = ["all ranks killed"]
                    for group in groups:
                        rows[group].append(cost)
    if rows:
        terminalreporter.section("steps lost by random kills")
        for group, costs in rows.items():
            none, most = costs.count(0), max(costs)
            terminalreporter.line(
                f"{group:18} {len(costs):4} kills, {none:4} lost no step, at most {most} lost"
            )
