"""The health check server's page for browsers, and the events by which the server keeps it current."""

import base64
import hashlib
import http.client
import json
import os
import re
import select
import signal
import socket
import threading
import time
from contextlib import closing, suppress

import pytest
from helpers import procs
from helpers.browser import in_browser
from helpers.http_client import get, port_of
from helpers.nodes import meeting
from helpers.procs import wait_until

from elasticrs import _core
from elasticrs._engine.cli.control_client import Connection
from elasticrs._engine.supervise.observe.health_check_server import HealthCheckServer
from elasticrs._engine.supervise.observe.status_text import page

WAITS = """
import os, signal
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
os.write(1, f"here {os.environ['RANK']} {os.getpid()}.\\n".encode())
signal.sigwait([signal.SIGUSR1])
"""
VIEWERS = 8
"""Maximum number of browsers that can listen to the events at the same time."""


class Listener:
    """A connection that receives the page's events, over TCP or over the Unix socket at ``port``."""

    def __init__(self, port, headers=None, *, path="/status/stream"):
        is_tcp = isinstance(port, int)
        self.connection = (
            http.client.HTTPConnection("127.0.0.1", port, timeout=procs.HANG)
            if is_tcp
            else Connection(str(port), procs.HANG)
        )
        self.connection.request("GET", path, headers=headers or {})
        self.response = self.connection.getresponse()
        self.status = self.response.status

    def next(self):
        """Wait for the next event, and return its data. Raises ``EOFError`` if the server disconnects."""
        while line := self.response.readline():
            if line.startswith(b"data: "):
                return json.loads(line.removeprefix(b"data: "))
        raise EOFError

    def close(self):
        self.response.close()
        self.connection.close()


@pytest.fixture
def listen():
    """Return a function that begins to listen to the events of a server."""
    listeners = []

    def listen(*args, **options):
        listeners.append(Listener(*args, **options))
        return listeners[-1]

    yield listen
    for each in listeners:
        each.close()


class Agent:
    """Takes the place of an agent's loop: answers a server's requests, and gives it :attr:`text` to show."""

    def __init__(self, server):
        self.server, self.text, self.asked = server, {"n": 1}, 0
        self._end = os.eventfd(0, os.EFD_CLOEXEC)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while self._end not in select.select([self.server.fd, self._end], [], [])[0]:
            with suppress(BlockingIOError):
                os.eventfd_read(self.server.fd)
            if self.server.wants_page():
                self.asked += 1
                self.server.tell_page(json.dumps(self.text))
            self.server.answer(0.0)

    def close(self):
        os.eventfd_write(self._end, 1)
        self._thread.join()
        os.close(self._end)
        self.server = None  # Release the server, because pytest keeps this object longer.


@pytest.fixture
def serve():
    """Return a function that starts a server whose requests no agent answers."""
    servers = []

    def serve():
        servers.append(_core.HealthServer("127.0.0.1", 0, 60.0))
        return servers[-1]

    yield serve
    while servers:
        servers.pop().close()


@pytest.fixture
def agent(serve):
    with closing(Agent(serve())) as agent:
        yield agent


def test_the_page_allows_only_what_is_in_it(serve):
    with closing(http.client.HTTPConnection("127.0.0.1", serve().port, timeout=procs.HANG)) as connection:
        connection.request("GET", "/")
        response = connection.getresponse()
        content, headers = response.read(), response.headers
    assert (response.status, headers["Content-Type"]) == (200, "text/html; charset=utf-8")
    policy = dict(part.strip().split(" ", 1) for part in headers["Content-Security-Policy"].split(";"))
    assert policy.pop("default-src") == "'none'"
    assert policy.pop("connect-src") == "'self'"
    for tag in ("style", "script"):
        (inside,) = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), content, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(inside).digest()).decode()
        assert policy.pop(f"{tag}-src") == f"'sha256-{digest}'"
    assert set(policy.values()) == {"'none'"}
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert not re.search(rb"https?://|\bon[a-z]+=|style=", content)
    assert len(content) < 16_000


@pytest.mark.parametrize("path", ["/", "/status/stream"])
def test_the_page_can_only_be_read(serve, path):
    port = serve().port
    assert get(port, path, "HEAD")[0::2] == (200, "")
    for method in ("POST", "PUT", "DELETE"):
        assert get(port, path, method)[0] == 405


def test_events_are_only_for_names_of_this_machine(serve):
    assert get(serve().port, "/status/stream", host="evil.example")[0] == 421


def test_an_event_comes_only_if_the_text_has_changed(agent, listen):
    browser = listen(agent.server.port)
    assert browser.response.headers["Content-Type"] == "text/event-stream"
    assert browser.next() == {"stuck": None, "view": {"n": 1}}
    asked = agent.asked
    wait_until(lambda: agent.asked, lambda count: count >= asked + 2)
    agent.text = {"n": 2}
    begun = time.monotonic()
    assert browser.next() == {"stuck": None, "view": {"n": 2}}
    agent.text = {"n": 3}
    # Events are at least a second apart, so the third text comes about a second after the second one.
    assert browser.next()["view"] == {"n": 3}
    assert time.monotonic() - begun > 0.9


def test_the_agent_is_asked_for_a_text_only_while_a_browser_listens(agent, listen):
    # The server may reuse the agent's answer to this request, but must ask again when a browser needs a text.
    assert get(agent.server.port, "/status")[0] == 200
    assert agent.asked == 0
    browser = listen(agent.server.port)
    assert browser.next() == {"stuck": None, "view": {"n": 1}}
    assert agent.asked == 1
    browser.close()
    wait_until(lambda: agent.server.viewers, (0).__eq__)
    asked = agent.asked
    assert get(agent.server.port, "/status")[0] == 200
    assert agent.asked == asked


def test_a_ninth_browser_is_refused_and_listeners_take_no_place_of_other_clients(agent, listen):
    port = agent.server.port
    browsers = [listen(port) for _ in range(VIEWERS)]
    assert {each.next()["view"]["n"] for each in browsers} == {1}
    ninth = listen(port)
    assert ninth.status == 503
    assert str(VIEWERS) in ninth.response.read().decode()
    # These clients are more than the server allows. They replace each other, but not the browsers.
    idle = [socket.create_connection(("127.0.0.1", port)) for _ in range(80)]
    assert get(port, "/healthz")[0] == 200
    agent.text = {"n": 2}
    assert {each.next()["view"]["n"] for each in browsers} == {2}
    for client in idle:
        client.close()
    browsers[0].close()
    wait_until(lambda: listen(port).status, (200).__eq__)


def test_a_browser_that_does_not_read_delays_nobody(agent, listen):
    port = agent.server.port
    slow = socket.socket()
    slow.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    slow.connect(("127.0.0.1", port))
    slow.sendall(b"GET /status/stream HTTP/1.1\r\n\r\n")
    browser = listen(port)
    agent.text = {"n": 0, "much": "x" * (8 << 20)}
    with closing(slow):
        for number in range(1, 4):
            wait_until(browser.next, lambda event, n=number - 1: event["view"]["n"] == n)
            agent.text = {"n": number, "much": agent.text["much"]}
            assert get(port, "/healthz")[0] == 200
        slow.settimeout(procs.HANG)
        # The server disconnects this client, because it does not read.
        with suppress(ConnectionError):
            while slow.recv(1 << 20):
                pass


def test_a_browser_is_told_that_the_agent_does_not_answer(serve, listen):
    browser = listen(serve().port)
    event = browser.next()
    assert event["view"] is None
    assert "not answered" in event["stuck"]


def test_a_process_without_a_job_has_a_page(listen):
    server = HealthCheckServer(time.time, 0, 60)
    server.start()
    try:
        event = listen(server.port).next()
    finally:
        server.stop()
    assert event["stuck"] is None
    assert "no" in event["view"]["sentence"]


def test_the_page_of_a_job_says_how_it_is_until_it_ends(launch, worker_script, listen):
    job = launch("--health-check-port=0", "--nproc-per-node=2", worker_script(WAITS))
    port = port_of(job)
    found = job.wait_for_lines(r"here (\d+) (\d+)\.", 2)
    pids = [int(line[2]) for line in sorted(found, key=lambda line: int(line[1]))]
    browser = listen(port)
    view = wait_until(lambda: browser.next()["view"], lambda view: view["state"] == "running")
    assert view["title"].startswith("worker")
    assert "with 2 ranks" in view["sentence"]
    assert [(letter, int(cells[1])) for letter, cells in view["rows"]] == [(".", pid) for pid in pids]
    os.kill(pids[1], signal.SIGSTOP)
    view = wait_until(lambda: browser.next()["view"], lambda view: view["rows"][1][0] == "p")
    assert ["warn", f"rank 1: stopped by a signal; kill -CONT {pids[1]} continues it"] in view["remarks"]
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGUSR1)
    assert job.wait() == 0, job.stderr
    assert wait_until(lambda: browser.next()["view"]["state"], "succeeded".__eq__)
    with pytest.raises((EOFError, ConnectionError)):
        browser.next()


def test_the_page_of_a_failed_job_shows_which_rank_failed_and_which_was_stopped(
    launch, worker_script, listen
):
    job = launch("--health-check-port=0", "--nproc-per-node=2", worker_script(WAITS))
    port = port_of(job)
    found = job.wait_for_lines(r"here (\d+) (\d+)\.", 2)
    pids = {int(line[1]): int(line[2]) for line in found}
    browser = listen(port)
    view = wait_until(lambda: browser.next()["view"], lambda view: view["state"] == "running")
    assert view["commands"]
    os.kill(pids[1], signal.SIGKILL)
    assert job.wait() == 1
    view = wait_until(lambda: browser.next()["view"], lambda view: view["state"] == "failed")
    assert [letter for letter, _ in view["rows"]] == ["s", "F"]
    assert view["remarks"] == [
        ["bad", f"cause: rank 1 (pid {pids[1]}) in attempt 0: died by SIGKILL"],
        ["bad", "rank 1: died by SIGKILL"],
        ["note", "rank 0: stopped by elasticrs"],
    ]
    assert view["commands"] == []


def test_the_page_shows_the_ranks_of_all_nodes(launch, worker_script, listen):
    options = (*meeting(), "--nproc-per-node=1", "--health-check-port=0")
    jobs = [launch(*options, worker_script(WAITS)) for _ in range(2)]
    pids = [int(job.wait_for_line(r"here \d (\d+)\.")[1]) for job in jobs]
    browser = listen(port_of(jobs[0]))
    view = wait_until(lambda: browser.next()["view"], lambda view: len(view["rows"]) == 2)
    assert view["titles"][:3] == ["RANK", "NODE", "PID"]
    assert {int(cells[2]) for _, cells in view["rows"]} == set(pids)
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)
    assert [job.wait() for job in jobs] == [0, 0]


def test_the_page_is_also_served_over_the_control_socket_but_takes_no_orders(
    launch, worker_script, tmp_path, listen
):
    folder = tmp_path / "c"
    job = launch("--nproc-per-node=1", worker_script(WAITS), env={"ELASTICRS_CONTROL_DIR": str(folder)})
    job.wait_for_line(r"here 0 \d+\.")
    path = folder / f"{job.pid}.sock"
    browser = listen(path)
    wait_until(lambda: browser.next()["view"], lambda view: "1 rank" in view.get("sentence", ""))

    def answer(method, path_of_request, **headers):
        with closing(Connection(str(path), procs.HANG)) as connection:
            connection.request(
                method, path_of_request, '{"do": "stop"}' if method == "POST" else None, headers
            )
            response = connection.getresponse()
            # The agent ignores an order if its client has gone before the agent takes it.
            if method == "POST":
                response.read()
            return response.status

    assert answer("GET", "/") == 200
    # If a user has forwarded a port to the socket, a web page in the user's browser must not act on the job.
    assert answer("POST", "/do", Origin="http://localhost:8080") == 403
    assert answer("GET", "/status", Host="evil.example") == 421
    assert answer("GET", "/status/stream", Host="evil.example") == 421
    assert answer("GET", "/status/stream", Origin="http://evil.example") == 403
    assert answer("POST", "/do") == 200
    assert job.wait() != 0


FAILS = """
import os, signal
if int(os.environ["TORCHELASTIC_RESTART_COUNT"]) < 50:
    os._exit(3)
""" + WAITS  # fmt: skip


@pytest.mark.slow
def test_a_page_stays_open_over_fifty_restarts(launch, worker_script, listen):
    options = ("--max-restarts=60", "--max-same-failures=0", "--health-check-port=0", "--nproc-per-node=2")
    job = launch(*options, worker_script(FAILS))
    browser = listen(port_of(job))
    view = wait_until(
        lambda: browser.next()["view"],
        lambda view: "50 of 60" in view["sentence"] and view["state"] == "running",
    )
    assert view["remarks"][0][0] == "note"
    assert len(view["failures"]) == 17
    pids = [int(line[2]) for line in job.wait_for_lines(r"here (\d+) (\d+)\.", 2)]
    threads = len(os.listdir(f"/proc/{job.pid}/task"))
    browser.close()
    for pid in pids:
        os.kill(pid, signal.SIGUSR1)
    assert job.wait() == 0, job.stderr
    assert threads < 16


# --- in a browser ---

LOOKS = [("light", 1120), ("dark", 1120), ("phone", 500)]


def look(browser, port, words, folder, name):
    """Open the page in each of the ``LOOKS``, write pictures into ``folder``, and return the text."""
    for theme, width in LOOKS:
        browser.open(f"http://127.0.0.1:{port}/", width=width, is_dark=theme == "dark")
        text = browser.wait_for(words, procs.HANG)
        (folder / f"{name}-{theme}.png").write_bytes(browser.picture())
        # Nothing on the page may be wider than the window.
        assert browser.evaluate("document.documentElement.scrollWidth") == width
        assert browser.evaluate("getComputedStyle(document.body).backgroundColor") == (
            "rgb(15, 19, 23)" if theme == "dark" else "rgb(255, 255, 255)"
        )
    assert browser.complaints == []
    print(f"pictures in {folder}")
    return text


@pytest.mark.slow
@in_browser
def test_a_browser_shows_a_job_of_four_ranks_and_its_end(launch, worker_script, browser, tmp_path):
    job = launch("--health-check-port=0", "--nproc-per-node=4", worker_script(WAITS))
    port = port_of(job)
    pids = [int(line[2]) for line in job.wait_for_lines(r"here (\d+) (\d+)\.", 4)]
    text = look(browser, port, "running with 4 ranks", tmp_path, "4")
    assert [str(pid) for pid in sorted(pids)] == sorted(
        re.findall(r"^\d\s+(\d+)\s+· running", text, re.MULTILINE)
    )
    assert f"elasticctl stacks --job {job.pid}" in text
    os.kill(pids[3], signal.SIGSTOP)
    assert f"kill -CONT {pids[3]}" in browser.wait_for("p stopped by a signal", procs.HANG)
    for pid in pids:
        os.kill(pid, signal.SIGCONT)
        os.kill(pid, signal.SIGUSR1)
    assert job.wait() == 0, job.stderr
    assert "succeeded" in browser.wait_for("the job has ended", procs.HANG)


@pytest.mark.slow
@in_browser
def test_a_browser_shows_which_of_256_ranks_to_look_at(agent, browser, tmp_path):
    agent.text = page(simulated(256))
    text = look(browser, agent.server.port, "no progress for 38.9 s", tmp_path, "256")
    assert re.findall(r"^(\d+)\s+\d+\s+(\w) ", text, re.MULTILINE) == [
        ("200", "F"),
        ("130", "p"),
        ("77", "b"),
    ]
    cells = browser.evaluate("[...document.querySelectorAll('#grid .cell')].map(c => c.textContent).join('')")
    assert cells == "n" * 77 + "b" + "n" * 52 + "p" + "n" * 69 + "F" + "n" * 55
    hint = browser.evaluate("document.querySelectorAll('#grid .cell')[77].title")
    assert hint == "rank 77: steps behind"


def simulated(ranks):
    """Return the status of a job with this number of ranks, some of which have a problem."""
    workers = [
        {
            "rank": rank,
            "pid": 41200 + rank,
            "state": "RUNNING",
            "exitcode": None,
            "progress": {"step": 18412, "counts": "keep", "age_seconds": 38.0 + rank % 9 / 10},
        }
        for rank in range(ranks)
    ]
    workers[77]["progress"]["step"] = 18410
    workers[130]["state"] = "PAUSED"
    workers[200] |= {"state": "EXITED", "exitcode": -9}
    failure = {
        "rank": 3,
        "pid": 40017,
        "attempt": "0",
        "what": "exited with code 1",
        "exception": "OSError: disk",
    }
    what = (
        "no progress for 38.9 s: ranks 0-76, 78-255 in step 18,413, rank 77 in step 18,411; 255 of 256 ranks"
        " wait in all_reduce #18,413 of the default group (train.py:212); rank 77 did not enter it: it is in"
        " read_batch (data.py:88)"
    )
    return {
        "host": "gpu009",
        "job": {"name": "train.py", "run_id": "llama-8b-sft", "max_restarts": 3},
        "agent": {"pid": 41188, "alive": True, "reason": None, "uptime_seconds": 25931.0},
        "group": {"world_size": 1, "workers": ranks},
        "state": "NO_PROGRESS",
        "restarts": 1,
        "attempt": "1",
        "no_progress": {"what": what},
        "slowest": None,
        "earlier_failures": [],
        "last_failure": failure | {"time_ms": 1_795_000_000_000},
        "log_folder": "/logs/llama-8b-sft",
        "has_log_files": True,
        "workers": workers,
    }
