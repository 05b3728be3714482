"""The examples' training loop: uneven ranks, exact gradients, snapshots, a clean stop before the time limit."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ddp_slurm.balance import BalanceError
from ddp_slurm.training.data import Source
from ddp_slurm.training.process_group import World
from ddp_slurm.training.process_group.stop_vote import StopVote
from ddp_slurm.training.snapshot import Snapshot, SnapshotError
from ddp_slurm.training.trainer.evaluation import LossFunction, evaluate
from ddp_slurm.training.trainer.precision import choose_precision
from ddp_slurm.training.trainer.progress import Progress
from ddp_slurm.training.trainer.records import Recorder, open_recorder
from ddp_slurm.training.trainer.report import print_rank_table, say
from ddp_slurm.training.trainer.run_state import load_run_state, run_state
from ddp_slurm.training.uneven.batchnorm import BatchNormStatistics
from ddp_slurm.training.uneven.calibrate import TrainingStep, measured_shares
from ddp_slurm.training.uneven.gradients import (
    has_sync_batchnorm,
    loss_weight,
    no_sample_loss,
    wrap_model,
)
from ddp_slurm.training.uneven.sampler import BalancedSampler, seed_of


@dataclass(frozen=True)
class Result:
    """How a training ended. ``finished`` is False when it stopped early, with a snapshot, because of a signal."""

    finished: bool
    step: int
    metrics: dict[str, float]


class Trainer:
    """Trains ``model`` for ``total_epochs``, resuming from ``snapshot`` where there is one.

    Args:
        world: from ``init_distributed``.
        model: on ``world.device``, with the same weights on every rank or none that matter (DDP sends rank 0's).
        optimizer: over the model's parameters.
        loss_function: (outputs, targets) to the mean loss over the samples.
        train_data, eval_data: see ``data.Source``.
        global_batch: samples of one optimizer step over all ranks; the same update however they are shared out.
        shares: samples per rank; None takes the job's plan, or with DDP_SLURM_BALANCE=measured measures the ranks.
        micro_batch: the most samples a rank runs at once; a larger share is accumulated.
        scheduler: stepped after every optimizer step; one that follows ``progress`` also fits a run that is resumed
            with another global batch.
        precision: ``auto``, ``fp32``, ``fp16`` or ``bf16``, see ``precision``.
        clip_norm: the largest norm of the whole gradient.
        save_every_epochs, save_every_steps: when to write a snapshot; the end of the training always does.
        log_every_steps: how often to report; None is ten times an epoch, but not before 20 steps. Its end always is.
        recorders: functions that get every record on rank 0, see ``records``.
        metrics_path: a .jsonl or .csv file or a TensorBoard folder for the records, continued by a resumed run.
        seed: of the order of samples and of each rank's random generators.
        quiet: print nothing but warnings; the recorders still get everything.
    """

    def __init__(
        self,
        world: World,
        model: nn.Module,
        optimizer: Optimizer,
        loss_function: LossFunction,
        train_data: Source,
        eval_data: Source | None = None,
        *,
        global_batch: int,
        total_epochs: int,
        shares: Sequence[int] | None = None,
        micro_batch: int | None = None,
        scheduler: LRScheduler | None = None,
        precision: str = "auto",
        clip_norm: float | None = None,
        snapshot: Snapshot | None = None,
        save_every_epochs: int = 1,
        save_every_steps: int | None = None,
        log_every_steps: int | None = None,
        recorders: Sequence[Recorder] = (),
        metrics_path: str | None = None,
        seed: int = 0,
        quiet: bool = False,
    ) -> None:
        self.world, self.module, self.optimizer, self.scheduler = world, model, optimizer, scheduler
        self.loss_function, self.train_data, self.eval_data = loss_function, train_data, eval_data
        self.total_epochs, self.clip_norm, self.seed = total_epochs, clip_norm, seed
        self.snapshot, self.recorders = snapshot, list(recorders)
        self.metrics_path = metrics_path if world.rank == 0 else None
        self.speaks = world.rank == 0 and not quiet
        self.save_every_epochs, self.save_every_steps = save_every_epochs, save_every_steps
        self.precision = choose_precision(precision, world.ranks)
        self.scaler = self.precision.grad_scaler()
        self.micro_batch = global_batch if micro_batch is None else micro_batch
        self.eval_batch = min(512, micro_batch or 512)
        if self.micro_batch < 1:
            raise BalanceError(f"micro_batch {micro_batch}: at least one sample has to run at once")
        if len(train_data) == 0:
            raise BalanceError("the training data hold no sample")
        if shares is None:
            shares = self._choose_shares(global_batch)
        if len(shares) != world.world_size or sum(shares) != global_batch:
            raise BalanceError(
                f"shares {list(shares)}: expected {world.world_size} of them with the sum {global_batch}, "
                f"got {len(shares)} with {sum(shares)}"
            )
        self.sampler = BalancedSampler(len(train_data), shares, world.rank, seed=seed)
        self.log_every_steps = log_every_steps or max(20, len(self.sampler) // 10)
        self.batchnorm = BatchNormStatistics(model)
        self.syncs_batchnorm = has_sync_batchnorm(model)
        self.model: nn.Module = model
        if world.world_size > 1:
            self.model = wrap_model(model, world.device)
        self.vote = StopVote(world.control)
        self.epoch, self.samples_done, self.step = 0, 0, 0
        # Since the last report: the sum of the samples' losses, and their number.
        self.loss_sum, self.loss_samples = (
            torch.zeros((), dtype=torch.float64, device=world.device),
            0,
        )
        torch.manual_seed(seed_of(seed, world.rank, "rank"))

    @property
    def progress(self) -> float:
        """Which part of the whole training is done, by samples: 0 at its start, 1 at its end."""
        return (self.epoch + self.samples_done / len(self.train_data)) / self.total_epochs

    def _choose_shares(self, global_batch: int) -> list[int]:
        if os.environ.get("DDP_SLURM_BALANCE") != "measured":
            return self.world.planned_shares(global_batch)
        step = TrainingStep(
            self.module,
            self.loss_function,
            self._any_batch,
            self.world.device,
            self.precision.autocast,
        )
        return measured_shares(step, global_batch, self.world.control, self.micro_batch)

    def _any_batch(self, samples: int) -> tuple[Tensor, Tensor]:
        order = torch.arange(samples) % len(self.train_data)
        return next(self.train_data.batches(order, [(0, samples)], epoch=0))

    def train(self) -> Result:
        """Run to the end, or to a stop that a signal asked for. All ranks return the same."""
        self._resume()
        if self.metrics_path is not None:
            self.recorders.append(open_recorder(self.metrics_path, self.step))
        if self.speaks:
            print_rank_table(self.world.ranks, self.sampler.shares)
        if not self.module.training:  # layers that were set to eval() by themselves stay so
            self.module.train()
        metrics: dict[str, float] = {}
        if self.epoch >= self.total_epochs and self.eval_data is not None:
            metrics = self._evaluate()  # of a run that had ended: its record is there
        while self.epoch < self.total_epochs:
            if not self._train_epoch():
                self._stop_early()
                return Result(False, self.step, metrics)
            self.epoch, self.samples_done = self.epoch + 1, 0
            self.batchnorm.synchronize()
            if self.eval_data is not None:
                metrics = self._evaluate()
                if self.world.rank == 0:
                    self.record(
                        {"kind": "evaluation", "epoch": self.epoch, "step": self.step, **metrics}
                    )
            last = self.epoch == self.total_epochs
            if last or (self.save_every_epochs and self.epoch % self.save_every_epochs == 0):
                self._save(must=last)
        self.vote.result()
        return Result(True, self.step, metrics)

    def _train_epoch(self) -> bool:
        """One epoch, or the rest of it; False where all ranks have agreed to stop early."""
        self.sampler.set_epoch(self.epoch, self.samples_done)
        steps = len(self.sampler)
        spans = [self.sampler.span(step) for step in range(steps)]
        progress = Progress(self, steps)
        try:
            batches = self.train_data.batches(self.sampler.order(), spans, self.epoch)
            for index in range(steps):
                if (
                    self.vote.result()
                ):  # before the batch: one that is not trained on must not use random numbers up
                    return False
                inputs, targets = next(batches)
                self.vote.cast(self.world.stop_requested and self.snapshot is not None)
                self._train_step(index, inputs, targets)
                progress.after_step(index)
                at_end = index + 1 == steps
                if self.save_every_steps and self.step % self.save_every_steps == 0 and not at_end:
                    self._save(must=False)
        finally:
            progress.close()
        return True

    def _train_step(self, index: int, inputs: Tensor, targets: Tensor) -> None:
        counts, total = self.sampler.rank_samples(index), self.sampler.global_samples(index)
        own = counts[self.world.rank]
        # SyncBatchNorm's forward waits for all ranks, so all of them run equally many micro-batches.
        largest = max(counts) if self.syncs_batchnorm else own
        rounds = max(1, -(-largest // self.micro_batch))
        self.optimizer.zero_grad(set_to_none=True)
        for i in range(rounds):
            part = slice(own * i // rounds, own * (i + 1) // rounds)
            accumulates = i + 1 < rounds and isinstance(self.model, DistributedDataParallel)
            with self.model.no_sync() if accumulates else contextlib.nullcontext():  # type: ignore[operator]
                loss = self._weighted_loss(inputs[part], targets[part], total)
                self.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if self.clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.module.parameters(), self.clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.step += 1
        self.samples_done += total
        if self.scheduler is not None:
            self.scheduler.step()
        self.batchnorm.count(own)

    def _weighted_loss(self, inputs: Tensor, targets: Tensor, total: int) -> Tensor:
        samples = len(targets)
        if samples == 0 and not self.syncs_batchnorm:
            return no_sample_loss(self.model)
        with self.precision.autocast():
            outputs = self.model(inputs)
            loss = self.loss_function(outputs, targets) if samples else outputs.sum()
        if samples:
            self.loss_sum += loss.detach().double() * samples
            self.loss_samples += samples
        return loss * loss_weight(samples, total, self.world.world_size)

    def _evaluate(self) -> dict[str, float]:
        assert self.eval_data is not None
        metrics = evaluate(
            self.module,
            self.eval_data,
            self.loss_function,
            rank=self.world.rank,
            shares=self.sampler.shares,
            precision=self.precision,
            batch_size=self.eval_batch,
        )
        if self.speaks:
            accuracy = f"  accuracy {metrics['accuracy']:.4f}" if "accuracy" in metrics else ""
            say(
                f"epoch {self.epoch}/{self.total_epochs}  evaluation loss {metrics['loss']:.4f}{accuracy}"
            )
        return metrics

    def record(self, record: dict[str, Any]) -> None:
        """Hand a record to all recorders; rank 0 alone calls it. One that cannot write is left out from then on."""
        for recorder in list(self.recorders):
            try:
                recorder(record)
            except OSError as error:
                self.recorders.remove(recorder)
                say(f"warning: metrics are no longer written: {error}")

    def _resume(self) -> None:
        state = self.snapshot.load() if self.snapshot is not None else None
        if state is None:
            return
        assert self.snapshot is not None
        load_run_state(self, state)
        if self.world.rank == 0:
            for warning in self.snapshot.warnings:
                say(f"warning: {warning}")
        if self.speaks:
            say(
                f"resumed from {self.snapshot.path}: epoch {self.epoch} of {self.total_epochs} done, "
                f"then {self.samples_done} samples, step {self.step}"
            )

    def _save(self, *, must: bool) -> None:
        """A periodic snapshot that fails is a warning: the training goes on, and the one before it stays."""
        if self.snapshot is None:
            return
        state = run_state(self)
        fault = None
        if self.world.rank == 0:
            try:
                self.snapshot.save(state)
            except SnapshotError as error:
                fault = str(error)
                say(f"warning: {fault}")
        if must:
            faults = [fault]
            dist.broadcast_object_list(faults, src=0, group=self.world.control)
            if faults[0] is not None:
                raise SnapshotError(faults[0])

    def _stop_early(self) -> None:
        self._save(must=True)
        marker = os.environ.get("DDP_SLURM_REQUEUE_MARKER")
        if self.world.rank == 0 and marker:
            Path(marker).touch()
        if self.speaks:
            say(f"stopped by a signal after step {self.step}, with a snapshot to resume from")
