"""Whether the steps of all ranks run as graphs: as asked for, or by timing both kinds."""

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from ddp_slurm.errors import DdpSlurmError
from ddp_slurm.training.adaptive.clock import StepClock
from ddp_slurm.training.exchange import all_gather_values
from ddp_slurm.training.graphs.compute import GraphedCompute
from ddp_slurm.training.process_group import World
from ddp_slurm.training.uneven.calibrate import wait_for_device

MODES = ("auto", "on", "off")
WARM_UP = 5
"""Steps before anything is timed: they load kernels and let cuDNN choose."""
TIMED = 8
"""Steps of each kind."""
SETTLING = 4
"""Steps with graphs before these are timed: two before the capture, the capture, one more."""
WORTH_IT = 0.97
"""The part of the other steps' time that graphs must stay below."""


class Graphs:
    """The graphs of all ranks, or none. All ranks make it, and take every step together.

    In steps with graphs no rank's backward exchanges gradients. One all-reduce follows, of the same
    bytes on every rank, so that a rank whose capture fails can go on without a graph.

    Args:
        compute: of this rank; None if ``reason`` is given.
        mode: one of MODES.
        reason: why there can be no graphs; the same on every rank.
        report: prints a line; on rank 0 only.
    """

    def __init__(
        self,
        compute: GraphedCompute | None,
        mode: str,
        reason: str | None,
        world: World,
        report: Callable[[str], None],
    ) -> None:
        if mode == "on" and reason is not None:
            raise DdpSlurmError(f"graphs='on' is not possible: {reason}; expected 'auto' or 'off'")
        if mode == "auto" and reason is not None and world.device.type == "cuda":
            report(f"graphs: none, since {reason}")
        self.in_use = False
        self._compute = None if mode == "off" or reason is not None else compute
        self._mode = mode
        self._world = world
        self._report = report
        self._steps = 0
        self._seconds: dict[bool, list[float]] = {False: [], True: []}

    def gradients(
        self,
        parts: Sequence[tuple[Tensor, Tensor]],
        factor: Tensor,
        clock: StepClock,
        *,
        is_whole: bool,
        samples: int | None,
    ) -> None:
        """Give the parameters the gradient of the whole global batch. While ``in_use``.

        Args:
            samples: those of the global batch, where its mean is one by the targets' weights.
        """
        assert self._compute is not None
        self._compute.begin_step()
        with clock.part():
            self._compute(parts, factor, is_whole=is_whole)
        if self._world.world_size > 1:
            self._compute.flat.sum_over_ranks()
        if samples is not None:
            self._compute.flat.make_mean(samples)

    def forget(self) -> None:
        """Capture again: the shares have changed."""
        if self._compute is not None:
            self._compute.forget()

    @contextlib.contextmanager
    def step(self, *, is_typical: bool) -> Iterator[None]:
        """Around an optimizer step; some are timed, and after the last of them a choice is made.

        Args:
            is_typical: a whole batch, without a check of the loss; the same on every rank.
        """
        if self._compute is None or not is_typical or self._is_settled:
            yield
            return
        self._begin_graphs()
        into_graphs = self._steps - WARM_UP - TIMED
        is_timed = into_graphs >= SETTLING if self.in_use else self._steps >= WARM_UP
        started = self._now() if is_timed else 0.0
        yield
        if is_timed:
            self._seconds[self.in_use].append(self._now() - started)
        self._steps += 1
        if len(self._seconds[True]) == TIMED:
            self._choose()

    @property
    def _is_settled(self) -> bool:
        return self.in_use and (self._mode == "on" or len(self._seconds[True]) == TIMED)

    def _begin_graphs(self) -> None:
        before = WARM_UP if self._mode == "on" else WARM_UP + TIMED
        if self.in_use or self._steps < before:
            return
        assert self._compute is not None
        reasons = all_gather_values(self._compute.reason_of_gradients(), self._world.control)
        found = [reason for reason in reasons if reason is not None]
        if found:
            self._report(f"graphs: none, since {found[0]}")
            self._compute = None
            return
        self.in_use = True

    def _now(self) -> float:
        wait_for_device(self._world.device)
        return time.perf_counter()

    def _choose(self) -> None:
        own = [statistics.median(self._seconds[kind]) for kind in (False, True)]
        rows = all_gather_values(own, self._world.control)
        without, with_graphs = (1000 * max(column) for column in zip(*rows, strict=True))
        numbers = f"a step takes {with_graphs:.3g} ms with, {without:.3g} ms without"
        if with_graphs < WORTH_IT * without:
            self._report(f"graphs: in use, {numbers}")
            return
        self._report(f"graphs: none, since they are not faster: {numbers}")
        self._compute = None
        self.in_use = False
