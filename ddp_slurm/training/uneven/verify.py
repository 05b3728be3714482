"""The gradient on uneven shares beside that of one process with the whole batch."""

import copy
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils._pytree import tree_leaves, tree_map_only

from ddp_slurm.balance import apportion, planned_shares
from ddp_slurm.console import table
from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.training.uneven.gradients import LossFunction
from ddp_slurm.training.uneven.sampler import rank_span

ALLOWED = 1e-3
"""The largest relative difference that rounding explains in float32 after a few steps."""
DRAWS = ("Dropout", "Dropout1d", "Dropout2d", "Dropout3d", "AlphaDropout")
OWN_STATISTICS = ("BatchNorm1d", "BatchNorm2d", "BatchNorm3d")

Gradients = dict[str, Tensor]
"""By the names of the parameters."""


class Recording(NamedTuple):
    """The gradients of some steps."""

    steps: list[Gradients]
    layers: list[str]
    """The kinds of layers of the models."""


@dataclass(frozen=True)
class GradientCheck:
    """What ``verify`` found; its text is the table that ``ddp-slurm verify`` prints."""

    differences: dict[str, float]
    """By module: the largest difference of the gradient over all steps, relative to the largest
    element of the module's gradient in one process."""
    steps: int
    """Steps that were compared."""
    cause: str | None
    """The likely cause of the difference; None where there is none."""

    @property
    def is_exact(self) -> bool:
        """Whether the gradients are the same, but for rounding in float32."""
        return self.cause is None

    def __str__(self) -> str:
        rows = [(group or "(the model)", f"{x:.1e}") for group, x in self.differences.items()]
        text = table([("PARAMETERS", "LARGEST RELATIVE DIFFERENCE"), *sorted(rows)])
        if self.cause is None:
            return f"{text}\nthe same gradient in {self.steps} steps"
        return f"{text}\nanother gradient; likely cause: {self.cause}"


def verify(
    model: nn.Module,
    loss_function: LossFunction,
    data: Iterable[tuple[Any, Any]],
    shares: Sequence[int] | None = None,
    steps: int = 3,
) -> GradientCheck:
    """Compare the gradient of uneven shares with that of the whole batch, before you train.

    In one process the shares are computed one after another and added up with their weights. Where
    the ranks of a job call it, all with the same ``model`` and ``data``, each computes its own
    share on its own card. The model, its gradients and the random state stay as they were; the
    parameters are not changed between the steps.

    Args:
        model: on its device, in the mode in which it is trained.
        loss_function: (outputs, targets) to the mean loss over the samples.
        data: global batches (inputs, targets), such as a DataLoader; tensors, or lists and dicts
            of them, with the samples in the first dimension.
        shares: of the ranks, in proportion; default the job's, else 1, 2 and 4.
        steps: how many batches to compare, at most.

    Raises DdpSlurmError for data that cannot be divided.
    """
    is_world = dist.is_initialized() and dist.get_world_size() > 1
    if shares is None:
        shares = planned_shares(7 * 840, dist.get_world_size()) if is_world else (1, 2, 4)
    inner = model.module if isinstance(model, DistributedDataParallel) else model
    trial = copy.deepcopy(inner)
    device = next(trial.parameters()).device
    own = [dist.get_rank()] if is_world else range(len(shares))
    whole, parts = [], []
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices), torch.backends.cudnn.flags(allow_tf32=False):
        for batch in islice(data, steps):
            on_device = tree_map_only(Tensor, lambda part: part.to(device), tuple(batch))
            whole.append(_gradient(trial, loss_function, on_device, [_samples(on_device)], [0]))
            counts = apportion(_samples(on_device), list(shares))
            parts.append(_gradient(trial, loss_function, on_device, counts, own))
    if not whole:
        raise DdpSlurmError("verify: data has no batch")
    if is_world:
        for gradients in parts:
            for gradient in gradients.values():
                dist.all_reduce(gradient)
    layers = sorted({type(layer).__name__ for layer in trial.modules()})
    return compare(Recording(whole, layers), Recording(parts, layers))


def _samples(batch: Any) -> int:
    sizes = {len(leaf) for leaf in tree_leaves(batch) if isinstance(leaf, Tensor) and leaf.ndim}
    if len(sizes) != 1:
        raise DdpSlurmError(
            "verify: expected batches (inputs, targets) of tensors with the samples in the first "
            f"dimension, got sizes {sorted(sizes)}"
        )
    return sizes.pop()


def _gradient(
    model: nn.Module, loss_function: LossFunction, batch: Any, counts: list[int], own: Iterable[int]
) -> Gradients:
    """The sum over the ``own`` ranks of their part of the mean over all ``counts`` samples."""
    total = sum(counts)
    model.zero_grad()
    for rank in own:
        first, last = rank_span(counts, rank)
        if first == last:
            continue
        own_rows = partial(_rows, first=first, last=last)
        inputs, targets = tree_map_only(Tensor, own_rows, batch)
        loss = loss_function(model(inputs), targets) * (counts[rank] / total)
        loss.backward()  # type: ignore[no-untyped-call]
    return {
        name: torch.zeros_like(p, dtype=torch.float64) if p.grad is None else p.grad.double()
        for name, p in model.named_parameters()
        if p.requires_grad
    }


def _rows(part: Tensor, first: int, last: int) -> Tensor:
    return part[first:last] if part.ndim else part


def compare(whole: Recording, ranks: Recording) -> GradientCheck:
    """The same steps of one process and of uneven ranks."""
    found = _differences(whole.steps, ranks.steps)
    is_exact = max(found.values()) <= ALLOWED
    return GradientCheck(found, len(whole.steps), None if is_exact else _cause(whole, ranks))


def _differences(whole: list[Gradients], ranks: list[Gradients]) -> dict[str, float]:
    found: dict[str, float] = {}
    for alone, together in zip(whole, ranks, strict=True):
        for group in {name.rpartition(".")[0] for name in alone}:
            names = [name for name in alone if name.rpartition(".")[0] == group]
            scale = max(float(alone[name].abs().max()) for name in names) or 1.0
            largest = max(_distance(alone[name], together.get(name)) for name in names)
            found[group] = max(found.get(group, 0.0), largest / scale)
    return found


def _distance(one: Tensor, other: Tensor | None) -> float:
    distance = float((one - (torch.zeros_like(one) if other is None else other)).abs().max())
    return distance if distance == distance else float("inf")


def _cause(whole: Recording, ranks: Recording) -> str:
    """Why the gradients differ, as far as the recordings show it."""
    layers = set(whole.layers)
    if layers & set(DRAWS):
        return "Dropout draws other masks for other batches: set its p to 0 for the comparison"
    if layers & set(OWN_STATISTICS):
        return (
            "BatchNorm normalises by each rank's own samples, as DDP does; SyncBatchNorm uses "
            "those of the whole batch"
        )
    alone, together = whole.steps[0], ranks.steps[0]
    first = torch.cat([alone[name].flatten() for name in alone])
    others = [together.get(name, torch.zeros_like(alone[name])) for name in alone]
    second = torch.cat([gradient.flatten() for gradient in others])
    factor = float((first @ second) / (first @ first))
    if torch.allclose(second, factor * first, atol=1e-3 * float(first.abs().max())):
        return (
            f"the ranks' gradient is {factor:.3g} times that of one process: the loss is scaled by "
            "the number of ranks"
        )
    return (
        "the loss is not a mean over the samples (a sum, a mean over tokens or class weights), or "
        "the two runs took other samples: seed the script, and its augmentation"
    )
