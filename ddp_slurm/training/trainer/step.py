"""One optimizer step of a rank: its share of the global batch, in micro-batches."""

import contextlib
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_slurm.training.process_group import World
from ddp_slurm.training.trainer.config import TrainerConfig
from ddp_slurm.training.trainer.precision import Precision
from ddp_slurm.training.uneven.gradients import (
    LossFunction,
    has_sync_batchnorm,
    loss_weight,
    no_sample_loss,
    wrap_model,
)


class LossSum:
    """The sum of this rank's losses per sample, and the number of samples, since the last reset."""

    def __init__(self, device: torch.device) -> None:
        self._total = torch.zeros((), dtype=torch.float64, device=device)
        self.samples = 0

    def add(self, mean_loss: Tensor, samples: int) -> None:
        self._total += mean_loss.detach().double() * samples
        self.samples += samples

    def total(self) -> float:
        """Waits for the GPU."""
        return float(self._total.item())

    def reset(self, total: float = 0.0, samples: int = 0) -> None:
        self._total.fill_(total)
        self.samples = samples


class OptimizerStep:
    """Forward, backward and update, with the gradient of the mean over the whole global batch."""

    def __init__(
        self,
        world: World,
        model: nn.Module,
        optimizer: Optimizer,
        loss_function: LossFunction,
        precision: Precision,
        config: TrainerConfig,
    ) -> None:
        self.model = model
        if world.world_size > 1:
            self.model = wrap_model(model, world.device)
        self.optimizer = optimizer
        self.loss_function = loss_function
        self.precision = precision
        self.scaler = precision.grad_scaler()
        self.loss_sum = LossSum(world.device)
        self._world_size = world.world_size
        self._clip_norm = config.clip_norm
        self._most_at_once = config.most_at_once
        self._syncs_batchnorm = has_sync_batchnorm(model)

    def run(self, inputs: Tensor, targets: Tensor, counts: Sequence[int]) -> None:
        """Take the step.

        Args:
            inputs, targets: this rank's samples.
            counts: samples of every rank in this step.
        """
        own, total = len(targets), sum(counts)
        rounds = self._rounds(own, max(counts))
        self.optimizer.zero_grad(set_to_none=True)
        for i in range(rounds):
            part = slice(own * i // rounds, own * (i + 1) // rounds)
            with self._reduction(is_last=i + 1 == rounds):
                loss = self._weighted_loss(inputs[part], targets[part], total)
                self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if self._clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _rounds(self, own: int, largest: int) -> int:
        # SyncBatchNorm's forward waits for all ranks, so all run equally many micro-batches.
        samples = largest if self._syncs_batchnorm else own
        return max(1, -(-samples // self._most_at_once))

    def _reduction(self, *, is_last: bool) -> AbstractContextManager[object]:
        """Only the last micro-batch's backward sends gradients."""
        if is_last or not isinstance(self.model, DistributedDataParallel):
            return contextlib.nullcontext()
        context: AbstractContextManager[object] = self.model.no_sync()
        return context

    def _weighted_loss(self, inputs: Tensor, targets: Tensor, total: int) -> Tensor:
        samples = len(targets)
        if samples == 0 and not self._syncs_batchnorm:
            return no_sample_loss(self.model)
        with self.precision.autocast():
            outputs = self.model(inputs)
            loss = self.loss_function(outputs, targets) if samples else outputs.sum()
        if samples:
            self.loss_sum.add(loss, samples)
        return loss * loss_weight(samples, total, self._world_size)
