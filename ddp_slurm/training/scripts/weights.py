"""The weight of a module's call: in the backward of its outputs, and off again at its inputs.

At the inputs, so that it is the weight of the module's own parameters alone: a generator whose
images a discriminator judges, each in DistributedDataParallel, has one weight and not two, and the
gradient of the inputs (adversarial examples) is that of the script.
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from ddp_slurm.training.scripts.errors import UnevenError


class _Weighted(torch.autograd.Function):
    """The identity; its backward multiplies by a factor."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, weight: "CallWeight") -> Tensor:
        ctx.weight = weight
        # A copy: the script may change it in place, which a view made here would forbid.
        return output.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        if torch.is_grad_enabled():
            raise UnevenError(
                "the gradient of the model's outputs is part of the loss (create_graph=True, as in "
                "a gradient penalty), and would get the weight of this rank's samples twice. "
                "Weight the loss in the script instead (loss_weight, see docs/recipes.md)"
            )
        factor = ctx.weight.factor()
        if factor == 0:  # also of a loss that is not finite
            return torch.zeros_like(gradient), None
        return gradient * factor, None


class CallWeight:
    """Of one call: asked for in the backward, when the script has computed its loss."""

    def __init__(self, factor: Callable[[], float]) -> None:
        self._factor = factor
        self._known: float | None = None

    def factor(self) -> float:
        if self._known is None:
            self._known = self._factor()
        return self._known


class _Unweighted(torch.autograd.Function):
    """The identity; its backward divides by the factor of the call that it is an input of."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: CallWeight) -> Tensor:
        ctx.weight = weight
        return input.clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (gradient,) = gradients
        factor = ctx.weight.factor()
        return gradient / factor if factor else gradient, None


def weighted(output: Any, weight: CallWeight) -> Any:
    """What a module returned, with the call's factor in the backward of every tensor in it.

    Raises UnevenError for an object whose tensors cannot be found.
    """

    def refuse(unknown: Any) -> Any:
        raise UnevenError(
            f"the model returns an object of type {type(unknown).__name__}, whose tensors cannot "
            "be found. Return tensors in a tuple, list, dict or dataclass"
        )

    return _changed(output, lambda tensor: _Weighted.apply(tensor, weight), refuse)


def unweighted(inputs: Any, weight: CallWeight) -> Any:
    """A call's arguments, without its factor in the gradient that any of them gets."""
    return _changed(inputs, lambda tensor: _Unweighted.apply(tensor, weight), lambda other: other)


def _changed(value: Any, change: Callable[[Tensor], Tensor], other: Callable[[Any], Any]) -> Any:
    """A copy in which the tensors with a gradient are changed; the value itself if none has one."""
    if isinstance(value, Tensor):
        return change(value) if value.requires_grad else value
    if value is None or isinstance(value, str | bytes | int | float):
        return value
    if isinstance(value, Mapping):
        before = {key: value[key] for key in value}
    elif isinstance(value, list | tuple):
        before = dict(enumerate(value))
    elif dataclasses.is_dataclass(value):
        before = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    else:
        return other(value)
    after = {key: _changed(part, change, other) for key, part in before.items()}
    if all(after[key] is before[key] for key in before):
        return value
    return _with_parts(value, after)


def _with_parts(value: Any, parts: dict[Any, Any]) -> Any:
    if isinstance(value, list | tuple):
        values = list(parts.values())
        return type(value)(*values) if hasattr(value, "_fields") else type(value)(values)
    result = copy.copy(value)
    for key, part in parts.items():
        if isinstance(value, Mapping):  # also Hugging Face's ModelOutput, whose attributes are keys
            result[key] = part
        else:
            object.__setattr__(result, key, part)
    return result
