"""The token of a job on a live Slurm: all ranks have it, and nobody else finds it."""

import sys
from pathlib import Path

from ddp_slurm.cluster import Cluster
from ddp_slurm.job.options import JobOptions
from ddp_slurm.lab import Lab
from ddp_slurm.plan import make_plan
from ddp_slurm.render import render_sbatch
from tests.clusters import UNEVEN

from .test_training_jobs import RunJob

LOOK_AROUND = """
import glob, os, subprocess, sys
from pathlib import Path
import torch.distributed as dist
from ddp_slurm.training import init_distributed

def arguments_of(name):
    try:
        return Path(name).read_text(errors="replace")
    except OSError:  # the process has ended meanwhile
        return ""

token = os.environ["DDP_SLURM_TOKEN"]
places = {
    "arguments": "".join(map(arguments_of, glob.glob("/proc/[0-9]*/cmdline"))),
    "job record": subprocess.run(["scontrol", "show", "job", os.environ["SLURM_JOB_ID"]],
                                 capture_output=True, text=True).stdout,
    "script": subprocess.run(["scontrol", "write", "batch_script", os.environ["SLURM_JOB_ID"], "-"],
                             capture_output=True, text=True).stdout,
}
for name, text in places.items():
    assert text and token not in text, name
with init_distributed() as world:
    if world.rank == 0:
        rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
        port = f":{world.env.master_port:04X}"
        print("listens at", [row[1] for row in rows if row[3] == "0A" and row[1].endswith(port)])
    dist.barrier(group=world.control)
    with os.fdopen(os.open(f"token{world.rank}", os.O_CREAT | os.O_WRONLY, 0o600), "w") as file:
        file.write(token)
"""


def test_token_of_a_job_is_in_the_environment_alone(
    live_lab: Lab, tmp_path: Path, run_job: RunJob
) -> None:
    (tmp_path / "task.py").write_text(LOOK_AROUND)
    (tmp_path / "plan.yaml").write_text(UNEVEN)
    options = JobOptions(command=(sys.executable, "task.py"))
    script = render_sbatch(make_plan(Cluster.load(tmp_path / "plan.yaml"), options), tmp_path)
    job = run_job(live_lab, script)
    assert job.state == "COMPLETED", job.output
    tokens = {(tmp_path / f"token{rank}").read_text() for rank in range(7)}
    assert len(tokens) == 1
    token = tokens.pop()
    assert len(token) == 32
    assert token not in job.output
    written = [path for path in tmp_path.rglob("*") if path.is_file()]
    with_token = {path.name for path in written if token in path.read_text(errors="replace")}
    assert with_token == {f"token{rank}" for rank in range(7)}
    assert "listens at ['0100007F" not in job.output
    assert "listens at ['00000000" not in job.output
    assert "listens at ['" in job.output, job.output
