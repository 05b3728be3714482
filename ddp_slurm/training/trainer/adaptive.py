"""A Trainer's shares, changed between two steps when its ranks' speeds have changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from torch import nn

from ddp_slurm.comm import EXACT
from ddp_slurm.console import show
from ddp_slurm.curve import Curve
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.job_env import ADAPTIVE, JobEnv
from ddp_slurm.training.adaptive.follow import Change, Follower
from ddp_slurm.training.process_group import World
from ddp_slurm.training.trainer.config import TrainerConfig
from ddp_slurm.training.uneven.gradients import has_sync_batchnorm

if TYPE_CHECKING:
    from ddp_slurm.training.trainer import Trainer


def adapts(world: World, config: TrainerConfig) -> bool:
    """Whether the shares follow the speeds: as the job or the configuration asks."""
    job = JobEnv.from_environ()
    is_asked = config.adapt_shares or job.balance == ADAPTIVE
    return is_asked and world.world_size > 1 and job.measure_file is None


def check_adaptive(model: nn.Module) -> None:
    """Raises DdpSlurmError for what does not show a rank's speed, or needs fixed shares."""
    comm = JobEnv.from_environ().comm or EXACT
    if comm.kind == "local" or comm.allows == "local":
        raise DdpSlurmError(
            f"--comm {comm} weights the ranks' parameters by fixed shares and cannot be combined "
            "with --balance adaptive; expected --balance measured, or another --comm"
        )
    if has_sync_batchnorm(model):
        raise DdpSlurmError(
            "the ranks of a model with SyncBatchNorm wait for each other within it, so their "
            "speeds cannot be measured while they train; expected --balance measured"
        )


class AdaptiveShares:
    """Moves samples from ranks that have become slower to the others. All ranks call it.

    Args:
        trainer: with its sampler and its optimizer step.
        curves: of every rank at the start; None: the shares stay.
    """

    def __init__(self, trainer: Trainer, curves: Sequence[Curve] | None) -> None:
        self._trainer = trainer
        self._follower: Follower | None = None
        if curves is not None:
            check_adaptive(trainer.module)
            control, clock = trainer.world.control, trainer.optimizer_step.clock
            self._follower = Follower(curves, control, clock)
            self._predicted = self._follower.speeds.slowest(trainer.sampler.shares)

    def before_step(self, index: int) -> bool:
        """Whether the shares change from this step of the epoch on."""
        if self._follower is None or not self._is_whole(index):
            return False
        change = self._follower.before_step(self._trainer.sampler.shares)
        if change is not None:
            self._take(change)
        return change is not None

    def after_step(self, index: int) -> None:
        if self._follower is not None and self._is_whole(index):
            self._follower.after_step()

    def finish(self) -> None:
        """Wait for an exchange that has begun."""
        if self._follower is not None:
            self._follower.finish()

    def _is_whole(self, index: int) -> bool:
        sampler = self._trainer.sampler
        return sampler.global_samples(index) == sampler.global_batch

    def _take(self, change: Change) -> None:
        trainer = self._trainer
        before = trainer.sampler.shares
        trainer.sampler.set_shares(change.shares)
        trainer.optimizer_step.graphs.forget()
        if trainer.predicted_step is not None:
            trainer.predicted_step += change.after - self._predicted
        self._predicted = change.after
        trainer.seen_steps.clear()
        if trainer.prints:
            show(
                f"new shares after step {trainer.step}: {_listed(before)} -> "
                f"{_listed(change.shares)}, so that the slowest rank takes "
                f"{1000 * change.after:.3g} ms instead of {1000 * change.before:.3g}"
            )


def _listed(shares: Sequence[int]) -> str:
    return " ".join(map(str, shares))
