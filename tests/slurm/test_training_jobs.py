"""The main path on live daemons: cluster.yaml, sbatch, seven ranks trained to the end."""

import json
import os
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ddp_slurm.cluster import Cluster
from ddp_slurm.job.options import JobOptions
from ddp_slurm.lab import Lab
from ddp_slurm.plan import make_plan
from ddp_slurm.render import render_sbatch

from .conftest import FinishedJob, wait_for_job

ROOT = Path(__file__).parents[2]
RunJob = Callable[..., FinishedJob]

UNEVEN_TABLE = [
    ("0", "gamma", "0"),
    ("1", "beta", "0"),
    ("2", "beta", "1"),
    ("3", "alpha", "0"),
    ("4", "alpha", "1"),
    ("5", "alpha", "2"),
    ("6", "alpha", "3"),
]

REPORT = """
import json, os, socket
from ddp_slurm.rank_env import RankEnv
env = RankEnv.from_environ()
seen = {
    "host": socket.gethostname(),
    "devices": os.environ["CUDA_VISIBLE_DEVICES"],
    "address": socket.gethostbyname(env.master_addr),
}
print(json.dumps({**vars(env), **seen}))
"""


def tables(output: str) -> list[tuple[str, ...]]:
    """Rank, node and local rank of the table that a training begins with."""
    rows = re.findall(r"^0: (\d+) +(\S+) +(\d+) +\S+ +\d+$", output, re.MULTILINE)
    return [tuple(row) for row in rows]


def losses(output: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"epoch \d+/\d+ +evaluation loss ([0-9.]+)", output)]


@pytest.fixture
def python_first() -> dict[str, str]:
    """As after ``activate``: ``python`` is this one; and one thread a rank: all share the cores."""
    return {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }


@pytest.fixture
def small_cifar10(tmp_path: Path) -> Path:
    """300 + 100 images: of the archive DDP_SLURM_CIFAR10, or else synthetic in the same form."""
    real = os.environ.get("DDP_SLURM_CIFAR10")
    random = np.random.default_rng(0)
    arrays: dict[str, Any] = dict(np.load(real)) if real else {}
    for split, count in (("train", 300), ("test", 100)):
        labels = arrays.get(f"{split}_labels", random.integers(0, 10, count, np.uint8))[:count]
        synthetic = (
            random.integers(0, 64, (count, 32, 32, 3), np.uint8)
            + (labels * 19)[:, None, None, None]
        )
        arrays[f"{split}_images"] = arrays.get(f"{split}_images", synthetic)[:count]
        arrays[f"{split}_labels"] = labels
    path = tmp_path / "images.npz"
    np.savez(path, **arrays)
    return path


def sbatch_example(lab: Lab, name: str, folder: Path, environ: dict[str, str]) -> FinishedJob:
    """``cd FOLDER && sbatch test.sh``, as a user types it."""
    done = lab.run(
        ["sbatch", "--parsable", "test.sh"], cwd=folder, env=environ, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    job_id = int(done.stdout)
    state = wait_for_job(lab, job_id)
    return FinishedJob(job_id, state, (folder / f"{name}-{job_id}.out").read_text())


@pytest.mark.parametrize(
    ("example", "name"), [("synthetic_data_example", "synthetic"), ("cifar10_example", "cifar10")]
)
def test_example_submitted_by_sbatch_trains_to_the_end(
    live_lab: Lab,
    tmp_path: Path,
    clean_environ: dict[str, str],
    python_first: dict[str, str],
    small_cifar10: Path,
    example: str,
    name: str,
) -> None:
    folder = tmp_path / "an example's folder"
    shutil.copytree(
        ROOT / example, folder, ignore=shutil.ignore_patterns("*.pt*", "*.out", "ddp_slurm_runs")
    )
    shutil.copy(small_cifar10, folder / "cifar10.npz")
    job = sbatch_example(live_lab, name, folder, {**clean_environ, **python_first})
    assert job.state == "COMPLETED", job.output
    assert tables(job.output) == UNEVEN_TABLE
    assert "0: finished: step " in job.output
    if example == "synthetic_data_example":
        assert losses(job.output)[-1] < losses(job.output)[0] / 2
    assert (folder / "snapshot.pt").stat().st_size > 10_000


def run_plan(lab: Lab, run_job: RunJob, tmp_path: Path, cluster: str, script: str) -> FinishedJob:
    (tmp_path / "task.py").write_text(script)
    (tmp_path / "plan.yaml").write_text(cluster)
    options = JobOptions(command=(sys.executable, "task.py"))
    return run_job(lab, render_sbatch(make_plan(Cluster.load(tmp_path / "plan.yaml"), options)))


def reports(job: FinishedJob) -> list[dict[str, Any]]:
    assert job.state == "COMPLETED", job.output
    found = [
        json.loads(line.partition(": ")[2]) for line in job.output.splitlines() if ": {" in line
    ]
    return sorted(found, key=lambda report: int(report["rank"]))


CLUSTERS = {
    "uneven": (
        (ROOT / "cifar10_example/cluster.yaml").read_text(),
        [("gamma", "0"), *[("beta", "0,1")] * 2, *[("alpha", "0,1,2,3")] * 4],
    ),
    "two nodes in a component": (
        "nodes:\n  - {name: z1, gpus: 1}\n  - {name: 'b[1-2]', gpus: {type: v100, count: 2}}\n",
        [("z1", "0"), *[("b1", "0,1")] * 2, *[("b2", "0,1")] * 2],
    ),
    "homogeneous": (
        "nodes:\n  - {name: 'n[9-10]', gpus: 2}\n",
        [*[("n9", "0,1")] * 2, *[("n10", "0,1")] * 2],
    ),
}


@pytest.mark.parametrize("case", CLUSTERS)
def test_ranks_are_where_the_plan_says(
    make_lab: Callable[..., Lab], run_job: RunJob, tmp_path: Path, case: str
) -> None:
    text, expected = CLUSTERS[case]
    lab = make_lab(text)
    found = reports(run_plan(lab, run_job, tmp_path, text, REPORT))
    assert [(r["host"], r["devices"]) for r in found] == expected
    assert [r["rank"] for r in found] == list(range(len(expected)))
    assert {r["world_size"] for r in found} == {len(expected)}
    assert {r["master_addr"] for r in found} == {expected[0][0]}
    assert {r["address"] for r in found} == {lab.node(expected[0][0]).address}
    assert len({r["master_port"] for r in found}) == 1
    (tmp_path / "plan.yaml").write_text(text)
    planned = make_plan(Cluster.load(tmp_path / "plan.yaml"), JobOptions()).ranks()
    assert [(r["host"], r["local_rank"], r["node_rank"]) for r in found] == [
        (rank.node, rank.local_rank, rank.node_rank) for rank in planned
    ]


def test_dead_rank_ends_the_job_as_failed(live_lab: Lab, run_job: RunJob, tmp_path: Path) -> None:
    script = (
        "import os, sys, time\nif os.environ['SLURM_PROCID'] == '4': sys.exit(3)\ntime.sleep(170)\n"
    )
    job = run_plan(
        live_lab, run_job, tmp_path, (ROOT / "cifar10_example/cluster.yaml").read_text(), script
    )
    assert job.state == "FAILED", "the time limit of 3 minutes would read TIMEOUT"
    assert "srun: error: alpha: task 1: Exited with exit code 3" in job.output
    assert "job script: rank 4 on alpha: Exited with exit code 3\n" in job.output


def test_rank_started_without_srun_fails_at_once(
    live_lab: Lab, run_job: RunJob, tmp_path: Path, python_first: dict[str, str]
) -> None:
    train = ROOT / "synthetic_data_example/train.py"
    job = run_job(
        live_lab, f"#!/bin/bash\nexec python {train} 1 1\n", "--ntasks=2", env=python_first
    )
    assert job.state == "FAILED"
    assert "not inside an srun step" in job.output
    assert "srun python -m ddp_slurm.run" in job.output
