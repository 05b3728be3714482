"""The job that proves an installation."""

import shlex

from ddp_slurm.cluster import Cluster, Node

_PRINT_RANK = 'echo "rank $SLURM_PROCID on $(uname -n)"'


def first_job(cluster: Cluster) -> tuple[str, int]:
    """An srun line that starts a task for each GPU in one step, and the number of tasks.

    Each task prints its rank and host. Nodes with fewer CPUs than GPUs get a task a CPU.
    """
    segments = []
    tasks = 0
    for node in cluster.nodes:
        if node.gpus:
            node_tasks = min(node.gpu_count, node.cpus or node.gpu_count)
            tasks += node_tasks
            segments.append(_segment(node, node_tasks))
    return "srun " + " : ".join(segments), tasks


def _segment(node: Node, tasks: int) -> str:
    argv = [
        f"--nodelist={node.name}",
        "--nodes=1",
        f"--ntasks={tasks}",
        f"--gres={node.gres}",
        "--cpus-per-task=1",
        "--mem=64M",
        "--time=5",
    ]
    if node.partition:
        argv.append(f"--partition={node.partition}")
    argv += ["--job-name=first_job", "sh", "-c", _PRINT_RANK]
    return shlex.join(argv)
