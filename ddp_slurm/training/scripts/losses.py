"""Losses whose mean is not over samples are refused: each rank would divide by its own sum."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from ddp_slurm.console import say
from ddp_slurm.training.scripts.errors import UnevenError, users_line
from ddp_slurm.training.scripts.modules import Modules

REMEDY = (
    "Compute it with reduction='sum' and divide by the sum of the weights over all ranks, times "
    "the number of ranks; or weight it in the script (weighted_loss_factor, see docs/training.md)"
)


class _Sums:
    """Says once that a sum is only exact if the script divides it by the samples of this rank."""

    def __init__(self, modules: Modules) -> None:
        self._modules = modules
        self._is_said = False

    def note(self, name: str, reduction: object, input: Tensor) -> None:
        modules = self._modules
        if self._is_said or reduction != "sum" or modules.is_mean_over_tokens:
            return
        if _is_weighted(input, modules):
            self._is_said = True
            say(
                f"uneven: {users_line()}: {name} with reduction='sum' is exact only if it is "
                "divided by the number of samples of the same batch, len(x), and not by a constant "
                "such as the batch size"
            )


def install(modules: Modules) -> None:
    """Check cross_entropy and nll_loss in this process, and note where other means are taken."""
    sums = _Sums(modules)
    for name in ("cross_entropy", "nll_loss"):
        setattr(functional, name, _checked(getattr(functional, name), modules, sums))
    for name in ("mse_loss", "binary_cross_entropy_with_logits"):
        setattr(functional, name, _noted(getattr(functional, name), modules, sums))


def _noted(function: Callable[..., Tensor], modules: Modules, sums: _Sums) -> Callable[..., Tensor]:
    @functools.wraps(function)
    def noted(input: Tensor, *args: Any, **options: Any) -> Tensor:
        modules.has_mean_loss |= options.get("reduction", "mean") == "mean"
        sums.note(function.__name__, options.get("reduction"), input)
        return function(input, *args, **options)

    return noted


def _checked(
    function: Callable[..., Tensor], modules: Modules, sums: _Sums
) -> Callable[..., Tensor]:
    looks = _Looks()

    @functools.wraps(function)
    def checked(
        input: Tensor,
        target: Tensor,
        weight: Tensor | None = None,
        size_average: bool | None = None,
        ignore_index: int = -100,
        *args: Any,
        **options: Any,
    ) -> Tensor:
        is_mean = options.get("reduction", "mean") == "mean" and len(args) < 2
        modules.has_mean_loss |= is_mean
        sums.note(function.__name__, options.get("reduction"), input)
        if is_mean and _is_weighted(input, modules):
            _refuse_class_weights(function.__name__, weight)
            samples = modules.share.size if modules.share else 1
            looks.refuse_ignored(function.__name__, target, ignore_index, samples)
        return function(input, target, weight, size_average, ignore_index, *args, **options)

    return checked


def _is_weighted(input: Tensor, modules: Modules) -> bool:
    if torch.compiler.is_compiling() or not torch.is_grad_enabled() or not input.requires_grad:
        return False
    share = modules.share
    return share is not None and share.factor(modules.world_size) not in (0, 1)


def _refuse_class_weights(name: str, weight: Tensor | None) -> None:
    if weight is not None:
        raise UnevenError(
            f"{users_line()}: {name} with class weights is divided by the sum of the targets' "
            f"weights, which differs by rank. {REMEDY}"
        )


class _Looks:
    """Looks for ignored targets at the calls 1, 2, 4, 8, ...: a look waits for the GPU.

    Equally many in each sample are harmless: a causal language model ignores each text's last word.
    """

    def __init__(self) -> None:
        self._calls = 0
        self._found: Tensor | None = None

    def refuse_ignored(self, name: str, target: Tensor, ignore_index: int, samples: int) -> None:
        if target.is_floating_point():
            return
        found = _are_unlike(target == ignore_index, samples)
        self._found = found if self._found is None else self._found | found
        self._calls += 1
        if self._calls & (self._calls - 1) == 0 and bool(self._found):
            raise UnevenError(
                f"{users_line()}: {name} leaves out targets (ignore_index={ignore_index}) and is "
                f"divided by the number of the others, which differs by rank. {REMEDY}"
            )


def _are_unlike(ignored: Tensor, samples: int) -> Tensor:
    """Whether the samples, one after another in the batch, have different numbers of them."""
    if samples < 2 or ignored.numel() % samples:
        return ignored.any()
    counts = ignored.reshape(samples, -1).sum(1)
    return (counts != counts[0]).any()
