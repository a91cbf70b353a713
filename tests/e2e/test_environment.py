"""Environment, arguments, descriptors, session and signals of a worker at its start."""

import json
import socket
import subprocess

import pytest
from helpers import ports

SHOW = """
    import json, os, sys
    shown = {name: os.environ.get(name) for name in sys.argv[1].split(",")}
    os.write(1, f"ENV {json.dumps(shown)}\\n".encode())
"""

CONTRACT = {
    "RANK": "{rank}",
    "LOCAL_RANK": "{rank}",
    "GROUP_RANK": "0",
    "ROLE_RANK": "{rank}",
    "ROLE_NAME": "trainer",
    "LOCAL_WORLD_SIZE": "3",
    "WORLD_SIZE": "3",
    "GROUP_WORLD_SIZE": "1",
    "ROLE_WORLD_SIZE": "3",
    "TORCHELASTIC_RESTART_COUNT": "0",
    "TORCHELASTIC_MAX_RESTARTS": "2",
    "TORCHELASTIC_RUN_ID": "job7",
    "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGTERM,SIGINT,SIGHUP,SIGQUIT",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
}


@pytest.fixture
def shown(launch, worker_script):
    """Return a function that launches workers and returns the variables that each of them printed, ordered by
    rank.
    """

    def run(names, *args, n=1, env=None):
        names = ["RANK", *names]
        launched = launch(
            *args, "--nproc-per-node", str(n), worker_script(SHOW), ",".join(names), env=env
        ).exits(0)
        found = [json.loads(match[1]) for match in launched.wait_for_lines(r"ENV (.*)", n, "stdout")]
        return sorted(found, key=lambda each: int(each["RANK"]))

    return run


def test_workers_get_the_environment_variables_of_torchrun(shown):
    args = ("--rdzv-id", "job7", "--role", "trainer", "--max-restarts", "2", "--master-port", "0")
    found = shown(CONTRACT, *args, n=3)
    for rank, variables in enumerate(found):
        assert variables == {name: value.format(rank=rank) for name, value in CONTRACT.items()}


def test_environment_variables_of_the_user_reach_the_workers(shown):
    names = ("MY_OWN", "TORCH_NCCL_ASYNC_ERROR_HANDLING")
    (variables,) = shown(names, env={"MY_OWN": "a=b ü", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0"})
    assert variables["MY_OWN"] == "a=b ü"
    assert variables["TORCH_NCCL_ASYNC_ERROR_HANDLING"] == "0"


@pytest.mark.beyond_torchrun
@pytest.mark.parametrize("how", [(), ("--run-path",), ("--run-path", "--start-method=fork")])
def test_the_rendezvous_token_is_not_in_the_environment_of_workers(shown, how):
    (variables,) = shown(
        ["ELASTICRS_TOKEN", "MY_OWN"], *how, env={"ELASTICRS_TOKEN": "secret", "MY_OWN": "a"}
    )
    assert variables == {"RANK": "0", "ELASTICRS_TOKEN": None, "MY_OWN": "a"}


@pytest.mark.parametrize(
    ("n", "given", "expected"), [(1, None, None), (2, None, "1"), (2, "3", "3"), (1, "3", "3")]
)
def test_omp_num_threads_is_1_for_several_workers_unless_set(shown, n, given, expected):
    found = shown(["OMP_NUM_THREADS"], n=n, env={} if given is None else {"OMP_NUM_THREADS": given})
    assert [variables["OMP_NUM_THREADS"] for variables in found] == [expected] * n


def test_all_workers_get_the_same_usable_master_address_and_port(launch, worker_script):
    script = worker_script("""
        import os, socket
        addr, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        bound = "-"
        if os.environ["RANK"] == "0" and os.environ["TORCHELASTIC_USE_AGENT_STORE"] != "True":
            with socket.socket(socket.AF_INET6) as server:
                server.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
                server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                server.bind(("::", port))
                server.listen()
                bound = "bound"
        os.write(1, f"MASTER {addr} {port} {bound}\\n".encode())
    """)
    launched = launch("--standalone", "--nproc-per-node", "3", script).exits(0)
    lines = launched.wait_for_lines(r"MASTER (\S+) (\d+) (\S+)", 3)
    assert len({(line[1], line[2]) for line in lines}) == 1
    socket.getaddrinfo(lines[0][1], int(lines[0][2]))


STORE = """
    import os, socket
    try:
        socket.create_connection((os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]))).close()
        listens = "listens"
    except ConnectionRefusedError:
        listens = "refuses"
    os.write(1, f"STORE {os.environ['TORCHELASTIC_USE_AGENT_STORE']} {listens}\\n".encode())
"""


@pytest.mark.parametrize(
    ("arguments", "env", "expected"),
    [
        (("--standalone",), {}, "STORE True listens"),
        (("--master-port=0",), {}, "STORE True listens"),
        (("--standalone",), {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}, "STORE False refuses"),
    ],
)
@pytest.mark.beyond_torchrun
def test_the_agent_hosts_the_worker_store_by_default(launch, worker_script, arguments, env, expected):
    launched = launch(*arguments, worker_script(STORE), env=env).exits(0)
    assert launched.stdout.splitlines() == [expected]


@pytest.mark.beyond_torchrun
def test_a_master_port_set_by_the_user_is_left_free_for_rank_0(launch, worker_script):
    launched = launch(f"--master-port={ports.free()}", worker_script(STORE)).exits(0)
    assert launched.stdout.splitlines() == ["STORE False refuses"]


@pytest.mark.beyond_torchrun
def test_a_client_that_does_not_speak_the_tcpstore_protocol_is_reported(launch, worker_script):
    script = worker_script("""
        import os, socket
        address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
        with socket.create_connection(address) as stranger:
            stranger.sendall(b"GET / HTTP/1.1")
            stranger.recv(1)
    """)
    launched = launch("--standalone", script).exits(0)
    assert launched.stderr.count("TCPStore") == 1, launched.stderr


def test_script_arguments_are_passed_unchanged(launch, worker_script):
    arguments = ["--nproc-per-node", "-x", "a b", "", "ü", "--", "--help"]
    script = worker_script("import json, sys; print('ARGV', json.dumps(sys.argv))")
    launched = launch(script, *arguments).exits(0)
    assert json.loads(launched.wait_for_line(r"ARGV (.*)")[1]) == [str(script), *arguments]


def test_a_module_is_run_by_name(launch, tmp_path):
    package = tmp_path / "mypackage"
    package.mkdir()
    (package / "__main__.py").write_text(
        "import sys; print('NAME', __name__, sys.argv[1:])\n", encoding="utf-8"
    )
    launched = launch("-m", "mypackage", "one").exits(0)
    assert launched.wait_for_line("NAME (.*)")[1] == "__main__ ['one']"


def test_the_no_python_option_runs_any_program(launch):
    launched = launch("--nproc-per-node", "2", "--no-python", "/bin/sh", "-c", 'echo "RANK is $RANK"').exits(
        0
    )
    assert {match[1] for match in launched.wait_for_lines(r"RANK is (\d)", 2)} == {"0", "1"}


def test_a_script_runs_as_main_unbuffered_and_leads_its_session(launch, worker_script):
    script = worker_script("""
        import os, sys
        folder = os.path.dirname(__file__)
        print("FACTS", __name__, sys.stdout.write_through, sys.argv[0] == __file__, sys.path[0] == folder)
        print("LEADS", os.getpid() == os.getpgid(0) == os.getsid(0))
    """)
    launched = launch(script).exits(0)
    assert launched.wait_for_line("FACTS (.*)")[1] == "__main__ True True True"
    launched.wait_for_line("LEADS True")


def test_macros_in_arguments_are_expanded(launch):
    # Double the dollar sign of a shell variable, as string.Template requires.
    command = 'echo "MACRO ${local_rank} $$RANK"'
    launched = launch("--nproc-per-node", "2", "--no-python", "/bin/sh", "-c", command).exits(0)
    assert {match[1] for match in launched.wait_for_lines(r"MACRO (.*)", 2)} == {"0 0", "1 1"}


def test_a_worker_inherits_only_the_standard_descriptors(launch):
    launched = launch("--no-python", "ls", "/proc/self/fd").exits(0)
    # Descriptor 3 is the directory that `ls` itself has open.
    assert launched.stdout.split() == ["0", "1", "2", "3"]


def test_a_worker_starts_with_no_blocked_or_ignored_signals(launch):
    launched = launch("--no-python", "grep", "-E", "^Sig(Blk|Ign)", "/proc/self/status").exits(0)
    for name in ("SigBlk", "SigIgn"):
        assert int(launched.wait_for_line(rf"{name}:\s*(\w+)")[1], 16) == 0


def test_workers_inherit_stdin(launch, worker_script):
    launched = launch(worker_script("print('READ', input())"), stdin=subprocess.PIPE)
    launched.feed(b"from the user\n")
    launched.exits(0)
    assert launched.wait_for_line("READ (.*)")[1] == "from the user"
