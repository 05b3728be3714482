"""RankEnv over environments recorded from real steps (tests/slurm/record_environments.py) and over
wrong ones."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_slurm.rank_env import (
    FIRST_PORT,
    NEEDED_VARIABLES,
    PORT_COUNT,
    LaunchError,
    RankEnv,
    hosts_in_order,
    known,
    port_of_job,
)

ENVIRONMENTS = Path(__file__).parent / "environments"
RELEASES = ("20.11", "22.05", "24.11", "26.05")

UNEVEN = [("gamma", 1), ("beta1", 2), ("alpha", 4)]
WORLDS = {
    "het_1_2_4": UNEVEN,
    "het_gpus_per_task": UNEVEN,
    "het_two_node_component": [("gamma", 1), ("beta1", 2), ("beta2", 2), ("alpha", 4)],
    "het_two_nodes_first": [("beta1", 2), ("beta2", 2), ("gamma", 1)],
    "homogeneous": [("beta1", 2), ("beta2", 2)],
    "homogeneous_gpus_per_task": [("beta1", 2), ("beta2", 2)],
}
"""Recording -> hosts and tasks on each, in the order of ranks. It is never the order of names."""

TORCHRUN = {
    "RANK": "5",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "6",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "2",
    "MASTER_ADDR": "fd00::5",
    "MASTER_PORT": "29500",
}


def recorded(name: str, release: str) -> tuple[list[dict[str, str]], dict[str, str]]:
    """The environments of all tasks in the order of ranks, and of the batch shell.

    HOST is the task's ``uname -n``.
    """
    data = json.loads((ENVIRONMENTS / f"{name}.{release}.json").read_text())
    return [{**data["common"], **task} for task in data["tasks"]], data["batch"]


@pytest.fixture
def step() -> dict[str, str]:
    """A task of a heterogeneous step: rank 4 of 7, the second on alpha."""
    return recorded("het_1_2_4", "22.05")[0][4]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", WORLDS)
def test_recorded_steps_are_read(name, release):
    tasks, _ = recorded(name, release)
    world = WORLDS[name]
    expected = [
        (host, node_rank, local_rank, count)
        for node_rank, (host, count) in enumerate(world)
        for local_rank in range(count)
    ]
    assert len(tasks) == len(expected)
    one_device_each = "gpus_per_task" in name and release != "20.11"  # that release binds nothing
    for rank, (env, (host, node_rank, local_rank, count)) in enumerate(
        zip(tasks, expected, strict=True)
    ):
        assert env["HOST"] == host
        assert RankEnv.from_environ(env) == RankEnv(
            rank=rank,
            local_rank=local_rank,
            world_size=len(expected),
            local_world_size=count,
            node_rank=node_rank,
            master_addr=world[0][0],
            master_port=10_000 + int(tasks[0]["SLURM_JOB_ID"]),
            device_index=0 if one_device_each else local_rank,
        )


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", WORLDS)
def test_recorded_batch_shells_are_refused(name, release):
    _, batch = recorded(name, release)
    assert batch["SLURM_PROCID"] == "0"  # it looks like rank 0
    with pytest.raises(
        LaunchError, match=f"not inside an srun step.*job {batch['SLURM_JOB_ID']}.*srun python -m"
    ):
        RankEnv.from_environ(batch)


@pytest.mark.parametrize("step_id", ["4294967290", "-6"])
def test_shell_of_salloc_is_refused(step_id):
    # of 22.05 with use_interactive_step, salloc --nodes=2 --ntasks-per-node=2
    shell = {
        "SLURM_JOB_ID": "1",
        "SLURM_STEP_ID": step_id,
        "SLURM_PROCID": "0",
        "SLURM_LOCALID": "0",
        "SLURM_NODEID": "0",
        "SLURM_NTASKS": "4",
        "SLURM_STEP_NUM_TASKS": "1",
        "SLURM_GTIDS": "0",
        "SLURM_STEP_NODELIST": "a",
    }
    with pytest.raises(
        LaunchError, match=r"not inside an srun step.*shell of job 1.*srun python -m"
    ):
        RankEnv.from_environ(shell)
    assert RankEnv.from_environ({**shell, "SLURM_STEP_ID": "0"}).world_size == 4


def test_process_outside_any_launcher_is_refused():
    with pytest.raises(LaunchError, match=r"no launcher.*Start it with"):
        RankEnv.from_environ({"PATH": "/bin", "MASTER_PORT": "1234"})


def test_users_master_wins_in_a_step(step):
    env = RankEnv.from_environ({**step, "MASTER_PORT": "12345", "MASTER_ADDR": "10.0.0.7"})
    assert (env.rank, env.master_addr, env.master_port) == (4, "10.0.0.7", 12345)
    assert RankEnv.from_environ({**step, "MASTER_PORT": "12345"}).master_addr == "gamma"


def test_variables_of_torchrun_win_whole(step):
    alone = RankEnv.from_environ(TORCHRUN)
    assert alone == RankEnv(5, 1, 6, 2, 2, "fd00::5", 29500, 1)
    inside = {name: value for name, value in step.items() if name != "CUDA_VISIBLE_DEVICES"}
    assert RankEnv.from_environ({**inside, **TORCHRUN}) == alone


@pytest.mark.parametrize("name", NEEDED_VARIABLES)
@pytest.mark.parametrize("slurm", [True, False])
def test_incomplete_variables_are_refused(step, slurm, name):
    env = {**(step if slurm else {}), **TORCHRUN}
    del env[name]
    with pytest.raises(LaunchError, match=rf"incomplete.*\b{name} missing.*or set all of RANK"):
        RankEnv.from_environ(env)


@pytest.mark.parametrize(
    "name", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK"]
)
def test_one_variable_in_a_step_is_refused(step, name):
    with pytest.raises(LaunchError, match=rf"incomplete variables of a launcher: {name} set"):
        RankEnv.from_environ({**step, name: "1"})


FOUR = {"RANK": "5", "WORLD_SIZE": "6", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "23456"}
OTHER_LAUNCHERS = {
    "Kubeflow PyTorchJob": {
        "PET_NODE_RANK": "5",
        "PET_NNODES": "6",
        "PYTHONUNBUFFERED": "1",
    },
    "DeepSpeed": {"LOCAL_RANK": "1", "LOCAL_SIZE": "2", "CROSS_RANK": "2", "CROSS_SIZE": "3"},
    "Azure ML": {"LOCAL_RANK": "1", "NODE_RANK": "2"},
    "torch.distributed.launch of torch 1.8": {"LOCAL_RANK": "1"},
    "mpirun with exports": {
        "LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_RANK": "5",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    },
    "accelerate launch": {"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "yes"},
}
"""What each sets besides FOUR, by its documentation or source."""


@pytest.mark.parametrize("launcher", OTHER_LAUNCHERS)
@pytest.mark.parametrize("slurm", [True, False])
def test_other_launchers_may_set_less(step, slurm, launcher):
    given = OTHER_LAUNCHERS[launcher]
    env = RankEnv.from_environ({**(step if slurm else {}), **FOUR, **given})
    assert (env.rank, env.world_size, env.master_addr, env.master_port) == (5, 6, "10.0.0.1", 23456)
    # never from the SLURM_* variables of the step around it
    assert env.local_rank == (1 if "LOCAL_RANK" in given else None)
    assert env.local_world_size == (2 if "LOCAL_WORLD_SIZE" in given else None)
    assert env.node_rank == (2 if "NODE_RANK" in given else None)
    assert env.env_variables().keys() == FOUR.keys() | given.keys() & {
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "NODE_RANK",
    }


def test_a_missing_variable_that_is_needed_is_named():
    env = RankEnv.from_environ(FOUR)
    with pytest.raises(LaunchError, match="LOCAL_RANK is not set, and it is needed before"):
        known(env.local_rank, "LOCAL_RANK")
    assert known(3, "LOCAL_RANK") == 3


def test_node_rank_serves_where_group_rank_is_missing():
    env = {**TORCHRUN, "NODE_RANK": TORCHRUN["GROUP_RANK"]}
    del env["GROUP_RANK"]
    assert RankEnv.from_environ(env) == RankEnv.from_environ(TORCHRUN)


def test_variables_for_scripts_read_back(step):
    env = RankEnv.from_environ(step)
    assert env.env_variables() == {
        "RANK": "4",
        "LOCAL_RANK": "1",
        "WORLD_SIZE": "7",
        "LOCAL_WORLD_SIZE": "4",
        "NODE_RANK": "2",
        "MASTER_ADDR": "gamma",
        "MASTER_PORT": "10001",
    }
    assert RankEnv.from_environ({**step, **env.env_variables()}) == env


@pytest.mark.parametrize(
    "value", ["", "x", "-1", "+4", " 4", "4(x2)", "4.0", "1_0", "٤", "9" * 5000, "0x4", "4\n"]
)
@pytest.mark.parametrize(
    "name", ["SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_NODEID", "SLURM_JOB_ID"]
)
def test_bad_numbers_in_a_step_are_refused(step, name, value):
    with pytest.raises(LaunchError, match=re.escape(f"{name}={value!r} is not a whole number")):
        RankEnv.from_environ({**step, name: value})


@pytest.mark.parametrize(
    "name", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_PORT"]
)
@pytest.mark.parametrize("value", ["", "two", "-1"])
def test_bad_numbers_from_torchrun_are_refused(name, value):
    with pytest.raises(LaunchError, match=re.escape(f"{name}={value!r} is not a whole number")):
        RankEnv.from_environ({**TORCHRUN, name: value})


@pytest.mark.parametrize("port", ["0", "65536", "70000"])
def test_bad_ports_are_refused(step, port):
    with pytest.raises(LaunchError, match=f"MASTER_PORT={port} is not a port"):
        RankEnv.from_environ({**step, "MASTER_PORT": port})


@pytest.mark.parametrize(
    "change",
    [
        {"RANK": "6"},
        {"LOCAL_RANK": "2"},
        {"WORLD_SIZE": "5"},
        {"LOCAL_WORLD_SIZE": "7"},
        {"GROUP_RANK": "6"},
        {"WORLD_SIZE": "0"},
    ],
)
def test_contradicting_numbers_are_refused(change):
    with pytest.raises(LaunchError, match="contradict each other"):
        RankEnv.from_environ({**TORCHRUN, **change})


@pytest.mark.parametrize(
    "change",
    [
        {"RANK": "1", "WORLD_SIZE": "2", "GROUP_RANK": "0"},  # all on one node
        {"RANK": "5", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1", "GROUP_RANK": "5"},  # one on each
        {"MASTER_PORT": "1"},
        {"MASTER_PORT": "65535"},
    ],
)
def test_numbers_at_the_edge_are_taken(change):
    environ = {**TORCHRUN, **change}
    env = RankEnv.from_environ(environ).env_variables()
    assert {"GROUP_RANK": env["NODE_RANK"], **env} == {
        **environ,
        "NODE_RANK": environ["GROUP_RANK"],
    }


def test_empty_master_is_refused():
    with pytest.raises(LaunchError, match="MASTER_ADDR is empty"):
        RankEnv.from_environ({**TORCHRUN, "MASTER_ADDR": ""})


@pytest.mark.parametrize(
    "name",
    [
        "SLURM_PROCID",
        "SLURM_LOCALID",
        "SLURM_NTASKS",
        "SLURM_NODEID",
        "SLURM_GTIDS",
        "SLURM_JOB_ID",
    ],
)
def test_step_with_a_variable_missing_is_refused(step, name):
    del step[name]
    with pytest.raises(LaunchError, match=f"{name} is not set, though this is an srun step"):
        RankEnv.from_environ(step)


def without_old_names(env: dict[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if "_PACK_GROUP_" not in name}


def test_components_are_read_under_either_name(step):
    assert RankEnv.from_environ(without_old_names(step)).master_addr == "gamma"
    old = {name: value for name, value in step.items() if "_HET_GROUP_" not in name}
    old["SLURM_PACK_SIZE"] = old.pop("SLURM_HET_SIZE")  # Slurm 19.05
    assert RankEnv.from_environ(old).master_addr == "gamma"


def test_hosts_come_in_the_order_of_node_ranks(step):
    assert hosts_in_order(step) == ["gamma", "beta1", "alpha"]
    step["SLURM_STEP_NODELIST"] = "alpha,beta1"  # a step without the first component
    assert hosts_in_order(step) == ["beta1", "alpha"]


def test_unknown_hosts_of_components_are_refused(step):
    env = without_old_names(step)
    del env["SLURM_JOB_NODELIST_HET_GROUP_0"]
    with pytest.raises(LaunchError, match="SLURM_JOB_NODELIST_HET_GROUP_0 is not set"):
        RankEnv.from_environ(env)


@pytest.mark.parametrize(
    ("step_hosts", "master"),
    [
        ("alpha,beta1", "beta1"),
        ("alpha", "alpha"),
        ("alpha,gamma", "gamma"),
        ("elsewhere", "elsewhere"),
    ],
)
def test_step_over_some_components_finds_rank_0(step, step_hosts, master):
    assert RankEnv.from_environ({**step, "SLURM_STEP_NODELIST": step_hosts}).master_addr == master


def test_step_over_the_end_of_a_component_finds_rank_0():
    env = recorded("het_two_node_component", "22.05")[0][3]
    assert (
        RankEnv.from_environ({**env, "SLURM_STEP_NODELIST": "alpha,beta2"}).master_addr == "beta2"
    )


@pytest.mark.parametrize(
    ("visible", "index"),
    [
        (None, 1),
        ("", 1),
        ("0,1,2,3", 1),
        ("2", 0),
        ("GPU-1c9f", 0),
        ("MIG-a,MIG-b,MIG-c,MIG-d", 1),
        ("4,5,6,7", 1),
    ],
)
def test_device_index_follows_the_visible_devices(step, visible, index):
    env = {name: value for name, value in step.items() if name != "CUDA_VISIBLE_DEVICES"}
    if visible is not None:
        env["CUDA_VISIBLE_DEVICES"] = visible
    assert RankEnv.from_environ(env).device_index == index


@pytest.mark.parametrize(
    "name", ["CUDA_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "ROCR_VISIBLE_DEVICES"]
)
@pytest.mark.parametrize(("visible", "index"), [("2", 0), ("0,1,2,3", 1), ("", 1)])
def test_device_index_follows_every_vendors_variable(step, name, visible, index):
    env = {key: value for key, value in step.items() if not key.endswith("VISIBLE_DEVICES")}
    assert RankEnv.from_environ({**env, name: visible}).device_index == index


def test_device_index_follows_the_shortest_list(step):
    amd = {"ROCR_VISIBLE_DEVICES": "2", "HIP_VISIBLE_DEVICES": "0,1,2,3"}
    env = {key: value for key, value in step.items() if key != "CUDA_VISIBLE_DEVICES"}
    assert RankEnv.from_environ({**env, **amd}).device_index == 0


@given(st.integers(0, 2**32))
def test_ports_avoid_daemons_and_ephemeral_ones(job_id):
    assert FIRST_PORT == 10_000
    assert 10_000 <= port_of_job(job_id) < 29_000
    assert port_of_job(job_id) != port_of_job(job_id + 1)
    assert port_of_job(job_id) == port_of_job(job_id + PORT_COUNT)


def test_os_environ_is_the_default(step, monkeypatch):
    for name, value in {**step, "MASTER_PORT": "23456"}.items():
        monkeypatch.setenv(name, value)
    for name in TORCHRUN.keys() - {"MASTER_PORT"}:
        monkeypatch.delenv(name, raising=False)
    assert RankEnv.from_environ().master_port == 23456
