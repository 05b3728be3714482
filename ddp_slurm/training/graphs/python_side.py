"""What a model does in Python: a graph repeats its GPU work alone, with the numbers of one run."""

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ddp_slurm.training.random_state import random_state

PLAIN = (bool, int, float, str, type(None))
HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class PlainValues:
    """The numbers and switches of a model's modules, and which parameters need a gradient.

    Such as ``training``, a dropout rate that a schedule changes, or a layer that is frozen later.
    """

    def __init__(self, model: nn.Module) -> None:
        self._folders = [vars(module) for module in model.modules()]
        self._parameters = list(model.parameters())
        self._look_up_names()

    def now(self) -> list[object]:
        """To be compared with ``==``; 15 microseconds for ResNet-18, as it is part of each step."""
        try:
            values = [values_of(folder) for values_of, folder in self._getters]
        except KeyError:
            values = []
        sizes = [len(folder) for folder in self._folders]
        if not values or sizes != self._sizes:  # attributes have come or gone
            self._look_up_names()
            values = [values_of(folder) for values_of, folder in self._getters]
        needed = [parameter.requires_grad for parameter in self._parameters]
        return [values, sizes, needed]

    def _look_up_names(self) -> None:
        self._sizes = [len(folder) for folder in self._folders]
        self._getters: list[tuple[Callable[[Any], object], dict[str, Any]]] = []
        for folder in self._folders:
            names = [name for name, value in folder.items() if isinstance(value, PLAIN)]
            self._getters.append((operator.itemgetter(*names), folder))


def reason_of_hooks(model: nn.Module) -> str | None:
    """Which module has a hook, which would run while a graph is captured and never again."""
    for name, module in model.named_modules():
        if any(getattr(module, hooks) for hooks in HOOKS):
            return f"the module {name.removeprefix('model.')} has a hook"
    return None


def reason_of_gradients(model: nn.Module) -> str | None:
    """Which parameter gets no gradient, or has a hook that uses it; after a step without graphs."""
    for path, parameter in model.named_parameters():
        name = path.removeprefix("model.")
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            return f"the parameter {name} has a hook"
        if parameter.requires_grad and parameter.grad is None:
            return f"the parameter {name} gets no gradient"
    return None


def cpu_random_state() -> dict[str, Any]:
    """The states of the CPU's random generators, to be compared with ``==``."""
    state = random_state(torch.device("cpu"))
    return {**state, "torch": state["torch"].tolist()}
