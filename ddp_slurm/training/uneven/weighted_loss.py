"""Losses whose mean is not over samples: class weights, ignored targets, tokens.

Such a loss is a sum over targets divided by the sum of their weights. With uneven ranks, and with
DDP on even ones, the mean of the ranks' means is not the mean over all targets: the sum of the
weights over all ranks has to divide it.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.training.uneven.gradients import LossFunction, loss_weight

TargetWeight = Callable[[Tensor], Tensor]
"""Targets to the sum of their weights: what the mean loss of these targets was divided by."""

TOLERANCE = 1e-3
"""The largest relative difference that rounding explains, of losses in float32."""
HALF_TOLERANCE = 2e-2
"""As ``TOLERANCE``, of losses in float16 or bfloat16."""


def weighted_loss_factor(own_weight: float, group: dist.ProcessGroup | None = None) -> float:
    """The factor for this rank's mean loss before ``backward``, if the mean is not over samples.

    All ranks call it in every optimizer step. A rank with the weight 0 (no samples, or all targets
    ignored) must use ``no_sample_loss``, since its own mean is 0/0.

    Args:
        own_weight: the sum of the weights that this rank's mean was divided by: the number of
            targets that are not ignored, the sum of their classes' weights, the number of tokens.
        group: a gloo group such as ``world.control``, so that no rank waits for its GPU; None is
            the default group.
    """
    total = sum_over_ranks(own_weight, group)
    return loss_weight(own_weight, total, dist.get_world_size(group)) if total else 0.0


def sum_over_ranks(value: float, group: dist.ProcessGroup | None = None) -> float:
    """The sum of a number over all ranks, which all call it.

    With several micro-batches in an optimizer step, give it the weight of all of them, and the
    result to ``loss_weight`` for each.
    """
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    total = torch.tensor(float(value), dtype=torch.float64, device=device)
    dist.all_reduce(total, group=group)
    return float(total.item())


class WeightedLoss:
    """A loss function together with the weights of its mean.

    The weights of ``cross_entropy``, ``nll_loss`` and their modules are known. Any other function
    is taken for a mean over samples, unless ``target_weight`` is given.

    Raises DdpSlurmError for a function that is known to give another reduction than the mean.
    """

    def __init__(self, function: LossFunction, target_weight: TargetWeight | None = None) -> None:
        self.function = function
        self._target_weight = target_weight
        self._sum_of: LossFunction | None = None
        if target_weight is None:
            self._use_known_weights()

    @property
    def is_sample_mean(self) -> bool:
        """Whether the weight of a batch is its number of samples, known without looking at it."""
        return self._target_weight is None

    @property
    def reason_against_graphs(self) -> str | None:
        """Why a graph cannot hold this loss; None where it can."""
        if self.is_sample_mean or self._sum_of is not None:
            return None
        return "target_weight is looked at on the CPU: a batch without any weight has no mean"

    def weight(self, targets: Tensor) -> float | Tensor:
        """The sum of the targets' weights: their number, or a float64 scalar on their device."""
        if self._target_weight is None:
            return len(targets)
        return torch.as_tensor(self._target_weight(targets), dtype=torch.float64).to(targets.device)

    def is_empty(self, targets: Tensor) -> bool:
        """Whether there is nothing to take the mean of: no targets, or only some of weight 0.

        Waits for the GPU if ``target_weight`` was given.
        """
        if len(targets) == 0:
            return True
        has_sum = self._sum_of is not None
        return not self.is_sample_mean and not has_sum and float(self.weight(targets)) == 0

    def value_and_factor(self, outputs: Tensor, targets: Tensor) -> tuple[Tensor, float | Tensor]:
        """A loss with a gradient, and the factor that makes it the sum over the targets."""
        if self._sum_of is not None:  # no 0/0 if all targets are ignored
            return self._sum_of(outputs, targets), 1.0
        return self.function(outputs, targets), self.weight(targets)

    @torch.no_grad()
    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise DdpSlurmError if the loss of a batch is not the mean of those of its two halves.

        The gradient would then depend on how the samples are divided among the ranks.
        """
        is_batch = isinstance(outputs, Tensor) and outputs.shape[:1] == targets.shape[:1]
        if not is_batch or len(targets) < 2:
            return
        devices = [outputs.device] if outputs.device.type == "cuda" else []
        half = len(targets) // 2
        parts = (slice(None), slice(half), slice(half, None))
        with torch.random.fork_rng(devices):
            losses = [self.function(outputs[part], targets[part]) for part in parts]
        whole, first, second = (float(loss) for loss in losses)
        weights = [float(self.weight(targets[part])) for part in parts[1:]]
        if 0 in weights:
            return
        both = (first * weights[0] + second * weights[1]) / sum(weights)
        is_half = losses[0].dtype in (torch.float16, torch.bfloat16)
        allowed = (HALF_TOLERANCE if is_half else TOLERANCE) * max(abs(whole), 1e-3)
        if abs(both - whole) > allowed:
            raise DdpSlurmError(
                f"the loss function {_name(self.function)} is not a mean over the samples: "
                f"{whole:.6g} for a batch of {len(targets)}, {both:.6g} as the mean of its halves. "
                "The gradient would depend on how samples are divided among the ranks. For a mean "
                "by weights (class weights, ignored targets, tokens) set "
                "TrainerConfig(target_weight=...) to a function of the targets that returns the "
                "sum of their weights; to train with it as it is set check_loss=False"
            )

    def _use_known_weights(self) -> None:
        known = _known_options(self.function)
        if known is None:
            return
        function, options = known
        reduction = options.pop("reduction", "mean")
        if reduction != "mean":
            raise DdpSlurmError(
                f"the loss function {_name(self.function)} has reduction={reduction!r}; "
                "expected 'mean'"
            )
        self._sum_of = functools.partial(function, **options, reduction="sum")
        self._target_weight = functools.partial(
            _class_weights, options.get("weight"), options.get("ignore_index", -100)
        )


def _known_options(loss_function: Any) -> tuple[Callable[..., Tensor], dict[str, Any]] | None:
    """The torch function behind a loss function and its keyword arguments, if its weights are
    known."""
    functions: dict[type, Callable[..., Tensor]] = {
        nn.CrossEntropyLoss: functional.cross_entropy,
        nn.NLLLoss: functional.nll_loss,
    }
    options = {}
    if type(loss_function) in functions:
        for name in ("weight", "ignore_index", "reduction", "label_smoothing"):
            if hasattr(loss_function, name):
                options[name] = getattr(loss_function, name)
        loss_function = functions[type(loss_function)]
    elif isinstance(loss_function, functools.partial) and not loss_function.args:
        options = dict(loss_function.keywords)
        loss_function = loss_function.func
    return (loss_function, options) if loss_function in functions.values() else None


def _class_weights(weight: Tensor | None, ignore_index: int, targets: Tensor) -> Tensor:
    """What cross_entropy's mean is divided by.

    Source: torch.nn.CrossEntropyLoss: the sum of the targets' class weights without ignored ones;
    for class probabilities (n, classes, ...) the number of positions.
    """
    if targets.is_floating_point():
        classes = targets.shape[1] if targets.ndim > 1 else targets.shape[0]
        return torch.tensor(targets.numel() / classes, dtype=torch.float64)
    counted = targets != ignore_index
    if weight is None:
        return counted.sum(dtype=torch.float64)
    classes_of_targets = torch.where(counted, targets, 0)
    return (weight[classes_of_targets] * counted).sum(dtype=torch.float64)


def _name(function: object) -> str:
    return getattr(function, "__name__", type(function).__name__)
