"""The start and the end of a distributed training, and what happens when a rank fails."""

from ddp_slurm.training.process_group.world import World, init_distributed

__all__ = ["World", "init_distributed"]
