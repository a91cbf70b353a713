"""The notice with which a failed worker reports the exception to its agent."""

import socket
import traceback

from elasticrs._worker.error_file import give_notice

READ_BY_AGENT = 4096  # bytes


def test_a_notice_with_non_ascii_text_fits_the_read_limit_of_the_agent(tmp_path):
    script = tmp_path / "train.py"
    script.write_text(f"def f(n):\n    f(n - 1) if n else 1 / 0  # {'ü' * 900}\n", encoding="utf-8")
    names = {}
    exec(compile(script.read_text("utf-8"), str(script), "exec"), names)
    try:
        names["f"](3)
    except ZeroDivisionError as cause:
        error = ValueError("läuft über: " + "€" * 3000)
        error.__cause__ = cause
    assert len("".join(traceback.format_exception(error)).encode()) > READ_BY_AGENT
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        agent.bind("")
        agent.setblocking(False)
        give_notice(agent.getsockname()[1:].decode(), error)
        notice = agent.recv(1 << 16)
    assert len(notice) <= READ_BY_AGENT
    recorded, text = notice.decode().split("\n", 1)
    assert int(recorded) > 0
    assert "\nValueError: läuft über: €" in text
