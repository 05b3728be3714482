"""The training loop of the examples, for your own models too."""

from ddp_slurm.training.trainer.trainer import Result, Trainer

__all__ = ["Result", "Trainer"]
