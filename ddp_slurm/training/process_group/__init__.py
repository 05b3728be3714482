"""The start and the end of a distributed training, and what happens when a rank fails."""

from ddp_slurm.training.process_group.joining import init_distributed
from ddp_slurm.training.process_group.world import World

__all__ = ["World", "init_distributed"]
