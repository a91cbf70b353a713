"""A mistake in the command line, its variables or its files is one line and exit code 2; nothing starts.

``tests/golden/usage-errors.txt`` contains the lines.
"""

import os

import pytest
from helpers.launcher import clean_environment

from elasticrs.job.config import UsageError
from elasticrs.launcher import command_line
from elasticrs.rendezvous.elastic.describe import PYTHON, describe
from elasticrs.workers import logs

OPTIONS = """
--nproc-per-node=0 train.py
--nproc-per-node -1 train.py
--nproc-per-node 1000000 train.py
--nproc-per-node=100000000 --tee=3 train.py
--max-restarts=-1 train.py
--max-restarts -1 train.py
PET_MAX_RESTARTS=many train.py
PET_NPROC_PER_NODE=0 train.py
PET_STANDALONE=yes train.py
PET_STANDALONE=0.5 train.py
PET_STANDALONE= train.py
--nproc-per-nod3=1 train.py
--zzz train.py
-x train.py
-nproc-per-node 2
--NNODES=1 train.py
--rdzv_endpont=1 train.py
--ma train.py
--help=rendezvous
--role
--role --standalone train.py
--standalone=1 train.py

-m
-m --no-python train.py
-t 4 train.py
--redirects 0:x train.py
--local-ranks-filter=a train.py
--shutdown-timeout=-1 train.py
--shutdown-timeout 1e300 train.py
TORCH_ELASTIC_SHUTDOWN_TIMEOUT=x train.py
--linger 1e300 train.py
--signals-to-forward=USR3 train.py
--signals-to-forward=USR1,CHLD train.py
--signals-to-forward=USR1,TERM train.py
PET_SIGNALS_TO_FORWARD=SIGKILL train.py
--signals-to-handle=SIGTERM,SIGKILL train.py
--signals-to-handle SIGWHAT train.py
--stop-scope=all train.py
--hang-timeout=0 train.py
--hang-timeout=soon train.py
--hang-timeout auto: train.py
--hang-startup-timeout=0 train.py
--hang-startup-timeout 600 train.py
--hang-exit-timeout 600 train.py
--monitor-interval=0 train.py
--monitor-interval=nan train.py
--start-method=thread train.py
--numa-binding=core train.py
--numa-binding=node train.py
--print-completion=fish
--virtual-local-rank --nproc-per-node=3 CUDA_VISIBLE_DEVICES=0,1,2 HIP_VISIBLE_DEVICES=4,5 train.py
no/such/script.py
folder
--no-python ./train.py
--no-python no-such-program
--run-path no/such/script.py
PYTHON_EXEC=/no/python train.py
--log-dir=train.py train.py
--log-dir /proc/nothing --tee 3 train.py
"""

NODES = """
--nnodes=a train.py
--nnodes=2:1 train.py
--nnodes=1:1:1 train.py
--nnodes=2 --standalone train.py
--nnodes=2:3 --standalone train.py
--node-rank=1 train.py
--nnodes=2 --node-rank=2 train.py
--nnodes=2 --node-rank=1 --rdzv-conf=rank=0 train.py
--nnodes=2 --node-rank=1 --master-addr=node1 --rdzv-conf=is_host=1 train.py
--nnodes=1:2 train.py
--master-port=70000 train.py
--rdzv-backend=zeus train.py
--rdzv-endpoint=host train.py
--nnodes=2 --rdzv-endpoint=node1 train.py
--nnodes=2 --rdzv-endpoint=node1:0 train.py
--nnodes=2 --rdzv-backend=c10d train.py
--nnodes=2 --rdzv-backend=etcd train.py
--rdzv-backend=c10d --rdzv-endpoint=a:b:1 train.py
--rdzv-backend=c10d --rdzv-endpoint=node1 --rdzv-id= train.py
--rdzv-conf=a train.py
--rdzv-conf=drain=x train.py
--standalone --rdzv-conf=drain=x train.py
--rdzv-backend=c10d --rdzv-endpoint=node1 --rdzv-conf=close_timeout=x train.py
PET_RDZV_CONF=join_timeout=soon train.py
--rdzv-conf=store_type=tape train.py
--drain=all train.py
"""

SETTINGS = [
    {"store_grace": "0.5"},
    {"store_grace": "15", "keep_alive_max_attempt": 5},
    {"join_timeout": "0"},
    {"join_timeout": "inf"},
    {"scale_up": "off"},
    {"stall_timeout": "0.5"},
    {"settle": "5"},
    {"keep_alive_interval": "0.01"},
    {"keep_alive_max_attempt": "2"},
    {"max_node_losses": "-1"},
    {"max_short_losses": "0"},
    {"bind_addr": "eth0"},
    {"worker_port_range": "2-1"},
    {"order_hint": "-1"},
    {"store_type": "etcd"},
    {"store_type": "File"},
    {"zzz": "5"},
    {"jion_timeout": "5"},
    {"token": "x" * 5000},
    {"token": "mine", "token_file": "empty"},
    {"token_file": ""},
    {"token_file": "no/file"},
    {"token_file": "folder"},
    {"token_file": "empty"},
]

ETCD = [
    ("", {}),
    ("http://a,https://b", {}),
    ("a b", {}),
    ("http://a", {"protocol": "https"}),
    ("a", {"protocol": "ftp"}),
    ("a", {"lease_ttl": "1"}),
    ("a", {"lease_ttl": 2.5}),
    ("a", {"lease_ttl": 3601}),
    ("a", {"store_grace": 8, "lease_ttl": 9}),
    ("a", {"settle": 4}),
    ("a", {"read_timeout": 0}),
    ("a", {"etcd_prefix": "a\tb"}),
    ("a", {"user": ""}),
    ("a", {"user": "u"}),
    ("a", {"user": "u", "password": "p"}),
    ("a", {"password_file": "/dev/null"}),
    ("a", {"user": "u", "password_file": "/dev/null"}),
    ("a", {"user": "u", "password_file": "binary"}),
    ("a", {"ca_cert": "/dev/null"}),
    ("a", {"cert": "/dev/null"}),
    ("a", {"protocol": "https", "key": "k"}),
    ("a", {"protocol": "https", "cacert": "/no/ca"}),
    ("a", {"cacert": "x", "ca_cert": "y"}),
    ("a", {"store_type": "file"}),
    ("a", {"ssl_crt": "x"}),
    ("a,b", {"host": 1}),
    ("https://a", {"host": 1}),
    ("a", {"host": 1, "user": "u", "password_file": "/proc/version"}),
    ("a:1,a:2,a:4", {"host": 1}),
    ("a:1,a:3,a:5", {"host": 1, "peer_port": 9}),
    ("a:65535", {"host": 1}),
    ("a", {"host": "maybe"}),
    ("a", {"host": 0, "peer_port": 9}),
]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Changes to a folder that contains the files of the command lines."""
    (tmp_path / "train.py").write_text("raise AssertionError('started')\n")
    (tmp_path / "folder").mkdir()
    (tmp_path / "empty").touch(0o600)
    (tmp_path / "binary").write_bytes(b"\xff")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(logs, "layout", lambda *_: pytest.fail("log files were laid out"))
    return tmp_path


def line_of(words, monkeypatch, capfd):
    """Run the command line, and return the line that it prints. Words in capitals are variables."""
    environ = {**clean_environment({"CUDA_VISIBLE_DEVICES": ""})}
    argv = []
    for word in words:
        name, is_assigned, value = word.partition("=")
        if is_assigned and name.isidentifier() and name.isupper():
            environ[name] = value
        else:
            argv.append(word)
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", environ)
        assert command_line.main(argv) == 2, words
    written = capfd.readouterr()
    (line,) = written.err.splitlines()
    assert (line.startswith("elasticrs: "), written.out) == (True, ""), words
    return line


@pytest.mark.parametrize(("name", "lines"), [("options", OPTIONS), ("nodes", NODES)])
def test_mistakes_in_the_command_line(folder, monkeypatch, capfd, golden, name, lines):
    commands = [line.split() for line in lines[1:-1].split("\n")]
    texts = {" ".join(["elasticrun", *words]): line_of(words, monkeypatch, capfd) for words in commands}
    golden(f"usage-errors-{name}", texts, {r"are more than .*": "are more than LIMIT"})
    assert sorted(os.listdir(folder)) == ["binary", "empty", "folder", "train.py"]


def refusal(backend, endpoint, config):
    with pytest.raises(UsageError) as raised:
        describe(backend, endpoint, "j", (1, 2), config, {}, words=PYTHON)
    line = str(raised.value)
    assert len(line.splitlines()) == 1
    return line.partition("; known: ")[0]


def test_mistakes_in_the_settings_of_a_rendezvous(folder, golden):
    cases = [*(("c10d", "node1", config) for config in SETTINGS), *(("etcd", *each) for each in ETCD)]
    texts = {}
    for backend, endpoint, config in cases:
        shown = {name: value if len(str(value)) < 100 else "…" for name, value in config.items()}
        texts[f"{backend} at {endpoint!r}: {shown}"] = refusal(backend, endpoint, config)
    golden("usage-errors-settings", texts)
