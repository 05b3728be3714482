"""``--ranks node``: one rank a node that drives all its GPUs."""

from pathlib import Path

import pytest

from ddp_slurm.backends.local import step_processes
from ddp_slurm.cluster import Cluster
from ddp_slurm.job.options import JobOptions
from ddp_slurm.plan import Plan, make_plan
from ddp_slurm.render import render_sbatch


def plan_of(cluster: Path, **options: str) -> Plan:
    values = {"ranks": "node", "global-batch-size": "70", "command": "python t.py", **options}
    return make_plan(Cluster.load(cluster), JobOptions.read(values))


def test_rank_has_its_nodes_gpus_cpus_and_share(uneven: Path) -> None:
    plan = plan_of(uneven)
    found = [(r.rank, r.node, r.local_rank, r.gpu_type, r.share) for r in plan.ranks()]
    assert found == [
        (0, "gamma", 0, "titan", 10),
        (1, "beta", 0, "v100", 20),
        (2, "alpha", 0, "a100", 40),
    ]
    assert plan.tasks_per_node == "1(x3)"
    assert [c.cpus_per_task for c in plan.components] == [8, 16, 32]
    text = render_sbatch(plan)
    assert text.count("#SBATCH --ntasks-per-node=1\n") == 3
    assert "#SBATCH --gres=gpu:a100:4\n" in text


def test_rank_drives_a_part_of_its_nodes_gpus(uneven: Path) -> None:
    plan = plan_of(uneven, gpus="5")
    assert [(r.node, r.share) for r in plan.ranks()] == [("gamma", 14), ("beta", 28), ("alpha", 28)]
    assert [c.cpus_per_task for c in plan.components] == [8, 16, 16]


@pytest.mark.parametrize(
    ("speeds", "shares"),
    [
        ("gamma: {beta: 0.004}\nbeta: {beta: 0.004}\na100: {beta: 0.004}\n", [10, 20, 40]),
        ("titan: {beta: 0.001}\nv100: {beta: 0.002}\na100: {beta: 0.001}\n", [12, 11, 47]),
        ("titan: {beta: 1}\nv100: {beta: 1}\na100: {beta: 0.001, max_batch: 10}\n", [0, 0, 70]),
    ],
)
def test_speeds_are_of_one_gpu(
    uneven: Path, tmp_path: Path, speeds: str, shares: list[int]
) -> None:
    (tmp_path / "speeds.yaml").write_text(speeds)
    assert [
        rank.share for rank in plan_of(uneven, balance=str(tmp_path / "speeds.yaml")).ranks()
    ] == shares


def test_local_gpus_are_assigned_node_by_node(
    uneven: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3,4,5,6")
    found = [
        process.environ["CUDA_VISIBLE_DEVICES"] for process in step_processes(plan_of(uneven), {})
    ]
    assert found == ["0", "1,2", "3,4,5,6"]
