"""Times the Trainer's steps and prints the lines of progress: loss, images a second, time left."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ddp_slurm.console import show
from ddp_slurm.training.trainer.report import first_step_line, is_terminal
from ddp_slurm.training.uneven.calibrate import wait_for_device

if TYPE_CHECKING:
    from ddp_slurm.training.trainer import Trainer

LEAST_STEPS_BETWEEN_REPORTS = 20
MOST_RANKS_IN_A_LINE = 16


def progress_line(place: str, loss: float, rates: Sequence[float], left_seconds: float) -> str:
    """``epoch 2/5  step 30/98  loss 1.2345  1,610 images/s (ranks: 400 1,210)  ETA 0:01:02``."""
    if len(rates) <= MOST_RANKS_IN_A_LINE:
        by_rank = " ".join(f"{rate:,.0f}" for rate in rates)
    else:
        by_rank = f"{min(rates):,.0f} to {max(rates):,.0f}"
    left = timedelta(seconds=round(left_seconds))
    return f"{place}  loss {loss:.4f}  {sum(rates):,.0f} images/s (ranks: {by_rank})  ETA {left}"


class ProgressPrinter:
    """Prints progress lines; on a terminal above a progress bar of the epoch."""

    def __init__(self, total_steps: int) -> None:
        self._bar = None
        if is_terminal():
            from rich.progress import Progress

            self._bar = Progress(transient=True)
            self._task = self._bar.add_task("epoch", total=total_steps)
            self._bar.start()

    def update(self, done_steps: int, line: str) -> None:
        if self._bar is None:
            show(line)
        else:
            self._bar.console.print(line, highlight=False)
            self._bar.update(self._task, completed=done_steps)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.stop()


class Progress:
    """Times the steps of an epoch and reports them. Every rank has one: the sums are reduced."""

    def __init__(self, trainer: Trainer, steps: int) -> None:
        self.trainer = trainer
        self.steps = steps
        self.printer = ProgressPrinter(steps) if trainer.prints else None
        whole_epoch = -(-trainer.sampler.length // trainer.sampler.global_batch)
        self.steps_of_an_epoch = whole_epoch
        tenth = max(LEAST_STEPS_BETWEEN_REPORTS, whole_epoch // 10)
        self.every = trainer.config.log_every_steps or tenth
        self.started = time.perf_counter()
        self.since = self.started
        self.reported = 0

    def after_step(self, index: int) -> None:
        if self.trainer.step == 1:
            self._report_first_step()
        if (index + 1) % self.every == 0 or index + 1 == self.steps:
            self._report(index + 1)

    def close(self) -> None:
        if self.printer is not None:
            self.printer.close()

    def _report_first_step(self) -> None:
        world = self.trainer.world
        wait_for_device(world.device)
        if self.printer is not None:
            show(first_step_line(world.rendezvous_seconds))

    def _report(self, done: int) -> None:
        world, loss_sum = self.trainer.world, self.trainer.optimizer_step.loss_sum
        # Of each rank: sum of losses, sum of their weights, samples.
        sums = torch.zeros(world.world_size, 3, dtype=torch.float64)
        own = (*loss_sum.totals(), loss_sum.samples)
        sums[world.rank] = torch.tensor(own, dtype=torch.float64)
        now = time.perf_counter()
        dist.all_reduce(sums, group=world.control)
        loss_sum.reset()
        if world.rank == 0:
            losses, weights, counts = sums.unbind(dim=1)
            loss = (losses.sum() / weights.sum()).item()
            rates = (counts / (now - self.since)).tolist()
            self.trainer.seen_steps.append((now - self.since) / (done - self.reported))
            self._print(done, loss, rates, now)
            self._record(loss, rates)
        self.since = now
        self.reported = done

    def _print(self, done: int, loss: float, rates: list[float], now: float) -> None:
        if self.printer is None:
            return
        epoch, epochs = self.trainer.epoch + 1, self.trainer.config.total_epochs
        steps_left = self.steps - done + (epochs - epoch) * self.steps_of_an_epoch
        left_seconds = steps_left * (now - self.started) / done
        place = f"epoch {epoch}/{epochs}  step {done}/{self.steps}"
        self.printer.update(done, progress_line(place, loss, rates, left_seconds))

    def _record(self, loss: float, rates: list[float]) -> None:
        self.trainer.records(
            {
                "kind": "train",
                "epoch": self.trainer.epoch + 1,
                "step": self.trainer.step,
                "loss": loss,
                "images_per_second": sum(rates),
                "images_per_second_by_rank": rates,
                "shares": self.trainer.sampler.shares,
                "learning_rate": self.trainer.optimizer.param_groups[0]["lr"],
            }
        )
