"""A world that is not the planned one fails on every rank before the first collective; a rank that fails ends all."""

import dataclasses
import signal
import socket
from pathlib import Path

import pytest

from ddp_slurm.rank_env import LaunchError, RankEnv
from ddp_slurm.training.process_group.startup_check import (
    RankFacts,
    check_launch,
    facts_from_dict,
    facts_to_dict,
    find_faults,
)
from ddp_slurm.training.trainer.precision import Precision

from .workers import (
    be_late,
    fail_after_rank_0_has_left,
    fail_at_three,
    fail_without_collective,
    gloo_on_a_machine_with_gpus,
    join,
    join_twice,
    meet_and_leave_when_told,
    meet_and_stay,
    place,
    signalled_before_the_meeting,
)
from .worlds import PATIENCE_SECONDS, free_port, run_world, tell, world

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
                "rank 1 on beta and rank 2 on beta use the same GPU NVIDIA TITAN V GPU-1 (index 0 and 0); "
                "expected one rank a GPU"
            ],
        ),
        (
            facts({}, {"visible_gpus": 1}, {"visible_gpus": 1, "gpu_uuid": ""}),
            PLAN,
            [
                "rank 2 on beta: expected a GPU of index 1, found 1 visible GPUs (CUDA_VISIBLE_DEVICES, driver?), while "
                "rank 0 on gamma sees 1"
            ],
        ),
        (
            facts({"visible_gpus": 0, "gpu_uuid": ""}),
            PLAN,
            [
                "rank 0 on gamma: expected a GPU of index 0, found 0 visible GPUs (CUDA_VISIBLE_DEVICES, driver?), while "
                "rank 1 on beta sees 2"
            ],
        ),
        (
            facts({"host_address": "127.0.1.1"}),
            PLAN,
            [
                "rank 0 on gamma: its host name 'gamma' resolves to 127.0.1.1, where no other host can reach it; mend "
                "its line in /etc/hosts (Ubuntu writes 127.0.1.1 there) or name the network interface (interface: in "
                "cluster.yaml, or GLOO_SOCKET_IFNAME)"
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
def test_faults_of_a_world_that_has_met(
    world_facts: list[RankFacts], environ: dict[str, str], expected: list[str]
) -> None:
    assert find_faults(world_facts, environ) == expected


def test_facts_travel_unchanged() -> None:
    assert facts_from_dict(facts_to_dict(FACT)) == FACT


def test_a_master_that_resolves_to_the_rank_s_own_host(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_planned_world_meets(tmp_path: Path) -> None:
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
def test_an_unplanned_world_fails_on_every_rank(
    tmp_path: Path, environ: dict[str, str], expected: str
) -> None:
    found = run_world(tmp_path, (1, 2), join, environ={"SLURMD_NODENAME": "here", **environ})
    assert len(found) == 3
    for text in found:
        assert expected in text


def test_an_unplanned_world_ends_with_status_2_and_no_traceback(tmp_path: Path) -> None:
    for number, environ in enumerate([{"DDP_SLURM_TASKS_PER_NODE": "2,1"}, {"LOCAL_RANK": "one"}]):
        with world(tmp_path / str(number), (1, 2), place, environ=environ) as running:
            assert running.wait(PATIENCE_SECONDS) == [2, 2, 2]
            assert all("Traceback" not in running.log(rank) for rank in range(3))
            assert all(" failed: " in running.log(rank) for rank in range(3))


def test_a_missing_rank_is_named_on_all_others(tmp_path: Path) -> None:
    def of_five(rank: int, variables: dict[str, str]) -> dict[str, str]:
        return {**variables, "WORLD_SIZE": "5", "SLURMD_NODENAME": f"host{rank}"}

    found = run_world(tmp_path, (1, 2), join, 1.0, change=of_five)
    expected = "expected 5 ranks within 1 s, found 3: rank 0 on host0, rank 1 on host1, rank 2 on host2; missing: [3, 4]"
    assert all(expected in text for text in found)


def test_a_rank_started_twice_is_named(tmp_path: Path) -> None:
    def twice(rank: int, variables: dict[str, str]) -> dict[str, str]:
        return {**variables, "RANK": str(min(rank, 1)), "WORLD_SIZE": "2"}

    with world(tmp_path, (1, 2), meet_and_stay, change=twice) as running:
        assert 0 not in running.wait(PATIENCE_SECONDS)
        logs = running.all_logs()
    assert "another process has this rank already; expected one process a rank" in logs


def test_a_signal_that_comes_before_the_world_has_met_is_kept(tmp_path: Path) -> None:
    with world(tmp_path, (1, 1), signalled_before_the_meeting) as running:
        assert running.receive(0) == "signalled"
        tell(running.pipes[1], "go")
        assert running.results() == [True, False]


def test_no_answer_from_rank_0_and_a_port_that_is_taken(tmp_path: Path) -> None:
    def without_rank_0(rank: int, variables: dict[str, str]) -> dict[str, str]:
        return {**variables, "RANK": "1", "WORLD_SIZE": "2"}

    [text] = run_world(tmp_path / "absent", (1,), join, 1.0, change=without_rank_0)
    assert "no answer from rank 0 at 127.0.0.1:" in text
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        [text] = run_world(tmp_path / "taken", (1,), join, 1.0, environ={"MASTER_PORT": port})
    assert f"cannot listen on port {port}" in text


@pytest.mark.parametrize(
    ("how", "status", "words"),
    [
        ("raise", 1, "rank 3 on node failed: ValueError: a bad sample"),
        ("user's fault", 2, "rank 3 on node failed: precision fp7 is none"),
        ("exit", 5, None),
        ("exit True", 1, None),
        ("kill", -signal.SIGKILL, None),
    ],
)
def test_a_rank_that_fails_ends_all(
    tmp_path: Path, how: str, status: int, words: str | None
) -> None:
    with world(
        tmp_path, (1, 2, 4), fail_at_three, how, environ={"SLURMD_NODENAME": "node"}
    ) as running:
        statuses = running.wait(PATIENCE_SECONDS)
        logs = [running.log(rank) for rank in range(7)]
    assert statuses[3] == status
    assert all(
        other in ({status} if how != "kill" else {1})
        for rank, other in enumerate(statuses)
        if rank != 3
    )
    if words is not None:
        assert words in logs[3]
        assert ("Traceback" in logs[3]) == (how == "raise")
    if how == "raise":
        for rank in (0, 1, 2, 4, 5, 6):
            assert (
                f"rank {rank} on node: ends, because rank 3 on node failed: ValueError: a bad sample"
                in logs[rank]
            )
            assert "Traceback" not in logs[rank]


def test_a_second_job_on_the_same_port_leaves_the_first_alone(tmp_path: Path) -> None:
    port = {"MASTER_PORT": str(free_port())}
    first_job, second_job = ({**port, "TORCHELASTIC_RUN_ID": job} for job in ("1", "2"))
    with world(tmp_path / "first", (2,), meet_and_leave_when_told, environ=first_job) as first:
        assert [first.receive(rank) for rank in (0, 1)] == ["met", "met"]
        said = run_world(tmp_path / "second", (2,), join, 1.0, environ=second_job)
        assert "cannot listen on port" in said[0]
        for rank in (0, 1):
            tell(first.pipes[rank], "go")
        assert first.results() == ["left", "left"]


def test_a_world_by_hand_may_span_two_slurm_jobs(tmp_path: Path) -> None:
    found = run_world(
        tmp_path, (1, 1), join, change=lambda rank, v: {**v, "SLURM_JOB_ID": str(rank)}
    )
    assert found == ["met", "met"]


def test_gloo_that_is_asked_for_leaves_the_gpus_alone(tmp_path: Path) -> None:
    found = run_world(tmp_path, (1, 1), gloo_on_a_machine_with_gpus)
    assert found == [("cpu", 0, Precision("fp32", "cpu"))] * 2


def test_rank_0_waits_for_a_late_rank_and_ends_with_its_failure(tmp_path: Path) -> None:
    with world(
        tmp_path, (2,), fail_after_rank_0_has_left, environ={"SLURMD_NODENAME": "node"}
    ) as running:
        assert running.wait(PATIENCE_SECONDS) == [1, 1]
        assert (
            "rank 0 on node: ends, because rank 1 on node failed: ValueError: the last"
            in running.log(0)
        )


def test_rank_0_waits_as_long_as_a_collective_would(tmp_path: Path) -> None:
    assert run_world(tmp_path / "waits", (2,), be_late, 60.0) == [None, None]
    with world(tmp_path / "leaves", (2,), be_late, 1.0) as running:
        assert running.wait(PATIENCE_SECONDS) == [0, 1]


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_process_joins_one_world_only(tmp_path: Path, ranks: int) -> None:
    for is_open, said in run_world(tmp_path, (ranks,), join_twice):
        assert not is_open
        assert "init_distributed a second time in this process" in said


def test_a_failure_reaches_a_rank_outside_any_collective(tmp_path: Path) -> None:
    with world(
        tmp_path, (2,), fail_without_collective, environ={"SLURMD_NODENAME": "node"}
    ) as running:
        assert running.wait(PATIENCE_SECONDS) == [1, 1]
        assert (
            "rank 0 on node: ends, because rank 1 on node failed: ValueError: a bad sample"
            in running.log(0)
        )
