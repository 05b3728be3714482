"""The health check on a live node: a missing GPU drains it, its return resumes it."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from ddp_slurm.lab import Lab

Check = Callable[[str, str], tuple[bool, str]]
SCRIPT = Path(__file__).parents[2] / "cluster_setup" / "gpu_check.sh"
CLUSTER = """\
nodes:
  - {name: alpha, gpus: [{type: a100, count: 2}, {type: titan, count: 1}], cpus: 8, memory: 8G}
  - {name: beta, gpus: 2, cpus: 8, memory: 8G}
  - {name: login, gpus: 0, cpus: 8, memory: 8G}
"""


@pytest.fixture
def check(make_lab: Callable[..., Lab], tmp_path: Path) -> Check:
    """``check(node, nvidia_smi)``: run it with that nvidia-smi; is the node drained, and why."""
    lab = make_lab(CLUSTER)
    lab.run(["scontrol", "update", "NodeName=beta", "State=DRAIN", "Reason=fan"], check=True)
    free_text = "Comment=not in State=DOWN+DRAIN, Gres=gpu:9"
    lab.run(["scontrol", "update", "NodeName=alpha", free_text], check=True)
    tool = tmp_path / "bin" / "nvidia-smi"
    tool.parent.mkdir()

    def run(node: str, nvidia_smi: str) -> tuple[bool, str]:
        tool.write_text(f"#!/bin/sh\n{nvidia_smi}\n")
        tool.chmod(0o755)
        lab.exec(
            node,
            [SCRIPT],
            env={**os.environ, "PATH": f"{tool.parent}:{os.environ['PATH']}"},
            check=True,
        )
        shown = lab.run(
            ["scontrol", "-o", "show", "node", node], capture_output=True, text=True, check=True
        ).stdout
        state = shown.partition(" State=")[2].partition(" ")[0]
        return "DRAIN" in state, shown.partition(" Reason=")[2].partition(" [")[0]

    return run


def gpus(count: int) -> str:
    """An nvidia-smi that lists so many cards, and knows no other query."""
    lines = [f"echo 'GPU {n}: NVIDIA A100 (UUID: GPU-{n})'" for n in range(count)]
    return "\n".join(["[ $1 = --list-gpus ] || exit 2", *lines])


def test_gpu_check_drains_and_resumes(check: Check) -> None:
    assert check("alpha", gpus(3)) == (False, "")
    lost = (True, "gpu_check: 2 of 3 GPUs respond")
    assert check("alpha", gpus(2)) == lost
    assert check("alpha", "echo 'Unable to determine the device handle'; exit 255") == lost, (
        "the first reason stays"
    )
    assert check("alpha", gpus(3)) == (False, "")
    assert check("beta", gpus(1)) == (True, "fan"), "the reason of an administrator stays"
    assert check("beta", gpus(2)) == (True, "fan")
    assert check("login", "exit 9") == (False, ""), "no GPUs are configured here"
