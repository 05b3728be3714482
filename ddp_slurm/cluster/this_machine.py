"""A Cluster of this machine alone, for runs of the local backend without a cluster.yaml."""

import os
import socket
from itertools import takewhile

from ddp_slurm.ask import ask
from ddp_slurm.cluster.machines import Cluster, ClusterError, GpuModel, Node
from ddp_slurm.schema.fields import MAX_GPUS_OF_A_NODE


def visible_gpus() -> tuple[str, ...]:
    """The GPUs of this machine as CUDA_VISIBLE_DEVICES would name them; no torch is loaded for that."""
    if "CUDA_VISIBLE_DEVICES" in os.environ:
        named = [part for part in os.environ["CUDA_VISIBLE_DEVICES"].split(",") if part]
        return tuple(
            takewhile(lambda part: not part.strip().startswith("-"), named)
        )  # CUDA stops at -1
    answer = ask(["nvidia-smi", "--list-gpus"])
    listing = "" if answer.status else answer.out
    return tuple(
        str(index) for index in range(sum(line.startswith("GPU ") for line in listing.splitlines()))
    )


def this_machine(gpus: int | None) -> Cluster:
    """A cluster of this machine alone: its GPUs; without any, ``gpus`` ranks on the CPU (default one).

    Raises ClusterError.
    """
    count = len(visible_gpus()) or gpus or 1
    if count > MAX_GPUS_OF_A_NODE:
        raise ClusterError(
            f"--gpus: {count} ranks are too many for one machine; {MAX_GPUS_OF_A_NODE} at most are accepted"
        )
    return Cluster(
        "local", (Node(socket.gethostname(), (GpuModel(count=count),), cpus=os.cpu_count()),)
    )
