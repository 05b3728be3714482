"""The seam at DistributedDataParallel: each micro-batch's gradient by its share of the samples.

The factor is in the backward of the module's outputs. So the loss is never touched, ``no_sync``
adds micro-batches of different shares exactly, and a regulariser that the script adds to the loss
keeps its weight: every rank adds all of it, and DDP takes the mean.
"""

import functools
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ddp_slurm.training.scripts import hugging_face
from ddp_slurm.training.scripts.batches import Share, ShareBatches
from ddp_slurm.training.scripts.errors import UnevenError
from ddp_slurm.training.scripts.feed import Delivery, Feed
from ddp_slurm.training.scripts.statistics import average_statistics, statistics_of
from ddp_slurm.training.scripts.weights import CallWeight, unweighted, weighted
from ddp_slurm.training.uneven.gradients import has_sync_batchnorm


class Modules:
    """The DDP modules of this process, and the weights of their calls."""

    def __init__(self, world_size: int) -> None:
        self.world_size = world_size
        self.share: Share | None = None
        """Of the latest call in training."""
        self.has_mean_loss = False
        """A mean loss was computed since that call, inside of the model or outside."""
        self.has_any = False
        self._feed = Feed()
        self.is_mean_over_tokens = False
        """Hugging Face's Trainer divides this step's loss by a count over all ranks."""
        self._checked: WeakSet[ShareBatches] = WeakSet()
        self._alive: WeakKeyDictionary[DistributedDataParallel, None] = WeakKeyDictionary()

    def is_training(self, is_shuffled: bool) -> bool:
        """Whether an iteration over a loader that begins now belongs to the training.

        A loader that shuffles counts as one of the training unless gradients are switched off:
        some loops call ``model.train()`` only after they have read the first batch. Where one of
        several modules is in ``eval()`` (a generator that draws samples) it is an evaluation.
        """
        if not torch.is_grad_enabled():
            return False
        return is_shuffled or all(ddp.module.training for ddp in self._alive)

    @property
    def needs_two_samples(self) -> bool:
        """Whether a module has BatchNorm of its own samples, which fails on a single one."""
        return any(statistics_of(ddp.module) for ddp in self._alive)

    def add(self, ddp: DistributedDataParallel) -> None:
        """Note a module that was made. Raises UnevenError for one over a part of the ranks."""
        if dist.get_world_size(ddp.process_group) != self.world_size:
            raise UnevenError(
                "a DistributedDataParallel module has a process_group of "
                f"{dist.get_world_size(ddp.process_group)} of {self.world_size} ranks; shares are "
                "for all ranks. Leave out process_group"
            )
        self.has_any = True
        self._alive[ddp] = None
        average_statistics(ddp, lambda: self.share)
        hugging_face.install(self._set_mean_over_tokens)

    def alive(self) -> list[DistributedDataParallel]:
        """The modules that the script still holds, in the order in which it made them."""
        return list(self._alive)

    def _set_mean_over_tokens(self, value: bool) -> None:
        self.is_mean_over_tokens = value

    def deliver(self, delivery: Delivery, batch: Any) -> Share:
        """Note that a loader hands out its next batch. Returns the batch's share.

        Raises UnevenError where no module will weight its gradient.
        """
        share = self._feed.deliver(delivery, batch)
        if delivery.count > 1 and not self.has_any:
            raise UnevenError(
                "the script reads batches divided by shares, and has no DistributedDataParallel "
                "module that weights their gradient. FSDP, DeepSpeed and scripts that reduce "
                "gradients themselves work with equal shares: leave out --uneven"
            )
        return share

    def delivered_unknown(self, batch: Any, reason: str) -> Any:
        """Note that a loader hands out a batch whose share is not known. Returns the batch."""
        self._feed.latest = reason
        return batch

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def begin(self, ddp: DistributedDataParallel, batch: Any) -> None:
        """Find the share of the batch that a module is called with, all arguments of the call.

        Raises UnevenError where it is not known.
        """
        self.share = None
        self.has_mean_loss = False
        if self.world_size == 1:
            return
        is_training = ddp.module.training
        is_evaluation = not is_training and isinstance(self._feed.latest, str)
        if not torch.is_grad_enabled() or is_evaluation:
            return
        self.share = self._feed.take(batch, is_training=is_training)
        self._check_blocks(ddp)
        if self.share.own == 0 and has_sync_batchnorm(ddp):
            raise UnevenError(
                f"this rank has no sample in a step of {self.share.total}, and SyncBatchNorm would "
                "count its stand-ins. Set drop_last=True in the DataLoader"
            )

    def _check_blocks(self, ddp: DistributedDataParallel) -> None:
        """At the first batch of each loader: all ranks have to divide the same global batches.

        All of them are about to call the same module, so they can exchange numbers here. Raises
        UnevenError.
        """
        batches = self._feed.in_use
        if batches is None or batches in self._checked:
            return
        self._checked.add(batches)
        least, most = range_over_ranks(torch.tensor([batches.blocks.size, len(batches)]), ddp)
        if most != least:
            raise UnevenError(
                f"the ranks' DataLoaders have global batches of {least[0]} to {most[0]} samples "
                f"and {least[1]} to {most[1]} steps. Give all ranks the same data set and "
                "batch_size: one divided by the world's size, not by the GPUs of a node"
            )

    def weight(self) -> CallWeight | None:
        """Of the call that is about to be made; None where its gradient stays as it is."""
        share = self.share
        if share is None or share.factor(self.world_size) == 1:
            return None
        return CallWeight(functools.partial(self._factor, share, self.is_mean_over_tokens))

    def _factor(self, share: Share, is_mean_over_tokens: bool) -> float:
        """Asked for when the loss of the call is known."""
        if is_mean_over_tokens and not self.has_mean_loss:
            return 1 if share.own else 0
        return share.factor(self.world_size)


def range_over_ranks(own: Tensor, ddp: DistributedDataParallel) -> tuple[list[Any], list[Any]]:
    """The smallest and the largest of each number over the ranks of a module, which all call it."""
    limits = torch.stack([-own, own]).to(next(ddp.parameters()).device)
    dist.all_reduce(limits, op=dist.ReduceOp.MAX, group=ddp.process_group)
    return (-limits[0]).tolist(), limits[1].tolist()


def install(modules: Modules) -> None:
    """Change DistributedDataParallel in this process."""
    plain_init, plain_forward = DistributedDataParallel.__init__, DistributedDataParallel.forward

    @functools.wraps(plain_init)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        plain_init(self, *args, **kwargs)
        modules.add(self)

    @functools.wraps(plain_forward)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        modules.begin(self, (*args, *kwargs.values()))
        weight = modules.weight()
        if weight is None:
            return plain_forward(self, *args, **kwargs)  # type: ignore[no-untyped-call]
        args, kwargs = unweighted((args, kwargs), weight)
        output = plain_forward(self, *args, **kwargs)  # type: ignore[no-untyped-call]
        return weighted(output, weight)

    DistributedDataParallel.__init__ = init  # type: ignore[method-assign]
    DistributedDataParallel.forward = forward  # type: ignore[method-assign]
