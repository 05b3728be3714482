"""Who runs where: components, ranks and shares."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from ddp_slurm.cluster import Cluster
from ddp_slurm.job.options import JobOptions
from ddp_slurm.job.write import job_yaml
from ddp_slurm.plan import Plan, PlanError, make_plan
from ddp_slurm.plan.prediction import forecast
from ddp_slurm.plan.shares import passes
from ddp_slurm.plan.table import plan_table
from ddp_slurm.render import render_sbatch
from ddp_slurm.schema.schema import Invalid


def plan_of(path: Path, **options: Any) -> Plan:
    return make_plan(Cluster.load(path), JobOptions(**options))


def test_plan_ranks_follow_the_order_of_the_file(uneven: Path) -> None:
    plan = plan_of(uneven, global_batch_size=100)
    assert [
        (r.rank, r.component, r.node, r.node_rank, r.local_rank, r.gpu_type, r.share)
        for r in plan.ranks()
    ] == [
        (0, 0, "gamma", 0, 0, "titan", 15),
        (1, 1, "beta", 1, 0, "v100", 15),
        (2, 1, "beta", 1, 1, "v100", 14),
        (3, 2, "alpha", 2, 0, "a100", 14),
        (4, 2, "alpha", 2, 1, "a100", 14),
        (5, 2, "alpha", 2, 2, "a100", 14),
        (6, 2, "alpha", 2, 3, "a100", 14),
    ]
    assert plan.job_env().to_environ() == {
        "DDP_SLURM_WORLD_SIZE": "7",
        "DDP_SLURM_TASKS_PER_NODE": "1,2,4",
        "DDP_SLURM_GLOBAL_BATCH_SIZE": "100",
        "DDP_SLURM_SHARES": "15(x2),14(x5)",
        "DDP_SLURM_BALANCE": "equal",
    }


def test_component_holds_equal_nodes_in_slurms_order(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "nodes:\n  - {name: n10, gpus: 2}\n  - {name: big, gpus: 4}\n"
        "  - {name: 'n[9,11,0],n,a30', gpus: 2}\n"
        "  - {name: cpu, gpus: 0}\n  - {name: n8, gpus: 2, interface: eno1}\n"
    )
    plan = plan_of(path)
    components = plan.components
    assert [(c.nodes, c.nodelist, c.tasks_per_node) for c in components] == [
        (("a30", "n", "n0", "n9", "n10", "n11"), "a30,n,n[0,9-11]", 2),
        (("big",), "big", 4),
        (("n8",), "n8", 2),
    ]
    assert [(r.node, r.node_rank) for r in plan.ranks() if not r.local_rank] == [
        ("a30", 0),
        ("n", 1),
        ("n0", 2),
        ("n9", 3),
        ("n10", 4),
        ("n11", 5),
        ("big", 6),
        ("n8", 7),
    ]
    assert components[2].task_env == {"NCCL_SOCKET_IFNAME": "=eno1", "GLOO_SOCKET_IFNAME": "eno1"}


@pytest.mark.parametrize(
    "difference",
    [
        "gpus: {type: a100, count: 4}",
        "gpus: {type: titan, count: 2}",
        "cpus: 64",
        "memory: 30G",
        "partition: big",
        "constraint: nvlink",
        "interface: eno1",
        "env: {NCCL_DEBUG: INFO}",
    ],
)
def test_component_is_split_by_any_difference(tmp_path: Path, difference: str) -> None:
    same = {"gpus": "gpus: {type: titan, count: 4}", "cpus": "cpus: 8", "memory": "memory: 60G"}
    one, other = (
        ", ".join((same | values).values())
        for values in ({}, {difference.partition(":")[0]: difference})
    )
    path = tmp_path / "c.yaml"
    path.write_text(
        f"nodes:\n  - {{name: a, {one}}}\n  - {{name: b, {other}}}\n  - {{name: c, {one}}}\n"
    )
    assert [c.nodes for c in plan_of(path).components] == [("a", "c"), ("b",)]
    assert [(c.nodes, c.tasks) for c in plan_of(path, nodes="a,c", gpus=5).components] == [
        (("a",), 4),
        (("c",), 1),
    ]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (
            {"nodes": "alpha,gamma"},
            [("alpha", "gpu:a100:4", "240G"), ("gamma", "gpu:titan:1", "30G")],
        ),
        ({"gpus": 2}, [("gamma", "gpu:titan:1", "30G"), ("beta", "gpu:v100:1", "30G")]),
        (
            {"gpus": 5, "nodes": "alpha,beta"},
            [("alpha", "gpu:a100:4", "240G"), ("beta", "gpu:v100:1", "30G")],
        ),
        ({"memory": "7G", "gpus": 1}, [("gamma", "gpu:titan:1", "7G")]),
    ],
)
def test_plan_of_a_part_of_the_cluster(
    uneven: Path, options: dict[str, Any], expected: list[tuple[str, str, str]]
) -> None:
    plan = plan_of(uneven, **options)
    assert [
        (c.nodelist, c.gres, f"{(c.memory_mb or 0) // 1024}G") for c in plan.components
    ] == expected


@pytest.mark.parametrize(
    ("memory", "on_nodes", "directives"),
    [
        (None, [30720, 61440, 245760], ["mem=30G", "mem=60G", "mem=240G"]),
        ("7G", [7168, 7168, 7168], ["mem=7G"] * 3),
        ("2G/cpu", [16384, 32768, 65536], ["mem-per-cpu=2G"] * 3),
        ("none", [None, None, None], []),
    ],
)
@pytest.mark.parametrize("ranks", ["gpu", "node"])
def test_memory_is_asked_for_in_one_way(
    uneven: Path,
    memory: str | None,
    on_nodes: list[int | None],
    directives: list[str],
    ranks: str,
) -> None:
    plan = plan_of(uneven, memory=memory, ranks=ranks, command="x")
    assert [component.memory_mb for component in plan.components] == on_nodes
    lines = render_sbatch(plan).splitlines()
    mem = [line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH --mem")]
    assert mem == directives
    written = JobOptions.read(yaml.safe_load(job_yaml(plan.options)))
    assert written.memory == plan.options.memory


def test_plan_size_in_words(uneven: Path) -> None:
    assert plan_of(uneven).size == "7 ranks on 3 nodes"
    assert plan_of(uneven, nodes=["gamma"]).size == "1 rank on 1 node"
    assert plan_of(uneven, nodes=["beta"]).size == "2 ranks on 1 node"


def test_node_with_gpus_of_several_models(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "nodes:\n  - {name: n, gpus: [{type: a100, count: 2}, {type: titan, count: 2}]}\n"
    )
    assert [c.gres for c in plan_of(path).components] == ["gpu:a100:2,gpu:titan:2"]
    assert [c.gres for c in plan_of(path, gpus=3).components] == ["gpu:a100:2,gpu:titan:1"]
    assert [r.gpu_type for r in plan_of(path).ranks()] == ["a100", "a100", "titan", "titan"]


def test_cpus_per_task_is_at_least_one(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "nodes:\n  - {name: a, gpus: 4, cpus: 30}\n  - {name: b, gpus: 4, cpus: 2}\n"
        "  - {name: c, gpus: 4}\n"
    )
    assert [c.cpus_per_task for c in plan_of(path).components] == [7, 1, 1]
    assert [c.cpus_per_task for c in plan_of(path, cpus_per_task=3).components] == [3]


def test_ranks_share_cpus_where_a_node_has_fewer(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("nodes:\n  - {name: a, gpus: 4, cpus: 8}\n  - {name: b, gpus: 4, cpus: 2}\n")
    plan = plan_of(path)
    assert [c.cpus_per_node for c in plan.components] == [8, 2]
    assert plan.shared_cpus_note == "b has 2 CPUs for 4 ranks, which share them"
    for options in ({"gpus": 6}, {"ranks": "node"}, {"cpus_per_task": 1}):
        assert plan_of(path, **options).shared_cpus_note == ""


def test_partition_option_wins_over_the_nodes(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        "nodes:\n  - {name: a, gpus: 1, partition: small}\n  - {name: b, gpus: 1, partition: big}\n"
    )
    assert [c.partition for c in plan_of(path).components] == ["small", "big"]
    assert [(c.nodelist, c.partition) for c in plan_of(path, partition="all").components] == [
        ("a,b", "all")
    ]


@pytest.mark.parametrize(
    ("count", "words"),
    [
        (1, "--nodes: the nodes n1 have no GPU; choose others"),
        (5, "the nodes n1, n2, n3, n4, n5 have no GPU"),
        (6, "the nodes n1, n2, n3, n4, n5 and 1 more have no GPU"),
    ],
)
def test_nodes_without_gpus_are_refused(tmp_path: Path, count: int, words: str) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(
        f"nodes:\n  - {{name: 'n[1-{count}]', gpus: 0}}\n  - {{name: other, gpus: 1}}\n"
    )
    with pytest.raises(PlanError, match=words):
        plan_of(path, nodes=f"n[1-{count}]")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (
            {"nodes": "alhpa"},
            "--nodes: 'alhpa' is not a node of cluster 'lab'; did you mean 'alpha'?",
        ),
        ({"gpus": 8}, "--gpus: 8 asked for, but the nodes gamma, beta, alpha have 7"),
    ],
)
def test_plan_refuses_what_the_cluster_does_not_have(
    uneven: Path, options: dict[str, Any], words: str
) -> None:
    with pytest.raises(PlanError) as caught:
        plan_of(uneven, **options)
    assert words in str(caught.value)


def test_many_unknown_nodes_are_a_short_message(tmp_path: Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("nodes:\n  - {name: 'gpu[1-2000]', gpus: 1}\n")
    with pytest.raises(PlanError) as caught:
        plan_of(path, nodes="x[1-100000]")
    message = str(caught.value)
    assert len(message) < 5000
    assert message.endswith("--nodes: nor are 99995 others")


@pytest.mark.parametrize("balance", ["measured", "adaptive"])
def test_shares_that_the_ranks_choose_are_not_planned(uneven: Path, balance: str) -> None:
    plan = plan_of(uneven, global_batch_size=90, balance=balance)
    assert plan.shares is None
    assert plan.job_env().to_environ()["DDP_SLURM_BALANCE"] == balance


def test_shares_by_a_file_of_speeds(uneven: Path, tmp_path: Path) -> None:
    speeds = tmp_path / "speeds.yaml"
    speeds.write_text(
        "titan: {beta: 0.004}\nv100: {beta: 9, alpha: 9}\n"
        "a100: {beta: 0.001, max_batch: 20}\nbeta: {beta: 2e-3}\n"
    )
    plan = plan_of(uneven, global_batch_size=90, balance=str(speeds))
    assert plan.shares is not None
    assert sum(plan.shares) == 90
    seconds = [share * beta for share, beta in zip(plan.shares, [4, 2, 2, 1, 1, 1, 1], strict=True)]
    assert max(seconds) == 18, "the least that a step can take: 17 would do for 88 samples"
    assert plan.job_env().to_environ()["DDP_SLURM_BALANCE"] == "planned"


MEMORY = (
    "titan: {beta: 1, max_batch: 10}\nv100: {beta: 1, alpha: 3, max_batch: 20}\n"
    "a100: {beta: 1, max_batch: 10}\n"
)


def test_script_under_uneven_gets_no_share_above_its_memory(uneven: Path, tmp_path: Path) -> None:
    speeds = tmp_path / "speeds.yaml"
    speeds.write_text(MEMORY)
    given = {"balance": str(speeds), "uneven": True, "command": ("train.py",)}
    plan = plan_of(uneven, global_batch_size=90, **given)
    assert plan.shares == (10, 20, 20, 10, 10, 10, 10)
    assert passes(plan) == []
    few = plan_of(uneven, nodes="gamma,beta", global_batch_size=3, **given)
    assert few.shares == (3, 0, 0)
    with pytest.raises(PlanError, match="add up to 90, less than the global batch of 91"):
        plan_of(uneven, global_batch_size=91, **given)


def test_share_above_the_memory_is_planned_in_passes(uneven: Path, tmp_path: Path) -> None:
    """Each pass has the fixed cost of a step again."""
    speeds = tmp_path / "speeds.yaml"
    speeds.write_text(
        "titan: {beta: 1}\nv100: {beta: 1}\na100: {beta: 0.1, alpha: 1, max_batch: 10}\n"
    )
    plan = plan_of(uneven, global_batch_size=460, balance=str(speeds))
    assert plan.shares == (20, 20, 20, 100, 100, 100, 100), "ten passes of 2 s"
    assert [(rank.rank, number, most) for rank, number, most in passes(plan)] == [
        (rank, 10, 10) for rank in (3, 4, 5, 6)
    ]
    assert "in passes of at most so many samples: rank 3 10 of 10" in plan_table(plan)
    predicted = forecast(plan)
    assert predicted is not None
    assert predicted.plan.step.compute == pytest.approx(20)
    chosen = plan_of(uneven, nodes="auto", global_batch_size=460, balance=str(speeds))
    assert chosen.world_size == 7, "no node is left out because its memory is small"


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "titan: {beta: 1}\nv100: {beta: 1}\n",
            "neither node 'alpha' nor its GPU type 'a100' is in the file",
        ),
        ("titan: {beta: -1}\n", "'-1' is not a number of seconds"),
        ("titan: {gamma: 1}\n", "unknown key"),
    ],
)
def test_speeds_file_errors(uneven: Path, tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "speeds.yaml").write_text(text)
    with pytest.raises((PlanError, Invalid)) as caught:
        plan_of(uneven, global_batch_size=90, balance=str(tmp_path / "speeds.yaml"))
    assert words in str(caught.value)
    assert "speeds.yaml" in str(caught.value)
