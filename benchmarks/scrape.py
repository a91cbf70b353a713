"""Metrics page of an agent with many workers: response time, and whether scrapers slow down a restart."""

import contextlib
import http.client
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator

from benchmarks.harness import Launcher, Options, Row, Samples, percentile, run, take_turns, worker

WORKERS = 64
SCRAPERS = 8
PAGES = 200


def measure(options: Options) -> list[Row]:
    """Measure elasticrs only, because torchrun has no metrics page."""
    ours = options._replace(launchers=tuple(each for each in options.launchers if each.name == "elasticrs"))
    files = ("--redirects", "3")
    return (
        _pages(ours, "page", "")
        + _pages(ours, "page with files", f"{2 * WORKERS} files that are only written, ", files)
        + _restart(ours, 0)
        + _restart(ours, SCRAPERS)
    )


def _pages(options: Options, name: str, more: str, settings: tuple[str, ...] = ()) -> list[Row]:
    samples = Samples(options)

    def one(launcher: Launcher) -> None:
        port = _free_port()
        arguments = (
            "--health-check-port",
            str(port),
            "--nproc-per-node",
            str(WORKERS),
            *settings,
            worker("first_line.py"),
        )
        with run(launcher, *arguments) as running:
            running.reports.take("first-line", WORKERS, 0)
            for _ in range(options.repeats(PAGES, 20)):
                began = time.monotonic_ns()
                _get(port)
                samples.add(launcher, (time.monotonic_ns() - began) / 1e6)

    take_turns(options, options.repeats(3, 1), one)
    conditions = f"{WORKERS} workers, {more}one scraper, a connection each time; the page is new every 100 ms"
    return [
        *samples.rows(f"scrape: {name}, p50", "ms", conditions),
        *samples.rows(f"scrape: {name}, p99", "ms", conditions, lambda values: percentile(values, 99)),
    ]


def _restart(options: Options, scrapers: int) -> list[Row]:
    samples = Samples(options)

    def one(launcher: Launcher) -> None:
        port = _free_port()
        with run(
            launcher,
            *("--health-check-port", str(port), "--nproc-per-node", str(WORKERS), "--max-restarts", "1"),
            worker("first_line.py"),
        ) as running:
            pids = [each.pid for each in running.reports.take("first-line", WORKERS, 0)]
            with _scraping(port, scrapers):
                killed = time.monotonic_ns()
                os.kill(pids[0], signal.SIGKILL)
                last = max(each.at_ns for each in running.reports.take("first-line", WORKERS, 1))
            samples.add(launcher, (last - killed) / 1e6)

    take_turns(options, options.repeats(10, 2), one)
    conditions = f"{WORKERS} workers, SIGKILL to one until all run again, {scrapers} scrapers without a pause"
    return samples.rows(f"scrape: restart beside {scrapers} scrapers, p50", "ms", conditions)


@contextlib.contextmanager
def _scraping(port: int, scrapers: int) -> Iterator[None]:
    is_over = threading.Event()

    def scrape() -> None:
        while not is_over.is_set():
            _get(port)

    threads = [threading.Thread(target=scrape) for _ in range(scrapers)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        is_over.set()
        for thread in threads:
            thread.join()


def _get(port: int) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    try:
        connection.request("GET", "/metrics")
        connection.getresponse().read()
    finally:
        connection.close()


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port
