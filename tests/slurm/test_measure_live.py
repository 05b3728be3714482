"""``ddp-slurm measure`` as a job of live Slurm, and what follows from the file that it writes."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from ddp_slurm.job.speeds import read_speeds
from ddp_slurm.lab import Lab
from tests.clusters import UNEVEN

SECONDS_EACH = {"titan": 0.03, "v100": 0.01}
SCRIPT = f"""\
import os, time, torch
from torch.nn.functional import mse_loss
from ddp_slurm.training import init_distributed

class Sleepy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(1, 1000)

    def forward(self, inputs):
        card = {{"gamma": "titan", "beta": "v100"}}[os.environ["SLURMD_NODENAME"]]
        time.sleep({SECONDS_EACH}[card] * len(inputs))
        return self.layer(inputs)

with init_distributed() as world:
    world.shares(64, Sleepy(), mse_loss, (torch.randn(64, 1), torch.randn(64, 1000)))
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "cluster.yaml").write_text(UNEVEN)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def test_measure_submits_a_job_and_plan_predicts_by_its_file(live_lab: Lab, folder: Path) -> None:
    def ddp_slurm(*words: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(
            [sys.executable, "-m", "ddp_slurm.cli", *words],
            cwd=folder,
            env={**os.environ, **live_lab.environ, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=150,
        )

    nodes = ("--nodes", "gamma,beta")
    command = ("--", sys.executable, "train.py")
    done = ddp_slurm("measure", "--backend", "sbatch", *nodes, *command)
    assert done.returncode == 0, done.stderr
    assert "speeds.yaml: titan, v100; 2 links." in done.stderr
    speeds = read_speeds(folder / "speeds.yaml")
    for card, each in SECONDS_EACH.items():
        assert each * 8 <= speeds.entries[card].curve.seconds(8) < 2 * each * 8
    assert speeds.measured is not None
    network = speeds.measured.network()
    assert network is not None
    assert set(network.links) == {frozenset(["beta"]), frozenset(["beta", "gamma"])}
    batch = ("--global-batch-size", "70", "--balance", "speeds.yaml")
    planned = ddp_slurm("plan", *nodes, *batch)
    assert planned.returncode == 0, planned.stderr
    assert re.search(r" beta .* (29|30|31) (29|30|31) ", planned.stdout), planned.stdout
