"""A rank's micro-batches, one after another; one that does not fit the memory any more is halved.

The step goes on where it was, with the same gradient, and no other rank notices anything but the
time. What has happened when memory runs out decides how:

- before the model's forward has returned: nothing. The halves take the micro-batch's place.
- later: backward has given some parameters their gradient, and with the last micro-batch
  DistributedDataParallel may be summing the first buckets over the ranks. These gradients are
  complete: autograd adds to a parameter once in a backward, at the end. So the halves compute the
  gradients of the other parameters only, at leaves that share their memory, and one backward
  delivers the sums to the parameters, where DistributedDataParallel waits for them.
"""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _NormBase
from torch.nn.parallel import DistributedDataParallel

from ddp_slurm.training.memory.out_of_memory import free_memory, is_out_of_memory
from ddp_slurm.training.memory.search import MemoryTooSmall
from ddp_slurm.training.uneven.gradients import has_sync_batchnorm, no_sample_loss

Forward = Callable[[Tensor], Any]
Count = Callable[[], None]
LossOf = Callable[[Forward, Tensor, Tensor], tuple[Tensor, Count] | None]
"""The model, inputs and targets to what backward starts from, and a function that counts the loss
once backward is done; None for a batch without samples, or without weight."""


class Passes:
    """Runs forward and backward of micro-batches.

    Args:
        model: with DistributedDataParallel, or, in a world of one rank, without.
        loss_of: see LossOf.
        most_at_once: the most samples of one micro-batch.
        place: this rank, for a message.
    """

    def __init__(self, model: nn.Module, loss_of: LossOf, most_at_once: int, place: str) -> None:
        self.model = model
        self.most_at_once = most_at_once
        """Halved whenever memory runs out."""
        self._loss_of = loss_of
        self._place = place
        self._ddp = model if isinstance(model, DistributedDataParallel) else None
        self._inner = model if self._ddp is None else self._ddp.module
        self._parameters = {n: p for n, p in self._inner.named_parameters() if p.requires_grad}
        self._layers = [m for m in self._inner.modules() if isinstance(m, _NormBase)]
        self._marks: list[object] | None = None

    def run(self, inputs: Tensor, targets: Tensor, *, is_last: bool) -> None:
        """Add a micro-batch's gradient; with the last one the sum over the ranks begins."""
        parts = -(-len(targets) // self.most_at_once)
        if parts > 1 and not has_sync_batchnorm(self._inner):
            self._run_parts(evenly(inputs, targets, parts), is_last)
            return
        updates = [_updates(layer) for layer in self._layers]
        try:
            with self._reduction(is_last):
                self._attempt(inputs, targets)
            return
        except RuntimeError as error:
            self.halve(error, len(targets))
        device = targets.device
        free_memory(device)
        with self._unchanged_statistics(updates):
            if self._marks is None:
                self._run_parts(evenly(inputs, targets, 2), is_last)
            else:
                self._complete(inputs, targets, self._marks, is_last)

    def _attempt(self, inputs: Tensor, targets: Tensor) -> None:
        self._marks = None
        found = self._loss_of(self._forward, inputs, targets)
        if found is None:
            no_sample_loss(self.model).backward()  # type: ignore[no-untyped-call]
            return
        loss, count = found
        loss.backward()  # type: ignore[no-untyped-call]
        count()

    def _forward(self, inputs: Tensor) -> Any:
        outputs = self.model(inputs)
        self._marks = [_mark(parameter) for parameter in self._parameters.values()]
        return outputs

    def _run_parts(self, parts: Sequence[tuple[Tensor, Tensor]], is_last: bool) -> None:
        for i, part in enumerate(parts):
            self.run(*part, is_last=is_last and i + 1 == len(parts))

    def halve(self, error: RuntimeError, samples: int) -> int:
        """The most samples at once from now on.

        Raises ``error`` if it is not a lack of memory, and MemoryTooSmall where fewer samples are
        of no help.
        """
        if not is_out_of_memory(error):
            raise error
        if has_sync_batchnorm(self._inner):
            raise MemoryTooSmall(
                f"{self._place} ran out of memory with {samples} samples at once, and with "
                "SyncBatchNorm no rank can halve its micro-batch alone; set a smaller micro_batch"
            ) from error
        if samples < 2:
            raise MemoryTooSmall(
                f"{self._place} ran out of memory with {samples} samples at once; use a smaller "
                "model, or stop what else uses its GPU"
            ) from error
        self.most_at_once = min(self.most_at_once, -(-samples // 2))
        print(
            f"{self._place} ran out of memory with {samples} samples at once; goes on with "
            f"{self.most_at_once}, in the same step",
            flush=True,
        )
        return self.most_at_once

    def _complete(
        self, inputs: Tensor, targets: Tensor, marks: list[object], is_last: bool
    ) -> None:
        """Give the gradient of a failed micro-batch to the parameters that did not get it."""
        rest = {
            name: parameter
            for (name, parameter), mark in zip(self._parameters.items(), marks, strict=True)
            if _mark(parameter) == mark
        }
        gradients: dict[str, Tensor] | None = None
        while gradients is None:
            try:
                gradients = self._gradients(inputs, targets, rest)
            except RuntimeError as error:
                self.halve(error, self.most_at_once)
            if gradients is None:
                free_memory(targets.device)
        owed = {name: rest[name] for name in gradients}
        _Delivery.apply(list(gradients.values()), *owed.values()).backward()
        if is_last and self._ddp is not None and self._ddp.require_backward_grad_sync:
            self._ddp.reducer._check_reducer_finalized()

    def _gradients(
        self, inputs: Tensor, targets: Tensor, rest: dict[str, nn.Parameter]
    ) -> dict[str, Tensor]:
        """Of the whole micro-batch in parts, without DistributedDataParallel."""
        leaves = {
            name: parameter.detach().requires_grad_(name in rest)
            for name, parameter in self._parameters.items()
        }

        def forward(part: Tensor) -> Any:
            return functional_call(self._inner, leaves, (part,))

        counts = []
        for part in evenly(inputs, targets, -(-len(targets) // self.most_at_once)):
            found = self._loss_of(forward, *part)
            if found is not None:
                loss, count = found
                loss.backward()  # type: ignore[no-untyped-call]
                counts.append(count)
        for count in counts:
            count()
        gradients = {name: leaves[name].grad for name in rest}
        return {name: gradient for name, gradient in gradients.items() if gradient is not None}

    def _reduction(self, is_last: bool) -> AbstractContextManager[object]:
        """Only the last micro-batch's backward sends gradients."""
        if is_last or self._ddp is None:
            return contextlib.nullcontext()
        context: AbstractContextManager[object] = self._ddp.no_sync()
        return context

    @contextlib.contextmanager
    def _unchanged_statistics(self, updates: Sequence[int]) -> Iterator[None]:
        """Inside, layers that have seen the failed micro-batch do not see it a second time."""
        pairs = zip(self._layers, updates, strict=True)
        changed = [layer for layer, before in pairs if _updates(layer) != before]
        saved = [(buffer, buffer.clone()) for layer in changed for buffer in layer.buffers()]
        yield
        with torch.no_grad():
            for buffer, content in saved:
                buffer.copy_(content)


class _Delivery(torch.autograd.Function):
    """A zero whose backward gives each parameter its gradient."""

    @staticmethod
    def forward(ctx: Any, gradients: list[Tensor], *parameters: Tensor) -> Tensor:
        ctx.gradients = gradients
        return parameters[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *zero: Tensor) -> tuple[Tensor | None, ...]:
        return None, *ctx.gradients


def evenly(inputs: Tensor, targets: Tensor, parts: int) -> list[tuple[Tensor, Tensor]]:
    """So many parts, whose sizes differ by one sample at most."""
    ends = [len(targets) * i // parts for i in range(parts + 1)]
    slices = [slice(ends[i], ends[i + 1]) for i in range(parts)]
    return [(inputs[part], targets[part]) for part in slices]


def _mark(parameter: nn.Parameter) -> object:
    """Changes with the gradient: autograd adds in place, DistributedDataParallel moves it."""
    gradient = parameter.grad
    return None if gradient is None else (gradient.data_ptr(), gradient._version)


def _updates(layer: _NormBase) -> int:
    """Grows with each update of the running statistics."""
    batches = layer.num_batches_tracked
    return 0 if batches is None else batches._version
