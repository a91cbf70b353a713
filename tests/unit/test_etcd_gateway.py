"""HTTP requests to etcd members, answered by etcd and by other servers."""

import json
import socket
import threading

import pytest

from elasticrs.rendezvous.elastic.etcd_gateway import EtcdError, Gateway, GatewayError
from elasticrs.rendezvous.elastic.etcd_membership import Seat


def reply(body, status="200 OK", header="content-length"):
    return f"HTTP/1.0 {status}\r\n{header}: {len(body)}\r\n\r\n{body}".encode()


def refusal(body, status="400 Bad Request"):
    return reply(body, status, "Content-Length")


@pytest.fixture
def answering():
    """Return a function that runs a server with one response per connection, which stays open. It returns the
    server's seat and a list of the requests received.
    """
    with socket.create_server(("127.0.0.1", 0)) as server, socket.socket() as nobody:
        kept, asked = [nobody], []

        def answering(*answers):
            def serve():
                for answer in answers:
                    kept.append(server.accept()[0])
                    asked.append(kept[-1].recv(65536))
                    kept[-1].sendall(answer)

            threading.Thread(target=serve, daemon=True).start()
            port = server.getsockname()[1]
            return Seat("127.0.0.1", port, port), asked

        yield answering
        for each in kept:
            each.close()


@pytest.mark.parametrize(("label", "is_foreign"), [("job", False), ("jo", True), ("other", True)])
def test_the_etcd_of_another_job_is_detected(answering, label, is_foreign):
    listed = '{"members":[{"ID":"7","name":"job-a-0"},{"ID":"8","name":"job-a-1"}]}'
    seat, asked = answering(reply(listed))
    assert Gateway().find_foreign([seat], label, 5) == (seat if is_foreign else None)
    assert asked[0].startswith(b"POST /v3/cluster/member/list HTTP/1.0\r\n")


def test_a_rejected_request_raises_the_error_message_of_etcd(answering):
    text = '{"error":"etcdserver: no leader","code":14}'
    seat, _ = answering(refusal(text, "503 Service Unavailable"))
    with pytest.raises(GatewayError, match=r"^etcdserver: no leader$"):
        Gateway().ask(seat, "kv/range", {}, 5)


@pytest.mark.parametrize(
    ("body", "error"),
    [
        *(
            (f'{{"error":"{text}","message":"{text}","code":{code}}}', error)
            for error in EtcdError
            for code, text in [error.value]
        ),
        # etcd 3.6 sends no `error` field.
        ('{"code":9,"message":"etcdserver: authentication is not enabled"}', EtcdError.AUTH_DISABLED),
        ('{"code":3,"message":"etcdserver: authentication is not enabled"}', None),
        ('{"code":9,"message":"etcdserver: authentication is not enabled here"}', None),
        ('{"code":14,"message":"etcdserver: no leader"}', None),
        ('{"code":[9],"message":{}}', None),
        ("[]", None),
    ],
)
def test_errors_of_etcd_are_identified_by_code_and_text(answering, body, error):
    seat, _ = answering(refusal(body))
    with pytest.raises(GatewayError) as raised:
        Gateway().ask(seat, "auth/authenticate", {}, 5)
    assert raised.value.error is error


@pytest.mark.parametrize(
    ("error", "is_protected"), [(EtcdError.AUTH_FAILED, True), (EtcdError.AUTH_DISABLED, False)]
)
def test_the_login_error_shows_whether_etcd_requires_a_password(answering, error, is_protected):
    code, message = error.value
    seat, _ = answering(refusal(json.dumps({"code": code, "message": message})))
    assert Gateway((), "secret").is_protected([seat], 5) is is_protected


def test_the_password_is_sent_once_and_its_token_is_reused(answering):
    seat, asked = answering(reply('{"token":"t.1"}'), reply("{}"), reply("{}"))
    gateway = Gateway((), "secret")
    gateway.ask(seat, "x", {}, 5)
    gateway.ask(seat, "y", {}, 5)
    assert [each.split()[1] for each in asked] == [b"/v3/auth/authenticate", b"/v3/x", b"/v3/y"]
    assert all(b"Authorization: t.1\r\n" in each for each in asked[1:])


@pytest.mark.parametrize(
    "answer",
    [
        b"SSH-2.0-OpenSSH\r\n\r\n" * 2,
        b"HTTP/1.0 200 OK\r\nContent-Length: 5\r\n\r\nhello",
        reply("{}"),
        reply('[{"id":1}'),
        reply('[{"id":1}]'),
    ],
)
def test_a_response_that_is_not_from_etcd_raises_an_error(answering, answer):
    seat, _ = answering(answer if answer.startswith(b"HTTP") else answer + b"HTTP")
    # A response without a length, on a connection that stays open, leads to a timeout.
    with pytest.raises((GatewayError, TimeoutError)):
        Gateway().members_at(seat, 1)
