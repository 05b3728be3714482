"""Programs that record how they were called, and words that break what is not quoted."""

import json
import os
import subprocess
import sys
from pathlib import Path

from ddp_slurm.cluster import Cluster, GpuModel, Node, Ssh
from ddp_slurm.job.options import JobOptions
from ddp_slurm.plan import Plan, make_plan
from ddp_slurm.render import render_sbatch

HOSTILE = [
    "a b",
    "it's",
    'say "x"',
    "$HOME",
    "*",
    "a;b&c|d",
    "back\\slash",
    "ü 世界",
    "--flag",
    "# no comment",
    "!x",
    "~",
    "=x",
    "",
    "{a,b}",
    "<(x)",
    "%h",
]
WORDS = [*HOSTILE, "$(touch made)", "`touch made`"]
VALUES = {f"VALUE{index}": word for index, word in enumerate(HOSTILE)}
ENV = [f"{name}={value}" for name, value in VALUES.items()]
CLUSTER = Cluster(
    "boxes",
    (
        Node("gamma", (GpuModel(count=1),), address="192.0.2.1", interface="eno1"),
        Node(
            "beta",
            (GpuModel(count=2),),
            address="192.0.2.2",
            ssh=Ssh(user="me", port=2222),
            env=(("NODE", "be ta"),),
        ),
    ),
)

RECORDER = """#!{python}
import json, os, sys
program = os.path.basename(sys.argv[0])
with open({log!r}, "a") as log:
    log.write(json.dumps([program, sys.argv[1:], dict(os.environ), os.getcwd()]) + "\\n")
"""


def plan_of(**options: object) -> Plan:
    return make_plan(CLUSTER, JobOptions.read({"command": ["python", "t.py"], **options}))


class Stubs:
    """Programs that only record how they were called."""

    def __init__(self, folder: Path) -> None:
        self.bin, self.log = folder / "stubs", folder / "calls"
        self.bin.mkdir()
        self.environ = {**os.environ, "PATH": f"{self.bin}:{os.environ['PATH']}"}

    def add(self, name: str) -> str:
        file = self.bin / name
        file.write_text(RECORDER.format(python=sys.executable, log=str(self.log)))
        file.chmod(0o755)
        return str(file)

    def calls(self) -> list[tuple[str, list[str], dict[str, str], str]]:
        return (
            [json.loads(line) for line in self.log.read_text().splitlines()]
            if self.log.exists()
            else []
        )


def bash(line: str, stubs: Stubs, folder: Path) -> "subprocess.CompletedProcess[str]":
    return subprocess.run(
        ["bash", "-c", line], env=stubs.environ, cwd=folder, capture_output=True, text=True
    )


JOB = {"SLURM_JOB_ID": "7", "SLURM_HET_SIZE": "2", "SLURMD_NODENAME": "gamma", "SLURM_NODEID": "1"}


def segments(plan: Plan, stubs: Stubs, folder: Path) -> list[list[str]]:
    """The words of each component's segment that the job script gives to srun."""
    stubs.add("srun")
    done = subprocess.run(
        ["bash", "-s"],
        input=render_sbatch(plan),
        env={**stubs.environ, **JOB},
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    # Another step may begin first: the one that watches the first node.
    words = next(argv for _, argv, _, _ in stubs.calls() if ":" in argv)
    colon = words.index(":")
    return [words[:colon], words[colon + 1 :]]
