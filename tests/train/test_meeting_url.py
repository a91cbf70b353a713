"""The URL at which workers meet, and the error message for each invalid one."""

import pytest

from elasticrs._engine.job.config import UsageError
from elasticrs.train.meeting_url import parse
from elasticrs.train.rendezvous import RendezvousParameters


def test_an_elasticrs_url_is_parsed():
    place = parse(
        "elasticrs://node7:29500/a%2Fb?min_workers=2&max_workers=4&last_call_timeout=3&stuck_timeout=20", {}
    )
    rendezvous = place.rendezvous
    assert (rendezvous.host, rendezvous.port, rendezvous.run_id) == ("node7", 29500, "a/b")
    assert (rendezvous.min_nodes, rendezvous.max_nodes) == (2, 4)
    assert rendezvous.settings.last_call_timeout == 3
    assert place.stuck_timeout == 20
    assert rendezvous.settings.settle > 20, "a worker that hangs has ended itself before the others go on"
    assert rendezvous.settings.max_short_losses == 2**31 - 1, "lost rounds in a row do not end the job"


def test_an_etcd_url_in_torchelastic_0_1_format_is_parsed():
    url = "etcd://etcd7:2379/job7?min_workers=2&timeout=60&last_call_timeout=5&etcd_prefix=/x&protocol=http"
    rendezvous = parse(url, {}).rendezvous
    assert rendezvous.etcd is not None
    assert rendezvous.etcd.endpoints == (("etcd7", 2379),)
    assert (rendezvous.min_nodes, rendezvous.max_nodes) == (2, 2), "max_workers is min_workers by default"
    assert rendezvous.settings.join_timeout == 60


def test_the_token_comes_from_the_environment():
    place = parse("elasticrs://localhost:1/j?min_workers=1", {"ELASTICRS_TOKEN": "secret"})
    assert place.rendezvous.settings.token == b"secret"


def test_a_worker_of_an_agent_never_hosts_the_store():
    place = parse("elasticrs://localhost:1/j?min_workers=1&is_host=1", {}, may_host=False)
    assert place.rendezvous.settings.is_host is False


def test_the_smaller_maximum_number_of_workers_applies():
    assert parse("elasticrs://h:1/j?min_workers=1&max_workers=8", {}, 4).rendezvous.max_nodes == 4


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("", "expected elasticrs://"),
        ("zeus://h:1/j?min_workers=1", "expected elasticrs://"),
        ("elasticrs:///j?min_workers=1", "expected elasticrs://"),
        ("elasticrs://h:1/j", "min_workers is missing"),
        ("elasticrs://h:1/j?min_workers=0", "min_workers: got '0'"),
        ("elasticrs://h:1/j?min_workers=x", "min_workers: got 'x'"),
        ("elasticrs://h:1/j?min_workers=3&max_workers=2", "got min_workers=3"),
        ("elasticrs://h:1/?min_workers=2", "the job: got ''"),
        ("elasticrs://h:x/j?min_workers=2", "the address: got 'h:x'"),
        ("elasticrs://h:0/j?min_workers=2", " port "),
        ("elasticrs://[::1/j?min_workers=2", "Invalid IPv6"),
        ("elasticrs://h:1/j?min_workers=2&min_workers=3", "once"),
        ("elasticrs://h:1/j?min_workers", "expected KEY=VALUE"),
        ("elasticrs://h:1/j?min_workers=2&last_cal_timeout=3", "last_call_timeout"),
        ("elasticrs://h:1/j?min_workers=2&stuck_timeout=0", "stuck_timeout: got '0'"),
        ("etcd://h:1/j?min_workers=2&protocol=ftp", "protocol: got 'ftp'"),
    ],
)
def test_an_invalid_url_is_refused_in_one_line(url, said):
    with pytest.raises(UsageError) as raised:
        parse(url, {})
    assert said in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_job_name_may_contain_any_characters():
    name = "a#b?c/d e%20"
    made = RendezvousParameters("elasticrs", "localhost:1234", name, 2, 4)
    assert parse(made.url, {}).rendezvous.run_id == name
    with pytest.raises(UsageError, match="with a '#', expected '%23'"):
        parse("elasticrs://localhost:1234/a#b?min_workers=2", {})
