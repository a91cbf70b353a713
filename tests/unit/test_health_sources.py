"""Values of `--node-check`, and the commands in contrib/ that query services of a site."""

import json
import os
import socket
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from helpers.procs import run_program

import elasticrs
from elasticrs._engine.cli.arguments import resolve
from elasticrs._engine.gpus.node_check import NodeCheck
from elasticrs._engine.job.config import HealthSource, UsageError
from elasticrs._engine.job.options import parse

CHECKS = Path(__file__).resolve().parents[2] / "contrib" / "node-checks"


class TestSourceSyntax:
    @pytest.mark.parametrize(
        ("text", "source"),
        [
            ("nvml", HealthSource("nvml")),
            ("gpud scan --fast", HealthSource("the node check", ("gpud", "scan", "--fast"))),
            ("sh -c 'exit 1'", HealthSource("the node check", ("sh", "-c", "exit 1"))),
        ],
    )
    def test_text_is_parsed_as_a_source(self, text, source):
        assert HealthSource.parse(text) == source

    @pytest.mark.parametrize(("text", "word"), [("", "program"), ("nvml:0", "nvml")])
    def test_a_malformed_source_is_refused(self, text, word):
        with pytest.raises(ValueError, match=word):
            HealthSource.parse(text)

    @pytest.mark.parametrize("text", ["gpud", "gpud:http://127.0.0.1:1", "nvhcd", "nvhcd:/run/nvhcd.sock"])
    def test_a_source_that_is_gone_is_refused_with_the_command_for_it(self, text):
        script = f"{text.partition(':')[0]}.sh"
        with pytest.raises(
            ValueError, match=rf"command.* contrib/node-checks/{script} .*bash /PATH/{script}"
        ):
            HealthSource.parse(text)
        assert (CHECKS / script).is_file()

    @pytest.mark.parametrize(("word", "is_similar"), [("NVML", True), ("nvlm:0", True), ("no-such", False)])
    def test_a_misspelt_source_name_gets_a_hint(self, word, is_similar):
        with pytest.raises(UsageError, match="was not found in PATH") as error:
            resolve(parse(["--node-check", word, "--no-python", "true"], {}), {"PATH": os.environ["PATH"]})
        assert ("did you mean nvml?" in str(error.value)) == is_similar


def test_an_import_error_of_the_built_in_check_counts_as_no_answer(monkeypatch, tmp_path):
    (tmp_path / "elasticrs").mkdir()
    (tmp_path / "elasticrs" / "__init__.py").touch()
    monkeypatch.setattr(elasticrs, "__path__", [str(tmp_path / "elasticrs")])
    (result,) = NodeCheck([HealthSource.parse("nvml")], 60.0).finish()
    assert result.unfit is None
    assert "ModuleNotFoundError" in result.problem


def command(script, *arguments):
    """Run a script in contrib/, and return its exit code and its output."""
    done = run_program(["bash", str(CHECKS / script), *arguments])
    return done.returncode, done.stdout


class Gpud(BaseHTTPRequestHandler):
    def do_GET(self):
        status, body = self.server.answers[self.path.removesuffix("/v1/states")]
        self.send_response(status)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args):
        pass


def components(**states):
    found = [
        {"component": name, "states": [{"health": health, "reason": "a \ud800 reason", **more}]}
        for name, (health, more) in states.items()
    ]
    return 200, json.dumps(found).encode()


def suggested(*actions):
    return {"suggested_actions": {"description": "", "repair_actions": actions}}


def test_the_command_for_gpud_finds_nodes_unfit_that_need_a_repair():
    fit = {
        "/fit": components(disk=("Healthy", {}), xid=("Degraded", {}), ecc=("Initializing", {})),
        "/program": components(
            xid=("Unhealthy", suggested("CHECK_USER_APP_AND_GPU")),
            nfs=("Unhealthy", suggested("IGNORE_NO_ACTION_REQUIRED")),
        ),
        "/status": (503, b"[]"),
        "/html": (200, b"<html>"),
        "/number": (200, b"[7]"),
        "/empty": (200, b""),
    }
    unfit = {
        "/repair": components(ecc=("Unhealthy", suggested("CHECK_USER_APP_AND_GPU", "REBOOT_SYSTEM"))),
        "/unknown": components(disk=("Healthy", {}), ecc=("Unhealthy", {})),
    }
    with ThreadingHTTPServer(("127.0.0.1", 0), Gpud) as server:
        server.answers = fit | unfit
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        url = f"http://127.0.0.1:{server.server_port}"
        try:
            found = {path: command("gpud.sh", url + path) for path in server.answers}
        finally:
            server.shutdown()
            thread.join()
    assert {path for path, (code, _) in found.items() if code} == unfit.keys()
    assert all("ecc" in said for path, (_, said) in found.items() if path in unfit)
    assert "REBOOT_SYSTEM" in found["/repair"][1]
    assert command("gpud.sh", url)[0] == 0, "the server is gone"


def frame(kind, flags, stream, payload=b""):
    """Return an HTTP/2 frame."""
    return len(payload).to_bytes(3, "big") + bytes([kind, flags]) + stream.to_bytes(4, "big") + payload


DATA, HEADERS, SETTINGS, IS_LAST, IS_COMPLETE, STATUS_200 = 0, 1, 4, 1, 4, b"\x88"


def answer_call(listener, message):
    """Answer one gRPC call over HTTP/2 with an encoded message."""
    connection, _ = listener.accept()
    with connection, connection.makefile("rb") as stream:
        connection.sendall(frame(SETTINGS, 0, 0) + frame(SETTINGS, 1, 0))
        stream.read(len("PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"))
        kind = flags = None
        while (kind, flags) != (DATA, IS_LAST):
            head = stream.read(9)
            kind, flags = head[3:5]
            payload = stream.read(int.from_bytes(head[:3], "big"))
        assert payload == bytes(5), "a message without arguments"
        reply = frame(HEADERS, IS_COMPLETE, 1, STATUS_200)
        reply += frame(DATA, 0, 1, b"\0" + len(message).to_bytes(4, "big") + message)
        connection.sendall(reply + frame(HEADERS, IS_LAST | IS_COMPLETE, 1, b"\0\x0bgrpc-status\x010"))
        stream.read()


@pytest.mark.parametrize(
    ("message", "code", "said"),
    [
        (b"\x08\x01\x1a\x04fine", 0, ""),
        (b'\x10\x03\x1a\x0a{"gpu": 2}', 1, '{"gpu": 2}'),
        (b"\x10" + b"\xf7" + b"\xff" * 8 + b"\x01", 1, "failed"),
        (b"\x22\x0eno such script", 0, ""),
        (b"", 0, ""),
    ],
    ids=["fit", "unfit", "signal", "not run", "empty"],
)
def test_the_command_for_nvhcd_finds_nodes_unfit_whose_check_failed(tmp_path, message, code, said):
    path = str(tmp_path / "nvhcd.sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen()
        thread = threading.Thread(target=answer_call, args=(listener, message))
        thread.start()
        found = command("nvhcd.sh", path)
        thread.join()
    assert found[0] == code
    assert said in found[1]
    assert command("nvhcd.sh", path)[0] == 0, "the daemon is gone"
