"""Times the Trainer's steps and reports them."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ddp_slurm.training.trainer.report import ProgressPrinter, first_step_line, progress_line, say

if TYPE_CHECKING:
    from ddp_slurm.training.trainer import Trainer


class Progress:
    """Times the steps and reports them; every rank keeps one, since the sums are reduced."""

    def __init__(self, trainer: Trainer, steps: int) -> None:
        self.trainer, self.steps = trainer, steps
        self.printer = ProgressPrinter(steps) if trainer.speaks else None
        self.since, self.started = time.perf_counter(), time.perf_counter()

    def after_step(self, index: int) -> None:
        trainer = self.trainer
        if trainer.step == 1:
            if trainer.world.device.type == "cuda":
                torch.cuda.synchronize(trainer.world.device)
            if trainer.speaks:
                say(first_step_line(trainer.world.rendezvous_seconds))
        if (index + 1) % trainer.log_every_steps == 0 or index + 1 == self.steps:
            self._report(index)

    def _report(self, index: int) -> None:
        trainer, world = self.trainer, self.trainer.world
        sums = torch.zeros(world.world_size, 2, dtype=torch.float64)  # of each rank: loss, samples
        sums[world.rank, 0], sums[world.rank, 1] = (
            trainer.loss_sum.item(),
            trainer.loss_samples,
        )  # waits for the GPU
        now = time.perf_counter()
        dist.all_reduce(sums, group=world.control)
        trainer.loss_sum.zero_()
        trainer.loss_samples = 0
        if world.rank == 0:
            losses, counts = sums.unbind(dim=1)
            loss = (losses.sum() / counts.sum()).item()
            rates = (counts / (now - self.since)).tolist()
            done = index + 1
            epochs_left = trainer.total_epochs - trainer.epoch - 1
            steps_left = (
                self.steps
                - done
                + epochs_left * -(-trainer.sampler.length // trainer.sampler.global_batch)
            )
            line = progress_line(
                epoch=trainer.epoch + 1,
                epochs=trainer.total_epochs,
                step=done,
                steps=self.steps,
                loss=loss,
                rates=rates,
                left_seconds=(now - self.started) / done * steps_left,
            )
            if self.printer is not None:
                self.printer.update(done, line)
            trainer.record(
                {
                    "kind": "train",
                    "epoch": trainer.epoch + 1,
                    "step": trainer.step,
                    "loss": loss,
                    "images_per_second": sum(rates),
                    "images_per_second_by_rank": rates,
                    "learning_rate": trainer.optimizer.param_groups[0]["lr"],
                }
            )
        self.since = now

    def close(self) -> None:
        if self.printer is not None:
            self.printer.close()
