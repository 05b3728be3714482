"""Options of submit that change what Slurm is asked for, on live daemons."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_slurm.lab import Lab
from tests.slurm.conftest import wait_for_node

CLUSTER = """\
name: lab
nodes:
  - {name: gamma, gpus: {type: titan, count: 1}, cpus: 2, memory: 4G}
  - {name: beta, gpus: {type: v100, count: 1}, cpus: 2, memory: 4G}
  - {name: alpha, gpus: {type: a100, count: 2}, cpus: 4, memory: 8G}
"""
TASK = 'echo "of $DDP_SLURM_WORLD_SIZE, shares $DDP_SLURM_SHARES, memory ${SLURM_MEM_PER_CPU:-}"'

Submit = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def lab(make_lab: Callable[..., Lab], tmp_path: Path) -> Lab:
    (tmp_path / "cluster.yaml").write_text(CLUSTER)
    return make_lab(CLUSTER)


@pytest.fixture
def submit(lab: Lab, tmp_path: Path) -> Submit:
    """Runs ``ddp-slurm submit --follow OPTIONS -- sh -c TASK`` to the end of its job."""

    def run(*options: str) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "ddp_slurm.submit", "--follow", "--time", "5", *options]
        return subprocess.run(
            [*command, "--", "sh", "-c", TASK],
            cwd=tmp_path,
            env={**os.environ, **lab.environ},
            capture_output=True,
            text=True,
            timeout=120,
        )

    return run


def test_shrink_runs_on_the_nodes_that_are_left(lab: Lab, submit: Submit) -> None:
    lab.kill("beta")
    wait_for_node(lab, "beta", "DOWN")
    done = submit("--shrink", "--global-batch-size", "60")
    assert done.returncode == 0, done.stderr
    assert "left out: beta: its state is DOWN" in done.stderr
    assert done.stderr.count(": of 3, shares 20(x3), memory") == 3, done.stderr


def test_memory_for_each_cpu_reaches_the_ranks(submit: Submit) -> None:
    done = submit("--memory", "512M/cpu")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(", memory 512") == 4, done.stderr
