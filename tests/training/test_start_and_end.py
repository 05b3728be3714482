"""The ranks meet; a world that is not the planned one fails on every rank before the first
collective."""

import dataclasses
import json
import socket
from pathlib import Path
from typing import Any

import pytest

from ddp_slurm.rank_env import LaunchError, RankEnv
from ddp_slurm.training.process_group.facts import (
    Arrival,
    Gpu,
    RankFacts,
    arrival_from_dict,
    complete_envs,
    rank_facts,
)
from ddp_slurm.training.process_group.startup_check import check_launch, find_errors
from ddp_slurm.training.trainer.precision import Precision

from .joining import (
    env_after_meeting,
    gloo_on_a_machine_with_gpus,
    join,
    join_twice,
    meet_and_leave_when_told,
    meet_and_stay,
    place,
    signalled_before_the_meeting,
)
from .worlds import NO_TOKEN, PATIENCE_SECONDS, free_port, run_world, tell, world

FACT = RankFacts(
    rank=0,
    local_rank=0,
    node_rank=0,
    world_size=3,
    host="gamma",
    node_name="gamma",
    host_address="198.18.0.3",
    visible_gpus=1,
    device_index=0,
    device_name="NVIDIA TITAN V",
    gpu_uuid="GPU-0",
    compute_capability=(7, 0),
    socket_interface="",
)


def facts(*changes: dict[str, object]) -> list[RankFacts]:
    """Three ranks, gamma 1 and beta 2, each with a GPU of its own, and what ``changes`` say."""
    good: list[dict[str, object]] = [
        {},
        {"rank": 1, "node_rank": 1, "host": "beta", "node_name": "beta", "gpu_uuid": "GPU-1"},
        {
            "rank": 2,
            "node_rank": 1,
            "local_rank": 1,
            "host": "beta",
            "node_name": "beta",
            "gpu_uuid": "GPU-2",
            "device_index": 1,
        },
    ]
    good[1]["visible_gpus"] = good[2]["visible_gpus"] = 2
    return [
        dataclasses.replace(FACT, **{**g, **c})
        for g, c in zip(good, [*changes, {}, {}, {}][:3], strict=True)
    ]


PLAN = {"DDP_SLURM_TASKS_PER_NODE": "1,2"}


@pytest.mark.parametrize(
    ("world_facts", "environ", "expected"),
    [
        (facts(), PLAN, []),
        (facts(), {}, []),
        (
            facts({}, {}, {"node_rank": 0, "host": "gamma", "node_name": "gamma"}),
            PLAN,
            [
                "node 0 (gamma): expected 1 ranks (DDP_SLURM_TASKS_PER_NODE=1,2), found 2: [0, 2]",
                "node 1 (beta): expected 2 ranks (DDP_SLURM_TASKS_PER_NODE=1,2), found 1: [1]",
            ],
        ),
        (
            facts(),
            {"DDP_SLURM_TASKS_PER_NODE": "1,2,4"},
            ["node 2 (no host): expected 4 ranks (DDP_SLURM_TASKS_PER_NODE=1,2,4), found 0: []"],
        ),
        (
            facts({}, {"world_size": 7}),
            PLAN,
            ["rank 1 on beta: has world size 7, expected 3 as on rank 0"],
        ),
        (
            facts({}, {}, {"gpu_uuid": "GPU-1", "device_index": 0}),
            PLAN,
            [
                "rank 1 on beta and rank 2 on beta use the same GPU NVIDIA TITAN V GPU-1 "
                "(index 0 and 0); expected one rank a GPU"
            ],
        ),
        (
            facts({}, {"visible_gpus": 1}, {"visible_gpus": 1, "gpu_uuid": ""}),
            PLAN,
            [
                "rank 2 on beta: expected a GPU of index 1, found 1 visible GPUs "
                "(CUDA_VISIBLE_DEVICES, driver?), while rank 0 on gamma sees 1"
            ],
        ),
        (
            facts({"visible_gpus": 0, "gpu_uuid": ""}),
            PLAN,
            [
                "rank 0 on gamma: expected a GPU of index 0, found 0 visible GPUs "
                "(CUDA_VISIBLE_DEVICES, driver?), while rank 1 on beta sees 2"
            ],
        ),
        (
            facts({"host_address": "127.0.1.1"}),
            PLAN,
            [
                "rank 0 on gamma: its host name 'gamma' resolves to 127.0.1.1, where no other "
                "host can reach it; correct its line in /etc/hosts (Ubuntu writes 127.0.1.1 there) "
                "or name the network interface (interface: in cluster.yaml, or GLOO_SOCKET_IFNAME)"
            ],
        ),
        (facts({"host_address": "127.0.1.1", "socket_interface": "eno1"}), PLAN, []),
        (facts({"host_address": "fd00::5"}), PLAN, []),
        (
            [dataclasses.replace(fact, host="one", host_address="127.0.1.1") for fact in facts()],
            PLAN,
            [],
        ),
    ],
)
def test_errors_of_a_world_that_has_met(
    world_facts: list[RankFacts], environ: dict[str, str], expected: list[str]
) -> None:
    assert find_errors(world_facts, environ) == expected


def arrival(rank: int, machine: str, **changes: Any) -> Arrival:
    """A rank of a world of four whose launcher set what torch needs and no more."""
    env = RankEnv(rank, None, 4, None, None, "gamma", 12345, None)
    gpus = (Gpu("TITAN", "GPU-0", (7, 0)), Gpu("TITAN", "GPU-1", (7, 0)))
    given = Arrival(env, machine, machine, machine, "198.18.0.3", gpus, None, "")
    return dataclasses.replace(given, **changes)


def test_reports_travel_unchanged() -> None:
    report = arrival(0, "gamma")
    assert arrival_from_dict(json.loads(json.dumps(dataclasses.asdict(report)))) == report


def places(arrivals: list[Arrival]) -> list[tuple[int | None, ...]]:
    return [
        (env.local_rank, env.local_world_size, env.node_rank, env.device_index)
        for env in complete_envs(arrivals)
    ]


def test_places_are_derived_from_the_hosts() -> None:
    hosts = ["gamma", "alpha", "gamma", "alpha"]
    arrivals = [arrival(rank, host) for rank, host in enumerate(hosts)]
    assert places(arrivals) == [(0, 2, 0, 0), (0, 2, 1, 0), (1, 2, 0, 1), (1, 2, 1, 1)]
    facts = [rank_facts(*pair) for pair in zip(arrivals, complete_envs(arrivals), strict=True)]
    assert [fact.gpu_uuid for fact in facts] == ["GPU-0", "GPU-0", "GPU-1", "GPU-1"]


def test_places_that_the_launcher_set_stay() -> None:
    def with_local_rank(rank: int, local_rank: int) -> Arrival:
        given = arrival(rank, "gamma")
        return dataclasses.replace(given, env=dataclasses.replace(given.env, local_rank=local_rank))

    arrivals = [with_local_rank(rank, 3 - rank) for rank in range(4)]
    assert places(arrivals) == [(3, 4, 0, 3), (2, 4, 0, 2), (1, 4, 0, 1), (0, 4, 0, 0)]
    complete = [
        dataclasses.replace(a, env=e)
        for a, e in zip(arrivals, complete_envs(arrivals), strict=True)
    ]
    assert complete_envs(complete) == [given.env for given in complete]


def test_places_with_one_visible_gpu_a_process() -> None:
    arrivals = [arrival(rank, "gamma", visible_devices=1) for rank in range(4)]
    assert [place[-1] for place in places(arrivals)] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    "kept", [(), ("LOCAL_RANK",), ("NODE_RANK",), ("LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK")]
)
def test_world_meets_with_what_torch_needs(tmp_path: Path, kept: tuple[str, ...]) -> None:
    def without_places(rank: int, variables: dict[str, str]) -> dict[str, str]:
        optional = {"LOCAL_RANK", "LOCAL_WORLD_SIZE", "NODE_RANK"}.difference(kept)
        return {name: value for name, value in variables.items() if name not in optional}

    found = run_world(tmp_path, (3,), env_after_meeting, change=without_places)
    for rank, (given, met) in enumerate(found):
        assert (given.local_rank is None) == ("LOCAL_RANK" not in kept)
        assert (given.local_world_size is None) == ("LOCAL_WORLD_SIZE" not in kept)
        assert (met.rank, met.local_rank, met.local_world_size) == (rank, rank, 3)
        assert (met.node_rank, met.device_index) == (0, rank)


def test_world_meets_with_variables_that_differ_by_rank(tmp_path: Path) -> None:
    def first_is_complete(rank: int, variables: dict[str, str]) -> dict[str, str]:
        if rank > 0:
            del variables["NODE_RANK"]
        return variables

    found = run_world(tmp_path, (1, 2), env_after_meeting, change=first_is_complete)
    assert [met.node_rank for _, met in found] == [0, 0, 0]


def test_master_that_resolves_to_the_own_host_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(socket, "getaddrinfo", lambda host, port: [(0, 0, 0, "", ("127.0.1.1", 0))])
    env = RankEnv(1, 0, 2, 1, 1, "alpha", 12345, 0)
    with pytest.raises(
        LaunchError,
        match=r"rank 1 on .*: the host of rank 0, 'alpha', resolves to 127\.0\.1\.1 here",
    ):
        check_launch(env, {})
    check_launch(
        dataclasses.replace(env, node_rank=0, rank=0), {}
    )  # rank 0's own host may call itself that
    check_launch(
        dataclasses.replace(env, master_addr="127.0.0.1"), {}
    )  # meant so: all on this machine


def test_planned_world_meets(tmp_path: Path) -> None:
    plan = {
        "DDP_SLURM_WORLD_SIZE": "7",
        "DDP_SLURM_TASKS_PER_NODE": "1,2,4",
        "DDP_SLURM_SHARES": "5,24(x2),72(x4)",
    }
    found = run_world(tmp_path, (1, 2, 4), place, environ={**plan, "SLURMD_NODENAME": "node"})
    places = [f"rank {rank} on node" for rank in range(7)]
    assert found == [(7, "gloo", rank, places, [5, 24, 24, 72, 72, 72, 72]) for rank in range(7)]


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (
            {"DDP_SLURM_WORLD_SIZE": "7"},
            "expected a world of 7 ranks (DDP_SLURM_WORLD_SIZE, the plan), got 3",
        ),
        (
            {"DDP_SLURM_TASKS_PER_NODE": "2,1"},
            "node 0 (here): expected 2 ranks (DDP_SLURM_TASKS_PER_NODE=2,1), found 1: [0]",
        ),
        (
            {"MASTER_ADDR": "no-such-host.invalid"},
            "the host of rank 0, 'no-such-host.invalid', does not resolve here",
        ),
        ({"SLURM_PROCID": "0", "LOCAL_RANK": ""}, "LOCAL_RANK='' is not a whole number"),
    ],
)
def test_unplanned_world_fails_on_every_rank(
    tmp_path: Path, environ: dict[str, str], expected: str
) -> None:
    found = run_world(tmp_path, (1, 2), join, environ={"SLURMD_NODENAME": "here", **environ})
    assert len(found) == 3
    for text in found:
        assert expected in text


def test_unplanned_world_ends_with_status_2_and_no_traceback(tmp_path: Path) -> None:
    for number, environ in enumerate([{"DDP_SLURM_TASKS_PER_NODE": "2,1"}, {"LOCAL_RANK": "one"}]):
        with world(tmp_path / str(number), (1, 2), place, environ=environ) as running:
            assert running.wait(PATIENCE_SECONDS) == [2, 2, 2]
            assert all("Traceback" not in running.log(rank) for rank in range(3))
            assert all(" failed: " in running.log(rank) for rank in range(3))


def test_missing_rank_is_named_on_all_others(tmp_path: Path) -> None:
    def of_five(rank: int, variables: dict[str, str]) -> dict[str, str]:
        return {**variables, "WORLD_SIZE": "5", "SLURMD_NODENAME": f"host{rank}"}

    found = run_world(tmp_path, (1, 2), join, 1.0, change=of_five)
    expected = (
        "expected 5 ranks within 1 s, found 3: "
        "rank 0 on host0, rank 1 on host1, rank 2 on host2; missing: [3, 4]"
    )
    assert all(expected in text for text in found)


def test_rank_started_twice_is_named(tmp_path: Path) -> None:
    def twice(rank: int, variables: dict[str, str]) -> dict[str, str]:
        return {**variables, "RANK": str(min(rank, 1)), "WORLD_SIZE": "2"}

    with world(tmp_path, (1, 2), meet_and_stay, change=twice) as running:
        assert 0 not in running.wait(PATIENCE_SECONDS)
        logs = running.all_logs()
    assert "another process has this rank already; expected one process a rank" in logs


def test_signal_before_the_meeting_is_kept(tmp_path: Path) -> None:
    with world(tmp_path, (1, 1), signalled_before_the_meeting) as running:
        assert running.receive(0) == "signalled"
        tell(running.pipes[1], "go")
        assert running.results() == [True, False]


def test_missing_rank_0_and_a_taken_port_are_named(tmp_path: Path) -> None:
    def without_rank_0(rank: int, variables: dict[str, str]) -> dict[str, str]:
        return {**variables, "RANK": "1", "WORLD_SIZE": "2"}

    [text] = run_world(tmp_path / "absent", (1,), join, 1.0, change=without_rank_0)
    assert "no answer from rank 0 at 127.0.0.1:" in text
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        variables = {"MASTER_PORT": port, **NO_TOKEN}
        [text] = run_world(tmp_path / "taken", (1,), join, 1.0, environ=variables)
    assert f"cannot listen on port {port}" in text


def test_second_job_on_a_port_leaves_the_first_alone(tmp_path: Path) -> None:
    port = {"MASTER_PORT": str(free_port())}
    first_job, second_job = ({**port, "TORCHELASTIC_RUN_ID": job} for job in ("1", "2"))
    with world(tmp_path / "first", (2,), meet_and_leave_when_told, environ=first_job) as first:
        assert [first.receive(rank) for rank in (0, 1)] == ["met", "met"]
        found = run_world(tmp_path / "second", (2,), join, 1.0, environ={**second_job, **NO_TOKEN})
        assert "cannot listen on port" in found[0]
        assert run_world(tmp_path / "third", (2,), join, environ=second_job) == ["met", "met"]
        for rank in (0, 1):
            tell(first.pipes[rank], "go")
        assert first.results() == ["left", "left"]


def test_world_set_by_hand_may_span_two_slurm_jobs(tmp_path: Path) -> None:
    found = run_world(
        tmp_path, (1, 1), join, change=lambda rank, v: {**v, "SLURM_JOB_ID": str(rank)}
    )
    assert found == ["met", "met"]


def test_gloo_on_request_uses_no_gpu(tmp_path: Path) -> None:
    found = run_world(tmp_path, (1, 1), gloo_on_a_machine_with_gpus)
    assert found == [("cpu", 0, Precision("fp32", "cpu"))] * 2


@pytest.mark.parametrize("ranks", [1, 2])
def test_process_joins_one_world_only(tmp_path: Path, ranks: int) -> None:
    for is_open, result in run_world(tmp_path, (ranks,), join_twice):
        assert not is_open
        assert "init_distributed was called a second time in this process" in result
