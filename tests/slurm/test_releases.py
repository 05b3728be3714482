"""Generated configuration, rendered jobs and training on live daemons of four Slurm releases.

``make test`` runs two of them, ``make test-releases`` (DDP_SLURM_TEST_RELEASES=all) runs all.
"""

import os
import re
import shlex
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest

from ddp_slurm.job.options import JobOptions
from ddp_slurm.lab import Lab, daemons
from ddp_slurm.plan import make_plan
from ddp_slurm.render import render_sbatch
from tests.slurm.conftest import load_cluster

CLUSTER = """\
name: lab
nodes:
  - {name: gamma, gpus: {type: titan, count: 1}, cpus: 8, memory: 30G}
  - name: beta
    gpus: {type: v100, count: 2}
    cpus: 16
    memory: 120G
    features: [cc70, vram32gb]
  - {name: alpha, gpus: {type: a100, count: 4}, cpus: 32, memory: 240G, partition: big}
"""
NODES = ("gamma", "beta", "alpha")
MORE_GPUS_THAN_CPUS = "  - {name: delta, gpus: {type: p106, count: 3}, cpus: 2, memory: 8G}\n"
EXAMPLE = Path(__file__).parents[2] / "cifar10_example"
pytestmark = pytest.mark.timeout(900)  # a release's root may have to be made first


@pytest.fixture(scope="module")
def release_lab(
    release: tuple[str, Path | None], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Lab]:
    """gamma 1, beta 2, alpha 4 and delta 3 GPUs under each release of Slurm."""
    cluster = load_cluster(CLUSTER + MORE_GPUS_THAN_CPUS, tmp_path_factory.mktemp("release"))
    name = f"test-{os.getpid()}-{release[0].replace('.', '')}"
    with Lab.up(cluster, name, slurm_root=release[1]) as lab:
        assert daemons.slurm_version(lab).startswith(release[0])
        yield lab


@pytest.fixture
def python(release_lab: Lab, tmp_path: Path) -> str:
    """This interpreter, also for ranks in another system's root, which lacks its libraries."""
    if release_lab.slurm_root is None:
        return sys.executable
    # Entering the mount namespace that it is in brings a process out of the chroot.
    leave = 'nsenter --mount=/proc/self/ns/mnt -- env -C "$PWD"'
    wrapper = tmp_path / "python"
    wrapper.write_text(f'#!/bin/sh\nexec {leave} {shlex.quote(sys.executable)} "$@"\n')
    wrapper.chmod(0o755)
    return str(wrapper)


def script(tmp_path: Path, python: str, *command: str, nodes: tuple[str, ...] = NODES) -> str:
    options = JobOptions(
        command=command, python=python, time="5", env={"OMP_NUM_THREADS": "1"}, nodes=nodes
    )
    cluster = load_cluster(CLUSTER + MORE_GPUS_THAN_CPUS, tmp_path)
    return render_sbatch(make_plan(cluster, options))


def test_the_daemons_do_not_complain_about_the_files(
    release_lab: Lab, complaints: Callable[[Path], list[str]]
) -> None:
    assert set(release_lab.status().values()) == {"IDLE"}
    assert complaints(release_lab.folder / "log") == []


def test_client_runs_in_a_folder_that_the_root_lacks(release_lab: Lab) -> None:
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        done = release_lab.run(["pwd"], cwd=folder, capture_output=True, text=True)
        expected = folder if release_lab.slurm_root is None else "/"
    assert done.stdout.strip() == expected, done.stderr


RANK = """
import os, socket
names = "RANK LOCAL_RANK WORLD_SIZE LOCAL_WORLD_SIZE NODE_RANK MASTER_ADDR CUDA_VISIBLE_DEVICES"
print("seen:", socket.gethostname(), *(os.environ.get(n) for n in names.split()), flush=True)
"""


def test_a_het_job_is_one_world(
    release_lab: Lab, tmp_path: Path, python: str, run_job: Callable[..., Any]
) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    command = ["python", "-m", "ddp_slurm.run", str(tmp_path / "rank.py")]
    job = run_job(release_lab, script(tmp_path, python, *command), "--time=8")
    assert job.state == "COMPLETED", job.output
    seen = re.findall(r"seen: (.*)", job.output)
    assert sorted(seen, key=lambda line: int(line.split()[1])) == [
        "gamma 0 0 7 1 0 gamma 0",
        *(f"beta {1 + n} {n} 7 2 1 gamma 0,1" for n in range(2)),
        *(f"alpha {3 + n} {n} 7 4 2 gamma 0,1,2,3" for n in range(4)),
    ]


def test_ranks_share_the_cpus_of_a_node_with_fewer(
    release_lab: Lab, tmp_path: Path, python: str, run_job: Callable[..., Any]
) -> None:
    (tmp_path / "rank.py").write_text(RANK)
    command = ["python", "-m", "ddp_slurm.run", str(tmp_path / "rank.py")]
    text = script(tmp_path, python, *command, nodes=("delta", "gamma"))
    job = run_job(release_lab, text, "--time=8")
    assert job.state == "COMPLETED", job.output
    seen = re.findall(r"seen: (.*)", job.output)
    assert sorted(seen, key=lambda line: int(line.split()[1])) == [
        *(f"delta {n} {n} 4 3 0 delta 0,1,2" for n in range(3)),
        "gamma 3 0 4 1 1 delta 0",
    ]


def test_the_cifar10_example(
    release_lab: Lab, tmp_path: Path, python: str, run_job: Callable[..., Any]
) -> None:
    if release_lab.slurm_root is None:
        pytest.skip("test_training_jobs.py runs it on the Slurm of this machine")
    random = numpy.random.default_rng(0)
    archive = {}
    for split in ("train", "test"):
        archive[f"{split}_images"] = random.integers(0, 256, (56, 32, 32, 3), dtype=numpy.uint8)
        archive[f"{split}_labels"] = random.integers(0, 10, 56, dtype=numpy.uint8)
    data = tmp_path / "cifar10.npz"
    numpy.savez(data, **archive)
    options = ["--data", str(data), "--batch-size", "4"]
    command = [str(EXAMPLE / "train.py"), "1", "1", *options]
    job = run_job(release_lab, script(tmp_path, python, *command), "--time=8")
    assert job.state == "COMPLETED", job.output
    assert re.search(r"finished: step 2", job.output)
