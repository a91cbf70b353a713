"""Write ``docs/options.md`` and ``docs/settings.md``, from the tables that also give ``--help``.

The text above the first option or setting is written by hand, and stays. With ``--check``, nothing is
written, and the exit code is 1 if a page differs from what would be written.
"""

import re
import sys
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "python"))

from elasticrs._engine.job.options import NEWER, OURS, SECTIONS, Option  # noqa: E402
from elasticrs._engine.nodes.transport import etcd_site, settings  # noqa: E402

BEGIN = "<!-- Written by tools/reference.py. -->\n"


class More(NamedTuple):
    """What ``docs/options.md`` says about an option in addition to the text of ``--help``.

    Args:
        example: a value of the option for the example on the page; empty for a flag, which has no value.
        text: further sentences in Markdown.
        torchrun: what torchrun does differently, if it also has the option; empty if nothing.
        searches: texts, separated by commas, for which the site's search shows the option first.
    """

    example: str = ""
    text: str = ""
    torchrun: str = ""
    searches: str = ""


MORE = {
    "nproc-per-node": More("gpu", searches="how many GPUs, number of GPUs, GPUs per node"),
    "max-restarts": More(
        "3/1h",
        "[Budgets and delays](failures.md#budgets-and-delays)",
        "counted by each node separately",
        "more restarts, number of restarts, retry, retries, number of retries, max retries",
    ),
    "restart-delay": More("1s..5m", "[Budgets and delays](failures.md#budgets-and-delays)"),
    "max-same-failures": More("5", "[What counts as equal](failures.md#progress)"),
    "max-excluded-nodes": More("1", "0: none. [Unfit nodes](failures.md#unfit-nodes)"),
    "fatal-exit-codes": More("3,40-49"),
    "exit-codes": More("verdict", "[Exit codes](failures.md#exit-codes)"),
    "node-check": More("nvml", "[Checks of a node](failures.md#checks-of-a-node)"),
    "node-check-timeout": More("2m"),
    "on-failure": More("replace", "[Train through failures](train.md)"),
    "module": More(),
    "no-python": More(),
    "run-path": More(),
    "start-method": More("fork"),
    "warm": More("auto", "[Warm start](restarts.md#warm-start)"),
    "warm-timeout": More("5m"),
    "keep": More(text="[Keep the training state](keep.md)"),
    "keep-memory": More("20G"),
    "keep-grace": More("30s"),
    "keep-peers": More(
        "1", "[Survive the loss of a node](keep.md#survive-the-loss-of-a-node-with-sharded-state)"
    ),
    "keep-bandwidth": More("500M"),
    "keep-save": More("kept", "[Go on in the next job](keep.md#go-on-in-the-next-job)"),
    "role": More("trainer"),
    "numa-binding": More("node"),
    "virtual-local-rank": More(),
    "nnodes": More("2:4", "[Several nodes](several-nodes.md)"),
    "standalone": More(),
    "rdzv-backend": More("c10d", "[Which store](several-nodes.md#which-store)"),
    "rdzv-endpoint": More("node1:29400", "[Who hosts the store](several-nodes.md#who-hosts-the-store)"),
    "rdzv-id": More("job42"),
    "rdzv-conf": More(
        "last_call_timeout=60",
        "[All settings](settings.md)",
        "ignores a key that it does not know",
    ),
    "node-rank": More("0"),
    "master-addr": More("node1", "[Ranks that you assign](several-nodes.md#ranks-that-you-assign-static)"),
    "master-port": More("29500"),
    "local-addr": More("10.0.0.7"),
    "no-scheduler": More(text="[Slurm, Kubernetes, Kubeflow](schedulers.md)"),
    "drain": More("job"),
    "exit-barrier-timeout": More("10m"),
    "report": More("file:report.json", "[The report as JSON](failures.md#the-report-as-json)"),
    "log-dir": More("logs", "[Logs](logs.md)"),
    "redirects": More("3"),
    "tee": More("3"),
    "capture-stderr": More(),
    "log-prefix": More("time", "[The launcher's own messages](design/logs.md#the-launchers-own-messages)"),
    "local-ranks-filter": More("0"),
    "log-line-prefix-template": More("'[rank ${rank}] '"),
    "duplicate-stdout-filters": More("loss,accuracy"),
    "duplicate-stderr-filters": More("Warning"),
    "logs-specs": More("default"),
    "signals-to-handle": More("SIGTERM,SIGINT"),
    "signals-to-forward": More(
        "USR1",
        "A signal is held for a worker that has no handler yet. [Signals that are passed on]"
        "(design/stopping.md#signals-that-are-passed-on)",
    ),
    "stop-scope": More("group", "[Whom a stop reaches](design/stopping.md#whom-a-stop-reaches)"),
    "shutdown-timeout": More("2m", "[Stop and preempt](restarts.md#stop-and-preempt)", "whole seconds only"),
    "exit-timeout": More(
        "1m",
        "[A worker that has raised](design/failure-report.md#a-worker-that-has-raised-and-does-not-end)",
    ),
    "linger": More("30s"),
    "keep-descendants": More(),
    "hang-timeout": More(
        "10m",
        "With `ELASTICRS_AUTO_HEARTBEAT=0`, steps of torch's optimizers are not heartbeats. "
        "[Ranks that hang](hangs.md)",
    ),
    "hang-startup-timeout": More("30m"),
    "hang-exit-timeout": More("1h"),
    "health-check-port": More("8080", "[Metrics and health checks](metrics.md)"),
    "health-check-host": More("0.0.0.0"),
    "health-check-timeout": More("300"),
    "event-log-handler": More("file:events.jsonl", "[Events](events.md)", "no handler `file:PATH`"),
    "monitor-interval": More("1", torchrun="the interval of all polls"),
    "check": More("torchrun train.py", "[Check a command line](switch.md#check-a-command-line)"),
    "print-completion": More("bash"),
    "use-env": More(),
}


SETTINGS = {
    "For all back ends": [key for key in settings.KEYS if key.is_stored or key.name == "store_grace"],
    "Only for etcd": etcd_site.KEYS,
}
"""The settings of ``--rdzv-conf`` that have an effect, by the heading above them."""

EXAMPLES = {
    "settle": "30",
    "restart_call_timeout": "60",
    "store_grace": "60",
    "scale_up": "0",
    "max_node_losses": "2",
    "is_host": "1",
    "bind_addr": "10.0.0.7",
    "worker_port_range": "29401-29410",
    "order_hint": "1",
    "rank": "0",
    "homogeneous": "1",
    "same_command": "0",
    "fresh": "1",
    "drain": "job",
    "token": "SECRET",
    "token_file": "token",
    "protocol": "https",
    "ca_cert": "ca.pem",
    "ssl_cert": "node.pem",
    "ssl_cert_key": "node-key.pem",
    "user": "trainer",
    "password_file": "password",
    "etcd_prefix": "/team1/jobs",
}
"""Values for the examples of settings. The example of any other setting is twice its default."""

TORCHS = {
    "last_call_timeout": "also at each restart with fewer than MAX nodes",
    "keep_alive_interval": "default 5",
    "keep_alive_max_attempt": "default 3",
    **dict.fromkeys(("join_timeout", "close_timeout", "is_host", "rank", "read_timeout", "etcd_prefix"), ""),
    **dict.fromkeys(("protocol", "ca_cert", "ssl_cert", "ssl_cert_key"), ""),
}
"""The settings that torchrun also has, each with its difference there; empty if there is none."""


def pages() -> dict[Path, str]:
    """Return the whole new texts of the two pages."""
    options = {title: [entry(option) for option in group] for title, group in SECTIONS.items()}
    keys = {title: [setting(key) for key in group] for title, group in SETTINGS.items()}
    new = {}
    for name, sections in (("options", options), ("settings", keys)):
        path = ROOT / "docs" / f"{name}.md"
        by_hand, _, _ = path.read_text(encoding="utf-8").partition(BEGIN)
        lines = [f"{by_hand}{BEGIN}"]
        for title, entries in sections.items():
            lines += [f"## {title}\n", *entries]
        new[path] = "\n".join(lines)
    return new


def setting(key: settings.Key) -> str:
    """Return the heading and the description of a setting of ``--rdzv-conf``, in Markdown."""
    default: Any = key.default
    if isinstance(default, (bool, float)):
        default = f"{default:g}"
    facts = [] if default is None else [f"default: `{default}`"]
    example = EXAMPLES.get(key.name) or f"{2 * float(default):g}"
    facts.append(f"example: `--rdzv-conf {key.name}={example}`")
    if key.name not in TORCHS:
        facts.append("not in torchrun")
    elif TORCHS[key.name]:
        facts.append(f"torchrun: {TORCHS[key.name]}")
    text = f"{key.help[0].upper()}{key.help[1:]}."
    return f"### `{key.name}`\n\n{text}\n\n{' · '.join(facts)}\n"


def entry(option: Option) -> str:
    """Return the heading and the description of an option, in Markdown."""
    more = MORE[option.name]
    words = [f"-{option.short}, {option.flag}" if option.short else option.flag]
    words += [option.kind.metavar] if option.kind else []
    facts = [f"`{' '.join(words)}`"]
    facts += [f"`{option.variable}`"] if option.has_variable else ["no variable"]
    facts += [f"example: `{option.flag} {more.example}`"] if more.example else []
    if option.group == OURS:
        facts.append("only in torch's source code so far" if option.name in NEWER else "not in torchrun")
    elif more.torchrun:
        facts.append(f"torchrun: {more.torchrun}")
    facts += [f"since {option.since}"] if option.since else []
    text = re.sub(r"(?<![\w`-])(--help \w+|--[a-z-]+)", r"`\1`", option.help)
    text = re.sub(r"(\$\{\w+\})", r"`\1`", text)
    sentences = f"{text[0].upper()}{text[1:]}." if text[0].islower() else f"{text}."
    index = f"<!-- index: {more.searches} -->\n\n" if more.searches else ""
    text = f"{sentences} {more.text}".rstrip()
    return f"{index}### `{option.flag}`\n\n{text}\n\n{' · '.join(facts)}\n"


def main() -> int:
    """Write the pages, or only check them. Return the exit code."""
    only_checks = sys.argv[1:] == ["--check"]
    wrong = []
    for path, text in pages().items():
        if not only_checks:
            path.write_text(text, encoding="utf-8")
        elif path.read_text(encoding="utf-8") != text:
            wrong.append(path.relative_to(ROOT))
    for name in wrong:
        print(f"{name} differs from the tables in the program: run `.venv/bin/python tools/reference.py`")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
