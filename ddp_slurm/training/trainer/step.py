"""One optimizer step of a rank: its share of the global batch, in micro-batches."""

from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_slurm.comm import EXACT
from ddp_slurm.console import show
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.job_env import JobEnv
from ddp_slurm.training.adaptive.clock import StepClock
from ddp_slurm.training.exchange import all_gather_values
from ddp_slurm.training.graphs.choice import Graphs
from ddp_slurm.training.graphs.compute import (
    GraphedCompute,
    as_graph,
    factor_tensor,
    reason_of_device,
    reason_of_model,
)
from ddp_slurm.training.links.layout import Layout
from ddp_slurm.training.memory.halving import Count, Forward, Passes, evenly
from ddp_slurm.training.process_group import World
from ddp_slurm.training.trainer.config import TrainerConfig
from ddp_slurm.training.trainer.forward_backward import ForwardBackward
from ddp_slurm.training.trainer.loss_sum import LossSum
from ddp_slurm.training.trainer.precision import Precision
from ddp_slurm.training.uneven.gradients import find_ddp, has_sync_batchnorm, no_sample_loss
from ddp_slurm.training.uneven.weighted_loss import WeightedLoss


def check_model(model: nn.Module, loss_function: object, optimizer: Optimizer) -> None:
    """Raises DdpSlurmError for a model that is wrapped already, and for parameters outside of it.

    DistributedDataParallel would not sum their gradients, and a snapshot would not have them.
    """
    if find_ddp(model) is not None:
        raise DdpSlurmError(
            f"the model, a {type(model).__name__}, has DistributedDataParallel in it; pass it "
            "without: the Trainer adds it"
        )
    own = {id(parameter) for parameter in model.parameters()}
    used = [each for group in optimizer.param_groups for each in group["params"]]
    if isinstance(loss_function, nn.Module):
        used += [each for each in loss_function.parameters() if each.requires_grad]
    shapes = [str(tuple(each.shape)) for each in used if id(each) not in own]
    if shapes:
        raise DdpSlurmError(
            f"the optimizer or the loss function has {len(shapes)} parameters that are not the "
            f"model's, the first one of the shape {shapes[0]}: make them a part of the model, and "
            "make the optimizer after the model is complete"
        )


def check_scaler(precision: Precision) -> None:
    """Raises DdpSlurmError for fp16 with a ``--comm`` that it spoils: its loss scaler lets single
    ranks skip steps, and infinities would stay in PowerSGD's memory."""
    comm = JobEnv.from_environ().comm
    if comm is None or not precision.grad_scaler().is_enabled():
        return
    if comm.kind in ("local", "powersgd") or comm.allows == "local":
        raise DdpSlurmError(
            f"--comm {comm} cannot be combined with fp16, whose loss scaler skips steps; set the "
            "precision to bf16 or fp32, or take --comm bf16"
        )


def graphed_for_timing(
    world: World,
    model: nn.Module,
    loss: WeightedLoss,
    precision: Precision,
    config: TrainerConfig,
) -> Callable[[Tensor, Tensor], Callable[[], None] | None] | None:
    """See ``TrainingStep.graphed``. None where the training will have no graphs, and where it may
    have none since the gradients may be exchanged in another way than by one all-reduce."""
    comm = JobEnv.from_environ().comm or EXACT
    has_two_levels = Layout.of([fact.node_rank for fact in world.ranks]).has_two_levels
    reason = _reason_of_work(world, model, loss, config)
    if config.graphs == "off" or reason is not None or has_two_levels or not comm.is_exact:
        return None
    return partial(as_graph, ForwardBackward(model, loss, precision, LossSum(world.device)))


def _reason_of_work(
    world: World, model: nn.Module, loss: WeightedLoss, config: TrainerConfig
) -> str | None:
    """Why forward and backward cannot be a graph, as far as can be known beforehand."""
    return (
        reason_of_device(world.device)
        or loss.reason_against_graphs
        or reason_of_model(model, allows_compiled=config.graphs == "on")
    )


class OptimizerStep:
    """Forward, backward and update, with the gradient of the mean over the whole global batch."""

    def __init__(
        self,
        world: World,
        model: nn.Module,
        optimizer: Optimizer,
        loss: WeightedLoss,
        precision: Precision,
        config: TrainerConfig,
    ) -> None:
        """``model`` is wrapped by ``world.wrap``; in a world of one rank it need not be."""
        self.model = model
        self._inner = model.module if isinstance(model, DistributedDataParallel) else model
        made = [local for local in world.local_steps if local.optimizer is optimizer]
        self.local_steps = made[-1] if made else None
        self.optimizer = optimizer
        self.loss = loss
        self.precision = precision
        self.scaler = precision.grad_scaler()
        self.loss_sum = LossSum(world.device)
        self._steps = 0
        self._check_loss = config.check_loss
        self._world_size = world.world_size
        self._clip_norm = config.clip_norm
        self._total: float | Tensor = 0.0
        self._global_batch = config.global_batch
        self._syncs_batchnorm = has_sync_batchnorm(model)
        self._limits: list[int] = []
        if self._syncs_batchnorm:
            self._limits = all_gather_values(config.most_at_once, world.control)
        self.clock = StepClock(world.device)
        self._passes = Passes(model, self._loss_of, config.most_at_once, world.place)
        self.graphs = self._make_graphs(world, config)

    @property
    def most_at_once(self) -> int:
        """The most samples of one forward pass; fewer once memory has run out."""
        return self._passes.most_at_once

    def run(self, inputs: Tensor, targets: Tensor, counts: Sequence[int]) -> None:
        """Take the step.

        Args:
            inputs, targets: this rank's samples.
            counts: samples of every rank in this step.
        """
        own, samples = len(targets), sum(counts)
        parts = evenly(inputs, targets, self._rounds(own, counts))
        self._steps += 1
        is_whole = samples == self._global_batch
        checks_loss = self._checks_loss()
        with self.graphs.step(is_typical=is_whole and not checks_loss):
            if self.graphs.in_use and not checks_loss:
                factor = self.scaler.scale(factor_tensor(samples, targets.device))
                filled = [part for part in parts if len(part[1])]
                by_weight = None if self.loss.is_sample_mean else samples
                self.graphs.gradients(
                    filled, factor, self.clock, is_whole=is_whole, samples=by_weight
                )
            else:
                self._total = self._total_weight(targets, samples)
                self._gradients(parts)
            self.loss_sum.samples += own
            with self.clock.part():
                self._update()

    def _gradients(self, parts: Sequence[tuple[Tensor, Tensor]]) -> None:
        """Give the parameters the gradient of the whole global batch, whose weight is known."""
        self.optimizer.zero_grad(set_to_none=True)
        exchanges_after = self.clock.is_on and self.model is not self._inner
        with self.clock.part():
            for i, part in enumerate(parts):
                is_last = i + 1 == len(parts) and not exchanges_after
                self._passes.run(*part, is_last=is_last)
        if exchanges_after:  # a backward that adds nothing, and sends what no_sync has kept
            no_sample_loss(self.model).backward()  # type: ignore[no-untyped-call]

    def _update(self) -> None:
        if self._clip_norm is not None:
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def _make_graphs(self, world: World, config: TrainerConfig) -> Graphs:
        reason = _reason_of_work(world, self._inner, self.loss, config)
        hooks = getattr(self.model, "_comm_hooks", [])
        if reason is None and (self.local_steps is not None or hooks):
            # Graphs have one plain all-reduce, after backward.
            reason = "the gradients are exchanged in two levels, or as --comm asks"
        compute = None
        if reason is None and config.graphs != "off":
            work = ForwardBackward(self._inner, self.loss, self.precision, self.loss_sum)
            compute = GraphedCompute(
                work,
                lambda why: show(f"graphs: {world.place} has none, since {why}"),
                self._passes.halve,
            )
        quiet = config.quiet or world.rank != 0
        report = _say_nothing if quiet else show
        return Graphs(compute, config.graphs, reason, world, report)

    def _rounds(self, own: int, counts: Sequence[int]) -> int:
        pairs = [(own, self.most_at_once)]
        if self._syncs_batchnorm:  # its forward waits for all ranks: all run as many micro-batches
            pairs = list(zip(counts, self._limits, strict=True))
        return max(1, *(-(-samples // limit) for samples, limit in pairs))

    def _total_weight(self, targets: Tensor, samples: int) -> float | Tensor:
        """Of the whole global batch of so many samples: their number, or the sum of its targets'
        weights."""
        total = self.loss.weight(targets)
        if not isinstance(total, Tensor):
            return samples
        if self._world_size > 1:
            dist.all_reduce(total)  # on the device: the CPU does not wait for it
        return torch.where(total > 0, total, 1.0)

    def _loss_of(
        self, forward: Forward, inputs: Tensor, targets: Tensor
    ) -> tuple[Tensor, Count] | None:
        """This micro-batch's part of the global batch's mean loss, times the world size and the
        scale; None where it has no samples and the ranks do not need its forward."""
        if self.loss.is_empty(targets):
            if not self._syncs_batchnorm:
                return None
            with self.precision.autocast():
                zero: Tensor = forward(inputs).sum() * 0.0
            return zero, _say_nothing
        with self.precision.autocast():
            outputs = forward(inputs)
            value, factor = self.loss.value_and_factor(outputs, targets)
        if self._checks_loss():
            self.loss.check(outputs, targets)
        loss_sum = value.detach().double() * factor
        scaled = self.scaler.scale(value * (factor * self._world_size / self._total))
        return scaled, partial(self.loss_sum.add, loss_sum, self.loss.weight(targets))

    def _checks_loss(self) -> bool:
        """In steps 1, 2, 4, 8, ...: a check waits for the GPU."""
        return self._check_loss and self._steps & (self._steps - 1) == 0


def _say_nothing(*text: str) -> None:
    pass
