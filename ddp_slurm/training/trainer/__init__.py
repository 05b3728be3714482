"""A training loop for your own models, and what the examples use."""

from ddp_slurm.training.trainer.config import TrainerConfig
from ddp_slurm.training.trainer.trainer import Result, Trainer

__all__ = ["Result", "Trainer", "TrainerConfig"]
