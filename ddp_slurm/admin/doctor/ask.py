"""Whom the doctor asks, and by which way."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from ddp_slurm.admin.doctor.snapshot import parse_slurm_nodes
from ddp_slurm.ask import Answer
from ddp_slurm.cluster import Cluster, Node
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.slurm_client.commands import clean_environ
from ddp_slurm.ssh.command import RemoteError
from ddp_slurm.ssh.run import Runner, run

SRUN_PATIENCE_SECONDS = 60
"""How long srun waits for a node that is busy."""
MEMORY_MB = 2048
"""importing torch takes some 500 MiB, and Slurm ends a job that takes more than it asked for."""


class DoctorError(DdpSlurmError):
    """There is nobody to ask."""


def cluster_to_ask(file: Path | None) -> Cluster:
    """The cluster of a file, of ./cluster.yaml, or all nodes of the live Slurm, also those that are down.

    Raises DoctorError where there is neither, ClusterError for a file with faults.
    """
    if file is not None or Path("cluster.yaml").exists():
        return Cluster.load(file or Path("cluster.yaml"))
    try:
        done = subprocess.run(
            ["scontrol", "-o", "show", "node"],
            capture_output=True,
            text=True,
            timeout=60,
            env=clean_environ(os.environ),
            check=False,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        done = None
    nodes = parse_slurm_nodes(done.stdout) if done is not None and done.returncode == 0 else []
    if not nodes:
        raise DoctorError(
            "no cluster.yaml here and no Slurm that answers; --cluster FILE names the nodes"
        )
    return Cluster("cluster", tuple(seen.as_node() for seen in nodes))


def runner_of(via: str) -> Runner:
    """``ssh`` or ``srun``. Raises DoctorError for another word."""
    runners: dict[str, Runner] = {"ssh": run, "srun": run_by_srun}
    if via not in runners:
        raise DoctorError(f"--via {via!r} is not known; ssh and srun are")
    return runners[via]


def run_by_srun(
    node: Node, argv: Sequence[str], *, input: bytes | None = None, timeout_seconds: float = 300.0
) -> Answer:
    """Run a command on a node as a small job with all its GPUs; for clusters whose nodes users cannot log in to.

    Raises RemoteError where Slurm does not give the node within a minute, or the command is not done in time.
    """
    memory = f"--mem={min(MEMORY_MB, node.memory_mb or MEMORY_MB)}M"
    options = [
        f"--nodelist={node.name}",
        "--nodes=1",
        "--ntasks=1",
        memory,
        "--job-name=doctor",
        "--quiet",
    ]
    if node.gres:  # ConstrainDevices hides the cards of others from nvidia-smi
        options.append(f"--gres={node.gres}")
    if node.partition:
        options.append(f"--partition={node.partition}")
    command = ["srun", f"--immediate={SRUN_PATIENCE_SECONDS}", *options, *argv]
    try:
        done = subprocess.run(
            command,
            input=input or b"",
            capture_output=True,
            timeout=timeout_seconds + SRUN_PATIENCE_SECONDS,
            env=clean_environ(os.environ),
            check=False,
        )
    except FileNotFoundError:
        raise DoctorError("--via srun: srun is not installed here") from None
    except subprocess.TimeoutExpired:
        raise RemoteError(
            f"{node.name}: {argv[0]} was not done after {timeout_seconds:g} s"
        ) from None
    stdout, stderr = (stream.decode(errors="replace") for stream in (done.stdout, done.stderr))
    if "Unable to allocate resources" in stderr or ("srun: error" in stderr and not stdout):
        wanted = f" (asked for {node.gres})" if node.gres else ""
        raise RemoteError(f"{node.name}: {stderr.strip().splitlines()[-1]}{wanted}")
    return Answer(done.returncode, stdout, stderr)
