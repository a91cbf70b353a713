"""Options taken from the variables of Slurm, Kubernetes and Kubeflow, and user options that override them."""

import os
import sys

import pytest
from helpers.host_lists import host_lists
from hypothesis import given
from hypothesis import strategies as st

from elasticrs._engine.cli import schedulers
from elasticrs._engine.cli.arguments import meeting_of, resolve
from elasticrs._engine.cli.schedulers import (
    FIRST_PORT,
    MAX_HOSTS,
    PORTS,
    expand,
    slurm_allocation,
    with_scheduler,
)
from elasticrs._engine.job.config import UsageError
from elasticrs._engine.job.options import parse

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NUM_NODES": "4",
    "SLURM_STEP_NODELIST": "node[1-4]",
    "SLURM_STEP_TASKS_PER_NODE": "1(x4)",
    "SLURM_NODEID": "2",
    # Address of a login node. It must never be used as the rendezvous endpoint.
    "SLURM_LAUNCH_NODE_IPADDR": "10.0.0.9",
    # The job has more nodes than this step.
    "SLURM_JOB_NUM_NODES": "6",
    "SLURM_JOB_NODELIST": "node[0-5]",
}
PORT = FIRST_PORT + 4711 % PORTS
BATCH = {"SLURM_JOB_ID": "4711", "SLURMD_NODENAME": "node1", "SLURM_PROCID": "0", "SLURM_JOB_NUM_NODES": "1"}


def scheduled(*argv, **environ):
    notices = []
    args = with_scheduler(parse([*argv, "train.py"], environ), environ, notices)
    return args, notices


def changed(*argv, **environ):
    """Return the options that the scheduler's variables change."""
    before = vars(parse([*argv, "train.py"], environ))
    after = vars(scheduled(*argv, **environ)[0])
    return {name: value for name, value in after.items() if value != before[name]}


MEETING = {
    "nnodes": (4, 4),
    "rdzv_backend": "c10d",
    "rdzv_endpoint": f"node1:{PORT}",
    "rdzv_id": "4711.0",
    "node_rank": 2,
    "rdzv_conf": {"is_host": "0"},
}


def test_a_slurm_step_sets_the_rendezvous_options():
    args, notices = scheduled(**STEP)
    assert changed(**STEP) == MEETING
    assert notices == [f"Slurm job 4711: 4 nodes, this is number 2, meeting at node1:{PORT}"]
    assert args.nproc_per_node == 1


def test_the_notice_names_only_values_taken_from_slurm():
    assert scheduled("--master-port=29501", **STEP)[1] == [
        "Slurm job 4711: 4 nodes, this is number 2, meeting at node1:29501"
    ]
    assert scheduled("--nnodes=4", "--rdzv-endpoint=store", **STEP)[1] == ["Slurm job 4711: this is number 2"]
    explicit = ("--nnodes=4", "--node-rank=1", "--master-addr=node1", "--master-port=1", "--nproc-per-node=2")
    assert scheduled(*explicit, **STEP)[1] == []


def test_the_first_node_hosts_the_store():
    assert scheduled(**{**STEP, "SLURM_NODEID": "0"})[0].rdzv_conf == {"is_host": "1"}


@pytest.mark.parametrize(
    ("argv", "without", "more"),
    [
        (["--nnodes=2:4"], {"nnodes"}, {}),
        (["--rdzv-id=mine"], {"rdzv_id"}, {}),
        (["--rdzv-endpoint=login:29400"], {"rdzv_endpoint", "rdzv_conf"}, {}),
        (["--rdzv-backend=c10d"], {"rdzv_backend"}, {}),
        (["--rdzv-conf=is_host=1,join_timeout=9"], {"rdzv_conf"}, {}),
        (["--rdzv-conf=join_timeout=9"], set(), {"rdzv_conf": {"is_host": "0", "join_timeout": "9"}}),
        # The endpoint is that of etcd, not a node of this step.
        (["--rdzv-backend=etcd", "--rdzv-endpoint=etcd"], {"rdzv_backend", "rdzv_endpoint", "rdzv_conf"}, {}),
        # The endpoint of a file-based rendezvous is a path, not a host.
        (["--rdzv-backend=c10d", "--rdzv-conf=store_type=file"],
         {"rdzv_backend", "rdzv_endpoint", "rdzv_conf"}, {}),
        # torchrun's static rendezvous, selected by the back end or by its own options.
        (["--rdzv-backend=static"], {"rdzv_backend", "rdzv_endpoint", "rdzv_conf", "rdzv_id"},
         {"master_addr": "node1", "master_port": PORT}),
        (["--master-port=29501"], {"rdzv_backend", "rdzv_endpoint", "rdzv_conf", "rdzv_id"},
         {"master_addr": "node1"}),
        (["--master-addr=head"], {"rdzv_backend", "rdzv_endpoint", "rdzv_conf", "rdzv_id"},
         {"master_port": PORT}),
        (["--node-rank=1", "--rdzv-backend=c10d"], {"rdzv_backend", "node_rank"}, {}),
        # A third-party back end gets only the number of nodes and the job ID from the scheduler.
        (["--rdzv-backend=zeus"], {"rdzv_backend", "rdzv_endpoint", "rdzv_conf", "node_rank"}, {}),
        # Nodes in other steps do not know the ID of this step.
        (["--nnodes=5", "--rdzv-backend=c10d", "--rdzv-endpoint=node0"], set(MEETING), {}),
        (["--nnodes=5", "--rdzv-endpoint=node0"], set(MEETING), {}),
        (["--nnodes=3:4", "--rdzv-endpoint=store"], {"nnodes", "rdzv_endpoint", "rdzv_conf"}, {}),
        (["--nnodes=4:5"], {"nnodes"}, {}),
        # A job of one node.
        (["--standalone"], set(MEETING), {}),
        (["--nnodes=1"], set(MEETING), {}),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)  # fmt: skip
def test_an_option_overrides_the_value_from_slurm(argv, without, more):
    kept = {name: value for name, value in MEETING.items() if name not in without}
    assert changed(*argv, **STEP) == {**kept, **more}
    # The variable of an option has the same effect as the option.
    variables = {"PET_" + name[2:].upper().replace("-", "_"): value or "1"
                 for name, _, value in (each.partition("=") for each in argv)}  # fmt: skip
    assert changed(**STEP, **variables) == {**kept, **more}


@pytest.mark.parametrize(
    ("variables", "workers"),
    [
        ({}, 1),
        ({"SLURM_GPUS_ON_NODE": "8"}, 8),
        ({"SLURM_GPUS_ON_NODE": "0"}, 1),
        # The task sees fewer devices than the step has.
        ({"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": "0,1"}, 2),
        ({"SLURM_GPUS_ON_NODE": "8", "CUDA_VISIBLE_DEVICES": ""}, 1),
        ({"SLURM_GPUS_ON_NODE": "4", "ROCR_VISIBLE_DEVICES": "2"}, 1),
        ({"SLURM_GPUS_ON_NODE": "4", "CUDA_VISIBLE_DEVICES": "MIG-1,MIG-2"}, "gpu"),
    ],
)
def test_nproc_per_node_defaults_to_the_number_of_gpus(variables, workers):
    for environ in (STEP, BATCH):
        assert scheduled(**environ, **variables)[0].nproc_per_node == workers
    assert scheduled("--nproc-per-node=3", **STEP, **variables)[0].nproc_per_node == 3


@pytest.mark.parametrize(
    ("variables", "run_id"),
    [
        ({"SLURM_STEP_ID": "3"}, "4711.3"),
        ({"SLURM_RESTART_COUNT": "2"}, "4711.0-restart2"),
        ({"SLURM_ARRAY_JOB_ID": "4700", "SLURM_ARRAY_TASK_ID": "11"}, "4700_11.0"),
    ],
)
def test_each_slurm_step_restart_and_array_task_has_its_own_run_id(variables, run_id):
    assert scheduled(**{**STEP, **variables})[0].rdzv_id == run_id


def test_jobs_and_steps_on_one_node_use_different_rendezvous_ports():
    ports = [
        slurm_allocation({**STEP, "SLURM_JOB_ID": str(job), "SLURM_STEP_ID": str(step)}, 1).port
        for job in range(4700, 4780)
        for step in range(8)
    ]
    assert len(set(ports)) == len(ports)
    assert {29400, 29500}.isdisjoint(ports)


class TestOutsideSlurmStep:
    def test_a_single_node_batch_script_runs_a_single_node_job(self):
        args, notices = scheduled(**BATCH, SLURM_GPUS_ON_NODE="2")
        assert (args.nnodes, args.rdzv_backend, args.nproc_per_node) == ((1, 1), "static", 2)
        assert notices == ["Slurm job 4711: 1 node, 2 workers on this node"]

    def test_a_multi_node_batch_script_gets_a_hint_to_use_srun(self):
        _, notices = scheduled(**{**BATCH, "SLURM_JOB_NUM_NODES": "3"})
        assert [("srun" in line) for line in notices] == [False, True]

    def test_the_interactive_step_of_salloc_changes_no_option(self):
        environ = {**STEP, "SLURM_STEP_ID": str(0xFFFFFFFA), "SLURMD_NODENAME": "node1"}
        assert changed(**environ) == {}

    def test_the_shell_of_salloc_changes_no_option(self):
        environ = {"SLURM_JOB_ID": "4711", "SLURM_JOB_NUM_NODES": "3", "SLURM_GPUS_ON_NODE": "2"}
        assert changed(**environ) == {}
        assert "is not used" in scheduled(**environ)[1][0]

    @pytest.mark.parametrize(
        "argv", [["--standalone"], ["--nnodes=1"], ["--nnodes=2", "--rdzv-backend=c10d", "--rdzv-endpoint=a"]]
    )
    def test_no_notice_is_printed_if_rendezvous_options_are_given(self, argv):
        assert scheduled(*argv, SLURM_JOB_ID="4711", SLURM_JOB_NUM_NODES="3")[1] == []


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"SLURM_STEP_TASKS_PER_NODE": "8(x4)"}, "--ntasks-per-node=1"),
        ({"SLURM_STEP_TASKS_PER_NODE": "1(x3),2"}, "--ntasks-per-node=1"),
        ({"SLURM_STEP_NODELIST": "node[1-"}, "SLURM_STEP_NODELIST"),
        ({"SLURM_STEP_NODELIST": ""}, "SLURM_STEP_NODELIST"),
        ({"SLURM_STEP_NODELIST": "node[1-3]"}, "SLURM_STEP_NUM_NODES=4"),
        ({"SLURM_STEP_NUM_NODES": "many"}, "SLURM_STEP_NUM_NODES=many"),
        ({"SLURM_NODEID": "4"}, "SLURM_NODEID=4"),
    ],
)
class TestUnusableSlurmStep:
    def test_the_refusal_names_the_reason_and_the_no_scheduler_option(self, variables, said):
        for argv in ([], ["--rdzv-endpoint=login"], ["--nnodes=4"]):
            with pytest.raises(UsageError, match="--no-scheduler") as refused:
                scheduled(*argv, **{**STEP, **variables})
            assert said in str(refused.value)

    @pytest.mark.parametrize(
        "argv",
        [["--standalone"], ["--nnodes=1"], ["--nnodes=32", "--rdzv-backend=c10d", "--rdzv-endpoint=node1"],
         ["--nnodes=2", "--node-rank=1", "--master-addr=node1"]],
    )  # fmt: skip
    def test_explicit_rendezvous_options_are_not_refused(self, variables, said, argv):  # noqa: ARG002
        assert changed(*argv, **{**STEP, **variables}) == {}


values = st.sampled_from(
    ["", "0", "1", "2", "node[1-2]", "1(x2)", "x", "4294967290", "-1", "\u0663", "node1:2"]
)


@given(st.dictionaries(st.sampled_from([*STEP, *BATCH, "SLURM_GPUS_ON_NODE", "SLURM_RESTART_COUNT"]), values))
def test_malformed_slurm_variables_are_refused_or_ignored(variables):
    for environ in (variables, {**STEP, **variables}):
        try:
            args, _ = scheduled(**environ)
        except UsageError:
            continue
        assert args.nnodes[0] >= 1


def test_a_launcher_in_a_shell_of_srun_pty_uses_only_its_node():
    shell = {**STEP, "SLURM_PTY_PORT": "40000", "SLURM_TASK_PID": "1", "SLURMD_NODENAME": "node3"}
    assert changed("--nproc-per-node=2", **shell) == {}
    args, (_, notice) = scheduled("--nproc-per-node=2", **{**shell, "SLURM_STEP_TASKS_PER_NODE": "2(x4)"})
    assert (args.nnodes, args.nproc_per_node) == ((1, 1), 2)
    assert "srun" in notice


def test_a_launcher_that_is_itself_the_task_of_srun_pty_uses_the_step():
    assert changed(**STEP, SLURM_PTY_PORT="40000", SLURM_TASK_PID=str(os.getpid())) == MEETING


def test_a_launcher_in_a_worker_ignores_the_scheduler_of_the_outer_launcher():
    args, (notice,) = scheduled("--nproc-per-node=2", **STEP, TORCHELASTIC_RUN_ID="4711.0")
    assert (args.nnodes, args.nproc_per_node, args.rdzv_endpoint) == ((1, 1), 2, "")
    assert "Slurm job 4711 is not used" in notice


class TestNodeLossWarnings:
    """By default, Slurm kills the whole job if it loses a node."""

    @pytest.mark.parametrize(
        ("variables", "words"),
        [
            ({}, ["--no-kill"]),
            ({"SLURM_NO_KILL": "set"}, []),
            ({"SLURM_NO_KILL": "set", "SLURM_KILL_BAD_EXIT": "1"}, ["SLURM_KILL_BAD_EXIT"]),
            ({"SLURM_NO_KILL": "set", "SLURM_KILL_BAD_EXIT": "0"}, []),
        ],
    )
    def test_an_elastic_job_gets_a_warning_for_each_harmful_slurm_setting(self, variables, words):
        environ = {**STEP, "SLURM_NODEID": "0", **variables}
        _, (_, *lines) = scheduled("--nnodes=2:4", **environ)
        assert len(lines) == len(words)
        assert all(word in line for word, line in zip(words, lines, strict=True))

    def test_only_the_first_node_of_an_elastic_job_prints_warnings(self):
        assert len(scheduled("--nnodes=2:4", **STEP)[1]) == 1
        assert len(scheduled(**{**STEP, "SLURM_NODEID": "0"})[1]) == 1


def test_scheduler_modules_are_loaded_only_under_a_scheduler(monkeypatch):
    for name in [name for name in sys.modules if "schedule" in name and name.startswith("elasticrs")]:
        monkeypatch.delitem(sys.modules, name)
    for argv, environ in ((["-m", "this"], {}), (["--no-scheduler", "-m", "this"], STEP)):
        resolve(parse(argv, environ), {"PATH": "/usr/bin:/bin", **environ})
        assert not [name for name in sys.modules if name.startswith("elasticrs._engine.cli.schedulers")]
    job = resolve(parse(["-m", "this"], STEP), {"PATH": "/usr/bin:/bin", **STEP})
    assert job.rendezvous.run_id == "4711.0"


@pytest.mark.parametrize("name", [name for name, value in STEP.items() if value.isdecimal()])
def test_a_slurm_number_with_too_many_digits_is_not_used(name):
    place = slurm_allocation({**STEP, name: "9" * 5000}, 1)
    assert FIRST_PORT <= place.port < FIRST_PORT + PORTS or not place.host


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("node1", "node1"),
        ("node[1-3,7]-ib[0-1],login", "node1-ib0 node1-ib1 node2-ib0 node2-ib1 node3-ib0 node3-ib1 "
         "node7-ib0 node7-ib1 login"),
        ("n[001-003,10]", "n001 n002 n003 n10"),
        ("n[01-3]", "n01 n02 n03"),
        ("n[9-11]", "n9 n10 n11"),
        ("n[098-101]", "n098 n099 n100 n101"),
        ("x[1-2][3-4]", "x13 x14 x23 x24"),
        ("g[10,9,8]", "g10 g9 g8"),
        ("a,b[1-2],c.example", "a b1 b2 c.example"),
        # Slurm itself neither writes nor accepts text after the last bracket.
        ("b[1-2].example", "b1.example b2.example"),
    ],
)  # fmt: skip
def test_host_lists_are_expanded(text, hosts):
    assert expand(text) == hosts.split()


@given(host_lists())
def test_a_host_list_is_expanded_in_its_order(made):
    text, hosts = made
    assert expand(text) == hosts


@pytest.mark.parametrize(
    "text",
    ["", ",", "a,,b", "a,", "a b", "c:9", "n[", "n[1-", "n]", "n[]", "n[1,,2]", "n[3-1]", "n[a-b]",
     "n[1-2,4-]", "n[1[2]]", "n[1-2-3]", "n[-1]", "n[1 - 2]", f"n[0-{MAX_HOSTS}]", "n[0-9999][0-9999]",
     "n[1-99999999999999999999]", f"n[{'9' * 5000}]", "n[" + ",".join(["0-999999"] * 1000) + "]"],
)  # fmt: skip
def test_malformed_host_lists_are_refused(text):
    with pytest.raises(ValueError, match="host list"):
        expand(text)


@given(st.text(alphabet="an1290,-[] \u0663", max_size=16))
def test_any_text_is_expanded_or_refused(text):
    try:
        hosts = expand(text)
    except ValueError:
        return
    assert hosts
    assert all(hosts)


POD = {"KUBERNETES_SERVICE_HOST": "10.0.0.1"}
TRAIN_JOB = {
    **POD,
    "HOSTNAME": "train-node-0-1",
    "JOB_COMPLETION_INDEX": "1",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "train-node-0-0.train",
    "PET_MASTER_PORT": "29500",
}
PYTORCH_JOB = {
    **POD,
    "HOSTNAME": "train-worker-0",
    "MASTER_ADDR": "train-master-0",
    "MASTER_PORT": "23456",
    "RANK": "1",
    "WORLD_SIZE": "8",
    "PET_NNODES": "2",
    "PET_NPROC_PER_NODE": "4",
    "PET_NODE_RANK": "1",
    "PET_MASTER_ADDR": "train-master-0",
    "PET_MASTER_PORT": "23456",
}
INDEXED = {**POD, "HOSTNAME": "train-2", "JOB_COMPLETION_INDEX": "2"}


@pytest.fixture(autouse=True)
def hosts(tmp_path, monkeypatch):
    """Create the hosts file of a pod with a headless service."""
    file = tmp_path / "hosts"
    file.write_text("127.0.0.1\tlocalhost\n# pod\n10.1.0.7\ttrain-2.train.team.svc.cluster.local\ttrain-2\n")
    monkeypatch.setattr(schedulers, "HOSTS", str(file))
    return file


def meeting(args):
    return args.nnodes, args.rdzv_backend, args.rdzv_endpoint, args.rdzv_id, args.node_rank, args.rdzv_conf


@pytest.mark.parametrize(
    ("environ", "job", "endpoint"),
    [
        (TRAIN_JOB, "TrainJob train", "train-node-0-0.train:29500"),
        (PYTORCH_JOB, "PyTorchJob train", "train-master-0:23456"),
    ],
)
class TestKubeflow:
    def test_nodes_use_the_c10d_rendezvous(self, environ, job, endpoint):
        args, notices = scheduled(**environ)
        assert meeting(args) == ((2, 2), "c10d", endpoint, "train", 1, {"is_host": "0"})
        assert args.nproc_per_node == 4
        assert notices == [f"{job}: 2 nodes, this is number 1, meeting at {endpoint}"]

    def test_kubeflow_variables_are_not_reported_as_without_effect(self, environ, job, endpoint):
        launch = resolve(parse(["-m", "this"], environ), {"PATH": "/usr/bin:/bin", **environ})
        assert launch.rendezvous.endpoint == endpoint
        assert not [line for line in launch.notices if "has no effect" in line], job

    def test_an_explicit_static_rendezvous_works_as_in_torchrun(self, environ, job, endpoint):  # noqa: ARG002
        for argv, variables in (
            (["--rdzv-backend=static"], {}),
            ([], {"PET_RDZV_BACKEND": "static"}),
            (["--master-port=29501"], {}),
        ):
            args, _ = scheduled(*argv, **environ, **variables)
            found = meeting_of(args, environ, 30, [])["rendezvous"]
            assert (found.is_static, args.node_rank) == (True, 1)
            host, port = environ["PET_MASTER_ADDR"], "29501" if "--master-port=29501" in argv else None
            assert found.endpoint == f"{host}:{port or environ['PET_MASTER_PORT']}"

    def test_an_option_overrides_the_value_from_kubeflow(self, environ, job, endpoint):  # noqa: ARG002
        args, _ = scheduled("--nnodes=1:2", "--rdzv-id=mine", "--nproc-per-node=3", **environ)
        assert (args.nnodes, args.rdzv_id, args.nproc_per_node) == ((1, 2), "mine", 3)
        assert args.rdzv_endpoint == endpoint
        args, _ = scheduled("--standalone", **environ)
        assert args.rdzv_backend == "static"

    @pytest.mark.parametrize(
        "change",
        [
            {"PET_MASTER_ADDR": "10.1.0.7"},
            {"PET_MASTER_ADDR": "train-0.train"},
            {"PET_MASTER_ADDR": "train-node-0-0.other"},
            {"PET_MASTER_ADDR": "head-node-0-0."},
            {"PET_NNODES": "1:2", "PET_RDZV_BACKEND": "c10d", "PET_RDZV_ENDPOINT": "train-worker-0:23456"},
        ],
    )
    def test_variables_set_by_the_user_keep_their_meaning(self, environ, job, endpoint, change):  # noqa: ARG002
        changed = {**environ, **change, "JOB_COMPLETION_INDEX": ""}
        before = vars(parse(["train.py"], changed))
        assert vars(scheduled(**changed)[0]) == before

    def test_a_single_node_job_uses_no_rendezvous(self, environ, job, endpoint):  # noqa: ARG002
        args, notices = scheduled(**{**environ, "PET_NNODES": "1", "PET_NODE_RANK": "0", "RANK": "0"})
        assert (args.nnodes, args.rdzv_backend) == ((1, 1), "static")
        assert notices == [f"{job}: 1 node"]


def test_a_manual_static_job_outside_kubeflow_is_unchanged():
    environ = {name: value for name, value in TRAIN_JOB.items() if name.startswith("PET_")}
    for more in ({}, {**POD, "PET_MASTER_ADDR": "node1"}):
        args = resolve(parse(["-m", "this"], {**environ, **more}), {"PATH": "/bin", **environ, **more})
        assert args.rendezvous.is_static


class TestIndexedJob:
    def test_only_the_number_of_nodes_is_required(self):
        endpoint = "train-0.train.team.svc.cluster.local:29400"
        for argv, variables in ((["--nnodes=2:4"], {}), ([], {"PET_NNODES": "2:4"})):
            args, notices = scheduled(*argv, **INDEXED, **variables)
            assert meeting(args) == ((2, 4), "c10d", endpoint, "train", 2, {"is_host": "0"})
            assert notices == [f"Job train: this is number 2, meeting at {endpoint}"]

    def test_a_pod_of_a_job_set_gets_its_endpoint_and_run_id(self, hosts):
        name = "train-nodes-0-3"
        hosts.write_text(f"10.1.0.7\t{name}.train.team.svc.cluster.local\t{name}\n")
        args, _ = scheduled("--nnodes=4", **POD, HOSTNAME=name, JOB_COMPLETION_INDEX="3")
        assert args.rdzv_endpoint == "train-nodes-0-0.train.team.svc.cluster.local:29400"
        assert args.rdzv_id == "train-nodes-0"

    def test_without_a_number_of_nodes_each_pod_is_its_own_job(self, hosts):
        for text in (hosts.read_text(), "127.0.0.1 localhost\n"):
            hosts.write_text(text)
            before = vars(parse(["train.py"], INDEXED))
            args, notices = scheduled(**INDEXED)
            assert (vars(args), notices) == (before, [])

    def test_pods_without_a_headless_service_are_refused(self, hosts):
        for missing in (False, True):
            if missing:
                hosts.unlink()
            else:
                hosts.write_text("127.0.0.1 localhost\n10.1.0.7 train-2\n")
            with pytest.raises(UsageError, match="headless service"):
                scheduled("--nnodes=4", **INDEXED)
            args, _ = scheduled("--nnodes=4", "--rdzv-backend=c10d", "--rdzv-endpoint=store", **INDEXED)
            assert args.rdzv_endpoint == "store"

    @pytest.mark.parametrize(
        ("devices", "workers"),
        [("GPU-1,GPU-2", 2), ("all", 1), ("void", 1), ("", 1), ("0,1", 1), ("MIG-1,MIG-2", "gpu")],
    )
    def test_nproc_per_node_is_the_number_of_gpus_from_the_device_plugin(self, devices, workers):
        args, _ = scheduled(**INDEXED, NVIDIA_VISIBLE_DEVICES=devices)
        assert args.nproc_per_node == workers

    @pytest.mark.parametrize(
        "change",
        [{"JOB_COMPLETION_INDEX": "x"}, {"JOB_COMPLETION_INDEX": "3"}, {"HOSTNAME": ""}, {"HOSTNAME": "-2"}],
    )
    def test_a_pod_outside_an_indexed_job_is_unchanged(self, change):
        environ = {**INDEXED, **change, "PET_NNODES": "4"}
        before = vars(parse(["train.py"], environ))
        assert vars(scheduled(**environ)[0]) == before


WORKER = {"TORCHELASTIC_RUN_ID": "train", "RANK": "7", "MASTER_ADDR": "10.0.0.2", "MASTER_PORT": "4242"}


@pytest.mark.parametrize("environ", [TRAIN_JOB, PYTORCH_JOB])
def test_a_launcher_in_a_worker_ignores_the_variables_of_kubeflow(environ):
    args, (notice,) = scheduled("--nproc-per-node=2", **{**environ, **WORKER})
    assert meeting(args) == meeting(parse(["train.py"], {}))
    assert (args.nproc_per_node, args.master_port) == (2, parse(["train.py"], {}).master_port)
    assert "is not used" in notice


@pytest.mark.parametrize("name", ["PET_NNODES", "PET_NODE_RANK", "PET_MASTER_PORT", "JOB_COMPLETION_INDEX"])
def test_a_kubernetes_number_with_too_many_digits_is_not_used(name):
    number = "9" * 5000
    of_kubeflow = name.startswith("PET_")
    environ = (
        {**TRAIN_JOB, name: number} if of_kubeflow else {**INDEXED, "HOSTNAME": f"a-{number}", name: number}
    )
    found = schedulers.kubernetes_allocation(environ)
    assert found is None or not found.job.startswith("TrainJob")
