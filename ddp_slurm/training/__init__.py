"""Data-parallel training that is exactly right on uneven ranks.

Every part can be used by itself, in your own loop.
"""

from ddp_slurm.balance import BalanceError, equal_shares, split_batch
from ddp_slurm.training.data import DatasetSource, ResidentTensors, Source
from ddp_slurm.training.images import ResidentImages, StreamedImages
from ddp_slurm.training.process_group.joining import init_distributed
from ddp_slurm.training.process_group.world import World
from ddp_slurm.training.snapshot import Snapshot, SnapshotError
from ddp_slurm.training.trainer import Result, Trainer, TrainerConfig
from ddp_slurm.training.uneven.batchnorm import BatchNormStatistics
from ddp_slurm.training.uneven.gradients import loss_weight, no_sample_loss, wrap_model
from ddp_slurm.training.uneven.sampler import BalancedIterable, BalancedSampler
from ddp_slurm.training.uneven.verify import GradientCheck, verify
from ddp_slurm.training.uneven.weighted_loss import weighted_loss_factor

__all__ = [
    "BalanceError",
    "BalancedIterable",
    "BalancedSampler",
    "BatchNormStatistics",
    "DatasetSource",
    "GradientCheck",
    "ResidentImages",
    "ResidentTensors",
    "Result",
    "Snapshot",
    "SnapshotError",
    "Source",
    "StreamedImages",
    "Trainer",
    "TrainerConfig",
    "World",
    "equal_shares",
    "init_distributed",
    "loss_weight",
    "no_sample_loss",
    "split_batch",
    "verify",
    "weighted_loss_factor",
    "wrap_model",
]
