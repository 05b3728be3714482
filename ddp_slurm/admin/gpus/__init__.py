"""GPUs from the outputs of the vendors' tools: nvidia-smi, and AMD's amd-smi or rocm-smi."""

from ddp_slurm.admin.gpus.amd import amd_gpus
from ddp_slurm.admin.gpus.gpu import Gpu, Outputs
from ddp_slurm.admin.gpus.nvidia import (
    nvidia_error,
    nvidia_gpus,
    nvidia_warning,
    undivided_mig_cards,
)
from ddp_slurm.admin.gpus.types import gres_types

__all__ = [
    "Gpu",
    "Outputs",
    "gres_types",
    "nvidia_error",
    "nvidia_warning",
    "parse_gpus",
    "undivided_mig_cards",
]


def parse_gpus(outputs: Outputs) -> tuple[Gpu, ...]:
    """The cards that the tools list, NVIDIA's first, in the tools' order."""
    return (*nvidia_gpus(outputs), *amd_gpus(outputs))
