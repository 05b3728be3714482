"""A learning rate that differs by rank is refused: the ranks' parameters would drift apart.

It depends on numbers of a rank alone, such as the samples that it has seen, which are the same on
all ranks with equal shares.
"""

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch.nn.parallel import DistributedDataParallel
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ddp_slurm.training.scripts.errors import UnevenError
from ddp_slurm.training.scripts.modules import Modules, range_over_ranks


def install(modules: Modules) -> None:
    """Compare the ranks' rates at the steps 1, 2, 4, 8, ... of each optimizer: it waits for all."""
    steps: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def before_step(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        steps[optimizer] = step = steps.get(optimizer, 0) + 1
        if step & (step - 1) == 0:
            ddp = _module_of(optimizer, modules.alive())
            if ddp is not None:
                _compare(optimizer, ddp)

    register_optimizer_step_pre_hook(before_step)


def _module_of(
    optimizer: torch.optim.Optimizer, candidates: list[DistributedDataParallel]
) -> DistributedDataParallel | None:
    """The module that all ranks train with this optimizer; None if one rank may use it alone."""
    own = {id(one) for group in optimizer.param_groups for one in group["params"]}
    for ddp in candidates:
        if any(id(parameter) in own for parameter in ddp.parameters()):
            return ddp
    return None


def _compare(optimizer: torch.optim.Optimizer, ddp: DistributedDataParallel) -> None:
    """Raises UnevenError on all ranks."""
    rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
    if not rates:
        return
    # as float32, which every device has; the last bits of a float64 may differ by a card's libm
    own = torch.tensor([min(rates), max(rates)], dtype=torch.float32)
    for low, high in zip(*range_over_ranks(own, ddp), strict=True):
        if high - low > 1e-5 * abs(high):
            raise UnevenError(
                f"the learning rate of a step differs by rank: {low:g} to {high:g}. It depends "
                "on numbers of each rank alone, such as the samples that it has seen. Make it "
                "depend on steps, or on the samples of all ranks"
            )
