"""A training loop for uneven ranks: exact gradients, snapshots, a stop before the time limit."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from ddp_slurm.comm import EXACT
from ddp_slurm.console import show
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.job_env import JobEnv
from ddp_slurm.training.data import Batch, DataError, DatasetSource, Source, as_source
from ddp_slurm.training.process_group import World
from ddp_slurm.training.process_group.stop_signal import stop_when_preempted
from ddp_slurm.training.process_group.stop_vote import StopVote
from ddp_slurm.training.trainer.adaptive import AdaptiveShares
from ddp_slurm.training.trainer.config import TrainerConfig
from ddp_slurm.training.trainer.evaluation import evaluate
from ddp_slurm.training.trainer.precision import choose_precision
from ddp_slurm.training.trainer.progress import Progress
from ddp_slurm.training.trainer.records import Records, open_recorder
from ddp_slurm.training.trainer.report import print_prediction, print_rank_table
from ddp_slurm.training.trainer.saver import Saver
from ddp_slurm.training.trainer.split import choose_split
from ddp_slurm.training.trainer.step import (
    OptimizerStep,
    check_model,
    check_scaler,
    graphed_for_timing,
)
from ddp_slurm.training.uneven.batchnorm import BatchNormStatistics
from ddp_slurm.training.uneven.calibrate import TrainingStep
from ddp_slurm.training.uneven.gradients import LossFunction
from ddp_slurm.training.uneven.measured_shares import slowest_step
from ddp_slurm.training.uneven.sampler import BalancedSampler, seed_of
from ddp_slurm.training.uneven.weighted_loss import WeightedLoss

EVALUATION_BATCH = 512
"""The most samples of one forward pass in an evaluation."""


@dataclass(frozen=True)
class Result:
    """How a training ended."""

    finished: bool
    """False if a signal stopped it early, with a snapshot to resume from."""
    step: int
    """Optimizer steps, those before a resume included."""
    metrics: dict[str, float]
    """Of the last evaluation; empty without one."""


class Trainer:
    """Trains a model for ``config.total_epochs``, resuming from ``config.snapshot`` if it exists.

    Args:
        world: from ``init_distributed``.
        model: on ``world.device``, without DistributedDataParallel: the Trainer adds it.
        optimizer: over the model's parameters.
        loss_function: (outputs, targets) to the mean loss over the samples, a scalar; of
            ``cross_entropy`` also with class weights, ignored targets or tokens. For other weighted
            means see ``TrainerConfig.target_weight``.
        train_data, eval_data: a Source, a map-style Dataset of (input, target), or a DataLoader of
            one (its data set, ``collate_fn`` and ``num_workers`` are used; a rank with a larger
            share than the mean gets more workers, one with a smaller share fewer).
        config: see TrainerConfig.
        settings: fields of TrainerConfig, instead of ``config`` or in place of some of its values.

    Raises a DdpSlurmError (BalanceError, DataError, PrecisionError) on every rank for settings
    that do not fit the world or the data, and for trained parameters outside of the model.
    """

    def __init__(
        self,
        world: World,
        model: nn.Module,
        optimizer: Optimizer,
        loss_function: LossFunction,
        train_data: Any,
        eval_data: Any = None,
        config: TrainerConfig | None = None,
        **settings: Any,
    ) -> None:
        config = replace(config, **settings) if config else TrainerConfig(**settings)
        check_model(model, loss_function, optimizer)
        self.world = world
        self.module = model
        self.optimizer = optimizer
        self.scheduler = config.scheduler
        self.loss = WeightedLoss(loss_function, config.target_weight)
        self.config = config
        self.train_data: Source = as_source(train_data, world.device)
        self.eval_data = None if eval_data is None else as_source(eval_data, world.device)
        self.precision = choose_precision(config.precision, world.ranks)
        self.split = choose_split(world, config, self._training_step(), len(self.train_data))
        self.predicted_step = self.split.predicted_step
        self.seen_steps: list[float] = []
        shares = self.split.shares
        self.sampler = BalancedSampler(len(self.train_data), shares, world.rank, seed=config.seed)
        self.batchnorm = BatchNormStatistics(model)
        check_scaler(self.precision)
        step_config = replace(config, micro_batch=self.split.micro_batch)
        self.optimizer_step = OptimizerStep(
            world, self._wrapped(), optimizer, self.loss, self.precision, step_config
        )
        self.epoch, self.samples_done, self.step = 0, 0, 0
        self.prints = world.rank == 0 and not config.quiet
        self._adaptive = AdaptiveShares(self, self.split.curves)
        self.records = Records(config.recorders)
        self._saver = Saver(self)
        self._vote = StopVote(world.control)
        torch.manual_seed(seed_of(config.seed, world.rank, "rank"))

    @property
    def progress(self) -> float:
        """The part of the whole training that is done, by samples: 0 at its start, 1 at its end."""
        epochs_done = self.epoch + self.samples_done / len(self.train_data)
        return epochs_done / self.config.total_epochs

    def train(self) -> Result:
        """Run to the end, or to a stop that a signal requested. All ranks return the same."""
        if self.config.snapshot is not None and JobEnv.from_environ().requeue_marker:
            rank = self.world.rank
            stop_when_preempted(rank, self.world.ranks[rank].local_rank)
        self._saver.load()
        if self.config.metrics_path is not None and self.world.rank == 0:
            self.records.add(open_recorder(self.config.metrics_path, self.step))
        if self.prints:
            print_rank_table(self.world.ranks, self.sampler.shares)
        if not self.module.training:  # layers that were set to eval() one by one stay so
            self.module.train()
        metrics: dict[str, float] = {}
        if self.epoch >= self.config.total_epochs and self.eval_data is not None:
            metrics = self.evaluate()  # of a run that had ended: its record exists
        while self.epoch < self.config.total_epochs:
            self._saver.probe_once(after_step=False)
            if not self._train_epoch():
                self._stop_early()
                return Result(False, self.step, metrics)
            metrics = self._end_epoch()
        self._vote.result()
        self._adaptive.finish()
        self.world.average()
        if self.prints:
            print_prediction(self.predicted_step, self.seen_steps, self.config.global_batch)
        return Result(True, self.step, metrics)

    def evaluate(self, data: Any = None) -> dict[str, float]:
        """Loss, accuracy (if the targets are class numbers) and number of samples of ``data``.

        ``data`` is what ``eval_data`` may be, and by default that. Every sample counts once. All
        ranks call it and get the same values; their BatchNorm statistics are averaged before.

        Raises DataError if there are no data, or no samples in them.
        """
        source = self.eval_data if data is None else as_source(data, self.world.device)
        if source is None:
            raise DataError("nothing to evaluate: the Trainer was given no eval_data")
        self._share_workers(source)
        self.world.average()
        self.batchnorm.synchronize()
        metrics = evaluate(
            self.module,
            source,
            self.loss,
            rank=self.world.rank,
            shares=self.sampler.shares,
            precision=self.precision,
            batch_size=self._evaluation_batch(),
        )
        if self.prints:
            accuracy = f"  accuracy {metrics['accuracy']:.4f}" if "accuracy" in metrics else ""
            place = f"epoch {self.epoch}/{self.config.total_epochs}"
            show(f"{place}  evaluation loss {metrics['loss']:.4f}{accuracy}")
        return metrics

    def _evaluation_batch(self) -> int:
        """The most samples of one forward pass: fewer where the micro-batch is limited."""
        limit = self.optimizer_step.most_at_once
        is_limited = limit < self.sampler.shares[self.world.rank]
        is_limited |= isinstance(self.config.micro_batch, int)
        return min(EVALUATION_BATCH, limit) if is_limited else EVALUATION_BATCH

    def _wrapped(self) -> nn.Module:
        if self.world.world_size == 1:
            return self.module
        comm = JobEnv.from_environ().comm or EXACT
        shares = self.sampler.shares
        seconds = None
        if comm.kind in ("auto", "local") and not comm.is_exact:
            seconds = slowest_step(
                self._training_step(), shares, self.world.control, self.split.micro_batch
            )
        return self.world.wrap(self.module, self.optimizer, shares, seconds)

    def _training_step(self) -> TrainingStep:
        return TrainingStep(
            self.module,
            self.loss.function,
            self._any_batch,
            self.world.device,
            self.precision.autocast,
            self.optimizer,
            self.precision.name,
            graphed_for_timing(self.world, self.module, self.loss, self.precision, self.config),
        )

    def _any_batch(self, samples: int) -> tuple[Tensor, Tensor]:
        order = torch.arange(samples) % len(self.train_data)
        return next(self.train_data.batches(order, [(0, samples)], epoch=0))

    def _train_epoch(self) -> bool:
        """One epoch, or the rest of it; False if all ranks have agreed to stop early."""
        self.sampler.set_epoch(self.epoch, self.samples_done)
        steps = len(self.sampler)
        save_every = self.config.save_every_steps
        progress = Progress(self, steps)
        try:
            batches = self._batches(0)
            for index in range(steps):
                # Before the batch: one that is not trained on must not use up random numbers.
                if self._vote.result():
                    self._adaptive.finish()
                    return False
                if self._adaptive.before_step(index):
                    batches = self._batches(index)
                inputs, targets = next(batches)
                self._vote.cast(self.world.stop_requested and self.config.snapshot is not None)
                self._train_step(index, inputs, targets)
                self._adaptive.after_step(index)
                self._saver.probe_once(after_step=True)
                progress.after_step(index)
                if save_every and self.step % save_every == 0 and index + 1 < steps:
                    self._saver.save()
        finally:
            progress.close()
        return True

    def _batches(self, first: int) -> Iterator[Batch]:
        """This rank's batches of the epoch, from a step on."""
        self._share_workers(self.train_data)
        spans = [self.sampler.span(step) for step in range(first, len(self.sampler))]
        return self.train_data.batches(self.sampler.order(), spans, self.epoch)

    def _share_workers(self, source: Source) -> None:
        """Let a source have as many loader workers as this rank's share of the batch needs."""
        if isinstance(source, DatasetSource):
            shares = self.sampler.shares
            source.relative_share = shares[self.world.rank] * len(shares) / sum(shares)

    def _train_step(self, index: int, inputs: Tensor, targets: Tensor) -> None:
        counts = self.sampler.rank_samples(index)
        self.optimizer_step.run(inputs, targets, counts)
        self.step += 1
        self.samples_done += sum(counts)
        if self.scheduler is not None:
            self.scheduler.step()
        self.batchnorm.count(counts[self.world.rank])

    def _end_epoch(self) -> dict[str, float]:
        """Evaluate, record and save; the metrics."""
        self.epoch += 1
        self.samples_done = 0
        self.batchnorm.synchronize()
        metrics: dict[str, float] = {}
        if self.eval_data is not None:
            metrics = self.evaluate()
            if self.world.rank == 0:
                at = {"kind": "evaluation", "epoch": self.epoch, "step": self.step}
                self.records({**at, **metrics})
        every = self.config.save_every_epochs
        if self.epoch == self.config.total_epochs:
            self._saver.save_or_fail()
        elif every and self.epoch % every == 0:
            self._saver.save()
        return metrics

    def _stop_early(self) -> None:
        self._saver.save_or_fail()
        marker = JobEnv.from_environ().requeue_marker
        if self.world.rank == 0 and marker:
            try:
                Path(marker).touch()
            except OSError as error:
                raise DdpSlurmError(
                    f"the snapshot is saved, but the job will not be requeued: {error}"
                ) from error
        if self.prints:
            show(f"stopped by a signal after step {self.step}, with a snapshot to resume from")
