"""torchrun on machines without Slurm, over a real sshd on each."""

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from .conftest import Hosts

MakeHosts = Callable[..., Hosts]
TRAIN = str(Path(__file__).parents[2] / "synthetic_data_example" / "train.py")


def submit(hosts: Hosts, cluster: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "ddp_slurm.submit", "--backend", "torchrun", "--cluster", str(cluster), *words]


@pytest.mark.parametrize("gpus", [{"gamma": 1, "beta": 2}, {"alpha": 4, "beta": 2, "gamma": 1}])
def test_uneven_machines_train_to_the_end(make_hosts: MakeHosts, tmp_path: Path, gpus: dict[str, int]) -> None:
    hosts = make_hosts(*sorted(gpus))
    command = submit(
        hosts, hosts.cluster_yaml(gpus), "--global-batch-size", "64", "--", "python", TRAIN, "1", "1", "--samples", "256"
    )
    done = subprocess.run(command, env=hosts.environ, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "[" + next(iter(gpus)) + "]" in done.stdout
    assert "finished: step" in done.stdout
