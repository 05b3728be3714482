"""The job that proves an installation."""

import shlex
from collections.abc import Sequence

from ddp_slurm.cluster import Cluster, Node

_PRINT_RANK = 'echo "rank $SLURM_PROCID on $(uname -n)"'


def first_job(cluster: Cluster, python: str | None = None) -> tuple[str, int]:
    """An srun line that starts a task for each GPU in one step, and the number of tasks.

    Each task prints its rank and host. With ``python``, the interpreter that trains, every card
    computes and all ranks reduce together. Nodes with fewer CPUs than GPUs get a task a CPU.
    """
    command = ["sh", "-c", _PRINT_RANK]
    memory = "64M"
    if python:
        command = [python, "-m", "ddp_slurm.training.proof"]
        memory = "0"  # all of the node's: torch and a context of CUDA take gigabytes
    segments = []
    tasks = 0
    for node in cluster.nodes:
        if node.gpus:
            node_tasks = min(node.gpu_count, node.cpus or node.gpu_count)
            tasks += node_tasks
            segments.append(_segment(node, node_tasks, memory, command))
    return "srun " + " : ".join(segments), tasks


def _segment(node: Node, tasks: int, memory: str, command: Sequence[str]) -> str:
    argv = [
        f"--nodelist={node.name}",
        "--nodes=1",
        f"--ntasks={tasks}",
        f"--gres={node.gres}",
        "--cpus-per-task=1",
        f"--mem={memory}",
        "--time=5",
    ]
    if node.partition:
        argv.append(f"--partition={node.partition}")
    argv += ["--job-name=first_job", *command]
    return shlex.join(argv)
