"""The built-in health sources: their syntax, and what they conclude from responses."""

import contextlib
import json
import ssl
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from helpers.procs import run_program
from hypothesis import given
from hypothesis import strategies as st

import elasticrs
from elasticrs.host import health_program, nvhcd_check
from elasticrs.host.health_program import NO_ANSWER, UNFIT, NoAnswerError
from elasticrs.host.node_check import NodeCheck
from elasticrs.job.policy_options import HealthSource, similar_source

grpc = pytest.importorskip("grpc")
trustme = pytest.importorskip("trustme")


def ask(text, timeout=60.0):
    """Run one source in a child process, as the agent does, and return its result."""
    (result,) = NodeCheck([HealthSource.parse(text)], timeout).finish()
    return result


class TestSourceSyntax:
    @pytest.mark.parametrize(
        ("text", "source"),
        [
            ("nvml", HealthSource("nvml", (), "nvml")),
            ("gpud", HealthSource("gpud", (), "gpud")),
            ("gpud:http://[::1]:80/x", HealthSource("gpud", ("http://[::1]:80/x",), "gpud")),
            ("nvhcd:/run/a b.sock", HealthSource("nvhcd", ("/run/a b.sock",), "nvhcd")),
            ("gpud scan --fast", HealthSource("the node check", ("gpud", "scan", "--fast"))),
            ("sh -c 'exit 1'", HealthSource("the node check", ("sh", "-c", "exit 1"))),
        ],
    )
    def test_text_is_parsed_as_a_source(self, text, source):
        assert HealthSource.parse(text) == source

    @pytest.mark.parametrize(
        "text",
        ["", "nvml:0", "gpud:", "gpud:localhost", "gpud:ftp://x", "gpud:http://x:y", "nvhcd", "nvhcd:"],
    )
    def test_a_malformed_source_is_refused(self, text):
        with pytest.raises(ValueError, match="program" if not text else text[:4]):
            HealthSource.parse(text)

    @pytest.mark.parametrize(
        ("word", "name"), [("gdup", "gpud"), ("NVML", "nvml"), ("nvhdc:/x", "nvhcd"), ("true", None)]
    )
    def test_a_misspelt_source_name_gets_a_hint(self, word, name):
        assert similar_source(word) == name


class Gpud(ThreadingHTTPServer):
    """A server that answers every request with ``answer``, a status and a body. If that is ``None``, it waits
    until it is closed.
    """

    def __init__(self):
        super().__init__(("127.0.0.1", 0), Handler)
        self.answer, self.paths, self.over = (200, b""), [], threading.Event()


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.paths.append(self.path)
        if self.server.answer is None:
            self.server.over.wait()
            return
        status, body = self.server.answer
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


@pytest.fixture
def gpud(request, tmp_path):
    """A fake GPUd server with HTTPS and its own certificate, unless the test's parameter is another
    scheme.
    """
    server = Gpud()
    server.scheme = getattr(request, "param", "https")
    if server.scheme == "https":
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        trustme.CA().issue_cert("127.0.0.1").configure_cert(context)
        server.socket = context.wrap_socket(server.socket, server_side=True)
    server.url = f"gpud:{server.scheme}://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield server
    server.over.set()
    server.shutdown()
    thread.join()
    server.server_close()


def components(**states):
    found = [
        {"component": name, "states": [{"health": health, "reason": "a reason", **more}]}
        for name, (health, more) in states.items()
    ]
    return 200, json.dumps(found).encode()


def suggested(*actions):
    return {"suggested_actions": {"description": "", "repair_actions": actions}}


class TestGpud:
    @pytest.mark.parametrize("gpud", ["https", "http"], indirect=True)
    def test_healthy_and_degraded_components_leave_the_node_fit(self, gpud):
        gpud.answer = components(disk=("Healthy", {}), xid=("Degraded", {}), ecc=("Initializing", {}))
        result = ask(gpud.url)
        assert (result.unfit, result.problem) == (None, None)
        assert gpud.paths == ["/v1/states"]

    def test_an_unhealthy_component_makes_the_node_unfit_and_names_repairs(self, gpud):
        gpud.answer = components(
            ecc=("Unhealthy", suggested("REBOOT_SYSTEM", "HARDWARE_INSPECTION")), nfs=("Unhealthy", {})
        )
        result = ask(gpud.url)
        assert result.problem is None
        reasons = "ecc: a reason (suggested: REBOOT_SYSTEM, HARDWARE_INSPECTION); nfs: a reason"
        assert result.unfit == f"gpud: {reasons}"

    @pytest.mark.parametrize("action", ["IGNORE_NO_ACTION_REQUIRED", "CHECK_USER_APP_AND_GPU"])
    def test_an_application_problem_does_not_make_the_node_unfit(self, gpud, action):
        gpud.answer = components(xid=("Unhealthy", suggested(action)))
        result = ask(gpud.url)
        assert (result.unfit, result.problem) == (None, None)

    @pytest.mark.parametrize(
        ("answer", "word"),
        [
            ((503, b"[]"), "503"),
            ((200, b"<html>"), "JSON"),
            ((200, b"[" * 100_000), "JSON"),
            ((200, b"{}"), "list"),
            ((200, b"[]"), "list"),
            ((200, b"[7]"), "states"),
            ((200, b'[{"component": "x", "states": [null]}]'), "states"),
            ((200, b"x" * (20 << 20)), "16 MiB"),
        ],
        ids=["status", "html", "deep", "object", "empty", "number", "null", "huge"],
    )
    def test_an_invalid_reply_counts_as_no_answer(self, gpud, answer, word):
        gpud.answer = answer
        result = ask(gpud.url)
        assert (result.unfit, result.lines) == (None, ())
        assert result.problem.startswith("gpud: ")
        assert word in result.problem

    def test_a_service_that_hangs_gives_no_answer(self, gpud):
        gpud.answer = None
        result = ask(gpud.url, timeout=1.0)
        assert result.unfit is None
        assert "1 s" in result.problem

    def test_a_missing_service_gives_no_answer(self, gpud):
        url = gpud.url.replace("https", "http")
        gpud.answer = None
        assert "does not answer" in ask(f"{url[: url.rindex(':')]}:1").problem

    def test_invalid_unicode_is_shown_with_replacement_characters(self, gpud):
        gpud.answer = components(ecc=("Unhealthy", {"reason": "a \ud800 b"}))
        assert ask(gpud.url).unfit == "gpud: ecc: a ? b"


def varint(value):
    value &= (1 << 64) - 1
    found = b""
    while value > 0x7F:
        found, value = found + bytes([value & 0x7F | 0x80]), value >> 7
    return found + bytes([value])


def response(success=False, exit_code=0, output="", error=""):
    """Encode a HealthCheckResponse. Fields that have their default are left out, as in protobuf."""
    numbers = [(1, int(success)), (2, exit_code)]
    texts = [(number, text.encode()) for number, text in ((3, output), (4, error))]
    found = b"".join(varint(number << 3) + varint(value) for number, value in numbers if value)
    return found + b"".join(
        varint(number << 3 | 2) + varint(len(text)) + text for number, text in texts if text
    )


@pytest.fixture
def daemon(tmp_path):
    """A gRPC server that answers the call with ``reply``, or waits if it is ``None``."""

    class Daemon(grpc.GenericRpcHandler):
        def __init__(self):
            self.path, self.reply, self.requests = tmp_path / "nvhcd.sock", b"", []
            self.over = threading.Event()

        def service(self, details):
            if details.method != nvhcd_check.METHOD:
                return None
            return grpc.unary_unary_rpc_method_handler(self.run)

        def run(self, request, _):
            self.requests.append(request)
            if self.reply is None:
                self.over.wait()
                return b""
            return self.reply

    daemon = Daemon()
    server = grpc.server(ThreadPoolExecutor(2), handlers=(daemon,), options=[("grpc.so_reuseport", 0)])
    server.add_insecure_port(f"unix:{daemon.path}")
    server.start()
    yield daemon
    daemon.over.set()
    server.stop(None).wait()


class TestNvhcd:
    def test_a_check_that_succeeds_finds_the_node_fit(self, daemon):
        daemon.reply = response(success=True, output='{"ok": true}')
        result = ask(f"nvhcd:{daemon.path}")
        assert (result.unfit, result.problem, daemon.requests) == (None, None, [b""])

    @pytest.mark.parametrize(
        ("reply", "reason"),
        [
            (response(exit_code=3, output='{"gpu": 2}'), 'the check exited with code 3: {"gpu": 2}'),
            (response(exit_code=-9), "the check exited with code -9"),
            (response(exit_code=1, error="row\nremap"), "the check exited with code 1: row remap"),
        ],
    )
    def test_a_check_that_fails_finds_the_node_unfit(self, daemon, reply, reason):
        daemon.reply = reply
        result = ask(f"nvhcd:{daemon.path}")
        assert (result.unfit, result.problem) == (f"nvhcd: {reason}", None)

    @pytest.mark.parametrize(
        ("reply", "word"),
        [
            (response(error="no such script"), "no such script"),
            (b"", "not a HealthCheckResponse"),
            (b"\xff" * 30, "not a HealthCheckResponse"),
            (b"\x1a\x7fshort", "not a HealthCheckResponse"),
            (b"\x0b", "not a HealthCheckResponse"),
            (response(exit_code=1, output="x" * (5 << 20)), "RESOURCE_EXHAUSTED"),
        ],
        ids=["not run", "empty", "no end", "short", "group", "huge"],
    )
    def test_an_invalid_reply_counts_as_no_answer(self, daemon, reply, word):
        daemon.reply = reply
        result = ask(f"nvhcd:{daemon.path}")
        assert result.unfit is None
        assert word in result.problem

    def test_a_daemon_that_hangs_or_is_missing_gives_no_answer(self, daemon, tmp_path):
        daemon.reply = None
        assert "2 s" in ask(f"nvhcd:{daemon.path}", timeout=2.0).problem
        assert "UNAVAILABLE" in ask(f"nvhcd:{tmp_path}/missing").problem

    @given(st.binary(max_size=60))
    def test_no_reply_crashes_the_program(self, reply):
        with contextlib.suppress(NoAnswerError):
            assert nvhcd_check.report(reply) in (0, 1)


class TestHealthProgram:
    @pytest.fixture
    def source(self, tmp_path, monkeypatch):
        """Return a function that makes a module with this ``main`` function the source ``nvml``."""

        def make(main):
            (tmp_path / "a_health_source.py").write_text(main)
            monkeypatch.setitem(health_program.MODULES, "nvml", "a_health_source")
            monkeypatch.syspath_prepend(tmp_path)
            monkeypatch.delitem(sys.modules, "a_health_source", raising=False)

        return make

    @pytest.mark.parametrize(("result", "code"), [(0, 0), (1, UNFIT)])
    def test_the_result_of_a_source_becomes_the_exit_code(self, source, result, code):
        source(f"def main(): return {result}")
        assert health_program.main("nvml") == code

    def test_an_import_error_counts_as_no_answer(self, monkeypatch, tmp_path):
        (tmp_path / "elasticrs").mkdir()
        (tmp_path / "elasticrs" / "__init__.py").touch()
        monkeypatch.setattr(elasticrs, "__path__", [str(tmp_path / "elasticrs")])
        result = ask("gpud")
        assert result.unfit is None
        assert "ModuleNotFoundError" in result.problem

    def test_an_exception_in_a_source_counts_as_no_answer(self, source, capfdbinary):
        source("def main(): raise KeyError('x')")
        assert health_program.main("nvml") == NO_ANSWER
        sys.stdout.flush()
        assert capfdbinary.readouterr().out == b"KeyError: 'x'\n"

    def test_a_source_with_a_missing_module_is_unavailable(self, monkeypatch):
        monkeypatch.setitem(health_program.MODULES, "nvml", "elasticrs.host.there_is_no_such_module")
        assert health_program.why_unavailable("nvml") is not None
        assert health_program.why_unavailable("gpud") is None

    def test_a_missing_package_is_named_with_its_pip_command(self):
        # Run without site packages, so that grpcio cannot be found.
        root = elasticrs.__path__[0].rpartition("/")[0]
        code = f"import sys; sys.path.append({root!r}); import elasticrs.host.health_program as it"
        done = run_program(
            [sys.executable, "-I", "-S", "-c", f"{code}; print(it.why_unavailable('nvhcd'))"], check=True
        )
        assert "pip install 'elasticrs[nvhcd]'" in done.stdout
