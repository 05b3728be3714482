"""Which nodes the doctor asks, and how."""

import re
import shutil
from collections.abc import Sequence
from pathlib import Path

from ddp_slurm.admin.install import first_job
from ddp_slurm.ask import TIMED_OUT, Answer, ask
from ddp_slurm.cluster import Cluster, GpuModel, Node
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.slurm_client.commands import ask_slurm, client_environ
from ddp_slurm.slurm_client.records import NodeRecord, read_nodes
from ddp_slurm.ssh.command import RemoteError

SRUN_PATIENCE_SECONDS = 60
"""How long srun waits for a node that is busy."""
PROOF_SECONDS = 300.0
MEMORY_MB = 2048
"""Importing torch takes some 500 MiB, and Slurm ends a job that takes more than it asked for."""
TASK_ENDED = re.compile(r"srun: error: \S+: tasks? [0-9,-]+: ")
"""srun's report of how the command itself ended, such as ``Exited with exit code 1``."""


class DoctorError(DdpSlurmError):
    """No node can be asked."""


def cluster_to_ask(file: Path | None) -> Cluster:
    """The cluster of a file, of ./cluster.yaml, or all nodes of the live Slurm, usable or not.

    Raises DoctorError where there is neither, ClusterError for a file with errors.
    """
    default = Path("cluster.yaml")
    if file is not None or default.exists():
        return Cluster.load(file or default)
    answer = ask_slurm(["scontrol", "show", "node"])
    nodes = read_nodes(answer.out) if answer.status == 0 else []
    if not nodes:
        raise DoctorError(
            "no cluster.yaml here and no Slurm that responds; --cluster FILE names the nodes"
        )
    return Cluster("cluster", tuple(_node(record) for record in nodes))


def _node(record: NodeRecord) -> Node:
    """How to reach it, and its GPUs; the rest only Slurm claims."""
    gpus = (GpuModel(count=record.gpus),) if record.gpus else ()
    return Node(record.name, gpus=gpus, address=record.address)


def prove(cluster: Cluster, python: str) -> Answer:
    """Compute on every card and reduce over all ranks, in one step over all nodes."""
    line, _ = first_job(cluster, python)
    answer = ask(["sh", "-c", line], timeout_seconds=PROOF_SECONDS, environ=client_environ())
    if answer.status == TIMED_OUT:
        message = f"the step over all nodes did not end within {PROOF_SECONDS:g} s"
        return Answer(1, answer.out, message)
    return answer


def run_by_srun(
    node: Node, argv: Sequence[str], *, input: bytes | None = None, timeout_seconds: float = 300.0
) -> Answer:
    """Run a command on a node as a small job with all its GPUs.

    For clusters where users cannot log in to the nodes. Raises RemoteError where Slurm does not
    give the node within a minute, or the command does not end in time.
    """
    if shutil.which("srun") is None:
        raise DoctorError("--via srun: srun is not installed here")
    answer = ask(
        ["srun", f"--immediate={SRUN_PATIENCE_SECONDS}", *_job_options(node), *argv],
        input=input or b"",
        timeout_seconds=timeout_seconds + SRUN_PATIENCE_SECONDS,
        environ=client_environ(),
    )
    if answer.status == TIMED_OUT:
        raise RemoteError(f"{node.name}: {argv[0]} did not end within {timeout_seconds:g} s")
    error = _error_of_slurm(answer.err) if answer.status else ""
    if error:
        requested = f" (requested: {node.gres})" if node.gres else ""
        raise RemoteError(f"{node.name}: {error}{requested}")
    return answer


def _error_of_slurm(messages: str) -> str:
    """srun's last error that is not about the end of the command itself, empty without one."""
    errors = [line for line in messages.splitlines() if line.startswith("srun: error: ")]
    return next((line for line in reversed(errors) if not TASK_ENDED.match(line)), "")


def _job_options(node: Node) -> list[str]:
    options = [
        f"--nodelist={node.name}",
        "--nodes=1",
        "--ntasks=1",
        f"--mem={min(MEMORY_MB, node.memory_mb or MEMORY_MB)}M",
        "--job-name=doctor",
        "--quiet",
    ]
    if node.gres:  # ConstrainDevices hides the cards of others from nvidia-smi
        options.append(f"--gres={node.gres}")
    if node.partition:
        options.append(f"--partition={node.partition}")
    return options
