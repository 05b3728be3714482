"""A Cluster of this machine alone, for runs of the local backend without a cluster.yaml."""

import os
import socket
from itertools import takewhile

from ddp_slurm.ask import ask
from ddp_slurm.cluster.machines import Cluster, ClusterError, GpuModel, Node
from ddp_slurm.schema.fields import MAX_GPUS_OF_A_NODE


def visible_gpus() -> tuple[str, ...]:
    """The GPUs of this machine as CUDA_VISIBLE_DEVICES would name them; does not load torch."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        named = [part for part in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if part]
        return tuple(takewhile(_is_device, named))
    answer = ask(["nvidia-smi", "--list-gpus"])
    if answer.status:
        return ()
    count = sum(line.startswith("GPU ") for line in answer.out.splitlines())
    return tuple(str(index) for index in range(count))


def _is_device(text: str) -> bool:
    """CUDA ignores a negative number and all devices after it."""
    return not text.strip().startswith("-")


def this_machine(gpus: int | None) -> Cluster:
    """A cluster of this machine: its GPUs; without any, ``gpus`` ranks (default 1) on the CPU.

    Raises ClusterError.
    """
    count = len(visible_gpus()) or gpus or 1
    if count > MAX_GPUS_OF_A_NODE:
        raise ClusterError(
            f"--gpus: {count} ranks are too many for one machine; "
            f"{MAX_GPUS_OF_A_NODE} at most are accepted"
        )
    node = Node(socket.gethostname(), (GpuModel(count=count),), cpus=os.cpu_count())
    return Cluster("local", (node,))
