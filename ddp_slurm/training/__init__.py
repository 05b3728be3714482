"""Data-parallel training that is exactly right on uneven ranks; every part is usable alone in a loop of your own."""

from ddp_slurm.balance import BalanceError, equal_shares, split_batch
from ddp_slurm.training.process_group.world import World, init_distributed
from ddp_slurm.training.snapshot import Snapshot, SnapshotError
from ddp_slurm.training.trainer.trainer import Trainer
from ddp_slurm.training.uneven.batchnorm import BatchNormStatistics
from ddp_slurm.training.uneven.gradients import loss_weight, no_sample_loss
from ddp_slurm.training.uneven.sampler import BalancedIterable, BalancedSampler

__all__ = [
    "BalanceError",
    "BalancedIterable",
    "BalancedSampler",
    "BatchNormStatistics",
    "Snapshot",
    "SnapshotError",
    "Trainer",
    "World",
    "equal_shares",
    "init_distributed",
    "loss_weight",
    "no_sample_loss",
    "split_batch",
]
