"""Data-parallel training that is exactly right on uneven ranks; every part is usable alone in a loop of your own."""

from ..balance import BalanceError, equal_shares, split_batch
from .batchnorm import BatchNormStatistics
from .gradients import loss_weight, no_sample_loss
from .process_group import World, init_distributed
from .sampler import BalancedIterable, BalancedSampler
from .snapshot import Snapshot, SnapshotError
from .trainer import Trainer

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
