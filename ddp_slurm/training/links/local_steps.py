"""Local steps: every rank steps by itself, and now and then the parameters are averaged.

Each rank takes ``steps`` optimizer steps with the gradient of its own samples, whose optimizer
state stays its own. Then the changes of the parameters since the last average, weighted by the
ranks' shares of the batch, are summed in the background while the ranks take the next steps; some
steps later the sum moves the common point, the anchor, by an outer step with Nesterov momentum. A
rank continues from the anchor plus what it has done meanwhile.

The loss weight that makes DDP's mean exact is a factor ``world size * share`` on this rank's
gradient; here it is divided out again. With one local step, plain SGD, no outer momentum and no
delay the result is therefore that of the exact exchange, whatever the last batch holds.

Sources: local SGD, Stich 2018, arXiv:1805.09767; the outer step is DiLoCo's, Douillard et al.
2023, arXiv:2311.08105 (with its learning rate of 0.7 and momentum of 0.9, for AdamW and hundreds of
steps; here 1 and 0.5, near SlowMo's for SGD, Wang et al. 2019, arXiv:1910.00643); a mean that comes
late, to which a rank adds what it has done meanwhile, is CoCoD-SGD's, Shen et al. 2019, and
DaSGD's, Zhou et al. 2020, arXiv:2006.00441.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.training.links.exchange import Exchange

OUTER_MOMENTUM = 0.5
LONG_PERIOD = 16
"""Steps. Over fewer the optimizer's own momentum carries the common direction on."""


@dataclass(frozen=True)
class LocalConfig:
    """Settings of local steps."""

    steps: int
    """Optimizer steps between two averages."""
    outer_lr: float = 1.0
    """The part of the mean change by which the anchor moves."""
    outer_momentum: float | None = None
    """Nesterov momentum of the anchor. None: 0.5 from LONG_PERIOD steps on, 0 below."""
    delay: int | None = None
    """Steps from the start of an average to its use; the exchange has this long to end unnoticed.
    None: half of ``steps``. 0: every rank waits for it. A delay of ``steps`` makes training with
    momentum unstable."""

    @property
    def momentum(self) -> float:
        if self.outer_momentum is None:
            return OUTER_MOMENTUM if self.steps >= LONG_PERIOD else 0.0
        return self.outer_momentum

    @property
    def steps_of_delay(self) -> int:
        return self.steps // 2 if self.delay is None else min(self.delay, self.steps)


class LocalSteps:
    """Keeps the ranks of one model together. All ranks make it, after ``wrap_model``.

    Args:
        model: its parameters are equal on all ranks.
        optimizer: over its parameters.
        shares: samples of the global batch of each rank.
        exchange: sums the changes.
        control: a gloo group over all ranks.
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        optimizer: Optimizer,
        shares: Sequence[int],
        exchange: Exchange,
        control: dist.ProcessGroup,
        config: LocalConfig,
    ) -> None:
        rank = dist.get_rank(control)
        self.config = config
        self.optimizer = optimizer
        self._parameters = [p for p in model.module.parameters() if p.requires_grad]
        self._exchange = exchange
        self._control = control
        self._weight = shares[rank] / sum(shares)
        self._anchor = self._flat()
        self._velocity = torch.zeros_like(self._anchor)
        self._sent = self._anchor
        self._pending: Future[Tensor] | None = None
        self._asked: tuple[dist.Work, Tensor] | None = None
        self._steps = 0
        self.steps_since_sent = 0
        # DDP's own reduction is off, as inside of no_sync.
        model.require_backward_grad_sync = False
        factor = self._weight * len(shares)
        if factor not in (0.0, 1.0):
            for parameter in self._parameters:
                parameter.register_hook(partial(torch.mul, other=1 / factor))
        optimizer.register_step_post_hook(self._after_step)

    def average(self) -> None:
        """Give all ranks the same parameters, bit by bit. All ranks call it."""
        self._finish()
        self._ask_for_steps()
        if self.steps_since_sent > 0:
            self._start()
            self._finish()
        self._check_steps()

    @property
    def is_averaged(self) -> bool:
        """Whether all ranks have the same parameters."""
        return self._pending is None and self.steps_since_sent == 0

    def state(self) -> dict[str, Any]:
        """After ``average``, for a snapshot: what all ranks have in common besides the model."""
        timing = [self.config.steps, self.config.steps_of_delay]
        return {"velocity": self._velocity.cpu(), "timing": timing}

    @torch.no_grad()
    def load_state(self, state: dict[str, Any] | None) -> None:
        """Continue from the model's present parameters, which are equal on all ranks.

        Args:
            state: None after a run that exchanged in another way.
        """
        self._anchor = self._flat()
        self._velocity.zero_()
        if state is not None:
            self._velocity.copy_(state["velocity"])
            steps, delay = state.get("timing", (0, 0))
            if steps == self.config.steps:  # the delay is measured at a run's start
                self.config = replace(self.config, delay=delay)
        self._pending = None
        self.steps_since_sent = 0

    def _after_step(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        self._steps += 1
        self.steps_since_sent += 1
        if self.steps_since_sent >= self.config.steps_of_delay:
            self._finish()
        if self.steps_since_sent == self.config.steps:
            self._ask_for_steps()
            self._start()
            if self.config.steps_of_delay == 0:
                self._finish()

    @torch.no_grad()
    def _start(self) -> None:
        self._sent = self._flat()
        self._pending = self._exchange.start((self._sent - self._anchor) * self._weight)
        self.steps_since_sent = 0

    @torch.no_grad()
    def _finish(self) -> None:
        """Apply the average that was begun last."""
        if self._pending is None:
            return
        self._check_steps()
        change = self._pending.wait()
        self._pending = None
        momentum = self.config.momentum
        self._velocity.mul_(momentum).add_(change)
        self._anchor.add_(change + momentum * self._velocity, alpha=self.config.outer_lr)
        if self.steps_since_sent == 0:
            self._write(self._anchor)
        else:
            self._write(self._flat() + (self._anchor - self._sent))

    def _ask_for_steps(self) -> None:
        """Begin to compare the ranks' numbers of steps."""
        ends = torch.tensor([self._steps, -self._steps])
        work = dist.all_reduce(ends, op=dist.ReduceOp.MAX, group=self._control, async_op=True)
        self._asked = (work, ends)

    def _check_steps(self) -> None:
        """A rank with more steps than another would average at another point, silently."""
        if self._asked is None:
            return
        work, ends = self._asked
        self._asked = None
        work.wait()
        most, least = ends[0].item(), -ends[1].item()
        if most != least:
            raise DdpSlurmError(
                f"--comm local:{self.config.steps}: the ranks have taken from {least} to {most} "
                "optimizer steps; all must take equally many. A GradScaler skips steps on single "
                "ranks: use bf16, which needs none"
            )

    def _flat(self) -> Tensor:
        return torch.cat([parameter.detach().flatten() for parameter in self._parameters])

    def _write(self, values: Tensor) -> None:
        parts = torch.split(values, [parameter.numel() for parameter in self._parameters])
        for parameter, part in zip(self._parameters, parts, strict=True):
            parameter.copy_(part.view_as(parameter))
