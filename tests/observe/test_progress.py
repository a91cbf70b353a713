"""The agent reports the training step to Kubeflow Trainer, here a small TLS server."""

import http.server
import json
import queue
import signal
import socket
import ssl
import threading
import time
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from helpers.launcher import launcher_with
from helpers.procs import HANG

from elasticrs.agent.job_progress import metrics_of, send
from elasticrs.launcher.arguments import parse, resolve

PATH = "/apis/trainer.kubeflow.org/v1alpha1/namespaces/team/trainjobs/train/status"
LAUNCHER = launcher_with("agent.job_progress", INTERVAL=0.05)


@contextmanager
def serving(files, answer):
    """Run a TLS server that queues its requests. ``answer`` returns the HTTP status of each response."""
    requests = queue.Queue()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            body = self.rfile.read(int(self.headers["Content-Length"]))
            requests.put((self.path, self.headers, json.loads(body)))
            self.send_response(answer())
            self.end_headers()

        def log_message(self, *_):
            pass

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(files.cert, files.key)
    server.socket = context.wrap_socket(server.socket, server_side=True, do_handshake_on_connect=False)
    server.daemon_threads = False
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield requests, server.server_address[1]
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@pytest.fixture
def job(launch, authority, tmp_path, worker_script):
    """Start a job whose rank N reports N + 3 steps. The workers then wait for SIGUSR1."""
    token = tmp_path / "token"
    token.write_text("secret\n", encoding="ascii")
    script = worker_script("""
        import os, signal
        from elasticrs.timer import heartbeat

        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
        for step in range(3 + int(os.environ["RANK"])):
            heartbeat(step)
        print("STEPPED", flush=True)
        signal.sigwait({signal.SIGUSR1})
    """)

    def start(port, *options, ca=authority.ca, argv=LAUNCHER):
        env = {
            "ELASTICRS_KUBEFLOW_PROGRESS": "1",
            "KUBEFLOW_TRAINER_SERVER_URL": f"https://127.0.0.1:{port}{PATH}",
            "KUBEFLOW_TRAINER_SERVER_CA_CERT": str(ca),
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(token),
        }
        started = launch("--hang-timeout=600", *options, script, env=env, argv=argv)
        started.token = token
        return started

    return start


def finish(job):
    # The agent passes SIGUSR1 on to its workers.
    job.signal(signal.SIGUSR1)
    job.exits(0)


def until(requests, is_last):
    """Return the first request whose metrics satisfy ``is_last``."""
    deadline = time.monotonic() + HANG
    while True:
        path, headers, body = requests.get(timeout=deadline - time.monotonic())
        metrics = {each["name"]: each["value"] for each in body["trainerStatus"]["metrics"]}
        if is_last(metrics):
            return path, headers, body, metrics


def test_the_lowest_step_is_reported_with_the_token_of_the_pod(job, authority):
    # This import takes long, and every process of pytest imports this file.
    from kubeflow_trainer_api.models import TrainerV1alpha1UpdateTrainJobStatusRequest

    with serving(authority.issue("kubeflow"), lambda: 200) as (requests, port):
        started = job(port, "--nproc-per-node=2")
        path, headers, body, metrics = until(requests, lambda metrics: metrics["step"] == "2")
        assert (path, headers["Authorization"]) == (PATH, "Bearer secret")
        assert metrics == {"step": "2", "restarts": "0"}
        status = TrainerV1alpha1UpdateTrainJobStatusRequest.from_dict(body)
        assert status.trainer_status.last_updated_time.utcoffset().total_seconds() == 0
        # Values that were already reported are not sent again.
        started.wait_for_lines("STEPPED", 2)
        assert requests.empty()
        finish(started)
        assert "progress" not in started.stderr


def test_the_last_step_is_reported_at_the_end(job, authority):
    argv = launcher_with("agent.job_progress", INTERVAL=HANG)
    with serving(authority.issue("kubeflow"), lambda: 200) as (requests, port):
        started = job(port, "--nproc-per-node=2", argv=argv)
        started.wait_for_lines("STEPPED", 2)
        assert requests.empty()
        finish(started)
        assert until(requests, bool)[-1] == {"step": "2", "restarts": "0"}


@pytest.mark.parametrize("cause", ["status", "authority", "token"])
def test_a_failed_progress_report_is_logged_once_and_the_job_continues(job, authority, cause):
    statuses = iter([403] * 5)
    with serving(authority.issue("kubeflow"), lambda: next(statuses, 200)) as (requests, port):
        # Pass an empty CA file, so that the certificate of the server cannot be verified.
        started = job(port, ca="/dev/null" if cause == "authority" else authority.ca)
        if cause == "token":
            started.token.unlink()
        line = started.wait_for_line("could not be reported to Kubeflow: (.*); the job continues")
        if cause == "status":
            assert "403" in line[1]
            for _ in range(6):
                until(requests, lambda metrics: metrics["step"] == "2")
        finish(started)
    assert started.stderr.count("could not be reported") == 1


@pytest.mark.parametrize(
    ("answer", "variables", "said"),
    [
        (b"nonsense\r\n\r\n", {}, "BadStatusLine"),
        (b"", {"KUBEFLOW_TRAINER_SERVER_TOKEN": ""}, "KUBEFLOW_TRAINER_SERVER_TOKEN is not set"),
        (b"", {"KUBEFLOW_TRAINER_SERVER_URL": "http://a\nb/"}, "InvalidURL"),
    ],
)
def test_every_failed_progress_report_raises_an_error_with_a_reason(tmp_path, answer, variables, said):
    (tmp_path / "token").write_text("secret", encoding="ascii")
    with socket.create_server(("127.0.0.1", 0)) as server:
        environ = {
            "KUBEFLOW_TRAINER_SERVER_URL": f"http://127.0.0.1:{server.getsockname()[1]}/",
            "KUBEFLOW_TRAINER_SERVER_TOKEN": str(tmp_path / "token"),
            **variables,
        }

        def serve():
            connection, _ = server.accept()
            with connection:
                connection.recv(65536)
                connection.sendall(answer)

        thread = threading.Thread(target=serve)
        if answer:
            thread.start()
        with pytest.raises((OSError, ValueError), match=said):
            send({"step": 1}, environ)
        if answer:
            thread.join()


def test_an_unresponsive_progress_server_does_not_delay_the_job(job, authority):
    is_over = threading.Event()

    def hang():
        is_over.wait(HANG)
        return 200

    with serving(authority.issue("kubeflow"), hang) as (requests, port):
        started = job(port)
        until(requests, lambda _: True)
        finish(started)
        is_over.set()


@pytest.mark.parametrize(
    ("ranks", "steps", "metrics"),
    [
        ([0, 1], [7, 5], {"step": 5, "restarts": 2}),
        ([0, 1], [7, None], {"step": 7, "restarts": 2}),
        ([0, 1], [None], None),
        ([0, 1], [], None),
        # Only the node with rank 0 reports metrics.
        ([2, 3], [7, 5], None),
    ],
)
def test_only_the_node_with_rank_0_reports_the_lowest_known_step(ranks, steps, metrics):
    attempt = SimpleNamespace(restarts=2, shown_ranks=lambda: dict(enumerate(ranks)))
    assert metrics_of(attempt, [SimpleNamespace(step=step) for step in steps]) == metrics


@pytest.mark.parametrize(
    ("argv", "variables", "said"),
    [
        (["--hang-timeout=60"], {}, "TrainJobStatus"),
        ([], {"KUBEFLOW_TRAINER_SERVER_URL": "https://a"}, "--hang-timeout"),
    ],
)
def test_a_notice_says_why_no_progress_is_reported(argv, variables, said):
    environ = {"ELASTICRS_KUBEFLOW_PROGRESS": "1", **variables}
    launched = resolve(parse([*argv, "-m", "this"], environ), {"PATH": "/bin", **environ})
    assert launched.observe.is_off
    assert any(said in line for line in launched.notices)


def test_progress_is_reported_only_if_the_user_enables_it():
    for environ in ({}, {"ELASTICRS_KUBEFLOW_PROGRESS": "0"}):
        environ["KUBEFLOW_TRAINER_SERVER_URL"] = "https://a"
        launched = resolve(parse(["--hang-timeout=60", "-m", "this"], environ), {"PATH": "/bin", **environ})
        assert launched.observe.is_off
