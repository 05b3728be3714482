"""A training job on a live lab that something happens to, and what is seen of it afterwards."""

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ddp_slurm.lab import Lab, network
from ddp_slurm.slurm_client.states import WAITS_FOR_NODE
from tests.conftest import without_launcher
from tests.waiting import wait_until

TRAIN = Path(__file__).parents[2] / "synthetic_data_example" / "train.py"
CLUSTER = """\
name: faults
nodes:
  - {name: gamma, gpus: {type: titan, count: 1}, cpus: 2, memory: 2G}
  - {name: beta, gpus: {type: v100, count: 1}, cpus: 2, memory: 2G}
  - {name: alpha, gpus: {type: a100, count: 1}, cpus: 2, memory: 2G}
"""
"""Three components of one rank each: a first, a middle and a last one."""
NODES = ("gamma", "beta", "alpha")
"""The host of each rank."""
EPOCHS = 80
STEPS_AN_EPOCH = 8
FINAL = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "CANNOT_START", "HELD")
"""States of a job that will not change by themselves."""
POLL_SECONDS = 3
AWAY_SECONDS = 60
"""A node for which a job waits so long stays away."""

# Trains with a pause in each step. The rank $1 ends in the way $2, once, after the first step at
# which the file "fault" exists. $2 may also be "workers": all ranks read their data by such.
FAULTY = """
import functools, os, runpy, sys, time
from pathlib import Path
from ddp_slurm import training
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import TensorDataset

rank, what = sys.argv[1:3]
sys.argv = sys.argv[3:]
trigger = Path("fault")


def after_step(*_):
    time.sleep(0.02)
    if os.environ["SLURM_PROCID"] != rank or not trigger.exists():
        return
    trigger.unlink()
    if what == "exception":
        raise RuntimeError("planted")
    sys.exit(int(what))


def read_by_workers(inputs, targets, device):
    return training.DatasetSource(TensorDataset(inputs, targets), device, workers=1)


if what == "workers":
    training.ResidentTensors = read_by_workers
# A collective may take 40 s instead of ten minutes.
training.init_distributed = functools.partial(training.init_distributed, timeout_seconds=40)
register_optimizer_step_post_hook(after_step)
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass
class FaultRun:
    """One job on a lab. Its folder has the log, the snapshot and the metrics."""

    lab: Lab
    folder: Path
    python: str = sys.executable
    path: str = os.environ["PATH"]
    """With the clients of the lab's Slurm release first."""
    job_id: str = ""

    def cli(self, *words: str, patience: float = 300) -> "subprocess.CompletedProcess[str]":
        """``ddp-slurm WORDS`` in the folder, with the lab's Slurm."""
        command = [sys.executable, "-m", "ddp_slurm.cli", *words]
        environ = {**without_launcher(os.environ), **self.lab.environ, "PATH": self.path}
        settings = {"capture_output": True, "text": True, "timeout": patience}
        return subprocess.run(command, cwd=self.folder, env=environ, **settings)

    def slurm(self, *argv: str) -> "subprocess.CompletedProcess[str]":
        """A client of the lab's Slurm, such as sbatch."""
        environ = {**without_launcher(os.environ), **self.lab.environ, "PATH": self.path}
        return subprocess.run(argv, cwd=self.folder, env=environ, capture_output=True, text=True)

    def submit(
        self, *options: str, fault: Sequence[str] = (), epochs: int = EPOCHS
    ) -> "subprocess.CompletedProcess[str]":
        """Submit the training; ``fault``: the arguments of FAULTY, a rank and what it does."""
        (self.folder / "cluster.yaml").write_text(CLUSTER)
        (self.folder / "faulty.py").write_text(FAULTY)
        train = ["faulty.py", *(fault or ("none", "")), str(TRAIN), str(epochs), "1"]
        train += ["--samples", "2048", "--global-batch-size", "256", "--metrics", "metrics.jsonl"]
        fixed = ["--backend", "sbatch", "--python", self.python, "--output", "log-%j.out"]
        done = self.cli("submit", "--time", "10", *fixed, *options, "--", "python", *train)
        self.job_id = done.stdout.strip()
        return done

    def log(self) -> str:
        files = sorted(self.folder.glob("log-*.out"))
        return "".join(file.read_text(errors="replace") for file in files)

    def state(self) -> str:
        done = self.cli("status", self.job_id, "--json")
        if done.returncode:
            return f"status: {done.stderr.strip()}"
        return str(json.loads(done.stdout)["state"])

    def restarts(self) -> int:
        done = self.cli("status", self.job_id, "--json")
        components = json.loads(done.stdout)["components"] if done.returncode == 0 else []
        return max((component["restarts"] or 0 for component in components), default=0)

    def epochs(self) -> list[int]:
        """The epochs that rank 0 reported, in the order of the log."""
        return [int(number) for number in re.findall(r"epoch (\d+)/\d+ +evaluation", self.log())]

    def wait_for_training(self, epoch: int = 3) -> None:
        """Until some epochs are done, and then for a random moment."""
        ending = re.compile("srun: error|exit status")
        wait_until(
            lambda: epoch in self.epochs() or ending.search(self.log()),
            lambda: f"epoch {epoch} of job {self.job_id}, {self.state()}:\n{self.log()}",
            seconds=240,
        )
        assert epoch in self.epochs(), self.log()
        time.sleep(random.uniform(0, 1.5))

    def rank_pids(self, rank: int) -> list[int]:
        """The Python processes of a rank, those of the training itself."""
        node = self.lab.node(NODES[rank])
        return [pid for pid in network.processes(node.netns) if _is_training(pid)]

    def signal_rank(self, rank: int, number: int) -> None:
        pids = self.rank_pids(rank)
        assert pids, f"rank {rank} is not running: {self.log()}"
        for pid in pids:
            os.kill(pid, number)

    def wait_for_end(self, seconds: float = 400) -> str:
        """The final state; the last state seen, with ``after ... s``, where it does not end."""
        began = changed = time.monotonic()
        last, state = "", self.state()
        while state not in FINAL and time.monotonic() < began + seconds:
            if state != last:
                last, changed = state, time.monotonic()
            if state == WAITS_FOR_NODE and time.monotonic() > changed + AWAY_SECONDS:
                return state
            time.sleep(POLL_SECONDS)
            state = self.state()
        return state if state in FINAL else f"{state} after {seconds:g} s"

    def ranks_left_over(self) -> list[str]:
        """Ranks of the job on any node, 10 s after its end."""
        give_up = time.monotonic() + 10
        while time.monotonic() < give_up and any(map(self.rank_pids, range(len(NODES)))):
            time.sleep(0.2)
        return [f"rank {rank}" for rank in range(len(NODES)) if self.rank_pids(rank)]


def files_left_over(folder: Path) -> list[str]:
    """Temporary files of a job."""
    return [path.name for path in folder.glob(".*") if path.suffix != ".lock"]


def _is_training(pid: int) -> bool:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    is_python = os.path.basename(words[0]).startswith(b"python")
    return is_python and os.fsencode(TRAIN) in words and state != "Z"


@contextmanager
def stopped(lab: Lab, program: str, seconds: float) -> Iterator[None]:
    """SIGSTOP a daemon of the controller for at least some seconds, then SIGCONT."""
    pids = [pid for pid in network.processes(lab.switch) if _program(pid) == program]
    assert pids, f"{program} is not running"
    until = time.monotonic() + seconds
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    try:
        yield
        time.sleep(max(0.0, until - time.monotonic()))
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGCONT)


def _program(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text(errors="replace").split("\0")
    except OSError:
        return ""
    return os.path.basename(words[0])


def final_losses(folder: Path) -> list[float]:
    """The evaluation losses of the last whole sequence of epochs, at full precision."""
    losses: dict[int, float] = {}
    for line in (folder / "metrics.jsonl").read_text().splitlines():
        row = json.loads(line)
        if row["kind"] == "evaluation":
            losses[row["epoch"]] = row["loss"]
    return [losses[epoch] for epoch in sorted(losses)]
